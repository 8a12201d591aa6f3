"""``tenure doctor``: is what Tenure computes with this model what the stock model computes?"""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any, Literal

import typer

from tenure.commands.options import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tenure.commands.checks import Check


def run(
    model: str, dtype: str, device: str, *, weights: Literal["auto", "int8"] = "auto", as_json: bool
) -> int:
    """Print a line for each check; the exit code."""
    from rich.console import Console
    from rich.text import Text

    from tenure.config import EngineConfig
    from tenure.engine import compute_device
    from tenure.models.sources import resolve

    checks = []
    console = Console(stderr=True)
    EngineConfig(dtype=dtype, weights=weights)
    compute_device(device)
    resolve(model)  # a download draws its own bars
    with console.status(Text(f"loading {model} in fp32")) as status:
        for check in examine(model, dtype, device, status.update, weights=weights):
            checks.append(check)
            if not as_json:
                _print(check)
    passed = all(check.passed for check in checks)
    if as_json:
        shown = [check.to_json() for check in checks]
        typer.echo(json.dumps({"model": model, "checks": shown, "pass": passed}))
    else:
        failed = sum(not check.passed for check in checks)
        typer.echo(
            f"\n{model}: "
            + (f"all {len(checks)} checks pass" if passed else f"{failed} of {len(checks)} FAIL")
        )
    return 0 if passed else 1


def examine(
    model: str,
    dtype: str = "auto",
    device: str = "cpu",
    tell: Any = lambda text: None,
    *,
    memory: bool = True,
    weights: Literal["auto", "int8"] = "auto",
) -> Iterator[Check]:
    """Run all checks, one copy of the model in memory at a time.

    Args:
        model: its name.
        dtype: of the last check; all others need fp32 to see an error of 1e-4.
        device: a torch device.
        tell: receives what is being done.
        memory: measure the peak too, on a CPU, in a process of its own.
        weights: of the peak and of the last check.

    Raises:
        TenureError: the model cannot be loaded, or does not fit memory in fp32.
    """
    from tenure.commands import checks, session_checks
    from tenure.config import EngineConfig
    from tenure.engine import Engine

    EngineConfig(dtype=dtype, device=device, weights=weights)
    quiet_transformers()
    engine = Engine.load(model, dtype="fp32", device=device)
    tell("reading three turns")
    ours = checks.record(engine)
    for look in (checks.shifts, checks.masks):
        tell(f"checking {look.__name__}")
        yield look(engine, ours)
    for simple in (session_checks.reuse, session_checks.markers, session_checks.eviction):
        tell(f"checking {simple.__name__}")
        yield simple(engine)
    tokenizer, executor = engine.tokenizer, engine.adapter.executor
    del engine
    gc.collect()

    tell("loading the stock model")
    stock = _stock_model(model, device)
    logits = checks.stock_logits(stock, ours.ids)
    yield checks.rotation(ours, logits)
    del logits
    theirs = None
    if executor == "fused":
        tell("reading three turns with transformers' own forward")
        # Its logits are saved: now the same copy can be hooked.
        engine = Engine(
            stock, tokenizer, config=EngineConfig(device=device, executor="transformers"), name=model
        )
        theirs = checks.record(engine, forced=ours.ids[ours.prompt :][:16])
        del engine
    yield checks.executors(ours, theirs, executor)
    del stock, theirs
    gc.collect()

    if memory and device == "cpu":
        tell("measuring memory")
        yield session_checks.memory(model, dtype, weights)
    tell("measuring speed")
    yield checks.speed(Engine.load(model, dtype=dtype, device=device, weights=weights), ours)


def _stock_model(model: str, device: str) -> Any:
    import torch

    from tenure.models.load import load_weights
    from tenure.models.sources import resolve

    return load_weights(resolve(model).path, torch.float32).to(device).eval()


def _print(check: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(
        ("pass  ", "green") if check.passed else ("FAIL  ", "bold red"),
        (f"{check.name:<16}  ", "bold"),
    )
    if check.measured is not None and check.threshold is not None:
        line.append(
            f"{check.measured:.1e} <= {check.threshold:.0e}"
            if check.passed
            else f"{check.measured:.1e} > {check.threshold:.0e}"
        )
        line.append("  ")
    line.append(check.detail, style="dim")
    Console(highlight=False).print(line, soft_wrap=True)
