"""The options that commands share, and how they become configs.

Nothing here may import torch: the help of every command is built from it.
"""

from __future__ import annotations

import functools
import inspect
import json
import tomllib
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tenure.config import EngineConfig, SessionConfig, read_table
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tenure.engine import Engine
    from tenure.sampling import SamplingOptions

DEFAULT_MODEL = "smollm2-135m"

_TABLES = ("engine", "session", "serve")
"""Of the file that ``--config`` names."""

_MODEL = "Model"
_MEMORY = "Memory"
_ANSWERS = "Answers"

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A name of `tenure models list`, a folder, a .gguf file or a hub id.",
        envvar="TENURE_MODEL",
        show_envvar=False,
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="bf16, fp16 or fp32; by default bf16 where the device computes in it, else fp16 on CUDA, fp32 on a CPU.",
        envvar="TENURE_DTYPE",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu (the default) or cuda.",
        envvar="TENURE_DEVICE",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="int8 stores the projections in half the bytes (CPU only, needs a C compiler).",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads.",
        show_default=False,
        envvar="TENURE_THREADS",
        show_envvar=False,
        rich_help_panel=_MODEL,
    ),
]


def _memory(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=_MEMORY)


TierTexts = Annotated[
    list[str] | None,
    _memory(
        "Where evicted spans are kept: host:SIZE, disk:PATH:SIZE, valkey:SIZE or a URL; may be repeated.",
        "--tier",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model runs, and how."""

    model: ModelName = DEFAULT_MODEL
    dtype: Dtype = None
    device: Device = None
    threads: Threads = None
    weights: Weights = None
    tiers: TierTexts = None


@dataclass(frozen=True, kw_only=True)
class DemoModel(ModelOptions):
    """The demo's answers need a model that can read code."""

    model: ModelName = "qwen2.5-coder-0.5b"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What a session keeps: the fields of ``SessionConfig``, None where the user said nothing."""

    budget: Annotated[
        int | None, _memory(f"Slots that stay in the cache after each step ({SessionConfig.budget}).")
    ] = None
    policy: Annotated[
        str | None, _memory(f"What decides which stay: foresight, h2o, snapkv, ... ({SessionConfig.policy}).")
    ] = None
    policy_option: Annotated[
        list[str] | None, _memory("KEY=VALUE, an option of the policy; may be repeated.")
    ] = None
    planner: Annotated[
        str | None,
        _memory("Who finds out what a turn reads: explicit, llm, online, retrieval; several joined by +."),
    ] = None
    planner_option: Annotated[
        list[str] | None,
        _memory("KEY=VALUE, an option of the planner (of several: PLANNER.KEY=VALUE); may be repeated."),
    ] = None
    positions: Annotated[str | None, _memory(f"bounded, logical or compact ({SessionConfig.positions}).")] = (
        None
    )
    limit: Annotated[
        int | None, _memory("Bounded positions stay below it (the least power of two that is enough).")
    ] = None
    chunk: Annotated[int | None, _memory(f"Tokens a forward while text is read ({SessionConfig.chunk}).")] = (
        None
    )
    slack: Annotated[
        int | None, _memory(f"Slots that an answer may use over the budget ({SessionConfig.slack}).")
    ] = None
    sinks: Annotated[int | None, _memory(f"First tokens that always stay ({SessionConfig.sinks}).")] = None
    pins: Annotated[
        str | None, _memory(f"Hard pins over the budget: refuse, demote or spill ({SessionConfig.pins}).")
    ] = None
    regions: Annotated[
        Path | None, _memory("JSON file of priorities and half-lives, see `tenure calibrate`.")
    ] = None
    granularity: Annotated[
        str | None, _memory("One kept set for the whole session, or one a layer: session or layer.")
    ] = None
    compress: Annotated[
        str | None, _memory("Compress what is older than the last turn by this method, such as gracekv.")
    ] = None
    compress_ratio: Annotated[
        float | None, _memory(f"Tokens for each compressed entry ({SessionConfig.compress_ratio}).")
    ] = None
    config: Annotated[
        Path | None,
        _memory("TOML file: [engine], [session], [serve]; other options win.".replace("[", r"\[")),
    ] = None

    def session_config(self) -> SessionConfig:
        """Options, environment and file as one checked config.

        Raises:
            ConfigError: a value that cannot work; the policy and its options are looked up too.
        """
        from tenure.planners import make_planning
        from tenure.policies import make_policy

        beside = ("policy_option", "planner_option", "config")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in beside}
        given = {name: value for name, value in given.items() if value is not None}
        if self.policy_option:
            given["policy_options"] = dict(map(key_value, self.policy_option))
        if self.planner_option:
            given["planner_options"] = _nested(
                key_value(text, "planner_option") for text in self.planner_option
            )
        if self.config is not None:
            _check_tables(self.config)
        config = SessionConfig.load(self.config, **given)
        make_policy(config.policy, config.policy_options)
        if config.planner is not None:
            make_planning(config.planner, config.planner_options)
        if config.compress is not None:
            from tenure.compress import make_compressor

            make_compressor(config.compress, option="compress")
        return config


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How answers are drawn."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer, whatever the file says.", show_default=False, rich_help_panel=_ANSWERS
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token.", rich_help_panel=_ANSWERS)
    ] = 0.0
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 takes all.", rich_help_panel=_ANSWERS)] = (
        1.0
    )
    min_p: Annotated[
        float, typer.Option(help="Least share of the top probability; 0 takes all.", rich_help_panel=_ANSWERS)
    ] = 0.0
    seed: Annotated[
        int | None, typer.Option(help="Of the draw.", show_default=False, rich_help_panel=_ANSWERS)
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends an answer; may be repeated.", show_default=False, rich_help_panel=_ANSWERS
        ),
    ] = None

    def options(self) -> SamplingOptions:
        """The checked options.

        Raises:
            ConfigError: a value that cannot work.
        """
        from tenure.sampling import SamplingOptions

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingOptions(**{**given, "stop": tuple(self.stop or ())})


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options: typer sees one option for each of their fields.

    Args:
        command: its parameters that are typed with a dataclass are built from the options.
    """
    groups: dict[str, type[Any]] = {}
    flat: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[name] = kind
            inner = get_type_hints(kind, include_extras=True)
            flat += [_keyword(field.name, inner[field.name], field.default) for field in fields(kind)]
        else:
            flat.append(_keyword(name, hints[name], parameter.default))

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        built = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**built, **given)

    wrapper.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return wrapper


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = default is MISSING or default is inspect.Parameter.empty
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if empty else default,
        annotation=annotation,
    )


