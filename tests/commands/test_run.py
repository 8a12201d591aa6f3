"""``tenure run`` and ``explain``: what is asked when, and what is printed."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tenure import sessionfile
from tenure.commands.play import Player, by_step
from tenure.commands.view import RunView
from tenure.config import SessionConfig
from tenure.errors import SessionFileError
from tenure.messages import Message
from tests.templates import tokenizer

KEYS = {
    *("model", "policy", "positions", "budget", "limit", "chunk", "answers", "facts_found", "facts_total"),
    *("tokens", "seconds", "kv_bytes", "full_kv_bytes", "stats"),
}
ANSWER = {"probe", "answer", "expect", "found", "residency", "rotary_gap", "tokens"}


@pytest.fixture(scope="module")
def engine(engines):
    fast = tokenizer("chatml")
    return engines("llama", tokenizer=fast, vocab_size=len(fast))


def config(**options):
    return SessionConfig(**{"budget": 128, "chunk": 64, "slack": 8, **options})


def test_json_is_one_line_with_everything(tenure, tiny_folder, story):
    result = tenure("run", story, "-m", tiny_folder, "--budget", 128, "--chunk", 64, "--json")
    assert len(result.stdout.splitlines()) == 1
    found = json.loads(result.stdout)
    assert set(found) == KEYS
    assert [set(answer) for answer in found["answers"]] == [ANSWER, ANSWER]
    assert (found["policy"], found["positions"], found["limit"]) == ("auto", "bounded", 512)
    assert found["facts_total"] == 2
    assert found["tokens"] == found["stats"]["tokens"]
    assert found["stats"]["resident"] <= 128
    assert result.stderr == ""


def test_answers_go_to_stdout(tenure, tiny_folder, story):
    result = tenure("run", story, "-m", tiny_folder, "--budget", 128)
    assert "? Which number has the pump?" in result.stdout
    assert "417" in result.stdout.split("lost")[1]
    assert "0 of 2 facts" in result.stderr
    quiet = tenure("run", story, "-m", tiny_folder, "--budget", 128, "--quiet")
    assert "? Which number has the pump?" in quiet.stdout
    assert "lost" not in quiet.stdout
    assert quiet.stderr == ""


def test_policy_full_has_no_budget(tenure, tiny_folder, story):
    found = json.loads(tenure("run", story, "-m", tiny_folder, "--policy", "full", "--json").stdout)
    assert found["budget"] is None
    assert found["answers"][0]["residency"] == 1.0


def test_max_tokens_replaces_the_files(tenure, tiny_folder, story):
    found = json.loads(tenure("run", story, "-m", tiny_folder, "--max-tokens", 3, "--json").stdout)
    assert [answer["tokens"] for answer in found["answers"]] == [3, 3]


def test_messages_are_cut_where_the_step_changes():
    steps = [None, "a", None, "a", "b", None, "b", "a"]
    groups = by_step([Message("user", str(n), step=step) for n, step in enumerate(steps)])
    assert ["".join(one.content for one in group) for group in groups] == ["0123", "456", "7"]


def test_a_probe_in_a_fork_leaves_no_trace(engine, story):
    """The session's ids are those of its messages and kept probes, whatever else was asked."""
    file = sessionfile.load(story)
    asked = Player(engine, file, config())
    answers = list(asked.play())
    passed = Player(engine, file, config())
    kept = list(passed.play(ask=False))
    assert len(answers) == 2
    assert [answer.probe.keep for answer in kept] == [True]
    assert asked.session.memory.ids == passed.session.memory.ids
    assert answers[1].text == kept[0].text
    assert asked.session.plan == passed.session.plan
    assert asked.session.plan.finished == {"tell", "more", "probe-1", "probe-2"}
    asked.session.check_integrity()


