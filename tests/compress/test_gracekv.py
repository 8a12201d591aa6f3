"""GraceKV's stages, each against a slow way to say the same thing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tenure.compress.gracekv import GraceKV
from tenure.compress.gracekv.allocate import (
    cut_value,
    heap_auction,
    path_minimum,
    pooled_utility,
    sort_auction,
)
from tenure.compress.gracekv.evidence import gather
from tenure.compress.gracekv.pack import assemble, frontier, prototypes
from tenure.compress.gracekv.partition import curvature, partition, robust, uniform
from tenure.compress.gracekv.trees import Judges, Tokens, _Argmax, _Pricer, blend, grow
from tenure.compress.probes import SessionReader
from tenure.errors import ConfigError
from tests.compress.test_apply import answer, filled, heads
from tests.conftest import random_ids
from tests.oracles import check_ledger

# -- allocation ----------------------------------------------------------------------------------


def random_trees(seed, roots=6, most=200):
    """Operations of random trees with heavy-tailed gains, negative ones too: utility, cost, parent, level."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(0, high, (), generator=generator))

    utility, cost, parent, level = [], [], [], []
    open_ends = [(-1, 0)] * roots
    while open_ends and len(utility) < most:
        above, depth = open_ends.pop(draw(len(open_ends)))
        op = len(utility)
        utility.append(float(torch.randn((), generator=generator).exp() - 0.5))
        cost.append(1 if above < 0 else 1 + draw(2))
        parent.append(above)
        level.append(depth)
        if depth < 7 and draw(5):
            open_ends += [(op, depth + 1)] * (1 + draw(cost[-1] + 1))
    return utility, cost, parent, level


def kappa_of(utility, parent):
    kappa = []
    for value, above in zip(utility, parent, strict=True):
        kappa.append(value if above < 0 else min(value, kappa[above]))
    return kappa


@pytest.mark.parametrize("seed", range(60))
def test_one_sort_is_the_priority_queue(seed):
    utility, cost, parent, _ = random_trees(seed)
    worth = torch.tensor(utility)
    for budget in (0, 1, 2, 7, 20, 61, sum(cost) - 1, sum(cost) + 5):
        done = sort_auction(worth, torch.tensor(cost), torch.tensor(parent), budget)
        want = heap_auction(worth.tolist(), cost, parent, budget)
        assert done.tolist() == want, budget
        assert sum(c for c, d in zip(cost, want, strict=True) if d) <= budget


@pytest.mark.parametrize("seed", range(10))
def test_ties_are_broken_as_in_the_queue(seed):
    utility, cost, parent, _ = random_trees(seed)
    worth = torch.tensor(utility).mul(1.5).round()  # a handful of different values
    for budget in range(0, 60, 3):
        done = sort_auction(worth, torch.tensor(cost), torch.tensor(parent), budget)
        assert done.tolist() == heap_auction(worth.tolist(), cost, parent, budget), budget


@pytest.mark.parametrize("seed", range(20))
def test_nothing_below_the_cut_is_ever_executed(seed):
    utility, cost, parent, level = random_trees(seed)
    kappa, costs, levels = torch.tensor(kappa_of(utility, parent)), torch.tensor(cost), torch.tensor(level)
    for budget in (5, 20, 60):
        done = torch.tensor(heap_auction(utility, cost, parent, budget))
        for depth in range(int(levels.max()) + 1):
            known = levels <= depth
            cut = cut_value(kappa[known], costs[known], budget)
            below = torch.tensor(
                [above >= 0 and bool(known[above]) and float(kappa[above]) < cut for above in parent]
            )
            assert not (done & below).any()


def test_a_hidden_valuable_leaf_is_found_by_pooling():
    # A root of little worth hides a leaf of much; two other roots are worth a little more than the first root.
    gain, cost = torch.tensor([0.1, 9.0, 0.5, 0.4]), torch.tensor([1, 1, 1, 1])
    parent, level = torch.tensor([-1, 0, -1, -1]), torch.tensor([0, 1, 0, 0])
    greedy = torch.tensor(kappa_of(gain.tolist(), parent.tolist()))
    assert torch.equal(path_minimum(gain, parent), greedy)
    assert sort_auction(gain, cost, parent, 2).tolist() == [False, False, True, True]
    pooled = pooled_utility(gain, cost, parent, level)
    assert sort_auction(pooled, cost, parent, 2).tolist() == [True, True, False, False]


# -- partition -----------------------------------------------------------------------------------


