"""A real server on a tiny random model, in a thread, for tests over HTTP."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from tenure import Engine
from tenure.config import SessionConfig
from tenure.serve import create_app
from tenure.serve.config import ServeConfig
from tests.chats import SHAPE, tokenizer
from tests.conftest import tiny_model
from tests.oracles import Script

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = SessionConfig(budget=256, chunk=64, slack=16)


class Live:
    """A server that listens on a port of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5)
        )
        self._thread = threading.Thread(target=self.server.run)

    def start(self) -> None:
        self._thread.start()
        while not self.server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server ends"

    @property
    def url(self) -> str:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    @property
    def state(self) -> Any:
        return self.app.state.server

    def call(self, function: Any) -> Any:
        """Run a function on the engine's thread."""
        return self.state.worker.call(function).result(10)

    def sessions(self) -> list[Any]:
        """All sessions, for looking at; quiet when nothing runs."""
        return list(self.call(lambda: list(self.state.store)))


def tiny_engine(template: str = "tools", *, seed: int = 0, **options: Any) -> Engine:
    """A tiny Qwen2 of its own, so that each server has the engine to itself."""
    return Engine(
        copy.deepcopy(tiny_model("qwen2", seed=seed, **SHAPE)), tokenizer(template), name="tiny", **options
    )


@contextmanager
def serving(engine: Engine | None = None, *, parking: Any = None, **options: Any) -> Iterator[Live]:
    """A running server; options are fields of ``ServeConfig``."""
    options.setdefault("session", SMALL)
    live = Live(create_app(engine or tiny_engine(), ServeConfig(**options), parking=parking))
    live.start()
    try:
        yield live
    finally:
        live.stop()


def say(monkeypatch: Any, *texts: str, template: str = "tools") -> None:
    """O5: the turns that start from now on say these texts, one each, the last one for ever."""
    words = tokenizer(template)
    left = list(texts)

    def script(options: Any, stop_ids: Any) -> Script:
        text = left.pop(0) if len(left) > 1 else left[0]
        ids = words(text, add_special_tokens=False)["input_ids"]
        return Script([*ids, words.eos_token_id])

    monkeypatch.setattr("tenure.turn.Sampler", script)
