"""Options that no benchmark can be made with are refused before a model is loaded: none of these names one."""

from __future__ import annotations

import pytest

REFUSED = (
    ("longsession --tokens 0", "--tokens: 0 tokens"),
    ("longsession --tokens 5000 --distance 5000", "--distance: 5,000 of 5,000"),
    ("longsession --distance -3", "--distance: -3 of"),
    ("longsession --seed -1", "'--seed'"),
    ("longsession --record {file}/x.json", "--record: could not be written"),
    ("longsession --out {file}/runs", "--out: could not be written"),
    ("longsession --plot {file}/plots", "--plot: could not be written"),
    ("ruler --tokens many", "--tokens: 'many' is no list of numbers"),
    ("ruler --tokens 0", "--tokens: 0 tokens"),
    ("ruler --ratios 2,x", "--ratios: '2,x' is no list"),
    ("ruler --ratios 0.5", "--ratios: 0.5 is no ratio"),
    ("ruler --ratios 1", "--ratios: 1 is no ratio"),
    ("ruler --ratios inf", "--ratios: inf is no ratio"),
    ("ruler --ratios nan", "--ratios: nan is no ratio"),
    ("ruler --methods ;", "--methods: none is given"),
    ("ruler --results {file}/x", "--results: could not be written"),
    ("peers ruler --tokens many", "--tokens: 'many' is no list"),
    ("peers ruler --families poems", "--families: 'poems' is not known"),
    ("peers ruler --families continuation", "--families: none is given"),
    ("peers ruler --modes x", "--modes: 'x' is not known"),
    ("peers ruler --ratios 0", "--ratios: 0 is no ratio"),
    ("peers --turns 0", "'--turns'"),
    ("peers --record {file}/x.json", "--record: could not be written"),
    ("speed --dtype fp64", "--dtype: 'fp64' is not known"),
    ("speed --record {file}/x.json", "--record: could not be written"),
    ("weights --tokens 0", "'--tokens'"),
    ("window --windows x", "--windows: 'x' is no list"),
    ("tiers --tokens 0", "'--tokens'"),
    ("serve --parts decode,quick", "--parts: 'quick' is not known"),
    ("serve --tokens 2000 --budget 2048", "--tokens: 2,000 tokens have no two turns"),
    ("serve --sessions 1", "'--sessions'"),
)


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_measured_is_refused_at_once(tenure, tmp_path, line, said):
    file = tmp_path / "file"
    file.touch()
    options = [part.format(file=file) for part in line.split()]
    if options[0] != "tiers":
        options += ["--model", "nobody-has-it"]
    stderr = tenure("bench", *options, code=2).stderr
    assert said in " ".join(stderr.split())
    assert "nobody-has-it" not in stderr
