"""Sessions as entries of a tier, by name: for the ones that move between machines.

They are kept in the last of the engine's tiers that outlives the process, the one that is shared most widely. Unlike
evicted spans they are what a user has asked for: a disk tier never drops them for room or age, and a write that fails
is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
from torch import Tensor

from tenure.errors import ConfigError, SaveError, TierError
from tenure.tiers.base import SESSIONS
from tenure.tiers.blob import Blob
from tenure.tiers.codec import PART, VERSION

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.tiers.store import Store

SCHEME = "tier:"
"""What the place of a session in a tier begins with; the rest is its name."""

_MOST = 100
_QUOTED = 200
"""Of the name of a file in a disk tier; with what stands around it no more than 255 may be there."""


def write(engine: Engine, name: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> int:
    """Write a packed session under a name, in place of an older one.

    Returns:
        Bytes written.

    Raises:
        SaveError: it was not written; an older one is as it was, or gone.
        ConfigError: no tier outlives the process, or the name cannot be one.
    """
    from safetensors.torch import save

    store, key = _store(engine), _key(name)
    body = np.frombuffer(save(dict(tensors)), np.uint8)
    lengths = [min(PART, len(body) - start) for start in range(0, len(body), PART)]
    header = {"version": VERSION, "kind": "session", "key": key, "metadata": dict(metadata)}
    blob = Blob.of(header, body, lengths)
    try:
        store.tier.write(key, blob)
    except TierError as error:
        store.tier.counters.add("write errors")
        raise SaveError(
            f"{store.tier.name} did not take the session: {error.cause}",
            option=SCHEME + name,
            way_out="Make room, wait until it answers, or save to a file; the session itself goes on",
        ) from error
    store.breaker.worked()
    store.tier.counters.add("written")
    if engine.tiers is not None:
        engine.tiers.make_room()
    return blob.nbytes


def read(engine: Engine, name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a session.

    Raises:
        SaveError: there is none of that name, or it is broken, or the tier does not answer.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    store, key = _store(engine), _key(name)
    try:
        blob = store.tier.read(key)
        if blob is not None and (blob.header.get("kind"), blob.header.get("key")) != ("session", key):
            raise TierError("what is under its name is another entry")
    except TierError as error:
        store.tier.counters.add("read errors")
        raise SaveError(
            f"{store.tier.name}: {error.cause}", option=SCHEME + name, way_out="Try again, or save it again"
        ) from error
    if blob is None:
        raise SaveError(
            f"{store.tier.name} has no such session", option=SCHEME + name, way_out="Save one first"
        )
    try:
        return dict(blob.header["metadata"]), load(blob.body.tobytes())
    except (SafetensorError, KeyError) as error:
        raise SaveError(
            f"it cannot be read: {error}", option=SCHEME + name, way_out="Save it again"
        ) from error


def check(engine: Engine, name: str) -> None:
    """Refuse a session that could not be written under a name, before there is one.

    Raises:
        ConfigError: no tier outlives the process, or the name cannot be one.
    """
    _store(engine)
    _key(name)


def remove(engine: Engine, name: str) -> None:
    """Remove a session, if there is one of that name.

    Raises:
        SaveError: the tier does not answer.
    """
    store = _store(engine)
    try:
        store.tier.delete([_key(name)])
    except TierError as error:
        raise SaveError(
            f"{store.tier.name}: {error.cause}", option=SCHEME + name, way_out="Try again"
        ) from error


def names(engine: Engine) -> list[str]:
    """Names of the sessions in the tier.

    Raises:
        SaveError: the tier does not answer.
    """
    store = _store(engine)
    try:
        keys = [entry.key for entry in store.tier.entries()]
    except TierError as error:
        raise SaveError(f"{store.tier.name}: {error.cause}", option="tiers", way_out="Try again") from error
    return sorted(key.removeprefix(SESSIONS) for key in keys if key.startswith(SESSIONS))


def _store(engine: Engine) -> Store:
    store = engine.tiers.last if engine.tiers is not None else None
    if store is None:
        raise ConfigError(
            "the engine has no tier that outlives it",
            option="tiers",
            way_out="Load it with tiers=('disk:PATH:10GiB',) or the URL of a Valkey server",
        )
    return store


def _key(name: str) -> str:
    size = len(name.encode("utf-8", "replace"))
    if not 0 < size <= _MOST or "\0" in name or any("\ud800" <= mark <= "\udfff" for mark in name):
        raise ConfigError(
            f"{name[:_MOST]!r} cannot be the name of a session",
            option="name",
            way_out=f"Give 1 to {_MOST} bytes of text without NUL",
        )
    if len(quote(name, safe="")) > _QUOTED:
        raise ConfigError(
            f"{name!r} is too long for the name of a file, in which a sign beyond ASCII takes six to twelve",
            option="name",
            way_out="Give a shorter name",
        )
    return SESSIONS + name
