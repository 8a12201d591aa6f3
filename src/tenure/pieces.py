"""``Piece``: rendered token ids that belong to one span."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tenure.messages import Message, Pin
    from tenure.regions import Region
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
    """

    ids: list[int]
    kind: Literal["preamble", "message", "prompt", "closing"]
    region: Region
    role: str
    message: int | None = None
    span: str | None = None
    pin: Pin | None = None
    step: str | None = None
    reads: tuple[Read, ...] = ()
    text: tuple[int, int] | None = None

    @classmethod
    def of(cls, message: Message, index: int, ids: list[int], text: tuple[int, int] | None) -> Piece:
        """The piece of a message."""
        return cls(
            ids,
            "message",
            message.memory_region,
            message.role,
            index,
            message.span,
            message.pin,
            message.step,
            message.reads,
            text,
        )
