"""What a request becomes before it reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.serve.ask import result_order


def calls(*ids: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{} if one is None else {"id": one} for one in ids]}


def result(call: Any = None) -> dict[str, Any]:
    return {"role": "tool"} if call is None else {"role": "tool", "tool_call_id": call}


@pytest.mark.parametrize(
    ("messages", "order"),
    [
        ([calls("a", "b"), result("b"), result("a")], [0, 2, 1]),
        ([{"role": "user"}, calls("a", "b", "c"), result("c"), result("a"), result("b")], [0, 1, 3, 4, 2]),
        ([calls("a", "b"), result("b"), result("z")], [0, 1, 2]),
        ([calls("a", "b"), result("b"), {"role": "user"}, result("a")], [0, 1, 2, 3]),
        ([calls(None, None), result(), result()], [0, 1, 2]),
        ([calls(["a"], 7), result(["a"]), result(7)], [0, 1, 2]),
        ([], []),
    ],
    ids=["swapped", "three", "unknown", "apart", "without ids", "odd ids", "none"],
)
def test_results_follow_the_calls_that_they_answer(messages, order) -> None:
    assert result_order(messages) == order
