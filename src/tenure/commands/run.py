"""``tenure run``: play a session file and print what the session answers."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from tenure import sessionfile
from tenure.commands.options import MemoryOptions, ModelOptions, SamplingFlags, load_engine
from tenure.commands.places import check_save
from tenure.commands.view import RunView

if TYPE_CHECKING:
    from pathlib import Path

    from tenure.commands.play import Answer, Player


def run(
    path: Path,
    model: ModelOptions,
    memory: MemoryOptions,
    sampling: SamplingFlags,
    *,
    as_json: bool,
    quiet: bool,
    load: str | None = None,
    save: str | None = None,
) -> None:
    """Play the file; see ``tenure run --help``."""
    file = sessionfile.load(path)
    config = memory.session_config()
    drawn = sampling.options()
    check_save(save)
    from tenure.commands.play import Player

    engine = load_engine(model, memory.config)
    check_save(save, engine)
    session = None if load is None else engine.restore(load)
    config = config if session is None else session.config
    name = file.title or path.name
    title = f"{name}: {model.model}, {config.policy}, {config.positions} positions, budget {config.budget}"
    with RunView(title, quiet=quiet) as view:
        streams = not view.active and not as_json
        player = Player(
            engine,
            file,
            config,
            drawn,
            max_tokens=sampling.max_tokens,
            session=session,
            tick=lambda: view.tick(player),
            piece=lambda text: view.write(text) if streams else None,
            ask=lambda probe: view.write(f"\n? {probe.question}\n") if streams else None,
        )
        interrupted = False
        try:
            for answer in player.play():
                if not as_json:
                    view.write(_shown(answer, streams, quiet))
        except KeyboardInterrupt:
            interrupted = True
            if not as_json and player.answers and player.answers[-1].reason == "cancel":
                view.write(_shown(player.answers[-1], streams, quiet))
    result = report(player, model.model)
    if as_json:
        typer.echo(json.dumps({**result, "interrupted": True} if interrupted else result))
    elif not quiet:
        sys.stderr.write(_summary(result, interrupted))
    if save is not None:
        player.session.save(save)
    if interrupted:
        raise KeyboardInterrupt


def _shown(answer: Answer, streamed: bool, quiet: bool) -> str:
    lines = [] if streamed else ["", f"? {answer.probe.question}", answer.text]
    found, lost = answer.facts
    notes = [f"found {', '.join(found)}"] if found else []
    notes += [f"lost {', '.join(lost)}"] if lost else []
    if answer.residency is not None:
        notes.append(f"{answer.residency:.0%} of what it reads is resident")
    if answer.rotary_gap is not None:
        notes.append(f"rotary gap {answer.rotary_gap:,.0f}")
    if answer.reason != "stop":
        notes.append({"length": "cut at the longest length", "cancel": "interrupted"}[answer.reason])
    if notes and not quiet:
        lines.append(f"  [{'; '.join(notes)}]")
    return ("\n" if streamed else "") + "".join(f"{line}\n" for line in lines)


def report(player: Player, model: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    config, stats = player.session.config, player.session.stats()
    return {
        "model": model,
        "policy": config.policy,
        "positions": config.positions,
        "budget": config.budget,
        "limit": config.position_limit,
        "chunk": config.chunk,
        "answers": [answer.to_json() for answer in player.answers],
        "facts_found": sum(sum(answer.found) for answer in player.answers),
        "facts_total": sum(len(answer.found) for answer in player.answers),
        "tokens": stats.tokens,
        "seconds": round(player.seconds, 3),
        "kv_bytes": stats.kv_bytes,
        "full_kv_bytes": stats.full_kv_bytes,
        "stats": stats.to_json(),
    }


def _summary(result: dict[str, Any], interrupted: bool) -> str:
    stats = result["stats"]
    facts = f"{result['facts_found']} of {result['facts_total']} facts, " if result["facts_total"] else ""
    return (
        f"\n{'Interrupted. ' if interrupted else ''}{facts}{result['tokens']:,} tokens in "
        f"{result['seconds']:,.0f} s, {stats['resident']:,} slots resident, "
        f"{stats['evicted']:,} evicted; cache "
        f"{result['kv_bytes'] / 1e6:,.1f} MB, keys and values of all tokens "
        f"{result['full_kv_bytes'] / 1e6:,.1f} MB\n"
    )
