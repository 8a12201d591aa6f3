"""Words of a text for looking things up: identifiers whole and in parts, numbers as they are written."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(system|developer|user|assistant|tool|ipython)\s*\n")
_WORD = re.compile(r"[^\W\d]\w*|\d+(?:[.,]\d+)*")


def bare(text: str) -> str:
    """A message's text without the role that chat templates write before it."""
    match = _HEADER.match(text)
    return text[match.end() :] if match else text


def words(text: str) -> list[str]:
    """Lower-case words in order; ``FeeRule`` and ``fee_rule`` give ``fee`` and ``rule`` after themselves.

    A word that ends in a single ``s`` gives itself without it, too: enough for plurals and verbs, and for no language
    more than a useless term.
    """
    found = []
    for match in _WORD.finditer(text):
        word = match.group()
        parts = _parts(word)
        for one in (word, *(part for part in parts if len(parts) > 1 and len(part) > 1)):
            low = one.lower()
            found.append(low)
            if len(low) > 3 and low.endswith("s") and not low.endswith("ss"):
                found.append(low[:-1])
    return found


def identifiers(text: str) -> set[str]:
    """What looks like a name of a program or a code: with an underscore, a digit inside, or capitals inside.

    Plain words are left out, and so is what has fewer than three characters.
    """
    found = set()
    for match in _WORD.finditer(text):
        word = match.group()
        inner = word.strip("_")
        mixed = "_" in inner or any(c.isdigit() for c in inner) or inner[1:] != inner[1:].lower()
        if len(inner) > 2 and mixed:
            found.add(word)
    return found


def _parts(word: str) -> list[str]:
    """``HTTPServer_v2`` as ``HTTP``, ``Server``, ``v`` and ``2``."""
    parts, start = [], 0
    for place in range(1, len(word) + 1):
        if place < len(word):
            before, here, behind = word[place - 1], word[place], word[place + 1 : place + 2]
            starts = (
                "_" in (before, here)
                or before.isdigit() != here.isdigit()
                or (here.isupper() and (before.islower() or behind.islower()))
            )
            if not starts:
                continue
        part = word[start:place].strip("_")
        if part:
            parts.append(part)
        start = place
    return parts
