"""Threads of OpenMP beside those of Python.

Every thread that computes has a pool of helpers of its own. With more of them than cores, GNU's runtime no longer waits
awake for the next parallel piece, and decoding, which has hundreds of them a token, takes half as long again. So there
is one pool at a time: who has loaded a model gives up his, and threads that move spans compute alone.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

_SOFT = 1


@functools.cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch ships, its symbols visible to later libraries; None if torch ships none."""
    shipped = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return ctypes.CDLL(str(shipped[0]), mode=ctypes.RTLD_GLOBAL) if shipped else None


def give_up_helpers() -> None:
    """End the pool of the calling thread. Its next parallel operation makes a new one."""
    runtime = openmp()
    if runtime is not None and hasattr(runtime, "omp_pause_resource_all"):
        runtime.omp_pause_resource_all(_SOFT)


def compute_alone() -> None:
    """Let the calling thread compute without helpers from now on."""
    torch.get_num_threads()  # sets the number once a thread, on first use
    runtime = openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(1)
