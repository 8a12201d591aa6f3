"""LLM: a model reads the list of earlier messages and says which of them each coming step needs.

The session's own model does it in a fork, under a JSON grammar that knows only the spans and steps of the list; another
model does it behind an OpenAI-compatible endpoint, which is asked for the same JSON schema and checked afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from tenure.errors import ConfigError, MessageError
from tenure.planners.base import NOW, Context, Edge, Planner, PlannerError, Proposal
from tenure.planners.bm25 import BM25
from tenure.planners.words import words

Moment = Literal["reply", "message"]

_STEPS = 8
"""Coming steps that are listed."""


@dataclass
class LLM(Planner):
    """Asks a model for edges.

    Args:
        url: base of an OpenAI-compatible endpoint, such as ``http://localhost:8000/v1``; None asks the session's model.
        model: the endpoint's model.
        key: name of the environment variable that holds the endpoint's key.
        timeout: seconds for the endpoint.
        spans: most that are listed; of more, half are the latest and half those that share most words with the turn.
            Pinned ones are not: they stay anyway.
        words: first words of each that are shown.
        most: edges at most.
        max_tokens: of the answer.
        every: ask each so many turns.
        on: ask when a ``reply`` is requested, or with every ``message``.
    """

    url: str | None = None
    model: str = "default"
    key: str | None = None
    timeout: float = 20.0
    spans: int = 48
    words: int = 16
    most: int = 6
    max_tokens: int = 256
    every: int = 1
    on: Moment = "reply"
    name: ClassVar[str] = "llm"
    needs_archive: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    _seen: dict[str, tuple[str, str]] = field(default_factory=dict, init=False, repr=False)
    _index: BM25 = field(default_factory=BM25, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.on not in ("reply", "message"):
            raise ConfigError(
                f"{self.on!r} is not known", option="planner llm, on", way_out="Give reply or message"
            )
        for option in ("spans", "words", "most", "max_tokens", "every"):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{value!r} is too small",
                    option=f"planner llm, {option}",
                    way_out="Give a whole number from 1",
                )

    def propose(self, context: Context) -> Proposal:
        """See the class."""
        for span in context.gone:
            self._seen.pop(span, None)
            self._index.remove(span)
        for document in context.come:
            self._seen[document.id] = (str(document.span.region), self._first(document.text))
            self._index.add(document.id, words(document.text))
        asked = context.new and (self.on == "message" or context.reply)
        if not asked or context.turn % self.every:
            return Proposal(looked=False)
        listed = self._listed(context)
        if not listed:
            return Proposal(looked=False)
        steps = {step.id: step.id for step in context.plan.coming[:_STEPS]}
        word = "now"
        while word in context.plan:
            word += "!"
        steps[word] = NOW
        question, schema = self._question(context, listed, steps), self._schema(listed, list(steps))
        answer = (
            self._local(context, question, schema) if self.url is None else self._remote(question, schema)
        )
        who = context.engine.name if self.url is None else self.model
        return Proposal(_edges(answer, set(listed), steps, who)[: self.most])

    def fork(self) -> Self:
        """See the base."""
        copy = replace(self)
        copy._seen, copy._index = dict(self._seen), self._index.fork()
        return copy

    # -- asking ----------------------------------------------------------------------------------

    def _first(self, text: str) -> str:
        return " ".join(text.split(maxsplit=self.words)[: self.words])

    def _listed(self, context: Context) -> list[str]:
        fresh = {document.id for document in context.new}
        known = [
            span
            for span, (_, text) in self._seen.items()
            if text
            and span not in fresh
            and span not in context.plan.superseded
            and not _stays(context, span)
        ]
        if len(known) <= self.spans:
            return known
        terms = [term for document in context.new for term in words(document.text)]
        scores = self._index.scores(terms)
        chosen = set(known[len(known) - (self.spans + 1) // 2 :])
        for span in sorted(known, key=lambda span: -scores.get(span, 0.0)):  # ties: the older first
            if len(chosen) == self.spans:
                break
            chosen.add(span)
        return [span for span in known if span in chosen]

    def _question(self, context: Context, listed: Sequence[str], steps: Mapping[str, str]) -> str:
        lines = ["Earlier messages, by id:"]
        lines += [f"- {span} ({self._seen[span][0]}): {self._seen[span][1]}" for span in listed]
        lines.append("Steps to come:")
        turn = " / ".join(self._first(document.text) for document in context.new)
        lines += [f"- {word}: {turn}" if step == NOW else f"- {word}" for word, step in steps.items()]
        lines.append(
            "Which earlier messages must be read again for which step? Name only those that a step cannot do without."
        )
        lines.append('Answer with JSON: {"edges": [{"span": ID, "step": STEP}, ...]}')
        return "\n".join(lines)

    def _schema(self, listed: Sequence[str], steps: Sequence[str]) -> dict[str, Any]:
        edge = {
            "type": "object",
            "properties": {"span": {"enum": list(listed)}, "step": {"enum": list(steps)}},
            "required": ["span", "step"],
            "additionalProperties": False,
        }
        return {
            "type": "object",
            "properties": {"edges": {"type": "array", "items": edge, "maxItems": self.most}},
            "required": ["edges"],
            "additionalProperties": False,
        }

    def _local(self, context: Context, question: str, schema: dict[str, Any]) -> str:
        """The answer of the session's model, in a fork that is thrown away."""
        from tenure.grammar import Grammar

        grammar = Grammar.json_schema(context.engine.tokenizer, schema)
        fork = context.session.fork()
        fork.planning = None
        with fork:
            try:
                return fork.ask(question, max_tokens=self.max_tokens, grammar=grammar)
            except MessageError:
                pass  # the template takes no user message here
        config = context.session.config
        with context.engine.session(config, planner=None) as fresh:
            return fresh.ask(question, max_tokens=self.max_tokens, grammar=grammar)

    def _remote(self, question: str, schema: dict[str, Any]) -> str:
        """The answer of the endpoint."""
        try:
            import httpx
        except ImportError as error:
            raise PlannerError(
                "another model is asked through httpx",
                option="planner llm",
                way_out="Install it: pip install 'tenure[planner]'",
            ) from error
        secret = os.environ.get(self.key, "") if self.key else ""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "edges", "schema": schema, "strict": True},
            },
        }
        try:
            reply = httpx.post(
                f"{str(self.url).rstrip('/')}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {secret}"} if secret else {},
                timeout=self.timeout,
            )
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise PlannerError(
                f"no usable answer: {type(error).__name__}: {error}", option=f"planner llm, {self.url}"
            ) from error


