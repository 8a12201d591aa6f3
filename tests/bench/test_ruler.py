"""RULER's families: prompts whose answers follow from the context, and a run that can be resumed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tenure.bench.report import write
from tenure.bench.ruler import peers
from tenure.bench.ruler.command import table
from tenure.bench.ruler.compare import of_all_families, on_shared_prompts, ranks
from tenure.bench.ruler.page import by_model
from tenure.bench.ruler.play import Grid, Variant, read
from tenure.bench.ruler.run import Settings, run, summary
from tenure.bench.ruler.tasks import FAMILIES, encode, made_of, make
from tenure.compress.gracekv import method as gracekv
from tenure.errors import ConfigError
from tests.bench.longsession.runs import MACHINE
from tests.chats import chat_engine
from tests.conftest import random_ids


def words(text):
    return len(text.split())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [300, 1500])
def test_prompts_have_their_length_and_are_the_seeds(family, tokens):
    prompt = make(family, 3, tokens, words)
    assert tokens * 0.7 < words(prompt.context) <= tokens
    assert prompt == make(family, 3, tokens, words)
    assert prompt.context != make(family, 4, tokens, words).context
    assert prompt.score(" ".join(prompt.answers)) == 1.0
    assert prompt.score("nothing of it") == 0.0


@pytest.mark.parametrize("family", ["single", "multikey", "multivalue", "multiquery"])
def test_numbers_are_said_once(family):
    prompt = make(family, 0, 900, words)
    for answer in prompt.answers:
        (found,) = re.findall(rf"numbers for ([\w-]+) is: {answer}\.", prompt.context)
        assert found in prompt.question


def test_variables_are_a_chain():
    prompt = make("variables", 0, 900, words)
    value = re.search(r"value (\d+)", prompt.question).group(1)
    known = {f"VAR {value}"}
    held = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt.context):
        if source in held:
            held.add(name)
    assert held - {value} == set(prompt.answers)
    assert len(prompt.answers) == 5
    assert known


def test_common_and_frequent_words_are_the_most_frequent():
    for family, count in (("common", 10), ("frequent", 3)):
        prompt = make(family, 0, 1200, words)
        body = prompt.context.split("\n", 1)[1]
        counted = Counter(one for one in re.findall(r"[a-z]+", body))
        assert {one for one, _ in counted.most_common(count)} == set(prompt.answers)


def test_two_hops_lead_to_the_town():
    prompt = make("twohop", 0, 900, words)
    person = re.search(r"company that (.+?) works for", prompt.question).group(1)
    firm = re.search(rf"{person} works for the company (\w+)\.", prompt.context).group(1)
    town = re.search(rf"The company {firm} has its seat in the town of (\w+)\.", prompt.context).group(1)
    assert prompt.answers == (town,)
    assert prompt.prefix.endswith(f"{person} works for the company")  # the first hop may be written out
    assert prompt.score(f" {firm}, which has its seat in the town of {town}.") == 1
    assert prompt.score(f" {firm}.") == 0


def test_variants_are_checked():
    assert Variant.parse("gracekv:floor=0,slots=uniform").options == {"floor": 0, "slots": "uniform"}
    with pytest.raises(ConfigError, match="no option"):
        Variant.parse("kvzip:floor=0")
    with pytest.raises(ConfigError, match="families"):
        Settings(model="tiny", families=("poems",))


def test_a_context_has_room_for_what_is_hidden():
    with pytest.raises(ConfigError, match="'twohop' needs a context of"):
        make("twohop", 0, 50, words)


def test_other_files_are_not_gone_on_from(tmp_path):
    """Damaged ones, and those of another dtype: no model is needed to tell."""
    settings = Settings(model="tiny", tokens=(160,), families=("single",), methods=("snapkv",), ratios=(2.0,))
    path = tmp_path / "single-160-0000.json"
    config = {"task_version": 1, "model": "tiny", "dtype": "fp32", "device": "cpu"}
    path.write_text(json.dumps({"config": config, "cells": []}))
    with pytest.raises(ConfigError, match="another dtype"):
        run(None, settings, tmp_path, range(1), resume=True)
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"single-160-0000\.json"):
            run(None, settings, tmp_path, range(1), resume=True)
        with pytest.raises(ConfigError, match=r"single-160-0000\.json"):
            summary(tmp_path)


def test_a_family_has_its_own_version(tmp_path):
    """A file of two-hop questions as they were first is not gone on from, one of unchanged tasks is."""
    shape = {
        "tokens": (160,),
        "methods": ("snapkv",),
        "ratios": (2.0,),
        "modes": ("agnostic",),
        "dtype": "fp32",
    }
    cells = [{"method": "snapkv", "mode": "agnostic", "ratio": 2.0, "score": 1.0}]
    config = {"task_version": 1, "model": "tiny", "dtype": "fp32", "device": "cpu"}
    for family in ("single", "twohop"):
        path = tmp_path / family / f"{family}-160-0000.json"
        path.parent.mkdir()
        told = {"family": family, "tokens": 160, "seed": 0, "cells": cells}
        path.write_text(json.dumps({"config": config, **told}))
    settings = Settings(model="tiny", families=("single",), **shape)
    found = run(None, settings, tmp_path / "single", range(1), resume=True)
    assert [(one["score"], one["prompts"]) for one in found["cells"]] == [(1.0, {"0": {"score": 1.0}})]
    settings = replace(settings, families=("twohop",))
    with pytest.raises(ConfigError, match="another task_version"):
        run(None, settings, tmp_path / "twohop", range(1), resume=True)
    with pytest.raises(ConfigError, match="another task_version"):
        summary(tmp_path / "twohop")


def test_prompts_with_the_prose_of_another_python_are_not_put_together(tmp_path):
    cells = [{"method": "snapkv", "mode": "agnostic", "ratio": 2.0, "score": 1.0}]
    config = {"model": "tiny", "dtype": "fp32", "device": "cpu"}

    def write(family, seed, **more):
        told = {"family": family, "tokens": 160, "seed": seed, "cells": cells}
        made = {**config, **made_of(family), **more}
        (tmp_path / f"{family}-160-{seed:04d}.json").write_text(json.dumps({"config": made, **told}))

    settings = Settings(
        model="tiny", tokens=(160,), families=("multikey", "single"), methods=("snapkv",), ratios=(2.0,),
        modes=("agnostic",), dtype="fp32",
    )  # fmt: skip
    write("multikey", 0)
    write("multikey", 1)
    write("single", 0)
    write("single", 1)
    ours = run(None, settings, tmp_path, range(2), resume=True)
    assert {one["n"] for one in ours["cells"]} == {2}
    assert ours["prose"] == {"multikey": made_of("multikey")["prose"]}
    told = [{"model": "tiny", **ours}, {"model": "tiny", **ours, "peer": "kvpress"}]
    assert len(by_model(told)["tiny"]) == 4
    told[1]["prose"] = {"multikey": "of another"}
    assert set(by_model([told[0], {**told[1], "model": "other"}])) == {"tiny", "other"}
    with pytest.raises(ConfigError, match="two runs of tiny have prompts of multikey with different prose"):
        by_model(told)
    write("multikey", 1, prose="of another")
    with pytest.raises(ConfigError, match="another prose"):
        summary(tmp_path)
    with pytest.raises(ConfigError, match="another prose"):
        run(None, settings, tmp_path, range(2), resume=True)
    assert "prose" not in made_of("single")


def test_files_that_cannot_be_summed_up_are_told_before_anything_is_played(tmp_path):
    """Those of other seeds, also where the run's own are made anew."""
    cells = [{"method": "snapkv", "mode": "agnostic", "ratio": 2.0, "score": 1.0}]
    settings = Settings(
        model="tiny", tokens=(160,), families=("multikey",), methods=("snapkv",), dtype="fp32"
    )
    mine = {"model": "tiny", "dtype": "fp32", "device": "cpu", **made_of("multikey")}
    path = tmp_path / "multikey-160-0007.json"
    for other in ({"task_version": 0}, {"prose": "of another"}, {"dtype": "bf16"}):
        told = {"family": "multikey", "tokens": 160, "seed": 7, "cells": cells}
        path.write_text(json.dumps({"config": mine | other, **told}))
        with pytest.raises(ConfigError, match=rf"0007\.json was made with another {next(iter(other))}"):
            run(None, settings, tmp_path, range(1))


