"""The regions bench: fair transcripts, honest scores, paired tests, and a run that can be taken up again."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from tenure.bench import regions as bench
from tenure.bench import regions_page, report
from tenure.bench import regions_summary as summary
from tenure.bench.calibration import transcripts
from tenure.bench.regions_transcript import FACTS, REGIONS, VERSION, transcript
from tenure.errors import ConfigError
from tenure.regions import infer_region
from tests.chats import chat_engine


def words(text: str) -> int:
    return len(text.replace("\n", " ").split())


@pytest.mark.parametrize("tokens", [450, 1700, 8000])
def test_transcripts_are_fair(tokens) -> None:
    script = transcript(5, tokens, words)
    assert Counter(fact.region for fact in script.facts) == dict.fromkeys(REGIONS, 3)
    assert len({fact.name for fact in script.facts}) == len({fact.value for fact in script.facts}) == FACTS
    for fact in script.facts:
        homes = [message for message in script.messages if fact.line in message.content]
        assert [message.memory_region for message in homes] == [fact.region]
        assert homes[0].content.count(fact.line) == 1
        assert sum(message.content.count(fact.value) for message in script.messages) == 1, "one place each"
    length = sum(words(message.content) + 6 for message in script.messages)
    assert length == pytest.approx(tokens, rel=0.1)
    assert transcript(5, tokens, words) == script
    assert transcript(6, tokens, words) != script
    guessed = [m for m in script.messages if m.region is None]
    assert all(infer_region(message) in REGIONS for message in guessed)


@pytest.mark.parametrize(
    ("answer", "number"),
    [("417", "417"), ("The code of lynx is 417.", "417"), ("1,417", "1417"), ("none", None), ("4 17", "4")],
)
def test_only_the_first_number_of_an_answer_counts(answer, number) -> None:
    assert bench.first_number(answer) == number


def test_the_permutation_test_equals_all_sign_changes() -> None:
    values = np.array([3.0, -1.0, 2.0, 2.0, 0.0, 4.0, -2.0, 1.0])
    signs = itertools.product((1, -1), repeat=len(values))
    as_good = sum(np.dot(sign, values) >= values.sum() - 1e-9 for sign in signs)
    assert summary.permutation(values) == pytest.approx(as_good / 2 ** len(values), abs=1e-5)
    assert summary.permutation(np.zeros(5)) is None
    assert summary.permutation(np.array([3.0])) is None, "one pair has nothing to be exchanged with"


def config_of(**changes):
    options = {"models": ("tiny",), "lengths": (900,), "budgets": (0.5,), "seeds": (1, 2), "chunk": 128}
    return bench.RegionsConfig(
        **options | {"arms": ("none", "truncated", "h2o", "memdecay-pinned")} | changes
    )


def test_a_run_its_resumption_and_its_summary(engines, tmp_path) -> None:
    engine, notes, config = chat_engine(engines), [], config_of()
    bench.run(config, tmp_path, notes.append, load=lambda name: engine)
    assert len(notes) == 2 * 4
    stored = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    assert len(stored) == 2
    more = config_of(arms=(*config.arms, "memdecay"))
    notes.clear()
    for path in stored:
        older = json.loads(path.read_text()) | {"commit": "0123456789ab"}
        for arm in older["arms"].values():
            del arm["commit"]  # as files have been before
        path.write_text(json.dumps(older))
    bench.run(more, tmp_path, notes.append, load=lambda name: engine)
    assert len(notes) == 2, "only the new arm"
    one = json.loads(bench.run_file(tmp_path, "tiny", 900, 0.5, 1).read_text())
    assert list(one["arms"]) == list(more.arms)
    assert one["slots"] == round(one["tokens"] * 0.5)
    assert one["arms"]["h2o"]["commit"] == "0123456789ab" != one["arms"]["memdecay"]["commit"]
    for arm in one["arms"].values():
        assert set(arm["facts"]) == set(REGIONS)
        assert all(total == 3 and 0 <= found <= 3 for found, total in arm["facts"].values())
        assert len(arm["answers"]) == FACTS
    summary.summarise(tmp_path, more)
    whole = json.loads(bench.summary_file(tmp_path, "tiny", 900, 0.5).read_text())
    assert whole["arms"]["memdecay"]["facts"]["user"][1] == 6
    assert set(whole["arms"]["memdecay"]) >= {"facts", "wall_s", "interval", "against_h2o"}
    assert whole["seeds"] == [1, 2]
    assert "none, truncated, h2o, memdecay-pinned: commit 0123456789ab." in regions_page.section(
        [whole], None, str
    )
    pictures = [tmp_path / plots / "regions-tiny-900.svg" for plots in ("one", "two")]
    for picture in pictures:
        summary.draw(tmp_path, more, picture.parent, notes.append)
    assert pictures[0].stat().st_size > 1000
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_arms_that_compress_read_turn_by_turn(engines, tmp_path, monkeypatch) -> None:
    script = transcript(1, 8000, words)
    turns = list(bench.turns(script.messages))
    assert [message for turn in turns for message in turn] == list(script.messages)
    assert all([message.role for message in turn].count("assistant") <= 1 for turn in turns)
    assert all(turn[0].role == "assistant" for turn in turns[1::2])
    entries = []

    def asked(session, facts):
        entries.append(session.memory.frozen.entries)
        return [""] * len(facts)

    monkeypatch.setattr(bench, "ask", asked)
    config = config_of(seeds=(1,), arms=("auto", "auto-compressed"), lengths=(3000,), budgets=(0.25,))
    bench.run(config, tmp_path, str, load=lambda name: chat_engine(engines))
    assert entries[0] == 0 < entries[1]


def test_what_is_stored_is_summed_up_without_playing_the_rest(engines, tmp_path, tenure) -> None:
    engine = chat_engine(engines)
    bench.run(config_of(arms=("h2o", "recency")), tmp_path, str, load=lambda name: engine)
    settings = ("--model", "tiny", "--lengths", "900,8000", "--budgets", "12.5,50", "--seeds", "1-3")
    said = tenure("bench", "regions", *settings, "--stored", "--folder", tmp_path, "--json")
    assert json.loads(said.stdout)["tiny"]["recency"]["pairs"] == 2
    assert bench.summary_file(tmp_path, "tiny", 900, 0.5).exists()
    assert not bench.summary_file(tmp_path, "tiny", 8000, 0.5).exists()


def test_the_report_shows_summaries_and_the_pooled_test(engines, tmp_path) -> None:
    engine, notes, config = chat_engine(engines), [], config_of(arms=("none", "h2o", "memdecay"))
    folder = tmp_path / "results" / "regions"
    bench.run(config, folder, notes.append, load=lambda name: engine)
    summary.summarise(folder, config)
    written = report.write(tmp_path / "results", tmp_path / "page.md", tmp_path / "img")
    assert tmp_path / "img" / "regions-tiny-900.svg" in written
    page = (tmp_path / "page.md").read_text()
    assert page.count("### tiny, 900 tokens, budget 50.0%, 2 transcripts") == 1
    assert "### tiny, all lengths and budgets together, over h2o" in page
    stored = json.loads(bench.summary_file(folder, "tiny", 900, 0.5).read_text())
    facts = stored["arms"]["memdecay"]["facts"]
    found = sum(right for right, _ in facts.values())
    assert f"| memdecay | {found} of 48 | {facts['system'][0]} of 6 |" in page
    assert "runs/" not in page, "single transcripts are not shown"


def test_other_files_are_not_gone_on_from(tmp_path) -> None:
    """Damaged ones, and those of other options: no model is needed to tell."""

    def never(name):
        raise AssertionError

    config = config_of(seeds=(1,))
    path = bench.run_file(tmp_path, "tiny", 900, 0.5, 1)
    path.parent.mkdir()
    was = {"task_version": VERSION, "chunk": 64, "dtype": "auto", "device": "cpu", "regions": None}
    path.write_text(json.dumps({"config": was, "arms": {"h2o": {}}}))
    with pytest.raises(ConfigError, match="another chunk"):
        bench.run(config, tmp_path, str, load=never)
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"900-50-1\.json"):
            bench.run(config, tmp_path, str, load=never)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"seeds": ()}, "seeds: none"), ({"lengths": (0,)}, "lengths: 0"), ({"chunk": -1}, "chunk: -1")],
)
def test_refused_options(changes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**changes)


def test_the_full_cache_is_played_once_for_all_budgets(engines, tmp_path) -> None:
    engine, notes = chat_engine(engines), []
    config = config_of(budgets=(0.25, 0.5), seeds=(1,), arms=("none", "h2o"))
    bench.run(config, tmp_path, notes.append, load=lambda name: engine)
    assert len(notes) == 3
    arms = [
        json.loads(bench.run_file(tmp_path, "tiny", 900, share, 1).read_text())["arms"]
        for share in (0.25, 0.5)
    ]
    assert arms[0]["none"] == arms[1]["none"]
    assert [list(one) for one in arms] == [["none", "h2o"]] * 2


def test_pairs_are_transcripts() -> None:
    def setting(length, gains):
        facts = {seed: {"user": [5 + gain, 10], "system": [9, 9]} for seed, gain in enumerate(gains)}
        return {
            seed: {
                "config": {"length": length},
                "arms": {"h2o": {"facts": {"user": [5, 10], "system": [0, 9]}}, "x": {"facts": facts[seed]}},
            }
            for seed in facts
        }

    found = summary.compare(
        [setting(450, [1, 2, -1]), setting(450, [1, 0, 0]), setting(1700, [3, 3, 3])], "x"
    )
    assert found["pairs"] == 6
    assert (found["better"], found["worse"]) == (5, 1)
    assert found["mean"] == pytest.approx(12 / 6)


@pytest.mark.parametrize(("changes", "word"), [({"arms": ("h20",)}, "h20"), ({"budgets": (1.5,)}, "1.5")])
def test_options_are_checked(changes, word) -> None:
    with pytest.raises(ConfigError, match=word):
        config_of(**changes)


def test_exported_transcripts_are_read_back_as_they_are_played(tmp_path, tiny_folder) -> None:
    config = config_of(models=(str(tiny_folder),), lengths=(300,), seeds=(4, 5))
    path = tmp_path / "talks.jsonl"
    assert bench.export(config, path) == 2
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for chat, seed in zip(transcripts.load(path), (4, 5), strict=True):
        played = transcript(seed, 300, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
        assert [(one.role, one.content, one.memory_region) for one in chat] == [
            (one.role, one.content, one.memory_region) for one in played.messages
        ]
