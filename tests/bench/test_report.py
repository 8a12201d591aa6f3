"""``tenure bench report``: a page from what there is, and pictures only where there is data."""

from __future__ import annotations

import json

from tenure.bench.longsession.page import (
    late_over_early,
    length_table,
    planner_table,
    pooled_tables,
    run_section,
)
from tenure.bench.longsession.plots import draw
from tests.bench.longsession.runs import MACHINE, run, stored

SQUARE = {"none": 5, "h2o": 1, "foresight": 3, "bounded": 2, "pace": 5}
SIGNATURE = b"\x89PNG\r\n"


def write(folder, name: str, found: dict) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))


def report(tenure, tmp_path, code: int = 0):
    page = tmp_path / "docs" / "results.md"
    options = ("--results", tmp_path / "results", "--page", page, "--images", tmp_path / "docs" / "img")
    said = tenure("bench", "report", *options, code=code)
    return said, page


def test_page_and_pictures(tenure, tmp_path):
    results = tmp_path / "results"
    for tokens, seeds in ((2000, 2), (9000, 1)):
        sessions = [stored(seed, SQUARE, tokens=tokens) for seed in range(seeds)]
        summary = run(*sessions)
        del summary["name"]
        write(results, f"longsession/fake-{tokens}.json", summary)
        for session in sessions:
            write(results, f"longsession/fake-{tokens}/seed-{session['seed']:04d}.x.json", session)
    other = {
        "bench": "speed",
        "date": "2026-01-01",
        "commit": "def",
        "machine": MACHINE,
        "config": {"model": "m"},
    }
    write(results, "speed.json", {**other, "result": {"fill": {"tokens_s": 1234.5}, "constant": True}})
    write(results, "demo.json", {**other, "bench": "demo", "result": {"arms": {"pace": {"facts_found": 11}}}})
    said, page = report(tenure, tmp_path)
    text = page.read_text()
    assert "| pace | 10 of 10 | 72% to 100% | 100% | 80.0% |" in text
    assert "| pace over h2o | 2 | 0 | 0 | 0.5 |" in text
    assert "seeds 0-1" in text
    assert "| fill, tokens_s | 1,234 |" in text
    assert "| arm | facts_found |" in text
    pictures = sorted(path.name for path in (tmp_path / "docs" / "img").iterdir())
    assert pictures == [
        *("ablation-fake-2000.png", "ablation-fake-9000.png"),
        *("distance-fake.png", "length-fake.png", "recall-fake.png"),
    ]
    for name in pictures:
        assert f"(img/{name})" in text
        assert (tmp_path / "docs" / "img" / name).read_bytes().startswith(SIGNATURE)
    assert said.stdout.splitlines()[0] == str(page)


def test_planners_and_noise_are_held_against_the_right_plan():
    clean = run(
        stored(0, {"pace": 5, "pace-online": 4}, archive=3_000_000),
        stored(1, {"pace": 4, "pace-online": 2}, archive=1_000_000),
        name="a",
    )
    dropped = {"noise": "dropped", "noise_rate": 0.5}
    noisy = run(stored(1, {"pace": 2, "h2o": 1, "pace-backed": 5}, spoilt=2, **dropped), name="b")
    other = run(stored(0, {"pace": 1}, tokens=7000), name="c")
    table = planner_table([other, clean, noisy])
    # Facts: four for five tests and for four, two for two.
    assert "| pace-online |  |  | 2 | 6 of 10 | 60.0% | 75.0% |  | 3.0 MB, 4 spans lost |" in table
    assert "| pace | dropped, 50% | 2 of 3, 1 | 1 | 2 of 5 | 40.0% | 50.0% |  |  |" in table
    assert (
        "| pace-backed | dropped, 50% | 2 of 3, 1 | 1 | 5 of 5 | 80.0% | 100.0% |  | not measured |" in table
    )
    assert "h2o" not in table
    assert "Left out" not in table
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert planner_table([other]) == ""
    section = run_section(noisy, "", "")
    assert "Noise: 2 of 3 definitions spoilt, 1 without a reader that needs them." in section
    assert "| not measured |" in section


def test_noise_of_single_edges_is_told_apart():
    old = run(stored(1, {"pace": 2}, noise="dropped", noise_rate=0.5), name="old")
    table = planner_table([old])
    assert "Left out: `old`, whose noise spoilt single edges" in table
    assert "| pace |" not in table
    assert "Its noise spoilt single edges" in run_section(old, "", "")
    clean = run(stored(1, {"pace": 2}), name="clean")
    assert "single edges" not in run_section(clean, "", "")


