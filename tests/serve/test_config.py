"""What a server promises: exact sizes, and nothing that cannot hold."""

from __future__ import annotations

import pytest

from tenure.errors import ConfigError
from tenure.serve.app import slots_of
from tenure.serve.config import ServeConfig, is_loopback
from tests.serve.live import SMALL, tiny_engine


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
