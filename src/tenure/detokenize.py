"""Token ids to text, piece by piece, without ever showing half a character or a stop string.

The joined pieces equal the tokenizer's decoding of all ids at once. Byte-level vocabularies cut characters
anywhere, so ids wait until the text they end in is settled. For vocabularies with byte fallback
(SentencePiece) the tokenizer's own decoding turns a whole run of byte tokens into replacement characters
when its last character is cut; the pieces keep the characters that were complete.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most 4 bytes and a token at least one: undecided bytes are in the last 3 tokens.
_UNDECIDED = 3
_SETTLE_AFTER = 8


class TextStream:
    """Turns generated ids into text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop: strings that end the text. The text from the first completed one on is never given out.
        stop_ids: ids that end the text and are no part of it.
        before: ids that the text goes on from. They are not given out again, but where they end in the middle of a
            character, the whole of it is.

    Attributes:
        stopped: the stop string or the stop id that ended the text, else None. What is pushed later is
            ignored.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if not all(isinstance(text, str) and text for text in stop):
            raise ConfigError("stop strings must be non-empty strings", option="stop")
        self._tokenizer = tokenizer
        self._silent = _special_ids(tokenizer)
        self._stop = tuple(stop)
        self._stop_ids = frozenset(stop_ids)
        self.stopped: str | int | None = None
        self._ids: list[int] = []
        self._context: list[int] = []  # ids of the last text, so that a word keeps its leading space
        self._pending: list[int] = []  # ids whose text is not settled yet
        self._places: list[int] = []  # where in `_ids` they are
        self._held = ""  # settled text that may turn out to begin a stop string
        self._given = 0  # characters given out
        self._settled = 0  # characters given out or held
        # Where ids and characters end together, from the last such place within the given text on, and the
        # text from there on: what `kept_ids` needs. Neither grows with the turn.
        self._points: deque[tuple[int, int]] = deque([(0, 0)])
        self._recent = ""
        self._go_on(before)

    def _go_on(self, before: Sequence[int]) -> None:
        known = [token for token in before if token not in self._silent][-_SETTLE_AFTER:]
        half = 0
        while half <= _UNDECIDED and self._decode(known[: len(known) - half]).endswith(_REPLACEMENT):
            half += 1
        if half > _UNDECIDED:  # broken bytes, not a character that was cut
            half = 0
        cut = len(known) - half
        self._context, self._pending = known[:cut], known[cut:]
        self._places = [0] * half

    def push(self, token: int) -> str:
        """Take one id and return the text that it settles, often the empty string."""
        if self.stopped is not None:
            return ""
        if token in self._stop_ids:
            self.stopped = token
            return ""
        self._ids.append(token)
        if token in self._silent:
            if not self._pending:
                self._mark()
            return ""
        self._pending.append(token)
        self._places.append(len(self._ids) - 1)
        return self._emit(self._settle())

    def finish(self) -> str:
        """Return what was held back: the last characters, and the replacement character for half of one."""
        if isinstance(self.stopped, str):
            return ""
        if not self._ids:
            return ""  # what is pending then was given out by the text before
        text = self._emit(self._take(len(self._pending), self._text_of(len(self._pending)))) + self._held
        self._given += len(self._held)
        self._held = ""
        return text

    def kept_ids(self) -> tuple[list[int], str]:
        """The longest start of the ids whose text lies within the text given out, and the text missing then.

        After a stop string a session goes back to these ids and encodes the missing text, so that its history
        is exactly what the caller saw. Without a stop string these are all ids (but the stop id) and "".
        """
        if not isinstance(self.stopped, str):
            return list(self._ids), ""
        count, characters = max(point for point in self._points if point[1] <= self._given)
        start = characters - self._points[0][1]
        return self._ids[:count], self._recent[start : start + self._given - characters]

    def _settle(self) -> str:
        whole = len(self._pending)
        text = self._text_of(whole)
        if not text.endswith(_REPLACEMENT):
            return self._take(whole, text)
        if whole > _SETTLE_AFTER:
            # A long run of broken bytes: all but the last few tokens is decided, whatever comes.
            for cut in range(whole - 1, whole - 1 - _UNDECIDED, -1):
                start = self._text_of(cut)
                if start + self._decode(self._pending[cut:]) == text:
                    return self._take(cut, start)
        return ""

    def _text_of(self, count: int) -> str:
        """The text that the first `count` pending ids add."""
        before = self._decode(self._context)
        return self._decode(self._context + self._pending[:count])[len(before) :]

    def _take(self, count: int, text: str) -> str:
        if text:
            self._context = self._pending[:count]
        del self._pending[:count]
        del self._places[:count]
        self._settled += len(text)
        self._recent += text
        self._mark()
        return text

    def _mark(self) -> None:
        self._points.append((self._places[0] if self._places else len(self._ids), self._settled))

    def _emit(self, text: str) -> str:
        buffer = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if ends:
            # The one completed first, so that the result does not hang on where tokens end.
            _, at, self.stopped = min(ends)
            self._held = ""
            self._given += at
            return buffer[:at]
        keep = max((_overlap(buffer, stop) for stop in self._stop), default=0)
        self._held = buffer[len(buffer) - keep :]
        self._given += len(buffer) - keep
        self._forget()
        return buffer[: len(buffer) - keep]

    def _forget(self) -> None:
        before = self._points[0][1]
        while len(self._points) > 1 and self._points[1][1] <= self._given:
            self._points.popleft()
        self._recent = self._recent[self._points[0][1] - before :]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {place for place, token in added.items() if token.special}


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper start of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
