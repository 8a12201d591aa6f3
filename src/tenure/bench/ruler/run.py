"""A run of ``tenure bench ruler``: a file a (model, family, tokens, seed), so that it can be stopped and resumed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.bench import record
from tenure.bench.ruler.play import MODES, RATIOS, Variant, ask, go_on
from tenure.bench.ruler.tasks import FAMILIES, PROSE, VERSIONS, made_of, make, prose_key
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.engine import Engine

METHODS: tuple[str, ...] = (
    "gracekv",
    "kvzip",
    "snapkv",
    "pyramidkv",
    "adakv",
    "cake",
    "lagkv",
    "expected",
    "adakv-expected",
    "keydiff",
    "twinkv",
    "streaming",
    "random",
)
ABLATIONS: tuple[str, ...] = (
    "gracekv",
    "gracekv:trees=false",
    "gracekv:quotas=true",
    "gracekv:floor=0.0",
    "gracekv:floor=0.6",
    'gracekv:slots="uniform"',
    "gracekv:hops=0",
    "gracekv:hops=2",
    "gracekv:pool=1",
    "gracekv:repeat=0.0",
    "gracekv:repeat=0.05",
    "gracekv:guess=false",
    "gracekv:pooled=true",
    'gracekv:apart="split"',
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all prompts of a run share.

    Args:
        model: by name.
        tokens: lengths of the contexts.
        families: of tasks, and ``continuation``.
        methods: names, with options behind a colon.
        ratios: tokens for each entry.
        modes: whether compressors know the question: ``agnostic``, ``aware``.
        dtype: of weights and cache.
        device: a torch device.
    """

    model: str
    tokens: tuple[int, ...] = (4096, 8192, 16384)
    families: tuple[str, ...] = (*FAMILIES, "continuation")
    methods: tuple[str, ...] = METHODS
    ratios: tuple[float, ...] = RATIOS
    modes: tuple[str, ...] = MODES
    dtype: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        known = (*FAMILIES, "continuation")
        for option, given, allowed in (("families", self.families, known), ("modes", self.modes, MODES)):
            if unknown := [name for name in given if name not in allowed]:
                raise ConfigError(
                    f"{unknown[0]!r} is not known", option=option, way_out="Known: " + ", ".join(allowed)
                )
            if not given:
                raise ConfigError("none is given", option=option, way_out="Known: " + ", ".join(allowed))
        if not self.methods:
            raise ConfigError("none is given", option="methods", way_out="Give gracekv, for example")
        for name in self.methods:
            Variant.parse(name)
        if short := [length for length in self.tokens if length < 1]:
            raise ConfigError(
                f"{short[0]} tokens are no context", option="tokens", way_out="Give 4096, for example"
            )
        # A ratio of 1 is the full cache, which is always among the cells.
        if low := [ratio for ratio in self.ratios if not 1 < ratio < math.inf]:
            raise ConfigError(f"{low[0]:g} is no ratio", option="ratios", way_out="Give more than 1")

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]


