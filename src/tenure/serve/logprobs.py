"""Log-probabilities of an answer's tokens: handed out with the text that they belong to, spelt in OpenAI's two forms."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tenure.detokenize import TextStream
from tenure.sampling import TokenChoice

if TYPE_CHECKING:
    from tenure.turn import Turn

_LEAST = -9999.0
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Placed:
    """A token's log-probabilities and where its text begins, in characters of the answer."""

    choice: TokenChoice
    start: int


class LogStream:
    """Log-probabilities of a turn, each given out once its token's text has begun to be.

    Tokens whose text lies behind a stop text are never given out.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._stream = TextStream(tokenizer)
        self._read = self._given = 0
        self._waiting: deque[Placed] = deque()

    def take(self, turn: Turn, *, last: bool = False) -> list[Placed]:
        """What can be given out with the text that the turn has settled; ``last`` after it is closed."""
        choices, turn.choices = turn.choices, []
        for choice in choices:
            self._waiting.append(Placed(choice, self._read))
            self._read += len(self._stream.push(choice.token))
        self._given += len(turn.take())
        if last:
            self._read += len(self._stream.finish())
        whole = last and self._given >= self._read
        found = []
        while self._waiting and (whole or self._waiting[0].start < self._given):
            found.append(self._waiting.popleft())
        return found


def spelt(tokenizer: Any, choice: TokenChoice) -> dict[str, Any]:
    """A token's log-probabilities in the form of chats."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, own = text_and_bytes(tokenizer, token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(own)}

    top = [one(token, value) for token, value in choice.top]
    return {**one(choice.token, choice.logprob), "top_logprobs": top}


def listed(tokenizer: Any, placed: Sequence[Placed]) -> dict[str, Any]:
    """Log-probabilities of tokens in the form of raw completions; a part of a character is ``bytes:\\xf0``."""

    def text(token: int) -> str:
        shown, own = text_and_bytes(tokenizer, token)
        if shown.encode() == own:
            return shown
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    choices = [one.choice for one in placed]
    return {
        "tokens": [text(choice.token) for choice in choices],
        "token_logprobs": [max(choice.logprob, _LEAST) for choice in choices],
        "top_logprobs": [
            {text(token): max(value, _LEAST) for token, value in choice.top} for choice in choices
        ],
        "text_offset": [one.start for one in placed],
    }


def text_and_bytes(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """A token's text and its own bytes, which are no text of their own where it is a part of a character."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    raw = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(raw, str) or token in tokenizer.added_tokens_decoder:
        return text, text.encode()
    fallback = _FALLBACK.fullmatch(raw)
    if fallback and text != raw:
        return text, bytes([int(fallback[1], 16)])
    if "\N{REPLACEMENT CHARACTER}" in text and all(character in _BYTES for character in raw):
        return text, bytes(_BYTES[character] for character in raw)
    if "\N{LOWER ONE EIGHTH BLOCK}" in raw:
        text = raw.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")  # decoding drops the space of a first word
    return text, text.encode()


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = sorted(set(range(256)).difference(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTES = _byte_characters()
