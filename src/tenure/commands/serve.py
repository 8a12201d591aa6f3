"""``tenure serve`` and ``tenure serve keys``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tenure.commands.options import MemoryOptions, ModelOptions, load_engine, spread
from tenure.errors import ConfigError

app = typer.Typer(invoke_without_command=True)
keys = typer.Typer(no_args_is_help=True, help="API keys: made, listed, removed. Only digests are kept.")
app.add_typer(keys, name="keys")

_PANEL = "Server"
_LIMITS = "Limits"


@app.callback()
@spread
def serve(
    context: typer.Context,
    model: ModelOptions,
    memory: MemoryOptions,
    host: Annotated[
        str, typer.Option(help="Address; anything but loopback needs --keys.", rich_help_panel=_PANEL)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=_PANEL)] = 8000,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder where sessions are parked and saved; without it they end with the server.",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            help="File of API keys, see `tenure serve keys add`.",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    resident: Annotated[int, typer.Option(help="Sessions in memory at once.", rich_help_panel=_LIMITS)] = 8,
    session_memory: Annotated[
        float | None,
        typer.Option(
            help="Gigabytes for sessions in memory (half of what is free).",
            show_default=False,
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    streams: Annotated[int, typer.Option(help="Answers generated at once.", rich_help_panel=_LIMITS)] = 16,
    streams_per_key: Annotated[
        int, typer.Option(help="Requests of one key under way.", rich_help_panel=_LIMITS)
    ] = 16,
    max_prompt: Annotated[
        int, typer.Option(help="Tokens of a request.", rich_help_panel=_LIMITS)
    ] = 1_000_000,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", rich_help_panel=_LIMITS)] = 16_384,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", rich_help_panel=_LIMITS)] = 16 << 20,
    grace: Annotated[
        float, typer.Option(help="Seconds that streams have to finish after SIGTERM.", rich_help_panel=_PANEL)
    ] = 30.0,
    operator: Annotated[
        str | None,
        typer.Option(
            help="Tenant whose keys see everybody's metrics.", show_default=False, rich_help_panel=_PANEL
        ),
    ] = None,
    traces: Annotated[
        bool,
        typer.Option(
            "--traces", help="Send OpenTelemetry traces (OTEL_EXPORTER_OTLP_*).", rich_help_panel=_PANEL
        ),
    ] = False,
    log_text: Annotated[
        bool, typer.Option("--log-text", help="Put users' texts into the log.", rich_help_panel=_PANEL)
    ] = False,
) -> None:
    """Serve sessions to OpenAI clients."""
    if context.invoked_subcommand is not None:
        return
    from tenure.serve.config import ServeConfig

    given = {
        "host": host,
        "port": port,
        "state": state,
        "keys_file": keys_file,
        "resident": resident,
        "session_memory": None if session_memory is None else int(session_memory * 1e9),
        "streams": streams,
        "streams_per_key": streams_per_key,
        "max_prompt": max_prompt,
        "max_tokens": max_tokens,
        "max_body": max_body,
        "grace": grace,
        "operator": operator,
        "traces": traces,
        "log_text": log_text,
    }
    # What was not said leaves the file's word.
    said = {
        {"keys_file": "keys", "session_memory": "memory"}.get(name, name): value
        for name, value in given.items()
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    config = ServeConfig.load(memory.config, session=memory.session_config(), **said)
    try:
        from tenure.serve.run import serve as listen
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}",
            option="serve",
            way_out="Install it: pip install 'tenure[serve]'",
        ) from error
    listen(load_engine(model, memory.config), config)


KeysFile = Annotated[Path, typer.Option("--keys", help="File of API keys.")]


@keys.command("add")
def add(
    tenant: Annotated[str, typer.Argument(help="Whose key it is; a tenant may have several.")],
    file: KeysFile = Path("tenure-keys.json"),
) -> None:
    """Make a key and print it; it cannot be shown again."""
    from tenure.serve.auth import Keys

    typer.echo(Keys(file).add(tenant))


@keys.command("list")
def show(
    file: KeysFile = Path("tenure-keys.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the keys, without what would let anybody in."""
    from tenure.serve.auth import Keys

    found = Keys(file).list()
    if as_json:
        typer.echo(
            json.dumps([{"id": key.id, "tenant": key.tenant, "created": key.created} for key in found])
        )
        return
    for key in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created))
        typer.echo(f"{key.id}  {made}  {key.tenant}")


@keys.command("remove")
def remove(
    key: Annotated[str, typer.Argument(metavar="ID", help="Of the key, see `tenure serve keys list`.")],
    file: KeysFile = Path("tenure-keys.json"),
) -> None:
    """Let a key in no longer."""
    from tenure.serve.auth import Keys

    Keys(file).remove(key)
