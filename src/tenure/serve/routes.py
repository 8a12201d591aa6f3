"""What the routes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request

from tenure.serve.errors import ApiError

if TYPE_CHECKING:
    from tenure.serve.app import Server


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    server: Server = request.app.state.server
    return server


def tenant_of(request: Request) -> str:
    """Whose request it is; "" where there are no keys."""
    tenant: str = request.state.tenant
    return tenant


def check_model(server: Server, name: str) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404.
    """
    if name != server.engine.name:
        raise ApiError(
            404,
            "model_not_found",
            f"{name[:200]!r} is not served; this server has {server.engine.name!r}",
            param="model",
        )
