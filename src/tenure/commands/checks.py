"""What ``tenure doctor`` measures of the numbers. Each function looks at one thing and returns one :class:`Check`.

Models stand beside each other only as saved logits, so that one copy is in memory at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.commands.doctor_text import TURNS
from tenure.timing import now

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.session import Session

LOGITS = 1e-4
"""Largest difference of logits in fp32 that still counts as the same computation."""

GREEDY = 64
"""Tokens that both sides continue with."""

_DECODED = 16


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: what was checked.
        passed: whether it holds.
        measured: the error; None where there is no number.
        threshold: the largest error that passes.
        detail: in words, with what the number means.
    """

    name: str
    passed: bool
    measured: float | None
    threshold: float | None
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "pass": self.passed,
            "measured": self.measured,
            "threshold": self.threshold,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Recorded:
    """A conversation as an engine computed it.

    Args:
        ids: of the conversation, then ``GREEDY`` tokens that the engine chose.
        prompt: how many are the conversation's.
        logits: behind each id, fp32 ``[len(ids), vocabulary]``.
    """

    ids: list[int]
    prompt: int
    logits: Tensor


def _open(engine: Engine, **options: Any) -> Session:
    return engine.session(policy="full", positions="logical", chunk=256, **options)


def _worst(a: Tensor, b: Tensor) -> float:
    """Largest difference; infinite where one of them is not finite."""
    worst = 0.0
    for left, right in zip(
        torch.split(a, 256), torch.split(b, 256), strict=True
    ):  # a vocabulary makes large temporaries
        difference = float((left - right).abs().max())
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def conversation_ids(engine: Engine) -> list[list[int]]:
    """Three turns of real text, as the model's template writes them; bare text where it has none."""
    tokenizer = engine.tokenizer
    if not tokenizer.chat_template:
        return [tokenizer(f"{question}\n{answer}\n")["input_ids"] for question, answer in TURNS]
    from tenure.transcript import Transcript

    transcript, turns = Transcript(tokenizer), []
    for number, (question, answer) in enumerate(TURNS):
        last = number == len(TURNS) - 1
        messages = [{"role": "user", "content": question}]
        if not last:
            messages.append({"role": "assistant", "content": answer})
        turns.append([token for piece in transcript.open(messages, last) for token in piece.ids])
    return turns


def record(engine: Engine, ids: list[list[int]] | None = None, forced: list[int] | None = None) -> Recorded:
    """Read a conversation turn by turn, then continue it greedily.

    Args:
        engine: in fp32.
        ids: of each turn; the doctor's own conversation if None.
        forced: continue with these ids instead of ``GREEDY`` of the engine's own choice.
    """
    session = _open(engine)
    turns = ids or conversation_ids(engine)
    logits = [session.feed(turn) for turn in turns]
    prompt = len(session)
    for step in range(GREEDY if forced is None else len(forced)):
        token = int(logits[-1][-1].argmax()) if forced is None else forced[step]
        logits.append(session.feed([token]))
    return Recorded(session.memory.ids.tolist(), prompt, torch.cat(logits))


