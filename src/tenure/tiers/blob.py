"""The form of an entry in a store: a header that says what it is, and a body in parts of several MB.

The header names version, kind, key and fingerprint, and length and checksum of each part; a digest guards the header
itself. Parts carry xxh3-128 checksums: they find any accident at the speed of memory, where blake2b would take ten
times as long as reading the file. Neither helps against somebody who writes into the store on purpose.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenure.errors import TierError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"TENURE-1"
_PREFIX = struct.Struct("<8sI16s")
PREFIX_BYTES = _PREFIX.size
"""Bytes in front of a header: magic, its length, its digest."""

_MOST = 64 << 20  # no header is longer


class BrokenError(TierError):
    """An entry is not what was written under its key."""


class RefusedError(TierError):
    """A store answers, and does not take an entry: it is full for example. What it has it still gives."""


class TooLargeError(TierError):
    """An entry is larger than all of a store; the next one fits."""


@dataclass(frozen=True)
class Blob:
    """An entry.

    Args:
        header: plain values; ``parts`` holds length and checksum of each part.
        body: all parts, one behind the other.
    """

    header: dict[str, Any]
    body: Bytes

    @classmethod
    def of(cls, header: dict[str, Any], body: Bytes, lengths: Sequence[int]) -> Blob:
        """Add the checksums of the parts to a header."""
        parts = [
            [stop - start, checksum(body[start:stop])] for start, stop in _ranges([*accumulate(lengths)])
        ]
        return cls({**header, "parts": parts}, body)

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return self.body.nbytes

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where each part lies in the body."""
        return _ranges([*accumulate(length for length, _ in self.header["parts"])])

    def prefix(self) -> bytes:
        """The header as bytes, with its length and its digest."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        return _PREFIX.pack(MAGIC, len(text), _digest(text)) + text

    def check(self) -> None:
        """Raise BrokenError unless every part is what was written."""
        for number, (start, stop) in enumerate(self.ranges):
            check_part(self.header, number, self.body[start:stop])


def header_length(prefix: bytes) -> int:
    """Length of the header behind a prefix.

    Raises:
        BrokenError: this is no entry.
    """
    if len(prefix) < PREFIX_BYTES or prefix[:8] != MAGIC:
        raise BrokenError("it does not begin as an entry")
    length: int = _PREFIX.unpack_from(prefix)[1]
    if length > _MOST:
        raise BrokenError("its header has no end")
    return length


def read_header(data: bytes) -> dict[str, Any]:
    """The header of what :meth:`Blob.prefix` gave.

    Raises:
        BrokenError: it is not whole.
    """
    length = header_length(data)
    text = data[PREFIX_BYTES : PREFIX_BYTES + length]
    if len(text) != length or _PREFIX.unpack_from(data)[2] != _digest(text):
        raise BrokenError("its header is not what was written")
    header: dict[str, Any] = json.loads(text)
    try:
        whole = all(length >= 0 and isinstance(digest, str) for length, digest in header["parts"])
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenError("its header does not tell its parts") from error
    if not whole:
        raise BrokenError("its header does not tell its parts")
    return header


def body_length(header: dict[str, Any]) -> int:
    """Bytes of all parts."""
    return sum(length for length, _ in header["parts"])


def check_part(header: dict[str, Any], number: int, part: Bytes) -> None:
    """Raise BrokenError unless a part is what was written."""
    length, known = header["parts"][number]
    if part.nbytes != length or checksum(part) != known:
        raise BrokenError(f"part {number} is not what was written")


def checksum(data: Bytes) -> str:
    """xxh3-128 in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).data)


def _ranges(stops: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()
