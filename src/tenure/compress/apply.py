"""Compressing a part of a session: which rows, how many entries, and the exchange of one for the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.cache.ragged import Entries, RaggedSegment
from tenure.compress import make_compressor
from tenure.compress.base import Compressor, Context, check_alike
from tenure.compress.choose import Choice, Where, check_amount, check_room, choose, chosen, even, protected
from tenure.compress.probes import Probes, SessionReader
from tenure.errors import ConfigError, IntegrityError
from tenure.timing import now

if TYPE_CHECKING:
    from tenure.memory import Memory
    from tenure.session import Session

_ROOM = 1024
"""Tokens that one reading of a question or a repetition may have."""

REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_ON = "\n\nRepeat the part of the previous context exactly, starting with"
"""What KVzip asks a model for (its code's wording)."""

_MARK = "context"


@dataclass(frozen=True)
class Compression:
    """What a compression has done.

    Args:
        method: which one.
        tokens: that were compressed, in each (layer, kv head).
        exact: of the chosen tokens, those that keep their rows: sinks, the newest, pins, what a plan reads.
        entries: that stand for the compressed tokens, over all layers and heads.
        kept: entries and exact tokens a (layer, kv head), without pins and planned spans: what ``ratio`` counts.
        seconds: it took, and each stage that the method tells of.
        stages: seconds of each stage.
        kv_bytes: allocated for the cache now.
    """

    method: str
    tokens: int
    exact: int
    entries: int
    kept: float
    seconds: float
    stages: Mapping[str, float]
    kv_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@torch.inference_mode()
def compress(
    session: Session,
    span: Where = None,
    *,
    ratio: float | None = None,
    budget: int | None = None,
    method: str | Compressor = "gracekv",
    question: str | Sequence[int] | None = None,
    recent: int = 32,
    options: Mapping[str, Any] | None = None,
    delayed: Probes | None = None,
    most: int | None = None,
) -> Compression:
    """Let fewer entries stand for a part of a session.

    Sinks, hard and soft pins, spans that the plan reads and the newest ``recent`` tokens keep their rows. Where layers
    lost different tokens, those that hold more of the chosen ones keep the most wanted of them. All these but sinks and
    newest tokens are not counted; of the others, exactly ``floor(L G T / ratio)`` entries are left, sinks and newest
    tokens included. They never number less than one besides the sinks. What was compressed before stays as it is and is
    not counted: compressing twice deals with the tokens that are exact still.

    Args:
        session: idle, without waiting tokens.
        span: what to compress.
        ratio: 1 or more; 1 changes nothing.
        budget: entries a (layer, kv head) instead of a ratio, at least 1.
        method: name of a compressor, or one.
        question: what will be asked, as text or token ids, where that is known.
        recent: newest tokens of the session that stay exact, at most a quarter of the budget.
        options: fields of the compressor.
        delayed: queries of tokens that followed, for the methods that use them.
        most: of the chosen tokens only so many a (layer, kv head), those that the policy would evict first; None for all.

    Raises:
        ConfigError: the ratio or budget cannot work, the model's layers are not alike, a layer has lost all of the
            chosen tokens and others have not, the session's budget would be left without rows for new tokens, or a
            chunk is too short for what the method reads; nothing has changed, except that positions may have been
            renumbered.
        UnknownSpanError: no such span.
    """
    started = now(session.engine.layout.device)
    check_alike(session.engine.layout, "method")
    compressor = _compressor(method, options)
    check_amount(ratio, budget)
    if isinstance(recent, bool) or not isinstance(recent, int) or recent < 0:
        raise ConfigError(f"{recent!r} is no number of tokens", option="recent", way_out="Give 0 or more")
    words = _question(session, question)
    memory, engine = session.memory, session.engine

    def report(choice: Choice, made: int, seconds: Mapping[str, float]) -> Compression:
        heads = choice.heads
        return Compression(
            compressor.name,
            choice.tokens if made else 0,
            choice.exact if made else choice.chosen,
            made,
            (made + heads * choice.outside) / heads if made else float(choice.counted),
            now(engine.layout.device) - started,
            dict(seconds),
            memory.nbytes,
        )

    choice = choose(memory, span, ratio, budget, recent, most)
    if choice.idle:
        return report(choice, 0, {})
    room = _room(memory)
    memory.prepare(room)  # may evict or renumber
    choice = choose(memory, span, ratio, budget, recent, most)
    if choice.idle:
        return report(choice, 0, {})
    check_room(memory, -(-choice.entries // choice.heads))
    mask = choice.mask
    context = _context(session, mask, words, delayed, SessionReader(engine, memory, room))
    made = compressor.compress(context, choice.entries).ranked()
    _verify(made, memory, choice.entries)
    segment = RaggedSegment.of(made, memory.angles, memory.device.kernels, copy=memory.device.copy)
    rows = torch.arange(memory.ledger.rows, device=mask.device).expand_as(mask)
    memory.compress(rows[~mask].view(len(mask), -1), segment)
    seconds = context.seconds
    del context, made  # each as large as what was compressed, and more
    engine.heap.give_back()
    return report(choice, choice.entries, seconds)


@torch.inference_mode()
def look(session: Session, span: Where = None, *, question: str | Sequence[int] | None = None) -> Context:
    """What a compressor would see of a part of a session, none of its newest tokens exact.

    Compresses nothing; makes room as the next tokens would, so a session with a budget may evict or renumber.

    Args:
        session: idle, without waiting tokens, with something to compress in the part.
        span: the part, see :func:`compress`.
        question: what will be asked, see :func:`compress`.

    Raises:
        ConfigError: the model's layers are not alike.
        UnknownSpanError: no such span.
    """
    check_alike(session.engine.layout, "model")
    memory = session.memory
    room = _room(memory)
    memory.prepare(room)
    exact, _ = protected(memory)
    mask = even(memory, chosen(memory, span) & ~exact)
    reader = SessionReader(session.engine, memory, room)
    return _context(session, mask, _question(session, question), None, reader)


def _compressor(method: str | Compressor, options: Mapping[str, Any] | None) -> Compressor:
    if isinstance(method, str):
        return make_compressor(method, options)
    if options:
        raise ConfigError(
            f"{method.name} was made already", option="options", way_out="Give them to it, or name the method"
        )
    return method


def _question(session: Session, question: str | Sequence[int] | None) -> list[int]:
    """Token ids of a question; none where it is not known."""
    if question is None:
        return []
    if not isinstance(question, str):
        return session.checked_ids(question, "question")
    if session.engine.tokenizer is None:
        raise ConfigError("the engine has no tokenizer", option="question", way_out="Give token ids")
    return list(session.engine.tokenizer.encode(question, add_special_tokens=False))


def _room(memory: Memory) -> int:
    """Tokens that can be read behind a session at once."""
    return min(memory.config.chunk, _ROOM) if memory.policy.evicts else _ROOM


def _context(
    session: Session,
    mask: Tensor,
    question: Sequence[int],
    delayed: Probes | None,
    reader: SessionReader,
) -> Context:
    memory, engine = session.memory, session.engine
    ledger, rows, layout = memory.ledger, memory.rows, memory.device.layout
    groups = len(mask)
    index = torch.arange(ledger.rows, device=mask.device).expand_as(mask)[mask].view(groups, -1)
    logical = ledger.logical[:, : ledger.rows].gather(1, index)
    tokenizer = engine.tokenizer

    def of(layer: int, tensor: Tensor) -> Tensor:
        return tensor.index_select(1, index[layer % groups])

    layers = range(layout.layers)
    spans = ledger.span_index(logical)
    return Context(
        keys=torch.stack([of(layer, rows.raw[layer]) for layer in layers]),
        rotated=torch.stack([of(layer, rows.keys(layer, rows.rows)) for layer in layers]),
        values=torch.stack([of(layer, rows.values[layer]) for layer in layers]),
        logical=logical,
        position=ledger.position[:, : ledger.rows].gather(1, index),
        ids=torch.tensor(memory.ids, device=mask.device)[logical],
        cuts=torch.cat([torch.ones_like(spans[:, :1]), spans.diff(dim=1)], 1) != 0,
        reader=reader,
        question=question,
        delayed=delayed,
        cue=_cue(tokenizer),
        out=engine.adapter.output_projection,
        cos_sin=memory.angles,
        kernels=memory.device.kernels,
        scale=engine.adapter.scale,
    )


def _cue(tokenizer: Any) -> Callable[[int, Sequence[int]], list[int]]:
    """KVzip's request to repeat, up to the start of the model's turn: of the first piece, and of one behind others."""

    def cue(number: int, before: Sequence[int]) -> list[int]:
        if tokenizer is None:
            return list(before)
        request: list[int] = tokenizer.encode(REPEAT_ON if number else REPEAT, add_special_tokens=False)
        answer: list[int] = tokenizer.encode(_turn(tokenizer), add_special_tokens=False)
        return [*request, *before, *answer]

    return cue


def _turn(tokenizer: Any) -> str:
    """What a chat template writes between a user's text and the model's answer; a line break without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    chat = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return str(text).rpartition(_MARK)[2]


def _verify(made: Entries, memory: Memory, entries: int) -> None:
    made.check(memory.device.layout)
    if len(made) != entries:
        raise IntegrityError(f"{len(made)} entries were made, the budget is {entries}")