@torch.inference_mode()
def stock_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits of the unmodified model over all ids in one forward without a cache, fp32."""
    logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits
    return logits[0].float()


def rotation(ours: Recorded, stock: Tensor) -> Check:
    """The engine's logits over three turns against the stock model's, and 64 greedy ids."""
    error = _worst(ours.logits, stock)
    choice = stock[ours.prompt - 1 : -1].argmax(-1).tolist()
    # Equal at every place, given the same ids before it: a greedy run of the stock model is the same run.
    same = sum(a == b for a, b in zip(choice, ours.ids[ours.prompt :], strict=True))
    return Check(
        "rotation",
        error <= LOGITS and same == GREEDY,
        error,
        LOGITS,
        f"logits of {ours.prompt} tokens in {len(TURNS)} turns and {GREEDY} answered ones against the stock "
        f"model; {same} of {GREEDY} greedy ids equal; logits reach {stock.abs().max():.0f}",
    )


def shifts(engine: Engine, ours: Recorded) -> Check:
    """The same relative positions at other places."""
    ids = ours.ids[: min(200, ours.prompt)]
    scale = float(ours.logits[: len(ids)].abs().max())
    errors = {}
    for shift in (37, 1900):
        session = _open(engine)
        session.memory.ledger.next_position = shift
        errors[shift] = _worst(session.feed(ids), ours.logits[: len(ids)]) / scale
    shown = ", ".join(f"{error:.1e} at {shift}" for shift, error in errors.items())
    return Check(
        "shift invariance",
        max(errors.values()) <= LOGITS,
        max(errors.values()),
        LOGITS,
        f"{len(ids)} tokens at other positions, error as a share of the largest logit {scale:.0f}: {shown}",
    )


def masks(engine: Engine, ours: Recorded) -> Check:
    """Causality in every layer: what comes last must not reach the rows before it."""
    ids = ours.ids[: min(150, ours.prompt)]
    whole, changed, pieces = (_open(engine) for _ in range(3))
    first = whole.feed(ids)
    other = changed.feed([*ids[:-1], (ids[-1] + 1) % first.shape[-1]])
    for start in range(0, len(ids), 17):
        last = pieces.feed(ids[start : start + 17])
    before = len(ids) - 1
    leaks = [
        layer
        for layer in range(engine.layout.layers)
        for name in ("raw", "values")
        if not torch.equal(*(getattr(s.memory.rows, name)[layer, :, :before] for s in (whole, changed)))
    ]
    identical = torch.equal(first[:-1], other[:-1]) and not leaks
    error = _worst(last[-1:], first[-1:])
    where = (
        f"layer {leaks[0]} is the first that leaks" if leaks else f"no leak in {engine.layout.layers} layers"
    )
    return Check(
        "masks",
        identical and error <= LOGITS,
        error,
        LOGITS,
        f"another last token leaves earlier rows and logits bit-identical: {'yes' if identical else 'NO'}, "
        f"{where}; "
        f"{len(ids)} tokens in pieces of 17 against one piece: {error:.1e}",
    )


def executors(ours: Recorded, theirs: Recorded | None, name: str) -> Check:
    """The fused executor against transformers' own forward, both over Tenure's cache."""
    if theirs is None:
        return Check("executors", True, None, None, f"skipped: the family has only the executor {name!r}")
    count = len(theirs.ids)
    error = _worst(ours.logits[:count], theirs.logits)
    return Check(
        "executors",
        error <= LOGITS,
        error,
        LOGITS,
        f"logits of {count} tokens, joined projections against transformers' own forward",
    )


def speed(engine: Engine, ours: Recorded) -> Check:
    """Tokens a second in the dtype that the user gets; passes unless something is not finite."""
    conversation = ours.ids[: ours.prompt]
    session = engine.session(policy="h2o", budget=2048, chunk=1024)
    session.append_ids(conversation[:64])  # the first forward pays for set-up
    ids = (conversation * (1024 // len(conversation) + 1))[:1024]
    device = engine.layout.device
    started = now(device)
    session.append_ids(ids)
    read = now(device)
    session.force(ids[:_DECODED])
    prefill, decode = len(ids) / (read - started), _DECODED / (now(device) - read)
    logits = _open(engine).feed(conversation)
    finite = bool(logits.isfinite().all() and session.logits is not None and session.logits.isfinite().all())
    agree = (logits.argmax(-1) == ours.logits[: ours.prompt].argmax(-1)).float().mean().item()
    dtype = str(engine.layout.dtype).removeprefix("torch.")
    return Check(
        "dtype and speed",
        finite,
        round(decode, 1),
        None,
        f"{dtype} on {device}: {prefill:,.0f} tokens/s reading, {decode:,.1f} answering "
        f"at {session.stats().resident:,} slots; likeliest token as in fp32 at {agree:.1%} of places"
        + ("" if finite else "; NOT FINITE"),
    )
