"""The command line of ``tenure bench regions``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tenure.bench.options import AsJson, Device, Dtype
from tenure.errors import ConfigError


def regions(
    models: Annotated[
        str, typer.Option("--model", help="Models, separated by commas.")
    ] = "qwen2.5-coder-0.5b",
    lengths: Annotated[
        str, typer.Option(help="Tokens of the transcripts, separated by commas.")
    ] = "450,1700",
    budgets: Annotated[str, typer.Option(help="Shares of the transcript, in percent.")] = "12.5,25,50",
    seeds: Annotated[str, typer.Option(help="Of the transcripts: 0-9, or 0,3,5.")] = "0-9",
    arms: Annotated[
        str, typer.Option(help="Which arms, separated by commas; `all` takes every one.")
    ] = "all",
    chunk: Annotated[int, typer.Option(help="Tokens a forward; evictions happen between chunks.")] = 256,
    table: Annotated[
        Path | None, typer.Option("--regions", help="Region table of `tenure calibrate`.", show_default=False)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    folder: Annotated[Path, typer.Option(help="Where results go.")] = Path("results/regions"),
    plots: Annotated[
        Path | None, typer.Option(help="Draw pictures into this folder.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep arms that are stored already.")] = False,
    summed: Annotated[
        bool, typer.Option("--stored", help="Play nothing, sum up what is stored of these settings.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Play nothing, write the transcripts to this file for `tenure calibrate`.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which regions of an agent's session still answer: 24 planted facts, paired arms, seeds and budgets."""
    from tenure.bench import regions as bench
    from tenure.bench import regions_summary as summary

    config = bench.RegionsConfig(
        models=tuple(_names(models)),
        lengths=tuple(_whole(one, "lengths") for one in _names(lengths)),
        budgets=tuple(_share(one) for one in _names(budgets)),
        seeds=tuple(_seeds(seeds)),
        arms=tuple(bench.ARMS) if arms == "all" else tuple(_names(arms)),
        chunk=chunk,
        dtype=dtype,
        device=device,
        regions=None if table is None else str(table),
    )
    console = Console(stderr=True)
    if export is not None:
        typer.echo(f"{bench.export(config, export)} transcripts in {export}")
        return
    with console.status("loading") as status:
        if not summed:
            bench.run(config, folder, status.update, resume=resume)
        result = summary.summarise(folder, config)
        if plots is not None:
            summary.draw(folder, config, plots, status.update)
    if not as_json:
        for model, tests in result["pooled"].items():
            shown = Table("arm", "pairs", "facts more", "better", "worse", "p", title=f"{model}: against h2o")
            for name, one in tests.items():
                shown.add_row(name, *(str(one[key]) for key in ("pairs", "mean", "better", "worse", "p")))
            console.print(shown)
    typer.echo(json.dumps(result["pooled"]))


def _names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _whole(text: str, option: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{text!r} is not a whole number", option=option)
    return int(text)


def _share(text: str) -> float:
    try:
        return float(text) / 100
    except ValueError:
        raise ConfigError(
            f"{text!r} is no number", option="budgets", way_out="Give 12.5, for example"
        ) from None


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for one in _names(text):
        first, dash, last = one.partition("-")
        low = _whole(first, "seeds")
        found += range(low, (_whole(last, "seeds") if dash else low) + 1)
    return found
