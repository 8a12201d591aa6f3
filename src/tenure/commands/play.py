"""Plays a session file: messages are read, probes are asked and scored."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tenure.bench.demo_session import facts_found
from tenure.errors import MessageError, SessionFileError
from tenure.messages import Message
from tenure.sampling import SamplingOptions
from tenure.sessionfile import Probe, SessionFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tenure.config import SessionConfig
    from tenure.engine import Engine
    from tenure.session import Session
    from tenure.turn import Turn

MAX_TOKENS = 256
"""Length of an answer where neither the caller nor the probe says one."""


@dataclass(frozen=True)
class Answer:
    """What a session said to a probe.

    Args:
        probe: the question.
        text: the answer, possibly cut short.
        found: for each expected text whether the answer holds it.
        residency: resident share of the spans that the probe reads, when the answer began; None without any.
        rotary_gap: mean distance from the answer's first token to what is left of these spans.
        tokens: length of the answer.
        reason: why it ended: ``stop``, ``length`` or ``cancel``.
    """

    probe: Probe
    text: str
    found: tuple[bool, ...]
    residency: float | None
    rotary_gap: float | None
    tokens: int
    reason: str

    @property
    def facts(self) -> tuple[list[str], list[str]]:
        """The expected texts that are there, and those that are lost."""
        pairs = list(zip(self.probe.expect, self.found, strict=True))
        return [fact for fact, found in pairs if found], [fact for fact, found in pairs if not found]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "probe": self.probe.question,
            "answer": self.text,
            "expect": list(self.probe.expect),
            "found": self.facts[0],
            "residency": self.residency,
            "rotary_gap": self.rotary_gap,
            "tokens": self.tokens,
        }


class Player:
    """One session file on one session.

    The plan of the file is known from the start, as an agent's plan is. Messages are read in full chunks, up
    to a change of step or a probe. A probe is asked in a fork, where its step begins; in the session itself
    its step only becomes finished, so that a probe changes nothing but what is still to be read.

    Args:
        engine: the model.
        file: what to play.
        config: of the session.
        sampling: of the answers; ``max_tokens`` is replaced by the probe's own where it has one.
        max_tokens: of all answers, whatever the file says.
        tick: called after each step of the engine.
        session: one that goes on; the steps of the file that its plan has not come behind the plan. A new one if None.
        ask: called with a probe before it is asked.
        piece: called with each piece of an answer.
    """

    def __init__(
        self,
        engine: Engine,
        file: SessionFile,
        config: SessionConfig,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int | None = None,
        session: Session | None = None,
        tick: Callable[[], None] = lambda: None,
        ask: Callable[[Probe], None] = lambda probe: None,
        piece: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.engine = engine
        self.file = file
        self.session: Session = (
            engine.session(replace(config, regions={**file.regions, **config.regions}), plan=file.plan())
            if session is None
            else with_steps(session, file)
        )
        self.answers: list[Answer] = []
        self.asking: Probe | None = None
        self.turn: Turn | None = None
        self.computed = 0
        """Tokens computed so far, questions and answers in forks included."""
        self.started = perf_counter()
        self._sampling = sampling or SamplingOptions()
        self._max_tokens = max_tokens
        self._tick = tick
        self._on_ask = ask
        self._piece = piece
        self._done = 0
        self._reading = (0, 0)

    @property
    def progress(self) -> float:
        """Entries of the file that are done; a fraction while messages are being read."""
        messages, tokens = self._reading
        left = messages * self.session.memory.waiting / tokens if tokens else 0.0
        return max(0.0, self._done - left)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return perf_counter() - self.started

    def play(self, *, upto: str | None = None, ask: bool = True) -> Iterator[Answer]:
        """Read and ask everything in order; yields each answer when it is done.

        Args:
            upto: stop before the first entry of this step.
            ask: False passes over probes that leave nothing in the session, as if they had been answered.

        Raises:
            SessionFileError: the model's template refuses a message of the file.
        """
        for entry in self._entries_before(upto):
            if isinstance(entry, Probe):
                if ask or entry.keep:
                    yield self._ask(entry)
                else:
                    self.session.plan.finish(entry.step)
                self._done += 1
            else:
                self._queue(entry)
                self._advance(self.session)

    def _entries_before(self, upto: str | None) -> Iterator[list[Message] | Probe]:
        """Probes, and between them messages in groups."""
        messages: list[Message] = []
        for entry in self.file:
            if upto is not None and entry.step == upto:
                break
            if isinstance(entry, Message):
                messages.append(entry)
            else:
                yield from by_step(messages)
                messages = []
                yield entry
        yield from by_step(messages)

    def _queue(self, messages: list[Message]) -> None:
        with self._placed():
            self.session.queue(messages)
        self._done += len(messages)
        self._reading = (len(messages), self.session.memory.waiting)

    def _advance(self, session: Session) -> None:
        while session.memory.waiting:
            self.computed += self.engine.step([session])
            self._tick()

    def _ask(self, probe: Probe) -> Answer:
        self.asking = probe
        self._on_ask(probe)
        session = self.session if probe.keep else self.session.fork()
        with self._placed():
            session.queue(probe.message, reply=True)
        self._advance(session)
        residency, gap = read_state(session, probe.reads)
        limit = self._max_tokens or probe.max_tokens or MAX_TOKENS
        self.turn = turn = session.start_turn(replace(self._sampling, max_tokens=limit))
        told = 0
        try:
            while not turn.done:
                told = self._tell(turn, told)
                self.computed += self.engine.step([session])
                self._tick()
        finally:
            turn.close()
            self._tell(turn, told)
            found = tuple(facts_found(turn.text, probe.expect))
            answer = Answer(probe, turn.text.strip(), found, residency, gap, len(turn.ids), str(turn.reason))
            self.answers.append(answer)
            self.asking = self.turn = None
        self.session.plan.finish(probe.step)
        return answer

    def _tell(self, turn: Turn, told: int) -> int:
        text = turn.text
        if len(text) > told:
            self._piece(text[told:])
        return len(text)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Errors of a message name its place in the file."""
        try:
            yield
        except MessageError as error:
            number = self._done + (error.index or 0) + 1
            raise SessionFileError(
                error.cause, path=f"{self.file.path or 'session'}, entry {number}", way_out=error.way_out
            ) from error


def with_steps(session: Session, file: SessionFile) -> Session:
    """Bring a file's steps into the plan of a session that goes on; a step that it has reads what the file says."""
    for step in file.plan().steps:
        if step.id not in session.plan:
            session.plan.add(step)
        elif step.reads:
            session.plan.set_reads(step.id, step.reads)
    return session


def by_step(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Cut messages at each change of step, so that the plan holds for all that is read in one go.

    Messages before the first step go with it: some templates refuse a system message that stands alone.
    """
    group: list[Message] = []
    step = None
    for message in messages:
        if group and message.step is not None and step not in (None, message.step):
            yield group
            group = []
        step = message.step or step
        group.append(message)
    if group:
        yield group


def read_state(session: Session, spans: Sequence[str]) -> tuple[float | None, float | None]:
    """Mean resident share of spans, and mean distance from the next token to what is resident of them."""
    ledger = session.memory.ledger
    known = [ledger.spans.get(span) for span in spans if span in ledger.spans]
    gaps = [gap for span in known if (gap := ledger.rotary_gap(span)) is not None]
    return (
        sum(map(ledger.resident, known)) / len(known) if known else None,
        sum(gaps) / len(gaps) if gaps else None,
    )
