"""Errors in the form that clients of OpenAI's API read: a status and {"error": {message, type, param, code}}.

The message says what is wrong with the request. Paths, stack traces and texts of unexpected exceptions are only
logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from outrider.core.failures import Busy
from outrider.lora_request import AdaptersInUse, UnknownAdapter, UnreadableAdapter

TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 413: "RequestTooLargeError", 429: "RateLimitError",
    500: "InternalServerError", 503: "ServiceUnavailableError", 504: "TimeoutError",
}
MESSAGES_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                  413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
INTERNAL = "the server failed to handle this request; its log says why"
PARAMS = re.compile(r"^(?:SamplingParams|PoolingParams): ")
OWNER = re.compile(r"^(\w+)\b")
PROMPTS = ("prompt", "messages", "input")  # fields that hold one, of which a body has one


class ApiError(Exception):
    """An error response with a status and a body. Any code of a route may raise it; the application sends it as the
    answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": TYPES.get(self.status, "APIError"), "param": self.param,
                          "code": self.status}}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the form of the API that the path belongs to: Anthropic's API wraps the error
        differently."""
        if not path.startswith("/v1/messages"):
            return self.body
        return {"type": "error", "error": self.body["error"] | {"type": MESSAGES_TYPES.get(self.status, "api_error")}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return a copy of the error in which engine parameters have the names of the body's fields. `names`: the
        body's name for each name in the message."""
        if self.param is None or self.param not in names:
            return self
        name = names[self.param]
        other = ApiError(self.status, str(self).replace(self.param, name), param=name)
        other.headers = self.headers
        return other


def bad_value(error: ValueError, fields: Any = (), names: Iterable[tuple[str, str]] = ()) -> ApiError:
    """Make the error for a request that the engine refused. Its message names the field first, if one field is at
    fault. `names`: the body's name for each name in the message."""
    if isinstance(error, AdaptersInUse | Busy):
        return ApiError(429, str(error), retry_after=1)
    if isinstance(error, UnknownAdapter):
        return ApiError(404, str(error), param="model")
    if isinstance(error, UnreadableAdapter):
        return ApiError(400, error.brief, param="lora_path" if "lora_path" in fields else "model")
    message = PARAMS.sub("", reduce(lambda text, name: text.replace(*name), names, str(error)))
    found = OWNER.match(message)
    owners = PROMPTS if message.startswith(("the prompt ", "prompt token ")) else (found[1],) if found else ()
    return ApiError(400, message, param=next((name for name in owners if name in fields), None))
