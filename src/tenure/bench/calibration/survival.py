"""Half-lives from lifetimes that are partly censored: Kaplan-Meier, exponential and Weibull fits, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tenure.bench.calibration.trace import Lifetimes
from tenure.errors import ConfigError
from tenure.region_table import STEP_TOKENS, Clock

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ENOUGH = 200
"""Tokens that a region needs for a half-life of its own; with fewer it is drawn towards that of all regions."""

LIMITS: dict[str, tuple[float, float]] = {"steps": (1.0, 4096.0), "turns": (0.5, 512.0)}
LIMITS["tokens"] = (STEP_TOKENS * LIMITS["steps"][0], STEP_TOKENS * LIMITS["steps"][1])
_MOST = 4000


@dataclass(frozen=True)
class Estimate:
    """A region's half-life.

    Args:
        half_life: in ticks of the clock, after shrinking and clamping.
        low: 2.5 % point over resampled messages.
        high: 97.5 % point.
        n: tokens.
        deaths: tokens whose life ended within the transcript.
        method: ``kaplan-meier``, ``exponential`` where the curve does not reach one half, or ``global`` without tokens.
        exponential: half-life of the exponential fit, infinity without deaths.
        weibull: shape and scale; None with fewer than 2 deaths.
        shrunk: whether the value of all regions has a share in it.
    """

    half_life: float
    low: float
    high: float
    n: int
    deaths: int
    method: str
    exponential: float
    weibull: tuple[float, float] | None
    shrunk: bool


def kaplan_meier(time: Floats, died: Bools) -> tuple[Floats, Floats]:
    """The survival curve: times ``[m]`` ascending and the share ``[m]`` alive after each (scipy's estimator)."""
    from scipy.stats import CensoredData, ecdf

    data = CensoredData(uncensored=time[died], right=time[~died])
    curve = ecdf(data).sf
    return np.asarray(curve.quantiles), np.asarray(curve.probabilities)


def median(time: Floats, died: Bools) -> float | None:
    """The first time at which half or less is alive; None where the curve ends above."""
    if not died.any():
        return None
    times, alive = kaplan_meier(time, died)
    below = np.flatnonzero(alive <= 0.5)
    return float(times[below[0]]) if len(below) else None


def exponential(time: Floats, died: Bools) -> float:
    """Half-life of the exponential fit: ln 2 times the time lived over the deaths."""
    deaths = int(died.sum())
    return math.log(2) * float(time.sum()) / deaths if deaths else math.inf


def weibull(time: Floats, died: Bools, seed: int = 0) -> tuple[float, float] | None:
    """Shape and scale of ``S(t) = exp(-(t / scale)^shape)``; fitted on at most 4,000 tokens.

    A shape below 1 is a heavy tail: what has lived long lives on.
    """
    from scipy.stats import CensoredData, weibull_min

    if len(time) > _MOST:
        pick = np.random.default_rng(seed).choice(len(time), _MOST, replace=False)
        time, died = time[pick], died[pick]
    if int(died.sum()) < 2 or float(time.max()) <= 0:
        return None
    time = np.maximum(time, float(time[time > 0].min()) / 2)  # the fit knows no life of length 0
    shape, _, scale = weibull_min.fit(CensoredData(uncensored=time[died], right=time[~died]), floc=0)
    return float(shape), float(scale)


def half_life(time: Floats, died: Bools) -> tuple[float, str]:
    """The Kaplan-Meier median, or the exponential fit where more than half outlives the transcript."""
    found = median(time, died)
    return (found, "kaplan-meier") if found is not None else (exponential(time, died), "exponential")


def estimate(
    lives: Mapping[str, Lifetimes], clock: Clock, *, resamples: int = 200, seed: int = 0
) -> dict[str, Estimate]:
    """A half-life for each region, and under the name ``all`` for all of them together.

    Messages are drawn anew for the intervals, not tokens: those of one message live and die together.

    Raises:
        ConfigError: no tokens at all.
    """
    arrays = {
        name: (one.time.double().numpy(), one.died.numpy(), one.span.numpy())
        for name, one in lives.items()
        if len(one)
    }
    if not arrays:
        raise ConfigError(
            "the transcripts are too short to see any life end",
            option="transcripts",
            way_out="Give longer ones",
        )
    joined = tuple(np.concatenate([one[part] for one in arrays.values()]) for part in range(3))
    low, high = LIMITS[clock]

    def clamped(value: float) -> float:
        return min(max(value, low), high)

    whole = clamped(half_life(joined[0], joined[1])[0])
    found: dict[str, Estimate] = {}
    for name, (time, died, span) in {"all": joined, **arrays}.items():
        own, method = half_life(time, died)
        weight = min(1.0, len(time) / ENOUGH)

        def drawn(value: float, weight: float = weight) -> float:
            # Towards the value of all, on a scale on which twice and half are equally far.
            return math.exp(weight * math.log(clamped(value)) + (1 - weight) * math.log(whole))

        ends = [drawn(value) for value in _interval(time, died, span, resamples, seed)]
        found[name] = Estimate(
            half_life=drawn(own),
            low=ends[0],
            high=ends[1],
            n=len(time),
            deaths=int(died.sum()),
            method=method,
            exponential=exponential(time, died),
            weibull=weibull(time, died, seed),
            shrunk=weight < 1,
        )
    return found


def _interval(
    time: Floats, died: Bools, span: npt.NDArray[np.int64], resamples: int, seed: int
) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    order = np.argsort(span, kind="stable")
    _, starts = np.unique(span[order], return_index=True)
    members = np.split(order, starts[1:])
    values = []
    for _ in range(resamples):
        pick = np.concatenate([members[number] for number in rng.integers(len(members), size=len(members))])
        values.append(half_life(time[pick], died[pick])[0])
    low, high = np.quantile(values, [0.025, 0.975], method="nearest")  # infinities are values, too
    return float(low), float(high)


def to_json(found: Mapping[str, Estimate], clock: Clock) -> dict[str, Any]:
    """The regions as a table that ``--regions`` loads; infinity is None."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 3) if math.isfinite(value) else None
        return [round(one, 4) for one in value] if isinstance(value, tuple) else value

    rows = {
        name: {key: plain(value) for key, value in vars(one).items()} | {"clock": clock}
        for name, one in found.items()
    }
    return {"all": rows.pop("all"), "regions": rows}
