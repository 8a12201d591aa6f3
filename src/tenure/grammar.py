"""Texts of a given form: a grammar masks the logits, so that every sampled token keeps the text valid.

The grammars are llguidance's (an optional part, ``pip install 'tenure[grammar]'``): JSON schemas, regular
expressions and its dialect of Lark. A :class:`Grammar` is compiled once and shared; each turn has a :class:`Matcher`
of its own.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from tenure.errors import ConfigError, ModelError

_tokenizers: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


class Grammar:
    """What a turn's text must be.

    Args:
        tokenizer: the model's fast Hugging Face tokenizer.
        source: a grammar as llguidance reads it; use the class methods.

    Raises:
        ConfigError: the grammar is malformed, or uses what llguidance does not know.
        ModelError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._fresh: dict[frozenset[int], Any] = {}
        library = _library()
        problem = library.LLMatcher.validate_grammar(source, None)
        if problem:
            raise ConfigError(
                str(problem).strip().splitlines()[0],
                option="grammar",
                way_out="Simplify the schema or grammar",
            )

    @classmethod
    def json_schema(cls, tokenizer: Any, schema: Mapping[str, Any] | str, *, spaces: bool = False) -> Grammar:
        """JSON that a schema accepts.

        Args:
            tokenizer: the model's.
            schema: a JSON schema, as data or as text.
            spaces: allow white space between the parts; without it a model cannot go on with spaces for ever.
        """
        data = _parsed(schema)
        return cls(tokenizer, "start: " + _json(data, spaces=spaces))

    @classmethod
    def json_object(cls, tokenizer: Any) -> Grammar:
        """Any JSON object."""
        return cls.json_schema(tokenizer, {"type": "object"})

    @classmethod
    def regex(cls, tokenizer: Any, pattern: str) -> Grammar:
        """A text that a regular expression matches from end to end."""
        return cls(tokenizer, _library().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, tokenizer: Any, text: str) -> Grammar:
        """A text of llguidance's Lark dialect, in which ``%json {...}`` stands for a schema."""
        return cls(tokenizer, text)

    @classmethod
    def choice(cls, tokenizer: Any, texts: Collection[str]) -> Grammar:
        """One of several texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"{texts!r} cannot be used", option="grammar", way_out="Give non-empty texts")
        return cls(tokenizer, "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @staticmethod
    def term(tokenizer: Any, text: str) -> str:
        """A fixed text as a term of a Lark grammar, for which a marker of the model is its one token."""
        place = tokenizer.convert_tokens_to_ids(text)
        marker = text[:1] == "<" and text[-1:] == ">" and place is not None
        if marker and place != tokenizer.unk_token_id and _tokenizer(tokenizer, ()).is_special_token(place):
            return text
        return json.dumps(text, ensure_ascii=False)

    def matcher(self, stop_ids: Collection[int] = ()) -> Matcher:
        """A matcher at the start of the text. The first one compiles the grammar; the others are copies.

        Args:
            stop_ids: ids that end a turn; allowed where the text is complete.

        Raises:
            ConfigError: the grammar is too large, or nothing can match it.
        """
        key = frozenset(stop_ids)
        fresh = self._fresh.get(key)
        if fresh is None:
            words = _tokenizer(self._tokenizer, stop_ids)
            fresh = self._fresh[key] = (_library().LLMatcher(words, self._source), words.vocab_size)
        return Matcher(fresh[0].deep_copy(), fresh[1], stop_ids)


class Matcher:
    """Follows one text through a grammar. Made by :meth:`Grammar.matcher`."""

    def __init__(self, matcher: Any, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._stop_ids = sorted(stop_ids)
        self._matcher = matcher
        self._words = (vocabulary + 31) // 32
        self._bits = torch.empty(self._words, dtype=torch.int32)
        self._shifts = torch.arange(32, dtype=torch.int32)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end of turn may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self, logits: Tensor) -> Tensor:
        """Logits ``[vocabulary]`` with minus infinity where a token would make the text invalid.

        Raises:
            ModelError: no token can go on with the text.
        """
        if self.finished:
            allowed = torch.zeros(len(logits), dtype=torch.bool)
        else:
            self._matcher.unsafe_compute_mask_ptr(self._bits.data_ptr(), self._bits.numel() * 4)
            self._check()
            allowed = torch.zeros(max(len(logits), 32 * self._words), dtype=torch.bool)
            allowed[: 32 * self._words] = ((self._bits[:, None] >> self._shifts) & 1).flatten().bool()
            allowed = allowed[: len(logits)]
        if self._stop_ids:
            allowed[self._stop_ids] = self.finished or bool(self._matcher.is_accepting())
        masked = logits.masked_fill(~allowed.to(logits.device), float("-inf"))
        if not masked.max().isfinite():
            raise ModelError(
                "no token can go on with the text", option="grammar", way_out="Use another grammar"
            )
        return masked

    def accept(self, token: int) -> None:
        """Take the token that was sampled."""
        if token in self._stop_ids or self.finished:
            return
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                str(self._matcher.get_error()).strip().splitlines()[0],
                option="grammar",
                way_out="Simplify the schema or grammar",
            )


def lark_json(schema: Mapping[str, Any]) -> str:
    """A schema as a part of a Lark grammar, without free white space."""
    return _json(schema, spaces=False)


def _json(schema: Any, *, spaces: bool) -> str:
    if isinstance(schema, Mapping) and not spaces:
        guidance = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        schema = {**schema, "x-guidance": guidance}
    return "%json " + json.dumps(schema)


def _parsed(schema: Mapping[str, Any] | str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", option="schema", way_out="Give a JSON schema") from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ModelError(
            "grammars need llguidance",
            option="grammar",
            way_out="Install it: pip install 'tenure[grammar]'",
        ) from error
    return llguidance


def _tokenizer(tokenizer: Any, stop_ids: Collection[int]) -> Any:
    """llguidance's view of a tokenizer; made once, as it takes a second."""
    from llguidance.hf import from_tokenizer

    key = tuple(sorted(stop_ids))
    made = _tokenizers.setdefault(tokenizer, {})
    if key not in made:
        made[key] = from_tokenizer(tokenizer, eos_token=list(key) or None)
    return made[key]
