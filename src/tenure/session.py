"""``Session``: one agent's conversation in a fixed KV budget."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tenure import conversation, sessionstore
from tenure.cache.attend import Work
from tenure.config import SessionConfig
from tenure.errors import ConfigError, ModelError
from tenure.evictions import EvictedPage
from tenure.history import places_of, record_calls
from tenure.interrupt import uninterrupted
from tenure.memory import Memory
from tenure.pieces import marked
from tenure.pins import admit
from tenure.plan import Plan, Step
from tenure.planners import make_planning
from tenure.reads import check_reads
from tenure.references import check_plan, settle
from tenure.regions import AnyRegion, Region
from tenure.report import SessionStats, SpanReport, session_stats, span_report
from tenure.sampling import SamplingOptions, sampling_options
from tenure.spans import Pin, Span, check_span_id
from tenure.tiers.prefetch import prefetch_next
from tenure.tiers.record import Archive
from tenure.toolcalls import CallForm, ToolCall
from tenure.transcript import Message, Piece, State, Transcript
from tenure.turn import Turn

if TYPE_CHECKING:
    from pathlib import Path

    from tenure.compress.apply import Compression, Where
    from tenure.engine import Engine

MessageLike = str | Mapping[str, Any] | Message


class Session:
    """An append-only stream of messages whose cache never outgrows its budget.

    Made by :meth:`Engine.session`. Usable as a context manager: leaving it frees the slab.

    Bad input is refused before anything changes. Where a forward fails or is interrupted, the tokens that it did not
    compute stay queued and come first in the next call; ``keep_first(len(session))`` gives them up.

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
        self._closed = False

    # -- reading ---------------------------------------------------------------------------------

    def append(self, messages: MessageLike | Iterable[MessageLike]) -> list[Span]:
        """Read messages into the session.

        Args:
            messages: one message or several: a text (of the user), a mapping in OpenAI's form with Tenure's
                optional ``span``, ``region``, ``pin``, ``step`` and ``reads``, or a :class:`Message`.

        Returns:
            A span for each message.

        Raises:
            MessageError: a message is malformed, or the template refuses it; nothing has changed.
            BudgetError: hard pins do not fit; nothing has changed.
        """
        spans = self.queue(messages)
        self.engine.drain([self])
        return spans

    def queue(self, messages: MessageLike | Iterable[MessageLike], *, reply: bool = False) -> list[Span]:
        """Like :meth:`append`, but the tokens wait for the next step of the engine.

        Args:
            messages: see :meth:`append`.
            reply: put the template's generation prompt behind them.
        """
        self._idle()
        if isinstance(messages, (str, Mapping, Message)):
            messages = [messages]
        names = self._chat().regions
        parsed = [Message.parse(message, index, names) for index, message in enumerate(messages)]
        before = self._chat().snapshot()
        last = self.memory.last_id if before.turn else None
        if last is not None and last not in self.stop_ids:
            last = None  # it is one only where a rollback has cut a turn's closing in two
        transcript = self._chat().fork()
        opened = transcript.open(parsed, add_generation_prompt=reply, last_id=last)
        pieces = marked(opened, self.memory.aging.table)
        check_reads(self.memory, parsed)
        self._check(pieces)  # last: it may let an older pin give way
        if self.memory.late is not None:
            self.memory.late.begin(self)
        places = places_of(pieces, len(self.memory.ids) + self.memory.waiting, before, transcript.snapshot())
        with uninterrupted():
            spans = self._enqueue(pieces, parsed, transcript, places)
        if self.planning is not None:
            self.planning.queued(self, spans, reply=reply)
        return spans

    def sync(self, messages: Iterable[MessageLike], *, reply: bool = True) -> int:
        """Make the session's history equal a whole conversation, computing only what differs.

        For clients that send everything every time. The conversation is rendered as for a new session; the
        longest common prefix of token ids is kept, the rest is taken back and read anew. What was evicted of
        the common part stays evicted.

        Args:
            messages: the whole conversation.
            reply: put the generation prompt behind it.

        Returns:
            Tokens that were reused, the ``cached_tokens`` of the OpenAI interface.
        """
        cached = self.adopt(conversation.render(self._chat(), messages, reply=reply))
        self.engine.drain([self])
        return cached

    def adopt(self, whole: conversation.Conversation) -> int:
        """Like :meth:`sync` with a conversation that was rendered before; the tokens wait for the next step."""
        self._idle()
        if self.memory.late is not None:
            self.memory.late.begin(self)
        return conversation.adopt(self, whole)

    def _enqueue(
        self,
        pieces: list[Piece],
        parsed: list[Message],
        transcript: Transcript,
        places: list[tuple[int, State]],
    ) -> list[Span]:
        for message in parsed:
            self._follow(message)
        settle(self)
        if self.plan.current is not None and any(message.step is not None for message in parsed):
            self.memory.restore(self.plan.current.spans)
        named = {piece.span for piece in pieces}
        spans = []
        for piece in pieces:
            span = self.memory.last_span
            # A closing belongs to its message, but may not add to a hard pin, which was checked without it.
            if span is None or piece.kind != "closing" or (span.pin == "hard" and piece.pin != "hard"):
                span = self._new_span(piece.span, piece.region, piece.role, piece.pin, named)
                span.message = piece.kind in ("message", "prompt")
            for ids, region in piece.runs():
                self.memory.queue(ids, span, None if region == piece.region else region)
            if piece.kind == "message":
                spans.append(span)
        self._transcript = transcript
        self._states += places
        settle(self)
        return spans

    def append_ids(
        self,
        ids: Sequence[int],
        *,
        span: str | None = None,
        region: AnyRegion = Region.OTHER,
        pin: Pin | None = None,
    ) -> Span:
        """Read raw token ids as one span.

        Args:
            ids: token ids; an empty list changes nothing.
            span: its id; a free one if None.
            region: its role for memory.
            pin: ``hard``, ``soft`` or None.

        Raises:
            ConfigError: an id is not in the vocabulary, or an assistant's turn is open.
            BudgetError: a hard pin does not fit; nothing has changed.
        """
        new = self.queue_ids(ids, span=span, region=region, pin=pin)
        self.engine.drain([self])
        return new

    def queue_ids(
        self,
        ids: Sequence[int],
        *,
        span: str | None = None,
        region: AnyRegion = Region.OTHER,
        pin: Pin | None = None,
    ) -> Span:
        """Like :meth:`append_ids`, but the tokens wait for the next step of the engine."""
        self._idle()
        if self._transcript is not None and self._transcript.turn_open:
            raise ConfigError("an assistant turn is open", option="ids", way_out="Append a message first")
        ids = self._token_ids(ids)
        pin = "hard" if self.memory.aging.table.spec(region).pin == "hard" else pin
        new = self._new_span(span, region, None, pin)
        admit(self.memory, len(ids) if pin == "hard" else 0)
        if not ids:
            return new
        with uninterrupted():
            if self._transcript is not None:
                transcript = self._transcript.fork()
                self._enqueue(transcript.close(), [], transcript, [])  # a closing that was held back
                transcript.raw()
                self._states.append(
                    (len(self.memory.ids) + self.memory.waiting + len(ids), transcript.snapshot())
                )
            self.memory.queue(ids, new)
        return new

    @torch.inference_mode()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read raw ids and return the logits behind each of them, ``[len(ids), vocabulary]`` fp32."""
        self._idle()
        self.engine.drain([self])
        self.queue_ids(ids)
        self._collected = []
        try:
            while self.engine.step([self], every_logit=True):
                pass
            logits = torch.cat(self._collected) if self._collected else torch.empty(0, 0)
            return logits[len(logits) - len(ids) :]  # without those of a closing
        finally:
            self._collected = None

    def force(self, ids: Sequence[int]) -> None:
        """Decode given tokens one step each, as if they had been sampled: for measuring and for replays.

        Args:
            ids: token ids; they become one span of the assistant.

        Raises:
            ConfigError: an id is not in the vocabulary.
        """
        self._idle()
        ids = self._token_ids(ids)
        span = self._new_span(None, Region.ASSISTANT, "assistant", None)
        self._forcing = True
        try:
            for token in ids:
                self.memory.queue([token], span)
                self.engine.step([self])
        finally:
            self._forcing = False

    # -- answering -------------------------------------------------------------------------------

    def generate(self, **options: Any) -> Turn:
        """Start the assistant's turn; iterate over it for pieces of text.

        Args:
            options: fields of :class:`SamplingOptions`.
        """
        return self.start_turn(**options)

    def ask(self, messages: MessageLike | Iterable[MessageLike], **options: Any) -> str:
        """Read messages and return the assistant's whole turn."""
        checked = sampling_options(**options)
        self.queue(messages, reply=True)
        return self.engine.generate([self], options=checked)[0]

    def start_turn(
        self, options: SamplingOptions | None = None, *, calls: CallForm | None = None, **fields: Any
    ) -> Turn:
        """A turn that the caller advances with :meth:`Engine.step` until it is done, then closes.

        Where the last turn is still open (it ended by a limit, or the model said that it was done), this one goes
        on with it. A session of raw ids only is continued without a header.

        Args:
            options: of the sampling.
            calls: how the model writes calls of tools, where the session has tools that its template does not know.
            fields: of :class:`SamplingOptions`, in place of ``options``.
        """
        checked = options or sampling_options(**fields)
        self._idle()
        transcript = self._chat()
        raw = transcript.snapshot().last is None and self.memory.last_id is not None
        if not transcript.turn_open and not raw:
            self.queue([], reply=True)
        span = self.memory.last_span
        if span is None:
            raise ConfigError(
                "there is nothing to answer", option="session", way_out="Append a message first"
            )
        if span.role != "assistant" or span.pin is not None:
            span = self._new_span(None, Region.ASSISTANT, "assistant", None)  # the template writes no header
        if self.planning is not None:
            self.planning.requested(self)
        if not self.memory.waiting and self.logits is None:
            self.memory.retake_last()  # a rollback has left the last token without its logits
        prefetch_next(self.memory)
        self._turn = turn = Turn(
            self, span, len(self.memory.ids) + self.memory.waiting, checked, calls or transcript.call_form
        )
        try:
            if not self.memory.waiting and self.logits is not None:
                with uninterrupted():
                    turn.accept(self.logits)
                turn.check()
        except BaseException:
            turn.close()
            raise
        return turn

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a turn."""
        transcript = self._chat()
        return transcript.stop_ids if self.engine.tokenizer.chat_template else self.engine.eos_ids

    def advance(self, work: Work, logits: Tensor) -> None:
        """Take in one step of the engine. Called by :meth:`Engine.step` only.

        Args:
            work: this session's part of the forward.
            logits: of its new tokens, or of the last one, or none while more are waiting.
        """
        decoding = (self._turn is not None or self._forcing) and work.stop - work.start == 1
        self.memory.commit(work, decoding=decoding)
        if self._collected is not None:
            self._collected.append(logits)
        self.logits = logits[-1] if len(logits) else None
        if (
            self.logits is not None
            and self._turn is not None
            and not self._turn.done
            and not self.memory.waiting
        ):
            self._turn.accept(self.logits)

    def rewind_turn(self, span: Span, length: int, text: str) -> None:
        """Cut the turn's tokens to the first ``length`` of the session and add ``text``; see :class:`Turn`."""
        if length < len(self.memory.ids):
            self.memory.keep_first(length)
            self.logits = None
        elif length == len(self.memory.ids):
            self.memory.drop_backlog()
        if text:
            self.memory.queue(self._chat().encode(text), span)

    def end_turn(self, *, finished: bool = True, calls: Sequence[ToolCall] = ()) -> None:
        """The turn is over: its message is part of the history, its closing tokens come with the next message.

        Args:
            finished: whether the plan's step is done with it; a cancelled turn may be tried again.
            calls: of tools; their results come before the step is done.
        """
        self._turn = None
        if self.planning is not None:
            self.planning.ended(self, calls=bool(calls))
        if calls:
            record_calls(self, calls)
        elif self._step is not None and finished:
            self.plan.finish(self._step)
            self._step = None

    def fetch(self, span_ids: Iterable[str]) -> list[str]:
        """Bring evicted spans back from the session's tiers, whole, at new positions.

        Spans that the current plan step reads are fetched by themselves when a message begins the step.

        Args:
            span_ids: in order of importance; unknown ones and ones that no tier has are passed over.

        Returns:
            Ids of the spans that came back.
        """
        self._idle()
        return self.memory.restore(span_ids)

    # -- going back, branching -------------------------------------------------------------------

    def keep_first(self, count: int) -> None:
        """Keep the first ``count`` tokens and take back all later ones; 0 clears the session.

        Tokens that wait to be computed (the last one of an answer does) are later ones. What was evicted before stays
        evicted: a session cannot get back rows that it no longer has.

        Raises:
            ConfigError: ``count`` is not in ``0 .. tokens``; nothing has changed.
        """
        self._idle()
        with uninterrupted():
            self.memory.keep_first(count)
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
        if not isinstance(count, int) or not 0 <= count <= tokens:
            raise ConfigError(
                f"{count} is not in 0..{tokens}", option="drop_last", way_out="Give fewer tokens"
            )
        if count:
            self.keep_first(tokens - count)

    def fork(self) -> Session:
        """An independent session in the same state: own slab, own ledger, own plan.

        A turn that is being generated goes on in this session only; in the copy its text so far is history.
        """
        self._usable()
        copy = Session.__new__(Session)
        copy.__dict__.update(self.__dict__)
        copy.plan = self.plan.copy()
        copy.memory = self.memory.fork(copy.plan)
        copy.planning = None if self.planning is None else self.planning.fork()
        copy._transcript = None if self._transcript is None else self._transcript.fork()
        copy._states = list(self._states)
        copy._turn = None
        return copy

    def save(self, path: str | Path) -> int:
        """Write the whole session to a file or a tier, to go on with :meth:`Engine.restore` at any later time.

        An older one is replaced as a whole: after a crash it is the old one or the new one. The session goes on.

        Args:
            path: of the file, or ``tier:NAME`` for the last of the engine's tiers.

        Returns:
            Bytes written.

        Raises:
            SaveError: it could not be written.
            ConfigError: a turn is open.
        """
        self._idle()
        return sessionstore.save(self, path)

    def compress(self, span: Where = None, **options: Any) -> Compression:
        """Let fewer entries stand for a part of the session; see :func:`tenure.compress.apply.compress`.

        Args:
            span: a span's id, several, or a range of logical indices; None takes all up to now.
            options: ``ratio`` or ``budget``, ``method``, ``question`` and others of that function.
        """
        from tenure.compress.apply import compress

        self._idle()
        self.engine.drain([self])
        return compress(self, span, **options)

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

    def check_plan(self, *, pending_ok: bool = True) -> None:
        """Raise PlanError where the plan names spans that the session does not have; see ``references.check_plan``."""
        check_plan(self, pending_ok=pending_ok)

    def evictions(self) -> list[EvictedPage]:
        """The newest evicted pages with region, score, age and reason, oldest first."""
        return self.memory.evictions.pages(self.memory)

    def stats(self) -> SessionStats:
        """Counters; see :class:`SessionStats`."""
        stats = session_stats(self.memory, self.engine.layout.token_bytes)
        return stats if self.planning is None else replace(stats, planner=self.planning.to_json())

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
                "a turn is still being generated", option="session", way_out="Finish or close the turn first"
            )

    def _token_ids(self, ids: Sequence[int]) -> list[int]:
        """The ids as plain integers; ConfigError if one is not in the vocabulary."""
        vocabulary = self.engine.vocabulary
        try:
            ids = [operator.index(token) for token in ids]
        except TypeError as error:
            raise ConfigError(str(error), option="ids", way_out="Give whole numbers") from error
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ConfigError(f"token ids must be in 0..{vocabulary - 1}", option="ids")
        return ids

    def _chat(self) -> Transcript:
        if self._transcript is None:
            raise ModelError(
                "the engine has no tokenizer with a chat template",
                option=f"model {self.engine.name}",
                way_out="Use append_ids and feed, or give the engine a tokenizer",
            )
        return self._transcript

    def _check(self, pieces: Iterable[Piece], *, upto: int | None = None) -> None:
        """Refuse new span ids that are taken and pins that do not fit, given the first ``upto`` tokens."""
        edge = len(self.memory.ids) if upto is None else upto
        taken = {span.id for span in self.memory.ledger.spans if span.start < edge}
        if upto is None:
            taken |= self.memory.waiting_spans
        pinned = 0
        for piece in pieces:
            pinned += len(piece.ids) if piece.pin == "hard" else 0
            if piece.kind == "message" and piece.span is not None:
                check_span_id(piece.span, taken)
                taken.add(piece.span)
        admit(self.memory, pinned, upto)

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

    def _follow(self, message: Message) -> None:
        """Move the plan along with a message that belongs to a step."""
        if message.step is None:
            return
        if message.step not in self.plan:
            self.plan.add(Step(message.step, message.reads))
        elif message.reads:
            self.plan.add_reads(message.step, message.reads)
        current = self.plan.current
        if current is not None and current.id == self._step and current.id != message.step:
            self.plan.finish(current.id)
        self.plan.begin(message.step)
        self._step = message.step
