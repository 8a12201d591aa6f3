"""Key-query scores: how much the new turn would look at what was evicted, at a common virtual position.

While spans are archived, the raw keys of some layers are kept beside them, without the tokens of the template's header,
which draw attention on their own account. At a turn boundary the new turn's tokens run once on a scratch cache behind the
session's sinks, which gives their raw queries; rotated to one distance, these meet the keys of all spans at once. The
idea is RepairKV's (promote what the new turn's queries look at), the reduction our choice. Averages of keys over four or
eight tokens were tried and do not find short facts; ``docs/LOG.md`` has the numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenure.cache.attend import Work
from tenure.config import SessionConfig
from tenure.memory import Memory
from tenure.plan import Plan
from tenure.regions import Region
from tenure.spans import Span
from tenure.tiers.record import Archive, Portable, SpanRecord

if TYPE_CHECKING:
    from tenure.engine import Engine

HEADER = 3
"""First tokens of a span that are left out, unless it is shorter than twice as much."""

_BATCH = 16_384
"""Keys that meet the queries at a time."""

FEW = 8
"""Spans that are too few to tell by themselves how far logits lie apart; from twice as many on they do."""

LAYERS = 8
"""Layers that are looked at, evenly spread over the second two thirds of those that see the whole session."""


def looked_at(judges: Collection[int]) -> list[int]:
    """The layers whose keys are kept and whose queries ask, of :attr:`~tenure.cache.rows.Layout.judges`."""
    layers = sorted(judges)[len(judges) // 3 :]
    count = min(LAYERS, len(layers))
    return [layers[number * len(layers) // count] for number in range(count)]


class KeyArchive:
    """An archive that keeps some of the keys it takes at hand. See :class:`~tenure.tiers.record.Archive`.

    Args:
        inner: where the spans live.
        layers: whose keys, see :func:`looked_at`.
    """

    def __init__(self, inner: Archive, layers: Sequence[int]) -> None:
        self.inner = inner
        self.layers = layers
        self.keys: dict[str, Tensor] = {}
        """What is kept of each span's raw keys, see :func:`kept_keys`."""

    def put(self, record: SpanRecord) -> None:
        """Take a complete span."""
        self.keys[record.span] = kept_keys(record.keys, self.layers)
        self.inner.put(record)

    def get(self, span_id: str) -> SpanRecord | None:
        """A span's record, or None if it is lost."""
        return self.inner.get(span_id)

    def prefetch(self, span_ids: Iterable[str]) -> None:
        """These spans are likely to be asked for next."""
        self.inner.prefetch(span_ids)

    def forget(self, span_ids: Iterable[str]) -> None:
        """These spans no longer exist in the session."""
        names = list(span_ids)
        for span_id in names:
            self.keys.pop(span_id, None)
        self.inner.forget(names)

    def fork(self) -> KeyArchive:
        """For a fork of the session."""
        copy = KeyArchive(self.inner.fork(), self.layers)
        copy.keys.update(self.keys)
        return copy

    def describe(self) -> tuple[dict[str, str], list[SpanRecord]]:
        """See :class:`~tenure.tiers.record.Portable`."""
        return self.inner.describe() if isinstance(self.inner, Portable) else ({}, [])

    def adopt(self, keys: Mapping[str, str]) -> None:
        """See :class:`~tenure.tiers.record.Portable`. The keys of these spans are taken when they are needed."""
        if isinstance(self.inner, Portable):
            self.inner.adopt(keys)

    def need(self, span_ids: Iterable[str]) -> None:
        """Take the keys of spans that came from an earlier process."""
        for span_id in span_ids:
            if span_id not in self.keys and (record := self.inner.get(span_id)) is not None:
                self.keys[span_id] = kept_keys(record.keys, self.layers)


def kept_keys(keys: Tensor, layers: Sequence[int]) -> Tensor:
    """What is kept of a span's raw keys ``[all layers, kv_heads, n, D]``: ``[layers, kv_heads, m, D]``."""
    first = HEADER if keys.shape[2] >= 2 * HEADER else 0
    return keys[list(layers), :, first:].cpu()


