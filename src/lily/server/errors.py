"""Failures as HTTP answers: OpenAI's error object, or Anthropic's on its endpoint."""

from __future__ import annotations

import logging
import re
from typing import Any

from lily.errors import (
    CancelledError,
    ContextOverflowError,
    DeviceError,
    LilyError,
    MessageError,
    OutOfMemoryError,
    SamplingError,
    TemplateError,
)

_log = logging.getLogger("lily.server")

# The place at the head of the library's messages, as in "messages[0].content is ...".
_PLACE = re.compile(r"([a-z_]+(?:\[[^\]\s]*\]|\.\w+)*) (?:is|are|holds|has|names|must|requires|and)\b")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A failure with its HTTP status. `param` names the field of the request, `extra` is added to the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}
        self.extra = extra or {}

    def to_openai(self) -> dict[str, Any]:
        """`{"error": {...}}` as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.extra}}

    def to_anthropic(self) -> dict[str, Any]:
        """`{"type": "error", "error": {...}}` as Anthropic's clients read it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, **self.extra}}

    def body(self, path: str) -> dict[str, Any]:
        """The object for an endpoint."""
        return self.to_anthropic() if path.startswith("/v1/messages") else self.to_openai()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400; the message begins with the place when there is one."""
    return ApiError(400, f"{param} {message}" if param else message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """Any failure as an answer. What is nobody's fault but ours is logged with its traceback and says little outside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        extra = {"tokens": error.tokens, "limit": error.limit}
        return ApiError(400, str(error), param="messages", code="context_length_exceeded", extra=extra)
    if isinstance(error, OutOfMemoryError):
        extra = {"needed_bytes": error.needed, "available_bytes": error.available}
        return ApiError(503, str(error), code="insufficient_memory", headers={"Retry-After": "10"}, extra=extra)
    if isinstance(error, CancelledError):
        return ApiError(503, str(error), code="cancelled", headers={"Retry-After": "5"})
    if isinstance(error, MessageError):
        return ApiError(400, str(error), param=error.path)
    if isinstance(error, SamplingError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, TemplateError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, ImportError):
        return ApiError(400, str(error), code="not_installed")
    if isinstance(error, (DeviceError, LilyError)):
        _log.error("%s", error)
        return ApiError(500, str(error), code="device_error" if isinstance(error, DeviceError) else None)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def request_error(error: Exception) -> ApiError:
    """A failure while a request was checked: wrong types and values are the caller's."""
    if isinstance(error, (TypeError, ValueError, RecursionError)) and not isinstance(error, LilyError):
        place = _PLACE.match(str(error))
        return ApiError(400, str(error)[:500], param=place[1] if place else None)
    return api_error(error)
