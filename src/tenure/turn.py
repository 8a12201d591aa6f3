"""One assistant turn: sampled tokens become text, and the session keeps exactly that text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from tenure.detokenize import TextStream
from tenure.interrupt import uninterrupted
from tenure.regions import Thinking
from tenure.sampling import Sampler, SamplingOptions, TokenChoice
from tenure.toolcalls import CallForm, CallStream, ToolCall

if TYPE_CHECKING:
    from tenure.session import Session
    from tenure.spans import Span

FinishReason = Literal["stop", "length", "cancel", "error"]


class Turn:
    """An assistant turn in the making. Iterate over it for pieces of text.

    The last sampled token has no KV yet; it waits in the session's backlog and is computed before anything that
    follows. A turn that is dropped half-way (an exception, Ctrl-C, a ``break``) is closed as ``cancel``: what was
    produced so far stays, and the next turn works. Where the sampling fails, the turn ends as ``error``, and other
    sessions in the same step of the engine go on.

    Args:
        session: with the generation prompt queued.
        span: of the assistant's message.
        start: tokens of the session before the first sampled one.
        options: of the sampling.
        calls: how the model writes calls of tools; None does not look for any.
        before: the newest tokens of the same message, where the turn goes on with one.
    """

    def __init__(
        self,
        session: Session,
        span: Span,
        start: int,
        options: SamplingOptions,
        calls: CallForm | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self.session = session
        self.options = options
        self.reason: FinishReason | None = None
        self.ids: list[int] = []
        self.choices: list[TokenChoice] = []
        """Log-probabilities of each id, where ``logprobs`` was asked for."""
        self.error: Exception | None = None
        self._span = span
        self._start = start
        self._stop_ids = session.stop_ids
        self._sampler = Sampler(options, self._stop_ids)
        self._stream = TextStream(
            session.engine.tokenizer, stop=options.stop or (), stop_ids=self._stop_ids, before=before
        )
        self._pieces: list[str] = []
        self._split = None if calls is None else CallStream(calls)
        self._parts: list[str | ToolCall] = []
        self._closed = False
        self._taken = 0
        self._thinking = Thinking(session.memory.last_region)

    @property
    def done(self) -> bool:
        """Whether no further token is wanted."""
        return self.reason is not None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of tools so far."""
        return [] if self._split is None else self._split.calls

    def accept(self, logits: Tensor) -> None:
        """Sample the next token from fp32 logits ``[vocabulary]``."""
        try:
            token = self._sampler(logits)
        except Exception as error:
            self.error, self.reason = error, "error"
            return
        if token in self._stop_ids:
            # Never entered: the template's own closing tokens end the turn.
            self.reason = "stop"
            return
        self.ids.append(token)
        if self._sampler.choice is not None:
            self.choices.append(self._sampler.choice)
        self.session.memory.queue([token], self._span, self._thinking.region)
        piece = self._stream.push(token)
        self._thinking.follow(piece)
        self._add(piece)
        if self._stream.stopped is not None or self._sampler.finished:
            self.reason = "stop"
        elif len(self.ids) >= self.options.max_tokens:
            self.reason = "length"
        elif self.options.one_call and self.calls:
            self.reason = "stop"

    def close(self) -> None:
        """End the turn. Safe to call twice."""
        if self._closed:
            return
        with uninterrupted():
            self._closed = True
            if self.reason is None:
                self.reason = "cancel"
            try:
                self._add(self._stream.finish())
                if self._split is not None:
                    self._parts += self._split.finish()
                if self._stream.stopped is not None:
                    kept, rest = self._stream.kept_ids()
                    self.session.rewind_turn(self._span, self._start + len(kept), rest)
            finally:
                finished = self.reason not in ("cancel", "error")
                self.session.end_turn(finished=finished, calls=self.calls if finished else ())

    def take(self) -> str:
        """The text that has come since the last call."""
        text = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return text

    def take_parts(self) -> list[str | ToolCall]:
        """Text and calls that have come since the last call of this method, in order."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        if self._split is None:
            self._parts += [text] if text else []
        else:
            self._parts += self._split.push(text)

    def check(self) -> None:
        """Raise what ended the turn, if it was an error."""
        if self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[str]:
        try:
            while not self.done:
                self.session.engine.step([self.session])
                if text := self.take():
                    yield text
        finally:
            self.close()
        if text := self.take():
            yield text
        self.check()
