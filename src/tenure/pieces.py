"""``Piece``: rendered token ids that belong to one span."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tenure.errors import ConfigError, MessageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tenure.messages import Message, Pin
    from tenure.parts import Part
    from tenure.region_table import RegionTable
    from tenure.regions import AnyRegion
    from tenure.steps import Read


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of token ids that belongs to one span.

    Args:
        ids: token ids; a prompt may be empty.
        kind: `preamble` (what the template writes before the first message), `message`, `prompt` (the
            header of the
            assistant's turn, which opens its span) or `closing` (extends the last span).
        region: role for memory.
        role: chat role.
        message: index in the list that was passed, for kind `message`.
        span: the id that the caller gave.
        pin: `hard`, `soft` or None.
        step: the plan step that the message belongs to.
        reads: spans that this step reads.
        text: the range of `ids` that holds the message's own text, without header and end marker.
        parts: ranges of `ids` whose region differs from that of the piece, ascending.
    """

    ids: list[int]
    kind: Literal["preamble", "message", "prompt", "closing"]
    region: AnyRegion
    role: str
    message: int | None = None
    span: str | None = None
    pin: Pin | None = None
    step: str | None = None
    reads: tuple[Read, ...] = ()
    text: tuple[int, int] | None = None
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(
        cls,
        message: Message,
        index: int,
        ids: list[int],
        text: tuple[int, int] | None,
        parts: tuple[Part, ...] = (),
    ) -> Piece:
        """The piece of a message. A pin on a message without text has nothing to keep and is dropped."""
        return cls(
            ids,
            "message",
            message.memory_region,
            message.role,
            index,
            message.span,
            None if message.empty else message.pin,
            message.step,
            message.reads,
            text,
            parts,
        )

    def after(self, count: int) -> Piece:
        """The piece without its first `count` ids."""
        parts = ((max(0, a - count), b - count, region) for a, b, region in self.parts if b > count)
        return replace(self, ids=self.ids[count:], parts=tuple(parts))

    def runs(self) -> list[tuple[list[int], AnyRegion]]:
        """The ids cut where the region changes, each run with its region."""
        edges: list[tuple[int, int, AnyRegion]] = []
        at = 0
        for start, stop, region in (*self.parts, (len(self.ids), len(self.ids), self.region)):
            edges += [(at, start, self.region), (start, stop, region)]
            at = stop
        return [(self.ids[start:stop], region) for start, stop, region in edges if start < stop]


def marked(pieces: Iterable[Piece], table: RegionTable) -> list[Piece]:
    """Pieces with the pins of their regions.

    A hard pin of a region holds for a whole message with a part of that region. What the model writes is not pinned by
    its region, since its length is not known beforehand; soft pins of regions are the policies' business.

    Raises:
        MessageError: a region that the table does not know; nothing has changed.
    """
    found = []
    for piece in pieces:
        regions = [piece.region, *(region for _, _, region in piece.parts)]
        try:
            hard = "hard" in [table.spec(region).pin for region in regions]
        except ConfigError as error:
            raise MessageError(f"region: {error.cause}", index=piece.message, way_out=error.way_out) from None
        told = piece.kind == "preamble" or (piece.kind == "message" and piece.text is not None)
        found.append(replace(piece, pin="hard") if hard and told else piece)
    return found