def test_an_answer_is_the_forks(engine, story):
    file = sessionfile.load(story)
    player = Player(engine, file, config())
    first = next(player.play())
    alone = engine.session(config(), plan=file.plan())
    for group in by_step(file.entries[:4]):
        alone.append(group)
    assert alone.ask(file.probes[0].message, max_tokens=8).strip() == first.text
    assert first.reason == "length"
    assert first.residency is not None


def test_steps_are_under_way_when_their_text_is_read(engine, story):
    seen = []
    player = Player(engine, sessionfile.load(story), config(chunk=16), tick=lambda: seen.append(look()))

    def look():
        plan = (player.turn.session if player.turn else player.session).plan
        return plan.current.id if plan.current else None, player.asking.step if player.asking else None

    list(player.play())
    order = list(dict.fromkeys(seen))
    assert order[:3] == [("tell", None), ("more", None), ("more", "probe-1")]
    assert ("probe-1", "probe-1") in order  # in the fork, while the answer is made
    assert order[-2] == ("probe-2", "probe-2")
    assert player.progress == len(player.file)


def test_a_refused_message_is_named(engines, session_file):
    fast = tokenizer("strict")
    engine = engines("llama", tokenizer=fast, vocab_size=len(fast))
    path = session_file(
        {"role": "user", "content": "one", "step": "a"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three", "step": "b"},
        {"role": "user", "content": "four"},
    )
    player = Player(engine, sessionfile.load(path), config())
    with pytest.raises(SessionFileError, match=r"entry 4: the model's chat template refuses"):
        list(player.play())


def test_explain(tenure, tiny_folder, story):
    options = ["-m", tiny_folder, "--budget", 100, "--chunk", 64, "--slack", 8]
    table = tenure("explain", story, *options).stdout
    assert "pump" in table
    assert "expired" in table
    found = json.loads(tenure("explain", story, *options, "--json").stdout)
    assert [span["id"] for span in found["spans"]][1] == "pump"
    assert found["stats"]["resident"] <= 100 + 8
    one = tenure("explain", story, *options, "--span", "pump").stdout
    assert "The pump has the number 417." in one
    assert "valve" not in one


def test_explain_over_time(tenure, tiny_folder, story, tmp_path):
    plot = tmp_path / "timeline.svg"
    options = ["-m", tiny_folder, "--budget", 64, "--chunk", 64, "--slack", 8, "--policy", "memdecay"]
    out = tenure("explain", story, *options, "--timeline", "--plot", plot).stdout
    assert "slots by region" in out
    assert "evicted pages" in out
    assert plot.stat().st_size > 1000
    found = json.loads(tenure("explain", story, *options, "--json").stdout)
    assert sum(found["timeline"][-1]["slots"].values()) == 64
    assert {"span", "region", "score", "age", "reason"} <= set(found["evictions"][0])


def test_calibrate(tenure, tiny_folder, session_file, tmp_path):
    words = "The pump has the number 417 and the valve is open. "
    long = session_file(*({"role": "user", "content": f"{number}. {words * 3}"} for number in range(12)))
    table, plot = tmp_path / "table.json", tmp_path / "curves.svg"
    options = ["-m", tiny_folder, "--out", table, "--plot", plot]
    printed = json.loads(tenure("calibrate", long, long, *options).stdout.splitlines()[-1])
    stored = json.loads(table.read_text())
    assert stored["regions"] == printed["regions"]
    assert stored["config"]["threshold"] == 1.0
    assert plot.stat().st_size > 1000
    options = ["-m", tiny_folder, "--budget", 64, "--chunk", 64, "--slack", 8, "--policy", "memdecay"]
    assert "user-2" in tenure("explain", long, *options, "--regions", table).stdout
    result = tenure("calibrate", long, "-m", tiny_folder, "--clock", "hours", code=2)
    assert "Known: tokens, steps, turns" in result.stderr


NAMES = ("app/[slug]/page.tsx", "x[/b]", "[bold]", ":key:")


@pytest.fixture
def brackets(session_file):
    """Ids that a terminal library would read as markup."""
    return session_file(
        *(
            {
                "role": "user",
                "content": "One more word. " * 4,
                "span": name,
                "step": f"read {name}",
                "reads": list(NAMES[max(0, at - 1) : at]),
            }
            for at, name in enumerate(NAMES)
        ),
        {"probe": "Which [/i] one?", "expect": ["[/b]"], "reads": ["x[/b]"], "max_tokens": 4},
    )


def test_names_in_brackets_are_names(tenure, tiny_folder, brackets, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["-m", tiny_folder, "--budget", 120, "--chunk", 64, "--slack", 8, "--policy", "h2o"]
    out = tenure("explain", brackets, *options, "--timeline").stdout
    spans, _, lost = out.partition("slots by region")
    assert all(f"\n{name} " in f"\n{spans}" for name in NAMES)
    assert all(name in lost for name in NAMES)
    assert "read :key:" in spans
    assert "/b" in tenure("explain", brackets, *options, "--span", "x[/b]").stdout
    tenure("run", brackets, *options)


def test_the_live_view_names_steps_in_brackets(engine, brackets):
    player = Player(engine, sessionfile.load(brackets), config())
    list(player.play(upto="read [bold]", ask=False))
    console = Console(file=io.StringIO(), width=200)
    view = RunView("[/title]")
    view._speed.append((0.0, 0))
    console.print(view._draw(player))
    assert "step read x[/b]" in console.file.getvalue()
    assert "[/title]" in console.file.getvalue()


def test_explain_up_to_a_step(tenure, tiny_folder, story):
    options = ["-m", tiny_folder, "--budget", 256, "--upto", "probe-1", "--json"]
    spans = {span["id"]: span for span in json.loads(tenure("explain", story, *options).stdout)["spans"]}
    assert "rest" not in spans
    assert spans["pump"]["readers"] == ["more", "probe-1"]


def test_explain_of_what_is_not_there(tenure, tiny_folder, story):
    assert "no span 'attic'" in tenure("explain", story, "-m", tiny_folder, "--span", "attic", code=2).stderr
    result = tenure("explain", story, "-m", tiny_folder, "--upto", "later", code=2)
    assert "--upto: the file has no step 'later'" in result.stderr


@pytest.mark.model
def test_example_on_a_trained_model(tenure):
    options = ["--budget", 1280, "--chunk", 512, "--max-tokens", 8, "--json"]
    found = json.loads(tenure("run", "examples/coding.jsonl", "--model", "smollm2-135m", *options).stdout)
    assert found["facts_total"] == 11
    assert found["tokens"] > 3000
    assert found["kv_bytes"] < found["full_kv_bytes"]
    assert found["stats"]["resident"] == 1280
    assert found["answers"][-1]["residency"] == 1.0


@pytest.mark.model
def test_a_trained_model_answers_from_the_start(tenure, session_file):
    notes = (
        "The river rises in spring and falls in summer. Boats wait at the lock until the keeper opens it.",
        "Bread is baked every morning, and the smell drifts over the square before the shops open.",
        "The school on the hill has two rooms and a garden in which the children grow beans and pumpkins.",
    )
    lines = [
        {"role": "system", "content": "Answer questions with the exact words that were given."},
        {"role": "user", "content": "Remember: the access code of the pump house is 7341.", "span": "code"},
        {"role": "assistant", "content": "I will remember it."},
    ]
    for number in range(12):
        text = f"Note {number}. {notes[number % 3]} {notes[(number + 1) % 3]}"
        lines += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Thank you for the note."},
        ]
    question = "What is the access code of the pump house?"
    lines.append({"probe": question, "expect": ["7341"], "reads": ["code"], "max_tokens": 24})
    options = ["--model", "smollm2-135m", "--budget", 128, "--chunk", 128, "--json"]
    found = json.loads(tenure("run", session_file(*lines), *options).stdout)
    assert found["tokens"] > 5 * found["budget"]
    assert found["answers"][0]["residency"] == 1.0
    assert found["facts_found"] == 1
