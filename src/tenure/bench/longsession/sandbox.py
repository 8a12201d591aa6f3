"""Runs a model's code and the hidden tests in a limited child process.

``python -I -S`` in an empty folder of its own with an empty environment and no standard streams, limits on CPU time,
memory, file size and processes, no network namespace where the system allows that, and an audit hook that refuses
sockets, processes and writing in any case. What it prints goes nowhere, and what it leaves running ends with it. That
stops accidents of generated code; it is no jail for code that attacks, and files can be read.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tenure.bench.longsession.checks import Checks

SECONDS = 10
"""Wall time of one answer's tests."""

_CHILD = Path(__file__).with_name("child.py")
_FENCE = re.compile(r"^([ \t]*)```[ \t]*(\w*)[^\n]*\n(.*?)(^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_OUTPUT = 1 << 16
"""Bytes of a child's output that are read: as many as a pipe holds, and far more than a few lines."""


def code_blocks(answer: str) -> list[str]:
    """The Python of an answer: its fenced blocks; all of it without any fence. A block in a list is indented with it.

    A last block that is not closed was cut by the limit. It counts only where there is no other: a model that begins
    to repeat itself would replace what it has written by half of it.
    """
    found = [
        (re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", body, flags=re.MULTILINE), bool(end))
        for indent, language, body, end in _FENCE.findall(answer)
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
        with process:
            try:
                out = _outcome(process, work.encode())
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # itself, or what it has left behind
    # The code may die at any test: those without a line have failed.
    passed = {int(word) for word in re.findall(rb"^passed (\d{1,9})$", out, re.MULTILINE)}
    return [number in passed for number in range(len(checks.tests))]


def _outcome(process: subprocess.Popen[bytes], work: bytes) -> bytes:
    """What a child has written within its time. A pipe that is full stops it: a flood does not get here."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(work)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS)
    os.set_blocking(process.stdout.fileno(), False)
    return process.stdout.read(_OUTPUT) or b""
