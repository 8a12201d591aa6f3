"""Runs a model's code and the hidden tests in a limited child process.

``python -I -S`` in an empty folder of its own with an empty environment, limits on CPU time, memory, file size and
processes, no network namespace where the system allows that, and an audit hook that refuses sockets, processes and
writing in any case. That stops accidents of generated code; it is no jail for code that attacks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tenure.bench.longsession.checks import Checks

SECONDS = 10
"""Wall time of one answer's tests."""

_CHILD = Path(__file__).with_name("child.py")
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def code_blocks(answer: str) -> list[str]:
    """The Python of an answer: its fenced blocks; all of it without any fence.

    A last block that is not closed was cut by the limit. It counts only where there is no other: a model that begins
    to repeat itself would replace what it has written by half of it.
    """
    found = [
        (body, bool(end))
        for language, body, end in _FENCE.findall(answer)
        if language.lower() in ("", "python", "py", "python3")
    ]
    closed = [body for body, whole in found if whole]
    return closed or [body for body, _ in found] or ([] if "```" in answer else [answer])


def run_checks(answer: str, checks: Checks) -> list[bool]:
    """Which hidden tests an answer passes.

    Blocks run one after another, each as far as it is Python; a statement that raises ends its block only. Each
    test sees all the names so far.
    """
    work = json.dumps({"before": checks.before, "blocks": code_blocks(answer), "tests": checks.tests})
    with tempfile.TemporaryDirectory(prefix="tenure-checks-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(work.encode(), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            out = _kill(process)
        finally:
            if process.poll() is None:
                _kill(process)
    # The code may die at any test: those without a line have failed.
    passed = {int(word) for word in re.findall(rb"^passed (\d+)$", out, re.MULTILINE)}
    return [number in passed for number in range(len(checks.tests))]


def _kill(process: subprocess.Popen[bytes]) -> bytes:
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]
