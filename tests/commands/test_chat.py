"""``tenure chat`` with its input from a pipe."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def chat(tenure, tiny_folder):
    def call(text, *options, code=0):
        return tenure(
            "chat", "-m", tiny_folder, "--budget", 128, "--max-tokens", 5, *options, stdin=text, code=code
        )

    return call


def test_answers_until_the_end_of_input(chat):
    out = chat("Hello\n\nAgain\n").stdout
    assert out.count("5 tokens at") == 2
    assert "cut at --max-tokens" in out


def test_commands(chat):
    out = chat(
        "/help\nHello\n/stats\n/explain\n/explain user-2\n/plan\n/quit\nnever\n", "--system", "Be kind."
    ).stdout
    assert "/explain [SPAN]" in out
    assert "resident" in out
    assert "system-1" in out
    assert "no plan" in out
    assert out.count("5 tokens at") == 1


def test_mistakes_do_not_end_it(chat):
    out = chat("/frobnicate\n/explain attic\n/plan later\nHello\n").stdout
    assert "no command /frobnicate" in out
    assert "no span 'attic'" in out
    assert "unknown step 'later'" in out
    assert out.count("5 tokens at") == 1


def test_reset_forgets(chat):
    out = chat("Hello\n/reset\n/stats\n").stdout
    assert "a new session" in out
    assert " tokens             0" in out


def test_plan_steps(chat, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"steps": [{"id": "draft"}, {"id": "check", "reads": ["user-1"]}]}))
    out = chat("/plan\n/plan draft\nHello\n/plan\n", "--plan", plan).stdout
    assert "draft  reads nothing" in out
    assert "check  reads user-1" in out
    assert "done  draft" in out.split("5 tokens at")[1]


def test_bad_plan_file(chat, tmp_path):
    assert "cannot be read" in chat("", "--plan", tmp_path / "none.json", code=2).stderr
    (tmp_path / "bad.json").write_text('{"steps": [{"id": 5}]}')
    assert "steps[0].id" in chat("", "--plan", tmp_path / "bad.json", code=2).stderr


def test_steps_in_brackets(chat, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"steps": [{"id": "app/[slug]"}, {"id": "x[/b]"}]}))
    out = chat(
        "/plan app/[slug]\n/plan x[/b]\n/plan\n/plan [/i]\n/[/i]\n/explain [/i]\n", "--plan", plan
    ).stdout
    assert "belongs to step app/[slug]" in out
    assert "belongs to step x[/b]" in out
    assert "no command /[/i]" in out
