"""How long each region matters: the table of base priorities, half-lives, caps, pins and clocks.

The defaults are start values of ours but for two: half-lives of system (148-189 decode steps) and scratchpad (14-16)
are those that MemDecay reports (arXiv 2607.10582, abstract). ``tenure calibrate`` measures a table of one's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tenure.errors import ConfigError
from tenure.regions import CustomRegion, Region, parse_region, split_region

Clock = Literal["tokens", "steps", "turns"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)

STEP_TOKENS = 64
"""Tokens of a chunk that count as one step; a decode step counts as one by itself. Our choice: a tool that dumps
5,000 tokens then ages the rest by 78 steps, not by 5,000."""

MOST = 4096
"""Distinct regions of one session, overrides of single messages included."""


@dataclass(frozen=True)
class RegionSpec:
    """One row of the table.

    Args:
        base: priority of an unattended slot when it is new, about 0 to 1.
        half_life: ticks of ``clock`` until half of a slot's energy is gone; infinity never forgets.
        cap: most energy that attention can give a slot; infinity for no cap.
        pin: ``hard``, ``soft`` or None for every span of the region.
        clock: ``tokens``, ``steps`` (decode steps; 64 tokens of a chunk are one) or ``turns`` (new messages that
            are not the assistant's).
    """

    base: float = 0.5
    half_life: float = 45.0
    cap: float = math.inf
    pin: Literal["hard", "soft"] | None = None
    clock: Clock = "steps"

    def __post_init__(self) -> None:
        for name in ("base", "half_life", "cap"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
                raise ConfigError(f"{name} {value!r} is no number", option="regions")
            if value < 0 or (name == "half_life" and value == 0) or (name == "base" and math.isinf(value)):
                raise ConfigError(
                    f"{name} {value} cannot be", option="regions", way_out="Give a positive number"
                )
        if self.pin not in (None, "hard", "soft"):
            raise ConfigError(
                f"pin {self.pin!r} is no pin", option="regions", way_out="Known: hard, soft, none"
            )
        if self.clock not in CLOCKS:
            raise ConfigError(
                f"clock {self.clock!r} is not known", option="regions", way_out=f"Known: {', '.join(CLOCKS)}"
            )

    def changed(self, values: Mapping[str, Any]) -> RegionSpec:
        """This row with some fields replaced; texts of numbers and ``none`` are understood."""
        known = [field.name for field in fields(self)]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"{unknown[0]!r} is no field of a region",
                option="regions",
                way_out=f"Known: {', '.join(known)}",
            )
        return replace(self, **{name: _value(name, value) for name, value in values.items()})


DEFAULTS: dict[str, RegionSpec] = {
    Region.SYSTEM: RegionSpec(1.0, 160.0),
    Region.TOOLS: RegionSpec(0.6, 160.0),
    Region.PLAN: RegionSpec(0.6, 120.0),
    Region.USER: RegionSpec(0.9, 90.0),
    Region.RETRIEVED: RegionSpec(0.6, 45.0),
    Region.TOOL_OUTPUT: RegionSpec(0.6, 30.0),
    Region.ASSISTANT: RegionSpec(0.5, 30.0),
    Region.SCRATCHPAD: RegionSpec(0.3, 15.0),
    Region.OTHER: RegionSpec(0.5, 45.0),
}
"""The table that ships."""


class RegionTable:
    """The regions of one session, each with a number that slots carry.

    Args:
        changes: by region name, fields of :class:`RegionSpec` that differ from the defaults; a name that is not
            among the defaults makes a custom region, whose other fields are those of ``other``.
    """

    def __init__(self, changes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._codes: dict[str, int] = {}
        self.specs: list[RegionSpec] = []
        for name, spec in DEFAULTS.items():
            self._add(str(name), spec)
        for name, values in (changes or {}).items():
            if not isinstance(values, Mapping):
                raise ConfigError(
                    f"{name}: expected fields, got {values!r}",
                    option="regions",
                    way_out="Give half_life = 30",
                )
            split = split_region(str(name))
            if split[1]:
                raise ConfigError(f"{name!r} is no plain name", option="regions")
            if name in self._codes:
                code = self._codes[name]
                self.specs[code] = self.specs[code].changed(values)
            else:
                self._add(name, DEFAULTS[Region.OTHER].changed(values))

    def _add(self, name: str, spec: RegionSpec) -> int:
        if len(self.specs) >= MOST:
            raise ConfigError(
                f"more than {MOST} distinct regions",
                option="region",
                way_out="Use fewer overrides of messages",
            )
        self._codes[name] = len(self.specs)
        self.specs.append(spec)
        return len(self.specs) - 1

    @property
    def names(self) -> list[str]:
        """Names by number."""
        return list(self._codes)

    @property
    def kinds(self) -> list[int]:
        """By number, the number of the region that a row's overrides change; its own for all other rows."""
        return [self._codes[split_region(name)[0]] for name in self._codes]

    def code(self, region: str) -> int:
        """The number of a region; a message's own overrides get a row of their own.

        Raises:
            ConfigError: the table does not know the region, its overrides cannot be, or there are too many.
        """
        known = self._codes.get(region)
        if known is not None:
            return known
        name, values = split_region(region)
        if name not in self._codes:
            parse_region(name, self.names)  # raises, and names the closest
        return self._add(str(region), self.specs[self._codes[name]].changed(values))

    def spec(self, region: str) -> RegionSpec:
        """The row of a region."""
        return self.specs[self.code(region)]

    def clone(self) -> RegionTable:
        """An independent copy."""
        copy = RegionTable()
        copy._codes, copy.specs = dict(self._codes), list(self.specs)
        return copy

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Plain values by name; infinity is None."""
        return {
            name: {
                key: None if value == math.inf else value for key, value in asdict(self.specs[code]).items()
            }
            for name, code in self._codes.items()
        }


def load_regions(path: str | Path) -> dict[str, dict[str, Any]]:
    """The changes that a file asks for: a calibration of ``tenure calibrate``, or ``{"regions": {NAME: {...}}}``.

    Fields of a calibration that are no fields of the table (intervals, counts) are left out.

    Raises:
        ConfigError: not readable, or not of that form.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or error}",
            option="regions",
            way_out="Give a file of `tenure calibrate`",
        ) from error
    if isinstance(data, dict) and isinstance(data.get("result"), dict):
        data = data["result"]
    rows = data.get("regions") if isinstance(data, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfigError(
            f"{path}: no object 'regions'", option="regions", way_out="Give a file of `tenure calibrate`"
        )
    known = {field.name for field in fields(RegionSpec)}
    table = {
        str(name): {key: value for key, value in row.items() if key in known and value is not None}
        for name, row in rows.items()
    }
    RegionTable(table)  # refuses what cannot be
    return table


def region_changes(value: object) -> dict[str, dict[str, Any]]:
    """The option ``regions`` in each of its forms: a table, or the path of a file.

    Raises:
        ConfigError: neither, or not valid.
    """
    if isinstance(value, (str, Path)):
        return load_regions(value)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{value!r} is no table", option="regions", way_out="Give {NAME: {half_life: ...}} or a file"
        )
    RegionTable(value)
    return {str(name): dict(row) for name, row in value.items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if name == "pin" and value == "none":
            return None
        if name in ("base", "half_life", "cap"):
            try:
                return float(value)
            except ValueError:
                raise ConfigError(f"{name} {value!r} is no number", option="regions") from None
    return value


__all__ = [
    "CLOCKS",
    "DEFAULTS",
    "Clock",
    "CustomRegion",
    "RegionSpec",
    "RegionTable",
    "load_regions",
    "region_changes",
]
