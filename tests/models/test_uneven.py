"""Models whose layers differ in what they see or how they rotate: all that a session can do, as for any other."""

from __future__ import annotations

import copy

import pytest
import torch

from tenure import Engine, Plan, Step
from tenure.config import EngineConfig
from tenure.kernels import common, reference
from tenure.planners.keys import looked_at, queries, scores
from tests.conftest import random_ids, tiny_model
from tests.models.test_families import OPTIONS
from tests.oracles import check_ledger, state_of
from tests.reference import MaskedReference

FAMILIES = ("gemma3_text", "gpt_oss", "smollm3")
"""Windows and two sets of angles; windows and sinks; a layer without rotation."""
SMALL = {"policy": "h2o", "budget": 48, "chunk": 32, "slack": 8, "limit": 96}


@pytest.fixture(scope="module", params=FAMILIES)
def stock(request):
    return tiny_model(request.param, **OPTIONS[request.param])


@pytest.fixture(scope="module", params=["copy", "read"])
def engine(request, stock):
    return Engine(copy.deepcopy(stock), config=EngineConfig(rotate=request.param, tiers=("host:1MB",)))


@pytest.mark.parametrize("positions", ["bounded", "logical", "compact"])
def test_spans_come_back_as_the_masked_reference_says(stock, engine, positions):
    options = {**SMALL, "positions": positions, "limit": 96 if positions == "bounded" else None}
    session, reference = engine.session(**options), MaskedReference(stock)

    def read(ids):
        want = reference.beside(session, ids)
        torch.testing.assert_close(session.feed(ids), want, atol=2e-4, rtol=0)
        check_ledger(session)

    for number in range(8):
        read(random_ids(20, seed=number))
    lost = next(span.id for span in session.memory.ledger.spans if session.explain(span.id).resident < 1)
    assert session.fetch([lost]) == [lost]
    for number in range(3):
        read(random_ids(20, seed=100 + number))
    session.close()


def test_saved_sessions_forks_and_packs_go_on_alike(engine, tmp_path):
    session = engine.session(**SMALL)
    session.append_ids(random_ids(150))
    session.save(tmp_path / "session")
    others = [session.fork(), engine.restore(tmp_path / "session")]
    assert state_of(others[1]) == state_of(session)
    more = random_ids(30, seed=1)
    want = session.feed(more)
    for other in others:
        torch.testing.assert_close(other.feed(more), want, atol=1e-5, rtol=0)
    for one in (session, *others):
        one.queue_ids(random_ids(20, seed=2))
    engine.drain([session, *others])
    for other in others:
        torch.testing.assert_close(other.logits, session.logits, atol=1e-4, rtol=0)
    for one in (session, *others):
        one.close()


def test_scores_come_from_the_layers_that_see_everything(stock):
    engine = Engine(copy.deepcopy(stock))
    session = engine.session(policy="h2o", budget=500, chunk=128, granularity="session")
    ids = random_ids(96)
    session.append_ids(ids)
    seeing = [layer for layer, window in enumerate(engine.layout.windows or [None] * 3) if window is None]
    model = copy.deepcopy(stock)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shares = model(torch.tensor([ids]), output_attentions=True).attentions
    want = torch.stack([shares[layer][0].sum(1).amax(0) for layer in seeing]).mean(0)
    torch.testing.assert_close(session.memory.ledger.score[0, :96], want, atol=1e-4, rtol=1e-4)


def test_keys_tell_what_a_turn_reads(stock, engine):
    """Keys and queries of the layers that see the whole session meet, and no others are kept."""
    spans = {}
    for number in range(9):
        one = engine.session(policy="full", positions="logical")
        one.append_ids(random_ids(24, seed=number))
        spans[f"s{number}"] = one.memory.rows.raw[looked_at(engine.layout.judges), :, :24].clone()
        one.close()
    asked = queries(engine, random_ids(24, seed=5), 24)
    assert len(asked) == len(looked_at(engine.layout.judges))
    found = scores(engine, asked, spans, distance=64)
    assert all(torch.isfinite(torch.tensor(list(found.values()))))
    session = engine.session(**SMALL, planner="retrieval", planner_options={"scorer": "keys"})
    for number in range(6):
        session.append_ids(random_ids(24, seed=number))
    assert session.memory.ledger.evictions
    kept = session.memory.archive.keys
    assert kept
    assert {len(keys) for keys in kept.values()} == {len(looked_at(engine.layout.judges))}
    session.close()


def test_a_plan_holds_what_its_steps_read(engine):
    plan = Plan([Step("one"), Step("two", ("facts",))])
    session = engine.session(policy="foresight", budget=48, chunk=32, slack=8, plan=plan)
    session.append_ids(random_ids(16), span="facts")
    session.append_ids(random_ids(150, seed=1))
    assert session.explain("facts").resident == 1.0
    session.close()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [1, 5, 40, 500])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 60), (7, 60), (60, 60), (300, 400)])
def test_attention_within_a_window_equals_a_loop(n, m, window, sinks, monkeypatch):
    if sinks:
        monkeypatch.setattr(common, "_BLOCK_BYTES", 8_000)  # a few queries at a time
    torch.manual_seed(n + m + window)
    heads, groups, dim = 2, 3, 8
    q, k, v = torch.randn(heads, groups, n, dim), torch.randn(heads, m, dim), torch.randn(heads, m, dim)
    gaps = torch.randint(1, 4, (m - n,)).flip(0)
    logical = torch.cat([-gaps.cumsum(0).flip(0) if m > n else gaps, torch.arange(n)]) + 2000
    idle = torch.randn(heads, groups, 1) if sinks else None
    got = common.attend_within(q, k, v, logical, window=window, scale=0.3, sinks=idle, watched=min(n, 3))
    out, lse, mass = (torch.zeros_like(tensor) for tensor in got)
    for i in range(n):
        seen = [j for j in range(m - n + i + 1) if logical[j] > logical[m - n + i] - window]
        logits = torch.einsum("hgd,hmd->hgm", q[:, :, i], k[:, seen]) * 0.3
        if idle is not None:
            logits = torch.cat([logits, idle], -1)
        shares = logits.softmax(-1)[..., : len(seen)]
        out[:, :, i], lse[:, :, i] = torch.einsum("hgm,hmd->hgd", shares, v[:, seen]), logits.logsumexp(-1)
        if i >= n - 3:
            mass[..., seen] += shares
    for one, want in zip(got, (out, lse, mass), strict=True):
        torch.testing.assert_close(one, want, atol=1e-5, rtol=1e-5)


def test_sinks_are_keys_without_values():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    sinks = torch.randn(2, 3, 1)
    out, lse = common.beside_sinks(*reference.attend(q, k, v, causal=False, scale=1.0), sinks)
    logits = torch.einsum("hgnd,hmd->hgnm", q, k)
    logits = torch.cat([logits, sinks[..., None].expand(-1, -1, 4, 1)], -1)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    torch.testing.assert_close(out, logits.softmax(-1)[..., :5] @ v[:, None])
