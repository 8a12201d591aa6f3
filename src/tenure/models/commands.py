"""``tenure models``: what is here, and how to get it or get rid of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tenure.commands.tables import table_console
from tenure.errors import ModelError
from tenure.models.catalog import CATALOG, unknown_model
from tenure.models.store import Store, disk_bytes

app = typer.Typer(
    help="List, fetch, find and remove models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
_Name = Annotated[str, typer.Argument(help="Name as in [bold]tenure models list[/].", show_default=False)]


def describe_models(cache_dir: Path | None = None) -> list[dict[str, Any]]:
    """Every named model, and every converted GGUF file of the cache.

    Returns:
        Dicts with ``name``, ``parameters``, ``disk_bytes`` (used now), ``download_bytes`` (of all wheels),
        ``state`` ("ready", "partly fetched" or "not fetched"), ``licence`` and ``path`` (None if not ready).
    """
    store = Store.at(cache_dir)
    own = sorted(p.name for p in store.model("").glob("*") if p.name not in CATALOG and p.name[0] != ".")
    return [_describe(store, name) for name in (*CATALOG, *own)]


def _describe(store: Store, name: str) -> dict[str, Any]:
    model = CATALOG.get(name)
    found = store.manifest(name)
    used = disk_bytes(store.model(name)) + disk_bytes(store.downloads(name))
    state = "ready" if found else "partly fetched" if used else "not fetched"
    return {
        "name": name,
        "parameters": model.parameters if model else found["parameters"] if found else None,
        "disk_bytes": used,
        "download_bytes": model.wheel_bytes if model else None,
        "state": state,
        "licence": model.licence if model else None,
        "path": str(store.model(name)) if found else None,
    }


@app.command("list")
def list_models(as_json: _Json = False) -> None:
    """Show the named models and the converted GGUF files."""
    rows = describe_models()
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("name", "parameters", "download", "on disk", "state", "licence"):
        table.add_column(title, overflow="fold")
    for row in rows:
        parameters = f"{row['parameters'] / 1e6:,.0f}M" if row["parameters"] else "?"
        sizes = (decimal(row[key]) if row[key] else "-" for key in ("download_bytes", "disk_bytes"))
        table.add_row(Text(row["name"]), parameters, *sizes, row["state"], row["licence"] or "?")
    console = table_console()
    console.print(table)
    about = f"\nKept in {store_root()}. A folder, a .gguf file or a hub id ORG/NAME work as a model too."
    console.print(Text(about, style="dim"), soft_wrap=True)


def store_root() -> Path:
    """The cache folder in use."""
    return Store.at().root


@app.command("pull")
def pull_model(
    name: Annotated[str, typer.Argument(help="Named model, hub id or .gguf file.", show_default=False)],
) -> None:
    """Fetch and convert a model; an interrupted pull resumes. Prints its folder."""
    from tenure.models.sources import resolve

    typer.echo(str(resolve(name).path))


@app.command("path")
def model_path(name: _Name, as_json: _Json = False) -> None:
    """Print the folder of a model that is ready; never downloads."""
    from tenure.models.sources import resolve

    if name in CATALOG and Store.at().manifest(name) is None:
        raise ModelError(f"{name} is not here", option="model", way_out=f"Run `tenure models pull {name}`")
    row = _own_row(name)
    if row is None:
        found = resolve(name, offline=True)
        row = {"name": name, "path": str(found.path), "parameters": found.parameters, "state": "ready"}
    typer.echo(json.dumps(row) if as_json else row["path"])


def _own_row(name: str) -> dict[str, Any] | None:
    return next((row for row in describe_models() if row["name"] == name and row["path"]), None)


@app.command("remove")
def remove_model(name: _Name) -> None:
    """Delete a model, and what was downloaded for it, from the cache. Asks nothing."""
    store = Store.at()
    row = next((row for row in describe_models() if row["name"] == name), None)
    if row is None:
        if "/" in name or Path(name).exists():
            raise ModelError(
                f"{name!r} is not in Tenure's cache",
                option="model",
                way_out="Files of your own and the hub's cache (`hf cache`) are left alone",
            )
        raise unknown_model(name)
    if not row["disk_bytes"]:
        raise ModelError(
            f"{name} is not in the cache, nothing was removed",
            option="model",
            way_out="See `tenure models list`",
        )
    store.remove(name)
    typer.echo(f"removed {name}, {row['disk_bytes'] / 1e9:.2f} GB")
