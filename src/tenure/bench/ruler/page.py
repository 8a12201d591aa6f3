"""RULER's section of the results page: a table and a plot a model, our cells and kvpress's together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tenure.bench.ruler.compare import Cell, is_full, is_variant, of_all_families, on_shared_prompts, ranks
from tenure.errors import ConfigError


def is_summary(found: Mapping[str, Any]) -> bool:
    """Whether a result sums prompts up; the files of single prompts are not shown."""
    return "seed" not in found


def by_model(found: Iterable[Mapping[str, Any]]) -> dict[str, list[Cell]]:
    """Cells of all summaries of a model.

    Raises:
        ConfigError: two summaries of a model have prompts of different prose under the same seeds.
    """
    models: dict[str, list[Cell]] = {}
    prose: dict[tuple[str, str], str] = {}
    for one in found:
        model = str(one["model"])
        models.setdefault(model, []).extend(one["cells"])
        for family, key in one.get("prose", {}).items():
            if prose.setdefault((model, family), key) != key:
                raise ConfigError(
                    f"two runs of {model} have prompts of {family} with different prose",
                    option="results",
                    way_out="Play one of them again with the Python of the other, or move it away",
                )
    return models


def _tasks(cells: Sequence[Cell], mode: str, tokens: int) -> list[Cell]:
    """Cells of one grid, the full cache's among them, without continuations."""
    return [
        cell
        for cell in cells
        if cell["tokens"] == tokens and cell["mode"] in (mode, "any") and cell["family"] != "continuation"
    ]


def _compared(cells: Sequence[Cell], mode: str, tokens: int) -> Sequence[Cell]:
    """Cells of one grid that can be compared: at each ratio the same families of all methods, and the same prompts."""
    tasks = of_all_families(_tasks(cells, mode, tokens))
    families: dict[tuple[str, float], set[str]] = {}
    for cell in tasks:
        families.setdefault((cell["method"], cell["ratio"]), set()).add(cell["family"])
    most = max(map(len, families.values()), default=0)
    return on_shared_prompts(
        [cell for cell in tasks if is_full(cell) or len(families[cell["method"], cell["ratio"]]) == most]
    )


def means(cells: Sequence[Cell], mode: str, tokens: int) -> dict[str, dict[float, float]]:
    """Mean score over RULER's families of every method and ratio, on the same prompts, without continuations."""
    found: dict[str, dict[float, list[float]]] = {}
    for cell in _compared(cells, mode, tokens):
        found.setdefault(cell["method"], {}).setdefault(cell["ratio"], []).append(cell["score"])
    return {
        method: {ratio: statistics.fmean(scores) for ratio, scores in ratios.items()}
        for method, ratios in found.items()
    }


def section(models: Mapping[str, Sequence[Cell]]) -> str:
    """Tables of all models: a row a method, best mean first."""
    lines: list[str] = []
    for model, all_cells in sorted(models.items()):
        lines.append(f"### {model}\n")
        cells = [cell for cell in all_cells if not is_variant(cell)]
        for mode, tokens in _grids(cells):
            families = _families(cells, mode, tokens)
            if len(families) <= 2:  # one method beside the full cache
                continue
            every, shared = set().union(*families.values()), set.intersection(*families.values())
            whole = [cell for cell in cells if families.get(cell["method"]) == every and not _is_peers(cell)]
            lines += _table(whole, mode, tokens)
            fewer = [
                cell
                for cell in cells
                if (cell["mode"], cell["tokens"]) == (mode, tokens)
                and (_is_peers(cell) or families.get(cell["method"], every) != every)
            ]
            if fewer and shared:
                ratios = {cell["ratio"] for cell in fewer}
                both = [
                    cell for cell in cells
                    if cell["family"] in shared and (is_full(cell) or cell["ratio"] in ratios)
                ]  # fmt: skip
                lines += _table(both, mode, tokens)
        lines += _continued(cells)
        lines += _ablated(all_cells)
        lines += _built(cells)
        lines.append(_standing(cells) + "\n")
    return "\n".join(lines)


