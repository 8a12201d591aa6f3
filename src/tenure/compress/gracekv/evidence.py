"""Where GraceKV's evidence comes from: the question, or what stands for it, and what is found when text is read again.

A token counts by the largest share that a query gives it. With the question, these are its queries, and neighbours
share: a question points to the key of a fact, and what stands beside the key is wanted next. Then the stretches that it
points to are read again, and each of their tokens counts by how it is looked at where it is repeated, as KVzip does with
all of the context at two to three times the cost of reading it. Without the question an even sample of the context is
read again; queries of the turn that followed, where they were kept, count beside it. Tokens outside the sample are judged
by what their head finds in it, by how rare they are and by how much they stand out: heads differ more than tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from tenure.compress.base import Context
from tenure.compress.gracekv.flow import Flow, direct
from tenure.compress.gracekv.partition import rarity
from tenure.compress.keydiff import KeyDiff
from tenure.compress.probes import Probes, join
from tenure.compress.snapkv import pooled
from tenure.errors import ConfigError

_TAIL = 16
_LEAD = 8
"""Tokens before a repeated stretch that are repeated with it, so that it is found."""

Stretch = tuple[int, int]
"""First token of a stretch, and the one behind its last."""


def gather(
    context: Context,
    slot: Tensor,
    slots: int,
    *,
    probes: int,
    watchers: int,
    pool: int,
    hops: int,
    repeat: float,
    guess: bool,
) -> Flow:
    """Evidence about all tokens; see the module and :class:`~tenure.compress.gracekv.method.GraceKV`.

    Args:
        context: the tokens.
        slot: number of each token's slot, ``[L or 1, T]``.
        slots: how many there are.
        probes: queries of a reading that everything is measured by.
        watchers: queries a slot for distortions.
        pool: odd width over which neighbours share what a question looks at.
        hops: how often the stretches are read again that a question leads to.
        repeat: share of the tokens that is read again in all.
        guess: without a question, judge the tokens that were not read again by their heads.
    """
    if context.question:
        asked = context.reader.behind(context.question[-context.reader.limit :]).every(probes)
        flow = direct(context, asked, slot, slots, most=watchers)
        return _followed(
            context, replace(flow, relevance=pooled(flow.relevance, pool)), slot, slots, hops, repeat
        )
    known = [context.reader.tail(_TAIL)]
    if context.delayed is not None:
        known.append(context.delayed.every(probes))
    return _sampled(context, slot, slots, known, probes, watchers, repeat, guess)


def _followed(context: Context, flow: Flow, slot: Tensor, slots: int, hops: int, repeat: float) -> Flow:
    """The slots that a question looks at are read again, then those that they look at, and so on."""
    edges = _edges(slot, slots)
    relevance, pointed = flow.relevance, flow.relevance
    left = set(range(slots))
    for hop in range(hops):
        score = (pointed * flow.sensitivity[..., None]).mean(1)
        score = score.mean(0, keepdim=True) if len(slot) == 1 else score
        best = score.new_zeros(len(score), slots).scatter_reduce_(1, slot, score, "amax").mean(0)
        room = int(repeat * score.shape[1] / hops)
        chosen: list[Stretch] = []
        for number in best.sort(descending=True, stable=True).indices.tolist():
            start, stop = edges[number]
            if room <= 0:
                break
            if number in left and stop > start:
                left.remove(number)
                chosen.append((start, stop))
                room -= stop - start
        peaks, readings = _repeated(context, sorted(chosen))
        relevance = torch.maximum(relevance, peaks)
        if readings and hop + 1 < hops:
            pointed = direct(context, join(readings), slot, slots, most=1).relevance
    return replace(flow, relevance=relevance)


def _sampled(
    context: Context,
    slot: Tensor,
    slots: int,
    known: Sequence[Probes],
    probes: int,
    watchers: int,
    repeat: float,
    guess: bool,
) -> Flow:
    """Every token by the largest share that a query of its repetition gives it, or by a guess at that."""
    tokens = context.shape[2]
    stretches = _sample(_edges(slot, slots), int(repeat * tokens), tokens)
    peaks, readings = _repeated(context, stretches)
    general = join([*(one.every(max(1, probes // max(1, len(readings)))) for one in readings), *known])
    flow = direct(context, general, slot, slots, most=watchers)
    seen = torch.zeros_like(context.logical, dtype=torch.bool)
    for stretch in stretches:
        for mine, (first, last) in zip(seen, _everywhere(context, *stretch), strict=True):
            mine[first:last] = True
    if guess and bool(seen.any()) and not bool(seen.all()):
        # What a head finds of the text where it is repeated says how much it needs of the rest; the rarer a token and the
        # more it stands out, the less it can be told from what is around it.
        need = torch.stack([rarity(ids) for ids in context.ids])
        usual = _mean(need, seen).clamp(min=1e-6)
        need = (need / usual).clamp(0.25, 2.0)[:, None] * _standing_out(context)
        seen = seen[:, None]
        peaks = torch.where(seen, peaks, _mean(peaks, seen) * need)
    return replace(flow, relevance=torch.maximum(flow.relevance, peaks))


def _repeated(context: Context, stretches: Sequence[Stretch]) -> tuple[Tensor, list[Probes]]:
    """Read stretches again behind a request to repeat.

    Returns:
        The largest share that a query of a stretch gives each of its own tokens, ``[L, G, T]``, 0 elsewhere; and the
        queries of every reading.
    """
    peaks = torch.zeros(context.shape, device=context.keys.device)
    readings: list[Probes] = []
    cue = context.cue(0, [])
    for group in _readings(stretches, context.reader.limit - len(cue)):
        ids = list(cue)
        places: list[
            tuple[int, int, list[Stretch]]
        ] = []  # first query, queries, the tokens in each group of layers
        for start, stop in group:
            begin = max(0, start - _LEAD)
            places.append((len(ids) - len(cue), stop - begin, _everywhere(context, begin, stop)))
            ids += context.ids[0][begin:stop].tolist()
        reading = context.reader.behind(ids, first=len(cue))
        for layer in range(context.shape[0]):
            for query, count, columns in places:
                first, last = columns[layer % len(columns)]
                if first == last:
                    continue  # these layers have lost it
                shares = context.shares(layer, reading[query : query + count], slice(first, last))
                peaks[layer, :, first:last] = torch.maximum(peaks[layer, :, first:last], shares.amax((1, 2)))
        readings.append(reading)
    return peaks, readings


def _everywhere(context: Context, start: int, stop: int) -> list[Stretch]:
    """A stretch of the first group of layers in every group: layers may have lost different tokens."""
    logical = context.logical
    edges = torch.stack([logical[0, start], logical[0, stop - 1] + 1]).expand(len(logical), 2).contiguous()
    return [(first, last) for first, last in torch.searchsorted(logical.contiguous(), edges).tolist()]


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean over the tokens of a mask, over the last axis, which stays; 0 without any."""
    return (values * where).sum(-1, keepdim=True) / where.sum(-1, keepdim=True).clamp(min=1)


