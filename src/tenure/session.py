"""``Session``: one agent's conversation in a fixed KV budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure import conversation, sessionstore
from tenure.cache.attend import Work
from tenure.errors import ConfigError
from tenure.history import places_of, record_calls
from tenure.interrupt import uninterrupted
from tenure.pieces import marked
from tenure.pins import admit, give_way, giving_way
from tenure.plan import Step
from tenure.reads import check_reads
from tenure.references import check_plan, settle
from tenure.regions import AnyRegion, Region
from tenure.sampling import SamplingOptions, sampling_options
from tenure.sessionbase import SessionBase
from tenure.spans import Pin, Span, check_span_id
from tenure.tiers.prefetch import prefetch_next
from tenure.toolcalls import CallForm, ToolCall
from tenure.transcript import Message, Piece, State, Transcript
from tenure.turn import Turn

if TYPE_CHECKING:
    from pathlib import Path

    from tenure.compress.apply import Compression
    from tenure.compress.choose import Where

MessageLike = str | Mapping[str, Any] | Message

_BEFORE = 8
"""Newest tokens of an open message that the text of a turn goes on from: a word, or a character that was cut."""


class Session(SessionBase):
    """An append-only stream of messages whose cache never outgrows its budget.

    Made by :meth:`Engine.session`. Usable as a context manager: leaving it frees the slab.

    Bad input is refused before anything changes. Where a forward fails or is interrupted, the tokens that it did not
    compute stay queued and come first in the next call; ``keep_first(len(session))`` gives them up.

    Its arguments are those of :class:`SessionBase`.
    """

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
            BudgetError: hard pins, or what the step that begins reads, do not fit; nothing has changed, except that where
                only the compressed turns leave too little room these are compressed by then.
        """
        spans = self.queue(messages)
        self.engine.drain([self])
        return spans

    def queue(
        self, messages: MessageLike | Iterable[MessageLike], *, reply: bool = False, beginning: str = ""
    ) -> list[Span]:
        """Like :meth:`append`, but the tokens wait for the next step of the engine.

        Args:
            messages: see :meth:`append`.
            reply: put the template's generation prompt behind them.
            beginning: of the reply, in given words; the turn's own text comes behind it.

        Raises:
            MessageError, BudgetError: see :meth:`append`.
        """
        if beginning and not reply:
            raise ConfigError("only a reply has a beginning", option="beginning", way_out="Give reply=True")
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
        if parsed and self.memory.late is not None:
            self._refuse(pieces)  # what is refused compresses nothing
            self._begin()
        self._check(pieces)  # last: it may let an older pin give way
        places = places_of(pieces, len(self.memory.ids) + self.memory.waiting, before, transcript.snapshot())
        with uninterrupted():
            spans = self._enqueue(pieces, transcript, places)
            if beginning and (span := self.memory.last_span) is not None:
                self.memory.queue(transcript.encode(beginning), span)
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
        return conversation.adopt(self, whole)

    def _begin(self, kept: int | None = None) -> None:
        """Late compression where the last turn was answered; its room counts in all checks that follow.

        Args:
            kept: tokens after which the history is about to be cut; None keeps all.
        """
        late, spans = self.memory.late, self.memory.ledger.spans
        if late is None:
            return
        if kept is None:
            last, answered = self.memory.last_span, self._chat().turn_open
        else:
            last, answered = spans[spans.index_at(kept - 1)] if kept else None, False
        if answered or (last is not None and last.role == "assistant"):
            late.begin(self, kept)

    def _enqueue(
        self,
        pieces: list[Piece],
        transcript: Transcript,
        places: list[tuple[int, State]],
        reserved: Iterable[str] = (),
    ) -> list[Span]:
        for piece in pieces:
            self._follow(piece)
        settle(self)
        if any(piece.step is not None for piece in pieces):
            self.memory.restore(self.plan.current_reads)
        named = {*reserved, *(piece.span for piece in pieces)}
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
        ids = self.checked_ids(ids)
        pin = "hard" if self.memory.aging.table.spec(region).pin == "hard" else pin
        new = self._new_span(span, region, None, pin)
        admit(self.memory, len(ids) if pin == "hard" else 0)
        if not ids:
            return new
        with uninterrupted():
            if self._transcript is not None:
                transcript = self._transcript.fork()
                self._enqueue(transcript.close(), transcript, [], [new.id])  # a closing that was held back
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

        What waits is read first.

        Args:
            ids: token ids; they become one span of the assistant.

        Raises:
            ConfigError: an id is not in the vocabulary.
        """
        self._idle()
        ids = self.checked_ids(ids)
        self.engine.drain([self])
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
        """Read messages and return the assistant's whole turn.

        Args:
            messages: see :meth:`append`, and for what is refused.
            options: fields of :class:`SamplingOptions`.
        """
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
        behind, state = self._states[-1]  # behind the header of an open turn
        start = len(self.memory.ids) + self.memory.waiting
        before = self.memory.newest(behind if state.turn else 0, _BEFORE) if raw or state.turn else ()
        self._turn = turn = Turn(self, span, start, checked, calls or transcript.call_form, before)
        try:
            if not self.memory.waiting and self.logits is not None:
                with uninterrupted():
                    turn.accept(self.logits)
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
        # The rest of a prompt that is one token long is read, not decoded.
        decoding = self._forcing or (self._turn is not None and bool(self._turn.ids))
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
            region = self.memory.last_region if self.memory.last_span is span else None
            self.memory.queue(self._chat().encode(text), span, region)

    def end_turn(self, *, finished: bool = True, calls: Sequence[ToolCall] = ()) -> None:
        """The turn is over: its message is part of the history, its closing tokens come with the next message.

        Args:
            finished: whether the plan's step is done with it; a cancelled turn may be tried again.
            calls: of tools; their results come before the step is done.
        """
        self._turn, step = None, self._step
        if self.planning is not None:
            self.planning.ended(self, calls=bool(calls))
        if calls:
            record_calls(self, calls)
        elif finished:
            self._step = None
            if step is not None and step in self.plan:  # it may have been taken out in the meantime
                self.plan.finish(step)

    # -- as a whole ------------------------------------------------------------------------------

    def save(self, path: str | Path) -> int:
        """Write the whole session to a file or a tier, to go on with :meth:`Engine.restore` at any later time.

        An older one is replaced as a whole: after a crash it is the old one or the new one. The session goes on.

        Args:
            path: of the file, or ``tier:NAME`` for the last of the engine's tiers that outlives it.

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

    def check_plan(self, *, pending_ok: bool = True) -> None:
        """Raise PlanError where the plan names spans that the session does not have; see ``references.check_plan``."""
        check_plan(self, pending_ok=pending_ok)

    # -- inside ----------------------------------------------------------------------------------

    def _check(self, pieces: Sequence[Piece], *, upto: int | None = None) -> None:
        """Refuse what :meth:`_refuse` does, and let the pins give way that must."""
        give_way(self.memory, self._refuse(pieces, upto=upto))

    def _refuse(self, pieces: Sequence[Piece], *, upto: int | None = None) -> list[Span]:
        """Refuse new span ids that are taken, reads and pins that do not fit, given the first ``upto`` tokens.

        Returns:
            Spans whose pins must give way.
        """
        self._check_names(pieces, upto)
        pinned = sum(len(piece.ids) for piece in pieces if piece.pin == "hard")
        yielding = giving_way(self.memory, pinned, upto)
        check_reads(self, pieces, upto, yielding)
        return yielding

    def _check_names(self, pieces: Sequence[Piece], upto: int | None = None) -> None:
        """Refuse new span ids that are taken among the first ``upto`` tokens."""
        edge = len(self.memory.ids) if upto is None else upto
        taken = {span.id for span in self.memory.ledger.spans if span.start < edge}
        if upto is None:
            taken |= self.memory.waiting_spans
        for piece in pieces:
            if piece.kind == "message" and piece.span is not None:
                check_span_id(piece.span, taken)
                taken.add(piece.span)

    def _follow(self, piece: Piece) -> None:
        """Move the plan along with a message that belongs to a step."""
        if piece.step is None:
            return
        if piece.step not in self.plan:
            self.plan.add(Step(piece.step, piece.reads))
        elif piece.reads:
            self.plan.add_reads(piece.step, piece.reads)
        current = self.plan.current
        if current is not None and current.id == self._step and current.id != piece.step:
            self.plan.finish(current.id)
        self.plan.begin(piece.step)
        self._step = piece.step
