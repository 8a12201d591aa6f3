"""Every policy against a reference that looks at one slot after another."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure import Plan, Step
from tenure.aging import RegionVectors
from tenure.errors import ConfigError
from tenure.policies import POLICIES, Auto, MemDecay, Policy, View, make_policy, select
from tenure.policies.base import ascending
from tests.conftest import random_ids
from tests.oracles import check_ledger

EVICTING = [name for name in POLICIES if name != "full"]


# -- the reference -----------------------------------------------------------------------------------


def splitmix(logical: int, seed: int) -> int:
    """The finaliser of splitmix64 on an odd multiple of the index, in Python's own integers."""
    mask = 2**64 - 1
    x = (logical * 0x9E3779B97F4A7C15 + seed) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def naive_floor(options, budget):
    return min(options.get("min_recent", 256), max(1, budget // 4))


def naive_hard(slot, sinks):
    return slot["pin"] == 2 or slot["logical"] < sinks


def naive_first(options, groups, budget, sinks):
    """Spans that the current step reads and that are kept whole behind sinks and hard pins, smallest first."""
    if options.get("mode") == "paper":
        return set()
    mine = {
        s["span"]: s["size"] for slots in groups for s in slots if s["current"] and not naive_hard(s, sinks)
    }
    room = budget - max(sum(naive_hard(s, sinks) for s in slots) for slots in groups)
    room -= max(1, naive_floor(options, budget) // 4)
    found = set()
    for span in sorted(mine, key=lambda span: (mine[span], span)):
        if mine[span] <= room:
            room -= mine[span]
            found.add(span)
    return found


def naive_whole(options, groups, budget, sinks):
    """Planned spans that stay, the current step's and then nearest reader first, and how many slots are left."""
    first = naive_first(options, groups, budget, sinks)

    def leads(slot):
        return slot["span"] in first and slot["current"] and not naive_hard(slot, sinks)

    def safe(slot):
        return (slot["pin"] > 0 or slot["logical"] < sinks) and not leads(slot)

    sizes = {s["span"]: s["size"] for slots in groups for s in slots}
    spans = {
        s["span"]: s["reader"]
        for slots in groups
        for s in slots
        if s["reader"] >= 0 and not safe(s) and not leads(s)
    }
    room = budget - max(sum(map(safe, slots)) for slots in groups) - naive_floor(options, budget)
    room -= sum(sizes[span] for span in first)
    stay = set(first)
    for span in sorted(spans, key=lambda span: (spans[span], sizes[span], span)):
        if sizes[span] <= room:
            room -= sizes[span]
            stay.add(span)
    taken = max(sum(safe(s) or (s["reader"] >= 0 and s["span"] in stay) for s in slots) for slots in groups)
    return stay, budget - taken


def naive_key(name, options, slots, row, whole, sinks):
    """What a policy orders slots by; higher stays."""
    slot = slots[row]
    if name == "random":
        return splitmix(slot["logical"], options.get("seed", 0))
    if name == "recency":
        return slot["logical"]
    if name == "snapkv":
        half = options.get("kernel", 5) // 2
        near = [s["score"] for s in slots[max(0, row - half) : row + half + 1]]
        return float(np.float32(sum(near)) / np.float32(len(near)))
    delta = slot["reader"]
    if name == "foresight" and options.get("mode") == "paper":
        phi = options.get("phi", 1e5)
        bonus = phi / 2 * (1 + 1 / (1 + delta)) if delta >= 0 else -phi if delta == -2 else 0.0
        return float(np.float32(slot["score"]) + np.float32(bonus))
    if name == "foresight":
        if delta < 0:
            return (delta + 1, 0, slot["score"])
        stays = slot["span"] in whole or slot["pin"] > 0 or slot["logical"] < sinks
        return (1 if stays else -1, -delta if stays else 0, slot["score"])
    return slot["score"]


def naive_share(keys, safe):
    """Places from 0 to 1 among the slots that may go; 1 for the others."""
    order = sorted(range(len(keys)), key=lambda row: (safe[row], not safe[row] and keys[row], -row))
    free = np.float32(max(1, safe.count(False)))
    return [min(np.float32(1), np.float32(order.index(row)) / free) for row in range(len(keys))]


def naive_memdecay(options, slots, sinks, recent):
    """Scores of the slots' pages, one slot and one page after another, in fp32."""
    f32, mix = np.float32, options.get("mix", MemDecay.mix)
    size, weight = options.get("page", MemDecay.page), f32(options.get("page_max", MemDecay.page_max))
    scores = []
    for slot in slots:
        base, half_life, now, decay = TABLE[slot["region"]] if options.get("regions", True) else TABLE[8]
        if options.get("decay", True):
            keep = f32(options.get("persistent", MemDecay.persistent))
            left = f32(2.0 ** -((now - slot["born"]) / half_life))
            scores.append(f32(base) * (keep + (1 - keep) * left) + f32(slot["energy"]) * f32(decay))
        else:
            scores.append(f32(base) + f32(slot["energy"]))
    if mix < 1:
        safe = [
            slot["pin"] > 0 or slot["logical"] < sinks or row >= len(slots) - recent
            for row, slot in enumerate(slots)
        ]
        heavy = [slot["score"] for slot in slots]
        shares = naive_share(scores, safe), naive_share(heavy, safe)
        scores = [f32(mix) * a + f32(1 - mix) * b for a, b in zip(*shares, strict=True)] if mix else heavy
    if size == 1:
        return [float(score) for score in scores]
    pages, last = {}, None
    for number, (slot, score) in enumerate(zip(slots, scores, strict=True)):
        # A region that returns within one block and message starts a page of its own.
        here = (slot["logical"] // size, slot["span"], slot["region"])
        if here != last:
            page = number
        last = here
        pages.setdefault(page, []).append((number, f32(score)))
    spread, found, own = f32(options.get("spread", MemDecay.spread)), {}, []
    for members in pages.values():
        values = [value for _, value in members]
        mean = sum(values, f32(0)) / f32(len(values))  # rounded after each, as the page is summed
        own.append((weight * max(values) + (1 - weight) * mean, slots[members[0][0]]))
    for place, members in enumerate(pages.values()):
        score, slot = own[place]
        beside = []
        for other in (place - 1, place + 1):
            there = own[other] if 0 <= other < len(own) else (score, slot)
            same = (there[1]["span"], there[1]["region"]) == (slot["span"], slot["region"])
            beside.append(there[0] if same else score)
        for number, _ in members:
            found[number] = (
                float((1 - spread) * score + spread / 2 * (beside[0] + beside[1])) if spread else score
            )
    return [found[number] for number in range(len(slots))]


def naive_rules(options, groups, budget, sinks):
    """Soft pins on system text and tool schemas: texts that fit their share, or the beginning of the first."""
    most = int(options.get("rules", Auto.rules) * budget)
    first = naive_first(options, groups, budget, sinks)

    def leads(slot):
        return slot["span"] in first and slot["current"] and not naive_hard(slot, sinks)

    if any(slot["current"] for slots in groups for slot in slots):
        taken = max(sum(leads(s) or naive_hard(s, sinks) for s in slots) for slots in groups)
        most = max(0, min(most, budget - taken - naive_floor(options, budget)))
    found = []
    for slots in groups:
        texts = {}
        for slot in slots:
            if slot["region"] in (0, 1) and slot["pin"] == 0 and slot["reader"] != -2 and not leads(slot):
                texts.setdefault((slot["span"], slot["region"]), []).append(slot["logical"])
        ruled = set()
        for _, text in sorted(texts.items()):
            if not ruled:
                ruled |= set(text[:most])
            elif len(ruled) + len(text) <= most:
                ruled |= set(text)
        copies = []
        for slot in slots:
            rule = slot["logical"] in ruled
            copies.append({**slot, "pin": 1 if rule else slot["pin"], "rule": rule})
        found.append(copies)
    return found


def naive_auto(options, slots, whole, sinks, recent):
    """Class and place of each slot: rules, planned spans by reader, the hybrid, spilled ones."""
    bare = [{**slot, "pin": 0 if slot["rule"] else slot["pin"]} for slot in slots]
    hybrid = naive_memdecay(options, bare, sinks, recent)
    keys = []
    for slot, score in zip(slots, hybrid, strict=True):
        if slot["rule"]:
            keys.append((10_000, score))
        elif slot["reader"] < 0:
            keys.append((slot["reader"] + 1, score))
        else:
            stays = slot["span"] in whole or slot["pin"] > 0 or slot["logical"] < sinks
            keys.append((9000 - slot["reader"] if stays else -1, score))
    return keys


def naive_recent(name, options, groups, budget, sinks):
    """How many of the newest slots a policy protects."""
    share = int(budget * options.get("recent_ratio", 0.5))
    if name == "random":
        return share
    if name == "h2o":
        return max(1, share)
    if name in ("foresight", "auto"):
        if name == "auto":
            share = naive_recent("memdecay", options, groups, budget, sinks)
        share = max(1, share)
        if options.get("mode") == "paper":
            return share
        return min(share, max(naive_floor(options, budget), naive_whole(options, groups, budget, sinks)[1]))
    if name == "memdecay":
        few = min(options.get("recent_slots", MemDecay.recent_slots), budget // 2)
        return max(1, int(budget * options.get("recent_ratio", MemDecay.recent_ratio)), few)
    return {"snapkv": min(options.get("window", 64), budget // 2), "tova": 1, "recency": 0}[name]


def naive_select(name, options, groups, budget, sinks):
    """Rows that stay, one list a group."""
    groups = naive_rules(options, groups, budget, sinks) if name == "auto" else groups
    recent = naive_recent(name, options, groups, budget, sinks)
    whole, first = set(), set()
    if name in ("foresight", "auto"):
        whole = naive_whole(options, groups, budget, sinks)[0]
        first = naive_first(options, groups, budget, sinks)
    kept = []
    for slots in groups:
        pages = naive_memdecay(options, slots, sinks, recent) if name == "memdecay" else None
        if name == "auto":
            pages = naive_auto(options, slots, whole, sinks, recent)

        def order(row, slots=slots, pages=pages):
            slot = slots[row]
            key = naive_key(name, options, slots, row, whole, sinks) if pages is None else pages[row]
            by_key = (*key, -row) if isinstance(key, tuple) else (key, -row)
            if naive_hard(slot, sinks):
                return (4, *by_key)
            if slot["current"] and slot["span"] in first:
                return (3, *by_key)
            if row >= len(slots) - recent:
                return (2, row)
            return (1 if slot["pin"] == 1 and not slot.get("rule") else 0, *by_key)

        ranked = sorted(range(len(slots)), key=order, reverse=True)
        kept.append(sorted(ranked[:budget]))
    return kept


TABLE = {code: (1.0 - code / 16, 2.0 ** (code % 3), 6 + code, 2.0 ** -(code % 2)) for code in range(9)}
"""By region number: base priority, half-life, present, what is left of a stored energy."""


def vectors() -> RegionVectors:
    base, half_life, now, decay = (torch.tensor(column) for column in zip(*TABLE.values(), strict=True))
    return RegionVectors(
        base=base.float(),
        rate=1 / half_life.float(),
        cap=torch.full((9,), float("inf")),
        now=now.double(),
        decay=decay.float(),
        pin=torch.zeros(9, dtype=torch.int64),
        kind=torch.arange(9),
    )


def view_of(groups, budget, sinks=0) -> View:
    def column(name, dtype=torch.int64):
        return torch.tensor([[slot[name] for slot in slots] for slots in groups], dtype=dtype)

    sizes = {slot["span"]: slot["size"] for slots in groups for slot in slots}
    return View(
        logical=column("logical"),
        score=column("score", torch.float32),
        readers=column("reader"),
        current=column("current", torch.bool),
        pin=column("pin"),
        span=column("span"),
        region=column("region"),
        born=column("born", torch.float64),
        energy=column("energy", torch.float32),
        table=vectors(),
        sizes=torch.tensor([sizes.get(span, 0) for span in range(max(sizes) + 1)]),
        length=max(slots[-1]["logical"] for slots in groups) + 1,
        budget=budget,
        sinks=sinks,
    )


def table_of(draw: random.Random):
    """Groups of slots with few distinct scores, so that ties are common; half of them of many rows."""
    rows = draw.choice([draw.randint(1, 30), draw.randint(20, 30)])
    sizes = [draw.randint(1, 14) for _ in range(7)]
    spans = [number for number, size in enumerate([*sizes, 61]) for _ in range(size)][:61]
    readers = [draw.choice([-2, -1, -1, 0, 0, 1, 5]) for _ in range(8)]
    current = [draw.random() < 0.5 for _ in range(8)]
    pins = draw.choice([[0], [0, 0, 0, 1, 2]])
    groups = []
    for _ in range(draw.randint(1, 3)):
        groups.append(
            [
                {
                    "logical": index,
                    "score": draw.randint(0, 3) / 4,
                    "span": spans[index],
                    "size": spans.count(spans[index]),
                    "reader": readers[spans[index]],
                    "current": readers[spans[index]] == 0 and current[spans[index]],
                    "pin": draw.choice(pins),
                    "region": draw.choice([0, 0, 5, 7, 8]),
                    "born": float(draw.randint(0, 6)),
                    "energy": draw.randint(0, 4) / 8,
                }
                for index in sorted(draw.sample(range(61), rows))
            ]
        )
    return groups


OPTIONS = {
    "random": [{}, {"seed": 7, "recent_ratio": 0.0}],
    "recency": [{}],
    "h2o": [{}, {"recent_ratio": 0.2, "window": 0}],
    "snapkv": [{}, {"window": 3, "kernel": 3}, {"kernel": 1}],
    "tova": [{}],
    "foresight": [
        {},
        {"min_recent": 2},
        {"mode": "paper"},
        {"mode": "paper", "phi": 0.5, "recent_ratio": 0.1},
    ],
    "memdecay": [
        {},
        {"mix": 1.0, "page": 4, "page_max": 0.25, "persistent": 0.25},
        {"mix": 0.25, "page": 1, "recent_ratio": 0.0, "recent_slots": 0},
        {"mix": 0.0, "page": 8, "spread": 0.0, "recent_slots": 2},
        {"mix": 1.0, "regions": False, "page": 1},
        {"mix": 0.5, "decay": False, "page": 4, "recent_slots": 3},
    ],
    "auto": [{}, {"rules": 0.25, "min_recent": 2, "page": 4}, {"rules": 0.0}, {"rules": 1.0, "mix": 1.0}],
}
CASES = [(name, options) for name in EVICTING for options in OPTIONS[name]]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_selection_equals_the_naive_one(name, options):
    draw, policy = random.Random(f"{name} {options}"), make_policy(name, options)
    for number in range(200):
        groups = table_of(draw)
        budget, sinks = draw.randint(1, 30), draw.randint(0, 4)
        view = view_of(groups, budget, sinks)
        got = select(policy, view)
        assert got.tolist() == naive_select(name, options, groups, budget, sinks), number
        assert torch.equal(got, select(policy, view)), "the same view gives the same rows"
        assert got.shape[1] == min(budget, len(groups[0])), "one row at least, and never more than the budget"


def test_reports_show_the_score_beneath_plan_and_rules():
    groups = table_of(random.Random("told"))
    view = view_of(groups, budget=20)
    for name in POLICIES:
        policy, want = make_policy(name), view.score
        if name in ("memdecay", "auto"):
            want = torch.tensor([naive_memdecay({}, held, 0, policy.recent(view)) for held in groups])
        torch.testing.assert_close(policy.told(view), want, msg=name)


def test_every_policy_is_in_the_matrix():
    assert set(OPTIONS) == set(EVICTING)


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(st.lists(st.integers(0, 4), min_size=12, max_size=12), min_size=1, max_size=3))
def test_ascending_gives_ties_to_the_earlier_token(scores):
    got = ascending(torch.tensor(scores, dtype=torch.float32))
    for row, places in zip(scores, got.tolist(), strict=True):
        worst_first = sorted(range(12), key=lambda at: (row[at], -at))
        assert [worst_first.index(at) for at in range(12)] == places


# -- protection --------------------------------------------------------------------------------------


def slots(count, **columns):
    blank = {"score": 0.0, "reader": -1, "current": False, "pin": 0, "span": 0, "size": 1}
    blank |= {"region": 8, "born": 0.0, "energy": 0.0}
    return [
        {"logical": i, **blank, **{name: values[i] for name, values in columns.items()}} for i in range(count)
    ]


@pytest.mark.parametrize("name", EVICTING)
def test_sinks_and_hard_pins_survive_everything(name):
    """The worst scores, no reader, not recent: they stay, and the newest of the recent fill the rest."""
    pins = [2 if 10 <= i < 14 else 0 for i in range(40)]
    view = view_of([slots(40, score=[i / 40 for i in range(40)], pin=pins)], budget=9, sinks=4)
    kept = select(make_policy(name), view)[0].tolist()
    assert kept[:8] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert len(kept) == 9
    if name != "random":
        assert kept[8] == 39


@pytest.mark.parametrize("name", EVICTING)
def test_soft_pins_go_last_of_the_unprotected(name):
    pins = [1 if 5 <= i < 9 else 0 for i in range(20)]
    view = view_of([slots(20, score=[i / 20 for i in range(20)], pin=pins)], budget=10, sinks=1)
    kept = select(make_policy(name), view)[0].tolist()
    assert {0, 5, 6, 7, 8} <= set(kept)
    # Under a budget that they cannot fit they do go: soft is a wish.
    few = select(make_policy(name), view_of([slots(20, pin=pins)], budget=3, sinks=2))[0].tolist()
    assert {0, 1} <= set(few)
    assert len(few) == 3


# -- foresight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0, 1, 2, 9, 1000])
def test_paper_bonus(delta):
    """phi for the current step, falling towards phi / 2; 0 without a reader."""
    view = view_of([slots(2, score=[3.0, 3.0], reader=[delta, -1])], budget=1)
    planned, unplanned = make_policy("foresight", {"mode": "paper", "phi": 1000.0}).rank(view)[0].tolist()
    assert planned == pytest.approx(3 + 500 * (1 + 1 / (1 + delta)))
    assert unplanned == 3.0


def test_sooner_reader_wins_whatever_the_scores_say():
    """In paper mode a high score can turn two readers round; in lexicographic mode it cannot."""
    table = [slots(3, score=[0.0, 90000.0, 10.0**6], reader=[4, 5, -1], span=[0, 1, 2])]
    orders = {}
    for mode in ("lexicographic", "paper"):
        rank = make_policy("foresight", {"mode": mode}).rank(view_of(table, budget=8))[0]
        orders[mode] = rank.argsort(descending=True).tolist()
    assert orders == {"lexicographic": [0, 1, 2], "paper": [2, 1, 0]}


def test_planned_slots_take_from_the_recent_ones_down_to_a_floor():
    policy = make_policy("foresight", {"min_recent": 5})
    for planned, recent in ((0, 20), (10, 20), (26, 14), (34, 6), (60, 6)):
        readers = [0 if i < planned else -1 for i in range(80)]
        spans, sizes = [i // 2 for i in range(80)], [2] * 80
        table = slots(80, reader=readers, span=spans, size=sizes)
        assert policy.recent(view_of([table], budget=40)) == recent
    small = view_of([slots(80, reader=[0] * 80, span=list(range(80)))], budget=12)
    assert policy.recent(small) == 3, "at most a quarter of the budget"


def test_what_the_current_step_reads_takes_all_but_a_few_of_the_newest_slots():
    """It comes before the floor of the recent ones, before soft pins and before what others read now."""
    columns = {
        "reader": [0] * 52 + [-1] * 28,
        "current": [20 <= i < 52 for i in range(80)],
        "span": [i // 10 if i < 20 else 2 if i < 52 else 3 for i in range(80)],
        "size": [10] * 20 + [32] * 32 + [28] * 28,
        "pin": [0] * 70 + [1] * 10,
    }
    view = view_of([slots(80, **columns)], budget=40, sinks=2)
    policy = make_policy("foresight", {"min_recent": 8})
    assert policy.room(40, 2) == 36
    kept = select(policy, view)[0].tolist()
    assert kept == [0, 1, *range(20, 52), *range(74, 80)]
    tight = view_of([slots(80, **columns)], budget=36, sinks=2)
    assert select(policy, tight)[0].tolist() == [0, 1, *range(20, 52), 78, 79], "two slots for the newest"
    short = view_of([slots(80, **columns)], budget=35, sinks=2)
    assert not set(range(20, 52)) & set(select(policy, short)[0].tolist()), "whole or not at all"


@pytest.mark.parametrize("policy", ["foresight", "auto"])
def test_a_planners_guesses_do_not_push_out_what_the_step_reads(engines, policy):
    plan = Plan([Step("now", ("large",))])
    session = engines("llama", layers=2).session(
        policy=policy, plan=plan, budget=64, chunk=16, slack=4, sinks=2
    )
    plan.add_turn_reads(["g1", "g2", "large"])
    for name, size in (("g1", 11), ("large", 34), ("g2", 12)):
        session.append_ids(random_ids(size, seed=size), span=name)
    fill(session, 4)
    resident = {name: session.explain(name).resident for name in ("g1", "large", "g2")}
    assert resident["large"] == 1.0
    assert resident["g1"] == 1.0, "beside it, one of them fits"
    assert resident["g2"] < 1.0


def foresight_session(engines, plan, **options):
    options = {"budget": 64, "chunk": 16, "slack": 4, "sinks": 2, **options}
    return engines("llama", layers=2).session(policy="foresight", plan=plan, **options)


def fill(session, rounds, seed=50):
    for number in range(rounds):
        session.append_ids(random_ids(16, seed=seed + number))
        check_ledger(session)


@pytest.mark.parametrize("mode", ["lexicographic", "paper"])
def test_the_bonus_lasts_until_the_last_reader_has_finished(engines, mode):
    plan = Plan([Step("one", ("facts",)), Step("two", ("facts",)), Step("three")])
    session = foresight_session(engines, plan, policy_options={"mode": mode})
    session.append_ids(random_ids(20), span="facts")
    session.append_ids(random_ids(20, seed=1), span="noise")

    def look(seed):
        # Nobody has ever looked at the facts: only the plan can keep them.
        for _ in range(4):
            session.memory.ledger.score[:, :22] = 0.0
            fill(session, 2, seed=seed)
        return session.explain("facts")

    assert look(50).resident == 1.0
    assert look(50).readers == ("one", "two")
    plan.finish("one")
    plan.begin("two")
    assert look(70).resident == 1.0, "evictions happen inside the step that reads"
    plan.finish("two")
    report = look(90)
    assert report.resident == pytest.approx(2 / 20), "only the sinks are left"
    assert report.readers == ()
    assert dict(report.evicted) == {"expired": 36}
    assert set(session.explain("noise").evicted) == {"budget"}


def test_when_planned_spans_do_not_fit_the_farthest_go(engines):
    plan = Plan([Step("now", ("a",)), Step("soon", ("b",)), Step("late", ("c",))])
    session = foresight_session(engines, plan, budget=56, policy_options={"min_recent": 4})
    for name in "cba":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    fill(session, 6)
    assert session.explain("a").resident == 1.0
    assert session.explain("b").resident == 1.0
    report = session.explain("c")
    assert report.resident <= 2 / 20, "a span goes whole, save for what are sinks"
    assert set(report.evicted) == {"plan"}
    assert session.stats().planned_residency == pytest.approx((2 + report.resident) / 3)


def test_planned_spans_stay_whole_or_go_whole(engines):
    """Whatever the scores of their slots; a smaller one may stay where a larger, sooner read one does not fit."""
    plan = Plan([Step("now", ("a",)), Step("soon", ("big",)), Step("late", ("c", "d"))])
    session = foresight_session(engines, plan, budget=64, policy_options={"min_recent": 4})
    for name, size in (("first", 4), ("a", 16), ("big", 50), ("c", 12), ("d", 12)):
        session.append_ids(random_ids(size, seed=size), span=name)
    fill(session, 4)
    resident = {name: session.explain(name).resident for name in ("a", "big", "c", "d")}
    assert resident == {"a": 1.0, "big": 0.0, "c": 1.0, "d": 1.0}


@pytest.mark.parametrize("mode", ["lexicographic", "paper"])
def test_the_bonus_is_never_stored(engines, mode):
    """Scores under a plan equal H2O's to the bit while nothing is evicted, and never hold a phi after."""
    plan = Plan([Step("one", ("facts",))])
    planned = foresight_session(engines, plan, policy_options={"mode": mode})
    plain = engines("llama", layers=2).session(policy="h2o", budget=64, chunk=16, slack=4, sinks=2)
    for session in (planned, plain):
        session.append_ids(random_ids(20), span="facts")
        session.append_ids(random_ids(40, seed=1))
    rows = planned.memory.ledger.rows
    assert rows == 60
    assert torch.equal(planned.memory.ledger.score[:, :rows], plain.memory.ledger.score[:, :rows])
    fill(planned, 10)
    # A slot gets at most 1 of each query.
    assert planned.memory.ledger.score[:, : planned.memory.ledger.rows].max() <= len(planned)


def test_a_plan_of_unknown_spans_changes_nothing(engines):
    kept = []
    for plan in (Plan(), Plan([Step("one", ("nowhere", "later"))])):
        session = foresight_session(engines, plan)
        fill(session, 10)
        kept.append(session.memory.ledger.logical[:, :64].tolist())
    assert kept[0] == kept[1]


# -- scores ------------------------------------------------------------------------------------------


def test_h2o_adds_up_and_tova_looks_once():
    old, mass = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25, 0.5]])
    assert torch.equal(make_policy("h2o").observe(old, mass), old + mass)
    assert torch.equal(make_policy("foresight").observe(old, mass), old + mass)
    assert torch.equal(make_policy("tova").observe(old, mass), mass)
    for name in ("random", "recency", "full"):
        assert make_policy(name).statistics is None


def test_snapkvs_window_slides(engines):
    """Each query gives 1 in all: the scores add up to the queries that the window holds, however they came."""
    session = engines("llama").session(
        policy="snapkv", budget=256, chunk=64, slack=8, policy_options={"window": 16}
    )

    def queries():
        return session.memory.ledger.score[:, : session.memory.ledger.rows].sum(1).tolist()

    session.append_ids(random_ids(10))
    assert queries() == pytest.approx([10] * 3, rel=1e-4)
    session.append_ids(random_ids(66, seed=1))  # the last chunk is of two
    assert queries() == pytest.approx([16] * 3, rel=1e-4)
    before = session.memory.ledger.score[:, :76].clone()
    session.force(random_ids(1, seed=2))
    assert queries() == pytest.approx([16] * 3, rel=1e-4)
    last = session.memory.ledger.score[:, :76] - before * (15 / 16)
    assert bool((last > -1e-4).all())
    assert last.sum(1).max() <= 1 + 1e-3, "one query of sixteen"
    session.append_ids(random_ids(16, seed=3))
    again = engines("llama").session(
        policy="snapkv", budget=256, chunk=64, slack=8, policy_options={"window": 16}
    )
    again.append_ids([*random_ids(10), *random_ids(66, seed=1), *random_ids(1, seed=2)])
    again.append_ids(random_ids(16, seed=3))
    scores = [one.memory.ledger.score[:, :93] for one in (session, again)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)  # a whole window is the paper's score


@pytest.mark.parametrize("pieces", [[40], [17, 23], [39, 1], [1] * 40], ids=str)
def test_h2o_scores_are_the_sums_of_attention(models, engines, pieces):
    """Against the stock model's own attention weights: max over heads of the sum of a chunk, added up."""
    session = engines("qwen3").session(
        policy="h2o", budget=64, chunk=64, slack=4, policy_options={"window": 0}
    )
    ids = random_ids(40, seed=8)
    at = 0
    for count in pieces:
        session.append_ids(ids[at : at + count])
        at += count
    model = models("qwen3", attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    assert len(weights) == 3
    for layer, weight in enumerate(weights):
        want = torch.zeros(40)
        at = 0
        for count in pieces:
            want += weight[0, :, at : at + count].sum(1).amax(0)
            at += count
        got = session.memory.ledger.score[layer, :40]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# -- random ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_random_is_uniform(seed):
    """Chi-square over ten tenths of a session of 20,000 tokens: 27.9 is passed once in a thousand."""
    view = view_of([slots(20_000)], budget=4000)
    kept = select(make_policy("random", {"seed": seed, "recent_ratio": 0.0}), view)[0]
    counts = torch.bincount(kept // 2000, minlength=10)
    assert ((counts - 400.0) ** 2 / 400).sum() < 27.9
    odd = int((kept % 2).sum())
    assert abs(odd - 2000) < 150


def test_random_draws_once_for_each_token():
    """Evicting in two steps leaves what one step leaves: no token is drawn again."""
    policy = make_policy("random", {"recent_ratio": 0.0})
    table = slots(500)
    once = select(policy, view_of([table], budget=50))[0].tolist()
    middle = [table[row] for row in select(policy, view_of([table], budget=200))[0]]
    twice = [middle[row]["logical"] for row in select(policy, view_of([middle], budget=50))[0]]
    assert once == twice
    other = select(make_policy("random", {"seed": 1, "recent_ratio": 0.0}), view_of([table], budget=50))
    assert other[0].tolist() != once


# -- registry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_registry(name):
    policy = make_policy(name)
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert policy.paper
    assert POLICIES[name].__doc__
    with pytest.raises(Exception, match=r"frozen|cannot assign"):
        policy.name = "other"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("h20", {}, "Did you mean 'h2o'?"),
        ("foresigth", {}, "Did you mean 'foresight'?"),
        ("", {}, "Known: full"),
        (None, {}, "Known: full"),
        (["h2o"], {}, "Known: full"),
        ("h2o", ["window"], "h2o"),
        ("h2o", {"windw": 3}, "windw"),
        ("h2o", {"window": -1}, "window"),
        ("h2o", {"recent_ratio": 1.0}, "recent_ratio"),
        ("h2o", {"recent_ratio": "half"}, "h2o"),
        ("random", {"recent_ratio": -0.1}, "recent_ratio"),
        ("snapkv", {"window": 0}, "window"),
        ("snapkv", {"kernel": 4}, "kernel"),
        ("foresight", {"mode": "fast"}, "mode"),
        ("foresight", {"phi": 0}, "phi"),
        ("full", {"window": 1}, "window"),
    ],
)
def test_registry_errors_name_what_is_wrong(name, options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_policy(name, options)


def test_an_unknown_policy_is_refused_when_the_session_is_opened(engines):
    with pytest.raises(ConfigError, match=r"Did you mean 'recency'\?"):
        engines("llama", layers=2).session(policy="recencyy")
    with pytest.raises(ConfigError, match="windw"):
        engines("llama", layers=2).session(policy="h2o", policy_options={"windw": 1})


# -- the matrix --------------------------------------------------------------------------------------

MATRIX = list(itertools.product(POLICIES, ("bounded", "logical", "compact"), ("session", "layer", None)))


@pytest.mark.parametrize(("policy", "positions", "granularity"), MATRIX, ids=lambda value: str(value))
def test_matrix(engines, policy, positions, granularity):
    """Any policy with any position map and granularity: integrity after every call, numbers at the end."""
    session = engines("qwen2", layers=2).session(
        policy=policy,
        positions=positions,
        granularity=granularity,
        budget=None if policy == "full" else 24,
        chunk=20,
        slack=5,
        sinks=3,
    )
    session.plan.add(Step("read", ("early",)))
    session.append_ids(random_ids(7), span="early", pin="soft")
    check_ledger(session)
    for number in range(4):
        session.append_ids(random_ids(30 + number, seed=number))
        check_ledger(session)
        session.force(random_ids(9, seed=number))
        check_ledger(session)
    session.drop_last(21)
    check_ledger(session)
    twin = session.fork()
    outs = [one.feed(random_ids(25, seed=99)) for one in (session, twin)]
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)
    check_ledger(session)
    stats = session.stats()
    assert stats.resident == (stats.tokens if policy == "full" else 24)
    assert session.memory.ledger.groups == (
        {"session": 1, "layer": 2}.get(granularity) or (2 if POLICIES[policy].granularity == "layer" else 1)
    )
