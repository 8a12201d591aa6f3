"""What a span is for: the role that its text plays in an agent's memory.

A region is finer than a chat role: a user message that carries retrieved documents ages differently from a
question. It is a hint. A wrong region costs quality, never correctness.
"""

from __future__ import annotations

import difflib
import re
from enum import StrEnum
from typing import Protocol

from tenure.errors import ConfigError


class Region(StrEnum):
    """The regions of a session, from the rules at its start to the model's own notes."""

    SYSTEM = "system"
    TOOLS = "tools"
    PLAN = "plan"
    USER = "user"
    RETRIEVED = "retrieved"
    TOOL_OUTPUT = "tool_output"
    ASSISTANT = "assistant"
    SCRATCHPAD = "scratchpad"
    OTHER = "other"


class HasRoleAndContent(Protocol):
    """What `infer_region` needs of a message."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


_BY_ROLE = {
    "system": Region.SYSTEM,
    "developer": Region.SYSTEM,
    "user": Region.USER,
    "assistant": Region.ASSISTANT,
    "tool": Region.TOOL_OUTPUT,
}

# A document is fenced by tags or by a code fence whose info string says what it holds.
_DOCUMENT = re.compile(
    r"<(document|documents|context|retrieved|search_results|passages?|sources?)(\s[^<>]{0,200})?>"
    r"|^```(document|retrieved|context|source)\b",
    re.IGNORECASE | re.MULTILINE,
)
_DOCUMENT_END = re.compile(
    r"</(document|documents|context|retrieved|search_results|passages?|sources?)>|^```\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_PLAN_TAG = re.compile(r"\s*<plan>", re.IGNORECASE)

# Fences stand near the ends of a message; a 2 MB paste is not searched from end to end.
_LOOK = 8192


def infer_region(message: HasRoleAndContent) -> Region:
    """Guess the region of a chat message from its role and text.

    The role decides, with three refinements: a user message with fenced documents is `retrieved`, an
    assistant message that is nothing but a `<think>` block is `scratchpad`, and an assistant or user
    message that opens with `<plan>` is `plan`. An unknown role is `other`.
    """
    region = _BY_ROLE.get(message.role, Region.OTHER)
    text = message.content
    if region in (Region.USER, Region.ASSISTANT) and _PLAN_TAG.match(text):
        return Region.PLAN
    if region is Region.USER and _DOCUMENT.search(text[:_LOOK]) and _DOCUMENT_END.search(text[-_LOOK:]):
        return Region.RETRIEVED
    if region is Region.ASSISTANT and _only_reasoning(text):
        return Region.SCRATCHPAD
    return region


def parse_region(name: str) -> Region:
    """Turn a name from a user into a `Region`.

    Raises:
        ConfigError: the name is not a region; the message lists the known ones and the closest.
    """
    try:
        return Region(name)
    except ValueError:
        known = [region.value for region in Region]
        closest = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
        hint = f"Did you mean {closest[0]!r}? " if closest else ""
        raise ConfigError(
            f"unknown region {name!r}", option="region", way_out=f"{hint}Known regions: {', '.join(known)}"
        ) from None


def _only_reasoning(text: str) -> bool:
    body = text.strip()
    if not body.startswith("<think>"):
        return False
    end = body.find("</think>")
    return end < 0 or end + len("</think>") == len(body)
