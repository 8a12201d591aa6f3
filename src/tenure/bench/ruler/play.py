"""One prompt under many methods and ratios: read once, then forked, compressed and asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.bench.ruler.tasks import Prompt, encode, prose
from tenure.compress import make_compressor
from tenure.compress.apply import look
from tenure.compress.base import Context, Scorer
from tenure.compress.gracekv.method import Evidence, GraceKV
from tenure.errors import ConfigError
from tenure.timing import now

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.session import Session

RATIOS = (1.33, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
MODES = ("agnostic", "aware")
_TOGETHER = 2 << 30
"""Bytes of keys and values of the sessions that are asked at once."""
CONTINUATION = 256
"""Tokens of real text that a continuation is compared over."""


@dataclass(frozen=True)
class Variant:
    """A method with options under a name, such as ``gracekv`` or ``gracekv:floor=0``."""

    name: str
    method: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From ``method`` or ``method:option=value,option=value``; values are JSON, or text."""
        import json

        method, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for pair in filter(None, rest.split(",")):
            key, _, value = pair.partition("=")
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                options[key] = value
        make_compressor(method, options)
        return cls(text, method, options)


@dataclass(frozen=True)
class Reading:
    """A context that was read."""

    session: Session
    seconds: float
    question: list[int]


def read(engine: Engine, before: Sequence[int], question: Sequence[int]) -> Reading:
    """Read a context into a session without a budget."""
    session, device = engine.session(policy="full", chunk=2048), engine.layout.device
    started = now(device)
    session.append_ids(before)
    return Reading(session, now(device) - started, list(question))


@dataclass(frozen=True)
class Build:
    """What a compression took.

    Args:
        seconds: in all.
        stages: seconds of each stage, for methods that tell.
    """

    seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A cell's part of it."""
        return {"build_s": self.seconds, **({"stages": dict(self.stages)} if self.stages else {})}


class Grid:
    """All compressions of one reading, with what a method has found out once used for every ratio.

    Args:
        reading: the context.
        mode: ``aware`` compressors know the question.
    """

    def __init__(self, reading: Reading, mode: str) -> None:
        self._reading = reading
        self._question = reading.question if mode == "aware" else None
        self._scored: dict[str, tuple[Scorer, float]] = {}
        self._known: dict[tuple[str, bytes], tuple[Evidence, dict[str, float]]] = {}

    def compressed(self, variant: Variant, ratio: float) -> tuple[Session, Build]:
        """A fork, compressed, and what this would take alone."""
        fork = self._reading.session.fork()
        method = make_compressor(variant.method, variant.options)
        if isinstance(method, GraceKV):
            return self._graced(fork, method, variant.name, ratio)
        spent = 0.0
        if isinstance(method, Scorer):
            if variant.name not in self._scored:
                self._scored[variant.name] = self._score(method)
            method, spent = self._scored[variant.name]
        done = fork.compress(ratio=ratio, method=method, question=self._question)
        return fork, Build(spent + done.seconds, done.stages)

    def _graced(self, fork: Session, method: GraceKV, name: str, ratio: float) -> tuple[Session, Build]:
        """With evidence about the same tokens gathered once; at a high ratio fewer newest ones are left exact."""
        known, spared = self._known, 0.0

        class Known(GraceKV):
            def evidence(self, part: Context) -> Evidence:
                nonlocal spared
                key = name, part.logical.cpu().numpy().tobytes()
                if key in known:
                    found, seconds = known[key]
                    spared = sum(seconds.values())
                    part.seconds.update(seconds)
                else:
                    found = super().evidence(part)
                    known[key] = found, dict(part.seconds)
                return found

        options = {field.name: getattr(method, field.name) for field in fields(method)}
        done = fork.compress(ratio=ratio, method=Known(**options), question=self._question)
        return fork, Build(done.seconds + spared, done.stages)

    def _score(self, method: Scorer) -> tuple[Scorer, float]:
        """The method with the scores of all tokens known, and the seconds that they took."""
        session = self._reading.session
        device = session.engine.layout.device
        context = look(
            session.fork(), question=self._question
        )  # compressing looks again, and tells what that takes
        started = now(device)
        score = method.score(context)
        seconds = now(device) - started
        logical, notes = context.logical[0], context.notes  # the context itself is as large as the cache

        class Known(type(method)):  # type: ignore[misc]  # a subclass of the method at hand
            def score(self, part: Context) -> Tensor:
                part.notes.update(notes)
                return score[:, :, torch.searchsorted(logical, part.logical[0])]

        options = {field.name: getattr(method, field.name) for field in fields(method)}
        return Known(**options), seconds


