"""Stage 1: slots. Contiguous stretches of 16 to 128 tokens that turn where the text turns.

GraceKV's equations (4) and (5) as a third-party reading of arXiv 2608.07001 gives them; windows, depths and the weights
of its dynamic program are not public and are our choice. Slots are shared by all layers and heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SHORTEST, TARGET, LONGEST = 16, 64, 128
WINDOWS = (2, 4, 8)
_CLIP = 6.0


def features(keys: Tensor, values: Tensor, depths: Sequence[int], width: int = 64) -> Tensor:
    """What stands for the hidden states, ``[S, T, width]`` fp32 of length one.

    Raw keys and values are linear images of a layer's normalised hidden states and are in the cache already; hidden
    states are not, and would have to be computed again (our choice). Wider ones are projected at random.

    Args:
        keys: raw keys ``[L, G, T, D]``.
        values: like ``keys``.
        depths: which layers.
        width: of the projection.
    """
    found = []
    for depth in depths:
        # Keys carry large constant parts (the biases of Qwen2), which would hide every difference.
        parts = [_centred(one[depth].float()) for one in (keys, values)]
        joined = torch.cat(parts, 0).transpose(0, 1).flatten(1)
        if joined.shape[1] > width:
            generator = torch.Generator().manual_seed(depth)
            joined = joined @ torch.randn(joined.shape[1], width, generator=generator).to(joined.device)
        else:
            joined = torch.nn.functional.pad(joined, (0, width - joined.shape[1]))
        found.append(torch.nn.functional.normalize(joined, dim=-1))
    return torch.stack(found)


def _centred(x: Tensor) -> Tensor:
    x = x - x.mean(1, keepdim=True)
    return x / (x.square().mean((1, 2), keepdim=True).sqrt() + 1e-6)


def curvature(hidden: Tensor, windows: Sequence[int] = WINDOWS, stability: float = 0.5) -> Tensor:
    """How sharply the text turns at each token, ``[T]``.

    ``kappa_i = 1 - cos(h_i - mean(h_{i-w+1..i}), mean(h_{i+1..i+w}) - h_i)``; over layers and windows the mean less
    ``stability`` standard deviations. Windows are cut at the edges; the first and the last token do not turn.

    Args:
        hidden: ``[S, T, F]``, of length one.
        windows: each at least 2: with 1 the first difference is zero.
        stability: weight of the standard deviation.
    """
    tokens = hidden.shape[1]
    sums = torch.nn.functional.pad(hidden.cumsum(1), (0, 0, 1, 0))
    index = torch.arange(tokens, device=hidden.device)
    found = []
    for window in windows:
        low, high = (index - window + 1).clamp(min=0), (index + window).clamp(max=tokens - 1)
        before = (sums[:, index + 1] - sums[:, low]) / (index + 1 - low)[:, None]
        after = (sums[:, high + 1] - sums[:, index + 1]) / (high - index).clamp(min=1)[:, None]
        cosine = torch.cosine_similarity(hidden - before, after - hidden, dim=-1, eps=1e-6)
        found.append(1 - cosine.masked_fill((high == index) | (low == index), 1.0))
    every = torch.cat(found)
    return every.mean(0) - stability * every.std(0, correction=0)


def rarity(ids: Tensor) -> Tensor:
    """Surprisal of tokens ``[T]`` under their own frequencies in the text, in nats.

    Stands in for the model's surprisal, which prefill does not compute: logits of every token would cost a quarter of
    it on a small model (our choice).
    """
    _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    share: Tensor = counts.float() / len(ids)
    return -share.log()[inverse]


def robust(x: Tensor) -> Tensor:
    """``(x - median) / (1.4826 MAD)``, clipped."""
    middle = x.median()
    spread = (x - middle).abs().median()
    return ((x - middle) / (1.4826 * spread + 1e-6)).clamp(-_CLIP, _CLIP)


def partition(
    hidden: Tensor,
    cuts: Tensor,
    surprisal: Tensor | None = None,
    *,
    surprise: float = 0.25,
    length_cost: float = 0.5,
    dispersion: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Slots of a text.

    A dynamic program takes the cuts with the largest sum of ``z(kappa) + surprise z(surprisal)``, less
    ``length_cost ((n - 64) / 64)^2`` and ``dispersion`` times the spread within, for slots of 16 to 128 tokens.

    Args:
        hidden: ``[S, T, F]``; see :func:`features`.
        cuts: where a slot must begin, ``[T]`` bool.
        surprisal: ``[T]``; None leaves it out.
        surprise: its weight.
        length_cost: see above.
        dispersion: see above.

    Returns:
        First token of each slot, ascending from 0, and the turning score ``[T]``: that of a cut behind each token.
    """
    tokens = hidden.shape[1]
    score = robust(curvature(hidden))
    if surprisal is not None:
        score = score + surprise * robust(surprisal)
    starts = sorted({0, *cuts.nonzero().flatten().tolist()})
    band = _band(hidden.mean(0), length_cost, dispersion)
    gain = score.double().cpu().numpy()
    found: list[int] = []
    for start, stop in zip(starts, [*starts[1:], tokens], strict=True):
        found += _cut(gain, band, start, stop)
    return torch.tensor(found, device=hidden.device), score


def uniform(tokens: int, cuts: Tensor) -> Tensor:
    """Slots of 64 tokens: the ablation."""
    starts = sorted({0, *cuts.nonzero().flatten().tolist()})
    found = [
        first
        for start, stop in zip(starts, [*starts[1:], tokens], strict=True)
        for first in range(start, stop, TARGET)
    ]
    return torch.tensor(found, device=cuts.device)


def _band(hidden: Tensor, length_cost: float, dispersion: float) -> np.ndarray:
    """Cost of the slot of ``n`` tokens that ends behind token ``j - 1``: ``[T + 1, 129]``."""
    tokens = hidden.shape[0]
    sums = torch.nn.functional.pad(hidden.cumsum(0), (0, 0, 1, 0))
    squares = torch.nn.functional.pad(hidden.square().sum(1).cumsum(0), (1, 0))
    band = np.zeros((tokens + 1, LONGEST + 1))
    total = hidden - hidden.mean(0)
    scale = float(total.square().sum(1).mean()) + 1e-9
    for n in range(1, min(LONGEST, tokens) + 1):
        whole = squares[n:] - squares[:-n]
        inner = (sums[n:] - sums[:-n]).square().sum(1) / n
        spread = ((whole - inner) / n / scale).double().cpu().numpy()
        band[n:, n] = dispersion * spread + length_cost * ((n - TARGET) / TARGET) ** 2
    return band


def _cut(gain: np.ndarray, band: np.ndarray, start: int, stop: int) -> list[int]:
    """First tokens of the slots of ``start .. stop``."""
    length = stop - start
    if length < 2 * SHORTEST:
        return [start]
    best = np.full(length + 1, -np.inf)
    came = np.zeros(length + 1, dtype=np.int64)
    best[0] = 0.0
    for j in range(SHORTEST, length + 1):
        most = min(LONGEST, j)
        sizes = np.arange(SHORTEST, most + 1)
        options = best[j - most : j - SHORTEST + 1][::-1] - band[start + j, SHORTEST : most + 1]
        pick = int(options.argmax())
        best[j] = options[pick] + (gain[start + j - 1] if j < length else 0.0)
        came[j] = sizes[pick]
    found = []
    while length:
        length -= int(came[length])
        found.append(start + length)
    return found[::-1]
