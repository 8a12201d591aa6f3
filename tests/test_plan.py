"""The plan: distances to the next reader, and its JSON form."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.errors import PlanError
from tenure.plan import Plan, Step


def plan() -> Plan:
    return Plan([Step("a", ("x",)), Step("b", ("y",)), Step("c", ("x", "z")), Step("d", ("y",))])


def test_distances_from_the_current_step() -> None:
    p = plan()
    assert p.planned() == {"x": 0, "y": 1, "z": 2}
    p.begin("b")
    assert p.planned() == {"x": 1, "y": 0, "z": 1}
    assert p.next_reader("y") == Step("b", ("y",))
    assert p.delta("nothing") is None
    assert p.next_reader("nothing") is None


def test_a_reader_counts_until_its_step_has_finished() -> None:
    p = plan()
    p.begin("d")
    assert p.delta("y") == 0
    p.finish("d")
    assert p.current is None
    assert p.delta("y") == 0  # b was passed over: overdue
    p.finish("b")
    assert p.delta("y") is None


def test_overdue_readers_count_as_now() -> None:
    p = plan()
    p.begin("b")
    assert p.delta("x") == 1  # the next reader comes before an overdue one
    p.begin("d")
    assert p.delta("x") == 0
    assert p.next_reader("x") == Step("c", ("x", "z"))


def test_finishing_moves_on() -> None:
    p = plan()
    p.finish("b")
    assert p.current == Step("a", ("x",))
    p.finish("a")
    p.finish("a")
    assert p.current == Step("c", ("x", "z"))
    assert p.finished == {"a", "b"}
    p.begin("a")
    assert p.finished == {"b"}


def test_add_and_copy() -> None:
    p = plan()
    twin = p.copy()
    p.add(Step("e", ("w",)))
    p.begin("b")
    p.finish("a")
    assert p.delta("w") == 3
    assert twin.planned() == plan().planned()
    assert twin == plan()
    assert len(p) == 5
    assert "e" in p
    assert "e" not in twin
    assert p["e"].reads == ("w",)


def test_wrong_names() -> None:
    p = plan()
    with pytest.raises(PlanError, match="step 'a' is in the plan already"):
        p.add(Step("a"))
    for call in (p.begin, p.finish, p.__getitem__):
        with pytest.raises(PlanError, match=r"unknown step 'q'\. Steps of the plan: 'a', 'b', 'c', 'd'"):
            call("q")
    assert p == plan()
    with pytest.raises(PlanError, match="non-empty"):
        Step("")
    with pytest.raises(PlanError, match="list of span ids"):
        Step("a", "xyz")  # type: ignore[arg-type]


def test_validation_lists_everything() -> None:
    p = plan()
    p.validate({"x", "y", "z"})
    with pytest.raises(PlanError) as caught:
        p.validate({"y"}, begin=["q"])
    assert "step 'a' reads unknown spans: 'x'" in str(caught.value)
    assert "step 'c' reads unknown spans: 'x', 'z'" in str(caught.value)
    assert "unknown step 'q'" in str(caught.value)
    p.validate({"y"}, pending_ok=True)
    p.finish("a")
    with pytest.raises(PlanError, match="step 'a' reads"):
        p.validate({"y"}, pending_ok=True)


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=3), st.lists(st.sampled_from("xyz"))),
        max_size=6,
        unique_by=lambda s: s[0],
    ),
    st.data(),
)
def test_json_round_trip(steps: list[tuple[str, list[str]]], data: st.DataObject) -> None:
    p = Plan(Step(name, tuple(reads)) for name, reads in steps)
    for _ in range(data.draw(st.integers(0, 4))):
        if steps:
            name = data.draw(st.sampled_from(steps))[0]
            data.draw(st.sampled_from([p.begin, p.finish]))(name)
    again = Plan.from_json(json.dumps(p.to_json()))
    assert again == p
    assert again.planned() == p.planned()
    assert all(distance >= 0 for distance in p.planned().values())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "plan: not JSON"),
        ("[]", "plan: expected an object, got list"),
        ({}, "plan: missing fields: steps"),
        ({"steps": [], "stpes": 1}, "plan: unknown fields: stpes"),
        ({"steps": {}}, "steps: expected a list, got dict"),
        ({"steps": ["a"]}, r"steps\[0\]: expected an object, got str"),
        ({"steps": [{"id": "a"}, {"reads": []}]}, r"steps\[1\]: missing fields: id"),
        (
            {"steps": [{"id": "a", "reads": ["x", 1]}]},
            r"steps\[0\].reads\[1\]: expected a non-empty string, got 1",
        ),
        ({"steps": [{"id": "a"}, {"id": "a"}]}, r"steps\[1\].id: step 'a' appears twice"),
        ({"steps": [{"id": "a"}], "current": "b"}, "current: unknown step 'b'"),
        ({"steps": [{"id": "a"}], "finished": ["b"]}, r"finished\[0\]: unknown step 'b'"),
    ],
)
def test_json_errors_name_the_place(data: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.from_json(data)  # type: ignore[arg-type]


def test_the_schema_says_what_the_code_reads() -> None:
    schema = json.loads(files("tenure").joinpath("data/plan.schema.json").read_text("utf-8"))
    assert set(schema["properties"]) == set(plan().to_json())
    assert schema["required"] == ["steps"]
    step = schema["properties"]["steps"]["items"]
    assert set(step["properties"]) == {"id", "reads"}
    assert not schema["additionalProperties"]
    assert not step["additionalProperties"]


def test_a_plan_without_a_current_step_starts_at_the_first_unfinished() -> None:
    p = Plan.from_json({"steps": [{"id": "a"}, {"id": "b"}], "finished": ["a"]})
    assert p.current == Step("b")
