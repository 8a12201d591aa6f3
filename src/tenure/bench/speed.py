"""``tenure bench speed``: filling and decoding against plain transformers, and flatness over a long session.

Everything runs in one process on the same weights. Tenure and transformers take turns, so that a slow minute of the
machine hits both; medians are reported.
"""

from __future__ import annotations

import copy
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psutil
import torch

from tenure.config import EngineConfig
from tenure.engine import Engine, compute_dtype
from tenure.errors import ConfigError
from tenure.models.sources import resolve
from tenure.plan import Plan, Step
from tenure.policies import POLICIES
from tenure.session import Session
from tenure.timing import now

Progress = Callable[[str], None]

PLANNED = ("foresight", "auto")
"""Policies that are told a plan where their overhead is measured."""


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """What is measured.

    Args:
        model: by name.
        budget: slots of the session, and tokens in transformers' cache.
        chunk: tokens a forward.
        repeats: of each measurement, at least 5.
        tokens: length of the long session.
        policies: whose overhead is measured, ``recency`` among them; all by default.
        dtype: see :class:`~tenure.config.EngineConfig`.
        weights: Tenure's, see there; transformers' stay as loaded.
        device: a torch device.
        seed: of the token ids.
    """

    model: str
    budget: int = 2048
    chunk: int = 2048
    repeats: int = 7
    tokens: int = 100_000
    policies: tuple[str, ...] = ()
    dtype: str = "auto"
    weights: Literal["auto", "int8"] = "auto"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        EngineConfig(dtype=self.dtype, device=self.device, weights=self.weights)  # checks them
        if self.policies and (unknown := set(self.policies) - set(_evicting())):
            raise ConfigError(
                f"{sorted(unknown)[0]!r} is not known",
                option="policies",
                way_out="Known: " + ", ".join(_evicting()),
            )
        if self.policies and "recency" not in self.policies:
            raise ConfigError("others are held against recency", option="policies", way_out="Add it")


def _evicting() -> list[str]:
    return [name for name in POLICIES if name != "full"]


