"""What goes wrong with a call, as its client sees it: a status, a sentence, the field that is to blame."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: one sentence for the client.
        param: the field of the request that is to blame.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @property
    def document(self) -> dict[str, Any]:
        """The body, in the form of OpenAI's errors."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def bad(param: str, message: str) -> ApiError:
    """A field whose value cannot be used."""
    return ApiError(400, message, param)
