"""The command line of ``tenure bench ruler``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tenure.bench.options import AsJson, Device, Dtype, Model, numbers

LENGTHS = "4096,8192,16384"
MODES = "agnostic,aware"
RATIOS = "1.33,2,3,4,8,16,32,64,128"
FAMILIES = "single,multikey,multivalue,multiquery,variables,common,frequent,twohop,continuation"


def ruler(
    model: Model = "qwen2.5-coder-0.5b",
    tokens: Annotated[str, typer.Option(help="Lengths of the contexts, separated by commas.")] = LENGTHS,
    families: Annotated[str, typer.Option(help="Families of tasks.")] = FAMILIES,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, options behind a colon: gracekv:floor=0; separated by semicolons. All by default.",
            show_default=False,
        ),
    ] = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="GraceKV without each of its parts.")
    ] = False,
    ratios: Annotated[str, typer.Option(help="Tokens for each entry.")] = RATIOS,
    modes: Annotated[str, typer.Option(help="agnostic, aware: whether the question is known.")] = MODES,
    seeds: Annotated[int, typer.Option(min=1, help="Prompts of each family and length.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="Number of the first.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Leave prompts alone that are done.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/ruler"),
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """What compressed contexts still answer: RULER's families, every method and ratio on the same reading."""
    from tenure.bench import record
    from tenure.bench.ruler import run as bench
    from tenure.bench.ruler.compare import ranks
    from tenure.commands.places import check_file
    from tenure.engine import Engine

    given = bench.ABLATIONS if ablations else bench.METHODS
    if methods is not None:
        given = tuple(name.strip() for name in methods.split(";") if name.strip())
    settings = bench.Settings(
        model=model,
        tokens=numbers(tokens, "tokens", int),
        families=tuple(one.strip() for one in families.split(",")),
        methods=given,
        ratios=numbers(ratios, "ratios", float),
        modes=tuple(one.strip() for one in modes.split(",")),
        dtype=dtype,
        device=device,
    )
    folder = results / settings.name
    check_file(folder / "prompt.json", "results")
    with Console(stderr=True).status("loading") as status:
        engine = Engine.load(model, dtype=dtype, device=device, threads=threads)
        found = bench.run(
            engine, settings, folder, range(first_seed, first_seed + seeds), resume=resume, note=status.update
        )
    record.write(
        results / f"{settings.name}.json",
        {"bench": "ruler", **record.origin(), "model": model, **found, "ranks": ranks(found["cells"])},
    )
    if not as_json:
        Console().print(table(found["cells"]))
    typer.echo(json.dumps({"cells": len(found["cells"]), "ranks": ranks(found["cells"])}))


def table(cells: list[dict[str, Any]]) -> Table:
    """A row for each mode, length, method; a column for each ratio; scores are means over the families of tasks.

    Continuations, which are scored by agreement with the full cache, have rows of their own.
    """
    ratios = sorted({cell["ratio"] for cell in cells if cell["method"] != "full"})
    shown = Table(
        "score of",
        "mode",
        "tokens",
        "method",
        *(f"{ratio:g}x" for ratio in ratios),
        "build s",
        title="tenure bench ruler",
    )
    rows: dict[tuple[str, str, int, str], dict[float, list[dict[str, Any]]]] = {}
    for cell in cells:
        kind = "continuation" if cell["family"] == "continuation" else "tasks"
        key = (kind, cell["mode"], cell["tokens"], cell["method"])
        rows.setdefault(key, {}).setdefault(cell["ratio"], []).append(cell)
    for (kind, mode, tokens, method), by_ratio in sorted(rows.items()):
        every = [cell for group in by_ratio.values() for cell in group]
        scores = []
        for ratio in ratios:
            group = by_ratio.get(ratio if method != "full" else 1.0)
            scores.append(f"{sum(c['score'] for c in group) / len(group):.2f}" if group else "-")
        build = sum(cell["build_s"] for cell in every) / len(every)
        shown.add_row(kind, mode, f"{tokens:,}", method, *scores, f"{build:.2f}")
    return shown
