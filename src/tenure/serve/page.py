"""The page at ``/``: files of this package, read once, served with a policy that lets nothing else in."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Everything comes from this server, and no inline script or style runs."""

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Checked each time: a new version of the server is never shown by an old page.
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """Routes of the page. They hold no data of anyone, so they ask for no key; the page's own requests do."""
    router = APIRouter(include_in_schema=False)
    found = {file.name: _File(file) for file in files(__package__).joinpath("static").iterdir()}

    @router.get("/")
    def index(request: Request) -> Response:
        return found["index.html"].reply(request)

    @router.get("/static/{name}")
    def static(name: str, request: Request) -> Response:
        # A look-up among the files that were read: no name reaches the file system.
        file = found.get(name)
        return Response(status_code=404) if file is None else file.reply(request)

    return router


class _File:
    def __init__(self, source: Traversable) -> None:
        self.body = source.read_bytes()
        self.type = _TYPES[source.name.rpartition(".")[2]]
        self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'

    def reply(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.type)
