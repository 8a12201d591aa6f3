"""The command line itself: help, and what it says to bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tenure import Engine
from tenure.version import __version__

GOOD = {"role": "user", "content": "Hello there."}


def test_help_is_quick_and_needs_no_torch():
    code = "import sys, tenure.cli; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["run", "explain", "compress", "chat", "models", "doctor", "bench", "demo"]
)
def test_every_command_has_help(tenure, command):
    assert command in tenure("--help").stdout
    assert "--help" in tenure(command, "--help").stdout


def test_version(tenure):
    assert tenure("--version").stdout == f"tenure {__version__}\n"


def test_python_m_tenure():
    out = subprocess.run(
        [sys.executable, "-m", "tenure", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout == f"tenure {__version__}\n"


OPTIONS = [
    (["--budget", "0"], "--budget: 0 slots cannot hold 4 sinks and one more"),
    (["--budget", "4"], "at least 5"),
    (["--budget", "-7"], "--budget: -7"),
    (["--budget", "1000000000000"], "--budget: a slab of 1,000,000,002,176 slots needs"),
    (
        ["--budget", "64", "--chunk", "64", "--limit", "100"],
        "--limit: 100 is below budget 64 + chunk 64 + slack 128",
    ),
    (["--policy", "h3o"], "Did you mean 'h2o'?"),
    (["--policy", "full", "--budget", "64"], "Leave the budget out"),
    (["--policy-option", "fast"], "--policy-option: 'fast' is not KEY=VALUE"),
    (["--policy-option", "speed=3"], "speed"),
    (["--planner-option", "fast"], "--planner-option: 'fast' is not KEY=VALUE"),
    (["--planner", "llm+online", "--planner-option", "most=3"], "--planner-option: 'most' is not one of"),
    (["--positions", "round"], "--positions: 'round' is not known"),
    (["--granularity", "head"], "--granularity: 'head' is not known"),
    (["--compress", "zip"], "--compress: 'zip' is not known"),
    (["--chunk", "0"], "--chunk: 0 is too small"),
    (["--slack", "0"], "--slack: 0 is too small"),
    (["--sinks", "-1"], "--sinks: -1 is too small"),
    (["--dtype", "fp8"], "--dtype: 'fp8' is not known"),
    (["--device", "tpu9"], "--device: 'tpu9' is no torch device"),
    (["--threads", "0"], "--threads: 0 threads cannot run"),
    (["--temperature", "-1"], "--temperature: -1.0 cannot be used"),
    (["--top-p", "0"], "--top-p: 0.0 cannot be used"),
    (["--max-tokens", "0"], "--max-tokens: 0 cannot be used"),
    (["--model", "gpt-9"], "'gpt-9' is not a known model"),
    (["--model", "./nowhere/at/all"], "no such file or folder"),
    (["--model", "missing.gguf"], "no such file or folder"),
    (["--config", "missing.toml"], "missing.toml"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=[" ".join(options) for options, _ in OPTIONS])
def test_bad_option(tenure, tiny_folder, session_file, options, text):
    result = tenure("run", session_file(GOOD), "--model", tiny_folder, *options, code=2)
    assert text in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["serve", "--session-memory", "0.0001", "--model"], "--session-memory: one session takes"),
        (["bench", "longsession", "--arms", "h3o", "--model"], "--arms: 'h3o' is not known"),
    ],
    ids=["serve", "bench"],
)
def test_an_error_names_the_flag_however_the_config_calls_it(tenure, tiny_folder, command, text):
    assert text in " ".join(tenure(*command, tiny_folder, code=2).stderr.split())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_full_disk_behind_stdout_is_told(tiny_folder, session_file):
    with open("/dev/full", "w") as full:
        command = [
            sys.executable,
            "-m",
            "tenure",
            "run",
            str(session_file(GOOD)),
            "-m",
            tiny_folder,
            "--json",
        ]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


FILES = {
    "broken line": ([GOOD, '{"role": "user", '], ":2: broken JSON"),
    "no object": (["17"], ":1: expected an object"),
    "unknown region": ([{**GOOD, "region": "attic"}], ":1: region: unknown region 'attic'"),
    "no text": ([{"role": "user"}], ":1: content: no text"),
    "half a surrogate": (['{"role": "user", "content": "x\\ud800"}'], ":1: content: half a surrogate pair"),
    "unknown span": ([{**GOOD, "step": "s", "reads": ["cellar"]}], "no earlier line defines 'cellar'"),
    "unknown role": ([{**GOOD, "role": "poet"}], "unknown role 'poet'"),
    "nothing": ([], "no messages"),
    "pins": ([{"role": "user", "content": "word " * 500, "pin": True}], "the budget is 64"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_file(tenure, tiny_folder, session_file, name):
    lines, text = FILES[name]
    result = tenure("run", session_file(*lines), "-m", tiny_folder, "--budget", 64, "--chunk", 64, code=2)
    assert text in " ".join(result.stderr.split())


def test_file_that_is_none(tenure, tiny_folder, tmp_path):
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        assert "cannot be read" in tenure("run", path, "-m", tiny_folder, code=2).stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[session]\nbudgets = 5\n", "unknown option 'budgets'"),
        ("[session]\nbudget = 'big'\n", "'big' is not a whole number"),
        ("[engine]\nspeed = 5\n", "unknown option 'speed'"),
        ("[engine\n", "options.toml"),
        ("engine = 3\n", "engine is 3 Make it a table, [engine]"),
        ("[engine]\ntiers = 'host:1M'\n", "tiers is 'host:1M' Make it a list"),
        ("[sesion]\nbudget = 64\n", "nothing reads 'sesion', did you mean [session]?"),
        ("budget = 64\n", "nothing reads 'budget' Its tables are [engine], [session], [serve]"),
        ("[session]\npolicy_options = 3\n", "policy_options is 3"),
        ("[session]\nplanner = 'online'\nplanner_options = 3\n", "planner_options is 3"),
        ("[session]\nregions = 3\n", "regions"),
    ],
)
def test_bad_config_file(tenure, tiny_folder, session_file, tmp_path, text, message):
    (tmp_path / "options.toml").write_text(text)
    result = tenure(
        "run", session_file(GOOD), "-m", tiny_folder, "--config", tmp_path / "options.toml", code=2
    )
    assert message in " ".join(result.stderr.split())


def test_config_file_then_environment_then_options(tenure, tiny_folder, session_file, tmp_path, monkeypatch):
    (tmp_path / "options.toml").write_text(
        "[engine]\ndtype = 'fp32'\n[session]\nbudget = 99\nchunk = 33\nslack = 5\n"
    )
    monkeypatch.setenv("TENURE_CHUNK", "44")
    monkeypatch.setenv("TENURE_MODEL", tiny_folder)
    path = session_file(GOOD)
    out = tenure("run", path, "--config", tmp_path / "options.toml", "--slack", 6, "--json").stdout
    result = json.loads(out)
    assert (result["model"], result["budget"], result["chunk"], result["limit"]) == (tiny_folder, 99, 44, 256)


def test_model_that_does_not_fit_memory(tenure, tiny_folder, session_file, monkeypatch):
    monkeypatch.setattr("tenure.models.folder.free_memory", lambda device: 1000)
    result = tenure("run", session_file(GOOD), "-m", tiny_folder, code=2)
    assert "the weights need" in result.stderr


def test_no_network(tenure, session_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TENURE_CACHE", str(tmp_path))
    result = tenure("run", session_file(GOOD), "--model", "someone/something", code=2)
    assert "someone/something" in result.stderr


@pytest.mark.parametrize(
    "text", ["a\0b", "x" * 20_000, "zero\u200bwidth \U0001f9ea"], ids=["nul", "no space", "unicode"]
)
def test_unusual_text_is_read(tenure, tiny_folder, session_file, text):
    path = session_file({"role": "user", "content": text}, {"probe": "And?", "max_tokens": 2})
    result = json.loads(tenure("run", path, "-m", tiny_folder, "--budget", 128, "--json").stdout)
    assert result["answers"][0]["tokens"] == 2


@pytest.fixture
def long_answer(session_file):
    return session_file(
        GOOD, {"probe": "One?", "max_tokens": 3}, {"probe": "Tell me everything.", "max_tokens": 200_000}
    )


def test_ctrl_c_prints_what_there_is(tiny_folder, long_answer):
    call = [sys.executable, "-m", "tenure", "run", str(long_answer), "-m", tiny_folder, "--budget", "256"]
    process = subprocess.Popen(
        call,
        env={**os.environ, "TENURE_POISON": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("Tell me everything." in line for line in iter(process.stdout.readline, ""))
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in out
    assert "Interrupted. " in err
    assert "Traceback" not in err


def test_ctrl_c_leaves_whole_json(tenure, tiny_folder, long_answer, monkeypatch):
    step, calls = Engine.step, []

    def interrupted(self, sessions):
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return step(self, sessions)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = json.loads(tenure("run", long_answer, "-m", tiny_folder, "--json", code=130).stdout)
    assert result["interrupted"] is True
    assert [answer["tokens"] for answer in result["answers"]] == [3, 15]
