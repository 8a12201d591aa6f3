"""What a server promises: exact sizes, and nothing that cannot hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenure import Engine
from tenure.errors import ConfigError
from tenure.serve.app import create_app, slots_of
from tenure.serve.config import ServeConfig, is_loopback
from tests.conftest import tiny_model
from tests.serve.live import SMALL, tiny_engine


def test_what_no_session_can_have_ends_the_start():
    engine = Engine(tiny_model("mistral", sliding_window=16))
    with pytest.raises(ConfigError, match="compress: some of this model's layers see a window"):
        create_app(engine, ServeConfig(session=replace(SMALL, compress="gracekv")))


def test_sessions_are_admitted_by_their_exact_size():
    engine = tiny_engine()
    nbytes = engine.session(SMALL).memory.rows.nbytes
    assert slots_of(engine, ServeConfig(session=SMALL, memory=5 * nbytes)) == 5
    assert slots_of(engine, ServeConfig(session=SMALL, memory=5 * nbytes - 1)) == 4
    assert slots_of(engine, ServeConfig(session=SMALL, memory=100 * nbytes, resident=3)) == 3
    with pytest.raises(ConfigError, match="memory"):
        slots_of(engine, ServeConfig(session=SMALL, memory=nbytes - 1))


@pytest.mark.parametrize(
    "wrong",
    [{"port": -1}, {"port": 70000}, {"streams": 0}, {"wait": -1}, {"smooth": 0.5}, {"max_body": True}],
)
def test_values_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeConfig(**wrong)


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "localhost.example", "192.168.0.1", "")))
