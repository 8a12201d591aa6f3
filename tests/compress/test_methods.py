"""The other methods: each keeps its budget, and does what its paper says where that can be said in a line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tenure.compress import METHODS, make_compressor
from tenure.compress.adakv import shared
from tenure.compress.apply import look
from tenure.compress.base import standing, take
from tenure.compress.expected import _mean_rotation
from tenure.compress.gracekv.evidence import _readings, _standing_out
from tenure.compress.snapkv import pooled
from tenure.compress.twinkv import repair
from tenure.errors import ConfigError
from tests.compress.test_apply import answer, filled, heads
from tests.conftest import random_ids
from tests.oracles import check_ledger

SCORERS = [name for name in METHODS if name != "gracekv"]


@pytest.mark.parametrize("method", SCORERS)
@pytest.mark.parametrize("granularity", ["session", "layer"])
def test_the_budget_is_exact_and_tokens_stay_as_they_are(engines, method, granularity):
    engine = engines("qwen2")
    session = engine.session(budget=190, chunk=64, slack=8, policy="h2o", granularity=granularity)
    session.append_ids(random_ids(170, 1))
    rows = session.memory.rows
    keys, values = rows.raw[:, :, :170].clone(), rows.values[:, :, :170].clone()
    for question in (None, [20, 21]):
        fork = session.fork()
        fork.compress(ratio=3, method=method, question=question)
        assert (
            heads(engine) * fork.memory.ledger.rows + fork.memory.frozen.entries == heads(engine) * 170 // 3
        )
        (segment,) = fork.memory.frozen.segments
        entries, owner = segment.entries, segment.entries.owner
        layer, head = owner // engine.layout.kv_heads, owner % engine.layout.kv_heads
        assert torch.equal(entries.keys, keys[layer, head, entries.start.long()])
        assert torch.equal(entries.values, values[layer, head, entries.start.long()])
        assert (entries.bias == 0).all()
        assert (entries.stop == entries.start + 1).all()
        assert answer(fork, steps=1).isfinite().all()
        check_ledger(fork)


def test_kvzip_repeats_everything_and_takes_the_largest_share(context):
    context, _ = context
    score = make_compressor("kvzip", {"piece": 40}).score(context)
    ids = context.ids[0].tolist()
    want = torch.zeros_like(score)
    for start in range(0, len(ids), 40):
        piece = [*ids[max(0, start - 8) : start], *ids[start : start + 40]]
        probes = context.reader.behind(piece, first=min(start, 8))
        for layer in range(score.shape[0]):
            shares = context.shares(layer, probes)
            want[layer] = torch.maximum(want[layer], shares.amax((1, 2)))
    torch.testing.assert_close(score, want)


def test_shares_are_those_of_the_stock_model(context, models):
    """Queries of a text read behind the session: their attention on the compressed tokens."""
    context, session = context
    ids = random_ids(6, 9)
    probes = context.reader.behind(ids)
    model = models("qwen2")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(
            torch.tensor([session.memory.ids.tolist() + ids]), output_attentions=True, use_cache=False
        ).attentions
    for layer, attention in enumerate(whole):
        shares = context.shares(layer, probes)
        want = attention[0, :, -6:][:, :, context.logical[0]].view_as(shares)
        torch.testing.assert_close(shares, want, atol=1e-5, rtol=1e-3)


def test_the_newest_queries_are_computed_again_as_they_were(context, models):
    context, session = context
    memory = session.memory
    before = [tensor.clone() for tensor in (memory.rows.raw, memory.rows.rotated, memory.rows.values)]
    probes = context.reader.tail(20)
    model = models("qwen2")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(
            torch.tensor([session.memory.ids.tolist()]), output_attentions=True, use_cache=False
        ).attentions
    for layer, attention in enumerate(whole):
        shares = context.shares(layer, probes)
        want = attention[0, :, -20:][:, :, context.logical[0]].view_as(shares)
        torch.testing.assert_close(shares, want, atol=1e-5, rtol=1e-3)  # nothing behind a query is seen
    rows = memory.rows.rows
    for tensor, old in zip((memory.rows.raw, memory.rows.rotated, memory.rows.values), before, strict=True):
        assert torch.equal(tensor[:, :, :rows], old[:, :, :rows])


@pytest.mark.parametrize("question", [None, [20, 21, 22]])
def test_cakes_layers_get_what_attention_before_the_window_asks_for(context, models, question):
    """Entropy and variance of the stock model's attention, without what the window's queries see of each other."""
    context, session = context
    ids = session.memory.ids.tolist()
    if question is None:
        window, seen = 32, context.logical[0] < len(ids) - 32
    else:
        ids, window, seen = ids + question, 3, torch.ones_like(context.logical[0], dtype=torch.bool)
        context = replace(context, question=question)
    method = make_compressor("cake", {"tau1": 1.6, "tau2": 0.6})
    score = method.score(context)
    model = models("qwen2")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    weights = []
    for layer, attention in enumerate(whole):
        part = attention[0, :, -window:][:, :, context.logical[0][seen]].double()
        entropy = -(part * (part + 1e-10).log()).sum((1, 2))
        change = part.var(1, correction=0).sum(-1)
        weights.append(entropy.mean() ** (1 / 1.6) * change.mean() ** (1 / 0.6))
        rank = part.mean(1) + 200 * part.var(1, correction=0)
        rank = pooled(rank.view(score.shape[1], -1, rank.shape[-1]).mean(1), 5)
        inner = slice(0, rank.shape[-1] - 2)  # pooling looks at two tokens of the window
        torch.testing.assert_close(
            score[layer][:, seen][:, inner].double(), rank[:, inner], atol=1e-5, rtol=1e-3
        )
    weights = torch.stack(weights)
    got = context.notes["cake"].double()
    torch.testing.assert_close(got / got.sum(), weights / weights.sum(), atol=1e-4, rtol=1e-3)


def test_pyramidkv_falls_evenly(context):
    context, _ = context
    quota = make_compressor("pyramidkv", {"beta": 5}).quota(context, torch.zeros(context.shape), 600)
    assert quota.tolist() == [[180, 180], [100, 100], [20, 20]]


def test_adakv_gives_a_head_more_where_it_looks_more(context):
    context, _ = context
    score = torch.rand(context.shape)
    score[:, 0] += 10
    mask = shared(context, score, 600, 0.2)
    assert mask.sum(-1).tolist() == [[180, 20]] * 3


def test_expected_attention_is_the_mean_over_sampled_queries(context):
    """The Gaussian's closed form against drawn queries, rotated to the coming positions' mean."""
    context, _ = context
    turn = _mean_rotation(*context.cos_sin(torch.arange(5, 9)), context.keys.shape[-1])
    x = torch.randn(3, context.keys.shape[-1])
    want = torch.stack(
        [context.kernels.rotate(x, *context.cos_sin(torch.full((3,), place))) for place in range(5, 9)]
    ).mean(0)
    torch.testing.assert_close(x @ turn.T, want, atol=1e-5, rtol=1e-4)
    score = make_compressor("expected").score(context)
    assert score.shape == context.shape
    assert (score >= 0).all()


def test_lagkv_keeps_the_same_share_of_every_stretch(context):
    context, _ = context
    score = make_compressor("lagkv", {"lag": 32}).score(context)
    tokens = context.shape[2]
    used = (tokens // 32 - 1) * 32
    from tenure.compress.base import best

    kept = best(score, torch.full(context.shape[:2], tokens - used + 3 * (used // 32)))
    assert kept[:, :, used:].all()
    assert (kept[:, :, :used].view(*context.shape[:2], -1, 32).sum(-1) == 3).all()


def test_keydiff_drops_what_is_like_all_others(context):
    context, _ = context
    score = make_compressor("keydiff").score(context)
    keys = torch.nn.functional.normalize(context.rotated, dim=-1)
    anchor = keys.mean(2, keepdim=True)
    want = torch.cosine_similarity(keys, anchor.expand_as(keys), dim=-1)
    torch.testing.assert_close(score, -want, atol=1e-5, rtol=1e-4)


def test_twinkv_swaps_duplicates_for_orphans():
    directions = torch.eye(6)
    keys = torch.stack([directions[i] for i in (0, 0, 1, 2, 3, 0)])
    kept = torch.tensor([True, True, True, False, False, False])
    score = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    repair(kept, score, keys, near=0.9, share=0.5)
    assert kept.tolist() == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]  # the orphan of best score for the worse twin
    again = kept.clone()
    repair(again, score, keys, near=0.9, share=0.5)
    assert torch.equal(again, kept), "nothing is left to repair"


def test_a_choice_is_found_again(context):
    from tenure.compress.twinkv import _mask

    context, _ = context
    mask = torch.rand(context.shape) < 0.3
    assert torch.equal(_mask(context, take(context, mask, mask)), mask)


def test_wrong_options_are_named():
    for name, options in [
        ("snapkv", {"window": 0}),
        ("snapkv", {"kernel": 4}),
        ("adakv", {"safe": 2}),
        ("pyramidkv", {"beta": 0}),
        ("lagkv", {"lag": 0}),
        ("expected", {"future": 0}),
        ("kvzip", {"piece": 0}),
        ("twinkv", {"base": "gracekv"}),
        ("twinkv", {"share": 2}),
    ]:
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_compressor(name, options)
    with pytest.raises(ConfigError, match="no option"):
        make_compressor("kvzip", {"window": 1})


def test_worth_keeps_each_heads_share():
    score = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    quota = torch.tensor([[8, 4, 12], [2, 16, 20]])
    worth = standing(score, quota)
    for layer in range(2):
        for head in range(3):
            kept = worth[layer, head] > 0.5
            assert int(kept.sum()) == int(quota[layer, head]) // 2
            assert score[layer, head][kept].min() >= score[layer, head][~kept].max()


def test_of_probes_the_last_one_always_stays(context):
    context, _ = context
    probes = context.reader.tail(20)
    for most in (1, 2, 7, 20):
        few = probes.every(most)
        assert len(few) == most
        assert int(few.position[-1]) == int(probes.position[-1])


def test_a_short_chunk_looks_at_the_end_of_a_long_question(engines):
    session = filled(engines("qwen2"), 100, policy="recency", budget=400, chunk=16)
    question = random_ids(40, 3)
    context = look(session, question=question)
    probes = make_compressor("snapkv").probes(context)
    want = context.reader.behind(question[-16:])
    assert len(probes) == 16
    torch.testing.assert_close(probes.raw, want.raw)


@pytest.mark.parametrize("limit", [20, 60, 300, 1024])
def test_all_of_a_stretch_is_read_again_however_short_the_readings(limit):
    stretches = [(0, 128), (200, 216), (300, 428), (500, 501)]
    found = _readings(stretches, limit)
    assert all(sum(stop - start + 8 for start, stop in group) <= limit for group in found)
    parts = [part for group in found for part in group]
    assert [token for part in parts for token in range(*part)] == [
        token for stretch in stretches for token in range(*stretch)
    ]
    assert (len(found) == 1) == (limit == 1024)
    with pytest.raises(ConfigError, match=r"chunk: 8 tokens are left.*9 are the least"):
        _readings(stretches, 8)


def test_what_stands_out_is_needed_more_and_most_in_its_own_head():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 60, 8, generator=generator) * 0.1 + 1
    keys[1, 0, 7] = -1  # unlike all others, in one head
    keys[:, :, 30] = -1  # in every head
    context = SimpleNamespace(rotated=keys, shape=(2, 2, 60), logical=torch.arange(60)[None])
    need = _standing_out(context)
    assert need.shape == (2, 2, 60)
    assert need[:, :, 30].min() == 16
    assert need[1, 0, 7] > need[1, 1, 7] > need.median()
    assert need.min() >= 0
    apart = _standing_out(
        SimpleNamespace(rotated=keys, shape=(2, 2, 60), logical=torch.arange(60).expand(2, 60))
    )
    assert apart[0, 0, 7] < need[0, 0, 7]  # layers that hold other tokens say nothing of each other
