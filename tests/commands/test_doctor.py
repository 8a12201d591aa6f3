"""``tenure doctor`` passes a good engine, and each check fails on a broken one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tenure.commands import checks, doctor, peak, session_checks
from tenure.errors import IntegrityError
from tenure.kernels import cpu
from tenure.memory import Memory
from tenure.session import Session
from tenure.transcript import Transcript
from tests.conftest import tiny_model
from tests.templates import tokenizer

NAMES = [
    *("shift invariance", "masks", "second turn", "tokenizer", "eviction", "rotation", "executors"),
    *("memory", "dtype and speed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Smaller than the others': a doctor reads some thousand tokens many times."""
    path = tmp_path_factory.mktemp("model")
    fast = tokenizer("chatml")
    tiny_model("qwen2", layers=2, vocab_size=len(fast)).save_pretrained(path)
    fast.save_pretrained(path)
    return str(path)


def failing(folder):
    return {check.name: check for check in doctor.examine(folder, memory=False) if not check.passed}


def test_json(tenure, folder):
    result = tenure("doctor", "-m", folder, "--json")
    found = json.loads(result.stdout)
    assert found["model"] == folder
    assert found["pass"] is True
    assert [check["name"] for check in found["checks"]] == NAMES
    assert all(set(check) == {"name", "pass", "measured", "threshold", "detail"} for check in found["checks"])


def test_lines(tenure, folder):
    out = tenure("doctor", "-m", folder, "--dtype", "bf16").stdout
    assert out.count("pass  ") == len(NAMES)
    assert "all 9 checks pass" in out
    assert "bfloat16 on cpu" in out


def test_bad_options(tenure, folder):
    assert "--dtype: 'fp8'" in tenure("doctor", "-m", folder, "--dtype", "fp8", code=2).stderr
    assert "'gpt-9'" in tenure("doctor", "-m", "gpt-9", code=2).stderr


@pytest.mark.parametrize(
    "options", [("--dtype", "int4"), ("--device", "gpu"), ("--device", "meta")], ids=" ".join
)
def test_options_are_checked_before_a_model_is_fetched(tenure, monkeypatch, options):
    monkeypatch.setattr("tenure.models.sources.resolve", lambda *_, **__: pytest.fail("fetched"))
    result = tenure("doctor", "-m", "smollm2-135m", *options, code=2)
    assert f"{options[0]}: {options[1]!r}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ("import sys; sys.exit('first\\nno room for 7 GB')", "no room for 7 GB"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
        ("", "ended with 0 and said nothing"),
        ("import time; time.sleep(60)", "not done after 0.5 s"),
    ],
    ids=["fails", "is killed", "is mute", "hangs"],
)
def test_a_peak_that_cannot_be_measured_is_a_failed_check(monkeypatch, child, words):
    run = subprocess.run
    monkeypatch.setattr(peak, "_LONGEST", 0.5 if "sleep" in child else 60)
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", child], **options))
    check = session_checks.memory("any", "fp32")
    assert not check.passed
    assert words in check.detail


def test_wrong_rotation_is_found(tenure, folder, monkeypatch):
    right = cpu.rotate
    monkeypatch.setattr(cpu, "rotate", lambda x, cos, sin: right(x, cos, sin * 0.999))
    out = tenure("doctor", "-m", folder, code=1).stdout
    assert "FAIL  rotation" in out


def test_absolute_positions_are_found(folder, monkeypatch):
    right = cpu.rotate
    # Queries and keys get different angles: nothing that depends on distance alone.
    monkeypatch.setattr(
        cpu, "rotate", lambda x, cos, sin: right(x, cos, -sin) if x.shape[0] == 4 else right(x, cos, sin)
    )
    assert {"shift invariance", "rotation"} <= set(failing(folder))


def test_leaking_mask_is_found(folder, monkeypatch):
    right = cpu.attend
    monkeypatch.setattr(
        cpu, "attend", lambda q, k, v, causal, scale: right(q, k, v, causal=False, scale=scale)
    )
    found = failing(folder)
    assert "layer 1 is the first that leaks" in found["masks"].detail
    assert "rotation" in found


def test_broken_invariant_is_found(folder, monkeypatch):
    def broken(self):
        if self.config.budget == 128:
            raise IntegrityError("rows and ids disagree")

    monkeypatch.setattr(Memory, "check_integrity", broken)
    found = failing(folder)
    assert list(found) == ["eviction"]
    assert "rows and ids disagree" in found["eviction"].detail


def test_missing_stop_is_found(folder, monkeypatch):
    monkeypatch.setattr(Session, "stop_ids", property(lambda self: frozenset()))
    assert "does not stop an answer" in failing(folder)["tokenizer"].detail


def test_missing_end_of_turn_is_found(folder, monkeypatch):
    monkeypatch.setattr(Transcript, "_assistant_end", lambda self: "")
    assert "second turn" in failing(folder)


@pytest.mark.parametrize("template", ["headers", "strict", "reasoning"])
def test_other_templates(tmp_path, template):
    """A start id that both the tokenizer and the template write, and a template that rewrites old turns."""
    fast = tokenizer(template, add_bos=template != "reasoning")
    tiny_model("llama", layers=2, vocab_size=len(fast)).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    assert not failing(str(tmp_path))


def test_model_without_a_template(tmp_path):
    fast = tokenizer("chatml")
    fast.chat_template = None
    tiny_model("llama", layers=2, vocab_size=len(fast)).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    checks = {check.name: check for check in doctor.examine(str(tmp_path), memory=False)}
    assert all(check.passed for check in checks.values())
    assert "skipped" in checks["second turn"].detail


def test_a_peak_that_was_not_said_is_found(monkeypatch):
    from tenure.commands import peak, session_checks

    said = {"base": 500e6, "weights": 200e6, "slab": 50e6, "activations": 50e6, "stated": 800e6}
    for measured, passed in ((830e6, True), (770e6, True), (850e6, False), (740e6, False), (0, True)):
        monkeypatch.setattr(peak, "in_own_process", lambda *_, top=measured: {**said, "peak": top})
        check = session_checks.memory("any", "auto")
        assert check.passed is passed
        assert "800 MB said" in check.detail
        assert session_checks.memory("any", "auto", "int8").passed is (measured != 850e6)


def test_the_last_checks_take_the_weights_that_are_asked_for(tenure, folder, monkeypatch):
    asked = []
    said = {"base": 5, "weights": 2, "slab": 1, "activations": 1, "stated": 9, "peak": 0}
    monkeypatch.setattr(peak, "in_own_process", lambda *given: asked.append(given) or said)
    real = checks.speed

    def speed(engine, ours):
        asked.append(engine.config.weights)
        return real(engine, ours)

    monkeypatch.setattr(checks, "speed", speed)
    tenure("doctor", "-m", folder, "--weights", "int8", "--dtype", "bf16", "--json")
    assert asked == [(folder, "bf16", "int8"), "int8"]
