"""What a span's way back costs: from each tier against the plain copy of its bytes, and what a turn waits for it."""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from tenure.tiers.archive import SpanArchive
from tenure.tiers.codec import decode, encode
from tenure.tiers.record import SpanRecord
from tenure.tiers.spec import CODECS, TierSpec
from tenure.tiers.stack import TierStack
from tenure.tiers.valkey import ValkeyTier

_READS = 4
"""Spans that a step reads in the measurement of the stall."""

_HELD = 6
"""Results of the latest calls that are kept."""

_BEHIND = 256
"""Tokens behind the span whose predictions are compared."""


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """What is measured; the defaults are a span of 1,024 tokens of qwen2.5-coder-0.5b.

    Args:
        tokens: of the span.
        layers: of the model.
        kv_heads: of each layer.
        head_dim: of each head.
        dtype: of keys and values.
        repeats: interleaved; medians are reported, and the best of each for machines that others use too.
        decode_ms: length of the turn that decodes while the next step's spans are read ahead.
        valkey: URL of a server; one is started if it is None.
        model: by name; codecs are then measured on its own keys and values, and by what they change in its answers.
        seed: of the numbers.
    """

    tokens: int = 1024
    layers: int = 24
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "bfloat16"
    repeats: int = 15
    decode_ms: float = 1000.0
    valkey: str | None = None
    model: str | None = None
    seed: int = 0


