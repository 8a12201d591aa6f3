"""Whole runs with a random model: arms, batches, resuming, and what is measured."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from functools import partial

import pytest

from tenure.bench.longsession.arms import ARMS, HOST, chosen
from tenure.bench.longsession.checkpoint import Checkpoint
from tenure.bench.longsession.play import play
from tenure.bench.longsession.run import CONTROL, run
from tenure.bench.longsession.store import Store
from tenure.errors import ConfigError
from tenure.planners import PLANNERS
from tenure.planners.llm import LLM
from tests.bench.longsession.tiny import SETTINGS, players, quick


def test_arms_do_not_touch_each_other(engine, task):
    """In one batch, one after another, or played by hand: the same answers and the same measures in fp32."""
    together, apart = players(engine, task, "h2o,pace"), players(engine, task, "h2o,pace")
    play(together, lambda text: None, separate=False)
    play(apart, lambda text: None, separate=True)
    for one, other in zip(together, apart, strict=True):
        assert one.answers == other.answers
        assert one.kv_bytes == other.kv_bytes
        assert len(one.turn_s) == len(task.turns)
    session = engine.session(together[1].config, plan=task.plan())
    for turn in task.turns:
        session.append(turn)
    for probe, answer in zip(task.probes, together[1].answers, strict=True):
        fork = session.fork()
        fork.append(probe.message)
        held = [fork.explain(span) for span in probe.reads]
        share = sum(report.resident * report.tokens for report in held) / sum(
            task.sizes[s] for s in probe.reads
        )
        assert answer.residency == pytest.approx(share, abs=0.03)  # before the reply's header
        assert answer.text == session.fork().ask(probe.message, max_tokens=8)


def test_what_the_arms_keep(engine, task):
    names = "none,truncation,recency,h2o,foresight,bounded,pace"
    played = {player.arm.name: player for player in players(engine, task, names)}
    play(list(played.values()), lambda text: None, separate=False)
    for name, player in played.items():
        assert [answer.probe for answer in player.answers] == ["fee_for", "settle", "module"], name
        assert all(answer.tokens <= 8 for answer in player.answers)
    residency = {name: [answer.residency for answer in player.answers] for name, player in played.items()}
    assert residency["none"] == [1.0] * 3
    assert residency["truncation"] == residency["recency"] == [0.0] * 3
    assert residency["pace"] == residency["foresight"]
    assert residency["bounded"] == residency["h2o"]
    assert min(residency["pace"]) > max(residency["h2o"])
    assert played["recency"].kv_bytes == played["pace"].kv_bytes
    gaps = [answer.rotary_gap for answer in played["foresight"].answers]
    assert all(gap is not None and task.distance < gap < task.tokens + 500 for gap in gaps)
    assert played["truncation"].answers[0].rotary_gap is None


def test_only_planned_arms_see_the_plan(engine, task):
    for player in players(engine, task, "h2o,pace"):
        player.read(0)
        assert len(player.session.plan) == (len(task.plan()) if player.arm.told == "plan" else 0)


def test_resume(engine, tmp_path, monkeypatch):
    quick(monkeypatch)
    store = Store(tmp_path / "run", SETTINGS.config)
    notes: list[str] = []

    def go(names: str, seeds: range, resume: bool):
        notes.clear()
        return run(
            engine,
            SETTINGS,
            store,
            arms=chosen(names),
            seeds=seeds,
            resume=resume,
            separate=False,
            note=notes.append,
        )

    first = go("h2o", range(1), False)
    assert first["seeds"] == [0]
    assert list(first["arms"]) == ["h2o"]
    more = go("h2o,pace", range(2), True)
    assert more["seeds"] == [0, 1]
    assert more["arms"]["h2o"]["checks_total"] == more["arms"]["pace"]["checks_total"] == 30
    assert more["arms"]["h2o"]["sessions"] == 2
    assert list(more["paired"]) == ["pace>h2o"]
    assert sum(more["paired"]["pace>h2o"][key] for key in ("better", "worse", "tied")) == 6
    assert go("h2o,pace", range(2), True) == more
    assert notes == []
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["seed-0000.h2o.json", "seed-0000.pace.json", "seed-0001.h2o+pace.json"]
    with pytest.raises(ConfigError, match="budget"):
        Store(store.folder, replace(SETTINGS, budget=1200).config)


@pytest.mark.parametrize("distance", [None, 500])
def test_the_control_is_short(engine, tmp_path, monkeypatch, distance):
    quick(monkeypatch)
    monkeypatch.setattr("tenure.bench.longsession.run.CONTROL", 2000)
    settings = replace(SETTINGS, distance=distance)
    store = Store(tmp_path / "run", settings.config)
    found = run(
        engine,
        settings,
        store,
        arms=chosen("none,recency"),
        seeds=[0],
        resume=False,
        separate=False,
        note=lambda text: None,
    )
    assert found["arms"]["none"]["tokens"] <= 2000 < found["arms"]["recency"]["tokens"]
    assert found["arms"]["none"]["residency"] == 1.0
    assert CONTROL < 8192


class StoppedError(Exception):
    """The machine went down."""


def test_a_session_goes_on_from_its_checkpoint(engine, task, tmp_path, monkeypatch):
    """Killed in the middle of the filler and resumed, the answers are those of an undisturbed session."""
    monkeypatch.setattr("tenure.bench.longsession.checkpoint.EVERY", 0.0)
    undisturbed, killed, resumed = (players(engine, task, "h2o,pace") for _ in range(3))
    play(undisturbed, lambda text: None, separate=False)
    read: list[int] = []

    def stop(text: str) -> None:
        read.append(len(killed[0].turn_s))
        if len(read) == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        play(killed, stop, separate=False, checkpoint=Checkpoint(tmp_path / "point", {}))
    place = Checkpoint(tmp_path / "point", {})
    assert [path.name for path in place.folder.glob("turn-*")] == ["turn-000004"]
    other = players(engine, task, "pace")
    assert place.load(other) == 0
    play(resumed, lambda text: None, separate=False, checkpoint=place)
    for one, two in zip(undisturbed, resumed, strict=True):
        assert one.answers == two.answers
        assert len(two.turn_s) == len(task.turns)
    place.remove()
    assert not place.folder.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("turn-000001/pace.safetensors", b"broken"),
        ("turn-000001/pace.safetensors", None),
        ("latest.json", b""),
        ("latest.json", b"[1]"),
        ("latest.json", b'{"turns": 1}'),
    ],
)
def test_a_damaged_checkpoint_costs_only_time(engine, task, tmp_path, name, content):
    first, second = players(engine, task, "h2o,pace"), players(engine, task, "h2o,pace")
    place = Checkpoint(tmp_path, {})
    for player in first:
        player.read(0)
    engine.drain([player.session for player in first])
    place.save(first, 1)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    assert place.load(second) == 0
    assert [len(player.session) for player in second] == [0, 0]


def test_a_checkpoint_of_other_options_is_not_gone_on_from(engine, tmp_path, monkeypatch):
    """A run that was stopped before its first session was stored, and is resumed with another limit."""
    quick(monkeypatch)
    monkeypatch.setattr("tenure.bench.longsession.checkpoint.EVERY", 0.0)

    def go(settings, note) -> None:
        store = Store(tmp_path / "run", settings.config)
        run(engine, settings, store, arms=chosen("pace"), seeds=[0], resume=True, separate=False, note=note)

    def stop(text: str, last: int) -> None:
        notes.append(text)
        if f"turn {last} of" in text:
            raise StoppedError

    notes: list[str] = []
    for last in (3, 4):
        with pytest.raises(StoppedError):
            go(SETTINGS, partial(stop, last=last))
    assert [text.split(": ")[1][:6] for text in notes] == [
        "buildi",
        "turn 1",
        "turn 2",
        "turn 3",
        "buildi",
        "turn 4",
    ]
    notes.clear()
    go(replace(SETTINGS, limit=3000), notes.append)
    assert any("turn 1 of" in text for text in notes)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["seed-0000.pace.json"]


def test_arms_of_one_session_can_be_played_at_the_same_time(tmp_path):
    store = Store(tmp_path / "run", SETTINGS.config)
    with (
        Checkpoint(store.checkpoint(0, ["pace"]), {}),
        Checkpoint(store.checkpoint(0, ["none"]), {}) as other,
        Checkpoint(store.checkpoint(1, ["pace"]), {}),
    ):
        other.remove()
        with (
            pytest.raises(ConfigError, match="another process"),
            Checkpoint(store.checkpoint(0, ["pace"]), {}),
        ):
            pass
    with Checkpoint(store.checkpoint(0, ["pace"]), {}) as again:
        again.remove()


def test_a_full_disk_ends_no_session(engine, task, tmp_path, monkeypatch):
    """Files may grow to a few bytes; the checkpoint before stays."""
    monkeypatch.setattr("tenure.bench.longsession.checkpoint.EVERY", 0.0)
    (player,) = players(engine, task, "pace")
    place = Checkpoint(tmp_path / "point", {})
    notes: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def note(text: str) -> None:
        notes.append(text)
        if text.startswith("turn 1 "):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    try:
        play([player], note, separate=False, checkpoint=place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(player.answers) == 3
    assert any(text.startswith("no checkpoint: ") for text in notes)
    assert [path.name for path in place.folder.glob("turn-*")] == ["turn-000001"]
    assert place.load(players(engine, task, "pace")) == 1


def test_a_damaged_session_is_named(tmp_path):
    store = Store(tmp_path / "run", SETTINGS.config)
    path = store.write(0, {"pace": {}}, separate=False)
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"seed-0000\.pace\.json"):
            Store(tmp_path / "run", SETTINGS.config)


def test_retrieval_needs_no_plan(engine, task, monkeypatch):
    """Definitions that nobody had planned come back for their probe."""
    arm = ARMS["pace-retrieval"]
    options = {**arm.options, "planner_options": {"allowance": 500}}
    monkeypatch.setitem(ARMS, "pace-retrieval", replace(arm, options=options))
    (player,) = players(engine, task, "pace-retrieval")
    play([player], lambda text: None, separate=False)
    assert player.answers[0].residency == 1.0
    assert "def-fees" in player.answers[0].proposed
    assert player.session.planning.counts["fetched"] == 0  # in the probes' forks only


def test_a_plan_in_a_message(engine, task):
    """The agent's own plan is read out of the session's text and steers it like one that was given."""
    (player,) = players(engine, task, "pace-explicit", budget=2100)  # half of it holds all definitions
    play([player], lambda text: None, separate=False)
    assert [answer.residency for answer in player.answers] == [1.0] * 3
    read = {step.id: step.reads for step in player.session.plan.steps}
    assert all(read[probe.name] == probe.reads for probe in task.probes)


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_has_a_session(engine, task, name):
    (player,) = players(engine, task, name)
    assert player.session.config == player.config
    assert player.config.budget in (None, SETTINGS.budget)
    needed = player.config.planner is not None and PLANNERS[player.config.planner].needs_archive
    assert player.arm.host == (HOST if needed else 0)
    assert (player.session.memory.archive is not None) == needed
    assert player.tiers is None or player.tiers.host.spec.capacity == HOST


def test_archives_are_weighed(engine, task):
    """Whatever an arm keeps in host memory beside its slab: spans, and the keys that one planner holds at hand."""
    played = {p.arm.name: p for p in players(engine, task, "pace,pace-explicit,pace-retrieval,pace-keys")}
    play(list(played.values()), lambda text: None, separate=False)
    assert played["pace"].archive_bytes == played["pace-explicit"].archive_bytes == 0
    memory = played["pace-retrieval"].session.memory
    spans = sum(len(memory.ledger.spans.get(span)) for span in memory.archive.places())
    assert spans > SETTINGS.budget
    assert played["pace-retrieval"].archive_bytes == spans * engine.layout.token_bytes
    assert played["pace-keys"].archive_bytes > played["pace-retrieval"].archive_bytes
    assert {player.archive_lost for player in played.values()} == {0}


def test_what_an_archive_loses_is_told(engine, task, monkeypatch):
    small = 1000 * engine.layout.token_bytes
    monkeypatch.setitem(ARMS, "pace-retrieval", replace(ARMS["pace-retrieval"], host=small))
    (player,) = players(engine, task, "pace-retrieval")
    for number in range(len(task.turns)):
        player.read(number)
        engine.drain([player.session])
    player.weigh()
    assert 0 < player.archive_bytes <= small
    assert player.archive_lost > 0


def test_a_model_is_shown_ids_that_tell_nothing(engine, task, monkeypatch):
    """What it names is still measured and reported by the task's names."""
    asked: list[str] = []

    def answer(self, context, question, schema):
        asked.append(question)
        spans = [line.split()[1] for line in question.splitlines() if "user): Definition" in line]
        return json.dumps({"edges": [{"span": span, "step": "module"} for span in spans]})

    monkeypatch.setattr(LLM, "_local", answer)
    # Half of the budget holds all definitions.
    other, player = players(engine, task, "pace-online,pace-llm", budget=2100)
    play([player], lambda text: None, separate=False)
    assert any("Definition 3 of 3" in question for question in asked)
    named = set(task.sizes)
    assert {span for question in asked for span in named if span in question} == set()
    assert player.answers[2].residency == 1.0
    assert set(player.answers[2].proposed) == set(task.probes[2].reads)
    other.read(0)
    engine.drain([other.session])
    assert task.turns[0][1].span in other.session.memory.ledger.spans