def _standing_out(context: Context) -> Tensor:
    """About 1 for the usual token, up to 16 for one whose keys are unlike all others, ``[L, G, T]``.

    KeyDiff's score in standard deviations of a head, for one half the head's own, for the other the mean of all heads;
    one more than that, squared (our choice: ``docs/LOG.md`` has what else was tried).
    """
    score = KeyDiff().score(context)
    score = (score - score.mean(-1, keepdim=True)) / (score.std(-1, keepdim=True) + 1e-6)
    every = score.mean(1 if len(context.logical) > 1 else (0, 1), keepdim=True)
    return (1 + ((score + every) / 2).clamp(-1.0, 3.0)).square()


def _edges(slot: Tensor, slots: int) -> list[Stretch]:
    """First token of each slot in the first group of layers, and the one behind its last."""
    edges = torch.searchsorted(slot[0], torch.arange(slots + 1, device=slot.device)).tolist()
    return list(pairwise(edges))


def _sample(edges: Sequence[Stretch], most: int, tokens: int) -> list[Stretch]:
    """Slots, evenly spread, about ``most`` tokens in all, in order."""
    filled = [(start, stop) for start, stop in edges if stop > start]
    count = min(len(filled), round(most / max(1, tokens) * len(filled)) or int(most > 0))
    step = len(filled) / max(1, count)
    return [filled[int((number + 0.5) * step)] for number in range(count)]


def _readings(stretches: Sequence[Stretch], limit: int) -> list[list[Stretch]]:
    """Stretches in readings of at most ``limit`` tokens, leads included; those that are longer are cut.

    Raises:
        ConfigError: a lead and one token are longer.
    """
    if stretches and limit <= _LEAD:
        raise ConfigError(
            f"{max(0, limit)} tokens are left for what is read again, {_LEAD + 1} are the least",
            option="chunk",
            way_out="Give a larger chunk, or repeat=0",
        )
    found: list[list[Stretch]] = []
    room = 0
    for start, stop in stretches:
        for first in range(start, stop, limit - _LEAD):
            part = first, min(stop, first + limit - _LEAD)
            size = part[1] - first + _LEAD
            if size > room:
                found.append([])
                room = limit
            found[-1].append(part)
            room -= size
    return found
