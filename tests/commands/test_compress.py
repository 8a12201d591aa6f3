"""``tenure compress`` on a tiny model."""

from __future__ import annotations

import json

import pytest


def test_a_file_is_played_and_compressed(tenure, tiny_folder, story, tmp_path):
    out = tenure("compress", story, "--model", tiny_folder, "--ratio", "4", "--ask", "What now?",
                 "--save", tmp_path / "saved", "--json").stdout  # fmt: skip
    said = json.loads(out)
    done, stats = said["compression"], said["stats"]
    assert done["method"] == "gracekv"
    assert done["entries"] > 0
    assert stats["compressed"] > 0
    assert set(done["answers"]) == {"before", "after"}
    assert (tmp_path / "saved").stat().st_size > 0


def test_the_table_counts_entries(tenure, tiny_folder, story):
    out = tenure("compress", story, "--model", tiny_folder, "--entries", "12", "--method", "snapkv",
                 "--method-option", "kernel=3").stdout  # fmt: skip
    assert "compressed" in out
    assert "snapkv:" in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ratio", "0.5"], "--ratio: 0.5 is below 1"),
        (["--ratio", "2", "--entries", "3"], "give a ratio or a budget"),
        (["--method", "zip"], "--method: 'zip' is not known"),
        (["--entries", "0"], "--entries: 0 entries cannot stand"),
        (["--method-option", "speed=3"], "no option 'speed'"),
        (["--method-option", "floor=abc"], "floor: 'abc' is not a number"),
        (["--method", "cake", "--method-option", "tau1=0"], "tau1: 0 is not above 0"),
        (["--method-option", "fast"], "--method-option: 'fast' is not KEY=VALUE"),
        (["--span", "nowhere"], "nowhere"),
    ],
)
def test_wrong_options(tenure, tiny_folder, story, options, text):
    result = tenure("compress", story, "--model", tiny_folder, *options, code=2)
    assert text in " ".join(result.stderr.split())
