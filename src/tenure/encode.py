"""Text to token ids, for text that stands in the middle of a session.

Three things differ from a plain call of the tokenizer. Nothing is added: the chat template writes its own
markers. Markers inside a message's own text are encoded as ordinary text, so that a tool result cannot
close its turn. And text that does not stand at the start of a session gets no start-of-text space.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tenure.errors import UnsupportedModelError
from tenure.memo import memo_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class Encoder:
    """Encodes with a fast Hugging Face tokenizer.

    Time is close to linear in the text also for unbroken runs (one letter, dashes, base64): the byte-level
    vocabularies merge a run with a heap, so runs need not be cut.

    Attributes:
        special: ids of the special tokens.
        bos: the id that the tokenizer itself puts before a text, or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} gives no places of tokens in the text",
                option="model",
                way_out="Use a model folder with a tokenizer.json",
            )
        self._tokenizer = tokenizer
        marked = {place: token for place, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(marked) | frozenset(tokenizer.all_special_ids)
        texts = sorted({token.content for token in marked.values() if len(token.content) > 1}, key=len)
        self._special_text = re.compile("|".join(map(re.escape, reversed(texts)))) if texts else None
        plain, _ = self._call("a")
        with_bos: list[int] = tokenizer("a", verbose=False)["input_ids"]
        self.bos: int | None = with_bos[0] if with_bos[:1] != plain[:1] else None
        self._guard = next(
            (
                text
                for text in reversed(texts)
                if len(self._call(text)[0]) == 1 and self._call(text + "a")[0][1:] != plain
            ),
            "",
        )

        self._memo = None if self._guard or self._special_text is None else memo_of(tokenizer)

    def has_marker(self, text: str) -> bool:
        """Whether a text holds a special token's text."""
        return self._special_text is not None and self._special_text.search(text) is not None

    def encode(
        self, text: str, contents: Sequence[tuple[int, int]] = (), *, start: bool = False
    ) -> tuple[list[int], list[int]]:
        """Encode a text.

        Args:
            text: what the template wrote.
            contents: ranges of it that are messages' own texts, in order.
            start: whether it stands at the start of the session.

        Returns:
            The ids, and for each the character where it ends.
        """
        ids: list[int] = []
        ends: list[int] = []
        for left, right in pairwise([0, *self._cuts(text, contents), len(text)]):
            if self._memo is not None and self._special_text is not None:
                more, places = self._memo.encode(text[left:right], self._special_text, self._call_all)
            else:
                more, places = self._call(text[left:right], guard=self._guard if left or not start else "")
            ids += more
            ends += [left + place for place in places]
        return ids, ends

    def settled(
        self, text: str, begin: int, endings: Sequence[str], contents: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        """How much of a text is encoded the same way whatever follows.

        Args:
            text: ends where the endings begin.
            begin: place of the text where a token begins that is certain already.
            endings: what may follow.
            contents: see `encode`.

        Returns:
            The number of ids that are certain from `begin` on, and the place where they end: what is behind
            it, encoded by itself, gives the other ids.
        """

        def encode(place: int, ending: str) -> tuple[list[int], list[int]]:
            inside = [(max(a, place) - place, b - place) for a, b in contents if b > place]
            return self.encode(text[place:] + ending, inside)

        forms = [encode(begin, ending) for ending in endings]
        ids, ends = forms[0]
        for same in range(min(common_prefix(ids, form) for form, _ in forms), 0, -1):
            place = begin + ends[same - 1]
            rest = [form[same:] for form, _ in forms]
            if place <= len(text) and [encode(place, ending)[0] for ending in endings] == rest:
                return same, place
        return 0, begin

    def _cuts(self, text: str, contents: Sequence[tuple[int, int]]) -> list[int]:
        """Places inside markers that stand in contents: cut there, a marker is ordinary text."""
        if self._special_text is None or not contents:
            return []
        starts = [start for start, _ in contents]
        cuts = []
        match = self._special_text.search(text)
        while match:
            place = bisect_right(starts, match.end() - 1) - 1
            resume = match.end()
            if place >= 0 and match.start() < contents[place][1]:
                resume = match.start() + 1
                cuts.append(resume)
            match = self._special_text.search(text, resume)
        return cuts

    def _call_all(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        result = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        offsets = ([end for _, end in places] for places in result["offset_mapping"])
        return list(zip(result["input_ids"], offsets, strict=True))

    def _call(self, text: str, guard: str = "") -> tuple[list[int], list[int]]:
        result = self._tokenizer(
            guard + text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[int] = result["input_ids"]
        ends = [end - len(guard) for _, end in result["offset_mapping"]]
        return (ids[1:], ends[1:]) if guard else (ids, ends)


def cut(ids: list[int], ends: list[int], places: Sequence[int]) -> list[int]:
    """Index of the first token that reaches beyond each character place."""
    return [min(bisect_right(ends, place), len(ids)) for place in places]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of ids that two lists share from their start."""
    size = min(len(a), len(b))
    if not size:
        return 0
    differ = np.asarray(a[:size]) != np.asarray(b[:size])
    first = int(differ.argmax())
    return first if differ[first] else size
