"""``tenure bench profile``: its parts are those of a real forward, and leave the functions as they were."""

from __future__ import annotations

import pytest

from tenure.bench import profile
from tenure.models.weights import Projection


@pytest.mark.parametrize("policy", ["h2o", "recency"])
def test_the_parts_of_a_forward(tiny_folder, policy) -> None:
    before = Projection.__call__
    got = profile.run(str(tiny_folder), budget=64, chunk=160, policy=policy, dtype="fp32")
    assert Projection.__call__ is before
    for part in ("fill", "decode"):
        times = got[part]
        assert {"linear layers", "attention", "ledger", "python and small operations"} <= set(times)
        assert all(time >= 0 for time in times.values())
        assert times["linear layers"] > 0
        assert times["attention"] > 0
    assert "eviction: ranking" in got["fill"]
    assert ("attention statistics" in got["fill"]) == (policy == "h2o")
