"""The plan: distances to the next reader, and its JSON form."""

from __future__ import annotations

import contextlib
import json
import time
from importlib.resources import files

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.errors import PlanError
from tenure.plan import MessageNumber, Plan, Quote, Step


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


SPANS = st.sampled_from("wxyz")
IDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that a session may come to have."""
    names = draw(st.lists(IDS, max_size=6, unique=True))
    reads = st.lists(st.one_of(SPANS, st.builds(MessageNumber, st.integers(0, 9)), st.just(Quote("a  b"))))
    p = Plan(
        [Step(name, tuple(draw(reads))) for name in names], expire_after=draw(st.none() | st.integers(0, 3))
    )
    for _ in range(draw(st.integers(0, 16))):
        change(p, draw)
    return p


def change(p: Plan, draw: st.DrawFn) -> None:
    """One of everything that can be done to a plan; each kind as often as the others."""
    planners = [
        lambda: p.add_turn_reads([draw(SPANS)]),
        p.end_turn,
        lambda: p.expect(draw(st.lists(SPANS))),
        lambda: p.supersede(draw(SPANS), draw(SPANS)),
        lambda: p.forget_spans({draw(SPANS)}),
    ]
    references = [
        lambda: p.resolve(lambda reference: ["w"] if isinstance(reference, Quote) else ["x", "y"]),
        lambda: p.reopen({draw(SPANS)}),
    ]
    kinds = [planners, references, [lambda: p.add(Step(f"new-{len(p)}", (draw(SPANS), Quote("a  b"))))]]
    if len(p):
        name, here = draw(st.sampled_from(p.steps)).id, p.current or p.steps[0]
        following = p.steps[min(p.steps.index(here) + 1, len(p) - 1)].id
        kinds += [
            [lambda: p.begin(name)],
            [lambda: p.begin(following)],
            [lambda: p.finish(name), lambda: p.finish(here.id), lambda: p.confirm(name)],
            [
                lambda: p.remove(name),
                lambda: p.set_reads(name, draw(st.lists(SPANS))),
                lambda: p.add_reads(name, [draw(SPANS), Quote("a  b")]),
            ],
        ]
    with contextlib.suppress(PlanError):
        draw(st.sampled_from(draw(st.sampled_from(kinds))))()


def slow_planned(p: Plan) -> dict[str, int]:
    """`Plan.planned` as its documentation puts it, span by span, from the JSON form alone."""
    data = p.to_json()
    names = [step["id"] for step in data["steps"]]
    current = len(names) if data["current"] is None else names.index(data["current"])
    expired = data.get("expire_after")
    found = {}
    for span in "wxyz":
        ahead = [
            place - current
            for place, step in enumerate(data["steps"])
            if span in step["reads"] and step["id"] not in data["finished"] and place >= current
        ]
        late = [
            step
            for step in data["steps"][:current]
            if span in step["reads"]
            and step["id"] not in data["finished"]
            and (expired is None or data["overdue"][step["id"]] < expired)
        ]
        if span in data.get("turn", {"reads": []})["reads"]:
            found[span] = 0
        elif ahead:
            found[span] = min(ahead)
        elif late:
            found[span] = 0
        elif span in data.get("expected", []) and span not in data.get("superseded", {}):
            found[span] = max(1, len(names) - current)
    return found


@given(plans(), st.data())
def test_planned_after_any_changes(p: Plan, data: st.DataObject) -> None:
    assert p.planned() == slow_planned(p)
    change(p, data.draw)
    assert p.planned() == slow_planned(p), "a change is seen at once"
    for span in "wxyz":
        assert p.delta(span) == p.planned().get(span)
        reader = p.next_reader(span)
        assert reader is None or span in reader.reads
        assert (reader is None) == (span not in p.planned() or span in expected_only(p))


def expected_only(p: Plan) -> set[str]:
    twin = p.copy()
    twin.expect([])
    return set(p.expected) - set(twin.planned())


SCHEMA = files("tenure").joinpath("data/plan.schema.json").read_text("utf-8")


@given(plans())
def test_json_round_trip(p: Plan) -> None:
    text = json.dumps(p.to_json())
    jsonschema_rs.Draft202012Validator(json.loads(SCHEMA)).validate(json.loads(text))
    again = Plan.from_json(text)
    assert again == p
    assert again.planned() == p.planned()
    assert p.copy() == p
    assert all(distance >= 0 for distance in p.planned().values())


def test_overdue_readers_expire_unless_confirmed() -> None:
    p = Plan([Step(name, (name.upper(),)) for name in "abcdef"], expire_after=2)
    p.begin("b")
    assert p.delta("A") == 0
    assert p.overdue == (Step("a", ("A",)),)
    p.begin("c")
    p.begin("d")
    assert p.delta("A") is None, "a was passed over two steps ago"
    assert p.delta("B") == 0
    p.confirm("b")
    p.begin("e")
    assert p.delta("B") == 0
    p.begin("f")
    assert p.delta("B") is None
    assert p.loss_reason("A") == "expired"
    p.begin("a")
    assert p.delta("A") == 0
    assert p.delta("B") == 1, "all of them are ahead again"
    with pytest.raises(PlanError, match="unknown step"):
        p.confirm("q")


def test_only_steps_make_a_plan_s_time_pass() -> None:
    p = Plan([Step("a", ("A",)), Step("b"), Step("c")], expire_after=1)
    p.begin("b")
    p.begin("b")
    p.finish("c")
    assert p.delta("A") == 0
    p.begin("c")
    assert p.delta("A") is None


def test_a_step_that_is_ahead_again_is_not_overdue() -> None:
    p = plan()
    p.begin("d")
    p.finish("b")
    p.begin("c")
    assert p.overdue == (Step("a", ("x",)),)
    p.begin("a")
    assert p.overdue == ()


def test_a_reader_may_expire_at_once_or_never() -> None:
    for after, delta in ((0, None), (None, 0)):
        p = Plan([Step("a", ("A",)), *(Step(f"s{k}") for k in range(50))], expire_after=after)
        for k in range(50):
            p.begin(f"s{k}")
            assert p.delta("A") == delta
    with pytest.raises(PlanError, match="expire_after: expected a whole number from 0, got -1"):
        Plan(expire_after=-1)


def test_reads_change_while_the_plan_runs() -> None:
    p = plan()
    p.add_reads("b", ["w", "y"])
    assert p["b"].reads == ("y", "w")
    p.set_reads("a", [])
    assert p.planned() == {"y": 1, "w": 1, "x": 2, "z": 2}
    p.begin("c")
    p.remove("b")
    assert p.current == Step("c", ("x", "z"))
    p.remove("c")
    assert p.current == Step("d", ("y",))
    assert p.planned() == {"y": 0}
    for call in (p.set_reads, p.add_reads):
        with pytest.raises(PlanError, match="unknown step"):
            call("q", ["x"])
    with pytest.raises(PlanError, match=r"reads\[0\]: expected a non-empty string"):
        p.set_reads("d", [""])


def test_a_step_that_is_taken_out_leaves_nothing_behind() -> None:
    p = plan()
    p.begin("b")
    for name in "ac":
        p.add_reads(name, ["w"], guess="online")
    p.finish("c")
    p.remove("a")
    p.remove("c")
    assert p.overdue == ()
    assert p.guessed.by("online") == []
    assert p.loss_reason("w") is None
    p.add(Step("c", ("z",)))
    assert p.finished == frozenset()
    assert p.delta("z") == 2


def test_readers_come_in_the_order_of_their_steps() -> None:
    p = plan()
    p.add_reads("b", ["z"])
    assert [step.id for step in p.readers("z")] == ["b", "c"]


def test_what_planners_say_beside_the_steps() -> None:
    p = plan()
    p.begin("b")
    p.add_turn_reads(["q", "x"], name="turn-3")
    p.expect(["r", "z"])
    assert p.planned() == {"q": 0, "x": 0, "y": 0, "z": 1, "r": 3}
    assert p.next_reader("q") == Step("turn-3", ("q", "x"))
    assert [step.id for step in p.readers("x")] == ["turn-3", "a", "c"]
    p.end_turn()
    assert p.planned() == {"x": 1, "y": 0, "z": 1, "r": 3}
    assert p.loss_reason("q") == "expired"
    assert p.loss_reason("x") == "plan"
    assert p.loss_reason("unheard of") is None


def test_spans_that_are_gone_take_along_what_planners_said_of_them() -> None:
    p = Plan([Step("a", ("old",))])
    p.add_turn_reads(["old", "x"], name="turn-1")
    p.expect(["old", "y"])
    p.supersede("old", "new")
    p.supersede("older", "new")
    p.forget_spans({"old"})
    assert p.turn == Step("turn-1", ("x",))
    assert p.expected == ("y",)
    assert p.superseded == {"older": "new"}
    assert p["a"].reads == ("old",), "a span of this id may come again"


def test_what_was_only_expected_expires() -> None:
    p = plan()
    p.expect(["r"])
    assert p.loss_reason("r") == "plan"
    p.expect([])
    assert p.loss_reason("r") == "expired"


def test_a_newer_span_supersedes_an_older_one() -> None:
    p = plan()
    p.finish("a")
    p.expect(["x", "old"])
    p.supersede("x", "x2")
    p.supersede("old", "new")
    assert p.planned() == {"y": 0, "x": 1, "z": 1}, (
        "a step that names the older one has it; what is expected goes"
    )
    assert p.loss_reason("x") == "plan"
    assert p.loss_reason("old") == "superseded"
    p.finish("c")
    assert p.loss_reason("x") == "superseded"
    with pytest.raises(PlanError, match="cannot be superseded"):
        p.supersede("y", "x")
    p.forget_spans({"x2"})
    assert p.superseded == {"old": "new"}
    assert p.delta("x") == 3, "expected again"


def test_ten_thousand_steps_are_counted_once_a_change() -> None:
    p = Plan(Step(f"step {k}", (f"span {k}", f"span {k // 2}")) for k in range(10_000))
    assert len(p.planned()) == 10_000
    start = time.perf_counter()
    for _ in range(10_000):
        p.planned()
        p.loss_reason("span 9")
        p.delta("span 10")
    assert time.perf_counter() - start < 0.5, "30,000 questions without a change"
    p.finish("step 0")
    assert p.delta("span 9999") == 9998


@pytest.mark.parametrize(
    ("read", "words"),
    [
        ({"message": -1}, r"reads\[0\].message: expected a whole number from 0, got -1"),
        ({"message": True}, r"reads\[0\].message: expected a whole number"),
        ({"quote": " "}, r"reads\[0\].quote: expected a text"),
        ({"qoute": "x"}, r"reads\[0\]: unknown fields: qoute"),
        ({"message": 1, "quote": "x"}, r"reads\[0\]: unknown fields: message, quote"),
        ({}, r"reads\[0\]: unknown fields: none"),
        (None, r"reads\[0\]: expected a non-empty string, got None"),
    ],
)
def test_reads_that_cannot_be_one(read: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Step("a", (read,))  # type: ignore[arg-type]
    data = {"steps": [{"id": "a", "reads": [read]}]}
    with pytest.raises(PlanError, match=words):
        Plan.from_json(data)
    assert not jsonschema_rs.Draft202012Validator(json.loads(SCHEMA)).is_valid(data)


def test_no_step_is_called_like_the_turn_under_way() -> None:
    with pytest.raises(PlanError, match="without NUL"):
        Step("\0now")
    data = {"steps": [{"id": "\0now"}]}
    with pytest.raises(PlanError):
        Plan.from_json(data)
    assert not jsonschema_rs.Draft202012Validator(json.loads(SCHEMA)).is_valid(data)


def test_references_are_settled_once() -> None:
    p = Plan([Step("a", ("x", {"quote": "one"}, {"message": 2})), Step("b", (Quote("two"),))])  # type: ignore[arg-type]
    assert p["a"].reads == ("x", Quote("one"), MessageNumber(2))
    assert p.planned() == {"x": 0}
    fits: dict[object, list[str]] = {Quote("one"): ["y"], Quote("two"): ["v", "w"]}
    left = p.resolve(lambda reference: fits.get(reference, []))
    assert list(map(str, left)) == [
        "step 'a' reads message 2, which fits no span",
        "step 'b' reads quote 'two', which fits 2 spans: v, w",
    ]
    assert p.planned() == {"x": 0, "y": 0}
    fits[Quote("one")] = ["y", "z"]
    p.resolve(lambda reference: fits.get(reference, []))
    assert p["a"].reads == ("x", "y", MessageNumber(2))
    assert p.pending == (("a", MessageNumber(2)), ("b", Quote("two")))
    with pytest.raises(PlanError) as caught:
        p.validate({"x", "y"})
    assert "step 'a' reads unknown spans: message 2" in str(caught.value)
    assert "step 'b' reads unknown spans: quote 'two'" in str(caught.value)


def test_a_reference_is_open_again_where_its_span_is_taken_back() -> None:
    one, two, number = Quote("one"), Quote("two"), MessageNumber(7)
    p = Plan([Step("a", ("x", one, two)), Step("b", (one, number, "y"))])
    p.resolve(lambda reference: {one: ["y"], two: ["y"], number: ["z"]}[reference])
    assert (p["a"].reads, p["b"].reads) == (("x", "y"), ("y", "z"))
    p.add_reads("a", [one, "w"])
    assert p["a"].reads == ("x", "y", "w"), "said once more, it is settled as it was"
    p = Plan.from_json(p.to_json())
    twin = p.copy()
    p.reopen({"x", "z", "w"})
    assert p["a"].reads == ("x", one, two, "w")
    assert p["b"].reads == ("y", "z"), "what was given by its id stays"
    assert twin["a"].reads == ("x", "y", "w")
    twin.reopen({"x", "z", "w"})
    assert twin["a"].reads == p["a"].reads, "a copy remembers for itself"
    p = Plan.from_json(p.to_json())
    left = p.resolve(lambda reference: ["v", "u"] if reference == one else [])
    assert p["a"].reads == ("x", "v", two, "w"), "it was told apart before: the first one is meant"
    assert [item.read for item in left] == [two]
    p.reopen({"x", "z", "w", "v"})
    assert p["a"].reads == ("x", "v", two, "w")
    p.set_reads("a", ["u"])
    p.reopen(())
    assert p["a"].reads == ("u",), "what a step does not read any more is forgotten"
    p.remove("b")
    assert "settled" not in p.to_json()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "plan: not JSON"),
        pytest.param("[" * 100_000, "plan: not JSON", id="deep"),
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
        ({"steps": [{"id": "a"}], "overdue": {"b": 1}}, "overdue: unknown step 'b'"),
        ({"steps": [{"id": "a"}], "overdue": {"a": -1}}, "overdue.a: expected a whole number"),
        ({"steps": [], "overdue": []}, "overdue: expected an object, got list"),
        ({"steps": [], "expire_after": -1}, "expire_after: expected a whole number"),
        ({"steps": [], "expire_after": True}, "expire_after: expected a whole number"),
        ({"steps": [], "turn": "t"}, "turn: expected an object, got str"),
        ({"steps": [], "expected": [1]}, r"expected\[0\]: expected a non-empty string"),
        ({"steps": [], "superseded": {"a": ""}}, "superseded.a: expected a non-empty string"),
        ({"steps": [], "superseded": {"": "a"}}, "superseded: expected a non-empty string"),
        ({"steps": [], "settled": {}}, "settled: expected a list, got dict"),
        ({"steps": [], "settled": [{"step": "a"}]}, r"settled\[0\]: missing fields: read, span"),
        (
            {"steps": [], "settled": [{"step": "a", "read": {"message": 1}, "span": None}]},
            r"settled\[0\].step: unknown step 'a'",
        ),
        (
            {"steps": [{"id": "a"}], "settled": [{"step": "a", "read": "x", "span": None}]},
            r"settled\[0\].read: expected an object, got 'x'",
        ),
        (
            {"steps": [{"id": "a"}], "settled": [{"step": "a", "read": {"quote": "x"}, "span": ""}]},
            r"settled\[0\].span: expected a non-empty string",
        ),
    ],
)
def test_json_errors_name_the_place(data: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.from_json(data)  # type: ignore[arg-type]
    if isinstance(data, str):
        return
    # Which names are steps of the plan is beyond a schema, as its description says; all else it refuses, too.
    beyond = "unknown step" in words or "appears twice" in words
    assert jsonschema_rs.Draft202012Validator(json.loads(SCHEMA)).is_valid(data) == beyond


def test_a_plan_without_a_current_step_starts_at_the_first_unfinished() -> None:
    p = Plan.from_json({"steps": [{"id": "a"}, {"id": "b"}], "finished": ["a"]})
    assert p.current == Step("b")


def test_what_a_plan_says_of_its_course_in_json_may_be_incomplete() -> None:
    p = Plan.from_json(
        {"steps": [{"id": "a", "reads": ["x"]}, {"id": "b"}], "current": "b", "expire_after": 1}
    )
    assert p.delta("x") == 0, "passed over just now"
    p = Plan.from_json({"steps": [{"id": "a", "reads": ["x"]}], "current": "a", "finished": ["a"]})
    assert p.current_reads == ()
    assert p.planned() == {}