def test_results_of_an_older_version_of_an_arm_are_missing(tmp_path):
    store = Store(tmp_path / "run", SETTINGS.config)
    path = store.write(0, {"pace": {}, "pace-llm": {}}, separate=False)
    assert store.done(0) == {"pace"}
    assert [set(found["arms"]) for found in store.load()] == [{"pace"}]
    store.write(1, {"pace-llm": {}}, separate=False)
    assert [found["seed"] for found in store.load()] == [0]
    store.write(0, {"pace-llm": {"version": ARMS["pace-llm"].version}}, separate=False)
    assert store.done(0) == {"pace", "pace-llm"}
    assert "pace-llm" in json.loads(path.read_text())["arms"]  # nothing is removed


def test_unknown_arms():
    with pytest.raises(ConfigError, match="pase"):
        chosen("pace,pase")
    with pytest.raises(ConfigError, match="no arm"):
        chosen(" , ")


def test_the_command(tiny_folder, tenure, tmp_path, monkeypatch):
    quick(monkeypatch)
    options = ["-m", tiny_folder, "--tokens", 2400, "--budget", 1100, "--chunk", 1024, "--limit", 4096]
    options += ["--arms", "h2o,pace", "--out", tmp_path, "--dtype", "fp32", "--name", "try"]
    out = tenure("bench", "longsession", *options).stdout
    found = json.loads(out.splitlines()[-1])
    assert set(found) >= {"bench", "model", "machine", "commit", "config", "seeds", "arms", "paired"}
    needed = {
        *(
            "checks_passed",
            "checks_total",
            "recall",
            "residency",
            "rotary_gap",
            "kv_bytes",
            "archive_bytes",
            "wall_s",
            "turn_s",
        ),
    }
    assert all(set(arm) >= needed for arm in found["arms"].values())
    assert set(found["paired"]["pace>h2o"]) == {"better", "worse", "tied", "p"}
    assert json.loads((tmp_path / "try.json").read_text()) == found
    again = tenure("bench", "longsession", *options, "--resume", "--json").stdout
    assert json.loads(again) == found
    assert "limit" in tenure("bench", "longsession", *options, "--limit", 100, code=2).stderr
