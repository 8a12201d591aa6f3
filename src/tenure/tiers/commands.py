"""``tenure tiers``: what the stores hold, and removing what has expired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.commands.tables import table_console
from tenure.errors import ConfigError
from tenure.tiers.spec import parse_tier

if TYPE_CHECKING:
    from tenure.tiers.base import Entry, Tier

app = typer.Typer(
    help="List, tidy and count what is in disk and Valkey tiers.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
_Tiers = Annotated[
    list[str],
    typer.Argument(
        metavar="TIER...",
        envvar="TENURE_TIERS",
        show_envvar=False,
        help="disk:PATH:SIZE, or the URL of a Valkey or Redis server; those of TENURE_TIERS if left out.",
        show_default=False,
    ),
]


@app.command("ls")
def list_entries(tiers: _Tiers, as_json: _Json = False) -> None:
    """Show saved sessions and evicted spans, the least recently used first."""
    rows: list[dict[str, Any]] = [
        {
            "tier": tier.name,
            "kind": _kind(entry),
            "key": _shown(entry),
            "bytes": entry.nbytes,
            "age_s": round(entry.age),
        }
        for tier in _open(tiers)
        for entry in tier.entries()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.filesize import decimal
    from rich.markup import escape
    from rich.table import Table

    table = Table("tier", "what", "name", "size", "age", box=None, pad_edge=False)
    for row in rows:
        cells = row["tier"], row["kind"], row["key"], decimal(row["bytes"]), _age(row["age_s"])
        table.add_row(*(escape(cell) for cell in cells))  # names are text, whatever they look like
    table_console().print(table)


@app.command()
def gc(tiers: _Tiers, as_json: _Json = False) -> None:
    """Remove expired spans, what broken writes have left, and the oldest spans over a tier's size. Sessions stay."""
    found: list[dict[str, Any]] = []
    for tier in _open(tiers):
        expired = tier.collect()
        over = tier.overflow()
        tier.delete(over)
        found.append({"tier": tier.name, "expired": expired, "over_size": len(over)})
    _print(found, as_json)


@app.command()
def stats(tiers: _Tiers, as_json: _Json = False) -> None:
    """Count entries and bytes."""
    found = []
    for tier in _open(tiers):
        entries = tier.entries()
        sessions = [entry for entry in entries if _kind(entry) == "session"]
        found.append(
            {
                "tier": tier.name,
                "sessions": len(sessions),
                "session_bytes": sum(entry.nbytes for entry in sessions),
                "spans": len(entries) - len(sessions),
                "span_bytes": sum(entry.nbytes for entry in entries)
                - sum(entry.nbytes for entry in sessions),
                "capacity": tier.spec.capacity,
                "oldest_s": round(max((entry.age for entry in entries), default=0.0)),
            }
        )
    _print(found, as_json)


def _open(texts: list[str]) -> list[Tier]:
    """The tiers that outlive a process; host memory has nothing to show."""
    from tenure.tiers.stack import open_tier

    specs = [parse_tier(text) for text in texts]
    own = [text for text, spec in zip(texts, specs, strict=True) if spec.kind == "valkey" and not spec.where]
    if own:
        raise ConfigError(
            f"{own[0]!r} lives only as long as the engine that started it",
            option="tiers",
            way_out="Give the URL of a server",
        )
    for spec in specs:
        if spec.kind == "disk" and not Path(spec.where).is_dir():
            raise ConfigError(
                f"there is no folder {spec.where}", option="tiers", way_out="Give one that an engine has used"
            )
    return [open_tier(spec) for spec in specs if spec.kind != "host"]


def _kind(entry: Entry) -> str:
    from tenure.tiers.base import SESSIONS

    return "session" if entry.key.startswith(SESSIONS) else "span"


def _shown(entry: Entry) -> str:
    from tenure.tiers.base import SESSIONS

    return entry.key.removeprefix(SESSIONS)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.table import Table

    names = list(rows[0]) if rows else ["tier"]
    table = Table(*(name.replace("_", " ") for name in names), box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            *(
                "-" if value is None else f"{value:,}" if isinstance(value, int) else value
                for value in row.values()
            )
        )
    table_console().print(table)


def _age(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds} s"
