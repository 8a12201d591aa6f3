"""The metrics as a scraper reads them: parsed by prometheus' own parser, and one tenant at a time."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tenure.serve.metrics import Metrics, Reading, TurnRecord


def scrape(metrics: Metrics, tenant: str | None = None) -> dict[tuple[str, frozenset[str]], float]:
    """``(name, label values) -> value``."""
    text = metrics.render(tenant).decode()
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def turn(tenant: str, **changes: object) -> TurnRecord:
    facts = {
        "tenant": tenant,
        "reason": "stop",
        "arrived": 10.0,
        "started": 10.5,
        "first": 11.5,
        "finished": 14.0,
        "prompt": 100,
        "cached": 90,
        "completion": 7,
    }
    return TurnRecord(**{**facts, **changes})


def test_turns_tokens_and_times():
    metrics = Metrics("tiny")
    metrics.turn(turn("a"))
    metrics.turn(turn("a", reason="cancel", first=None, completion=0))
    found = scrape(metrics)
    assert found["tenure_turns_total", frozenset({"a", "stop"})] == 1
    assert found["tenure_turns_total", frozenset({"a", "cancel"})] == 1
    assert found["tenure_tokens_total", frozenset({"a", "prompt"})] == 20
    assert found["tenure_tokens_total", frozenset({"a", "cached"})] == 180
    assert found["tenure_tokens_total", frozenset({"a", "completion"})] == 7
    assert found["tenure_queue_seconds_sum", frozenset({"a"})] == 1.0
    assert found["tenure_turn_seconds_sum", frozenset({"a"})] == 8.0
    assert found["tenure_first_token_seconds_count", frozenset({"a"})] == 1
    assert found["tenure_first_token_seconds_sum", frozenset({"a"})] == 1.5


def test_losses_are_counted_once_and_a_rollback_takes_none_back():
    metrics = Metrics("tiny")
    metrics.losses("a", "s1", {"budget": 10.0})
    metrics.losses("a", "s2", {"budget": 1.0, "plan": 2.0})
    metrics.losses("a", "s1", {"budget": 15.0})
    metrics.losses("a", "s1", {"budget": 12.0})  # three came back
    metrics.losses("a", "s1", {"budget": 13.0})
    metrics.forget("s1")
    found = scrape(metrics)
    assert found["tenure_evicted_slots_total", frozenset({"a", "budget"})] == 17
    assert found["tenure_evicted_slots_total", frozenset({"a", "plan"})] == 2


def test_tiers_tell_hits_misses_and_errors_apart():
    metrics = Metrics("tiny")
    metrics.tier("a", "host", "stored", spans=3, size=300)
    metrics.tier("a", "host", "hit", size=100)
    metrics.tier("a", "disk", "miss")
    metrics.tier("a", "disk", "error")
    found = scrape(metrics)
    for tier, result, count in (
        ("host", "stored", 3),
        ("host", "hit", 1),
        ("disk", "miss", 1),
        ("disk", "error", 1),
    ):
        assert found["tenure_tier_spans_total", frozenset({"a", tier, result})] == count
    assert found["tenure_tier_bytes_total", frozenset({"a", "host", "out"})] == 300
    assert found["tenure_tier_bytes_total", frozenset({"a", "host", "in"})] == 100


def test_sessions_are_read_at_the_scrape():
    sessions = [Reading("a", "idle", 50, 64, 1000), Reading("a", "running", 60, 64, 1000)]
    metrics = Metrics("tiny", lambda: sessions)
    found = scrape(metrics)
    assert found["tenure_resident_slots", frozenset({"a"})] == 110
    assert found["tenure_sessions", frozenset({"a", "idle"})] == 1
    sessions.append(Reading("a", "idle", 5, None, 10))
    found = scrape(metrics)
    assert found["tenure_sessions", frozenset({"a", "idle"})] == 2
    assert found["tenure_budget_slots", frozenset({"a"})] == 133
    assert found["tenure_kv_bytes", frozenset({"a"})] == 2010


def test_a_tenant_sees_nothing_of_another():
    metrics = Metrics("tiny", lambda: [Reading("secret", "idle", 1, 2, 3), Reading("b", "idle", 4, 5, 6)])
    for tenant in ("secret", "b"):
        metrics.turn(turn(tenant))
        metrics.gap(tenant, 0.02)
        metrics.request(tenant, "/v1/chat/completions", 200, 1.0)
        metrics.losses(tenant, tenant, {"budget": 1.0})
        metrics.tier(tenant, "host", "hit", size=5)
        metrics.queue.labels(tenant).inc()
    everything = metrics.render().decode()
    own = metrics.render("b").decode()
    assert "secret" in everything
    assert "secret" not in own
    assert "process_" not in own
    mine = [line for line in everything.splitlines() if 'tenant="b"' in line]
    assert [line for line in own.splitlines() if not line.startswith("#")] == mine
    assert len({line.split("{")[0] for line in mine}) >= 15


def test_an_unknown_tenant_sees_nothing():
    metrics = Metrics("tiny")
    metrics.turn(turn("a"))
    assert metrics.render("").strip() == b""


def test_label_values_are_escaped():
    metrics = Metrics("tiny")
    name = 'a"b\\c\nd'
    metrics.turn(turn(name))
    assert scrape(metrics)["tenure_turns_total", frozenset({name, "stop"})] == 1


@pytest.mark.parametrize("tenant", [None, "a"])
def test_two_servers_in_one_process_count_apart(tenant):
    one, two = Metrics("tiny"), Metrics("tiny")
    one.turn(turn("a"))
    assert ("tenure_turns_total", frozenset({"a", "stop"})) in scrape(one, tenant)
    assert ("tenure_turns_total", frozenset({"a", "stop"})) not in scrape(two, tenant)