def test_curvature_is_largest_at_a_corner():
    steps = torch.arange(20.0)
    there = torch.stack([steps, 0 * steps], 1)
    up = torch.stack([torch.full((20,), 19.0), steps + 1], 1)
    kappa = curvature(torch.cat([there, up])[None], stability=0.0)
    assert int(kappa.argmax()) == 19
    assert float(kappa[19]) == pytest.approx(1.0, abs=1e-3)
    assert float(kappa[5]) == pytest.approx(0.0, abs=1e-3)
    assert kappa.isfinite().all()


def slow_curvature(hidden, windows):
    found = []
    for layer in hidden:
        for window in windows:
            row = []
            for i in range(len(layer)):
                low, high = max(0, i - window + 1), min(len(layer) - 1, i + window)
                before = layer[i] - layer[low : i + 1].mean(0)
                after = layer[i + 1 : high + 1].mean(0) - layer[i] if high > i else None
                row.append(
                    0.0
                    if after is None or low == i
                    else 1 - float(torch.cosine_similarity(before, after, dim=0, eps=1e-6))
                )
            found.append(row)
    every = torch.tensor(found)
    return every.mean(0) - 0.5 * every.std(0, correction=0)


def test_curvature_by_sums_is_curvature_by_loops():
    hidden = torch.nn.functional.normalize(
        torch.randn(3, 30, 8, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    torch.testing.assert_close(
        curvature(hidden, (2, 4)), slow_curvature(hidden, (2, 4)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("tokens", [1, 2, 15, 31, 32, 33, 200, 517])
def test_slots_have_their_sizes_and_never_cross_a_cut(tokens):
    hidden = torch.nn.functional.normalize(
        torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(tokens)), dim=-1
    )
    cuts = torch.zeros(tokens, dtype=torch.bool)
    cuts[tokens // 3] = True
    for starts in (partition(hidden, cuts, torch.rand(tokens))[0], uniform(tokens, cuts)):
        starts = starts.tolist()
        assert starts[0] == 0
        assert tokens // 3 in starts
        sizes = [b - a for a, b in zip(starts, [*starts[1:], tokens], strict=True)]
        assert max(sizes) <= 128
        free = [
            size
            for size, end in zip(sizes, [*starts[1:], tokens], strict=True)
            if end not in (tokens // 3, tokens)
        ]
        assert all(size >= 16 for size in free)


def test_the_dynamic_program_cuts_where_the_score_is():
    hidden = torch.nn.functional.normalize(torch.ones(1, 300, 4) + 1e-3 * torch.randn(1, 300, 4), dim=-1)
    surprisal = torch.zeros(300)
    surprisal[[59, 139, 219]] = 50.0
    starts, _ = partition(
        hidden, torch.zeros(300, dtype=torch.bool), surprisal + torch.rand(300), surprise=100.0
    )
    assert {60, 140, 220} <= set(starts.tolist())


def test_robust_scores_bear_outliers():
    score = robust(torch.tensor([0.0, 1.0, 2.0, 1e9]))
    assert score.isfinite().all()
    assert float(score.abs().max()) <= 6.0


# -- trees ---------------------------------------------------------------------------------------

PAIRS, SLOTS, QUERIES, DIM = 2, 3, 4, 8
INV_FREQ = torch.tensor([1.0, 0.3, 0.05, 0.01])


def axis(sizes=(40, 17, 1), seed=0):
    """Random tokens of two pairs with the same slots, and judges."""
    generator = torch.Generator().manual_seed(seed)
    length = sum(sizes)
    slot = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).repeat(PAIRS)
    pair = torch.arange(PAIRS).repeat_interleave(length)
    total = len(slot)
    root = torch.ones(total, dtype=torch.bool)
    root[1:] = (slot[1:] != slot[:-1]) | (pair[1:] != pair[:-1])
    angles = torch.arange(length)[:, None] * INV_FREQ
    cos, sin = angles.cos(), angles.sin()
    keys = torch.randn(total, DIM, generator=generator)
    queries = torch.randn(PAIRS, len(sizes), QUERIES, DIM, generator=generator)
    position = torch.arange(length).repeat(PAIRS)
    rotated = rotate(keys, cos[position], sin[position])
    logits = (queries[pair, slot] @ rotated[:, :, None])[..., 0] * 0.5
    lse = torch.full((PAIRS, len(sizes), QUERIES), 5.0)
    tokens = Tokens(
        pair, slot, root, position, keys, torch.randn(total, DIM, generator=generator),
        torch.rand(total, generator=generator) ** 3, torch.randn(total, generator=generator), (logits - 5.0).exp(),
    )  # fmt: skip
    judges = Judges(queries, lse, torch.tensor([1.0, 0.5]), torch.full((PAIRS,), 0.05), 0.5, cos, sin, 0)
    return tokens, judges


def rotate(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def entries_of(tokens, judges, budget, **options):
    forest = grow(tokens, judges, budget, **options)
    done = sort_auction(forest.utility, forest.cost, forest.parent, budget)
    short = budget - int(forest.cost[done].sum())
    return frontier(forest, done, short), forest


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [1, 2, 3, 6, 11, 30, 77, 116])
def test_lazy_trees_give_the_same_entries_and_the_budget_is_exact(seed, budget):
    tokens, judges = axis(seed=seed)
    (low, high), lazy = entries_of(tokens, judges, budget)
    (low2, high2), whole = entries_of(tokens, judges, budget, lazy=False)
    assert torch.equal(low, low2)
    assert torch.equal(high, high2)
    assert len(low) == budget
    assert len(lazy.cost) <= len(whole.cost)
    assert (low[1:] >= high[:-1]).all(), "no token is in two entries"
    (low, _), _ = entries_of(tokens, judges, budget, pooled=True)
    assert len(low) == budget


def test_few_operations_are_priced_where_the_budget_is_small():
    tokens, judges = axis(sizes=(100, 90, 80), seed=3)
    _, lazy = entries_of(tokens, judges, 8)
    _, whole = entries_of(tokens, judges, 8, lazy=False)
    assert len(lazy.cost) < len(whole.cost) / 3


def test_the_tree_of_all_operations_ends_in_the_tokens_themselves():
    tokens, judges = axis()
    (low, high), forest = entries_of(tokens, judges, len(tokens))
    assert torch.equal(low, torch.arange(len(tokens)))
    assert (high - low == 1).all()
    assert int(forest.level.max()) <= 16
    logical = tokens.position + 100
    made = prototypes(tokens, logical, low, high, judges.sensitivity)
    assert torch.equal(made[1], tokens.keys)
    assert torch.equal(made[2], tokens.values)
    assert (made[3] == 0).all()
    assert torch.equal(made[4].long(), tokens.position)
    assert torch.equal(made[5].long(), logical)


@pytest.mark.parametrize("part", [(0, 40), (3, 9), (40, 57), (58, 98), (60, 62), (5, 6)])
def test_distortion_by_sums_is_distortion_token_by_token(part):
    tokens, judges = axis()
    low, high = part
    pricer = _Pricer(tokens, judges)
    damage, dropped = pricer.distortion(torch.tensor([low]), torch.tensor([high]))
    pair, slot, run = int(tokens.pair[low]), int(tokens.slot[low]), slice(low, high)
    keys, n = tokens.keys[run], high - low
    mean = keys.mean(0)
    coherence = mean.norm() / keys.norm(dim=1).mean()
    m = min(max(1.0, n * float(coherence) ** 2), n)
    place = round(float(tokens.position[run].double().mean()))
    weight = tokens.relevance[run] + 0.1 * tokens.relevance[run].mean()
    generator = torch.Generator().manual_seed(8)
    values = tokens.values[run] @ (torch.randn(DIM, 8, generator=generator) / 8**0.5)
    value = (weight[:, None] * values).sum(0) / weight.sum()
    want = 0.0
    for query, lse, share in zip(
        judges.queries[pair, slot], judges.lse[pair, slot], tokens.shares[run].T, strict=True
    ):
        mass, moved = share.sum(), (share[:, None] * values).sum(0)
        got = m * ((query @ rotate(mean, judges.cos[place], judges.sin[place])) * judges.scale - lse).exp()
        wrong = (
            0.25 * (mass - got) ** 2 / mass**2 + 0.75 * (moved - got * value).norm() ** 2 / moved.norm() ** 2
        )
        want += float(mass * min(4.0, wrong)) / QUERIES
    assert float(dropped[0]) == pytest.approx(float(tokens.shares[run].sum(0).mean()), rel=1e-3)
    assert float(damage[0]) == pytest.approx(0.0 if n == 1 else want, rel=5e-3, abs=1e-6)


def test_values_lean_by_the_node_not_by_the_head():
    """Beside a node that has all of a head's relevance, the values of another still follow its own."""
    tokens, judges = axis()
    relevance = tokens.relevance.clone()
    relevance[:40] *= 1e6
    relevance[98:115] = 0.0
    tokens = replace(tokens, relevance=relevance)
    low, high = torch.tensor([0, 40, 98]), torch.tensor([40, 57, 115])
    made = prototypes(tokens, tokens.position, low, high, judges.sensitivity)[2]
    for row, (first, last) in enumerate([(0, 40), (40, 57), (98, 115)]):
        own, values = relevance[first:last], tokens.values[first:last]
        weight = own + 0.1 * own.mean() if bool(own.any()) else torch.ones(last - first)
        want = (weight[:, None] * values).sum(0) / weight.sum()
        torch.testing.assert_close(made[row], want, atol=1e-5, rtol=1e-4)
    pricer = _Pricer(tokens, judges)
    pair = tokens.pair[low]
    priced = blend(
        pricer._between(pricer._leaning, low, high, pair),
        pricer._between(pricer._relevance, low, high, pair)[:, None],
        pricer._between(pricer._plain, low, high, pair) / (high - low)[:, None],
    )
    generator = torch.Generator().manual_seed(8)
    torch.testing.assert_close(
        priced.float(), made @ (torch.randn(DIM, 8, generator=generator) / 8**0.5), atol=1e-4, rtol=1e-3
    )


def test_ranges_know_their_largest():
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))
    values[7] = values[9] = 50.0  # of equals the first
    find = _Argmax(values)
    low = torch.tensor([0, 5, 8, 44, 100, 299, 0])
    high = torch.tensor([300, 10, 10, 45, 228, 300, 200])
    want = [int(values[a:b].argmax()) + int(a) for a, b in zip(low, high, strict=True)]
    want[0] = want[1] = want[6] = 7
    assert find(low, high.clamp(max=300)).tolist()[1:] == want[1:]


# -- prototypes ----------------------------------------------------------------------------------


def one_run(keys, values, position, relevance=None):
    n = len(keys)
    relevance = torch.ones(n) if relevance is None else relevance
    zeros = torch.zeros(n, dtype=torch.int64)
    tokens = Tokens(
        zeros, zeros, zeros == 1, position, keys, values, relevance, torch.zeros(n), torch.zeros(n, 1)
    )
    made = prototypes(tokens, position, torch.tensor([0]), torch.tensor([n]), torch.ones(1))
    return assemble([made], 1, 1)


def test_identical_tokens_at_different_positions_are_one_entry_of_that_token():
    """Raw keys are averaged: with rotated ones, the mean of the same key at several places would be another key."""
    key, value = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
    made = one_run(key.expand(5, DIM), value.expand(5, DIM), torch.tensor([3, 10, 100, 1000, 4000]))
    torch.testing.assert_close(made.keys[0], key, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(made.values[0], value, atol=1e-6, rtol=1e-6)
    assert float(made.bias[0]) == pytest.approx(math.log(5), abs=1e-5)
    assert int(made.position[0]) == 1023
    angles = torch.tensor([3.0, 10, 100, 1000, 4000])[:, None] * INV_FREQ
    naive = rotate(key.expand(5, DIM), angles.cos(), angles.sin()).mean(0)
    assert float((naive.norm() - key.norm()).abs()) > 0.1 * float(key.norm())


def test_opposite_keys_count_once_and_values_follow_relevance():
    key = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
    values = torch.stack([torch.ones(DIM), torch.zeros(DIM)])
    made = one_run(torch.stack([key, -key]), values, torch.tensor([0, 1]), torch.tensor([3.0, 1.0]))
    assert float(made.bias[0]) == 0.0  # n h^2 = 0 is clamped to one
    weight = torch.tensor([3.0, 1.0]) + 0.2
    torch.testing.assert_close(made.values[0], (weight[0] / weight.sum()).expand(DIM))
    # 10/11 of the relevance-weighted mean and 1/11 of the plain one
    torch.testing.assert_close(made.values[0, 0], torch.tensor(10 / 11 * 3 / 4 + 1 / 11 * 1 / 2))


# -- the whole -----------------------------------------------------------------------------------

VARIANTS = [
    {},
    {"apart": "split"},
    {"floor": 0.0},
    {"quotas": True},
    {"pooled": True},
    {"trees": False},
    {"slots": "uniform"},
    {"hops": 0},
    {"hops": 2},
    {"pool": 1},
    {"repeat": 0.0},
    {"guess": False},
    {"floor": 1.0},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_variant_keeps_the_budget(engines, options):
    engine = engines("qwen2")
    session = filled(engine, 150)
    for question in (None, [30, 31, 32]):
        for ratio in (1.02, 1.33, 4, 100):
            fork = session.fork()
            done = fork.compress(ratio=ratio, question=question, options=options)
            total = int(heads(engine) * 150 / ratio)
            assert fork.memory.frozen.entries == done.entries
            assert heads(engine) * fork.memory.ledger.rows + done.entries == max(total, heads(engine) * 4 + 1)
            check_ledger(fork)
            assert answer(fork, steps=1).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
@pytest.mark.parametrize("granularity", ["session", "layer"])
def test_layers_that_lost_different_tokens(engines, family, granularity):
    engine = engines(family)
    session = engine.session(budget=100, chunk=64, slack=8, policy="h2o", granularity=granularity)
    session.append_ids(random_ids(130, 1), span="a")
    session.append_ids(random_ids(50, 2), span="b")
    session.compress(["a"], ratio=3)
    check_ledger(session)
    first = answer(session)
    assert first.isfinite().all()
    assert torch.equal(first, answer(session))


def test_prototypes_never_mix_two_messages(engines):
    session = engines("qwen2").session(policy="full", chunk=64)
    for number in range(6):
        session.append_ids(random_ids(21, number))
    session.compress(ratio=16, options={"floor": 0.0}, recent=0)
    (segment,) = session.memory.frozen.segments
    edges = torch.tensor(session.memory.ledger.spans.starts)
    inside = torch.searchsorted(edges, segment.entries.start, right=True)
    assert torch.equal(inside, torch.searchsorted(edges, segment.entries.stop - 1, right=True))


def test_repeated_text_loses_little(engines, models):
    """Four times the same sentence: prototypes with multiplicities stand for it far better than a few of its tokens."""
    engine = engines("llama")
    session = filled(engine, 10)
    session.append_ids([50] * 200)
    want = answer(session, steps=0).softmax(-1)

    def off(**options):
        fork = session.fork()
        fork.compress(ratio=16, recent=0, **options)
        return float((answer(fork, steps=0).softmax(-1) - want).abs().sum(-1).mean())

    assert off(options={"floor": 0.5}) < off(method="random") / 2


@pytest.mark.parametrize("hops", [0, 1, 2])
def test_what_a_question_points_to_is_read_again(context, hops):
    """Whole slots, the one with the most relevant token first, each once, and no more than a share of the tokens."""
    context, _ = context
    size, repeat = 30, 0.25
    slot = torch.arange(context.shape[2])[None] // size
    slots = int(slot.max()) + 1
    readings = []

    class Noting:
        limit = context.reader.limit

        def behind(self, ids, first=0):
            readings.append(list(ids)[first:])
            return context.reader.behind(ids, first)

    noted = replace(context, reader=Noting(), question=[7, 8, 9], cue=lambda number, before: [])
    options = {"probes": 8, "watchers": 2, "pool": 5, "repeat": repeat, "guess": True}
    flow = gather(noted, slot, slots, hops=hops, **options)
    alone = gather(noted, slot, slots, hops=0, **options)
    assert readings[0] == [7, 8, 9]
    assert bool((flow.relevance >= alone.relevance).all())
    again = [ids for ids in readings[1:] if ids != [7, 8, 9]]
    assert bool(again) == bool(hops)
    text = context.ids[0].tolist()
    found = [
        number
        for ids in again
        for number in range(slots)
        for stretch in [text[max(0, number * size - 8) : (number + 1) * size]]
        if any(ids[at : at + len(stretch)] == stretch for at in range(len(ids)))
    ]
    assert len(found) == len(set(found))
    assert bool(hops) == bool(found)
    score = (alone.relevance * alone.sensitivity[..., None]).mean((0, 1))
    if hops:
        assert int(score.argmax()) // size in found
        assert len(found) * size <= repeat * len(text) + hops * size
    changed = (flow.relevance > alone.relevance).any(0).any(0).nonzero().flatten() // size
    assert set(changed.tolist()) <= {number - back for number in found for back in (0, 1)}


def test_queries_of_the_turn_that_followed_add_to_the_evidence(context):
    context, session = context
    slot = torch.arange(context.shape[2])[None] // 30
    options = {"probes": 16, "watchers": 2, "pool": 5, "hops": 1, "repeat": 0.25, "guess": True}
    alone = gather(context, slot, 10, **options)
    after = SessionReader(session.engine, session.memory, 64).behind([7, 8, 9, 10])
    both = gather(replace(context, delayed=after), slot, 10, **options)
    assert bool((both.relevance >= alone.relevance).all())
    assert bool((both.relevance > alone.relevance).any())


def test_wrong_options_are_named():
    for options in (
        {"apart": "none"},
        {"slots": "none"},
        {"floor": 1.5},
        {"repeat": -1},
        {"hops": -1},
        {"probes": 0},
        {"pool": 2},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            replace(GraceKV(), **options)
