"""What can be wrong with a medium that a request names."""

from __future__ import annotations

from mmkv.engine.errors import InputError

BAD_FORM = 400
REFUSED = 403
LATE = 408  # clients try 408 again, and it is no fault of the server
TOO_LARGE = 413
UNREADABLE = 422
BUSY = 503


class MediaError(InputError):
    """A picture or video that cannot be had.

    Attributes:
        status: the HTTP status to answer with: 400 for a URL that cannot be followed, 403 for an
            address that is refused, 408 after a deadline, 413 for too many bytes, pixels or
            frames, 422 for content that cannot be decoded, 503 where those of other requests leave
            no room.
        code: the kind in one word, for an error's ``code`` field.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, _CODES[status]


_CODES = {
    BAD_FORM: "media_url",
    REFUSED: "media_refused",
    LATE: "media_timeout",
    TOO_LARGE: "media_too_large",
    UNREADABLE: "media_unreadable",
    BUSY: "media_waiting",
}
