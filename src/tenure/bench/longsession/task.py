"""One session of the experiment: definitions, filler, probes, and the plan that names what each probe reads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tenure.bench.longsession.checks import Checks, fee_checks, module_checks, settle_checks
from tenure.bench.longsession.facts import ERRORS, FEES, RECORD, Facts, definitions
from tenure.bench.longsession.filler import read_filler, turns
from tenure.errors import ConfigError
from tenure.messages import Message
from tenure.plan import Plan, Step
from tenure.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VERSION = 4
"""Of wording, tests and filler; results of different versions are never put together."""

SYSTEM = (
    "You are a coding assistant in a long session. You write Python with the exact names, numbers and codes "
    "that the project's definitions give."
)
TURN = 2000
"""Tokens of a turn of filler."""


@dataclass(frozen=True)
class Probe:
    """A late task.

    Args:
        name: ``fee_for``, ``settle`` or ``module``; also the step of the plan.
        question: the user's message.
        reads: spans that the answer needs.
        facts: names of the facts that a right answer holds.
        checks: hidden tests.
        max_tokens: of the answer.
    """

    name: str
    question: str
    reads: tuple[str, ...]
    facts: tuple[str, ...]
    checks: Checks
    max_tokens: int

    @property
    def message(self) -> Message:
        """The question as a chat message."""
        return Message("user", self.question, step=self.name)


@dataclass(frozen=True)
class Task:
    """A session to be played.

    Args:
        seed: everything is drawn from it.
        facts: what the definitions say.
        turns: messages, turn by turn; each turn lies within one step of the plan.
        probes: asked behind the last turn.
        tokens: before the probes, in the model's own rendering.
        distance: tokens between the last definition and the probes.
        sizes: tokens of each span that has a name.
    """

    seed: int
    facts: Facts
    turns: tuple[tuple[Message, ...], ...]
    probes: tuple[Probe, ...]
    tokens: int
    distance: int
    sizes: dict[str, int]

    @property
    def fillers(self) -> tuple[str, ...]:
        """Spans that nobody needs: those of the filler."""
        return tuple(
            message.span for turn in self.turns for message in turn if message.role == "tool" and message.span
        )

    def first(self, step: str) -> int:
        """Number of the first turn of a step."""
        return next(number for number, turn in enumerate(self.turns) if any(m.step == step for m in turn))

    def plan(self) -> Plan:
        """The plan of the session, right and complete: steps in order and what each reads."""
        steps: dict[str, Step] = {}
        for turn in self.turns:
            for message in turn:
                if message.step is not None:
                    steps.setdefault(message.step, Step(message.step))
        return Plan([*steps.values(), *(Step(probe.name, probe.reads) for probe in self.probes)])

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Texts of facts."""
        return [getattr(self.facts, name) for name in names]


def build(tokenizer: Any, *, tokens: int, distance: int | None = None, seed: int = 0) -> Task:
    """Make a session.

    Args:
        tokenizer: of the model; decides how much filler fits.
        tokens: length before the probes, met to within two lines of source.
        distance: tokens between the last definition and the probes; None puts the definitions first.
        seed: of facts and filler. One seed gives one session on one version of Python, and the same facts at any
            length.

    Raises:
        ConfigError: lengths that cannot be met.
    """
    facts = Facts.draw(random.Random(f"facts {seed}"))
    rng = random.Random(f"filler {seed}")
    transcript = Transcript(tokenizer)
    system = Message("system", SYSTEM)
    defined = definitions(facts)
    defining = [_define(span, text) for span, text in defined.items()]
    fixed = _count(transcript.fork(), [system, *(message for turn in defining for message in turn)])
    room = tokens - fixed
    late = room if distance is None else distance
    if not 0 < late <= room:
        raise ConfigError(
            f"a distance of {late:,} tokens does not fit {tokens:,}, of which {fixed:,} are definitions",
            option="distance" if distance is not None else "tokens",
            way_out=f"Give a distance of at most {room:,}"
            if room > 0
            else f"Give more than {fixed:,} tokens",
        )
    # Both stretches come from one stream, so that nothing occurs twice.
    source = turns(tokenizer, rng, TURN)
    transcript.open([system])
    early = _steps(read_filler(transcript, source, room - late), "prepare")
    transcript.open([message for turn in defining for message in turn])
    behind = _steps(read_filler(transcript, source, late), "survey")
    played = [*early, *defining, *behind]
    played[0] = [system, *played[0]]  # some templates refuse a system message that stands alone
    pieces = Transcript(tokenizer).open([message for turn in played for message in turn])
    sizes = {span: len(piece.ids) for piece in pieces if (span := piece.span)}
    return Task(
        seed=seed,
        facts=facts,
        turns=tuple(map(tuple, played)),
        probes=probes(facts),
        tokens=sum(len(piece.ids) for piece in pieces),
        distance=late,
        sizes=sizes,
    )


def _define(span: str, text: str) -> list[Message]:
    return [
        Message("user", text, span=span, step=span.replace("def", "define", 1)),
        Message("assistant", "Understood, I will keep this definition in mind."),
    ]


def _steps(filler: list[list[Message]], step: str) -> list[list[Message]]:
    """Put turns of filler into a step, and name their spans."""
    named = []
    for number, turn in enumerate(filler, 1):
        first, *rest = turn
        named.append(
            [replace(first, step=step)]
            + [
                replace(message, span=f"{step}-{number}-{place // 2 + 1}")
                if message.role == "tool"
                else message
                for place, message in enumerate(rest)
            ]
        )
    return named


def _count(transcript: Transcript, messages: Sequence[Message]) -> int:
    return sum(len(piece.ids) for piece in transcript.open(messages))


def probes(facts: Facts) -> tuple[Probe, ...]:
    """The three late tasks. They name nothing that the definitions fix."""
    answer = "Answer with one Python code block and nothing else."
    made: list[tuple[str, str, tuple[str, ...], tuple[str, ...], Callable[[Facts], Checks], int]] = [
        (
            "fee_for",
            "Definition 2 of 3 gave the fees. Write the project's two fee constants and the function "
            f"fee_for(amount), exactly as defined. {answer}",
            ("def-fees",),
            FEES,
            fee_checks,
            200,
        ),
        (
            "settle",
            "Definition 3 of 3 gave the exception and settling. Write the function settle(record), exactly as defined, "
            "with the project's names, statuses, exception and error code, and with what it returns. The class of the "
            f"records, the exception and fee_for exist already. {answer}",
            ("def-errors",),
            ("amount", "mark", "initial", "settled", "refused", *ERRORS),
            settle_checks,
            200,
        ),
        (
            "module",
            "Write out all the code of the project for a new file, exactly as defined: Definition 1 of 3, the records. "
            "Definition 2 of 3, the fees. Definition 3 of 3, the exception and settling. Give each its own Python code "
            "block under its title, and nothing else.",
            ("def-record", "def-fees", "def-errors"),
            (*RECORD, *FEES, *ERRORS),
            module_checks,
            400,
        ),
    ]
    return tuple(Probe(n, q, reads, names, make(facts), most) for n, q, reads, names, make, most in made)
