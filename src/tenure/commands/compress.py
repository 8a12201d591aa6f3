"""``tenure compress``: play a session, compress it, and say what is left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from tenure import sessionfile
from tenure.commands.explain import spans_table
from tenure.commands.options import MemoryOptions, ModelOptions, key_value, load_engine
from tenure.commands.places import check_save
from tenure.commands.view import RunView
from tenure.compress import make_compressor
from tenure.compress.choose import check_amount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tenure.compress.apply import Compression
    from tenure.session import Session


def run(
    path: Path,
    model: ModelOptions,
    memory: MemoryOptions,
    *,
    ratio: float | None,
    entries: int | None,
    method: str,
    method_option: Sequence[str],
    spans: Sequence[str],
    question: str | None,
    ask: str | None,
    save: str | None,
    as_json: bool,
) -> None:
    """Play the file without asking its probes, compress, and print what is left of each span."""
    file = sessionfile.load(path)
    config = memory.session_config()
    if ratio is None and entries is None:
        ratio = 8.0
    check_amount(ratio, entries, named="entries")
    compressor = make_compressor(method, dict(key_value(text, "method_option") for text in method_option))
    check_save(save)
    from tenure.commands.play import Player

    engine = load_engine(model, memory.config)
    check_save(save, engine)
    with RunView(f"{path.name}: {model.model}, {config.policy}", quiet=as_json) as view:
        player = Player(engine, file, config, tick=lambda: view.tick(player))
        for _ in player.play(ask=False):
            pass
    session = player.session
    before = session.stats()
    first = None if ask is None else session.fork().ask(ask, max_tokens=64)
    done = session.compress(
        list(spans) or None, ratio=ratio, budget=entries, method=compressor, question=question
    )
    after = session.stats()
    second = None if ask is None else session.fork().ask(ask, max_tokens=64)
    answers = {} if ask is None else {"before": first, "after": second}
    if as_json:
        said = done.to_json() | {"kv_bytes_before": before.kv_bytes, "answers": answers}
        typer.echo(json.dumps({"model": model.model, "compression": said, "stats": after.to_json()}))
    else:
        _show(session, done, before.kv_bytes, answers)
    if save is not None:
        session.save(save)


def _show(session: Session, done: Compression, before: int, answers: Mapping[str, str | None]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(spans_table([session.explain(one.id) for one in session.memory.ledger.spans]))
    if not done.entries:
        console.print(
            "nothing was compressed: all that was chosen is pinned, planned or among the newest tokens, "
            "or the entries are enough for it",
            style="dim",
        )
    else:
        console.print(
            f"{done.method}: {done.tokens:,} tokens a head as {done.entries:,} entries of all heads, "
            f"{done.exact:,} stay exact; {before / 1e6:,.1f} -> {session.stats().kv_bytes / 1e6:,.1f} MB "
            f"in {done.seconds:.2f} s",
            highlight=False,
        )
    for when, text in answers.items():
        console.print(Text(f"{when}: {text}"))
