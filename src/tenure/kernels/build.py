"""Compiles the C kernels once for this machine, and says what its processor can do."""

from __future__ import annotations

import functools
import platform
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tenure.kernels.threads import openmp
from tenure.paths import cache_folder

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.c", "flash.c", "int8.c", "rows.c"))
_HEADERS = (Path(__file__).with_name("vectors.h"),)
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-fopenmp")


@functools.cache
def capabilities() -> dict[str, Any]:
    """What torch knows of the processor; empty where this torch does not tell."""
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}


def has_tiles() -> bool:
    """Whether torch's bf16 products run on tiles (AMX)."""
    return bool(capabilities().get("amx_bf16"))


def build(compiler: str) -> Path:
    """The library for this machine, from the cache folder or compiled into it.

    Raises:
        OSError: the folder cannot be written, or the compiler not started.
        SubprocessError: the compiler failed.
    """
    shared = openmp() is not None
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    key = blake2b(digest_size=12)
    for part in (
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        version,
        " ".join(_FLAGS).encode(),
        _machine().encode(),
        str(shared).encode(),
    ):
        key.update(part)
    target = cache_folder() / "native" / f"{key.hexdigest()}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder, "native.so")
        objects = [Path(folder, source.stem + ".o") for source in _SOURCES]
        commands = [
            [compiler, *_FLAGS, "-c", str(source), "-o", str(made)]
            for source, made in zip(_SOURCES, objects, strict=True)
        ]
        # Left out at the link, OpenMP's symbols are torch's own: one pool of threads instead of two.
        linked = [] if shared else ["-fopenmp"]
        commands.append([compiler, "-shared", *map(str, objects), "-o", str(built), "-lm", *linked])
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        built.replace(target)
    return target


def _machine() -> str:
    """What ``-march=native`` hangs on."""
    return f"{platform.machine()} {sorted(capabilities().items(), key=str)}"
