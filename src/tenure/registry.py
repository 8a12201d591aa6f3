"""Things that users name: looked up with a hint at the closest name, and made with checked fields."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from tenure.errors import ConfigError

T = TypeVar("T")

_PLAIN: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("a text", (str,)),
}


def make(kinds: Mapping[str, Callable[..., T]], name: str, options: Mapping[str, Any], *, option: str) -> T:
    """One of several kinds by its name.

    Args:
        kinds: what makes each.
        name: which one.
        options: its fields.
        option: what is being named, for messages.

    Raises:
        ConfigError: unknown name or field, or a field of another type; the message lists the known ones.
    """
    look_up(kinds, name, option=option)
    _check_fields(kinds[name], name, options, option)
    try:
        return kinds[name](**options)
    except TypeError as error:
        raise ConfigError(
            str(error), option=f"{option} {name}", way_out=f"See the fields of the {option}"
        ) from error


def look_up(kinds: Mapping[str, T], name: str, *, option: str) -> T:
    """What has a name.

    Raises:
        ConfigError: unknown name; the message lists the known ones and the closest.
    """
    if not isinstance(name, str) or name not in kinds:
        close = difflib.get_close_matches(str(name), kinds, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"{name!r} is not known", option=option, way_out=f"{hint}Known: {', '.join(kinds)}")
    return kinds[name]


def _check_fields(kind: Callable[..., Any], name: str, options: Mapping[str, Any], option: str) -> None:
    """Raise ConfigError for options that a dataclass has no field for, and for plain fields of another type."""
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"{options!r} does not name its fields", option=f"{option} {name}", way_out="Give a mapping"
        )
    if not is_dataclass(kind):
        return
    known = {item.name: item for item in fields(kind) if item.init}
    for key, value in options.items():
        if key not in known:
            raise ConfigError(
                f"{name} has no option {key!r}",
                option=f"{option} {name}",
                way_out="It has: " + (", ".join(known) or "none"),
            )
        text, types = _PLAIN.get(str(known[key].type), ("", ()))
        fits = isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
        if types and not (fits and (not isinstance(value, float) or math.isfinite(value))):
            raise ConfigError(f"{value!r} is not {text}", option=f"{option} {name}, {key}")
