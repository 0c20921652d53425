"""Check JSON from files of others with pydantic; say in a few words what is wrong.

Imports pydantic, so it is imported only when such a file is read; torch is not needed.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from mmkv.engine.errors import shown


class InvalidFile(ValueError):
    """What is wrong with a file, in a few words."""


class Strict(BaseModel):
    """Takes no other type for the one that is asked for, and no other field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def parse(kind: Any, value: Any, is_json: bool = False) -> Any:
    """Return ``value`` as ``kind`` (a model, or any type with strict models inside).

    Args:
        is_json: whether ``value`` is JSON text.

    Raises:
        InvalidFile: it is not of this kind; names the first place that is not.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=_config(kind))
    try:
        return adapter.validate_json(value) if is_json else adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidFile(
            shown(f"{place}: {first['msg']}" if place else first["msg"], 200)
        ) from None


def _config(kind: Any) -> ConfigDict | None:
    # A model has its own, and takes none.
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    return None if is_model else ConfigDict(strict=True)
