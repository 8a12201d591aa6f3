"""Spoilt plans: how many edges, which, and how."""

from __future__ import annotations

import pytest

from tenure.errors import ConfigError
from tenure.plan import MessageNumber, Plan, Step
from tenure.planners.noise import KINDS, perturb

SPANS = [f"def-{k}" for k in range(6)]


def plan() -> Plan:
    p = Plan([Step(f"probe-{k}", (SPANS[k % 6], SPANS[(k + 2) % 6])) for k in range(20)], expire_after=2)
    p.begin("probe-3")
    return p


def edges(p: Plan) -> set[tuple[str, object]]:
    return {(step.id, read) for step in p.steps for read in step.reads}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_each_kind_at_each_rate(kind, rate):
    before = plan()
    after, done = perturb(before, rate, seed=7, kinds=[kind], spans=[*SPANS, "filler"])
    assert before == plan(), "the plan that was given stays as it is"
    assert len(done) == round(rate * 40)
    assert {one.kind for one in done} <= {kind}
    lost = edges(before) - edges(after)
    added = edges(after) - edges(before)
    spoilt = {(one.step, one.read) for one in done}
    if kind == "dropped":
        assert lost == spoilt
        assert not added
    elif kind == "wrong":
        assert lost == spoilt
        assert added.isdisjoint(spoilt)
    elif kind == "stale":
        # An edge that went back to a step may stand where another one was taken away.
        assert lost <= spoilt
        places = {step.id: place for place, step in enumerate(before.steps)}
        for step, read in added:
            sources = [one for one in done if one.read == read and places[one.step] > places[step]]
            assert sources or str(read).endswith(" (gone)")
        for one in done:
            if one.read in after[one.step].reads:
                behind = [other for other in done if places[other.step] > places[one.step]]
                assert any(other.read == one.read and repr(one.step) in other.what for other in behind)
    else:
        assert not lost
        wanted, readers = (
            edges(before),
            {read: {s for s, one in edges(before) if one == read} for read in SPANS},
        )
        for one in done:
            mine = {read for step, read in added if step == one.step}
            assert any(read not in before[one.step].reads for read in mine), "a wrong span, too"
            rivals = {step for step, read in added if read == one.read}
            assert rivals - readers[one.read], "a wrong step reads the right span"
        assert added.isdisjoint(wanted)
    assert [step.id for step in after.steps] == [step.id for step in before.steps]
    assert (after.current.id, after.finished, after.expire_after) == ("probe-3", frozenset(), 2)


def test_rates_are_paired_and_seeds_differ():
    found = [perturb(plan(), rate, seed=1)[1] for rate in (0.1, 0.2, 0.5)]
    assert set(found[0]) < set(found[1]) < set(found[2])
    assert {one.kind for one in found[2]} == set(KINDS)
    assert perturb(plan(), 0.2, seed=1) == perturb(plan(), 0.2, seed=1)
    assert set(perturb(plan(), 0.2, seed=2)[1]) != set(found[1])
    assert perturb(plan(), 0.0, seed=1) == (plan(), [])


def test_edges_of_the_first_step_and_of_references():
    p = Plan([Step("only", ("a", MessageNumber(1)))])
    after, done = perturb(p, 1.0, seed=0, kinds=["stale"])
    assert after["only"].reads == ("a (gone)", "message 1 (gone)")
    assert len(done) == 2
    after, _ = perturb(p, 1.0, seed=0, kinds=["wrong"], spans=["z"])
    assert after["only"].reads == ("z",)
    assert perturb(Plan(), 0.5, seed=0) == (Plan(), [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 1.5}, "rate: 1.5 is no share"),
        ({"rate": -0.1}, "rate: -0.1"),
        ({"rate": 0.1, "kinds": ["late"]}, "kinds: .*late.*Known: dropped"),
        ({"rate": 0.1, "kinds": []}, "kinds: no kind"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        perturb(plan(), options.pop("rate"), seed=0, **options)
