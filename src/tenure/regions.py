"""What a span is for: the role that its text plays in an agent's memory.

A region is finer than a chat role: a user message that carries retrieved documents ages differently from a
question. It is a hint. A wrong region costs quality, never correctness.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
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


class CustomRegion(str):
    """A region that a session's config defines, or one with overrides of its own: ``user:half_life=300,pin=soft``.

    A plain text in every wire form. The session checks it against its table.
    """


AnyRegion = Region | CustomRegion
"""What a message or a span carries."""


_VALUES = frozenset(region.value for region in Region)


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
_THINK, _THINK_END = "<think>", "</think>"
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


def parse_region(name: object, names: Iterable[str] | None = None) -> AnyRegion:
    """Turn a name from a user into a region.

    Args:
        name: a region, ``NAME:FIELD=VALUE,...``, or an object ``{"name": NAME, FIELD: VALUE}``.
        names: known regions; those of :class:`Region` if None.

    Raises:
        ConfigError: the name is not a region; the message lists the known ones and the closest.
    """
    if isinstance(name, Mapping):
        fields = ",".join(
            f"{key}={'none' if name[key] is None else name[key]}" for key in name if key != "name"
        )
        name = f"{name.get('name', '')}:{fields}" if fields else name.get("name")
    plain, overrides = split_region(name) if isinstance(name, str) else (str(name), {})
    known = [region.value for region in Region] if names is None else list(names)
    if not isinstance(name, str) or plain not in known:
        closest = difflib.get_close_matches(plain.lower(), known, n=1, cutoff=0.5)
        hint = f"Did you mean {closest[0]!r}? " if closest else ""
        raise ConfigError(
            f"unknown region {name!r}", option="region", way_out=f"{hint}Known regions: {', '.join(known)}"
        )
    if overrides or plain not in _VALUES:
        return CustomRegion(name)
    return Region(plain)


def read_region(name: str) -> AnyRegion:
    """A region from its text, where a session has written it."""
    return Region(name) if name in _VALUES else CustomRegion(name)


def split_region(name: str) -> tuple[str, dict[str, str]]:
    """``user:half_life=300,pin=soft`` as the name and the overrides.

    Raises:
        ConfigError: not of that form.
    """
    plain, found, rest = name.partition(":")
    if not found:
        return plain, {}
    overrides: dict[str, str] = {}
    for item in rest.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise ConfigError(
                f"{name!r}: {item!r} is not FIELD=VALUE",
                option="region",
                way_out="Write, for example, user:half_life=300,pin=soft",
            )
        overrides[key.strip()] = value.strip()
    return plain, overrides


def reasoning(text: str) -> list[tuple[int, int]]:
    """Ranges of a text that are ``<think>`` blocks, tags included; an open one reaches the end."""
    ranges: list[tuple[int, int]] = []
    at = text.find(_THINK)
    while at >= 0:
        end = text.find(_THINK_END, at)
        stop = len(text) if end < 0 else end + len(_THINK_END)
        ranges.append((at, stop))
        at = text.find(_THINK, stop)
    return ranges


class Thinking:
    """Follows a text that is being written, to tell whether it is inside a ``<think>`` block.

    Args:
        last: region of the token before the text; `scratchpad` where the prompt has opened a block.
    """

    def __init__(self, last: AnyRegion | None) -> None:
        self._inside = last == Region.SCRATCHPAD
        self._tail = ""

    @property
    def region(self) -> Region | None:
        """Of the next token; None for that of its message."""
        return Region.SCRATCHPAD if self._inside else None

    def follow(self, piece: str) -> None:
        """Go on with a piece of the text."""
        self._tail = (self._tail + piece)[-len(piece) - len(_THINK_END) :]
        opened, closed = self._tail.rfind(_THINK), self._tail.rfind(_THINK_END)
        if opened != closed:
            self._inside = opened > closed


def _only_reasoning(text: str) -> bool:
    body = text.strip()
    if not body.startswith(_THINK):
        return False
    end = body.find(_THINK_END)
    return end < 0 or end + len(_THINK_END) == len(body)
