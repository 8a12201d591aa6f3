"""The C kernels of this folder: built once with the user's compiler, kept in the cache folder.

They make decoding on a CPU read weights and keys at the speed of the memory, and attention of whole chunks run on
bf16 products where the CPU has them for vectors (AVX-512) and not for tiles (AMX, which torch's own kernel uses).
Where no compiler is at hand, or ``TENURE_NATIVE=0`` is set, torch's own operations do the work: slower, with the same
results to rounding.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import warnings

from tenure.kernels.attention import Attention
from tenure.kernels.build import BuildError, load
from tenure.kernels.decoding import Decoding
from tenure.kernels.products import Products


class Native(Products, Attention, Decoding):
    """All of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        Products.__init__(self, library)
        Attention.__init__(self, library)
        Decoding.__init__(self, library)


@functools.cache
def native() -> Native | None:
    """The kernels, built if need be; None where they cannot be had."""
    if os.environ.get("TENURE_NATIVE") == "0":
        return None
    try:
        found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
        compiler = shlex.split(os.environ.get("CC", "")) or found[:1]
        return Native(load(compiler)) if compiler else None
    except (OSError, ValueError, subprocess.SubprocessError, BuildError, AttributeError) as error:
        warnings.warn(f"native kernels could not be built, decoding will be slower: {error}", stacklevel=2)
        return None
