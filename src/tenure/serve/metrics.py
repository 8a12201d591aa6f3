"""What the server counts, in Prometheus' form.

Every series that speaks of somebody's sessions has the label ``tenant``, and a tenant is shown its own series only.
Nothing here holds a text, a session id or a span id: their number has no bound.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from tenure.version import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST

TierResult = Literal["hit", "miss", "error", "stored", "refused"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True)
class TurnRecord:
    """One answer, as metrics and traces see it. Times are seconds since the epoch.

    Args:
        tenant: whose turn it was.
        reason: why it ended: ``stop``, ``length``, ``tool_calls``, ``cancel`` or ``error``.
        arrived: when the request came.
        started: when its first token was computed on; the time before was spent in the queue.
        first: when the first token of the answer was there; None if there was none.
        finished: when the turn was over.
        prompt: tokens of the conversation before the answer.
        cached: those of them that were not computed in this turn.
        completion: tokens of the answer.
    """

    tenant: str
    reason: str
    arrived: float
    started: float
    first: float | None
    finished: float
    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True)
class Reading:
    """What one session holds now; ``state`` is ``running``, ``waiting``, ``idle`` or ``parked``."""

    tenant: str
    state: str
    resident: int
    budget: int | None
    kv_bytes: int


class Metrics:
    """Counters, gauges and histograms in a registry of their own.

    Args:
        model: shown in ``tenure_build_info``.
        read: gives what each session holds, at every scrape, from any thread.
    """

    def __init__(self, model: str, read: Callable[[], Iterable[Reading]] = tuple) -> None:
        self.registry = registry = CollectorRegistry()
        tenant = ("tenant",)
        Info("tenure_build", "Version and model.", registry=registry).info(
            {"version": __version__, "model": model}
        )
        self._tokens = Counter(
            "tenure_tokens",
            "Tokens by kind: prompt (computed), cached (of prompts, not computed again), completion.",
            (*tenant, "kind"),
            registry=registry,
        )
        self._turns = Counter(
            "tenure_turns", "Answers by finish reason.", (*tenant, "reason"), registry=registry
        )
        self._evicted = Counter(
            "tenure_evicted_slots",
            "Slots a (layer, kv head) evicted, by reason; a mean over layers.",
            (*tenant, "reason"),
            registry=registry,
        )
        self._tier_spans = Counter(
            "tenure_tier_spans",
            "Spans asked of or given to a tier, by result: hit, miss, error, stored, refused.",
            (*tenant, "tier", "result"),
            registry=registry,
        )
        self._tier_bytes = Counter(
            "tenure_tier_bytes",
            "Bytes to and from a tier.",
            (*tenant, "tier", "direction"),
            registry=registry,
        )
        self._requests = Counter(
            "tenure_http_requests",
            "HTTP requests by route and status.",
            (*tenant, "route", "status"),
            registry=registry,
        )
        self.queue = Gauge("tenure_queue", "Turns that wait for their start.", tenant, registry=registry)
        self._request_seconds = Histogram(
            "tenure_http_request_seconds",
            "Until the last byte of a reply.",
            (*tenant, "route"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._queued = Histogram(
            "tenure_queue_seconds",
            "From a request to its first forward.",
            tenant,
            buckets=_SECONDS,
            registry=registry,
        )
        self._first = Histogram(
            "tenure_first_token_seconds",
            "From a request to its first token.",
            tenant,
            buckets=_SECONDS,
            registry=registry,
        )
        self._turn = Histogram(
            "tenure_turn_seconds",
            "From a request to the end of its answer.",
            tenant,
            buckets=_SECONDS,
            registry=registry,
        )
        self._gap = Histogram(
            "tenure_token_gap_seconds",
            "Between two tokens of an answer.",
            tenant,
            buckets=_GAPS,
            registry=registry,
        )
        self._losses: dict[str, Mapping[str, float]] = {}
        registry.register(_Sessions(read))
        ProcessCollector(registry=registry)

    def turn(self, record: TurnRecord) -> None:
        """Count an answer."""
        who = record.tenant
        self._turns.labels(who, record.reason).inc()
        self._tokens.labels(who, "prompt").inc(max(0, record.prompt - record.cached))
        self._tokens.labels(who, "cached").inc(record.cached)
        self._tokens.labels(who, "completion").inc(record.completion)
        self._queued.labels(who).observe(max(0.0, record.started - record.arrived))
        self._turn.labels(who).observe(max(0.0, record.finished - record.arrived))
        if record.first is not None:
            self._first.labels(who).observe(max(0.0, record.first - record.arrived))

    def gap(self, tenant: str, seconds: float) -> None:
        """Count the time between two tokens of an answer."""
        self._gap.labels(tenant).observe(seconds)

    def request(self, tenant: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request; ``route`` is the path's pattern, never the path itself."""
        self._requests.labels(tenant, route, str(status)).inc()
        self._request_seconds.labels(tenant, route).observe(seconds)

    def losses(self, tenant: str, session: str, totals: Mapping[str, float]) -> None:
        """Count what a session has lost since the last call, from its totals by reason.

        Args:
            tenant: whose session.
            session: its id, to tell sessions apart; it is not shown.
            totals: slots evicted since the session's start, as in a memory view's ``evictions``.
        """
        before = self._losses.get(session, {})
        for reason, total in totals.items():
            if (more := total - before.get(reason, 0.0)) > 0:  # a rollback takes losses back
                self._evicted.labels(tenant, reason).inc(more)
        self._losses[session] = dict(totals)

    def forget(self, session: str) -> None:
        """A session is gone; what was counted stays."""
        self._losses.pop(session, None)

    def tier(self, tenant: str, tier: str, result: TierResult, *, spans: int = 1, size: int = 0) -> None:
        """Count traffic with a tier.

        Args:
            tenant: whose spans.
            tier: its name, such as ``host``.
            result: ``hit``, ``miss`` or ``error`` of a read, ``stored`` or ``refused`` of a write.
            spans: how many.
            size: bytes that moved.
        """
        self._tier_spans.labels(tenant, tier, result).inc(spans)
        if size:
            self._tier_bytes.labels(tenant, tier, "out" if result == "stored" else "in").inc(size)

    def render(self, tenant: str | None = None) -> bytes:
        """All series as text, or only those of one tenant."""
        return generate_latest(self.registry if tenant is None else _Only(self.registry, tenant))


