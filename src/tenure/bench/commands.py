"""``tenure bench``: the command line of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tenure.bench.longsession.command import longsession
from tenure.bench.options import AsJson, Device, Dtype, Model, Record, numbers
from tenure.bench.regions_command import regions
from tenure.bench.ruler.command import FAMILIES, LENGTHS, MODES, RATIOS, ruler

app = typer.Typer(no_args_is_help=True, help="Measure speed, and what sessions still answer.")

_PEERS = "tenure,transformers,transformers-truncated,llama.cpp-fa,llama.cpp,vllm"
_PARTS = "fill,decode,policies,long"

app.command()(longsession)
app.command()(ruler)
app.command()(regions)


@app.command()
def speed(
    context: typer.Context,
    model: Model = "smollm2-135m",
    budget: Annotated[int, typer.Option(help="Slots of the session.")] = 2048,
    chunk: Annotated[int, typer.Option(help="Tokens a forward.")] = 2048,
    repeats: Annotated[int, typer.Option(min=5, help="Interleaved runs; medians are reported.")] = 7,
    tokens: Annotated[int, typer.Option(help="Length of the long session.")] = 100_000,
    parts: Annotated[str, typer.Option(help="Which measurements, separated by commas.")] = _PARTS,
    policies: Annotated[
        str, typer.Option(help="Whose overhead, separated by commas; all by default.", show_default=False)
    ] = "",
    dtype: Dtype = "auto",
    weights: Annotated[Literal["auto", "int8"], typer.Option(help="Tenure's.")] = "auto",
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of the token ids.")] = 0,
    against_peers: Annotated[
        bool, typer.Option("--peers", help="Instead the session of `tenure bench peers`.")
    ] = False,
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """Filling and decoding against plain transformers, policy overhead, flatness of a long session."""
    if against_peers:
        peers(context, model, budget=budget, seed=seed, record=record, as_json=as_json)
        return
    from tenure.bench import speed as bench
    from tenure.errors import ConfigError

    wanted = tuple(part.strip() for part in parts.split(","))
    if unknown := set(wanted) - set(_PARTS.split(",")):
        raise ConfigError(f"{sorted(unknown)[0]!r} is not known", option="parts", way_out=f"Known: {_PARTS}")
    config = bench.SpeedConfig(
        model=model,
        budget=budget,
        chunk=chunk,
        repeats=repeats,
        tokens=tokens,
        policies=tuple(name.strip() for name in policies.split(",") if name.strip()),
        dtype=dtype,
        weights=weights,
        device=device,
        seed=seed,
    )
    console = Console(stderr=True)
    with console.status("loading") as status:
        result = bench.run(config, status.update, parts=wanted)
    _finish("speed", bench.config_json(config), result, record, as_json)


peers_app = typer.Typer(invoke_without_command=True)
app.add_typer(peers_app, name="peers")


@peers_app.callback()
def peers(
    context: typer.Context,
    model: Model = "smollm2-135m",
    names: Annotated[str, typer.Option("--peers", help="Which, separated by commas.")] = _PEERS,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the session.")] = 50,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens a turn.")] = 2000,
    write: Annotated[int, typer.Option(min=2, help="Tokens written a turn.")] = 100,
    budget: Annotated[int, typer.Option(help="Slots of Tenure's session.")] = 2048,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each peer.")] = 2,
    minutes: Annotated[
        float | None,
        typer.Option(help="A peer whose turns took as long in sum answers and leaves.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the session.")] = 0,
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """One agent session in Tenure, transformers, llama.cpp and vLLM, turn by turn. Makes their environments."""
    if context.invoked_subcommand is not None:
        return
    from tenure.bench.peers import drive

    config: dict[str, Any] = {
        "turns": turns,
        "tokens": tokens,
        "write": write,
        "budget": budget,
        "threads": threads,
        "minutes": minutes,
        "seed": seed,
    }
    console = Console(stderr=True)
    with console.status("preparing") as status:
        result = drive.run(model, [name.strip() for name in names.split(",")], note=status.update, **config)
    _finish("peers", config, result, record, as_json)


@peers_app.command("ruler")
def peers_ruler(
    model: Model = "qwen2.5-coder-0.5b",
    tokens: Annotated[str, typer.Option(help="Lengths of the contexts, separated by commas.")] = LENGTHS,
    families: Annotated[str, typer.Option(help="Families of tasks.")] = FAMILIES,
    presses: Annotated[
        str | None, typer.Option(help="Of kvpress; all by default.", show_default=False)
    ] = None,
    ratios: Annotated[str, typer.Option(help="Tokens for each entry.")] = RATIOS,
    modes: Annotated[str, typer.Option(help="agnostic, aware: whether the question is known.")] = MODES,
    seeds: Annotated[int, typer.Option(min=1, help="Prompts of each family and length.")] = 5,
    resume: Annotated[bool, typer.Option("--resume", help="Leave prompts alone that are done.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/ruler"),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """The prompts of `tenure bench ruler` under NVIDIA's kvpress, in an environment of its own."""
    from tenure.bench.ruler import peers as bench

    with Console(stderr=True).status("preparing") as status:
        found = bench.run(
            model,
            results,
            tokens=numbers(tokens, "tokens", int),
            families=[one for one in families.split(",") if one != "continuation"],
            presses=None if presses is None else presses.split(","),
            ratios=numbers(ratios, "ratios", float),
            modes=modes.split(","),
            seeds=range(seeds),
            threads=threads,
            resume=resume,
            note=status.update,
        )
    typer.echo(json.dumps(found))


