"""The command ``tenure``.

This module is imported for every ``--help``, so it declares options and nothing else; torch and transformers
are imported by the command that needs them.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tenure.commands.options import (
    DEFAULT_MODEL,
    DemoModel,
    Device,
    Dtype,
    MemoryOptions,
    ModelName,
    ModelOptions,
    SamplingFlags,
    flag_names,
    spread,
)
from tenure.errors import ConfigError, TenureError
from tenure.version import __version__


class _Commands(TyperGroup):
    """Turns errors of Tenure and of the system into a message and exit code 2, and Ctrl-C into 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TenureError as error:
            _show(error, _option_names(self.commands[ctx.invoked_subcommand]))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno in (None, errno.EPIPE):
                raise  # whoever read has gone: the exit code alone tells it
            # What is left for a full disk is not tried again at the end.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            _show(ConfigError(str(error), way_out="Make room, or name another place" if full else None), {})
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="LLM agent sessions in a fixed KV-cache budget that still answer from their start.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SessionFile = Annotated[
    Path,
    typer.Argument(
        metavar="SESSION.jsonl", help="A session file, see docs/session-files.md.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")]
Load = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Go on with a saved session, with the options that it was saved with: a file, or tier:NAME.",
        show_default=False,
    ),
]
Save = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE", help="Save the session at the end: a file, or tier:NAME.", show_default=False
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No live view and no summary.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tenure {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@spread
def run(
    session_file: SessionFile,
    model: ModelOptions,
    memory: MemoryOptions,
    sampling: SamplingFlags,
    as_json: AsJson = False,
    quiet: Quiet = False,
    load: Load = None,
    save: Save = None,
) -> None:
    """Play a session file and answer its probes.

    The answers go to stdout, a live view of the cache to the terminal.
    """
    from tenure.commands import run

    run.run(session_file, model, memory, sampling, as_json=as_json, quiet=quiet, load=load, save=save)


@app.command()
@spread
def explain(
    session_file: SessionFile,
    model: ModelOptions,
    memory: MemoryOptions,
    span: Annotated[
        str | None, typer.Option(help="Only this span, with its text and every layer.", show_default=False)
    ] = None,
    upto: Annotated[
        str | None,
        typer.Option(help="Stop before the plan's step of this id.", metavar="STEP", show_default=False),
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Also how regions shared the cache, and evicted pages.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the timeline (SVG, PNG or PDF).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a session file and say where each span is and why."""
    from tenure.commands import explain

    explain.run(
        session_file, model, memory, span=span, upto=upto, as_json=as_json, timeline=timeline, plot=plot
    )


@app.command()
@spread
def calibrate(
    transcripts: Annotated[
        list[Path],
        typer.Argument(help="Message lists as JSON or JSONL, or session files.", show_default=False),
    ],
    model: ModelOptions,
    out: Annotated[
        Path | None, typer.Option(help="Write the table to this file, for --regions.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the survival curves (SVG, PNG or PDF).", show_default=False)
    ] = None,
    clock: Annotated[str, typer.Option(help="Of the half-lives: tokens, steps or turns.")] = "steps",
    threshold: Annotated[float, typer.Option(help="Attention that counts, in fair shares.")] = 1.0,
    stride: Annotated[int, typer.Option(help="Tokens a look.")] = 16,
    page: Annotated[int, typer.Option(help="Tokens that live together; 1 tells them apart.")] = 16,
    most: Annotated[int, typer.Option(help="Only the first messages of each transcript; 0 takes all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the resampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how long attention to each region lives, on transcripts of your own.

    The last line on stdout is JSON.
    """
    from tenure.commands import calibrate

    calibrate.run(
        transcripts,
        model,
        out=out,
        plot=plot,
        clock=clock,
        threshold=threshold,
        stride=stride,
        page=page,
        most=most,
        seed=seed,
        as_json=as_json,
    )


@app.command()
@spread
def compress(
    session_file: SessionFile,
    model: ModelOptions,
    memory: MemoryOptions,
    ratio: Annotated[float | None, typer.Option(help="Tokens for each entry.", show_default=False)] = None,
    entries: Annotated[
        int | None, typer.Option(help="Entries a head instead of a ratio.", show_default=False)
    ] = None,
    method: Annotated[str, typer.Option(help="gracekv, kvzip, snapkv, ...")] = "gracekv",
    method_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE, an option of the method; may be repeated.", show_default=False),
    ] = None,
    span: Annotated[
        list[str] | None, typer.Option(help="Only this span; may be repeated.", show_default=False)
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="What will be asked, where that is known.", show_default=False)
    ] = None,
    ask: Annotated[str | None, typer.Option(help="Ask this before and after.", show_default=False)] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Play a session file and let fewer entries stand for it."""
    from tenure.commands import compress

    compress.run(
        session_file,
        model,
        memory,
        ratio=ratio,
        entries=entries,
        method=method,
        method_option=method_option or [],
        spans=span or [],
        question=question,
        ask=ask,
        save=save,
        as_json=as_json,
    )


@app.command()
@spread
def chat(
    model: ModelOptions,
    memory: MemoryOptions,
    sampling: SamplingFlags,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="JSON file with the plan's steps and what they read.", show_default=False),
    ] = None,
    load: Load = None,
    save: Save = None,
) -> None:
    """Talk to a model in a session that never outgrows its budget."""
    from tenure.commands import chat

    chat.run(model, memory, sampling, system=system, plan=plan, load=load, save=save)


@app.command()
def doctor(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    device: Device = None,
    weights: Annotated[
        Literal["auto", "int8"], typer.Option(help="Of the checks of memory and speed.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Check Tenure against the stock model, on a model of your own.

    Exit code 0 if every check passes, 1 if one fails.
    """
    from tenure.commands import doctor

    raise typer.Exit(doctor.run(model, dtype or "auto", device or "cpu", weights=weights, as_json=as_json))


@app.command()
@spread
def demo(
    model: DemoModel,
    budget: Annotated[int, typer.Option(help="Slots of each arm's cache.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Length of the session.")] = 12_000,
    limit: Annotated[
        int | None, typer.Option(help="Bound of the positions of pace (4096 by default).", show_default=False)
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens a forward and arm.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the names and values in the session.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="Also an arm that keeps everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Play one coding session under H2O, foresight and PACE, and compare the answers.

    The last line on stdout is JSON.
    """
    from tenure.commands import demo

    demo.run(
        model,
        budget=budget,
        tokens=tokens,
        limit=limit,
        chunk=chunk,
        seed=seed,
        max_tokens=max_tokens,
        full=full,
        as_json=as_json,
    )


def _mount(name: str, module: str) -> None:
    """Add a sub-command that lives beside what it commands."""
    app.add_typer(importlib.import_module(module).app, name=name)


_mount("models", "tenure.models.commands")
_mount("serve", "tenure.commands.serve")
_mount("bench", "tenure.bench.commands")
_mount("tiers", "tenure.tiers.commands")


def _option_names(command: Any) -> dict[str, str]:
    """``limit`` -> ``--limit``, for the options of a command and of those below it."""
    names: dict[str, str] = {}
    for below in getattr(command, "commands", {}).values():
        names |= _option_names(below)
    return names | {param.name: param.opts[0] for param in command.params if param.opts[0][:1] == "-"}


def _show(error: TenureError, names: dict[str, str]) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text("error: ", style="bold red")
    if error.option:
        flag = next((names[name] for name in flag_names(error.option) if name in names), error.option)
        text.append(f"{flag}: ", style="bold")
    text.append(error.cause.rstrip("."), style="not bold default")
    if error.way_out:
        text.append(f"\n  {error.way_out}", style="default")
    Console(stderr=True).print(text, soft_wrap=True)


def main() -> None:
    """The entry point of the ``tenure`` command."""
    app(prog_name="tenure")
