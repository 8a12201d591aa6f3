"""Compressors: fewer entries for a stretch of the cache. One file a method; names are bound on first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from tenure.compress.base import Compressor
from tenure.errors import ConfigError

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


def make_compressor(name: str, options: Mapping[str, Any] | None = None) -> Compressor:
    """A method by name.

    Raises:
        ConfigError: no such method, or it has no such option.
    """
    if name not in METHODS:
        raise ConfigError(
            f"{name!r} is not known", option="method", way_out="Give one of " + ", ".join(METHODS)
        )
    module, cls = METHODS[name]
    kind: type[Compressor] = getattr(import_module(module), cls)
    known = [item.name for item in fields(kind)]
    if unknown := sorted(set(options or {}) - set(known)):
        raise ConfigError(
            f"{name} has no option {unknown[0]!r}",
            option="options",
            way_out="It has: " + (", ".join(known) or "none"),
        )
    return kind(**(options or {}))
