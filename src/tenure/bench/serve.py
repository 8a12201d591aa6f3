"""``tenure bench serve``: a live server, asked over HTTP.

Three measurements: how much faster eight sessions decode than one, how steady a stream is while another session's
prompt is read, and whether the turns of a long session that calls tools stay as fast as they were.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tenure.config import SessionConfig
from tenure.engine import Engine
from tenure.errors import ConfigError
from tenure.serve.config import ServeConfig
from tenure.serve.events import Event, Stepped

if TYPE_CHECKING:
    from tenure.serve.run import Listener

_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 16}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """What is measured.

    Args:
        model: a name that ``Engine.load`` takes.
        budget: slots of a session.
        chunk: tokens of a forward at most.
        sessions: at once, against one.
        decode: tokens of a stream.
        prefill: tokens of the prompt that is read beside a stream.
        tokens: length of the long session.
        result: tokens of a tool's result in it.
        repeats: long sessions, one after the other; the one in the middle is reported, and the ratio of all of them:
            machines change their pace within minutes.
        dtype: of the model.
        threads: of the engine.
    """

    model: str = "smollm2-135m"
    budget: int = 2048
    chunk: int = 2048
    sessions: int = 8
    decode: int = 128
    prefill: int = 8_000
    tokens: int = 30_000
    result: int = 300
    repeats: int = 3
    dtype: str = "auto"
    threads: int | None = None


@dataclass
class _Live:
    url: str
    model: str
    engine: Engine
    steps: list[tuple[float, Stepped]]

    def post(self, http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        reply = http.post("/chat/completions", json={"model": self.model, "messages": messages, **fields})
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=600)

    def words(self, tokens: int, seed: int) -> str:
        """A text of about so many tokens."""
        lines = (
            f"Line {number} of part {seed} says value {number * 7919 % 1009}." for number in range(tokens)
        )
        ids = self.engine.tokenizer("\n".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
        return str(self.engine.tokenizer.decode(ids[:tokens]))


@contextmanager
def _serving(bench: ServeBench) -> Iterator[_Live]:
    from tenure.serve.app import create_app
    from tenure.serve.run import Listener

    options: dict[str, Any] = {"dtype": bench.dtype}
    engine = Engine.load(bench.model, threads=bench.threads, **options)
    config = ServeConfig(
        port=0,
        resident=bench.sessions + 2,
        streams=bench.sessions + 2,
        streams_per_key=2 * bench.sessions + 4,
        session=SessionConfig(budget=bench.budget, chunk=bench.chunk),
    )
    app = create_app(engine, config)
    steps: list[tuple[float, Stepped]] = []

    def note(event: Event) -> None:
        if isinstance(event, Stepped):
            steps.append((time.perf_counter(), event))

    app.state.server.bus.listen(note)
    listener: Listener = Listener(app, config)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        while not listener.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.02)
        port = listener.servers[0].sockets[0].getsockname()[1]
        yield _Live(f"http://127.0.0.1:{port}/v1", engine.name, engine, steps)
    finally:
        listener.should_exit = True
        thread.join()


PARTS = ("decode", "steady", "long")
_TURN = 128
"""More than a turn of the long session has beside its tool's result."""


def check(bench: ServeBench, parts: tuple[str, ...]) -> None:
    """Refuse what cannot be measured, before a server is started.

    Raises:
        ConfigError: an unknown part, or a long session that has hardly a turn past its budget.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"{unknown[0]!r} is not known", option="parts", way_out="Known: " + ",".join(PARTS))
    least = bench.budget + 2 * (bench.result + _TURN)
    if "long" in parts and bench.tokens < least:
        raise ConfigError(
            f"{bench.tokens:,} tokens have no two turns past a budget of {bench.budget:,}",
            option="tokens",
            way_out=f"Give {least:,} or more, or a smaller budget",
        )


def run(bench: ServeBench, report: Callable[[str], None], parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Measure; see the module."""
    result: dict[str, Any] = {}
    with _serving(bench) as live, live.client() as http:
        live.post(http, [{"role": "user", "content": "Warm up."}], max_tokens=8)
        if "decode" in parts:
            report("decoding, one session and several")
            result |= _decode(live, bench)
        if "steady" in parts:
            report("a stream beside a long prompt")
            result |= _steady(live, bench)
        if "long" in parts:
            report("a long session with tools")
            runs = [_long(live, bench, number, report) for number in range(bench.repeats)]
            runs.sort(key=lambda one: float(one["turn_ratio"]))
            result |= runs[(len(runs) - 1) // 2] | {"turn_ratios": [one["turn_ratio"] for one in runs]}
    return result


def _decode(live: _Live, bench: ServeBench) -> dict[str, Any]:
    rates: dict[int, float] = {}
    for count in (1, bench.sessions):
        live.steps.clear()

        def ask(number: int, count: int = count) -> None:
            with live.client() as http:
                text = f"Session {count}.{number}: tell a long story about the number {number}."
                messages = [{"role": "user", "content": text}]
                live.post(http, messages, max_tokens=bench.decode, ignore_eos=True)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(ask, range(count)))
        full = [at for at, step in live.steps if step.decode == count and not step.prefill]
        if len(full) < 2:
            raise ConfigError(
                f"{bench.decode} tokens are too few for {count} sessions to decode together",
                option="decode",
                way_out="Give more",
            )
        rates[count] = count * (len(full) - 1) / (full[-1] - full[0])
    one, many = rates[1], rates[bench.sessions]
    return {
        "decode_tokens_per_s": {"1": round(one, 1), str(bench.sessions): round(many, 1)},
        "concurrency_ratio": round(many / one, 2),
    }


