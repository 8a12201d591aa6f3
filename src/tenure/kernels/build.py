"""Compiles the C kernels once for this machine, and says what its processor can do."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tenure.files import remove_parts, replace_file
from tenure.kernels.threads import openmp
from tenure.paths import cache_folder

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.c", "flash.c", "int8.c", "rows.c"))
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("bf16.h", "isa.h", "vectors.h"))
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC")
_OPENMP = "-fopenmp"
_LINES = 3  # of a failing compiler that are shown


@functools.cache
def capabilities() -> dict[str, Any]:
    """What torch knows of the processor; empty where this torch does not tell."""
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}


def has_tiles() -> bool:
    """Whether torch's bf16 products run on tiles (AMX)."""
    return bool(capabilities().get("amx_bf16"))


class BuildError(Exception):
    """The compiler failed; the text ends with the last lines of what it said."""


def load(compiler: Sequence[str]) -> ctypes.CDLL:
    """The library for this machine, built if need be; one that cannot be loaded is built once more.

    Args:
        compiler: the command, with arguments of its own.

    Raises:
        OSError: the folder cannot be written, the compiler not started, or the library not loaded.
        BuildError: the compiler failed.
        SubprocessError: it took too long.
    """
    library = build(compiler)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(build(compiler)))


def build(compiler: Sequence[str]) -> Path:
    """The library for this machine, from the cache folder or compiled into it. Errors as in :func:`load`."""
    target_of = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])
    # clang's OpenMP is not the one that torch ships.
    shared = openmp() is not None and b"__clang__" not in target_of
    key = blake2b(digest_size=12)
    for part in (
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        # The processor as the compiler sees it, and its own version.
        b"\n".join(sorted(target_of.splitlines())),
        " ".join((*compiler, *_FLAGS)).encode(),
        str(shared).encode(),
    ):
        key.update(part)
    target = cache_folder() / "native" / f"{key.hexdigest()}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_parts(target.parent)

    def write(part: Path) -> None:
        try:
            _compile(compiler, part, [_OPENMP], shared=shared)
        except BuildError:
            # A compiler without OpenMP, or without its library: one thread is better than none.
            _compile(compiler, part, [])

    replace_file(target, write)
    return target


def _compile(compiler: Sequence[str], built: Path, threads: Sequence[str], *, shared: bool = False) -> None:
    objects = [built.with_name(source.stem + ".o") for source in _SOURCES]
    for source, made in zip(_SOURCES, objects, strict=True):
        _run([*compiler, *_FLAGS, *threads, "-c", str(source), "-o", str(made)])
    # Left out at the link, OpenMP's symbols are torch's own: one pool of threads instead of two.
    linked = () if shared else threads
    _run([*compiler, "-shared", *map(str, objects), "-o", str(built), "-lm", *linked])


def _run(command: Sequence[str]) -> bytes:
    """What a command says."""
    done = subprocess.run(command, check=False, capture_output=True, timeout=120)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BuildError(f"{command[0]} gave {done.returncode}: " + " | ".join(said[-_LINES:]))
    return done.stdout