def test_peers_are_not_gone_on_from_other_files_either(tmp_path):
    """Told before an environment is made for them; where all is there, none is needed."""
    path = tmp_path / "tiny-kvpress" / "twohop-160-0000.json"
    path.parent.mkdir()
    cells = [{"method": "kvpress-snapkv", "mode": "agnostic", "ratio": 2.0, "score": 1.0}]
    told = {"family": "twohop", "tokens": 160, "seed": 0, "model": "tiny", "failed": {}, "cells": cells}
    asked = {
        "tokens": [160], "families": ["twohop"], "presses": ["kvpress-snapkv"], "ratios": [2.0],
        "modes": ["agnostic"], "seeds": range(1), "threads": 1, "resume": True, "note": pytest.fail,
    }  # fmt: skip
    path.write_text(json.dumps({**told, "task_version": 1}))
    with pytest.raises(ConfigError, match="another task_version"):
        peers.run("tiny", tmp_path, **asked)
    path.write_text(json.dumps({**told, "task_version": 2}))
    assert peers.run("tiny", tmp_path, **asked) == {"cells": 1}


def test_continuations_have_rows_of_their_own():
    """Agreement with the full cache is no share of answers: the two are not averaged."""
    cell = {"mode": "agnostic", "tokens": 160, "method": "snapkv", "ratio": 2.0, "build_s": 1.0}
    scores = {"single": 1.0, "twohop": 0.5, "continuation": 0.25}
    shown = table([{**cell, "family": family, "score": score} for family, score in scores.items()])
    columns = [list(column.cells) for column in shown.columns]
    assert columns[0] == ["continuation", "tasks"]
    assert columns[4] == ["0.25", "0.75"]


