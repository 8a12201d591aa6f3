"""The metrics as a scraper reads them: parsed by prometheus' own parser, and one tenant at a time."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tenure.serve.events import (
    Answered,
    Bus,
    Evicted,
    Refused,
    SessionChanged,
    Stepped,
    Traffic,
    TurnEnded,
    TurnStarted,
)
from tenure.serve.metrics import Metrics, Reading


def parse(text: bytes) -> dict[tuple[str, frozenset[str]], float]:
    """``(name, label values) -> value``."""
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def ended(tenant: str, **changes: object) -> TurnEnded:
    facts = {
        "tenant": tenant,
        "session": f"session-of-{tenant}",
        "request": "r",
        "reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "completion_tokens": 7,
        "first_token": 1.5,
        "seconds": 4.0,
        "gaps": (0.02, 0.04),
    }
    return TurnEnded(**{**facts, **changes})


@pytest.fixture
def metrics():
    return Metrics("tiny")


@pytest.fixture
def bus(metrics):
    bus = Bus()
    bus.listen(metrics)
    return bus


def test_turns_tokens_and_times(metrics, bus):
    bus.report(
        TurnStarted(tenant="a", request="r", prompt_tokens=100, cached_tokens=90, queued=0.5, how="continued")
    )
    bus.report(ended("a"))
    bus.report(ended("a", reason="cancel", first_token=None, completion_tokens=0, gaps=()))
    found = parse(metrics.render())
    assert found["tenure_turns_total", frozenset({"a", "stop"})] == 1
    assert found["tenure_turns_total", frozenset({"a", "cancel"})] == 1
    assert found["tenure_turn_starts_total", frozenset({"a", "continued"})] == 1
    assert found["tenure_tokens_total", frozenset({"a", "prompt"})] == 20
    assert found["tenure_tokens_total", frozenset({"a", "cached"})] == 180
    assert found["tenure_tokens_total", frozenset({"a", "completion"})] == 7
    assert found["tenure_queue_seconds_sum", frozenset({"a"})] == 0.5
    assert found["tenure_turn_seconds_sum", frozenset({"a"})] == 8.0
    assert found["tenure_first_token_seconds_count", frozenset({"a"})] == 1
    assert found["tenure_token_gap_seconds_count", frozenset({"a"})] == 2
    assert found["tenure_token_gap_seconds_sum", frozenset({"a"})] == pytest.approx(0.06)


def test_evictions_by_reason_and_forwards(metrics, bus):
    for slots, reason in ((10, "budget"), (5, "budget"), (2, "plan")):
        bus.report(Evicted(tenant="a", session="s", slots=slots, reason=reason))
    bus.report(Stepped(prefill=64, decode=3, seconds=0.2, sessions=4, waiting=0))
    bus.report(Stepped(prefill=0, decode=4, seconds=0.1, sessions=4, waiting=0))
    found = parse(metrics.render())
    assert found["tenure_evicted_slots_total", frozenset({"a", "budget"})] == 15
    assert found["tenure_evicted_slots_total", frozenset({"a", "plan"})] == 2
    assert found["tenure_forward_tokens_total", frozenset({"prompt"})] == 64
    assert found["tenure_forward_tokens_total", frozenset({"completion"})] == 7
    assert found["tenure_forward_seconds_count", frozenset()] == 2


def test_tiers_tell_hits_misses_and_errors_apart(metrics, bus):
    for tier, direction, outcome, nbytes in (
        ("host", "out", "stored", 300),
        ("host", "in", "hit", 100),
        ("disk", "in", "miss", 0),
        ("disk", "in", "error", 0),
    ):
        bus.report(
            Traffic(tenant="a", tier=tier, direction=direction, outcome=outcome, nbytes=nbytes, seconds=0.01)
        )
    found = parse(metrics.render())
    for labels in (("host", "out", "stored"), ("host", "in", "hit"), ("disk", "in", "miss")):
        assert found["tenure_tier_operations_total", frozenset({"a", *labels})] == 1
    assert found["tenure_tier_operations_total", frozenset({"a", "disk", "in", "error"})] == 1
    assert found["tenure_tier_bytes_total", frozenset({"a", "host", "out"})] == 300
    assert found["tenure_tier_bytes_total", frozenset({"a", "host", "in"})] == 100


def test_sessions_are_what_they_are_at_the_scrape(metrics):
    idle, busy = Reading("a", "idle", 50, 64, 1000), Reading("a", "busy", 60, 64, 1000)
    found = parse(metrics.render([idle, busy], waiting=3))
    assert found["tenure_resident_slots", frozenset({"a"})] == 110
    assert found["tenure_sessions", frozenset({"a", "idle"})] == 1
    assert found["tenure_queue", frozenset()] == 3
    found = parse(metrics.render([idle, Reading("a", "idle", 5, None, 10), Reading("a", "parked")]))
    assert found["tenure_sessions", frozenset({"a", "idle"})] == 2
    assert ("tenure_sessions", frozenset({"a", "busy"})) not in found
    assert found["tenure_budget_slots", frozenset({"a"})] == 69
    assert found["tenure_kv_bytes", frozenset({"a"})] == 1010


def test_a_tenant_sees_nothing_of_another_and_nobody_sees_ids(metrics, bus):
    for tenant in ("secret", "b"):
        bus.report(ended(tenant))
        bus.report(
            TurnStarted(tenant=tenant, request="r", prompt_tokens=1, cached_tokens=0, queued=0, how="new")
        )
        bus.report(
            Answered(tenant=tenant, method="POST", route="/v1/chat/completions", status=200, seconds=1.0)
        )
        bus.report(Evicted(tenant=tenant, session=f"session-of-{tenant}", slots=1, reason="budget"))
        bus.report(Traffic(tenant=tenant, tier="host", direction="in", outcome="hit", nbytes=5))
        bus.report(Refused(tenant=tenant, status=429, code="too_many_requests"))
        bus.report(SessionChanged(tenant=tenant, session=f"session-of-{tenant}", change="opened"))
    readings = [Reading("secret", "idle", 1, 2, 3), Reading("b", "idle", 4, 5, 6)]
    everything = metrics.render(readings).decode()
    own = metrics.render(readings, tenant="b").decode()
    assert "secret" in everything
    assert "secret" not in own
    assert "process_" not in own
    assert "session-of" not in everything
    mine = [line for line in everything.splitlines() if 'tenant="b"' in line]
    assert [line for line in own.splitlines() if not line.startswith("#")] == mine
    assert len({line.split("{")[0] for line in mine}) >= 20
    assert metrics.render(readings, tenant="nobody").strip() == b""


def test_label_values_are_escaped(metrics, bus):
    name = 'a"b\\c\nd'
    bus.report(ended(name))
    assert parse(metrics.render(tenant=name))["tenure_turns_total", frozenset({name, "stop"})] == 1


def test_two_servers_in_one_process_count_apart(metrics, bus):
    other = Metrics("tiny")
    bus.report(ended("a"))
    assert ("tenure_turns_total", frozenset({"a", "stop"})) in parse(metrics.render())
    assert ("tenure_turns_total", frozenset({"a", "stop"})) not in parse(other.render())


def test_tiers_are_shown_by_kind_to_the_operator_only(metrics):
    tiers = [
        {"tier": "host", "entries": 2, "nbytes": 300, "capacity": 1000, "demoted": 4},
        {
            "tier": "valkey:valkey://user:hunter2@cache/0",
            "capacity": None,
            "hits": 5,
            "misses": 6,
            "errors": 7,
        },
    ]
    text = metrics.render(tiers=tiers)
    assert b"hunter2" not in text
    found = parse(text)
    assert found["tenure_tier_nbytes", frozenset({"host"})] == 300
    for event, count in (("hits", 5), ("misses", 6), ("errors", 7)):
        assert found["tenure_tier_events_total", frozenset({"valkey", event})] == count
    assert metrics.render(tiers=tiers, tenant="a").strip() == b""
