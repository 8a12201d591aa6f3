"""Compressors: fewer entries for a stretch of the cache. One file a method; names are bound on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tenure.compress.base import Compressor
from tenure.registry import look_up, make

METHODS: dict[str, tuple[str, str]] = {
    "gracekv": ("tenure.compress.gracekv", "GraceKV"),
    "snapkv": ("tenure.compress.snapkv", "SnapKV"),
    "pyramidkv": ("tenure.compress.pyramidkv", "PyramidKV"),
    "adakv": ("tenure.compress.adakv", "AdaKV"),
    "cake": ("tenure.compress.cake", "Cake"),
    "lagkv": ("tenure.compress.lagkv", "LagKV"),
    "expected": ("tenure.compress.expected", "ExpectedAttention"),
    "adakv-expected": ("tenure.compress.expected", "AdaExpectedAttention"),
    "keydiff": ("tenure.compress.keydiff", "KeyDiff"),
    "kvzip": ("tenure.compress.kvzip", "KVzip"),
    "twinkv": ("tenure.compress.twinkv", "TwinKV"),
    "streaming": ("tenure.compress.streaming", "Streaming"),
    "random": ("tenure.compress.streaming", "Random"),
}
"""Module and class of each method."""


def make_compressor(
    name: str, options: Mapping[str, Any] | None = None, *, option: str = "method"
) -> Compressor:
    """A method by name.

    Args:
        name: of the method.
        options: of the method.
        option: where the name was given, for errors.

    Raises:
        ConfigError: no such method, or it has no such option, or the option is of another type.
    """
    module, cls = look_up(METHODS, name, option=option)
    kind: type[Compressor] = getattr(import_module(module), cls)
    return make({name: kind}, name, options or {}, option=option)
