"""Encoded parts of texts, kept, so that a conversation that is sent again is not tokenized again.

A text is cut where the template has written a special marker. Byte-level tokenizers cut there too before they do
anything else, so the parts encode as the whole does. For other tokenizers nothing is kept.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

Encoded = tuple[Sequence[int], Sequence[int]]

_MOST = 16 << 20
"""Characters of the texts that are kept; with their ids about three times as many bytes."""

_memos: weakref.WeakKeyDictionary[Any, Memo] = weakref.WeakKeyDictionary()


class Memo:
    """Ids and token ends of parts of texts, the least recently used forgotten first. Safe on several threads."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._size = 0
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Encoded] = OrderedDict()

    def encode(
        self, text: str, marker: re.Pattern[str], call: Callable[[list[str]], Sequence[Encoded]]
    ) -> Encoded:
        """Ids of a text, and the character where each ends.

        Args:
            text: in which every match of ``marker`` is a special token.
            marker: of special tokens.
            call: encodes several texts.
        """
        starts = [match.start() for match in marker.finditer(text)]
        parts = [text[left:right] for left, right in pairwise([0, *starts, len(text)]) if right > left]
        found: dict[str, Encoded] = {}
        with self._lock:
            for part in parts:
                if (known := self._known.get(part)) is not None:
                    self._known.move_to_end(part)
                    found[part] = known
        missing = list(dict.fromkeys(part for part in parts if part not in found))
        if missing:
            found.update(zip(missing, call(missing), strict=True))
            self._keep(missing, found)
        ids: list[int] = []
        ends: list[int] = []
        at = 0
        for part in parts:
            more, places = found[part]
            ids += more
            ends += [at + place for place in places]
            at += len(part)
        return ids, ends

    def _keep(self, parts: list[str], found: dict[str, Encoded]) -> None:
        with self._lock:
            for part in parts:
                if len(part) <= self._most // 4 and part not in self._known:
                    # As arrays they take a tenth of the memory of lists.
                    self._known[part] = array("I", found[part][0]), array("I", found[part][1])
                    self._size += len(part)
            while self._size > self._most:
                gone, _ = self._known.popitem(last=False)
                self._size -= len(gone)


def memo_of(tokenizer: Any) -> Memo | None:
    """The memo of a tokenizer; None where parts may encode otherwise than the whole."""
    if not _cuts_at_markers(tokenizer):
        return None
    return _memos.setdefault(tokenizer, Memo())


def _cuts_at_markers(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    data = json.loads(backend.to_str())
    for token in data.get("added_tokens") or []:
        if token.get("special") and (token.get("lstrip") or token.get("rstrip") or token.get("normalized")):
            return False
    steps = data.get("pre_tokenizer") or {}
    kinds = [steps, *(steps.get("pretokenizers") or [])]
    bytes_ = [step for step in kinds if step.get("type") == "ByteLevel"]
    normalizer = data.get("normalizer") or {}
    return (
        bool(bytes_)
        and not any(step.get("add_prefix_space") for step in bytes_)
        and normalizer.get("type") in (None, "NFC", "NFKC")
        and (data.get("model") or {}).get("type") == "BPE"
    )