def test_forms_of_weights_are_told_apart(tmp_path):
    whole = stored(1, {"pace": 5, "pace-online": 1}, tokens=2000)
    small = [
        stored(1, {"pace": 3, "pace-online": 3}, tokens=tokens, weights="int8") for tokens in (2000, 4000)
    ]
    runs = [run(one, name=name) for one, name in zip((whole, *small), "abc", strict=True)]
    assert "### fake, int8 weights, 2,000 tokens" in run_section(runs[1], "", "")
    assert "| fake, int8 weights | 4,000 |" in length_table(runs)
    rows = [line for line in planner_table(runs).splitlines() if "pace-online" in line]
    assert ["100.0%" in row for row in rows] == [False, True, True]
    drawn = draw(runs, [whole, *small], tmp_path)
    assert drawn.keys() >= {"By length, fake, int8 weights"}
    assert "By length, fake" not in drawn  # one length alone is no line


def test_forms_of_weights_are_pooled_where_only_they_and_the_seeds_differ():
    whole = [stored(seed, SQUARE) for seed in (0, 2)]
    small = [stored(seed, {**SQUARE, "pace": 4}, weights="int8") for seed in (2, 3)]
    others = [
        stored(4, SQUARE, tokens=2000, weights="int8"),
        stored(5, SQUARE, distance=500, weights="int8"),
        stored(6, SQUARE, noise="stale", noise_rate=0.5, spoilt=1, weights="int8"),
        stored(7, {"pace-llm": 5}, weights="int8"),
    ]
    text = pooled_tables([*small, *whole, *others])
    assert text.count("### ") == 1
    assert "### fake, 1,000 tokens, all sessions" in text
    assert (
        "2 sessions, seeds 0, 2, the usual weights; 1 session, seed 3, int8 weights." in text
    )  # seed 2 counts once
    assert "| pace | 3 | 14 of 15 |" in text
    assert "| pace over h2o | 3 | 0 | 0 | 0.25 |" in text
    assert pooled_tables([*whole, *others]) == ""


def test_lengths():
    def turns(tokens: int, late: float, shared: int = 1) -> dict:
        made = run(stored(0, {"pace": 5}, tokens=tokens, shared=shared), name=str(tokens))
        count = tokens // 1000
        made["arms"]["pace"]["turn_s"] = (
            [9.0] * 50 + [2.0] * 50 + [3.0] * (count - 100 - count // 10) + [late] * (count // 10)
        )
        return made

    assert late_over_early(turns(1_000_000, 2.1)["arms"]["pace"]) == 1.05
    assert late_over_early(turns(1_000_000, 2.1, shared=2)["arms"]["pace"]) is None
    assert late_over_early(turns(150_000, 2.1)["arms"]["pace"]) is None
    table = length_table([turns(1_000_000, 2.1), turns(200_000, 3.0)])
    assert table.index("| fake | 200,000 | 1 |") < table.index(
        "| fake | 1,000,000 | 1 | 80.0% | 5 of 5 | 1.050 |"
    )
    assert length_table([turns(200_000, 3.0)]) == ""


def test_no_results(tenure, tmp_path):
    assert "--record" in report(tenure, tmp_path, code=2)[0].stderr


def test_a_broken_file_is_named(tenure, tmp_path):
    write(tmp_path, "results/speed.json", {})
    assert "speed.json" in report(tenure, tmp_path, code=2)[0].stderr
    (tmp_path / "results" / "speed.json").write_text("{")
    assert "not JSON" in report(tenure, tmp_path, code=2)[0].stderr


def test_the_plot_option_of_a_run(tmp_path):
    from tenure.bench.longsession.plots import draw

    sessions = [stored(seed, SQUARE) for seed in range(2)]
    drawn = draw([run(*sessions, name="one")], sessions, tmp_path)
    assert [path.name for path in drawn.values()] == ["ablation-one.png"]


def test_half_lives_are_told_with_their_limits(tenure, tmp_path):
    def row(**changes) -> dict:
        told = {
            "half_life": 30.8,
            "low": 25.1,
            "high": 40.3,
            "n": 3609,
            "deaths": 752,
            "method": "exponential",
        }
        return told | changes

    whole = {"half_life": 4096.0, "low": 4096.0, "high": 4096.0, "n": 735, "deaths": 0}
    found = {
        "bench": "calibration",
        "date": "2026-01-01",
        "commit": "def",
        "machine": MACHINE,
        "config": {"model": "m", "clock": "steps"},
        "all": row(),
        "regions": {"system": row(**whole), "scratchpad": row()},
    }
    write(tmp_path / "results", "calibration/m.json", found)
    _, page = report(tenure, tmp_path)
    text = page.read_text()
    assert "| system | over 4,096 |  | 735 | 0% | exponential |" in text
    assert "| scratchpad | 30.8 | 25.1 to 40.3 | 3,609 | 21% | exponential |" in text
    assert "(img/half-lives-m.png)" in text
    assert (tmp_path / "docs" / "img" / "half-lives-m.png").read_bytes().startswith(SIGNATURE)
