"""The command ``tenure bench longsession``. Imports nothing heavy: the help of every command is built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tenure.bench.options import AsJson, Device, Dtype

_ARMS = "none,h2o,foresight,bounded,pace"


def longsession(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A name of `tenure models list`, a folder, a GGUF file or a hub id."
        ),
    ] = "qwen2.5-coder-0.5b",
    tokens: Annotated[int, typer.Option(help="Length of a session before its probes.")] = 50_000,
    distance: Annotated[
        int | None,
        typer.Option(
            help="Tokens between the last definition and the probes; by default the definitions come first."
        ),
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Which arms, separated by commas; `all` takes every one.")
    ] = _ARMS,
    sessions: Annotated[int, typer.Option(min=1, help="How many, with seeds that count up.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the first session.")] = 0,
    budget: Annotated[int, typer.Option(help="Slots of a session.")] = 2048,
    limit: Annotated[int, typer.Option(help="Bounded positions stay below it.")] = 8192,
    chunk: Annotated[int, typer.Option(help="Tokens a forward.")] = 2048,
    noise: Annotated[
        str,
        typer.Option(help="What is wrong with the plan: none, dropped, stale, contradictory, wrong or all."),
    ] = "none",
    noise_rate: Annotated[
        float, typer.Option(help="Share of the plan's definitions that it hits, over the seeds.")
    ] = 0.0,
    separate: Annotated[
        bool, typer.Option("--separate", help="Run each arm by itself, so that times can be told apart.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Pass over sessions and arms that are stored.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Of the run's folder; by default made of the options.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs are stored, a folder each.")] = Path(
        "results/longsession"
    ),
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the run into this folder.", show_default=False)
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="File of the summary; by default the run's folder with .json.", show_default=False),
    ] = None,
    dtype: Dtype = "auto",
    weights: Annotated[str, typer.Option(help="auto or int8.")] = "auto",
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Definitions, a long stretch of sources, then tasks with hidden unit tests, under each arm."""
    from tenure.bench import record as records
    from tenure.bench.longsession.arms import ARMS, chosen
    from tenure.bench.longsession.run import Settings, check_lengths, check_noise, run
    from tenure.bench.longsession.store import Store
    from tenure.commands.places import check_file, check_plot
    from tenure.engine import Engine

    settings = Settings(
        model=model,
        tokens=tokens,
        distance=distance,
        budget=budget,
        limit=limit,
        chunk=chunk,
        dtype=dtype,
        weights=weights,
        device=device,
        noise=noise,
        noise_rate=noise_rate,
    )
    wanted = chosen(",".join(ARMS) if arms == "all" else arms)
    for arm in wanted:  # refused before minutes are spent
        arm.config(budget=budget, chunk=chunk, limit=limit, seed=seed)
    check_noise(settings)
    check_lengths(settings)
    folder = out / (name or settings.name)
    record = record or folder.with_name(folder.name + ".json")
    check_file(folder / "session.json", "out")
    check_file(record, "record")
    if plot is not None:
        check_plot(plot / "plot.png")
    store = Store(folder, settings.config)
    console = Console(stderr=True)
    with console.status("loading") as status:
        engine = Engine.load(model, dtype=dtype, weights=weights, device=device, threads=threads)
        note = Notes(console, status.update)
        seeds = range(seed, seed + sessions)
        result = run(
            engine, settings, store, arms=wanted, seeds=seeds, resume=resume, separate=separate, note=note
        )
    records.write(record, result)
    if plot is not None:
        from tenure.bench.longsession.plots import draw

        draw([{**result, "name": folder.name}], store.load(), plot)
    if not as_json:
        Console().print(_table(result))
    typer.echo(json.dumps(result))


class Notes:
    """Progress: a status line on a terminal, and a line every so often where there is none.

    Args:
        console: for standard error.
        show: updates the status line.
    """

    EVERY = 60.0

    def __init__(self, console: Console, show: Any) -> None:
        self._console, self._show = console, show
        self._last = float("-inf")

    def __call__(self, text: str) -> None:
        from time import monotonic

        self._show(text)
        if not self._console.is_terminal and monotonic() - self._last >= self.EVERY:
            self._last = monotonic()
            typer.echo(text, err=True)


def _table(result: dict[str, Any]) -> Table:
    from tenure.bench.longsession.page import noise_words
    from tenure.bench.longsession.series import model_of

    sessions = len(result["seeds"])
    title = f"{model_of(result)}, {result['config']['tokens']:,} tokens, {sessions} sessions"
    table = Table(title=title)
    table.add_column("arm", no_wrap=True)
    for heading in ("checks", "of control", "recall", "resident", "rotary gap", "K/V", "archive", "wall"):
        table.add_column(heading, justify="right")
    arms = result["arms"]
    for name, arm in arms.items():
        gap, control, archive = arm["rotary_gap"], arm["of_control"], arm["archive_bytes"]
        table.add_row(
            name,
            f"{arm['checks_passed']}/{arm['checks_total']}",
            "-" if control is None else f"{control:.0%}",
            f"{arm['recall']:.0%}",
            f"{arm['residency']:.0%}",
            "-" if gap is None else f"{gap:,.0f}",
            f"{arm['kv_bytes'] / 1e6:,.0f} MB",
            f"{archive / 1e6:,.0f} MB" if archive else "-",
            f"{arm['wall_s']:,.0f} s" + ("*" if arm["time_shared_by"] > 1 else ""),
        )
    notes = [f"{name}: {words}" for name, arm in arms.items() if (words := noise_words(arm))]
    if any(arm["time_shared_by"] > 1 for arm in arms.values()):
        notes.append("* one batch: all its arms share the time")
    table.caption = "\n".join(notes) or None
    return table
