"""What stands before every route: who asks, how large a body may be, what the log says.

The log names the method, the route's pattern, the status and the time: no path, no query and no text of a user.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tenure.serve.auth import Keys
from tenure.serve.config import is_loopback
from tenure.serve.errors import ApiError
from tenure.serve.events import Answered, Bus, Refused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("tenure.serve.access")
_OPEN = ("/", "/healthz", "/readyz")
_BODY_SECONDS = 60.0
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


class Guard:
    """ASGI middleware around the application.

    Args:
        app: what it guards.
        keys: who may ask; None lets everybody in, from this machine.
        max_body: bytes of a request.
        bus: told of every answer.
    """

    def __init__(self, app: App, *, keys: Keys | None, max_body: int, bus: Bus) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._bus = bus

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 500
        scope.setdefault("state", {})["tenant"] = ""

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_caller(scope)
            body = await self._body(scope, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
            await self._app(scope, _again(body, receive), note)
        except ApiError as error:
            self._bus.report(Refused(tenant=scope["state"]["tenant"], status=error.status, code=error.code))
            await _refuse(note, error)
        finally:
            self._report(scope, status, time.monotonic() - begun)

    def _check_caller(self, scope: Scope) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        if self._keys is None:
            # A page that a browser was lured to must not reach this server under a name of its own.
            if not is_loopback(_name_of(headers.get(b"host", "localhost").lower())):
                raise ApiError(403, "unknown_host", "this server answers to localhost only")
        elif path not in _OPEN and not path.startswith("/static/"):
            try:
                scope["state"]["tenant"] = self._keys.tenant(headers.get(b"authorization"))
            except ApiError:
                raise
            except Exception as error:
                _log.error("nobody is let in: %s", error)
                raise ApiError(
                    503, "keys_unreadable", "the server cannot read its API keys; its log has the details"
                ) from error

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ApiError(400, "disconnected", "the client left")
                    size += len(message.get("body", b""))
                    if size > self._max_body:
                        raise ApiError(413, "request_too_large", f"a request may have {self._max_body} bytes")
                    parts.append(message.get("body", b""))
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the request did not arrive in time") from None

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "") or "unmatched"
        self._bus.report(
            Answered(
                tenant=scope["state"]["tenant"],
                method=scope["method"] if scope["method"] in METHODS else "other",
                route=route,
                status=status,
                seconds=seconds,
            )
        )
        # The page and probes look every second; what they do is news only where it fails.
        level = logging.DEBUG if scope["method"] == "GET" and status < 400 else logging.INFO
        _log.log(level, "%s %s %d %.3fs", scope["method"], route, status, seconds)


def _name_of(host: str) -> str:
    """The name of a ``Host`` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever else comes."""
    given = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
