"""``tenure bench report``: a page from what there is, and pictures only where there is data."""

from __future__ import annotations

import json

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
    assert "| pace | 10 of 10 | 100% to 100% | 100% | 80.0% |" in text
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
