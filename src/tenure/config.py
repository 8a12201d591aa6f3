"""Options of the engine and of a session: frozen dataclasses, checked when they are made.

The command line, the environment (``TENURE_BUDGET=1024``) and a TOML file map onto the same fields.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from tenure.errors import ConfigError
from tenure.region_table import region_changes
from tenure.tiers.spec import parse_tiers

Granularity = Literal["session", "layer"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one loaded model needs.

    Args:
        dtype: ``auto`` (bf16 where the device computes in it, else fp16 on CUDA and fp32 on a CPU), ``bf16``, ``fp16``
            or ``fp32``.
        device: a torch device.
        threads: CPU threads; None leaves torch's choice.
        executor: ``fused`` runs a family's layers with joined projections, ``transformers`` the stock
            forward; ``auto`` takes ``fused`` where the family has one.
        weights: ``auto`` keeps the projections in ``dtype``, ``int8`` stores them in half the bytes or less
            (CPU only, needs a C compiler).
        rotate: ``copy`` keeps a rotated copy of the keys beside the raw ones (fast decode, half again the
            memory), ``read`` rotates whenever keys are read.
        tiers: where spans that leave the cache are kept, from the fastest to the slowest: ``host:SIZE``,
            ``disk:PATH:SIZE``, ``valkey:SIZE`` or the URL of a Valkey or Redis server. None loses what is evicted.
    """

    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    executor: Literal["auto", "fused", "transformers"] = "auto"
    weights: Literal["auto", "int8"] = "auto"
    rotate: Literal["copy", "read"] = "copy"
    tiers: Sequence[str] = ()

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "bf16", "fp16", "fp32"))
        _one_of("executor", self.executor, ("auto", "fused", "transformers"))
        _one_of("weights", self.weights, ("auto", "int8"))
        if self.weights == "int8" and self.executor == "transformers":
            raise ConfigError(
                "int8 runs on the fused executor only", option="weights", way_out="Use executor 'auto'"
            )
        _one_of("rotate", self.rotate, ("copy", "read"))
        if isinstance(self.tiers, Iterable) and not isinstance(self.tiers, str):
            object.__setattr__(self, "tiers", tuple(self.tiers))  # first, for those that can be read once
        parse_tiers(self.tiers)
        _whole("threads", self.threads, optional=True)
        if self.threads is not None and self.threads < 1:
            raise ConfigError(
                f"{self.threads} threads cannot run", option="threads", way_out="Give 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """What one session is promised.

    Args:
        budget: slots a (layer, kv head) that stay after each step; None keeps all (policy ``full`` only).
        policy: name of a retention policy.
        policy_options: fields of that policy.
        positions: ``bounded``, ``logical`` or ``compact``.
        limit: ``L`` of bounded positions; None takes the smallest power of two that is enough, or all positions that the
            model was trained on where these are fewer and enough.
        chunk: ``H``, tokens a forward while text is read.
        slack: slots that decoding may use over the budget before a burst of evictions.
        sinks: first tokens of the session that always stay.
        pins: what happens to hard pins that the budget cannot hold: ``refuse`` the message, ``demote`` the oldest pin
            to a soft one, or ``spill`` its span to the session's tiers, from where it can be fetched.
        regions: by name, what differs from the default table of regions: ``{"scratchpad": {"half_life": 20}}``, or the
            path of a file of ``tenure calibrate``.
        granularity: one kept set for the whole session, or one a layer; None leaves it to the policy.
        planner: who finds out what a turn reads, besides the plan: names of planners, joined by ``+``; None for nobody.
        planner_options: fields of the planner; of several planners, by the planner's name.
        compress: method that compresses what is older than the last turn, except pins and what the plan reads; None
            leaves it to eviction.
        compress_ratio: tokens for each entry that stands for them.
    """

    budget: int | None = 2048
    policy: str = "auto"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    positions: Literal["bounded", "logical", "compact"] = "bounded"
    limit: int | None = None
    chunk: int = 2048
    slack: int = 128
    sinks: int = 4
    pins: Literal["refuse", "demote", "spill"] = "refuse"
    regions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    granularity: Granularity | None = None
    planner: str | None = None
    planner_options: Mapping[str, Any] = field(default_factory=dict)
    compress: str | None = None
    compress_ratio: float = 4.0

    def __post_init__(self) -> None:
        _one_of("pins", self.pins, ("refuse", "demote", "spill"))
        object.__setattr__(self, "regions", region_changes(self.regions))
        _one_of("positions", self.positions, ("bounded", "logical", "compact"))
        if self.granularity is not None:
            _one_of("granularity", self.granularity, ("session", "layer"))
        for name in sorted(_NUMBERS):
            _whole(name, getattr(self, name), optional=name in ("budget", "limit"))
        for name, low in (("chunk", 1), ("slack", 1), ("sinks", 0)):
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{getattr(self, name)} is too small", option=name, way_out=f"Give at least {low}"
                )
        if not isinstance(self.compress_ratio, int | float) or not self.compress_ratio >= 1:
            raise ConfigError(
                f"{self.compress_ratio!r} is no ratio", option="compress_ratio", way_out="Give 1 or more"
            )
        if self.budget is None:
            if self.policy != "full":
                raise ConfigError(
                    f"policy {self.policy!r} needs a budget",
                    option="budget",
                    way_out="Give one, or policy 'full'",
                )
        elif self.policy == "full":
            raise ConfigError(
                "policy 'full' keeps every slot, so a budget cannot hold",
                option="budget",
                way_out="Leave the budget out (in a SessionConfig: budget=None), or name an evicting policy",
            )
        elif self.budget < self.sinks + 1:
            raise ConfigError(
                f"{self.budget} slots cannot hold {self.sinks} sinks and one more",
                option="budget",
                way_out=f"Give at least {self.sinks + 1}, or fewer sinks",
            )
        if self.positions == "bounded" and self.budget is not None and self.limit is not None:
            need = self.budget + self.chunk + self.slack
            if self.limit < need:
                raise ConfigError(
                    f"{self.limit} is below budget {self.budget} + chunk {self.chunk} + slack {self.slack} = {need}",
                    option="limit",
                    way_out=f"Give at least {need}, or a smaller chunk or budget",
                )

    @property
    def position_limit(self) -> int | None:
        """``L`` in use: positions stay below it. None where positions are not bounded."""
        if self.positions != "bounded" or self.budget is None:
            return None
        need = self.budget + self.chunk + self.slack
        return self.limit if self.limit is not None else 1 << (need - 1).bit_length()

    @property
    def capacity(self) -> int | None:
        """Slots of the session's slab: budget + chunk + slack. None where the session keeps everything."""
        return None if self.budget is None else self.budget + self.chunk + self.slack

    @classmethod
    def load(cls, path: Path | None = None, *, env: Mapping[str, str] = os.environ, **overrides: Any) -> Self:
        """Options from a TOML file, then ``TENURE_*`` of the environment, then arguments that are not None.

        Raises:
            ConfigError: an unknown key, or a value of the wrong type.
        """
        values = {} if path is None else read_table(path, "session")
        known = {item.name: item for item in fields(cls)}
        for name in known:
            if (text := env.get(f"TENURE_{name.upper()}")) is not None and name not in _TABLES:
                values[name] = _read(name, text)
        values.update({name: value for name, value in overrides.items() if value is not None})
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"unknown option {unknown[0]!r}",
                option=str(path or "session"),
                way_out="Known: " + ", ".join(known),
            )
        if values.get("policy") == "full" and overrides.get("budget") is None:
            values["budget"] = None
        return cls(**values)


_TABLES = {"policy_options", "planner_options"}
_NUMBERS = {"budget", "limit", "chunk", "slack", "sinks"}


def read_table(path: Path, name: str) -> dict[str, Any]:
    """A table of a TOML file, empty if it has none of that name.

    Raises:
        ConfigError: the file cannot be read, or the name is no table.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get(name, {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(cause, option=str(path), way_out="Give a readable TOML file") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}", option=str(path), way_out=f"Make it a table, [{name}]")
    return table


def _read(name: str, text: str) -> int | float | str:
    """A value of the environment."""
    if name not in _NUMBERS and name != "compress_ratio":
        return text
    kind, what = (int, "a whole number") if name in _NUMBERS else (float, "a number")
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not {what}", option=f"TENURE_{name.upper()}", way_out="Give one, or unset it"
        ) from error


def _whole(option: str, value: object, *, optional: bool = False) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool)) and not (optional and value is None):
        raise ConfigError(f"{value!r} is not a whole number", option=option)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{value!r} is not known", option=option, way_out="Give one of " + ", ".join(known))
