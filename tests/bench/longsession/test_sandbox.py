"""Code of a model runs in a child that cannot hang, write, connect or take the tests along."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tenure.bench.longsession.checks import Checks
from tenure.bench.longsession.sandbox import code_blocks, run_checks


def outcome(code: str, *tests: str) -> list[bool]:
    return run_checks(f"```python\n{code}\n```", Checks("", tests))


def test_blocks():
    assert code_blocks("Here:\n```python\na = 1\n```\nand\n```\nb = 2\n```") == ["a = 1\n", "b = 2\n"]
    assert code_blocks("```python\na = 1\nb =") == ["a = 1\nb ="]
    assert code_blocks("```python\na = 1\n```\n```python\na =") == ["a = 1\n"]
    assert code_blocks("a = 1") == ["a = 1"]
    assert code_blocks("```bash\nls\n```") == []


def test_names_pass_from_block_to_test():
    answer = "```python\nx = 3\n```\nfor example\n```python\nprint(x)\nraise ValueError\n```"
    assert run_checks(
        answer, Checks("y = 4", ("assert x + y == 7", "assert x == 4", "x = 9", "assert x == 9"))
    )


def test_a_failing_block_keeps_what_it_had():
    assert outcome("x = 1\n1 / 0\ny = 2", "assert x == 1", "assert y == 2") == [True, False]


@pytest.mark.parametrize(
    "code", ["while True: pass", "import sys; sys.exit()", "x = bytearray(10 ** 10)", "x = ("]
)
def test_what_never_ends_or_stops_early_leaves_the_tests(code):
    started = time.monotonic()
    assert outcome(code, "assert 1 == 1", "assert x") == [True, False]
    assert time.monotonic() - started < 9


def test_a_slow_test_does_not_take_the_next_along():
    assert outcome("def f():\n    while True: pass", "f()", "assert 1 == 1") == [False, True]


def test_a_dead_child_fails_the_rest():
    assert outcome("import os", "pass", "os._exit(0)", "pass") == [True, False, False]


def test_nothing_leaves_the_child(tmp_path: Path):
    target = tmp_path / "file"
    target.write_text("before")
    tries = (
        f"open({str(target)!r}, 'w').write('after')",
        f"import pathlib; pathlib.Path({str(target)!r}).unlink()",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import ctypes; ctypes.CDLL(None)",
    )
    assert outcome("", *tries) == [False] * len(tries)
    assert target.read_text() == "before"


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    assert outcome(
        "import os", "assert 'SECRET_OF_THE_PARENT' not in os.environ", "assert not os.listdir('.')"
    ) == [
        True,
        True,
    ]
