"""Things that users name: looked up with a hint at the closest name, and made with checked fields."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tenure.errors import ConfigError

T = TypeVar("T")


def make(kinds: Mapping[str, Callable[..., T]], name: str, options: Mapping[str, Any], *, option: str) -> T:
    """One of several kinds by its name.

    Args:
        kinds: what makes each.
        name: which one.
        options: its fields.
        option: what is being named, for messages.

    Raises:
        ConfigError: unknown name or field; the message lists the known names and the closest one.
    """
    if not isinstance(name, str) or name not in kinds:
        close = difflib.get_close_matches(str(name), kinds, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"{name!r} is not known", option=option, way_out=f"{hint}Known: {', '.join(kinds)}")
    try:
        return kinds[name](**options)
    except TypeError as error:
        raise ConfigError(
            str(error), option=f"{option} {name}", way_out=f"See the fields of the {option}"
        ) from error