def _table(cells: Sequence[Cell], mode: str, tokens: int) -> list[str]:
    """Means of methods that have the same families."""
    here = _compared(cells, mode, tokens)
    rows = means(cells, mode, tokens)
    ratios = sorted({ratio for row in rows.values() for ratio in row if ratio > 1})
    if not ratios:
        return []
    known = "unknown" if mode == "agnostic" else "known"
    lines = [
        f"Mean score of {_spread(cells, mode, tokens)}, {tokens:,} tokens, question {known} to the compressor.\n"
    ]
    middle = 8.0 if 8.0 in ratios else ratios[len(ratios) // 2]
    columns = (f"{ratio:g}x" for ratio in ratios)
    lines += _heading("method", *columns, "build s", "prefill s", f"K/V MB at {middle:g}x")
    full = sorted({cell["method"] for cell in cells if is_full(cell)} & rows.keys(), reverse=True)
    rest = sorted(set(rows) - set(full), key=lambda name: (-statistics.fmean(rows[name].values()), name))
    for name in full + rest:
        scores = [rows[name].get(ratio) for ratio in ratios]
        shown = " | ".join("-" if score is None else f"{score:.2f}" for score in scores)
        mine = [cell for cell in here if cell["method"] == name]
        more = (
            _mean(mine, "build_s"),
            _mean(mine, "prefill_s"),
            _mean([cell for cell in mine if cell["ratio"] == middle], "kv_bytes", 1e6),
        )
        lines.append(f"| {name} | {shown} | {' | '.join(more)} |")
    return [*lines, ""]


def _heading(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _families(cells: Sequence[Cell], mode: str, tokens: int) -> dict[str, set[str]]:
    """Families of tasks that each method has played."""
    found: dict[str, set[str]] = {}
    for cell in _tasks(cells, mode, tokens):
        found.setdefault(cell["method"], set()).add(cell["family"])
    return found


def _spread(cells: Sequence[Cell], mode: str, tokens: int) -> str:
    """Which families and how many prompts of each."""
    tasks = _compared(cells, mode, tokens)
    counts = [cell["n"] for cell in tasks]
    prompts = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    families = ", ".join(sorted({cell["family"] for cell in tasks}))
    return f"{families} ({prompts} prompt{'s' if max(counts) > 1 else ''} each)"


def _continued(cells: Sequence[Cell]) -> list[str]:
    """How near the next 256 tokens of real text stay to the full cache's."""
    lines: list[str] = []
    mine = [cell for cell in cells if cell["family"] == "continuation" and not is_full(cell)]
    for tokens in sorted({cell["tokens"] for cell in mine}):
        here = on_shared_prompts([cell for cell in mine if cell["tokens"] == tokens])
        ratios = sorted({cell["ratio"] for cell in here})
        lines += [
            f"Next tokens of real text after {tokens:,}: share with the full cache's likeliest, and KL in nats.\n"
        ]
        lines += _heading("method", *(f"{ratio:g}x" for ratio in ratios))
        rows: dict[str, dict[float, Cell]] = {}
        for cell in here:
            rows.setdefault(cell["method"], {})[cell["ratio"]] = cell
        for name, row in sorted(
            rows.items(), key=lambda one: statistics.fmean(c["kl"] for c in one[1].values())
        ):
            shown = [
                f"{row[ratio]['score']:.3f}, {row[ratio]['kl']:.3f}" if ratio in row else "-"
                for ratio in ratios
            ]
            lines.append(f"| {name} | {' | '.join(shown)} |")
        lines.append("")
    return lines


def _ablated(cells: Sequence[Cell]) -> list[str]:
    """A table a grid: GraceKV as it is and without each of its parts, on the prompts that all of them have played."""
    mine = [cell for cell in cells if cell["method"].partition(":")[0] in ("gracekv", "full")]
    lines: list[str] = []
    for mode, tokens in _grids([cell for cell in mine if is_variant(cell)]):
        here = _tasks(mine, mode, tokens)
        shared = set.intersection(*_families(here, mode, tokens).values())
        played = [
            {cell["ratio"] for cell in here if cell["method"] == name}
            for name in {cell["method"] for cell in here if not is_full(cell)}
        ]
        ratios = set.intersection(*played)
        both = [
            cell for cell in here if cell["family"] in shared and (is_full(cell) or cell["ratio"] in ratios)
        ]
        if ratios and both:
            lines += ["GraceKV with one option changed at a time:\n", *_table(both, mode, tokens)]
    return lines


def _built(cells: Sequence[Cell], ratio: float = 8.0) -> list[str]:
    """A table of what GraceKV's build takes beside the reading of the same context, and its stages."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        if cell["method"] == "gracekv" and cell["ratio"] == ratio and "stages" in cell:
            groups.setdefault((cell["tokens"], cell["mode"]), []).append(cell)
    if not groups:
        return []
    stages = list(next(iter(groups.values()))[0]["stages"])
    lines = [
        f"GraceKV's build at {ratio:g}x over reading the same context in the same run, and each stage's share of it.\n"
    ]
    lines += _heading("tokens", "question", "build s", "over reading", *stages)
    for (tokens, mode), group in sorted(groups.items()):
        build = statistics.fmean(cell["build_s"] for cell in group)
        over = build / statistics.fmean(cell["prefill_s"] for cell in group)
        shares = [statistics.fmean(cell["stages"][stage] for cell in group) / build for stage in stages]
        known = "unknown" if mode == "agnostic" else "known"
        lines.append(
            f"| {tokens:,} | {known} | {build:.2f} | {over:.2f} | {' | '.join(f'{share:.0%}' for share in shares)} |"
        )
    return [*lines, ""]


def _standing(cells: Sequence[Cell]) -> str:
    """How GraceKV stands among all methods, cell by cell."""
    found = ranks(cells)
    lost = ", ".join(
        f"{family} {tokens:,} {ratio:g}x ({mode})" for mode, family, tokens, ratio in found["lost"]
    )
    first, alone, second = found["first"], found["alone"], found["second"]
    return (
        f"Of {found['cells']} cells (mode, family, length, ratio), ties shared, gracekv is first in {first}, in {alone} "
        f"of them alone, and second in {second}; in {found['empty']} cells all score 0, which ranks nobody."
        + (f" Behind that: {lost}." if lost else "")
    )


def draw(models: Mapping[str, Sequence[Cell]], images: Path) -> dict[str, Path]:
    """A picture a model: mean score over the ratio, a panel for each mode and length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pictures: dict[str, Path] = {}
    for model, all_cells in sorted(models.items()):
        cells = [cell for cell in all_cells if not is_variant(cell)]
        grids = [grid for grid in _grids(cells) if _worth_drawing(_comparable(cells, *grid))]
        if not grids:
            continue
        wide = min(len(grids), 3)
        high = -(-len(grids) // wide)
        figure, panels = plt.subplots(
            high, wide, figsize=(5 * wide + 2, 4 * high), squeeze=False, sharey=True
        )
        for panel in panels.flat[len(grids) :]:
            panel.set_visible(False)
        lines: dict[str, Any] = {}
        for panel, (mode, tokens) in zip(panels.flat, grids, strict=False):
            for method, row in sorted(_comparable(cells, mode, tokens).items()):
                ratios = sorted(row)
                theirs = _is_peers({"method": method})
                style = {
                    "linestyle": "--" if theirs else "-",
                    "marker": "x" if theirs else ".",
                    "color": _colour(method),
                }
                if is_full({"method": method}):
                    style |= {"linestyle": ":", "color": "grey"}
                width = 3 if method == "gracekv" else 1.2
                (lines[method],) = panel.plot(
                    ratios, [row[ratio] for ratio in ratios], linewidth=width, **style
                )
            panel.set_xscale("log", base=2)
            panel.set_xlabel("tokens for each entry")
            panel.set_title(f"{tokens:,} tokens, question {'unknown' if mode == 'agnostic' else 'known'}")
        for row in panels:
            row[0].set_ylabel("mean score of the families")
        figure.legend(
            lines.values(), lines.keys(), fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
        path = images / f"ruler-{model.rstrip('/').rsplit('/', 1)[-1]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.tight_layout()
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)
        pictures[f"Scores over the ratio, {model}"] = path
    return pictures


def _comparable(cells: Sequence[Cell], mode: str, tokens: int) -> dict[str, dict[float, float]]:
    """Means of the methods that have all families."""
    families = _families(cells, mode, tokens)
    most = max(map(len, families.values()))
    return {name: row for name, row in means(cells, mode, tokens).items() if len(families[name]) == most}


def _is_peers(cell: Cell) -> bool:
    """Whether another library made it, which has played fewer prompts: what it has is compared apart."""
    return str(cell["method"]).startswith("kvpress")


def _worth_drawing(rows: Mapping[str, Mapping[float, float]]) -> bool:
    """Whether some methods can be compared over some ratios."""
    compressed = [row for name, row in rows.items() if not is_full({"method": name})]
    return len(compressed) > 1 and max(map(len, compressed)) > 1


def _colour(method: str) -> Any:
    """The same for a method of kvpress as for ours of that name; black for GraceKV."""
    import matplotlib as mpl

    from tenure.bench.ruler.run import METHODS

    name = {"kvpress-adakv-snapkv": "adakv"}.get(method, method.removeprefix("kvpress-"))
    if name == "gracekv":
        return "black"
    return mpl.colormaps["tab20"](METHODS.index(name) if name in METHODS else len(METHODS))


def _grids(cells: Sequence[Cell]) -> list[tuple[str, int]]:
    """Modes and lengths that there are cells of, in order."""
    return sorted(
        {
            (cell["mode"], cell["tokens"])
            for cell in cells
            if cell["mode"] != "any" and cell["family"] != "continuation"
        }
    )


def _mean(cells: Sequence[Cell], name: str, unit: float = 1.0) -> str:
    values = [cell[name] / unit for cell in cells if name in cell]
    return f"{statistics.fmean(values):.2f}" if values else "-"
