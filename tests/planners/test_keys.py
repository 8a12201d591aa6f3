"""Key-query scores held against the stock model's own projections and a loop over heads, queries and blocks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tenure.planners.keys import HEADER, KeyArchive, fused, kept_keys, looked_at, queries, scores
from tenure.tiers.archive import SpanArchive
from tests.chats import SHAPE, user
from tests.conftest import random_ids
from tests.oracles import check_ledger
from tests.planners.chats import FACTS, drowned


def test_layers_looked_at():
    assert looked_at(1) == [0]
    assert looked_at(3) == [1, 2]
    assert looked_at(24) == [8, 10, 12, 14, 16, 18, 20, 22]


def test_keys_of_headers_are_left_out():
    raw = torch.randn(3, 2, 10, 4)
    assert torch.equal(kept_keys(raw), raw[1:, :, HEADER:])
    assert torch.equal(kept_keys(raw[:, :, :5]), raw[1:, :, :5]), "a short span has all of them"


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
    assert len(got) == len(looked_at(2))
    for one, layer in zip(got, looked_at(2), strict=True):
        heads = one.shape[0]
        wanted = seen[layer][0, -5:].view(5, heads, -1).transpose(0, 1)
        torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", [2, 100])
def test_scores_equal_a_loop(engines, monkeypatch, batch):
    monkeypatch.setattr("tenure.planners.keys._BATCH", batch)
    engine = engines("qwen2", **SHAPE)
    layers, groups, heads, dim, distance = len(looked_at(2)), 2, 4, 16, 7
    torch.manual_seed(0)
    asked = [torch.randn(heads, 3, dim) for _ in range(layers)]
    spans = {
        name: torch.randn(layers, groups, tokens, dim) for name, tokens in (("a", 2), ("b", 1), ("c", 3))
    }
    inv = engine.adapter.rope.inv_freq.double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        angle, half = distance * inv, dim // 2
        a, b = x[:half].double(), x[half:].double()
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    by_head: dict[str, list[float]] = {name: [] for name in spans}
    for layer in range(layers):
        for head in range(heads):
            best = dict.fromkeys(spans, -math.inf)
            for q in range(3):
                row = {}
                for name, keys in spans.items():
                    dots = [
                        float(turned(asked[layer][head, q]) @ key.double()) for key in keys[layer, head // 2]
                    ]
                    row[name] = max(dots) * engine.adapter.scale
                mean, apart = statistics.fmean(row.values()), statistics.pstdev(row.values())
                for name in spans:
                    best[name] = max(best[name], (row[name] - mean) / apart)
            for name in spans:
                by_head[name].append(best[name])
    got = scores(engine, asked, spans, distance=distance)
    for name, values in by_head.items():
        assert got[name] == pytest.approx(max(values), rel=1e-3), "a tenth of 4 or 8 heads is one"
    assert scores(engine, asked, {}, distance=1) == {}
    only = scores(engine, asked, {"a": spans["a"]}, distance=1)
    assert only == {"a": 0.0}


def test_rankings_are_joined_by_rank():
    assert list(fused(["a", "b", "c"], ["c", "a"])) == ["a", "c", "b"]


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