def run(
    engine: Engine,
    settings: Settings,
    folder: Path,
    seeds: Iterable[int],
    *,
    resume: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Play all prompts and sum up.

    Args:
        engine: the loaded model.
        settings: what is asked.
        folder: of the files; one a prompt.
        seeds: of the prompts.
        resume: play only methods of which a prompt's file lacks a cell that is asked for.
        note: told what is going on.

    Returns:
        ``{"cells": [...]}``, see :func:`summary`.
    """
    variants = [Variant.parse(name) for name in settings.methods]
    seeds = list(seeds)
    check_folder(folder, settings.tokens, settings.families, seeds, settings.dtype)
    for tokens in settings.tokens:
        for seed in seeds:
            for family in settings.families:
                path = folder / f"{family}-{tokens}-{seed:04d}.json"
                there = _stored(path, settings, family) if resume and path.exists() else []
                missing = [one for one in variants if _lacks(there, one, settings, family)]
                if not missing:
                    continue
                note(f"{family}, {tokens} tokens, seed {seed}")
                cells = _cells(engine, settings, family, tokens, seed, missing)
                record.write(path, {**_head(settings, family, tokens, seed), "cells": merged(there, cells)})
    return summary(folder)


def _stored(path: Path, settings: Settings, family: str) -> list[dict[str, Any]]:
    """Cells of a prompt's file.

    Raises:
        ConfigError: it is damaged, or of other tasks, another model or dtype.
    """
    found = load(path)
    mine = {key: getattr(settings, key) for key in ("model", "dtype", "device")}
    check_tasks(path, found.get("config", {}), family, mine)
    return list(found["cells"])


def check_tasks(path: Path, told: Mapping[str, Any], family: str, mine: Mapping[str, Any]) -> None:
    """Refuse to go on from a prompt's file with other tasks, another prose, or other settings than ``mine``.

    Raises:
        ConfigError: it is one.
    """
    made = made_of(family)
    if "prose" not in told:  # recorded before it was told
        made.pop("prose", None)
    record.check_same(path, told, {**made, **mine}, "results")


def check_folder(
    folder: Path,
    tokens: Sequence[int],
    families: Sequence[str],
    seeds: Sequence[int],
    dtype: str | None = None,
) -> None:
    """Refuse a folder whose files could not be summed up with those of a run, before it is played.

    Args:
        folder: of the files.
        tokens: lengths of the run's prompts; their own files are looked at when they are gone on from.
        families: of the run's prompts.
        seeds: of the run's prompts.
        dtype: of the run.

    Raises:
        ConfigError: it has one.
    """
    own = {f"{family}-{length}-{seed:04d}.json" for family in families for length in tokens for seed in seeds}
    seen: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    seen |= {f"prose of {family}": prose_key() for family in families if family in PROSE}
    for path in sorted(folder.glob("*-*-*.json")):
        if path.name not in own:
            _check_alike(path, load(path), seen)


def _check_alike(path: Path, found: Mapping[str, Any], seen: dict[str, Any]) -> None:
    """Refuse a prompt's file of old tasks, or unlike those that were ``seen`` before."""
    told = found.get("config", found)
    mine = {"task_version": VERSIONS.get(found["family"])}
    for key, name in (("prose", f"prose of {found['family']}"), ("model", "model"), ("dtype", "dtype")):
        if key in told:
            mine[key] = seen.setdefault(name, told[key])
    record.check_same(path, told, mine, "results", "Give another folder, or move this file away")


def load(path: Path) -> dict[str, Any]:
    """The file of a prompt.

    Raises:
        ConfigError: it is damaged.
    """
    return record.read(path, ("cells",), "no cells of a prompt")


def _lacks(cells: Sequence[Mapping[str, Any]], variant: Variant, settings: Settings, family: str) -> bool:
    """Whether a cell of a method is missing; a continuation has no question that could be known."""
    modes = ("agnostic",) if family == "continuation" else settings.modes
    there = {(cell["mode"], cell["ratio"]) for cell in cells if cell["method"] == variant.name}
    return any((mode, ratio) not in there for mode in modes for ratio in settings.ratios)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells of a prompt after another run, which may have asked other methods or ratios."""

    def key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
        return cell["method"], cell["mode"], cell["ratio"]

    again = {key(cell) for cell in new}
    return [*(cell for cell in old if key(cell) not in again), *new]


def _head(settings: Settings, family: str, tokens: int, seed: int) -> dict[str, Any]:
    return {
        "bench": "ruler",
        **record.origin(),
        "config": {**made_of(family), **asdict(settings)},
        "family": family,
        "tokens": tokens,
        "seed": seed,
    }


def _cells(
    engine: Engine, settings: Settings, family: str, tokens: int, seed: int, variants: Sequence[Variant]
) -> list[dict[str, Any]]:
    if family == "continuation":
        return list(go_on(engine, seed, tokens, variants, settings.ratios))
    tokenizer = engine.tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    prompt = make(family, seed, tokens, count)
    return list(ask(engine, prompt, variants, settings.ratios, settings.modes))


def summary(folder: Path) -> dict[str, Any]:
    """Means over the seeds, a cell for each method, mode, family, length and ratio.

    ``prompts`` of a cell tells each seed's ``score`` and ``kl``: methods are compared on what all of them have played.
    ``prose`` tells of which prose a family's prompts are, as far as their files tell it.

    Args:
        folder: with files of :func:`run`, or of peers in the same form.

    Raises:
        ConfigError: a file is damaged, or of tasks as they were before, or two are not of the same prose, model or dtype.
    """
    seen: dict[str, Any] = {}
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-*-*.json")):
        found = load(path)
        _check_alike(path, found, seen)
        for cell in found["cells"]:
            key = (cell["method"], cell["mode"], found["family"], found["tokens"], cell["ratio"])
            groups.setdefault(key, {})[str(found["seed"])] = cell
    cells = []
    for (method, mode, family, tokens, ratio), prompts in groups.items():
        group = list(prompts.values())
        cell = {
            "method": method,
            "mode": mode,
            "family": family,
            "tokens": tokens,
            "ratio": ratio,
            "n": len(group),
            "prompts": {
                seed: {name: one[name] for name in ("score", "kl") if name in one}
                for seed, one in prompts.items()
            },
        }
        for name in ("score", "kl", "kv_bytes", "build_s", "prefill_s"):
            values = [one[name] for one in group if name in one]
            if values:
                cell[name] = statistics.fmean(values)
        if told := [one["stages"] for one in group if "stages" in one]:
            cell["stages"] = {stage: statistics.fmean(one[stage] for one in told) for stage in told[0]}
        cells.append(cell)
    prose = {family: seen[name] for family in sorted(PROSE) if (name := f"prose of {family}") in seen}
    return {"cells": cells, "prose": prose}