def _gaps(
    live: _Live, tokens: int, text: str, times: list[float], enough: threading.Event | None = None
) -> None:
    body = {
        "model": live.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with live.client() as http, http.stream("POST", "/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter())
            if enough is not None and enough.is_set():
                return


def _steady(live: _Live, bench: ServeBench) -> dict[str, Any]:
    quiet: list[float] = []
    _gaps(live, 3 * bench.decode, "Tell a story about a quiet morning.", quiet)
    prompt = live.words(bench.prefill, 1)
    times: list[float] = []
    enough = threading.Event()
    # Longer than the prompt takes: the gaps that count lie between its arrival and its first token.
    stream = threading.Thread(
        target=_gaps, args=(live, 100 * bench.decode, "Tell a story about a busy morning.", times, enough)
    )
    stream.start()
    while len(times) < 16:
        time.sleep(0.01)
    begun = time.perf_counter()
    with live.client() as http:
        live.post(http, [{"role": "user", "content": prompt}], max_tokens=1)
    ended = time.perf_counter()
    enough.set()
    busy = [b - a for a, b in pairwise(times) if a >= begun and b <= ended]
    stream.join()
    before = [b - a for a, b in pairwise(quiet)]
    first, second = _p95(before), _p95(busy)
    return {
        "quiet_p95_ms": round(1e3 * first, 2),
        "busy_p95_ms": round(1e3 * second, 2),
        "busy_gaps": len(busy),
        "inter_token_ratio": round(second / first, 2),
        "prefill_tokens_per_s": round(bench.prefill / (ended - begun), 1),
    }


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else float("nan")


def _long(live: _Live, bench: ServeBench, number: int, report: Callable[[str], None]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Session {number}: you read files and answer questions about them."},
        {"role": "user", "content": "Read all files, one after the other."},
    ]
    turns: list[dict[str, Any]] = []
    process = psutil.Process()
    with live.client() as http:
        while not turns or turns[-1]["prompt"] < bench.tokens:
            begun = time.perf_counter()
            answer = live.post(
                http,
                messages,
                tools=[_TOOL],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=64,
            )
            seconds = time.perf_counter() - begun
            usage, message = answer["usage"], answer["choices"][0]["message"]
            turns.append(
                {
                    "seconds": seconds,
                    "prompt": usage["prompt_tokens"],
                    "cached": usage["prompt_tokens_details"]["cached_tokens"],
                    "completion": usage["completion_tokens"],
                    "resident": usage["tenure"]["resident"],
                    "rss": process.memory_info().rss,
                }
            )
            messages.append(message)
            for call in message.get("tool_calls", []):
                text = live.words(bench.result, len(turns))
                messages.append({"role": "tool", "content": text, "tool_call_id": call["id"]})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": live.words(bench.result, len(turns))})
            report(f"long session {number + 1} with tools: {turns[-1]['prompt']:,} tokens")
    return _summary(turns, bench)


def _summary(turns: list[dict[str, Any]], bench: ServeBench) -> dict[str, Any]:
    past = [turn for turn in turns if turn["prompt"] > bench.budget][1:]
    first, last = past[:10], past[-10:]

    def median(part: list[dict[str, Any]], name: str) -> float:
        return float(statistics.median(turn[name] for turn in part))

    reused = [turn["cached"] >= before["prompt"] for before, turn in pairwise(turns)]
    return {
        "turns": len(turns),
        "session_tokens": turns[-1]["prompt"],
        "turn_seconds": {
            "first": round(median(first, "seconds"), 3),
            "last": round(median(last, "seconds"), 3),
        },
        "turn_ratio": round(median(last, "seconds") / median(first, "seconds"), 3),
        "turn_ratio_of_means": round(
            statistics.fmean(turn["seconds"] for turn in last)
            / statistics.fmean(turn["seconds"] for turn in first),
            3,
        ),
        "computed_tokens": {
            "first": round(statistics.fmean(t["prompt"] - t["cached"] for t in first)),
            "last": round(statistics.fmean(t["prompt"] - t["cached"] for t in last)),
        },
        "cached_from_the_turn_before": sum(reused) / max(1, len(reused)),
        "resident_slots": max(turn["resident"] for turn in turns),
        "rss_mb": {"first": round(first[0]["rss"] / 1e6), "last": round(last[-1]["rss"] / 1e6)},
    }


def config_json(bench: ServeBench) -> dict[str, Any]:
    """For the record."""
    return asdict(bench)
