"""``SessionBase``: a session below messages and turns: its state, going back in it, what it says of itself."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from tenure.config import SessionConfig
from tenure.errors import ConfigError, ModelError
from tenure.evictions import EvictedPage
from tenure.interrupt import uninterrupted
from tenure.memory import Memory, checked_count
from tenure.plan import Plan
from tenure.planners import make_planning
from tenure.references import Texts, reopen, settle
from tenure.regions import AnyRegion
from tenure.report import SessionStats, SpanReport, session_stats, span_report
from tenure.spans import Pin, Span, check_span_id
from tenure.tiers.record import Archive
from tenure.transcript import State, Transcript

if TYPE_CHECKING:
    from array import array

    from tenure.engine import Engine
    from tenure.turn import Turn


class SessionBase:
    """The state of a session, without the reading of messages and the writing of turns.

    Args:
        engine: the model.
        config: checked options.
        plan: steps and what they read; change it through the session's methods or directly.
        transcript: renders its messages; None for raw ids only.
        archive: where evicted spans can be fetched from again; None loses them.
    """

    def __init__(
        self,
        engine: Engine,
        config: SessionConfig,
        plan: Plan,
        transcript: Transcript | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.plan = plan
        self.planning = (
            None if config.planner is None else make_planning(config.planner, config.planner_options)
        )
        if self.planning is not None:
            archive = self.planning.archive(engine, config, archive)
        self.memory = Memory(config, engine.device, plan, archive)
        self.logits: Tensor | None = None
        """Logits ``[vocabulary]`` behind the last token, fp32; None where they were not computed."""
        self._collected: list[Tensor] | None = None
        self._transcript = transcript
        if transcript is not None:
            transcript.regions = self.memory.aging.table.names
        self._turn: Turn | None = None
        self._states: list[tuple[int, State]] = [(0, State())]
        self._forcing = False
        self._unnamed = 0
        self._step: str | None = None
        self._texts = Texts()
        self._closed = False

    # -- going back, branching, coming back ------------------------------------------------------

    def keep_first(self, count: int) -> None:
        """Keep the first ``count`` tokens and take back all later ones; 0 clears the session.

        Tokens that wait to be computed (the last one of an answer does) are later ones. What was evicted before stays
        evicted: a session cannot get back rows that it no longer has.

        Raises:
            ConfigError: ``count`` is not in ``0 .. tokens``; nothing has changed.
        """
        self._idle()
        with uninterrupted():
            count = self.memory.keep_first(count)
            reopen(self.plan, self.memory, count)
            settle(self)
            self.logits = None
            while self._states[-1][0] > count:
                self._states.pop()
            length, state = self._states[-1]
            if self._transcript is not None:
                self._transcript = self._transcript.fork()
                self._transcript.restore(state)
                if count > length and not self._transcript.turn_open:
                    self._transcript.raw()  # the start of a message that was cut is no message

    def drop_last(self, count: int) -> None:
        """Take back the last ``count`` tokens; 0 changes nothing.

        Raises:
            ConfigError: ``count`` is not in ``0 .. tokens``; nothing has changed.
        """
        self._idle()
        tokens = len(self.memory.ids)
        count = checked_count(count, tokens, "drop_last", "Give fewer tokens")
        if count:
            self.keep_first(tokens - count)

    def fork(self) -> Self:
        """An independent session in the same state: own slab, own ledger, own plan.

        A turn that is being generated goes on in this session only; in the copy its text so far is history.
        """
        self._usable()
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.plan = self.plan.copy()
        copy.memory = self.memory.fork(copy.plan)
        copy.planning = None if self.planning is None else self.planning.fork()
        copy._transcript = None if self._transcript is None else self._transcript.fork()
        copy._states = list(self._states)
        copy._texts = self._texts.copy()
        copy._turn = None
        return copy

    def fetch(self, span_ids: Iterable[str]) -> list[str]:
        """Bring evicted spans back from the session's tiers, whole, at new positions.

        Spans that the current plan step reads are fetched by themselves when a message begins the step.

        Args:
            span_ids: in order of importance; unknown ones and ones that no tier has are passed over.

        Returns:
            Ids of the spans that came back.

        Raises:
            ConfigError: it is one text, or no list.
        """
        self._idle()
        if isinstance(span_ids, str) or not isinstance(span_ids, Iterable):
            raise ConfigError(
                f"{span_ids!r} is no list of ids",
                option="span_ids",
                way_out="Give ['span', ...], even for one",
            )
        return self.memory.restore(span_ids)

    # -- asking about itself ---------------------------------------------------------------------

    def explain(self, span_id: str) -> SpanReport:
        """Where a span is and why.

        Raises:
            UnknownSpanError: no such span.
        """
        report = span_report(self.memory, span_id, lambda a, b: self.text_of(self.memory.ids[a:b]))
        return report if self.planning is None else replace(report, edges=self.planning.edges_of(span_id))

    def text_of(self, ids: Iterable[int]) -> str:
        """Token ids as text; empty without a tokenizer."""
        tokenizer = self.engine.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(list(ids)))

    def searchable(self, spans: Iterable[tuple[Span, array[int]]]) -> list[tuple[str, str]]:
        """Ids and texts of spans of this session that quotes are looked for in."""
        return self._texts.of(spans, self.text_of)

    def evictions(self) -> list[EvictedPage]:
        """The newest evicted pages with region, score, age and reason, oldest first."""
        return self.memory.evictions.pages(self.memory)

    def stats(self) -> SessionStats:
        """Counters; see :class:`SessionStats`."""
        stats = session_stats(self.memory, self.engine.layout.token_bytes)
        return stats if self.planning is None else replace(stats, planner=self.planning.to_json())

    @property
    def turn(self) -> Turn | None:
        """The turn that is being generated."""
        return self._turn

    def close(self) -> None:
        """End an open turn and free the slab. The ledger still answers; anything else is refused."""
        if self._turn is not None:
            self._turn.close()
        self._closed = True
        self.memory.free()

    def check_integrity(self) -> None:
        """Raise IntegrityError if cache, ledger and token list disagree."""
        self.memory.check_integrity()

    def __len__(self) -> int:
        return len(self.memory.ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._closed:
            raise ConfigError(
                "the session is closed", option="session", way_out="Open a new one, or fork before"
            )

    def _idle(self) -> None:
        self._usable()
        if self._turn is not None:
            raise ConfigError(
                "a turn is still being generated",
                option="session",
                way_out="Finish it first, or close it: session.turn.close()",
            )

    def checked_ids(self, ids: Sequence[int], option: str = "ids") -> list[int]:
        """The ids as plain integers.

        Raises:
            ConfigError: one is not in the vocabulary; names the option.
        """
        vocabulary = self.engine.vocabulary
        try:
            ids = [operator.index(token) for token in ids]
        except TypeError as error:
            raise ConfigError(str(error), option=option, way_out="Give whole numbers") from error
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ConfigError(f"token ids must be in 0..{vocabulary - 1}", option=option)
        return ids

    def _chat(self) -> Transcript:
        if self._transcript is None:
            raise ModelError(
                "the engine has no tokenizer with a chat template",
                option=f"model {self.engine.name}",
                way_out="Use append_ids and feed, or give the engine a tokenizer",
            )
        return self._transcript

    def _new_span(
        self,
        name: str | None,
        region: AnyRegion,
        role: str | None,
        pin: Pin | None,
        reserved: Container[str | None] = (),
    ) -> Span:
        table, waiting = self.memory.ledger.spans, self.memory.waiting_spans
        if name is not None:
            check_span_id(name, table)
            check_span_id(name, waiting)
        while name is None:
            self._unnamed += 1
            name = f"{role or 'ids'}-{self._unnamed}"
            if name in table or name in waiting or name in reserved:
                name = None
        return Span(name, 0, 0, region, role, pin)
