"""The session that is played: lengths, filler that never repeats, the plan."""

from __future__ import annotations

import random

import pytest

from tenure.bench.longsession.filler import Part, read, turns
from tenure.bench.longsession.task import build
from tenure.bench.longsession.truncate import newest
from tenure.errors import ConfigError
from tenure.messages import Message
from tenure.transcript import Transcript
from tests.templates import tokenizer


@pytest.fixture(scope="module")
def fast():
    return tokenizer("chatml")


def length(fast, messages, **options) -> int:
    return sum(len(piece.ids) for piece in Transcript(fast).open(messages, **options))


@pytest.mark.parametrize(("tokens", "distance"), [(4000, None), (9000, 5000)])
def test_lengths(fast, tokens, distance):
    task = build(fast, tokens=tokens, distance=distance, seed=3)
    messages = [message for turn in task.turns for message in turn]
    assert length(fast, messages) == task.tokens
    assert tokens - 400 < task.tokens <= tokens
    last = max(number for number, message in enumerate(messages) if message.span == "def-errors")
    behind = task.tokens - length(fast, messages[: last + 2])
    assert task.distance - 200 < behind <= task.distance
    if distance is not None:
        assert task.distance == distance


def test_one_seed_one_session(fast):
    one, same = (build(fast, tokens=3000, seed=1) for _ in range(2))
    other, longer = build(fast, tokens=3000, seed=2), build(fast, tokens=5000, seed=1)
    assert one.turns == same.turns
    assert one.facts != other.facts
    assert one.turns[-1] != other.turns[-1]
    assert one.facts == longer.facts
    assert one.turns[:3] == longer.turns[:3]


def test_filler_never_repeats(fast):
    source = turns(fast, random.Random(0), 2000)
    seen = [next(source) for _ in range(40)]
    parts = [part for turn in seen for part in turn]
    places = {(part.name, part.first + line) for part in parts for line in range(len(part.lines))}
    assert len(places) == sum(len(part.lines) for part in parts)
    assert len({"".join(part.lines) for part in parts}) == len(parts)
    sizes = [length(fast, [Message("user", "x"), *read(turn)]) for turn in seen]
    assert sum(1300 < size < 2150 for size in sizes) > 36  # a long line may be more


def test_filler_is_cut_by_lines(fast):
    parts = [Part("a", 1, ("1\n", "2\n")), Part("b", 7, ("3\n", "4\n", "5\n"))]
    whole, cut = read(parts), read(parts, 3)
    assert [message.content for message in whole[1::2]] == [
        "$ sed -n 1,2p a\n1\n2\n",
        "$ sed -n 7,9p b\n3\n4\n5\n",
    ]
    assert [message.content for message in cut[1::2]] == ["$ sed -n 1,2p a\n1\n2\n", "$ sed -n 7,7p b\n3\n"]
    assert len(read(parts, 2)) == 2


def test_the_plan_names_what_each_probe_reads(fast):
    task = build(fast, tokens=4000, distance=1500, seed=0)
    plan = task.plan()
    plan.validate([message.span for turn in task.turns for message in turn if message.span])
    assert [step.id for step in plan.steps] == [
        *("prepare", "define-record", "define-fees", "define-errors", "survey"),
        *("fee_for", "settle", "module"),
    ]
    assert {probe.name: probe.reads for probe in task.probes} == {
        step.id: step.reads for step in plan.steps if step.reads
    }
    for turn in task.turns:
        assert len({message.step for message in turn} - {None}) == 1


@pytest.mark.parametrize("distance", [0, 3900, 10_000])
def test_distances_that_do_not_fit(fast, distance):
    with pytest.raises(ConfigError, match="distance"):
        build(fast, tokens=4000, distance=distance)


def test_too_short(fast):
    with pytest.raises(ConfigError, match="tokens"):
        build(fast, tokens=100)


def test_truncation_keeps_the_newest_text(fast):
    task = build(fast, tokens=6000, seed=0)
    probe = task.probes[0].message
    kept = newest(fast, task.turns, probe, 2500)
    assert length(fast, kept, add_generation_prompt=True) <= 2500
    assert length(fast, kept, add_generation_prompt=True) > 2500 - 200
    system, *rest = [message for turn in task.turns for message in turn]
    assert kept[0] == system
    assert kept[-1] == probe
    assert kept[2:-1] == rest[len(rest) - len(kept[2:-1]) :]
    cut = rest[len(rest) - len(kept[2:-1]) - 1]
    assert cut.content.endswith(kept[1].content)
    assert len(kept[1].content) < len(cut.content)
