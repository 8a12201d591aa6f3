"""The child of ``sandbox``: limits itself, runs the code, then the tests. Imports nothing of Tenure.

It reads ``{"before", "blocks", "tests"}`` as JSON and writes a line ``passed N`` for each test that passes.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

_MEMORY = 512 << 20
_CPU_SECONDS = 8
_TEST_SECONDS = 1.0
_NEWUSER, _NEWNET = 0x10000000, 0x40000000
"""CLONE_NEWUSER and CLONE_NEWNET of Linux."""
_REFUSED = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "os.kill"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown"),
    *("os.truncate", "os.putenv", "os.utime", "os.setxattr", "os.removexattr", "shutil.", "ctypes.", "pty."),
    *("signal.pthread_kill", "tempfile.", "sqlite3.connect"),
)
_UNHEARD = (
    ("posix", "mkfifo"),
    ("posix", "mknod"),
    ("os", "mkfifo"),
    ("os", "mknod"),
    ("_posixsubprocess", "fork_exec"),
)
"""What makes files or processes without a word to audit hooks."""


def limit() -> None:
    """Bound what this process may use, and take the network away where the kernel lets us."""
    for name, most in (
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(name, (most, most))
    unshare = getattr(os, "unshare", None)  # from Python 3.12 on, Linux
    if unshare is not None:
        with contextlib.suppress(OSError):
            unshare(_NEWUSER | _NEWNET)


def silence() -> TextIO:
    """Take the standard streams away, so that only the tests' outcome reaches the parent; returns where that goes."""
    out = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    return out


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: no sockets, no processes, no writing."""
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused here")
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = isinstance(mode, str) and set(mode) & set("wax+")
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            raise PermissionError("writing files is refused here")


def _refused(*_: Any, **__: Any) -> None:
    raise PermissionError("files and processes are refused here")


class TooSlow(BaseException):
    """A test used up its second; not an Exception, so that code cannot swallow it by accident."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise TooSlow


@contextlib.contextmanager
def _timed(seconds: float) -> Iterator[None]:
    # Again and again: a loop around a bare `except` takes the first one for an error of its own.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def attempt(code: str, names: dict[str, Any], seconds: float) -> bool:
    """Run code; whether it went through."""
    try:
        with _timed(seconds), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "answer", "exec", dont_inherit=True), names)
    except BaseException:  # SystemExit, KeyboardInterrupt and TooSlow are failures of the code like any other
        return False
    return True


def whole(block: str) -> str:
    """The longest run of lines from the start that is Python: an answer may end in the middle of a line."""
    lines = block.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        code = "".join(lines[:count])
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            compile(code, "answer", "exec", dont_inherit=True)
            return code
    return ""


def main() -> None:
    """Read the work, do it, and tell what passed."""
    work = json.load(sys.stdin)
    out = silence()
    limit()
    signal.signal(signal.SIGALRM, _ring)
    # Loaded before the hook: imports of the code find them ready.
    names: dict[str, Any] = {"__name__": "answer"}
    exec(compile(work["before"], "before", "exec"), names)
    sys.modules["answer"] = sys.modules["__main__"]  # dataclasses look their module up
    for module, name in _UNHEARD:
        setattr(importlib.import_module(module), name, _refused)
    sys.addaudithook(refuse)
    for block in work["blocks"]:
        attempt(whole(block), names, 2 * _TEST_SECONDS)
    for number, test in enumerate(work["tests"]):
        if attempt(test, names, _TEST_SECONDS):
            out.write(f"passed {number}\n")
            out.flush()


if __name__ == "__main__":
    main()
