"""Key-query scores: how much the new turn would attend to what was evicted, at a common virtual position.

While spans are archived, their raw keys are averaged over blocks of a few tokens in some of the layers: a few percent
of what the archive holds. At a turn boundary the new turn's tokens run once on a scratch cache behind the session's
sinks, which gives their raw queries. Rotated to one distance, queries meet the averages of all spans at once, with the
sinks as the place for heads that look for nothing. The idea is RepairKV's (promote what the new turn's queries look at);
averages, sinks and the reduction are our choice.
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

BLOCK = 8
"""Tokens whose keys are averaged."""

LAYERS = 8
"""Layers that are looked at, evenly spread over the second two thirds of the model."""


def looked_at(layers: int) -> list[int]:
    """The layers whose keys are averaged and whose queries ask."""
    first = layers // 3
    count = min(LAYERS, layers - first)
    return sorted({first + (number * (layers - first)) // count for number in range(count)})


class KeyArchive:
    """An archive that keeps averages of the keys it takes. See :class:`~tenure.tiers.record.Archive`.

    Args:
        inner: where the spans live.
    """

    def __init__(self, inner: Archive) -> None:
        self.inner = inner
        self.means: dict[str, tuple[Tensor, Tensor]] = {}
        """A span's averaged raw keys ``[layers looked at, kv_heads, blocks, D]``, and tokens a block ``[blocks]``."""

    def put(self, record: SpanRecord) -> None:
        """Take a complete span."""
        self.means[record.span] = means(record.keys)
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
            self.means.pop(span_id, None)
        self.inner.forget(names)

    def fork(self) -> KeyArchive:
        """For a fork of the session."""
        copy = KeyArchive(self.inner.fork())
        copy.means.update(self.means)
        return copy

    def describe(self) -> tuple[dict[str, str], list[SpanRecord]]:
        """See :class:`~tenure.tiers.record.Portable`."""
        return self.inner.describe() if isinstance(self.inner, Portable) else ({}, [])

    def adopt(self, keys: Mapping[str, str]) -> None:
        """See :class:`~tenure.tiers.record.Portable`. The averages of these spans are taken when they are needed."""
        if isinstance(self.inner, Portable):
            self.inner.adopt(keys)

    def need(self, span_ids: Iterable[str]) -> None:
        """Take the averages of spans that came from an earlier process."""
        for span_id in span_ids:
            if span_id not in self.means and (record := self.inner.get(span_id)) is not None:
                self.means[span_id] = means(record.keys)


def means(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Averages of raw keys ``[layers, kv_heads, n, D]`` over blocks, and the tokens of each block."""
    chosen = keys[looked_at(len(keys))].float()
    count = chosen.shape[2]
    parts = [chosen[:, :, start : start + BLOCK].mean(2) for start in range(0, count, BLOCK)]
    sizes = [min(BLOCK, count - start) for start in range(0, count, BLOCK)]
    return torch.stack(parts, 2).to(keys.dtype).cpu(), torch.tensor(sizes)


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
    layers = set(looked_at(engine.layout.layers))
    found: dict[int, Tensor] = {}

    def watch(layer: int, q: Tensor, lse: Tensor) -> None:
        if layer in layers:
            found[layer] = q[:, -last:].float().clone()

    work = Work(memory.rows, 0, count, watch=watch)
    engine._forward([list(ids)], [work], torch.arange(count), count, [count - 1])
    return [found[layer] for layer in sorted(found)]


@torch.inference_mode()
def scores(
    engine: Engine,
    asked: Sequence[Tensor],
    spans: Mapping[str, tuple[Tensor, Tensor]],
    sinks: Tensor | None,
    *,
    distance: int,
) -> dict[str, float]:
    """Share of the turn's attention that each span would get, all of them at one distance.

    For each head, the softmax runs over the blocks of all spans and the sinks; a span's share is the largest that one
    of the queries gives it, and its score the mean over the tenth of the heads that give it most.

    Args:
        engine: for rotary angles and the scale of the logits.
        asked: of :func:`queries`.
        spans: of :attr:`KeyArchive.means`.
        sinks: raw keys of the session's first tokens ``[layers looked at, kv_heads, s, D]``.
        distance: in positions from every key to every query.
    """
    if not spans or not asked:
        return {}
    names = list(spans)
    counts = [len(sizes) for _, sizes in spans.values()]
    owner = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
    sizes = torch.cat([sizes for _, sizes in spans.values()]).float().log()
    shares = []
    for layer, q in enumerate(asked):
        keys = torch.cat([one[layer] for one, _ in spans.values()], 1).float()
        if sinks is not None:
            keys = torch.cat([keys, sinks[layer].float().cpu()], 1)
        bias = torch.cat([sizes, torch.zeros(keys.shape[1] - len(sizes))])
        shares.append(_shares(engine, q.cpu(), keys, bias, owner, len(names), distance))
    heads = torch.cat(shares)
    best = heads.topk(max(1, len(heads) // 10), dim=0).values.mean(0)
    return dict(zip(names, best.tolist(), strict=True))


def _shares(
    engine: Engine, q: Tensor, keys: Tensor, bias: Tensor, owner: Tensor, spans: int, distance: int
) -> Tensor:
    """``[heads, spans]`` of one layer, from raw queries ``[heads, n, D]`` and keys ``[kv_heads, blocks, D]``."""
    heads, count, dim = q.shape
    q, keys = _rotated(engine, q, distance), _rotated(engine, keys, 0)
    grouped = q.view(len(keys), heads // len(keys), count, dim)
    found = []
    for group, key in zip(grouped, keys, strict=True):
        logits = group @ key.T * engine.adapter.scale + bias
        mass = logits.softmax(-1)[..., : len(owner)]
        share = torch.zeros(*mass.shape[:2], spans).index_add_(2, owner, mass)
        found.append(share.amax(1))
    return torch.cat(found)


def _rotated(engine: Engine, x: Tensor, position: int) -> Tensor:
    cos, sin = engine.adapter.rope.cos_sin(torch.full((x.shape[1],), position), largest=position + 1)
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


def evidence(score: float) -> str:
    """A score in words."""
    return f"its keys draw {100 * score:.2g} % of the attention of the heads that look for it"


__all__ = ["KeyArchive", "evidence", "fused", "looked_at", "means", "queries", "scores"]
