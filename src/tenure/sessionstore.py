"""Saving sessions and getting them back: one safetensors file, or one entry of a tier.

The state is the file's metadata as JSON, keys, values and ledger are its tensors. A digest over all of it proves that
a file is what was saved; a fingerprint of model, tokenizer and dtype proves that it may be used here. A file is
replaced as a whole or not at all, so that after any crash it is the old one or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure import sessiontier
from tenure.errors import ConfigError, IntegrityError, SaveError
from tenure.files import remove_parts, replace_file
from tenure.fingerprint import FORMAT, Fingerprint
from tenure.sessionstate import describe, rebuild
from tenure.tiers.blob import checksum

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.session import Session

_KIND = "tenure session"
_AGAIN = "Save the session again, or restore an older copy"


def save(session: Session, path: str | Path) -> int:
    """Write a session to a file; see :meth:`Session.save`.

    Returns:
        Bytes written.
    """
    from safetensors.torch import save_file

    metadata, tensors = pack(session)
    name = _name(path)
    if name is not None:
        return sessiontier.write(session.engine, name, metadata, tensors)
    path = _file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_parts(path.parent)
        # The safetensors library reports a failed write with an error of its own.
        replace_file(path, lambda part: _written(save_file, tensors, part, metadata))
        return path.stat().st_size
    except OSError as error:
        raise SaveError(
            f"the session could not be written: {error.strerror or error}",
            option=str(path),
            way_out="Make room or name another place; the session itself goes on, an older file is as it was",
        ) from error


def load(engine: Engine, path: str | Path) -> Session:
    """Read a session from a file; see :meth:`Engine.restore`."""
    from safetensors import SafetensorError, safe_open

    name = _name(path)
    if name is not None:
        metadata, tensors = sessiontier.read(engine, name)
        check_header(engine, metadata, str(path))
        return unpack(engine, metadata, tensors, str(path))
    path = _file(path)
    if path.parent.is_dir():
        remove_parts(path.parent)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            check_header(engine, metadata, str(path))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise SaveError("there is no such file", option=str(path), way_out="Save a session first") from error
    except (OSError, SafetensorError) as error:
        raise SaveError(f"the file cannot be read: {error}", option=str(path), way_out=_AGAIN) from error
    return unpack(engine, metadata, tensors, str(path))


def _name(path: str | Path) -> str | None:
    """Name of a session in a tier; None for a file."""
    scheme = sessiontier.SCHEME
    return path.removeprefix(scheme) if isinstance(path, str) and path.startswith(scheme) else None


def _file(path: str | Path) -> Path:
    """The path of a file.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path)
        cause = "a path has no NUL"
    except (TypeError, UnicodeError) as error:
        cause = str(error)
    raise ConfigError(f"{path!r}: {cause}", option="path", way_out="Give the path of a file, or tier:NAME")


def pack(session: Session) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a session."""
    state, tensors = describe(session)
    text = json.dumps(state, separators=(",", ":"))
    return {
        "kind": _KIND,
        "format": str(FORMAT),
        "fingerprint": json.dumps(session.engine.fingerprint.to_json()),
        "session": text,
        "digest": _digest(text, tensors),
    }, tensors


def check_header(engine: Engine, metadata: Mapping[str, str], source: str) -> None:
    """Refuse what is no session, or not of this engine's model.

    Raises:
        SaveError: with the reason.
        ConfigError: names what differs.
    """
    if metadata.get("kind") != _KIND:
        raise SaveError("this is no session of Tenure", option=source, way_out="Give a file of Session.save")
    if metadata.get("format") != str(FORMAT):
        raise SaveError(
            f"has format {metadata.get('format')}, this version of Tenure reads {FORMAT}",
            option=source,
            way_out="Use the version of Tenure that saved it",
        )
    try:
        stored = Fingerprint.from_json(json.loads(metadata["fingerprint"]))
    except (KeyError, TypeError, ValueError) as error:
        raise SaveError("its fingerprint is broken", option=source, way_out=_AGAIN) from error
    engine.fingerprint.check(stored, source)


def unpack(
    engine: Engine, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], source: str
) -> Session:
    """The session of checked metadata and its tensors.

    Raises:
        SaveError: they are not what was saved.
    """
    text = metadata.get("session", "")
    if metadata.get("digest") != _digest(text, tensors):
        raise SaveError("its content is not what was saved", option=source, way_out=_AGAIN)
    try:
        return rebuild(engine, json.loads(text), tensors)
    except ConfigError:
        raise  # what is wrong is here, not there
    except (KeyError, TypeError, ValueError, RuntimeError, IntegrityError) as error:
        raise SaveError(
            f"its state does not fit this version of Tenure: {error}",
            option=source,
            way_out="Use the version of Tenure that saved it",
        ) from error


def _written(save_file: Any, tensors: dict[str, Tensor], part: Path, metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError

    try:
        save_file(tensors, part, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    known = blake2b(text.encode(), digest_size=16)
    for name, one in sorted(tensors.items()):
        numbers = checksum(one.reshape(-1).view(torch.uint8).numpy()) if one.numel() else ""
        known.update(f"{name} {tuple(one.shape)} {one.dtype} {numbers}\0".encode())
    return known.hexdigest()
