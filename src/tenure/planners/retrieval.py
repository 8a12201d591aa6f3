"""Retrieval: no plan at all. At a turn boundary the new turn asks for what was evicted, and the best spans come back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self, get_args

from tenure.errors import ConfigError
from tenure.planners.base import NOW, Context, Document, Edge, Planner, Proposal, within
from tenure.planners.bm25 import BM25
from tenure.planners.corpus import document as cut
from tenure.planners.keys import KeyArchive, evidence, fused, queries, scores
from tenure.planners.words import words

Scorer = Literal["lexical", "keys", "both"]
Terms = Literal["words", "ids"]
Moment = Literal["reply", "message"]

_ASKING = 64
"""Newest tokens of the turn whose queries ask."""

Ranking = list[tuple[str, float, str]]
"""Span ids, scores and reasons, best first."""


@dataclass
class Retrieval(Planner):
    """Promotes the best whole spans for the turn, evicted or not, within an allowance.

    Args:
        scorer: ``lexical`` is BM25 over the words of the spans, ``keys`` the attention that the turn's queries would pay
            to the spans' keys (costs a forward over the turn's last tokens), ``both`` joins the two by rank.
        terms: what BM25 counts: ``words`` (identifiers whole and in parts) or token ``ids``, which need no text.
        allowance: tokens of all promoted spans; None takes a quarter of the budget.
        most: spans a turn.
        least: share of the best score below which a span is left.
        query: newest tokens of the turn that ask.
        on: ask when a ``reply`` is requested, or with every ``message``.
        distance: positions between queries and keys for ``keys``, the same for all.
    """

    scorer: Scorer = "lexical"
    terms: Terms = "words"
    allowance: int | None = None
    most: int = 8
    least: float = 0.1
    query: int = 1024
    on: Moment = "reply"
    distance: int = 64
    name: ClassVar[str] = "retrieval"
    needs_archive: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    _index: BM25 = field(default_factory=BM25, init=False, repr=False)

    def __post_init__(self) -> None:
        for option, known in (("scorer", Scorer), ("terms", Terms), ("on", Moment)):
            if getattr(self, option) not in get_args(known):
                raise ConfigError(
                    f"{getattr(self, option)!r} is not known",
                    option=f"planner retrieval, {option}",
                    way_out=f"Give one of {', '.join(get_args(known))}",
                )
        for option in ("allowance", "most", "query", "distance"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{value!r} is too small",
                    option=f"planner retrieval, {option}",
                    way_out="Give a whole number from 1",
                )

    def propose(self, context: Context) -> Proposal:
        """See the class."""
        self._follow(context)
        budget = context.budget
        if budget is None or not context.new or (self.on == "reply" and not context.reply):
            return Proposal(looked=False)
        fresh = {one.id for one in context.new}
        ranking = [one for one in self._ranking(context) if one[0] not in fresh]
        table = context.memory.ledger.spans
        whys = {span: why for span, _, why in ranking}
        ranked = [(span, score) for span, score, _ in ranking if span not in context.plan.superseded]
        taken = within(
            ranked,
            lambda span: len(table.get(span)),
            self.allowance or budget // 4,
            most=self.most,
            least=self.least,
        )
        return Proposal([Edge(span, NOW, whys[span], score) for span, score in taken])

    def fork(self) -> Self:
        """See the base."""
        copy = replace(self)
        copy._index = self._index.fork()
        return copy

    def _follow(self, context: Context) -> None:
        for span in context.gone:
            self._index.remove(span)
        for document in context.come:
            self._index.add(document.id, self._terms(document, context))

    def _terms(self, document: Document, context: Context) -> Sequence[Hashable]:
        if self.terms == "words" and document.text:
            return words(document.text)
        special = set(getattr(context.engine.tokenizer, "all_special_ids", ()))
        return [token for token in document.ids if token not in special]

    @property
    def needs_keys(self) -> bool:
        """Whether keys must be kept at hand."""
        return self.scorer != "lexical"

    def _ranking(self, context: Context) -> Ranking:
        rankings = []
        if self.scorer != "keys":
            rankings.append(self._lexical(context))
        if self.scorer != "lexical":
            rankings.append(self._by_keys(context))
        if len(rankings) == 1:
            return rankings[0]
        whys: dict[str, list[str]] = {}
        for ranking in rankings:
            for span, _, why in ranking:
                whys.setdefault(span, []).append(why)
        joined = fused(*([span for span, _, _ in ranking] for ranking in rankings))
        return [(span, score, "; ".join(whys[span])) for span, score in joined.items()]

    def _by_keys(self, context: Context) -> Ranking:
        archive, memory = context.memory.archive, context.memory
        if not isinstance(archive, KeyArchive):
            return []
        fresh = {document.id for document in context.new}
        archive.need(span.id for span in memory.ledger.spans if context.residents[span.id] < 1)
        spans = {span: one for span, one in archive.keys.items() if span not in fresh}
        sinks = min(memory.config.sinks, len(memory.ids))
        # The header of the answer asks, too: it stands behind the question.
        asked = [token for _, ids, *_ in memory.backlog for token in ids]
        asked = asked or [token for one in context.new for token in one.ids]
        asked = asked[-_ASKING:]
        if not spans or not sinks or len(asked) < 2:
            return []
        found = queries(context.engine, [*memory.ids[:sinks], *asked], len(asked))
        scored = scores(context.engine, found, spans, distance=self.distance)
        ranked = sorted(scored.items(), key=lambda item: -item[1])[: 4 * self.most]
        return [(span, score, evidence(score, len(spans))) for span, score in ranked]

    def _lexical(self, context: Context) -> Ranking:
        asked: list[Hashable] = []
        for document in newest(context.new, self.query, context):
            asked += self._terms(document, context)
        scores = self._index.scores(asked)
        ranked = sorted(scores.items(), key=lambda item: -item[1])[: 4 * self.most]
        return [
            (span, score, f"shares {', '.join(map(str, self._index.shared(span, asked)))}")
            for span, score in ranked
        ]


def newest(new: Sequence[Document], tokens: int, context: Context) -> list[Document]:
    """The last ``tokens`` tokens of the turn's messages, the first of them cut if need be."""
    kept: list[Document] = []
    for document in reversed(new):
        if tokens <= 0:
            break
        if len(document.ids) > tokens:
            ids = document.ids[-tokens:]
            document = cut(context.session, document.span, ids)
        tokens -= len(document.ids)
        kept.append(document)
    return kept[::-1]
