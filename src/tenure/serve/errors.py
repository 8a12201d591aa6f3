"""Errors on the wire: OpenAI's form, with a stable code."""

from __future__ import annotations

from typing import Any

from tenure.errors import (
    BudgetError,
    ConfigError,
    MessageError,
    PlanError,
    TenureError,
    UnknownSpanError,
)


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        code: stable, for programs.
        message: for people; never the text of a user.
        param: the field at fault.
        retry_after: seconds after which it may work.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.counted = False
        """Whether the server's counters have it."""

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kind |= {429: "rate_limit_error"}
        name = kind.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": name, "param": self.param, "code": self.code}
        return {"error": error}


def api_error(error: Exception) -> ApiError:
    """Any exception as what the client gets; of an unexpected one nothing but that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MessageError):
        param = None if error.index is None else f"messages[{error.index}]"
        return ApiError(400, "invalid_message", str(error), param=param or error.option)
    if isinstance(error, BudgetError):
        return ApiError(400, "budget_exceeded", str(error), param=error.option)
    if isinstance(error, UnknownSpanError):
        return ApiError(404, "span_not_found", str(error))
    if isinstance(error, (ConfigError, PlanError)):
        return ApiError(400, "invalid_value", str(error), param=error.option)
    if isinstance(error, TenureError):
        return ApiError(500, "engine_error", str(error))
    return ApiError(500, "internal_error", "the server failed on this request; its log has the details")