class _Sessions(Collector):
    """Gauges that are read off the sessions when somebody looks."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        count: Tally[tuple[str, str]] = Tally()
        held = {name: Tally[str]() for name in ("resident", "budget", "bytes")}
        for one in self._read():
            count[one.tenant, one.state] += 1
            held["resident"][one.tenant] += one.resident
            held["budget"][one.tenant] += one.budget or one.resident
            held["bytes"][one.tenant] += one.kv_bytes
        sessions = GaugeMetricFamily("tenure_sessions", "Sessions by state.", labels=("tenant", "state"))
        for labels, number in count.items():
            sessions.add_metric(labels, number)
        yield sessions
        for name, metric, text in (
            ("resident", "tenure_resident_slots", "Slots a (layer, kv head) in use, over all sessions."),
            ("budget", "tenure_budget_slots", "Slots that may stay, over all sessions."),
            ("bytes", "tenure_kv_bytes", "Bytes allocated for caches."),
        ):
            gauge = GaugeMetricFamily(metric, text, labels=("tenant",))
            for tenant, value in held[name].items():
                gauge.add_metric((tenant,), value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        return ()


class _Only(CollectorRegistry):
    """A registry as one tenant may see it."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._inner = registry
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            samples = [one for one in metric.samples if one.labels.get("tenant") == self._tenant]
            if samples:
                shown = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                shown.samples = samples
                yield shown
