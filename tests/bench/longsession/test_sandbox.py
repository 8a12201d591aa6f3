"""Code of a model runs in a child that cannot hang, write, connect or take the tests along."""

from __future__ import annotations

import resource
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
    listed = "1. The function:\n   ```python\n   def f():\n       return 1\n\n   ```"
    assert code_blocks(listed) == ["def f():\n    return 1\n\n"]


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


def test_code_that_catches_everything_is_stopped_again():
    code = "import time\ndef f():\n    try:\n        time.sleep(60)\n    except:\n        time.sleep(60)"
    assert outcome(code, "f()", "assert 1 == 1") == [False, True]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.write(1, b'passed 0\\npassed 1\\n')",
        "import sys; print('passed 0', file=sys.__stdout__, flush=True)",
    ],
)
def test_code_cannot_say_that_a_test_has_passed(code):
    assert outcome(code, "assert False", "assert True") == [False, True]


def test_a_flood_of_output_goes_nowhere():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = "import os\nfor stream in (1, 2):\n    for _ in range(2000): os.write(stream, bytes(1 << 18))"
    assert outcome(code, "assert True") == [True]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB of the GB


def test_a_full_pipe_stops_its_writer(monkeypatch):
    monkeypatch.setattr("tenure.bench.longsession.sandbox.SECONDS", 1.5)
    code = "import os\nout = next(n for n in range(3, 32) if os.path.exists(f'/proc/self/fd/{n}'))"
    started = time.monotonic()
    assert outcome(code, "assert 1", "while True: os.write(out, b'x' * 65536)") == [True, False]
    assert time.monotonic() - started < 5


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
        "import _posixsubprocess\ntry: _posixsubprocess.fork_exec()\nexcept TypeError: pass",
        f"import os; os.utime({str(target)!r}, (0, 0))",
        f"import posix; posix.mkfifo({str(tmp_path / 'new')!r})",
        f"import sqlite3; sqlite3.connect({str(tmp_path / 'new')!r}).execute('create table a (b)')",
    )
    assert outcome("", *tries) == [False] * len(tries)
    assert target.read_text() == "before"
    assert target.stat().st_mtime > 0
    assert list(tmp_path.iterdir()) == [target]


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    assert outcome(
        "import os", "assert 'SECRET_OF_THE_PARENT' not in os.environ", "assert not os.listdir('.')"
    ) == [
        True,
        True,
    ]
