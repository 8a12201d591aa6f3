"""Text truncation: what an agent without cache memory does. Keeps the system message and the newest text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tenure.transcript import Transcript

if TYPE_CHECKING:
    from tenure.messages import Message


def newest(tokenizer: Any, turns: Sequence[Sequence[Message]], probe: Message, budget: int) -> list[Message]:
    """System message, the newest messages, and the probe, in at most ``budget`` tokens with the reply's header.

    The oldest of them loses lines from its start until it fits. Where the probe alone is too long, it stands alone.
    """
    system, *messages = [message for turn in turns for message in turn]
    start = Transcript(tokenizer)

    def size(kept: list[Message]) -> int:
        pieces = start.fork().open([system, *kept, probe], add_generation_prompt=True)
        return sum(len(piece.ids) for piece in pieces)

    kept: list[Message] = []
    for message in reversed(messages):
        if size([message, *kept]) <= budget:
            kept.insert(0, message)
            continue
        lines = message.content.splitlines(keepends=True)
        low, high = 0, len(lines) - 1  # how many of its last lines fit
        while low < high:
            middle = (low + high + 1) // 2
            fits = size([replace(message, content="".join(lines[-middle:])), *kept]) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        if low:
            kept.insert(0, replace(message, content="".join(lines[-low:]), span=None))
        break
    return [system, *kept, probe]
