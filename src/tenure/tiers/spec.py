"""How a tier is written in options: ``host:2GiB``, ``disk:/data/spans:10GiB``, ``valkey://cache:6379/0?ttl=1d``.

Nothing here may import torch: options are checked before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlencode

from tenure.errors import ConfigError

Kind = Literal["host", "disk", "valkey"]
CODECS = ("raw", "zstd", "int8", "int8+zstd")
"""Forms in which keys and values are stored; see :mod:`tenure.tiers.codec`."""

_HOST = 256 << 20
_WAY_OUT = "Give host:SIZE, disk:PATH:SIZE, valkey:SIZE (a server of its own), or a valkey:// or redis:// URL"
_SCHEMES = ("valkey://", "valkeys://", "redis://", "rediss://", "unix://")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LARGEST, _LONGEST = 1 << 62, 36500 * 86400
"""Bytes and seconds that nobody means more of."""


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """One tier as a user names it.

    Args:
        kind: ``host``, ``disk`` or ``valkey``.
        where: folder of a disk tier, URL of a Valkey or Redis server; empty for host memory and for a server of one's
            own.
        capacity: bytes that it may hold; None where that is the server's own business.
        ttl: seconds until an entry expires: since it was written or read last, in Valkey since it was written.
        timeout: seconds that a turn waits for it at most.
        codec: how keys and values are stored.
    """

    kind: Kind
    where: str = ""
    capacity: int | None = None
    ttl: float | None = None
    timeout: float = 1.0
    codec: str = "raw"


def parse_tiers(texts: Iterable[str]) -> tuple[TierSpec, ...]:
    """Tiers from the fastest to the slowest. Host memory comes first, 256 MiB of it if none is named.

    Raises:
        ConfigError: names the text at fault.
    """
    if isinstance(texts, str):
        raise ConfigError(f"{shown(texts)!r} is one text", option="tiers", way_out="Give a list of tiers")
    if not isinstance(texts, Iterable):
        raise ConfigError(
            f"{texts!r} is no list", option="tiers", way_out="Give a list of tiers, () for none"
        )
    specs = [parse_tier(text) for text in texts]
    if not specs:
        return ()
    if any(spec.kind == "host" for spec in specs[1:]):
        raise ConfigError("host memory must be the first tier", option="tiers", way_out="Put host:SIZE first")
    places = [spec.where for spec in specs if spec.where]
    if len({*places}) < len(places):
        raise ConfigError(
            "a place is named twice", option="tiers", way_out="Name each folder and each server once"
        )
    if specs[0].kind != "host":
        specs.insert(0, TierSpec(kind="host", capacity=_HOST))
    return tuple(specs)


def parse_tier(text: str) -> TierSpec:
    """One tier.

    Raises:
        ConfigError: it cannot be read, or its codec needs a package that is not installed.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is no text", option="tiers", way_out=_WAY_OUT)
    place, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    ttl, timeout = options.pop("ttl", None), options.pop("timeout", None)
    codec = options.pop("codec", "raw").replace(" ", "+")  # what a plus sign means in the query of a URL
    if codec not in CODECS:
        raise ConfigError(
            f"{shown(text)!r}: codec {codec!r} is not known",
            option="tiers",
            way_out=f"Known: {', '.join(CODECS)}",
        )
    if codec.endswith("zstd") and find_spec("zstandard") is None:
        raise ConfigError(
            f"{shown(text)!r}: the codec {codec} needs the package zstandard",
            option="tiers",
            way_out="pip install 'tenure[tiers]', or give codec=raw",
        )
    spec = _place(text, place, options)
    if spec.kind == "host" and query:
        raise ConfigError(
            f"{shown(text)!r}: host memory has no options", option="tiers", way_out="Give host:SIZE alone"
        )
    if spec.kind != "valkey" and options:
        raise ConfigError(
            f"{shown(text)!r}: {next(iter(options))!r} is not known",
            option="tiers",
            way_out="Known: ttl, timeout, codec",
        )
    return TierSpec(
        kind=spec.kind,
        where=spec.where,
        capacity=spec.capacity,
        ttl=spec.ttl if ttl is None else _seconds(text, ttl),
        timeout=spec.timeout if timeout is None else _seconds(text, timeout),
        codec=codec,
    )


def shown(text: str) -> str:
    """A tier's text without the user, the password and the options of a URL: for messages and statistics."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    place, _, options = rest.partition("?")
    # A question mark in a password, or an at sign in an option.
    if "@" in unquote(options) and "@" not in place:
        return f"{scheme}://***"
    return f"{scheme}://{place.rpartition('@')[2]}"


def _place(text: str, place: str, options: dict[str, str]) -> TierSpec:
    if place.startswith(_SCHEMES):
        where = place + ("?" + urlencode(options) if options else "")
        return TierSpec(kind="valkey", where=where, ttl=_TIMES["d"])
    kind, _, rest = place.partition(":")
    if kind == "host":
        return TierSpec(kind="host", capacity=_size(text, rest) if rest else _HOST)
    if kind == "valkey":
        return TierSpec(kind="valkey", capacity=_size(text, rest) if rest else None, ttl=_TIMES["d"])
    if kind == "disk" and rest:
        path, _, size = rest.rpartition(":")
        if not path or not re.fullmatch(r"[\d.]+\s*[KMGT]?i?B?", size, re.IGNORECASE):
            raise ConfigError(f"{shown(text)!r} has no size", option="tiers", way_out="Give disk:PATH:SIZE")
        folder = str(Path(path).expanduser().absolute())
        return TierSpec(kind="disk", where=folder, capacity=_size(text, size), ttl=7 * _TIMES["d"])
    raise ConfigError(f"{shown(text)!r} is no tier", option="tiers", way_out=_WAY_OUT)


def _size(text: str, size: str) -> int:
    """Bytes of ``10GiB``, ``512M`` and the like; a unit without ``i`` is binary too."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", size.strip(), re.IGNORECASE)
    count = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1 <= count <= _LARGEST:
        raise ConfigError(
            f"{shown(text)!r}: {size!r} is no size", option="tiers", way_out="Give 512MiB or 10GiB"
        )
    return int(count)


def _seconds(text: str, time: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", time.strip(), re.IGNORECASE)
    length = float(match[1]) * _TIMES[match[2].lower() or "s"] if match else 0.0
    if not 0 < length <= _LONGEST:
        raise ConfigError(
            f"{shown(text)!r}: {time!r} is no time", option="tiers", way_out="Give 0.5s, 30m, 12h or 7d"
        )
    return length
