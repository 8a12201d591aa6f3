"""Key-query scores held against the stock model's own projections and a loop over heads, queries and blocks."""

from __future__ import annotations

import math

import pytest
import torch

from tenure.planners import keys
from tenure.planners.keys import KeyArchive, fused, looked_at, means, queries, scores
from tenure.tiers.archive import SpanArchive
from tests.chats import SHAPE, user
from tests.conftest import random_ids
from tests.oracles import check_ledger
from tests.planners.chats import FACTS, drowned


def test_layers_looked_at():
    assert looked_at(1) == [0]
    assert looked_at(3) == [1, 2]
    assert looked_at(24) == [8, 10, 12, 14, 16, 18, 20, 22]


def test_means_are_those_of_blocks():
    raw = torch.randn(3, 2, 2 * keys.BLOCK + 3, 4)
    got, sizes = means(raw)
    assert got.shape == (2, 2, 3, 4)
    assert sizes.tolist() == [keys.BLOCK, keys.BLOCK, 3]
    torch.testing.assert_close(got[1, 0, 2], raw[2, 0, -3:].mean(0))


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


def test_scores_equal_a_loop(engines):
    engine = engines("qwen2", **SHAPE)
    layers, groups, heads, dim = len(looked_at(2)), 2, 4, 16
    torch.manual_seed(0)
    asked = [torch.randn(heads, 3, dim) for _ in range(layers)]
    spans = {
        name: (torch.randn(layers, groups, blocks, dim), torch.tensor(sizes))
        for name, blocks, sizes in (("a", 2, [8, 3]), ("b", 1, [5]), ("c", 3, [8, 8, 1]))
    }
    sinks = torch.randn(layers, groups, 2, dim)
    distance = 7
    inv = engine.adapter.rope.inv_freq.double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        angle, half = distance * inv, dim // 2
        a, b = x[:half].double(), x[half:].double()
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    logit = {}
    for layer in range(layers):
        for head in range(heads):
            for q in range(3):
                row = {}
                for name, (mean, sizes) in spans.items():
                    for block in range(len(sizes)):
                        dot = turned(asked[layer][head, q]) @ mean[layer, head // 2, block].double()
                        row[name, block] = math.exp(float(dot) * engine.adapter.scale) * int(sizes[block])
                for s in range(2):
                    dot = turned(asked[layer][head, q]) @ sinks[layer, head // 2, s].double()
                    row["sink", s] = math.exp(float(dot) * engine.adapter.scale)
                logit[layer, head, q] = row
    got = scores(engine, asked, spans, sinks, distance=distance)
    for name, value in naive(logit, spans, layers, heads).items():
        assert got[name] == pytest.approx(value, rel=1e-4)
    assert scores(engine, asked, {}, sinks, distance=1) == {}


def naive(logit, spans, layers, heads):
    """See :func:`tenure.planners.keys.scores`."""
    found = {}
    for name in spans:
        shares = []
        for layer in range(layers):
            for head in range(heads):
                by_query = []
                for q in range(3):
                    row = logit[layer, head, q]
                    total = sum(row.values())
                    by_query.append(sum(value for (owner, _), value in row.items() if owner == name) / total)
                shares.append(max(by_query))
        best = sorted(shares, reverse=True)[: max(1, len(shares) // 10)]
        found[name] = sum(best) / len(best)
    return found


def test_rankings_are_joined_by_rank():
    assert list(fused(["a", "b", "c"], ["c", "a"])) == ["a", "c", "b"]


@pytest.mark.parametrize("scorer", ["keys", "both"])
def test_spans_come_back_by_their_keys(engines, scorer):
    session = drowned(
        engines, planner="retrieval", planner_options={"scorer": scorer, "most": 2, "allowance": 96}
    )
    archive = session.memory.archive
    assert isinstance(archive, KeyArchive)
    assert set(FACTS) <= set(archive.means)
    session.ask(user("What does FeeRule round?"), max_tokens=2)
    edges = list(session.planning.edges)
    assert 0 < len(edges) <= 2
    assert all("its keys draw" in edge.why or "shares" in edge.why for edge in edges)
    for edge in edges:
        assert session.explain(edge.span).resident == 1.0
    fork = session.fork()
    fork.keep_first(0)
    assert not set(fork.memory.archive.means)
    assert set(FACTS) <= set(archive.means)
    check_ledger(session)


def test_saved_sessions_go_on_with_their_keys(engines, tmp_path):
    session = drowned(engines, planner="retrieval", planner_options={"scorer": "keys"})
    before = session.memory.archive.means
    session.save(tmp_path / "session")
    again = session.engine.restore(tmp_path / "session")
    archive = again.memory.archive
    assert isinstance(archive, KeyArchive)
    assert isinstance(archive.inner, SpanArchive)
    archive.need(before)
    for span, (mean, _) in before.items():
        torch.testing.assert_close(archive.means[span][0], mean)
    again.ask(user("E417?"), max_tokens=2)
    check_ledger(again)