def test_a_run_is_resumed_and_summed_up(engines, tmp_path, monkeypatch):
    engine = chat_engine(engines)
    settings = Settings(
        model="tiny", tokens=(240,), families=("single", "continuation"), methods=("gracekv", "snapkv"),
        ratios=(2.0, 8.0), modes=("agnostic", "aware"),
    )  # fmt: skip
    monkeypatch.setattr("tenure.bench.ruler.play.CONTINUATION", 16)
    found = run(engine, settings, tmp_path, range(1))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["continuation-240-0000.json", "single-240-0000.json"]
    said = json.loads((tmp_path / "single-240-0000.json").read_text())
    assert said["config"]["task_version"] == 1
    tokens = said["cells"][0]["context_tokens"]
    layout = engine.layout
    for cell in said["cells"][1:]:
        kept = int(layout.layers * layout.kv_heads * tokens / cell["ratio"])
        assert cell["kv_bytes"] < said["cells"][0]["kv_bytes"]
        assert cell["entries"] == kept
    cells = {(c["method"], c["mode"], c["family"], c["ratio"]): c for c in found["cells"]}
    assert len(cells) == 1 + 2 * 2 * 2 + 1 + 2 * 2
    assert cells["full", "any", "continuation", 1.0]["score"] == 1.0
    assert cells["gracekv", "agnostic", "continuation", 8.0]["kl"] > 0
    for cell in found["cells"]:
        assert ("stages" in cell) == (cell["method"] == "gracekv")
        assert sum(cell.get("stages", {}).values()) <= cell["build_s"]
    assert all(one["n"] == 1 for one in cells.values())
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = run(engine, settings, tmp_path, range(1), resume=True)
    assert again == found
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert summary(tmp_path) == found
    more = run(engine, replace(settings, ratios=(4.0,), modes=("agnostic",)), tmp_path, range(1), resume=True)
    played = []
    monkeypatch.setattr("tenure.bench.ruler.run._cells", lambda *given: played.append(given[-1]) or [])
    run(
        engine,
        replace(settings, methods=("snapkv", "lagkv"), modes=("aware",)),
        tmp_path,
        range(1),
        resume=True,
    )
    assert [[one.name for one in variants] for variants in played] == [["lagkv"], ["lagkv"]]
    ratios = {
        (c["mode"], c["ratio"]) for c in more["cells"] if c["method"] == "snapkv" and c["family"] == "single"
    }
    assert ratios == {(mode, ratio) for mode in ("agnostic", "aware") for ratio in (2.0, 8.0)} | {
        ("agnostic", 4.0)
    }


