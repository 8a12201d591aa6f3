"""What the seeds of ``tenure bench regions`` say together: facts by region, intervals, paired tests, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tenure.bench import record
from tenure.bench.regions import RegionsConfig, cells, run_file, stored, summary_file, unpinned
from tenure.bench.regions_transcript import REGIONS, VERSION
from tenure.regions import Region

Seeds = dict[int, dict[str, Any]]
"""By seed, the arms of one model, length and budget."""

BASE = "h2o"
"""What every arm is compared with."""

_RESAMPLES = 9999


def load(folder: Path, config: RegionsConfig, model: str, length: int, budget: float) -> Seeds:
    """The stored seeds of one setting."""
    found: Seeds = {}
    for seed in config.seeds:
        played = stored(run_file(folder, model, length, budget, seed))
        if played is not None:
            found[seed] = played
    return found


def summarise(folder: Path, config: RegionsConfig) -> dict[str, Any]:
    """Write a summary for each model, length and budget, and one over all; returns the latter."""
    everything: dict[tuple[str, int, float], Seeds] = {}
    for model, length, budget in cells(config):
        seeds = load(folder, config, model, length, budget)
        if not seeds:
            continue
        everything[model, length, budget] = seeds
        first = next(iter(seeds.values()))
        record.write(
            summary_file(folder, model, length, budget),
            {
                "bench": "regions",
                **{key: first[key] for key in ("date", "commit", "machine") if key in first},
                "config": {
                    "model": model,
                    "length": length,
                    "budget": budget,
                    "chunk": first["config"]["chunk"],
                    "task_version": VERSION,
                },
                "seeds": sorted(seeds),
                "tokens": [seeds[seed]["tokens"] for seed in sorted(seeds)],
                "arms": {name: _arm(seeds, name) for name in _arms(seeds)},
            },
        )
    pooled = {
        model: {
            name: test
            for name in config.arms
            if name != BASE
            and (test := compare([s for (m, _, _), s in everything.items() if m == model], name)) is not None
        }
        for model in config.models
    }
    result = {"bench": "regions", **record.origin(), "pooled_against": BASE, "pooled": pooled}
    if everything:
        record.write(folder / "pooled.json", result)
    return result


def _arms(seeds: Seeds) -> list[str]:
    return list(dict.fromkeys(name for one in seeds.values() for name in one["arms"]))


def _arm(seeds: Seeds, name: str) -> dict[str, Any]:
    mine = [seeds[seed]["arms"][name] for seed in sorted(seeds) if name in seeds[seed]["arms"]]
    facts = {
        str(region): [sum(one["facts"][region][part] for one in mine) for part in (0, 1)]
        for region in REGIONS
    }
    free = [unpinned(one["facts"]) for one in mine]
    total = sum(asked for region, (_, asked) in mine[0]["facts"].items() if region != Region.SYSTEM)
    found: dict[str, Any] = {
        "facts": facts,
        "wall_s": round(sum(one["wall_s"] for one in mine), 3),
        "commits": sorted({one["commit"] for one in mine if one.get("commit")}),
        "unpinned": free,
        "unpinned_share": round(sum(free) / (total * len(free)), 4),
        "interval": interval([one / total for one in free]),
    }
    against = compare([seeds], name) if name != BASE else None
    return found if against is None else found | {f"against_{BASE}": against}


def interval(values: Sequence[float], seed: int = 0) -> list[float] | None:
    """95 % of the mean over seeds, drawn anew; None from fewer than two."""
    if len(values) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = rng.choice(np.asarray(values), (_RESAMPLES, len(values))).mean(1)
    return [round(float(end), 4) for end in np.quantile(means, [0.025, 0.975])]


def compare(settings: Sequence[Seeds], name: str) -> dict[str, Any] | None:
    """Facts of unpinned regions against :data:`BASE`, paired by seed; None where nothing is paired.

    The test exchanges the two arms within pairs (scipy's permutation test, one-sided: the arm is better). The pairs are
    transcripts, not facts, since the facts of one transcript hang together; settings of one seed share a transcript,
    so their differences are added before.
    """
    differences: dict[tuple[int, int], float] = {}
    for seeds in settings:
        for seed, one in seeds.items():
            if name in one["arms"] and BASE in one["arms"]:
                gap = unpinned(one["arms"][name]["facts"]) - unpinned(one["arms"][BASE]["facts"])
                pair = (seed, int(one["config"]["length"]))  # one of another length is another transcript
                differences[pair] = differences.get(pair, 0.0) + gap
    if not differences:
        return None
    values = np.array(list(differences.values()))
    return {
        "pairs": len(values),
        "mean": round(float(values.mean()), 4),
        "better": int((values > 0).sum()),
        "worse": int((values < 0).sum()),
        "p": permutation(values),
    }


def permutation(values: Any) -> float | None:
    """One-sided p of a mean above 0 under exchanges of sign; None from fewer than two pairs or where none differs."""
    from scipy.stats import permutation_test

    if len(values) < 2 or not np.any(values):
        return None
    test = permutation_test(
        (values,),
        np.mean,
        permutation_type="samples",
        n_resamples=_RESAMPLES,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return round(float(test.pvalue), 5)


def draw(folder: Path, config: RegionsConfig, out: Path, note: Callable[[str], None]) -> None:
    """A picture for each model and length: facts kept by region and arm, a panel a budget.

    The same numbers give the same file, to the byte.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for model in config.models:
        for length in config.lengths:
            shown = [
                (budget, json.loads(path.read_text(encoding="utf-8")))
                for budget in config.budgets
                if (path := summary_file(folder, model, length, budget)).exists()
            ]
            if not shown:
                continue
            arms = list(dict.fromkeys(name for _, one in shown for name in one["arms"]))
            height = 1.2 + 0.24 * len(arms)
            figure = Figure(figsize=(3 + 3.2 * len(shown), height), layout="constrained")
            panels = figure.subplots(1, len(shown), squeeze=False)[0]
            for axes, (budget, one) in zip(panels, shown, strict=True):
                _panel(axes, arms, one["arms"])
                axes.set_title(f"budget {budget:.1%}")
            figure.suptitle(f"facts found by region, {model}, {length:,} tokens")
            stem = summary_file(folder, model, length, shown[0][0]).stem.rsplit("-", 1)[0]
            path = out / f"regions-{stem}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            with rc_context({"svg.hashsalt": stem}):
                figure.savefig(path, metadata={"Date": None})
            note(str(path))


def _panel(axes: Any, arms: Sequence[str], found: Mapping[str, Any]) -> None:
    shares = np.full((len(arms), len(REGIONS)), np.nan)
    for row, name in enumerate(arms):
        for column, region in enumerate(REGIONS):
            if name in found:
                right, asked = found[name]["facts"][region]
                shares[row, column] = right / max(1, asked)
    axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(REGIONS)), [str(region) for region in REGIONS], rotation=60, ha="right")
    axes.set_yticks(range(len(arms)), arms)
    for row, column in np.argwhere(~np.isnan(shares)):
        share = shares[row, column]
        axes.text(
            column,
            row,
            f"{share:.0%}",
            ha="center",
            va="center",
            fontsize=6,
            color="w" if share < 0.6 else "k",
        )
