"""What the tests of compressors share."""

from __future__ import annotations

import pytest

from tenure.compress.apply import look
from tests.compress.test_apply import filled


@pytest.fixture
def context(engines):
    """What a method sees of a session, and the session."""
    session = filled(engines("qwen2"), 300)
    return look(session), session