@torch.inference_mode()
def queries(engine: Engine, ids: Sequence[int], last: int) -> list[Tensor]:
    """Raw queries of the last tokens, ``[heads, last, D]`` for each layer looked at.

    Args:
        engine: of the session, whose cache is not touched.
        ids: sinks and the new turn.
        last: tokens whose queries are wanted.
    """
    count = len(ids)
    config = SessionConfig(
        policy="recency", budget=count + 8, chunk=count, slack=1, sinks=0, positions="logical"
    )
    memory = Memory(config, engine.device, Plan())
    memory.queue(ids, Span("probe", 0, 0, Region.OTHER))
    memory.prepare(count)
    layers = set(looked_at(engine.layout.judges))
    found: dict[int, Tensor] = {}

    def watch(layer: int, q: Tensor, lse: Tensor) -> None:
        if layer in layers:
            found[layer] = q[:, -last:].float().clone()

    work = Work(memory.rows, 0, count, logical=memory.ledger.logical[:, :count], watch=watch)
    engine._forward([list(ids)], [work], torch.arange(count), count, [count - 1])
    return [found[layer] for layer in sorted(found)]


@torch.inference_mode()
def scores(
    engine: Engine, asked: Sequence[Tensor], spans: Mapping[str, Tensor], *, distance: int
) -> dict[str, float]:
    """How far each span stands out for the turn's queries, all of them at one distance.

    For each head and query a span has its largest logit, in standard deviations from the mean of all spans. For each
    head the best query counts, and the score is the mean over the tenth of the heads in which the span stands out most:
    few heads look things up.

    Few spans say little of a deviation: of two, one is one deviation above the mean for every head and query, however
    near they are. Up to :data:`FEW` share one over the heads and queries of a layer, so that it counts how far a head
    tells them apart; between that and twice as many the variances are mixed. One span alone scores 1.

    Args:
        engine: for rotary angles and the scale of the logits.
        asked: of :func:`queries`.
        spans: of :attr:`KeyArchive.keys`.
        distance: in positions from every key to every query.
    """
    if not spans or not asked:
        return {}
    if len(spans) == 1:
        return dict.fromkeys(spans, 1.0)
    best = []
    own = min(1.0, max(0.0, len(spans) / FEW - 1))
    for number, (layer, q) in enumerate(zip(looked_at(engine.layout.judges), asked, strict=True)):
        largest = _largest(engine, layer, q.cpu(), [keys[number] for keys in spans.values()], distance)
        variance = largest.var(-1, correction=0, keepdim=True)
        apart = torch.lerp(variance.mean(), variance, own).sqrt_().clamp_(min=1e-6)
        best.append(((largest - largest.mean(-1, keepdim=True)) / apart).amax(1))
    heads = torch.cat(best)
    found = heads.topk(max(1, len(heads) // 10), dim=0).values.mean(0)
    return dict(zip(spans, found.tolist(), strict=True))


def _largest(engine: Engine, layer: int, q: Tensor, spans: Sequence[Tensor], distance: int) -> Tensor:
    """Largest logit of each span, ``[heads, n, spans]``; queries are ``[heads, n, D]``, keys ``[kv_heads, m, D]``."""
    heads, count, dim = q.shape
    kv_heads = len(spans[0])
    q = _rotated(engine, layer, q, distance).view(kv_heads, -1, dim)
    found = torch.empty(heads, count, len(spans))
    first = 0
    while first < len(spans):
        last, tokens = first, 0
        while last < len(spans) and (last == first or tokens + spans[last].shape[1] <= _BATCH):
            tokens += spans[last].shape[1]
            last += 1
        keys = _rotated(engine, layer, torch.cat(list(spans[first:last]), 1).float(), 0)
        logits = (q @ keys.transpose(1, 2) * engine.adapter.scale).view(heads, count, tokens)
        sizes = [span.shape[1] for span in spans[first:last]]
        for number, part in enumerate(torch.split(logits, sizes, -1)):
            found[..., first + number] = part.amax(-1)
        first = last
    return found


def _rotated(engine: Engine, layer: int, x: Tensor, position: int) -> Tensor:
    positions = torch.full((x.shape[1],), position, device=engine.layout.device)
    cos, sin = engine.adapter.ropes[layer].cos_sin(positions, largest=position + 1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.cpu(), sin.cpu()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def fused(*rankings: Collection[str]) -> dict[str, float]:
    """Rankings joined by reciprocal ranks, ``sum of 1 / (60 + rank)`` (Cormack et al. 2009)."""
    joined: dict[str, float] = {}
    for ranking in rankings:
        for rank, name in enumerate(ranking, 1):
            joined[name] = joined.get(name, 0.0) + 1 / (60 + rank)
    return dict(sorted(joined.items(), key=lambda item: -item[1]))


def evidence(score: float, spans: int) -> str:
    """A score in words, and how many spans were compared."""
    if spans == 1:
        return "it is the only one that was evicted"
    return f"its keys stand out by {score:.1f} deviations in the heads that look for it"