class PeakMemory:
    """Most memory in use while the block runs.

    Args:
        device: on CUDA what torch has allocated there counts, else the resident set of the process, sampled every 5 ms.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._largest = 0

    @property
    def bytes(self) -> int:
        """So far, in bytes."""
        return torch.cuda.max_memory_allocated(self._device) if self._cuda else self._largest

    def __enter__(self) -> PeakMemory:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._cuda:
            self._stop.set()
            self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(0.005):
            self._largest = max(self._largest, process.memory_info().rss)


class Bench:
    """One model, twice in memory: stock and under Tenure."""

    def __init__(self, config: SpeedConfig, note: Progress) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        self.note = note
        dtype = compute_dtype(config.dtype, torch.device(config.device))
        path = resolve(config.model).path
        self.stock = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(config.device).eval()
        engine_config = EngineConfig(dtype=config.dtype, device=config.device, weights=config.weights)
        self.engine = Engine(copy.deepcopy(self.stock), config=engine_config, name=config.model)
        self._ids = torch.Generator().manual_seed(config.seed)

    def ids(self, count: int) -> list[int]:
        """Random token ids."""
        high = self.stock.config.vocab_size
        return torch.randint(100, high, (count,), generator=self._ids).tolist()

    def session(self, **options: Any) -> Session:
        """A session at its budget."""
        session = self.engine.session(budget=self.config.budget, chunk=self.config.chunk, **options)
        session.append_ids(self.ids(self.config.budget + self.config.chunk))
        return session

    def time(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
        """Seconds of one call, the device's work included."""
        device = torch.device(self.config.device)
        start = now(device)
        call(*arguments, **options)
        return now(device) - start

    @torch.inference_mode()
    def stock_cache(self) -> Any:
        """A DynamicCache that holds ``budget`` tokens."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.stock.config)
        self.stock(torch.tensor([self.ids(self.config.budget)], device=self.stock.device), **_cache(cache))
        return cache

    def fill(self) -> dict[str, float]:
        """Tokens/s of one chunk: Tenure with and without statistics, and transformers."""
        arms = {name: self.session(policy=name) for name in ("h2o", "recency")}
        kept = self.stock_cache()
        seconds: dict[str, list[float]] = {"h2o": [], "recency": [], "transformers": []}
        for turn in range(self.config.repeats + 1):
            ids = self.ids(self.config.chunk)
            for name, session in arms.items():
                seconds[name].append(self.time(session.append_ids, ids))
            cache, batch = copy.deepcopy(kept), torch.tensor([ids], device=self.stock.device)
            with torch.inference_mode():
                seconds["transformers"].append(
                    self.time(self.stock, batch, logits_to_keep=1, **_cache(cache))
                )
            self.note(f"fill {turn}/{self.config.repeats}")
        speed = {name: self.config.chunk / statistics.median(times[1:]) for name, times in seconds.items()}
        return {
            "fill_tokens_s": speed["h2o"],
            "fill_plain_tokens_s": speed["recency"],
            "fill_transformers_tokens_s": speed["transformers"],
            "fill_ratio": speed["h2o"] / speed["transformers"],
            "fill_ratio_plain": speed["recency"] / speed["transformers"],
        }

    def decode(self, tokens: int = 16) -> dict[str, float]:
        """Tokens/s of decoding with ``budget`` slots, statistics on: Tenure and transformers."""
        session = self.session(policy="h2o")
        kept = self.stock_cache()
        seconds: dict[str, list[float]] = {"tenure": [], "transformers": []}
        for turn in range(self.config.repeats + 1):
            ids = self.ids(tokens)
            seconds["tenure"].append(self.time(session.force, ids) / tokens)
            cache = copy.deepcopy(kept)
            seconds["transformers"].append(self.time(self._decode_stock, cache, ids) / tokens)
            self.note(f"decode {turn}/{self.config.repeats}")
        speed = {name: 1 / statistics.median(times[1:]) for name, times in seconds.items()}
        return {
            "decode_tokens_s": speed["tenure"],
            "decode_transformers_tokens_s": speed["transformers"],
            "decode_ratio": speed["tenure"] / speed["transformers"],
        }

    @torch.inference_mode()
    def _decode_stock(self, cache: Any, ids: list[int]) -> None:
        for token in ids:
            self.stock(torch.tensor([[token]], device=self.stock.device), **_cache(cache))

    def long(self) -> dict[str, Any]:
        """One session of ``tokens`` tokens: cache size all along, memory early and late, time a chunk late over early.

        For the times another session of about 10,000 tokens takes turns with the long one, so that a slow minute of the
        machine hits both, however long the long one took.
        """
        options: dict[str, Any] = {
            "budget": self.config.budget,
            "chunk": self.config.chunk,
            "policy": "h2o",
        }
        session = self.engine.session(**options)
        chunk = self.config.chunk
        early = max(2, round(10_000 / chunk))
        edge = max(early, round(20_000 / chunk))
        chunks = max(edge + 1, self.config.tokens // chunk)
        sizes = set()
        with PeakMemory(torch.device(self.config.device)) as peak:
            peak_early = 0
            for number in range(chunks):
                session.append_ids(self.ids(chunk))
                sizes.add(session.stats().kv_bytes)
                if number + 1 == edge:
                    peak_early = peak.bytes
                if number % 8 == 0:
                    self.note(f"long session {len(session):,} of {chunks * chunk:,} tokens")
        result: dict[str, Any] = {
            "long_tokens": len(session),
            "kv_bytes": sizes.pop() if len(sizes) == 1 else sorted(sizes),
            "kv_bytes_constant": not sizes,
            "full_kv_bytes": session.stats().full_kv_bytes,
            "peak_bytes_20k": peak_early,
            "peak_bytes_end": peak.bytes,
            "peak_ratio": peak.bytes / peak_early,
        }
        young = self.engine.session(**options)
        young.append_ids(self.ids((early - 1) * chunk))
        seconds: dict[str, list[float]] = {"early": [], "late": []}
        for turn in range(self.config.repeats):
            ids = self.ids(chunk)
            seconds["early"].append(self.time(young.append_ids, ids))
            seconds["late"].append(self.time(session.append_ids, ids))
            self.note(f"a chunk late and early {turn + 1}/{self.config.repeats}")
        return {
            **result,
            "chunk_seconds_10k": statistics.median(seconds["early"]),
            "chunk_seconds_end": statistics.median(seconds["late"]),
            **_over("flatness", seconds["late"], seconds["early"]),
        }

    def policy_overhead(self) -> dict[str, float]:
        """Time of a session of 3 chunks and 64 decode steps under each policy, over that of recency in the same round.

        Medians over the rounds; a round begins with another policy each time. Policies in ``PLANNED`` are told which
        spans each round reads, of the ones that were first and of the round before. PACE, foresight with bounded
        positions, is also held against H2O.
        """
        names = self.config.policies or tuple(_evicting())
        arms = {(name, "logical"): self._told(name, "logical") for name in names}
        pace, h2o = ("foresight", "bounded"), ("h2o", "logical")
        if h2o in arms and ("foresight", "logical") in arms:
            arms[pace] = self._told(*pace)
        seconds: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
        piece = max(1, self.config.budget // 8)

        def play(session: Session, turn: int, ids: list[int]) -> None:
            if session.plan.steps:
                session.plan.begin(f"round-{turn}")
            for number, start in enumerate(range(0, len(ids) - 64, piece)):
                stop = min(start + piece, len(ids) - 64)
                session.queue_ids(ids[start:stop], span=f"round-{turn}-{number}")
            self.engine.drain([session])
            session.force(ids[-64:])

        order = list(arms)
        for turn in range(self.config.repeats):
            ids = self.ids(3 * self.config.chunk + 64)
            for place in range(len(order)):
                arm = order[(turn + place) % len(order)]
                seconds[arm].append(self.time(play, arms[arm], turn, ids))
            self.note(f"policies {turn + 1}/{self.config.repeats}")
        base = seconds["recency", "logical"]
        overhead = {name: statistics.median(_ratios(seconds[name, "logical"], base)) for name in names}
        return overhead | (_over("pace_over_h2o", seconds[pace], seconds[h2o]) if pace in arms else {})

    def _told(self, policy: str, positions: str) -> Session:
        """A session at its budget, its first quarter a span that every round will read."""
        rounds = range(self.config.repeats)
        plan = Plan(
            Step(f"round-{n}", reads=("first", f"round-{n - 1}-0") if n else ("first",)) for n in rounds
        )
        session = self.engine.session(
            budget=self.config.budget,
            chunk=self.config.chunk,
            policy=policy,
            positions=positions,
            plan=plan if policy in PLANNED else None,
        )
        ids = self.ids(self.config.budget + self.config.chunk)
        session.append_ids(ids[: self.config.budget // 4], span="first")
        session.append_ids(ids[self.config.budget // 4 :])
        return session


def _ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Of each round."""
    return [one / other for one, other in zip(seconds, base, strict=True)]


def _over(name: str, seconds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Median of the ratios of rounds under a name, with their quartiles."""
    low, middle, high = statistics.quantiles(_ratios(seconds, base))
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _cache(cache: Any) -> dict[str, Any]:
    """The cache argument under the name that this version of transformers has."""
    from inspect import signature

    from transformers import LlamaModel

    name = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


def run(config: SpeedConfig, note: Progress, *, parts: tuple[str, ...]) -> dict[str, Any]:
    """Measure the named parts (``fill``, ``decode``, ``long``, ``policies``)."""
    bench = Bench(config, note)
    result: dict[str, Any] = {"model": config.model, "dtype": str(bench.stock.dtype).removeprefix("torch.")}
    if "fill" in parts:
        result |= bench.fill()
    if "decode" in parts:
        result |= bench.decode()
    if "policies" in parts:
        result["policy_overhead"] = bench.policy_overhead()
    if "long" in parts:
        # The stock model is not part of a user's memory.
        bench.stock = bench.stock.to("meta")
        result |= bench.long()
    return result


def config_json(config: SpeedConfig) -> dict[str, Any]:
    """The config as plain values."""
    return asdict(config)
