"""``tenure calibrate``: half-lives of regions from attention on a user's own transcripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from tenure.commands.options import ModelOptions, load_engine
from tenure.commands.places import check_file, check_plot, writing
from tenure.errors import ConfigError
from tenure.region_table import CLOCKS, Clock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run(
    paths: Sequence[Path],
    model: ModelOptions,
    *,
    out: Path | None,
    plot: Path | None,
    clock: str,
    threshold: float,
    stride: int,
    page: int,
    most: int,
    seed: int,
    as_json: bool,
) -> None:
    """Read the transcripts with a full cache, and print, store and draw the half-lives."""
    from rich.console import Console
    from rich.text import Text

    from tenure.bench import record
    from tenure.bench.calibration import plots, survival, transcripts
    from tenure.bench.calibration.trace import join, trace

    known: dict[str, Clock] = {name: name for name in CLOCKS}
    if clock not in known:
        raise ConfigError(f"{clock!r} is not known", option="clock", way_out="Known: " + ", ".join(CLOCKS))
    if threshold <= 0:
        raise ConfigError(f"{threshold} is no attention", option="threshold", way_out="Give 1, a fair share")
    if stride < 1:
        raise ConfigError(f"{stride} tokens are no chunk", option="stride", way_out="Give 16, for example")
    if page < 1:
        raise ConfigError(f"{page} tokens are no page", option="page", way_out="Give 1 to tell tokens apart")
    _need("scipy")
    check_plot(plot)
    if out is not None:
        check_file(out, "out")
    chats = [(path, chat) for path in paths for chat in transcripts.load(path)]
    engine = load_engine(model)
    console = Console(stderr=True)
    parts, spans = [], 0
    with console.status("") as status:
        for number, (path, chat) in enumerate(chats, 1):
            status.update(Text(f"{path.name}, {number} of {len(chats)}"))
            parts.append(
                trace(
                    engine,
                    chat[:most] if most else chat,
                    threshold=threshold,
                    clock=known[clock],
                    stride=stride,
                    page=page,
                    spans=spans,
                )
            )
            spans = 1 + max((int(one.span.max()) for one in parts[-1].values()), default=spans - 1)
        status.update("estimating")
        lives = join(parts)
        found = survival.estimate(lives, known[clock], seed=seed)
    result: dict[str, Any] = survival.to_json(found, known[clock])
    config = {
        "model": model.model,
        "threshold": threshold,
        "clock": clock,
        "stride": stride,
        "page": page,
        "seed": seed,
        "transcripts": [path.name for path in paths],
    }
    result = {"bench": "calibration", **record.origin(), "config": config, **result}
    if not as_json:
        console.print(_table(found, clock))
    typer.echo(json.dumps({key: result[key] for key in ("config", "all", "regions")}))
    if out is not None:
        with writing("out"):
            record.write(out, result)
        if not as_json:
            console.print(Text(f"Use it with --regions {out}"), soft_wrap=True)
    if plot is not None:
        with writing("plot"):
            plots.draw(lives, found, clock, plot)


def _table(found: Any, clock: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "region", "half-life", "95 %", "tokens", "ended", "Weibull shape", "from", title=f"in {clock}"
    )
    for name, one in found.items():
        table.add_row(
            Text(name),
            f"{one.half_life:,.1f}",
            f"{one.low:,.1f} - {one.high:,.1f}",
            f"{one.n:,}",
            f"{one.deaths / max(1, one.n):.0%}",
            "-" if one.weibull is None else f"{one.weibull[0]:.2f}",
            one.method + (", drawn to all" if one.shrunk else ""),
        )
    return table


def _need(name: str) -> None:
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise ConfigError(
            f"{name} is not installed", option="calibrate", way_out="Install tenure with the extra 'bench'"
        )
