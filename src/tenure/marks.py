"""Marks in the place of texts, and the texts again in what a template made of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tenure.messages import Message

# Texts that templates look for inside contents; they stay where they are when the rest becomes marks.
_TAGS = re.compile(r"(</?(?:think|tool_response|tool_call)>)")
# Texts of one message, or of one call's arguments, that get a mark of their own.
_PARTS = 64


@dataclass(slots=True)
class Atom:
    """A text that the template is asked to place."""

    message: int
    text: str
    kind: Literal["text", "reasoning", "call"]
    where: tuple[int, int] | None = None


def draft(
    new: Sequence[Message], mark: Callable[[int], str], depth: int
) -> tuple[list[dict[str, Any]], list[Atom]]:
    """The messages with marks for their texts.

    Calls get marks for the texts in their arguments (`depth` 1) and for their names too (2).
    """
    atoms: list[Atom] = []

    def stand_in(index: int, text: str, kind: Literal["text", "reasoning", "call"]) -> str:
        if not text.strip():
            return text
        atoms.append(Atom(index, text, kind))
        return mark(len(atoms) - 1)

    def inside(index: int, value: Any, most: int) -> Any:
        if isinstance(value, str):
            return stand_in(index, value, "call") if len(atoms) < most else value
        if isinstance(value, dict):
            return {key: inside(index, item, most) for key, item in value.items()}
        if isinstance(value, list):
            return [inside(index, item, most) for item in value]
        return value

    found = []
    for index, message in enumerate(new):
        draft = message.as_chat()
        if message.reasoning_content is not None:
            draft["reasoning_content"] = stand_in(index, message.reasoning_content, "reasoning")
        parts = _TAGS.split(message.content)
        if len(parts) > _PARTS:
            parts = [message.content]
        # What stands before an assistant's </think> is reasoning, which templates may drop.
        spoken = 0
        if message.role == "assistant" and "</think>" in parts:
            spoken = len(parts) - parts[::-1].index("</think>")
        draft["content"] = "".join(
            part
            if _TAGS.fullmatch(part)
            else stand_in(index, part, "text" if place >= spoken else "reasoning")
            for place, part in enumerate(parts)
        )
        for call in draft.get("tool_calls", ()):
            function = call["function"]
            if depth > 1:
                function["name"] = stand_in(index, function["name"], "call")
            if depth > 0:
                function["arguments"] = inside(index, function["arguments"], len(atoms) + _PARTS)
        found.append(draft)
    return found, atoms


def find(real: str, cursor: int, glue: str, text: str, follow: str) -> tuple[int, int] | None:
    """Range of a text in the rendering, behind `glue` and before `follow` if the template writes them so."""
    at = cursor + len(glue)
    if real.startswith(glue, cursor):
        for form in _forms(text):
            if real.startswith(form, at) and real.startswith(follow, at + len(form)):
                return at, at + len(form)
    # The template looks at the text itself: look for it behind the end of its header, then anywhere.
    head = glue[glue.rstrip("\n").rfind("\n") + 1 :] or glue
    for before in (head, ""):
        for form in _forms(text):
            at = real.find(before + form, cursor)
            if at >= 0:
                return at + len(before), at + len(before) + len(form)
    return None


def _forms(text: str) -> Iterator[str]:
    """The ways in which templates write a text: as it is, trimmed, or quoted as JSON."""
    yield text
    yield text.strip()
    yield text.strip("\n")
    yield text.rstrip()
    yield text.lstrip()
    yield text.lstrip("\n")
    yield text.rstrip("\n")
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
