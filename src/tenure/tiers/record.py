"""What leaves the cache and can come back: whole spans, with the rows that every layer computed for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class SpanRecord:
    """A whole span's raw keys and values.

    Keys are unrotated, so a record can be put back at any rotary position.

    Args:
        span: id of the span in its session.
        start: its first logical index.
        ids: its token ids, for proof that the record is the one asked for.
        keys: raw keys ``[layers, kv_heads, n, D]``.
        values: like ``keys``.
        score: what the policy had made of the attention when the span was captured, ``[groups, n]`` fp32.
    """

    span: str
    start: int
    ids: Sequence[int]
    keys: Tensor
    values: Tensor
    score: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def first(self, count: int) -> SpanRecord:
        """The record of the first ``count`` tokens."""
        return SpanRecord(
            self.span,
            self.start,
            self.ids[:count],
            self.keys[:, :, :count],
            self.values[:, :, :count],
            self.score[:, :count],
        )


class Archive(Protocol):
    """Where a session's memory puts complete spans and asks for them again.

    No call raises for trouble of a store: what cannot be kept is a miss later, never an error of the session.
    """

    def put(self, record: SpanRecord) -> None:
        """Take a complete span. The tensors belong to the archive from now on."""

    def get(self, span_id: str) -> SpanRecord | None:
        """A span's record, or None if it is lost."""

    def prefetch(self, span_ids: Iterable[str]) -> None:
        """These spans are likely to be asked for next."""

    def forget(self, span_ids: Iterable[str]) -> None:
        """These spans no longer exist in the session."""

    def fork(self) -> Archive:
        """An archive for a fork of the session: knows the same spans, and what it forgets the other keeps."""


@runtime_checkable
class Portable(Protocol):
    """An archive that a saved session can take along."""

    def describe(self) -> tuple[dict[str, str], list[SpanRecord]]:
        """Keys of the spans that outlive the process, by span id, and the records of all others."""

    def adopt(self, keys: Mapping[str, str]) -> None:
        """Know spans that an earlier process has left under these keys."""