def _stays(context: Context, span: str) -> bool:
    """Whether a span is pinned, by itself or with its region."""
    found = context.memory.ledger.spans.get(span)
    return (found.pin or context.memory.aging.table.spec(found.region).pin) is not None


def _edges(answer: str, spans: set[str], steps: Mapping[str, str], who: str) -> list[Edge]:
    """The edges of an answer. What names no span or step of the list is left out.

    Args:
        answer: JSON.
        spans: ids of the list.
        steps: words of the list for steps, and the steps.
        who: has answered.

    Raises:
        PlannerError: the answer is not the JSON that was asked for.
    """
    try:
        data = json.loads(answer)
        found = data["edges"] if isinstance(data, Mapping) else None
    except (ValueError, KeyError, RecursionError) as error:
        raise PlannerError(f"the answer is not the JSON that was asked for: {answer[:80]!r}") from error
    if not isinstance(found, list):
        raise PlannerError(f"the answer has no list of edges: {answer[:80]!r}")
    edges: dict[tuple[str, str], Edge] = {}
    for one in found:
        span, step = (one.get("span"), one.get("step")) if isinstance(one, Mapping) else (None, None)
        if isinstance(span, str) and isinstance(step, str) and span in spans and step in steps:
            edges.setdefault((span, step), Edge(span, steps[step], f"named by {who}", 1 / (1 + len(edges))))
    return list(edges.values())