def answers(forks: Sequence[Session], question: Sequence[int], prompt: Prompt) -> list[str]:
    """Greedy replies behind a question, all in one batch; the sessions go on with them.

    A reply ends early where it has all the answers: a score can only rise.
    """
    engine = forks[0].engine
    written: list[list[int]] = [[] for _ in forks]
    replies = [""] * len(forks)
    for fork in forks:
        fork.queue_ids(question)
    engine.drain(forks)
    going = list(range(len(forks)))
    while going:
        still = []
        for number in going:
            fork, ids = forks[number], written[number]
            logits = fork.logits
            assert logits is not None
            best = int(logits.argmax())
            if best in fork.stop_ids:
                continue
            ids.append(best)
            replies[number] = engine.tokenizer.decode(ids)
            if len(ids) < prompt.most and prompt.score(replies[number]) < 1:
                fork.queue_ids([best])
                still.append(number)
        going = still
        engine.step([forks[number] for number in going])
    return replies


@dataclass(frozen=True)
class _Made:
    """A compressed session that waits for the question."""

    fork: Session
    variant: str
    modes: Sequence[str]
    ratio: float
    build: Build
    kv_bytes: int
    entries: int


def ask(
    engine: Engine, prompt: Prompt, variants: Sequence[Variant], ratios: Sequence[float], modes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Cells of one prompt, the full cache first.

    Methods that never look at the question are played once and have the same cells in every mode. Sessions are asked
    together, as many as fit into ``_TOGETHER``.
    """
    reading = read(engine, *encode(engine.tokenizer, prompt))

    def made(fork: Session, variant: str, modes: Sequence[str], ratio: float, build: Build) -> _Made:
        return _Made(fork, variant, modes, ratio, build, fork.stats().kv_bytes, entries_of(fork))

    def cells(group: Sequence[_Made]) -> Iterator[dict[str, Any]]:
        started = now(engine.layout.device)
        replies = answers([one.fork for one in group], reading.question, prompt)
        seconds = (now(engine.layout.device) - started) / len(group)
        for one, reply in zip(group, replies, strict=True):
            for mode in one.modes:
                yield {
                    "method": one.variant,
                    "mode": mode,
                    "ratio": one.ratio,
                    "score": prompt.score(reply),
                    "kv_bytes": one.kv_bytes,
                    "entries": one.entries,
                    **one.build.to_json(),
                    "prefill_s": reading.seconds,
                    "answer_s": seconds,
                    "context_tokens": len(reading.session),
                    "reply": reply,
                }

    yield from cells([made(reading.session.fork(), "full", ["any"], 1.0, Build())])
    grids = {mode: Grid(reading, mode) for mode in modes}
    waiting: list[_Made] = []
    for variant in variants:
        asks = make_compressor(variant.method, variant.options).asks
        for mode in modes if asks else modes[:1]:
            for ratio in ratios:
                fork, build = grids[mode].compressed(variant, ratio)
                waiting.append(made(fork, variant.name, [mode] if asks else modes, ratio, build))
                if sum(one.kv_bytes for one in waiting) > _TOGETHER:
                    yield from cells(waiting)
                    waiting = []
    if waiting:
        yield from cells(waiting)


def go_on(
    engine: Engine, seed: int, tokens: int, variants: Sequence[Variant], ratios: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Cells of a continuation: how near the compressed cache's distributions stay to the full one's on real text.

    ``score`` is the share of the next 256 tokens whose likeliest token is the same, ``kl`` the mean divergence of the
    full cache's distribution from the compressed one's, in nats.
    """
    sentences = prose()
    start = seed * 131 % len(sentences)
    text = " ".join(sentences[start:] + sentences[:start])
    ids = engine.tokenizer.encode(text, add_special_tokens=False)[: tokens + CONTINUATION]
    if len(ids) < tokens + CONTINUATION:
        raise ConfigError(
            f"the text has {len(ids):,} tokens, {CONTINUATION} of which are held back",
            option="tokens",
            way_out="Give fewer",
        )
    reading = read(engine, ids[:tokens], [])
    rest = ids[tokens:]
    want = reading.session.fork().feed(rest).log_softmax(-1)
    grid = Grid(reading, "agnostic")

    def cell(session: Session, method: str, ratio: float, build: Build) -> dict[str, Any]:
        used, kept = session.stats().kv_bytes, entries_of(session)
        got = session.feed(rest).log_softmax(-1)
        same = (got.argmax(-1) == want.argmax(-1)).double().mean()
        return {
            "method": method,
            "mode": "agnostic" if method != "full" else "any",
            "ratio": ratio,
            "score": float(same),
            "kl": float((want.exp() * (want - got)).sum(-1).mean()),
            "kv_bytes": used,
            "entries": kept,
            **build.to_json(),
            "prefill_s": reading.seconds,
            "context_tokens": tokens,
        }

    yield cell(reading.session.fork(), "full", 1.0, Build())
    for variant in variants:
        for ratio in ratios:
            fork, build = grid.compressed(variant, ratio)
            yield cell(fork, variant.name, ratio, build)


def entries_of(session: Session) -> int:
    """Slots of all layers and heads: exact tokens and compressed entries."""
    layout, memory = session.engine.layout, session.memory
    return layout.layers * layout.kv_heads * memory.ledger.rows + memory.frozen.entries
