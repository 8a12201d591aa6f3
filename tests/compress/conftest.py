"""What the tests of compressors share."""

from __future__ import annotations

import pytest

from tenure.compress import make_compressor
from tests.compress.test_apply import filled


@pytest.fixture
def context(engines):
    """What a method sees of a session."""
    session = filled(engines("qwen2"), 300)
    seen = []

    class StopError(Exception):
        pass

    class Look(type(make_compressor("random"))):
        def score(self, context):
            seen.append(context)
            raise StopError

    with pytest.raises(StopError):
        session.compress(ratio=2, method=Look(), recent=0)
    return seen[0], session
