"""How a function of the C library becomes one of Python: pointers, whole numbers, and the threads it computes with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int8: "i8"}
"""What the names of functions for a dtype end with."""


def bind(library: ctypes.CDLL, name: str, arguments: Sequence[Any], result: Any = None) -> Callable[..., Any]:
    """A function of the library.

    Where the library brings an OpenMP along that is not torch's (clang's, or the system's where torch ships none), each
    call first has it compute with as many threads as torch does in the calling thread.

    Raises:
        AttributeError: it has none of that name.
    """
    function: Any = getattr(library, name)
    function.argtypes, function.restype = list(arguments), result
    set_threads: Any = getattr(library, "omp_set_num_threads", None)

    def call(*values: Any) -> Any:
        set_threads(torch.get_num_threads())
        return function(*values)

    bound: Callable[..., Any] = function if set_threads is None else call
    return bound