def run(config: TiersConfig, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All measurements."""
    with tempfile.TemporaryDirectory(prefix="tenure-bench-") as folder:
        note("codecs")
        codecs = {codec: _codec(_record(config, 0), codec, config.repeats) for codec in CODECS}
        restore, stall = {}, {}
        for kind in ("host", "disk", "valkey"):
            note(f"restore from {kind}")
            restore[kind] = _restore(config, kind, Path(folder) / kind)
        for kind in ("disk", "valkey"):
            note(f"stall on {kind}")
            stall[kind] = _stall(config, kind, Path(folder) / f"{kind}-stall")
    result = {"span_bytes": _record(config, 0).nbytes, "restore": restore, "stall": stall, "codecs": codecs}
    if config.model is not None:
        note(f"codecs on {config.model}")
        result["model"] = _on_model(config.model, config.tokens, config.repeats)
    return result


def _record(config: TiersConfig, seed: int) -> SpanRecord:
    draw = torch.Generator().manual_seed(config.seed + seed)
    shape = (config.layers, config.kv_heads, config.tokens, config.head_dim)
    dtype: torch.dtype = getattr(torch, config.dtype)
    # A head's keys share a direction and have a few strong channels, as real ones do; that matters to int8 and zstd.
    mean = torch.randn(shape[0], shape[1], 1, shape[3], generator=draw) * 2
    keys = (torch.randn(shape, generator=draw) + mean).to(dtype)
    values = (torch.randn(shape, generator=draw) * 0.5).to(dtype)
    ids = torch.randint(0, 50_000, (config.tokens,), generator=draw).tolist()
    score = torch.rand(config.layers, config.tokens, generator=draw)
    return SpanRecord(f"span-{seed}", 0, ids, keys, values, score)


def _stack(config: TiersConfig, kind: str, folder: Path, host: int) -> TierStack:
    specs = [TierSpec(kind="host", capacity=host)]
    if kind == "disk":
        specs.append(TierSpec(kind="disk", where=str(folder), capacity=8 << 30, timeout=30))
    elif kind == "valkey":
        specs.append(TierSpec(kind="valkey", where=config.valkey or "", ttl=3600, timeout=30))
    return TierStack(specs, "bench")


def _restore(config: TiersConfig, kind: str, folder: Path) -> dict[str, float]:
    """From the tier into memory, checked; for the host into the rows of a slab, as there is nothing else to do.

    ``direct`` is the same without the hand-over to the tier's thread, which costs more where cores are short, and its
    ratio of processor time is the one that other work on the machine changes least.
    """
    record = _record(config, 0)
    stack = _stack(config, kind, folder, 1 if kind != "host" else 2 * record.nbytes)
    try:
        archive = SpanArchive(stack)
        archive.put(record)
        stack.flush()
        slab = [
            torch.zeros(config.layers, config.kv_heads, 2 * config.tokens, config.head_dim, dtype=x.dtype)
            for x in (record.keys, record.values)
        ]

        def into_slab(found: SpanRecord) -> None:
            for target, new in zip(slab, (found.keys, found.values), strict=True):
                target[:, :, : config.tokens] = new

        def restore() -> SpanRecord:
            found = archive.get(record.span)
            if found is None:
                raise RuntimeError(f"{kind} has lost the span")
            if kind == "host":
                into_slab(found)
            return found

        plain = _plain(kind, stack, record, folder, slab)

        def direct() -> SpanRecord:
            if kind == "host":
                return restore()
            tier = stack.stores[0].tier
            key = archive.keys[record.span]
            blob = tier.read(key)
            if blob is None:
                raise RuntimeError(f"{kind} has lost the span")
            return decode(blob, key, "bench")

        ours, alone, theirs = _interleaved([restore, direct, plain], config.repeats)
        found = archive.get(record.span) or record
        (splice,) = _interleaved([lambda: into_slab(found)], config.repeats)
        mine, other, size = statistics.median(ours), statistics.median(theirs), record.nbytes
        return {
            "ms": 1e3 * mine,
            "mb_per_s": size / 1e6 / mine,
            "plain_ms": 1e3 * other,
            "plain_mb_per_s": size / 1e6 / other,
            "ratio": mine / other,
            "direct_ms": 1e3 * statistics.median(alone),
            "direct_ratio": statistics.median(alone) / other,
            "direct_cpu_ratio": _cpu(direct, config.repeats) / _cpu(plain, config.repeats),
            "best_ms": 1e3 * min(ours),
            "best_plain_ms": 1e3 * min(theirs),
            "best_ratio": min(ours) / min(theirs),
            "into_slab_ms": 1e3 * statistics.median(splice),
        }
    finally:
        stack.close()


def _plain(
    kind: str, stack: TierStack, record: SpanRecord, folder: Path, slab: list[Tensor]
) -> Callable[[], object]:
    """The copy of the same bytes without any of ours: memcpy, a file read, one GET."""
    flat = torch.cat([record.keys.flatten(), record.values.flatten()])
    if kind == "host":
        target = torch.empty_like(flat)
        return lambda: target.copy_(flat)
    data = flat.view(torch.uint8).numpy().tobytes()
    if kind == "disk":
        path = folder / "plain"
        path.write_bytes(data)
        return path.read_bytes
    tier = stack.stores[0].tier
    if not isinstance(tier, ValkeyTier):
        raise TypeError(f"{tier.name} is no Valkey tier")
    client = tier.client
    client.set("tenure:bench:plain", data, ex=600)
    return lambda: client.get("tenure:bench:plain")


def _stall(config: TiersConfig, kind: str, folder: Path) -> dict[str, float]:
    """How long a turn waits for the spans that its step reads, with and without reading ahead."""
    records = [_record(config, seed) for seed in range(_READS)]
    stack = _stack(config, kind, folder, sum(record.nbytes for record in records))
    work = torch.randn(512, 512)
    try:
        archive = SpanArchive(stack)
        for record in records:
            archive.put(record)
        names = [record.span for record in records]
        _push_out(stack, config)
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * max(3, config.repeats // 3)):
            ahead = number % 2 == 0
            _push_out(stack, config)
            if ahead:
                archive.prefetch(names)
            until = perf_counter() + config.decode_ms / 1e3
            while perf_counter() < until:
                work @ work  # the turn before decodes
            start = perf_counter()
            if not ahead:
                archive.prefetch(names)  # as a fetch of several spans does
            if any(archive.get(name) is None for name in names):
                raise RuntimeError(f"{kind} has lost a span")
            times[ahead].append(perf_counter() - start)
        return {
            "spans": float(_READS),
            "with_prefetch_ms": 1e3 * statistics.median(times[True]),
            "with_prefetch_most_ms": 1e3 * max(times[True]),
            "without_ms": 1e3 * statistics.median(times[False]),
        }
    finally:
        stack.close()


def _push_out(stack: TierStack, config: TiersConfig) -> None:
    """Fill host memory with other records, so that the ones of interest are in the store alone."""
    other = _record(config, 999)
    for number in range(_READS):
        stack.put(f"other-{number}", other)
    stack.flush()


def _on_model(name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Codecs on a model's own keys and values: size, error, and the next tokens behind a span that came back."""
    from tenure.engine import Engine

    engine = Engine.load(name)
    text = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text(encoding="utf-8")
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"][: tokens + _BEHIND]
    session = engine.session(policy="full", positions="logical")
    session.append_ids(ids[:tokens], span="span")
    keys, values = session.memory.rows.copy(0, tokens)
    record = SpanRecord("span", 0, ids[:tokens], keys, values, session.memory.ledger.score[:, :tokens])
    want = session.fork().feed(ids[tokens:]).log_softmax(-1)
    found: dict[str, Any] = {}
    for codec in CODECS:
        fork = session.fork()
        back = decode(encode("k", record, "bench", codec), "k", "bench")
        fork.memory.rows.fill(back.keys, back.values)
        got = fork.feed(ids[tokens:]).log_softmax(-1)
        found[codec] = {
            **_codec(record, codec, repeats),
            "kl": (want.exp() * (want - got)).sum(-1).mean().item(),
            "same_top": (want.argmax(-1) == got.argmax(-1)).float().mean().item(),
        }
    return found


def _codec(record: SpanRecord, codec: str, repeats: int) -> dict[str, float]:
    """Size and error of a form of storage, and how long it takes to write and to read."""
    blob = encode("k", record, "bench", codec)
    again = decode(blob, "k", "bench")
    pack, unpack = _interleaved(
        [lambda: encode("k", record, "bench", codec), lambda: decode(blob, "k", "bench")],
        max(3, repeats // 3),
    )
    return {
        "bytes": float(blob.nbytes),
        "share": blob.nbytes / record.nbytes,
        "key_error": _error(again.keys, record.keys),
        "value_error": _error(again.values, record.values),
        "encode_ms": 1e3 * statistics.median(pack),
        "decode_ms": 1e3 * statistics.median(unpack),
    }


def _error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of the numbers."""
    return ((got.float() - want.float()).square().mean() / want.float().square().mean()).sqrt().item()


def _interleaved(calls: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each call, taken in turns after one run to warm up.

    Results are held for a while, as spans that come back are: so each call fills memory of its own.
    """
    times: list[list[float]] = [[] for _ in calls]
    held: deque[object] = deque(maxlen=_HELD)
    for number in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            start = perf_counter()
            held.append(call())
            if number:
                taken.append(perf_counter() - start)
    return times


def _cpu(call: Callable[[], object], repeats: int) -> float:
    """Median processor seconds of a call."""
    times = []
    held: deque[object] = deque(maxlen=_HELD)
    for _ in range(repeats):
        start = process_time()
        held.append(call())
        times.append(process_time() - start)
    return statistics.median(times)