def cell(method, scores, ratio=2.0, mode="aware", family="single"):
    """A cell of a summary; ``scores`` of seeds 0, 1, ..., None where it was not played."""
    prompts = {str(seed): {"score": score} for seed, score in enumerate(scores) if score is not None}
    mean = sum(one["score"] for one in prompts.values()) / len(prompts)
    place = {"mode": mode, "family": family, "tokens": 1, "ratio": ratio, "n": len(prompts)}
    return {"method": method, "score": mean, "prompts": prompts, **place}


def test_methods_are_ranked_on_the_prompts_that_both_have_played():
    cells = [cell("gracekv", [0.2, 0.8]), cell("kvzip", [0.3, 0.6]), cell("kvpress-kvzip", [0.1])]
    found = ranks(cells)
    assert (found["cells"], found["first"], found["alone"], found["lost"]) == (1, 1, 1, [])
    # The mean of 0.4 is less than GraceKV's 0.5, but on the prompt that it has played it is ahead.
    found = ranks([*cells[:2], cell("kvpress-kvzip", [0.4])])
    assert (found["first"], found["second"]) == (0, 1)
    assert ranks([cells[0], cell("kvzip", [None, None, 1.0])])["cells"] == 0


def test_tables_are_over_the_prompts_that_all_have_played():
    found = on_shared_prompts(
        [
            cell("gracekv", [0.2, 0.8]), cell("kvzip", [None, 0.5]), cell("full", [1.0, 0.9], 1.0, "any"),
            cell("gracekv", [0.1, 0.3], 4.0), cell("gracekv", [1.0, 1.0], 8.0), cell("kvzip", [None, None, 1.0], 8.0),
        ]
    )  # fmt: skip
    shown = {(one["method"], one["ratio"]): (round(one["score"], 6), one["n"]) for one in found}
    assert shown == {
        ("gracekv", 2.0): (0.8, 1), ("kvzip", 2.0): (0.5, 1), ("full", 2.0): (0.9, 1),
        ("gracekv", 4.0): (0.2, 2), ("full", 4.0): (0.95, 2),
    }  # fmt: skip


def test_a_ratio_that_some_families_lack_has_no_mean():
    cells = [
        cell("gracekv", [1.0], ratio, family=family)
        for ratio, family in ((2.0, "single"), (4.0, "single"), (4.0, "twohop"))
    ]
    assert {one["ratio"] for one in of_all_families(cells)} == {4.0}
    assert of_all_families([]) == []


def test_ranks_share_ties_and_leave_out_cells_that_rank_nobody():
    played = [("gracekv", 2, 0.5), ("kvzip", 2, 0.5), ("gracekv", 4, 0.1), ("kvzip", 4, 0.2),
              ("gracekv", 8, 0), ("kvzip", 8, 0), ("gracekv", 16, 0), ("kvzip", 16, 1),
              ("snapkv", 16, 1), ("full", 1, 1), ("gracekv:hops=0", 2, 1), ("gracekv", 32, 1),
              ("kvzip", 64, 0), ("snapkv", 64, 0), ("gracekv", 128, 1), ("kvzip", 128, 0.5)]  # fmt: skip
    found = ranks([cell(method, [score], ratio) for method, ratio, score in played])
    counts = tuple(found[name] for name in ("cells", "first", "alone", "second", "empty"))
    assert counts == (4, 2, 1, 1, 1)
    assert found["lost"] == [["aware", "single", 1, 16]]


@pytest.mark.parametrize("mode", ["agnostic", "aware"])
@pytest.mark.parametrize("method", ["gracekv", "kvzip"])
def test_what_a_grid_found_out_once_gives_what_each_compression_alone_gives(
    engines, monkeypatch, method, mode
):
    engine = engines("qwen2")
    words, question = random_ids(400, seed=1), random_ids(12, seed=2)
    reading = read(engine, words, question)
    grid, asked = Grid(reading, mode), question if mode == "aware" else None
    gathered = []
    real = gracekv.gather
    monkeypatch.setattr(gracekv, "gather", lambda *given, **more: gathered.append(1) or real(*given, **more))
    for ratio in (2.0, 3.0, 64.0):
        fork, build = grid.compressed(Variant.parse(method), ratio)
        shared = len(gathered)
        alone = reading.session.fork()
        done = alone.compress(ratio=ratio, method=method, question=asked)
        torch.testing.assert_close(fork.feed(question), alone.feed(question), atol=0, rtol=0)
        assert build.stages.keys() == done.stages.keys()
        assert build.seconds >= sum(build.stages.values()) > 0 or method == "kvzip"
        gathered[shared:] = []
    assert len(gathered) == (2 if method == "gracekv" else 0)  # at 64 fewer of the newest are exact


