"""Listening: uvicorn around the application, with a shutdown that finishes streams and saves sessions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from tenure.serve.app import create_app

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.serve.config import ServeConfig


class Listener(uvicorn.Server):
    """Says where it listens; on SIGTERM or SIGINT takes no more requests and lets streams finish."""

    def __init__(self, app: Any, config: ServeConfig) -> None:
        self._worker = app.state.server.worker
        self._name = app.state.server.engine.name
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                # Names and addresses of the clients' own making are nobody's proof.
                proxy_headers=False,
                timeout_graceful_shutdown=max(1, round(config.grace)),
                h11_max_incomplete_event_size=64 << 10,
            )
        )

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            sys.stderr.write(f"{self._name} at http://{shown}:{port}/v1, Ctrl-C ends\n")
            sys.stderr.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to end."""
        self._worker.refuse()
        super().handle_exit(sig, frame)


def serve(engine: Engine, config: ServeConfig) -> None:
    """Serve until a signal comes."""
    with _logged():
        Listener(create_app(engine, config), config).run()


@contextmanager
def _logged() -> Iterator[None]:
    """Logs of the server on standard error, for as long as it runs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = []
    for name, level in (("tenure.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        log = logging.getLogger(name)
        before.append((log, log.level))
        log.addHandler(handler)
        log.setLevel(level)
    try:
        yield
    finally:
        for log, level in before:
            log.removeHandler(handler)
            log.setLevel(level)
