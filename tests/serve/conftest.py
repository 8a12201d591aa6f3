"""A server for a module of tests and a client of it; modules that need another server have their own."""

from __future__ import annotations

import httpx
import pytest

from tests.serve.live import serving


@pytest.fixture(scope="module")
def live():
    with serving(resident=4) as live:
        yield live


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=30) as http:
        yield http
