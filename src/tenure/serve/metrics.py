"""What the server counts, in Prometheus' form: a listener of its events.

Every series that speaks of somebody's sessions has the label ``tenant``, and a tenant is shown its own series only.
Nothing here holds a text, a session id or a span id: their number has no bound.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from tenure.serve.events import (
    Answered,
    Event,
    Evicted,
    Refused,
    SessionChanged,
    Stepped,
    Traffic,
    TurnEnded,
    TurnStarted,
)
from tenure.version import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True)
class Reading:
    """What one session holds now; ``state`` is as in ``/v1/sessions``."""

    tenant: str
    state: str
    resident: int = 0
    budget: int | None = None
    kv_bytes: int = 0


class Metrics:
    """Counters and histograms in a registry of their own, fed by a :class:`~tenure.serve.events.Bus`.

    Args:
        model: shown in ``tenure_build_info``.
    """

    def __init__(self, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        Info("tenure_build", "Version and model.", registry=registry).info(
            {"version": __version__, "model": model}
        )
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tenure_{name}", text, labels, registry=registry)

        def times(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"tenure_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        self._tokens = counter(
            "tokens",
            "Tokens by kind: prompt (computed), cached (of prompts, not computed again), completion.",
            "tenant",
            "kind",
        )
        self._turns = counter("turns", "Answers by finish reason.", "tenant", "reason")
        self._starts = counter("turn_starts", "Answers by how their session was found.", "tenant", "how")
        self._changes = counter("session_changes", "Sessions opened, parked, ...", "tenant", "change")
        self._evicted = counter(
            "evicted_slots", "Slots evicted by reason, summed over a ledger's layers.", "tenant", "reason"
        )
        self._tier = counter(
            "tier_operations",
            "Reads (hit, miss, error) and writes (stored, error) of a tier.",
            "tenant",
            "tier",
            "direction",
            "outcome",
        )
        self._tier_bytes = counter(
            "tier_bytes", "Bytes out to a tier and in from it.", "tenant", "tier", "direction"
        )
        self._refused = counter(
            "refused", "Requests refused, by status and code.", "tenant", "status", "code"
        )
        self._requests = counter(
            "http_requests", "Responses by route and status.", "tenant", "method", "route", "status"
        )
        self._forwarded = counter("forward_tokens", "Tokens computed: of prompts, of answers.", "kind")

        self._queued = times("queue", "From a request to the start of its turn.", "tenant")
        self._first = times("first_token", "From a request to its first token.", "tenant")
        self._turn = times("turn", "From a request to the end of its answer.", "tenant")
        self._gap = times("token_gap", "Between two tokens of an answer.", "tenant", buckets=_GAPS)
        self._tier_time = times("tier", "Of an operation on a tier.", "tenant", "tier", "direction")
        self._request = times("http_request", "Until the end of a response.", "tenant", "route")
        self._forward = times("forward", "Of one forward of the engine.", buckets=_GAPS)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        who = event.tenant
        match event:
            case TurnStarted():
                self._starts.labels(who, event.how).inc()
                self._queued.labels(who).observe(event.queued)
            case TurnEnded():
                self._end(event)
            case Stepped():
                self._forward.observe(event.seconds)
                self._forwarded.labels("prompt").inc(event.prefill)
                self._forwarded.labels("completion").inc(event.decode)
            case Evicted():
                self._evicted.labels(who, event.reason).inc(event.slots)
            case Traffic():
                self._tier.labels(who, event.tier, event.direction, event.outcome).inc()
                self._tier_bytes.labels(who, event.tier, event.direction).inc(event.nbytes)
                self._tier_time.labels(who, event.tier, event.direction).observe(event.seconds)
            case SessionChanged():
                self._changes.labels(who, event.change).inc()
            case Refused():
                self._refused.labels(who, str(event.status), event.code).inc()
            case Answered():
                self._requests.labels(who, event.method, event.route, str(event.status)).inc()
                self._request.labels(who, event.route).observe(event.seconds)

    def _end(self, event: TurnEnded) -> None:
        who = event.tenant
        self._turns.labels(who, event.reason).inc()
        self._tokens.labels(who, "prompt").inc(max(0, event.prompt_tokens - event.cached_tokens))
        self._tokens.labels(who, "cached").inc(event.cached_tokens)
        self._tokens.labels(who, "completion").inc(event.completion_tokens)
        self._turn.labels(who).observe(event.seconds)
        if event.first_token is not None:
            self._first.labels(who).observe(event.first_token)
        gap = self._gap.labels(who)
        for seconds in event.gaps:
            gap.observe(seconds)

    def render(
        self,
        readings: Iterable[Reading] = (),
        *,
        waiting: int = 0,
        tiers: Iterable[Mapping[str, Any]] = (),
        tenant: str | None = None,
    ) -> bytes:
        """All series as text, or only those of one tenant.

        Args:
            readings: what each session holds now.
            waiting: requests in the queue, over all tenants.
            tiers: statistics of each tier, as a :class:`~tenure.tiers.stack.TierStack` has them; of no tenant.
            tenant: whose series; None shows everybody's and those of the process.
        """
        now = [*_gauges(readings, waiting), *_tiers(tiers)]
        return generate_latest(_Shown([*self.registry.collect(), *now], tenant))


def _gauges(readings: Iterable[Reading], waiting: int) -> Iterator[Metric]:
    count: Tally[tuple[str, str]] = Tally()
    held = {name: Tally[str]() for name in ("resident_slots", "budget_slots", "kv_bytes")}
    for one in readings:
        count[one.tenant, one.state] += 1
        held["resident_slots"][one.tenant] += one.resident
        held["budget_slots"][one.tenant] += one.budget or one.resident
        held["kv_bytes"][one.tenant] += one.kv_bytes
    yield GaugeMetricFamily("tenure_queue", "Requests that wait for their turn.", value=waiting)
    sessions = GaugeMetricFamily("tenure_sessions", "Sessions by state.", labels=("tenant", "state"))
    for labels, number in count.items():
        sessions.add_metric(labels, number)
    yield sessions
    texts = {
        "resident_slots": "Slots a (layer, kv head) in use, over the sessions in memory.",
        "budget_slots": "Slots that may stay, over the sessions in memory.",
        "kv_bytes": "Bytes allocated for caches.",
    }
    for name, text in texts.items():
        gauge = GaugeMetricFamily(f"tenure_{name}", text, labels=("tenant",))
        for tenant, value in held[name].items():
            gauge.add_metric((tenant,), value)
        yield gauge


def _tiers(tiers: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Counters of each tier by what it is, never by where: that may be a path or an address with a password."""
    events = CounterMetricFamily(
        "tenure_tier_events",
        "What tiers of spans counted: hits, misses, errors, ...",
        labels=("tier", "event"),
    )
    size = GaugeMetricFamily("tenure_tier_nbytes", "Bytes in a tier, where it is known.", labels=("tier",))
    for tier in tiers:
        kind = str(tier["tier"]).partition(":")[0]
        for name, value in tier.items():
            if name == "nbytes":
                size.add_metric((kind,), value)
            elif name not in ("tier", "entries", "capacity"):
                events.add_metric((kind, name.replace(" ", "_")), value)
    yield events
    yield size


class _Shown(CollectorRegistry):
    """Metrics as one tenant may see them, in the form that the text writer takes."""

    def __init__(self, metrics: Iterable[Metric], tenant: str | None) -> None:
        super().__init__()
        self._metrics = metrics
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            if self._tenant is None:
                yield metric
                continue
            samples = [one for one in metric.samples if one.labels.get("tenant") == self._tenant]
            if samples:
                own = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                own.samples = samples
                yield own
