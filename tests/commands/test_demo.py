"""``tenure demo``: the arms run as one batch and say what each would say alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tenure import Engine
from tenure.bench.demo_session import build_demo
from tenure.commands.demo import ARMS
from tenure.commands.play import by_step
from tenure.config import SessionConfig

ARM = {"facts_found", "facts_total", "residency", "kv_bytes", "full_kv_bytes", "tokens", "seconds"}
SMALL = ["--tokens", 3000, "--budget", 320, "--chunk", 200, "--max-tokens", 6, "--dtype", "fp32"]


def test_json_is_the_last_line(tenure, tiny_folder):
    out = tenure("demo", "-m", tiny_folder, *SMALL).stdout
    found = json.loads(out.splitlines()[-1])
    assert list(found) == ["arms"]
    assert list(found["arms"]) == ["h2o", "foresight", "pace"]
    assert all(set(arm) == ARM for arm in found["arms"].values())
    assert {arm["facts_total"] for arm in found["arms"].values()} == {12}
    assert len({arm["tokens"] for arm in found["arms"].values()}) == 1
    assert found["arms"]["pace"]["kv_bytes"] < found["arms"]["pace"]["full_kv_bytes"]
    assert "What is the value of LEASE_RENEWAL_MS?" in out.replace("\n", " ")


def test_json_only_and_the_full_arm(tenure, tiny_folder):
    out = tenure("demo", "-m", tiny_folder, *SMALL, "--full", "--json").stdout
    assert len(out.splitlines()) == 1
    arms = json.loads(out)["arms"]
    assert arms["full"]["residency"] == 1.0
    assert arms["pace"]["residency"] == arms["foresight"]["residency"]


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_alone_says_the_same(tenure, tiny_folder, name, monkeypatch):
    """The arms share every forward; in fp32 none of them may notice."""
    shown = []
    monkeypatch.setattr("tenure.commands.demo.show", lambda arms, *_: shown.extend(arms))
    tenure("demo", "-m", tiny_folder, *SMALL)
    engine = Engine.load(tiny_folder, dtype="fp32")
    file = build_demo(engine.tokenizer, 3000, 0)
    session = engine.session(SessionConfig(budget=320, chunk=200, **ARMS[name]), plan=file.plan())
    for messages in by_step(file.messages):
        session.append(messages)
    arm = next(arm for arm in shown if arm.name == name)
    assert session.stats() == arm.session.stats()
    alone = [session.fork().ask(probe.message, max_tokens=6).strip() for probe in file.probes]
    assert alone == arm.answers


def test_forks_that_do_not_fit_memory_at_once(tenure, tiny_folder, monkeypatch):
    def arms():
        found = json.loads(tenure("demo", "-m", tiny_folder, *SMALL, "--json").stdout)["arms"]
        return {name: {**arm, "seconds": 0} for name, arm in found.items()}

    together = arms()
    monkeypatch.setattr("tenure.commands.demo._FORK_BYTES", 1)
    assert arms() == together


def test_too_little_room(tenure, tiny_folder):
    assert "--tokens" in tenure("demo", "-m", tiny_folder, "--tokens", 10, code=2).stderr


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_shows_what_it_claims():
    """On the real model: PACE at least twice the facts of H2O, and no fewer than foresight alone."""
    # With all threads, and without the poison and the checks after each step that the other tests run under.
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TENURE_POISON")}
    done = subprocess.run(
        [sys.executable, "-m", "tenure", "demo", "--json"], env=environment, capture_output=True, check=True
    )
    found = {name: arm["facts_found"] for name, arm in json.loads(done.stdout)["arms"].items()}
    assert found["pace"] >= 2 * found["h2o"]
    assert found["pace"] >= found["foresight"] > 0
