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
from tenure.compress.probes import Probes, SessionReader
from tenure.errors import ConfigError, IntegrityError
from tenure.policies.base import ascending
from tenure.reads import needed
from tenure.timing import now

if TYPE_CHECKING:
    from tenure.memory import Memory
    from tenure.session import Session

Where = str | tuple[int, int] | Sequence[str] | None
"""A span's id, a range of logical indices, several span ids, or None for all."""

_ROWS = 8
"""The share of a budget that is left for rows besides pins and sinks, one in so many."""

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
    tokens included. They never number less than one besides the sinks.

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
    compressor = make_compressor(method, options) if isinstance(method, str) else method
    check_amount(ratio, budget)
    memory, engine = session.memory, session.engine
    layout = memory.device.layout
    heads = layout.layers * layout.kv_heads
    room = _room(memory)
    if ratio != 1 and memory.ledger.rows:
        memory.prepare(room)  # first, because it may evict or renumber
    chosen = _chosen(memory, span)
    protected, planned = _protected(memory)
    logical = memory.ledger.logical[:, : memory.ledger.rows]

    def left(counted: int) -> int:
        return int(heads * counted / ratio) if ratio is not None else heads * min(budget or 1, counted)

    counted = _most(chosen & ~planned)
    sinks = _most(chosen & (logical < memory.config.sinks))
    newest = max(0, min(recent, (left(counted) // heads - sinks) // 4))
    exact = protected | (chosen & (logical >= memory.ledger.length - newest))
    mask = torch.zeros_like(chosen)
    if left(counted) < heads * counted:
        mask = _even(memory, chosen & ~exact, most)
        planned = planned | (chosen & ~exact & ~mask)
        exact, counted = exact | planned, _most(chosen & ~planned)
    total = left(counted)
    tokens = int(mask[0].sum())
    outside = _most(chosen & exact & ~planned)
    entries = max(1, total - heads * outside)

    def report(made: int, seconds: Mapping[str, float]) -> Compression:
        return Compression(
            compressor.name,
            tokens if made else 0,
            _most(chosen & exact) if made else _most(chosen),
            made,
            (made + heads * outside) / heads if made else float(counted),
            now(layout.device) - started,
            dict(seconds),
            memory.nbytes,
        )

    if not tokens or entries >= heads * tokens:
        return report(0, {})
    _check_room(memory, -(-entries // heads))
    context = _context(session, mask, question, delayed, SessionReader(engine, memory, room))
    made = compressor.compress(context, entries).ranked()
    _verify(made, memory, entries)
    segment = RaggedSegment.of(made, memory.angles, memory.device.kernels, copy=memory.device.copy)
    rows = torch.arange(memory.ledger.rows, device=mask.device).expand_as(mask)
    memory.compress(rows[~mask].view(len(mask), -1), segment)
    return report(entries, context.seconds)


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
    exact, _ = _protected(memory)
    mask = _even(memory, _chosen(memory, span) & ~exact)
    return _context(session, mask, question, None, SessionReader(session.engine, memory, room))


def check_amount(ratio: float | None, budget: int | None) -> None:
    """Raise ConfigError where nothing can be compressed to these; see :func:`compress`."""
    if (ratio is None) == (budget is None):
        raise ConfigError("give a ratio or a budget", option="ratio", way_out="One of the two")
    if ratio is not None and not ratio >= 1:
        raise ConfigError(f"{ratio} is below 1", option="ratio", way_out="Give 1 (nothing) or more")
    if budget is not None and budget < 1:
        raise ConfigError(
            f"{budget} entries cannot stand for anything", option="budget", way_out="Give 1 or more"
        )


def _room(memory: Memory) -> int:
    """Tokens that can be read behind a session at once."""
    return min(memory.config.chunk, _ROOM) if memory.policy.evicts else _ROOM


def _chosen(memory: Memory, where: Where) -> Tensor:
    """Rows of the ranges or spans, ``[groups, rows]`` bool."""
    ledger = memory.ledger
    logical = ledger.logical[:, : ledger.rows]
    if where is None:
        return torch.ones_like(logical, dtype=torch.bool)
    if isinstance(where, tuple) and len(where) == 2 and all(isinstance(one, int) for one in where):
        return (logical >= int(where[0])) & (logical < int(where[1]))
    names = [where] if isinstance(where, str) else [str(name) for name in where]
    mask = torch.zeros_like(logical, dtype=torch.bool)
    for name in names:
        mask |= ledger.inside(ledger.spans.get(name))
    return mask


def _protected(memory: Memory) -> tuple[Tensor, Tensor]:
    """Rows that must stay, and of them those that no ratio counts: pins, the policy's too, and what the plan reads."""
    if not memory.ledger.rows:
        empty = torch.zeros_like(memory.ledger.logical[:, :0], dtype=torch.bool)
        return empty, empty
    view = memory.policy.pinned(memory.view())
    outside = (view.pin > 0) | (view.readers >= 0)
    return outside | (view.logical < view.sinks), outside & (view.logical >= view.sinks)


def _most(mask: Tensor) -> int:
    """Rows of a mask in the group of layers that has most of them."""
    return int(mask.sum(1).max())


def _check_room(memory: Memory, slots: int) -> None:
    """Raise ConfigError where ``slots`` more of compressed tokens would starve the rows of a budget."""
    budget, taken = memory.config.budget, memory.frozen.slots + slots
    if budget is None or not memory.policy.evicts:
        return
    fixed, least = needed(memory), max(1, budget // _ROWS)
    if budget - taken - fixed < least:
        raise ConfigError(
            f"compressed tokens would take {taken} of {budget} slots, pins and sinks take {fixed}; "
            f"{least} are for new tokens",
            option="ratio",
            way_out="Give a higher ratio or less to compress, or the session a larger budget",
        )


def _even(memory: Memory, mask: Tensor, most: int | None = None) -> Tensor:
    """The same number of rows in every group, at most ``most``: the most wanted of the chosen ones are left out."""
    count = mask.sum(1)
    least = int(count.min()) if mask.numel() else 0
    if most is not None and least > most:
        least = most
    if bool((count == least).all()):
        return mask
    if not least and most != 0:
        raise ConfigError(
            f"layers hold between none and {int(count.max())} of these tokens",
            option="span",
            way_out="Compress before the budget evicts, or give the session granularity 'session'",
        )
    order = ascending(memory.policy.rank(memory.view())).masked_fill(~mask, mask.shape[1])
    return mask & (order.argsort(1).argsort(1) < least)


def _context(
    session: Session,
    mask: Tensor,
    question: str | Sequence[int] | None,
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
    words = [] if question is None else question
    if isinstance(words, str):
        if tokenizer is None:
            raise ConfigError("the engine has no tokenizer", option="question", way_out="Give token ids")
        words = tokenizer.encode(words, add_special_tokens=False)
    return Context(
        keys=torch.stack([of(layer, rows.raw[layer]) for layer in layers]),
        rotated=torch.stack([of(layer, rows.keys(layer, rows.rows)) for layer in layers]),
        values=torch.stack([of(layer, rows.values[layer]) for layer in layers]),
        logical=logical,
        position=ledger.position[:, : ledger.rows].gather(1, index),
        ids=torch.tensor(memory.ids, device=mask.device)[logical],
        cuts=torch.cat([torch.ones_like(spans[:, :1]), spans.diff(dim=1)], 1) != 0,
        reader=reader,
        question=list(words),
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
