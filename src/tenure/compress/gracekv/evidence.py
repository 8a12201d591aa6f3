"""Where GraceKV's evidence comes from: the question, or what stands for it.

With the question: its queries and those of the newest tokens; the most relevant tokens are then read again, and what
they look at is evidence too (a hop). Without it, in this order: queries of the turn that followed; else a sample of the
context is read again, and each token is judged by how it is looked at where it is repeated, as KVzip does with all of the
context at two to three times the cost of reading it. Tokens outside the sample are judged by what their head finds in it
and by how rare they are: heads differ more than tokens do.
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
from tenure.compress.probes import Probes, join

_TAIL = 16
_SEED = 64
"""Tokens that a hop reads again."""
_HOP, _DECAY = 0.3, 0.5
_LEAD = 8
"""Tokens before a repeated stretch that are repeated with it, so that it is found."""


def gather(
    context: Context,
    slot: Tensor,
    slots: int,
    *,
    probes: int,
    watchers: int,
    hops: int,
    repeat: float,
    guess: bool,
) -> Flow:
    """Evidence about all tokens; see the module and :class:`~tenure.compress.gracekv.method.GraceKV`.

    Args:
        context: the tokens.
        slot: number of each token's slot, ``[L or 1, T]``.
        slots: how many there are.
        probes: queries that everything is measured by.
        watchers: queries a slot for distortions.
        hops: how often seeds are read again.
        repeat: share of the tokens that is read again where nothing is known of the question.
        guess: judge the others by their heads.
    """
    tail = context.reader.tail(_TAIL)
    if context.question:
        asked = context.reader.behind(context.question).every(probes)
        flow = direct(context, join([asked, tail]), slot, slots, most=watchers, peak=False)
        return _hops(context, flow, slot, slots, hops, watchers)
    if context.delayed is not None:
        after = context.delayed.every(probes)
        return direct(context, join([after, tail]), slot, slots, most=watchers, peak=False)
    return _repeated(context, slot, slots, tail, probes, watchers, repeat, guess)


def _hops(context: Context, flow: Flow, slot: Tensor, slots: int, hops: int, watchers: int) -> Flow:
    """``R = 0.7 s + 0.3 d``: ``d`` is what the seeds look at when they are read again, each hop at half the weight."""
    if not hops:
        return flow
    spread = torch.zeros_like(flow.relevance)
    seen = torch.zeros(context.shape[2], dtype=torch.bool, device=slot.device)
    score = (flow.relevance * flow.sensitivity[..., None]).mean((0, 1))
    weight = 1.0
    for _ in range(hops):
        best = score.masked_fill(seen, -1.0).topk(min(_SEED, len(score))).indices.sort().values
        seen[best] = True
        ids = context.ids[0][best].tolist()
        reached = direct(context, context.reader.behind(ids), slot, slots, most=1, peak=False)
        spread += weight * reached.relevance.masked_fill(seen, 0.0)
        score = (reached.relevance * reached.sensitivity[..., None]).mean((0, 1))
        weight *= _DECAY
    spread /= spread.sum(-1, keepdim=True) + 1e-12
    return replace(flow, relevance=(1 - _HOP) * flow.relevance + _HOP * spread)


def _repeated(
    context: Context,
    slot: Tensor,
    slots: int,
    tail: Probes,
    probes: int,
    watchers: int,
    repeat: float,
    guess: bool,
) -> Flow:
    """Every token by the largest share that a query of its repetition gives it, or by a guess at that."""
    tokens = context.shape[2]
    peaks = torch.zeros(context.shape, device=slot.device)
    seen = torch.zeros(tokens, dtype=torch.bool, device=slot.device)
    readings: list[Probes] = []
    for group in _readings(_sample(slot[0], slots, int(repeat * tokens)), context.reader.limit):
        cue = context.cue(0, [])
        ids = list(cue)
        places: list[tuple[int, int, int]] = []  # first query, first and last token
        for start, stop in group:
            begin = max(0, start - _LEAD)
            places.append((len(ids) - len(cue), begin, stop))
            ids += context.ids[0][begin:stop].tolist()
            seen[start:stop] = True
        reading = context.reader.behind(ids, first=len(cue))
        for layer in range(context.shape[0]):
            for first, begin, stop in places:
                part = reading[first : first + stop - begin]
                keys = context.rotated[layer][:, begin:stop]
                shares = part.shares(layer, keys, context.cos_sin, context.kernels, context.scale)
                peaks[layer, :, begin:stop] = torch.maximum(peaks[layer, :, begin:stop], shares.amax((1, 2)))
        readings.append(reading)
    general = join([*(one.every(max(1, probes // max(1, len(readings)))) for one in readings), tail])
    flow = direct(context, general, slot, slots, most=watchers, peak=True)
    if guess and bool(seen.any()) and not bool(seen.all()):
        # What a head finds of the text where it is repeated says how much it needs of the rest; the rarer a token, the
        # less it can be told from what is around it.
        need = rarity(context.ids[0])
        need = (need / need[seen].mean().clamp(min=1e-6)).clamp(0.25, 2.0)
        peaks = torch.where(seen, peaks, peaks[:, :, seen].mean(-1, keepdim=True) * need)
    return replace(flow, relevance=torch.maximum(flow.relevance, peaks))


def _sample(slot: Tensor, slots: int, most: int) -> list[tuple[int, int]]:
    """Stretches of slots, evenly spread, about ``most`` tokens in all, in order."""
    edges = torch.searchsorted(slot, torch.arange(slots + 1, device=slot.device)).tolist()
    filled = [(start, stop) for start, stop in pairwise(edges) if stop > start]
    count = min(len(filled), round(most / max(1, len(slot)) * len(filled)) or int(most > 0))
    step = len(filled) / max(1, count)
    return [filled[int((number + 0.5) * step)] for number in range(count)]


def _readings(stretches: Sequence[tuple[int, int]], limit: int) -> list[list[tuple[int, int]]]:
    """Stretches in readings that fit the limit, cues and leads included."""
    found: list[list[tuple[int, int]]] = []
    room = 0
    for start, stop in stretches:
        size = stop - start + _LEAD
        if size > room:
            found.append([])
            room = limit - 64
        found[-1].append((start, stop))
        room -= size
    return found
