"""Key-query scores held against the stock model's own projections and a loop over heads, queries and blocks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tenure.planners.keys import HEADER, KeyArchive, fused, kept_keys, looked_at, queries, scores
from tenure.serve.view import memory_view
from tenure.tiers.archive import SpanArchive
from tests.chats import SHAPE, user
from tests.conftest import random_ids
from tests.oracles import check_ledger
from tests.planners.chats import FACTS, drowned


def test_layers_looked_at():
    assert looked_at(range(1)) == [0]
    assert looked_at(range(3)) == [1, 2]
    assert looked_at(range(24)) == [8, 10, 12, 14, 16, 18, 20, 22]
    assert looked_at({23, 5, 11, 17}) == [11, 17, 23]


def test_keys_of_headers_are_left_out():
    raw = torch.randn(3, 2, 10, 4)
    assert torch.equal(kept_keys(raw, [1, 2]), raw[1:, :, HEADER:])
    assert torch.equal(kept_keys(raw[:, :, :5], [1, 2]), raw[1:, :, :5]), "a short span has all of them"


def test_queries_are_the_stock_model_s(engines, models):
    engine, model = engines("qwen2", **SHAPE), models("qwen2", **SHAPE)
    ids = random_ids(12)
    seen = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda m, a, out: seen.append(out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    got = queries(engine, ids, 5)
    assert len(got) == len(looked_at(range(2)))
    for one, layer in zip(got, looked_at(range(2)), strict=True):
        heads = one.shape[0]
        wanted = seen[layer][0, -5:].view(5, heads, -1).transpose(0, 1)
        torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("batch", "count"), [(2, 3), (100, 3), (100, 2), (100, 12), (9, 17)])
def test_scores_equal_a_loop(engines, monkeypatch, batch, count):
    monkeypatch.setattr("tenure.planners.keys._BATCH", batch)
    engine = engines("qwen2", **SHAPE)
    layers, groups, heads, dim, distance = len(looked_at(range(2))), 2, 4, 16, 7
    torch.manual_seed(0)
    asked = [torch.randn(heads, 3, dim) for _ in range(layers)]
    spans = {f"s{number}": torch.randn(layers, groups, 1 + (number + 1) % 3, dim) for number in range(count)}
    own = {2: 0.0, 3: 0.0, 12: 0.5, 17: 1.0}[count]
    inv = engine.adapter.rope.inv_freq.double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        angle, half = distance * inv, dim // 2
        a, b = x[:half].double(), x[half:].double()
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    by_head: dict[str, list[float]] = {name: [] for name in spans}
    for layer in range(layers):
        rows = {}
        for head in range(heads):
            for q in range(3):
                row = rows[head, q] = {}
                for name, keys in spans.items():
                    dots = [
                        float(turned(asked[layer][head, q]) @ key.double()) for key in keys[layer, head // 2]
                    ]
                    row[name] = max(dots) * engine.adapter.scale
        shared = statistics.fmean(statistics.pvariance(row.values()) for row in rows.values())
        for head in range(heads):
            best = dict.fromkeys(spans, -math.inf)
            for q in range(3):
                row = rows[head, q]
                variance = own * statistics.pvariance(row.values()) + (1 - own) * shared
                mean, apart = statistics.fmean(row.values()), variance**0.5
                for name in spans:
                    best[name] = max(best[name], (row[name] - mean) / apart)
            for name in spans:
                by_head[name].append(best[name])
    got = scores(engine, asked, spans, distance=distance)
    for name, values in by_head.items():
        assert got[name] == pytest.approx(max(values), rel=1e-3), "a tenth of 4 or 8 heads is one"
    assert scores(engine, asked, {}, distance=1) == {}
    assert scores(engine, asked, {"s0": spans["s0"]}, distance=1) == {"s0": 1.0}


def test_two_spans_are_told_apart(engines):
    """One head looks for one of them; all others see two of a kind, now this one a little nearer and now that one."""
    engine = engines("qwen2", **SHAPE)
    layers, groups, heads, dim = len(looked_at(range(2))), 2, 4, 16
    generator = torch.Generator().manual_seed(3)
    asked = [torch.randn(heads, 16, dim, generator=generator) for _ in range(layers)]
    one = torch.randn(layers, groups, 6, dim, generator=generator)
    other = one + 0.1 * torch.randn(one.shape, generator=generator)
    asked[0][1, -4:] = 3 * one[0, 0, 2]
    other[0, 0, 2] = 0
    found = scores(engine, asked, {"one": one, "other": other}, distance=1)
    assert found["one"] > 1.5 * found["other"]


def test_rankings_are_joined_by_rank():
    assert list(fused(["a", "b", "c"], ["c", "a"])) == ["a", "c", "b"]
    assert list(fused("abcd", "ebfa"))[:2] == ["b", "a"], "twice second is better than first and fourth"


@pytest.mark.parametrize("scorer", ["keys", "both"])
def test_spans_come_back_by_their_keys(engines, scorer):
    session = drowned(
        engines, planner="retrieval", planner_options={"scorer": scorer, "most": 2, "allowance": 96}
    )
    archive = session.memory.archive
    assert isinstance(archive, KeyArchive)
    assert set(FACTS) <= set(archive.keys)
    session.ask(user("What does FeeRule round?"), max_tokens=2)
    edges = list(session.planning.edges)
    assert 0 < len(edges) <= 2
    assert all("its keys stand out" in edge.why or "shares" in edge.why for edge in edges)
    for edge in edges:
        assert session.explain(edge.span).resident == 1.0
    view = memory_view(session)
    assert view["traffic"]["hits"] == len(edges)
    assert [tier["name"] for tier in view["tiers"]] == ["host"]
    fork = session.fork()
    fork.keep_first(0)
    assert not set(fork.memory.archive.keys)
    assert set(FACTS) <= set(archive.keys)
    check_ledger(session)


def test_saved_sessions_go_on_with_their_keys(engines, tmp_path):
    session = drowned(engines, planner="retrieval", planner_options={"scorer": "keys"})
    before = session.memory.archive.keys
    session.save(tmp_path / "session")
    again = session.engine.restore(tmp_path / "session")
    archive = again.memory.archive
    assert isinstance(archive, KeyArchive)
    assert isinstance(archive.inner, SpanArchive)
    archive.need(before)
    for span, kept in before.items():
        assert torch.equal(archive.keys[span], kept)
    again.ask(user("E417?"), max_tokens=2)
    check_ledger(again)