@app.command()
def weights(
    model: Model = "qwen2.5-coder-0.5b",
    tokens: Annotated[int, typer.Option(min=4, help="Length of the text.")] = 1024,
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """What bf16 and int8 weights change against fp32, on real text."""
    from tenure.bench import weights as bench

    with Console(stderr=True).status("fp32") as status:
        result = bench.run(model, tokens=tokens, note=status.update)
    _finish("weights", {"model": model, "tokens": tokens}, result, record, as_json)


@app.command()
def window(
    model: Model = "smollm2-135m",
    windows: Annotated[str, typer.Option(help="Queries of a chunk, separated by commas.")] = "32,128,512",
    tokens: Annotated[int, typer.Option(help="Length of the session.")] = 12_000,
    budget: Annotated[int, typer.Option(help="Slots of the session.")] = 1024,
    chunk: Annotated[int, typer.Option(help="Tokens a forward.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the session.")] = 0,
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """What scores lose by counting only the last queries of a chunk: kept sets, facts and time against all."""
    from tenure.bench import window as bench

    wanted = list(numbers(windows, "windows", int))
    options = {"tokens": tokens, "budget": budget, "chunk": chunk, "seed": seed}
    with Console(stderr=True).status("loading") as status:
        result = bench.run(model, windows=wanted, **options, note=status.update)
    _finish("window", {"model": model, "windows": wanted, **options}, result, record, as_json)


@app.command()
def profile(
    model: Model = "smollm2-135m",
    budget: Annotated[int, typer.Option(help="Slots of the session.")] = 2048,
    chunk: Annotated[int, typer.Option(help="Tokens a forward.")] = 2048,
    policy: Annotated[str, typer.Option(help="Retention policy.")] = "h2o",
    dtype: Dtype = "auto",
    flame: Annotated[Path | None, typer.Option(help="Draw a flame graph here, .svg or .png.")] = None,
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """Where a fill chunk and a decode step spend their time."""
    from tenure.bench import profile as bench

    result = bench.run(model, budget=budget, chunk=chunk, policy=policy, dtype=dtype, flame=flame)
    config = {"model": model, "budget": budget, "chunk": chunk, "policy": policy, "dtype": dtype}
    _finish("profile", config, result, record, as_json)


@app.command()
def tiers(
    tokens: Annotated[
        int, typer.Option(min=1, help="Length of the span; its shape is that of the 0.5b.")
    ] = 1024,
    repeats: Annotated[int, typer.Option(min=3, help="Interleaved runs; medians are reported.")] = 15,
    decode_ms: Annotated[
        float, typer.Option(help="Length of the turn that hides the reading ahead.")
    ] = 1000.0,
    valkey: Annotated[str | None, typer.Option(help="URL of a server; by default one is started.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Measure the codecs on this model's keys and values too.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the numbers.")] = 0,
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """Restoring a span from host memory, disk and Valkey against the plain copy of its bytes; the stall of a turn."""
    from dataclasses import asdict

    from tenure.bench import tiers as bench

    config = bench.TiersConfig(
        tokens=tokens, repeats=repeats, decode_ms=decode_ms, valkey=valkey, model=model, seed=seed
    )
    with Console(stderr=True).status("preparing") as status:
        result = bench.run(config, status.update)
    _finish(
        "tiers",
        {**asdict(config), "valkey": "own server" if valkey is None else "by URL"},
        result,
        record,
        as_json,
    )


@app.command()
def serve(
    model: Model = "smollm2-135m",
    budget: Annotated[int, typer.Option(help="Slots of a session.")] = 2048,
    chunk: Annotated[int, typer.Option(help="Tokens of a forward at most.")] = 2048,
    sessions: Annotated[int, typer.Option(min=2, help="Sessions at once, against one.")] = 8,
    decode: Annotated[int, typer.Option(min=2, help="Tokens of a stream.")] = 128,
    prefill: Annotated[
        int, typer.Option(min=1, help="Tokens of the prompt that is read beside a stream.")
    ] = 8_000,
    tokens: Annotated[int, typer.Option(help="Length of the long session.")] = 30_000,
    result: Annotated[int, typer.Option(min=1, help="Tokens of a tool's result in it.")] = 300,
    repeats: Annotated[int, typer.Option(help="Long sessions, one after the other.", min=1)] = 3,
    parts: Annotated[
        str, typer.Option(help="Which measurements, separated by commas.")
    ] = "decode,steady,long",
    dtype: Dtype = "auto",
    record: Record = None,
    as_json: AsJson = False,
) -> None:
    """A live server: many sessions against one, a stream beside a long prompt, turns of a long session."""
    from tenure.bench import serve as bench

    config = bench.ServeBench(
        model=model,
        budget=budget,
        chunk=chunk,
        sessions=sessions,
        decode=decode,
        prefill=prefill,
        tokens=tokens,
        result=result,
        repeats=repeats,
        dtype=dtype,
    )
    wanted = tuple(part.strip() for part in parts.split(","))
    bench.check(config, wanted)
    console = Console(stderr=True)
    with console.status("loading") as status:
        got = bench.run(config, status.update, wanted)
    _finish("serve", bench.config_json(config), got, record, as_json)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    page: Annotated[Path, typer.Option(help="Page to write.")] = Path("docs/results.md"),
    images: Annotated[Path, typer.Option(help="Folder of its plots.")] = Path("docs/img"),
) -> None:
    """Results as one page with tables and plots."""
    from tenure.bench import report as bench

    for path in bench.write(results, page, images):
        typer.echo(str(path))


def _finish(
    name: str, config: dict[str, Any], result: dict[str, Any], record: Path | None, as_json: bool
) -> None:
    from tenure.bench import record as records
    from tenure.commands.places import writing

    if not as_json:
        table = Table("what", "value", title=f"tenure bench {name}")
        for key, value in _flat(result):
            table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
        Console().print(table)
    typer.echo(json.dumps(result))
    if record is not None:  # what cannot be written is on the terminal at least
        with writing("record"):
            records.write(record, records.envelope(name, config, result))


def _flat(result: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in result.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return rows
