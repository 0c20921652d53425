"""Errors as OpenAI's API words them; on the paths of Anthropic's, as that one does."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mmkv.engine.errors import CapacityError, ContextError, MmkvError, SessionError

RETRY_AFTER = 1  # seconds


class ApiError(Exception):
    """What a request is answered with when it fails.

    Attributes:
        status: the HTTP status; code, param: as in OpenAI's error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.extra = status, code, param, extra

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 507:  # OpenAI's client would send the turn twice more at once
            return {"x-should-retry": "false"}
        return {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else {}

    def on(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the object that a request to a path is answered with."""
        if path != MESSAGES and not path.startswith(f"{MESSAGES}/"):
            return self.status, self.body()
        status = 529 if self.status == 503 else self.status
        usual = "invalid_request_error" if status < 500 else "api_error"
        # By these words clients know that they have to sum up.
        too_long = self.code == "context_length_exceeded" and self.param == "messages"
        message = f"prompt is too long: {self}" if too_long else str(self)
        error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(status, usual), "message": message}
        if self.code is not None and self.code.startswith("thread_"):
            error["details"] = {"error_code": self.code}
        return status, {"type": "error", "error": error}

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        error = {
            "message": str(self),
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error | self.extra}


def invalid_value(param: str | None, message: str) -> ApiError:
    """Return the error of a field whose value cannot be; ``param``: its name, where it has one."""
    return ApiError(400, message, "invalid_value", param)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error of a request that asks for what this server cannot do."""
    return ApiError(400, message, "unsupported_parameter", param)


MESSAGES = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    507: "server_error",
}


def _descriptors_are_out(error: BaseException | None) -> bool:
    """Whether something failed for want of a file descriptor, whatever was made of that since."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def api_error(error: BaseException) -> ApiError:
    """Return what a request that met ``error`` is answered with."""
    if isinstance(error, ApiError):
        return error
    if _descriptors_are_out(error):
        return ApiError(
            503,
            "the server has as many files open as it may; try again, nothing is lost",
            "no_descriptors",
        )
    if isinstance(error, CapacityError):
        numbers = {"needed": error.needed, "committed": error.committed, "limit": error.limit}
        final = error.final
        code = "too_large_for_memory" if final else "no_room"
        return ApiError(400 if final else 503, str(error), code, None, unit=error.unit, **numbers)
    if isinstance(error, ContextError):
        return ApiError(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, SessionError):
        status, code = getattr(error, "status", 409), getattr(error, "code", "conflict")
        return ApiError(status, str(error), code)
    if isinstance(error, MmkvError):  # those of mmkv.server.media say their status
        status, code = getattr(error, "status", 400), getattr(error, "code", "invalid_value")
        return ApiError(status, str(error), code)
    return ApiError(500, "the server met an error of its own; its log has the details", "internal")


@contextlib.contextmanager
def reworded(reword: Callable[[ApiError], ApiError]) -> Iterator[None]:
    """Raise what fails within as an ApiError in the words of another API: ``reword`` puts it so."""
    try:
        yield
    except (ApiError, MmkvError) as error:
        raise reword(api_error(error)) from error


# What pydantic says of the types of a value that could be several things.
_OF_TYPES = re.compile(r"(str|int|float|constrained-\w+)$|[A-Z]\w*$|(list|dict|function)[-\[]")


def nearest(errors: Sequence[Any]) -> Any:
    """Return, of a value that could be several things, what came nearest to one."""
    return max(errors, key=lambda one: (len(one["loc"]), one["type"] != "string_type"))


def invalid(errors: Sequence[Any]) -> ApiError:
    """Return what pydantic found wrong with an object, in one line."""
    first = nearest(errors)
    extra = first["type"] == "extra_forbidden"
    names = [str(one) for one in first["loc"]]
    inner, last = names[:-1] if extra else names, names[-1:] if extra else []
    place = ".".join([*(one for one in inner if not _OF_TYPES.match(one)), *last])
    if not place.isprintable():  # a field of the request's own making
        place = ascii(place)[1:-1]
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    if extra:
        message = f"{place} is not a known field; leave it out"
    return ApiError(400, message[:500], "invalid_request", place[:200] or None)