def key_value(text: str, option: str = "policy_option") -> tuple[str, Any]:
    """An option's ``KEY=VALUE``.

    Raises:
        ConfigError: it is none; ``option`` is to blame.
    """
    name, found, value = text.partition("=")
    if not found or not name:
        raise ConfigError(
            f"{text!r} is not KEY=VALUE", option=option, way_out="Give, for example, mode=paper"
        )
    try:
        return name, json.loads(value)  # numbers and true/false; anything else is a text
    except ValueError:
        return name, value


def flag_names(option: str) -> tuple[str, ...]:
    """Parameters that may set a config's field: ``--session-memory`` sets ``memory``."""
    return (option, option.removesuffix("s"), f"{option}_file", f"session_{option}")


def _nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``retrieval.most`` goes into the options of ``retrieval``."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        planner, dot, key = name.partition(".")
        if dot:
            found.setdefault(planner, {})[key] = value
        else:
            found[name] = value
    return found


def load_engine(options: ModelOptions, file: Path | None = None) -> Engine:
    """Load the model, with its own messages and bars off: the commands have theirs.

    Args:
        options: which model.
        file: TOML file whose table ``[engine]`` fills what the options leave open.
    """
    from tenure.engine import Engine

    given = {name: getattr(options, name) for name in ("dtype", "device", "threads", "weights")}
    given["tiers"] = options.tiers or None
    config = {**_engine_table(file), **{name: value for name, value in given.items() if value is not None}}
    quiet_transformers()
    return Engine.load(options.model, **config)


def _engine_table(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    table = read_table(file, "engine")
    known = [field.name for field in fields(EngineConfig)]
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(
            f"unknown option {unknown[0]!r}", option=str(file), way_out="Known: " + ", ".join(known)
        )
    tiers = table.get("tiers", [])
    if not isinstance(tiers, list):
        raise ConfigError(f"tiers is {tiers!r}", option=str(file), way_out="Make it a list of texts")
    return table


def _check_tables(file: Path) -> None:
    """Refuse a file with a table that nothing reads, or with something else where a table must be."""
    for table in _TABLES:
        read_table(file, table)
    session = read_table(file, "session")
    for name in ("policy_options", "planner_options"):
        if not isinstance(session.get(name, {}), dict):
            raise ConfigError(
                f"{name} is {session[name]!r}", option=str(file), way_out=f"Make it a table, [session.{name}]"
            )
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := sorted(set(found) - set(_TABLES)):
        near = get_close_matches(unknown[0], _TABLES, 1)
        raise ConfigError(
            f"nothing reads {unknown[0]!r}" + (f", did you mean [{near[0]}]?" if near else ""),
            option=str(file),
            way_out="Its tables are " + ", ".join(f"[{table}]" for table in _TABLES),
        )


def quiet_transformers() -> None:
    """Turn off what transformers prints by itself."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
