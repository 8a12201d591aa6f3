"""``tenure serve``: keys on the command line, and what is refused before a model is loaded."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tenure.cli import app
from tenure.serve.auth import Keys

run = CliRunner().invoke


def test_keys_are_added_listed_and_removed(tmp_path):
    file = tmp_path / "keys.json"
    made = run(app, ["serve", "keys", "add", "team", "--keys", str(file)])
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert Keys(file).tenant(f"Bearer {key}") == "team"
    listed = run(app, ["serve", "keys", "list", "--keys", str(file), "--json"])
    (one,) = json.loads(listed.stdout)
    assert one["tenant"] == "team"
    assert key not in listed.stdout
    assert "team" in run(app, ["serve", "keys", "list", "--keys", str(file)]).stdout
    assert run(app, ["serve", "keys", "remove", one["id"], "--keys", str(file)]).exit_code == 0
    assert Keys(file).list() == []
    assert run(app, ["serve", "keys", "remove", one["id"], "--keys", str(file)]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "tenure serve keys add"),
        (["--port", "70000"], "no port"),
        (["--policy", "full"], "without a budget"),
        (["--resident", "0"], "resident"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(options, words):
    result = run(app, ["serve", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