def test_contexts_and_questions_are_one_chat(engines):
    engine = chat_engine(engines)
    prompt = make("single", 0, 60, words)
    before, after = encode(engine.tokenizer, prompt)
    text = engine.tokenizer.decode(before) + engine.tokenizer.decode(after)
    assert prompt.context in text
    assert text.endswith(prompt.prefix)


def test_the_page_has_a_table_and_a_plot(tmp_path):
    def cell(method, mode, ratio, score, family="single", **more):
        told = {"score": score, **more}
        return {"method": method, "mode": mode, "family": family, "tokens": 4096, "ratio": ratio, **told,
                "prompts": {"0": told, "1": told}, "n": 2, "build_s": 1.5, "prefill_s": 3.0, "kv_bytes": 1e7}  # fmt: skip

    cells = [
        cell("full", "any", 1.0, 0.9),
        cell("gracekv", "agnostic", 4.0, 0.8),
        cell("gracekv", "agnostic", 4.0, 0.4, "twohop"),
        cell("gracekv", "agnostic", 4.0, 0.1, "continuation", kl=0.25),
        *(
            cell("snapkv", "agnostic", ratio, 0.1, family)
            for ratio in (4.0, 8.0)
            for family in ("single", "twohop")
        ),
        {**cell("gracekv", "aware", 8.0, 0.5), "stages": {"flow": 1.2, "trees": 0.15}},
        cell("gracekv:trees=false", "agnostic", 4.0, 0.7),
        cell("gracekv:trees=false", "agnostic", 8.0, 0.3),
    ]
    head = {"bench": "ruler", "model": "tiny", "date": "2026-01-01", "commit": "abc", "machine": MACHINE}
    results = tmp_path / "results"
    (results / "ruler").mkdir(parents=True)
    (results / "ruler" / "tiny.json").write_text(json.dumps({**head, "cells": cells}))
    peer = [cell("kvpress-kvzip", "agnostic", 4.0, 0.5)]
    (results / "ruler" / "tiny-kvpress.json").write_text(json.dumps({**head, "cells": peer}))
    (results / "ruler" / "single-4096-0000.json").write_text(json.dumps({**head, "seed": 0, "cells": cells}))
    page = tmp_path / "docs" / "results.md"
    files = write(results, page, tmp_path / "docs" / "img")
    text = page.read_text()
    assert "| gracekv | 0.60 | - | 1.50 | 3.00 | - |" in text
    assert "Mean score of single, twohop (2 prompts each), 4,096 tokens, question unknown" in text
    assert "Mean score of single (2 prompts each), 4,096 tokens, question unknown" in text
    assert "| gracekv | 0.80 | 1.50 | 3.00 | 10.00 |" in text
    assert "| kvpress-kvzip | 0.50 | 1.50 | 3.00 | 10.00 |" in text
    rows, ablated = text[: text.index("one option changed")], text[text.index("one option changed") :]
    assert "trees=false" not in rows
    assert "Mean score of single (2 prompts each), 4,096 tokens, question unknown" in ablated
    assert (
        "| gracekv | 0.80 | 1.50 | 3.00 | 10.00 |\n| gracekv:trees=false | 0.70 | 1.50 | 3.00 | 10.00 |"
        in ablated
    )
    assert "| snapkv | 0.10 | 0.10 | 1.50 | 3.00 | 10.00 |" in text
    assert "| gracekv | 0.100, 0.250 |" in text
    assert "| tokens | question | build s | over reading | flow | trees |" in text
    assert "| 4,096 | known | 1.50 | 0.50 | 80% | 10% |" in text
    assert "| full | 0.90 | 1.50 | 3.00 | 10.00 |" in text
    assert text.index("| gracekv") < text.index("| kvpress-kvzip")
    assert [path.name for path in files] == ["results.md", "ruler-tiny.png"]
    assert "(img/ruler-tiny.png)" in text
    standing = (
        "Of 2 cells (mode, family, length, ratio), ties shared, gracekv is first in 2, in 2 of them alone"
    )
    assert standing in text
