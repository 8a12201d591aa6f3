"""Comparing methods on the prompts that all of them have played."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Cell = Mapping[str, Any]
"""A cell of :func:`tenure.bench.ruler.run.summary`."""


def is_full(cell: Cell) -> bool:
    """Whether it is of a cache that was not compressed."""
    return str(cell["method"]).removeprefix("kvpress-") == "full"


def is_variant(cell: Cell) -> bool:
    """Whether it is of a method with other options than its own."""
    return ":" in cell["method"]


def over(cell: Cell, seeds: Collection[str]) -> dict[str, Any]:
    """A cell over some of its prompts."""
    prompts = {seed: cell["prompts"][seed] for seed in seeds}
    means = {
        name: statistics.fmean(one[name] for one in prompts.values()) for name in next(iter(prompts.values()))
    }
    return {**cell, **means, "n": len(prompts), "prompts": prompts}


def on_shared_prompts(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Cells over the prompts of a (family, ratio) that all methods with such a cell have played.

    Those of the full cache come once for each ratio.

    Args:
        cells: of one mode and length.
    """
    groups: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells:
        if not is_full(cell):
            groups.setdefault((cell["family"], cell["ratio"]), []).append(cell)
    found: list[dict[str, Any]] = []
    for (family, ratio), group in groups.items():
        group += [{**cell, "ratio": ratio} for cell in cells if is_full(cell) and cell["family"] == family]
        if seeds := set.intersection(*(set(cell["prompts"]) for cell in group)):
            found += [over(cell, seeds) for cell in group]
    return found


def of_all_families(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of the ratios that every family among them has: a mean over fewer is no mean of the same."""
    families: dict[float, set[str]] = {}
    for cell in cells:
        families.setdefault(cell["ratio"], set()).add(cell["family"])
    every = set().union(*families.values())
    return [cell for cell in cells if families[cell["ratio"]] == every]


def ranks(cells: Sequence[Cell], method: str = "gracekv") -> dict[str, Any]:
    """How often a method is first and second of all in a (mode, family, length, ratio), ties shared.

    It is held against each other method over the prompts that both have played. Cells in which every method scores 0 rank
    nobody, nor do those that only this method has. ``alone`` counts those in which no other is as good.
    """
    places: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        if not is_full(cell) and not is_variant(cell):
            key = cell["mode"], cell["family"], cell["tokens"], cell["ratio"]
            places.setdefault(key, {})[cell["method"]] = cell
    better, level, empty = {}, {}, 0
    for key, group in places.items():
        if method not in group:
            continue
        mine, pairs = group[method], []
        for name, cell in group.items():
            if name != method and (seeds := mine["prompts"].keys() & cell["prompts"].keys()):
                pairs.append((over(cell, seeds)["score"], over(mine, seeds)["score"]))
        if not pairs:
            continue
        if not any(score > 0 for pair in pairs for score in pair):
            empty += 1
            continue
        better[key] = sum(theirs > ours for theirs, ours in pairs)
        level[key] = sum(theirs >= ours for theirs, ours in pairs)
    return {
        "method": method,
        "cells": len(better),
        "first": sum(count == 0 for count in better.values()),
        "alone": sum(count == 0 for count in level.values()),
        "second": sum(count == 1 for count in better.values()),
        "lost": [list(key) for key, count in better.items() if count > 1],
        "empty": empty,
    }
