"""Memory that the C library keeps after it was freed.

The activations of each forward are large and their sizes differ with the number of tokens, so pieces of memory stay
behind between blocks that live longer. In a long session of turns of different lengths they add up to tens of megabytes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

EVERY = 16384
"""Tokens between two times that memory is given back. It takes a few milliseconds each time."""


class Heap:
    """Gives freed memory back to the system now and then, where the C library is GNU's.

    Args:
        every: tokens computed between two times.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._since = 0

    def computed(self, tokens: int) -> bool:
        """Note a forward of some tokens; returns whether it was time."""
        self._since += tokens
        if self._since < self._every:
            return False
        self.give_back()
        return True

    def give_back(self) -> None:
        """Give back what was freed by now."""
        self._since = 0
        trim = _trim()
        if trim is not None:
            trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
