"""MemDecay's state: energies, births, normalisations. Its order is in the matrix of test_policies.py."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from tenure.aging import Aging
from tenure.errors import ConfigError
from tenure.policies import Look, MemDecay, make_policy
from tenure.policies.normalise import NORMALISATIONS, normalise
from tenure.region_table import STEP_TOKENS, RegionTable
from tenure.regions import Region
from tests.conftest import random_ids
from tests.oracles import check_ledger

CODES = {region: number for number, region in enumerate(Region)}


def look(mass, *, aging=None, **changes) -> Look:
    mass = torch.tensor(mass, dtype=torch.float32)
    zero = torch.zeros_like(mass)
    values = {
        "logical": torch.arange(mass.shape[1]).expand_as(mass),
        "score": zero,
        "region": torch.full(mass.shape, CODES[Region.OTHER]),
        "born": zero.double(),
        "energy": zero,
        "value": zero,
        "new": 1,
        "queries": 1,
        "steps": 1.0,
        "sinks": 0,
        "table": aging or Aging(RegionTable(), torch.device("cpu")),
    }
    return Look(mass=mass, **(values | changes))


def test_energy_is_a_leaky_integrator() -> None:
    """Against the closed form of a geometric series, with gaps between the looks."""
    aging = Aging(RegionTable({"user": {"half_life": 7.0}}), torch.device("cpu"))
    policy = MemDecay(normalise="raw", eta=0.5)
    energy = torch.zeros(1, 3)
    region = torch.tensor([[CODES[Region.USER], CODES[Region.SCRATCHPAD], CODES[Region.USER]]])
    want = [0.0, 0.0, 0.0]
    masses = [(0.5, 0.25, 0.0), (0.0, 0.5, 0.25), (1.0, 0.0, 0.0)]
    for gap, mass in zip((1, 5, 3), masses, strict=True):
        for _ in range(gap):
            aging.advance(1, 0, decoding=True)
        found = policy.absorb(look([mass], aging=aging, energy=energy, region=region))
        energy = found["energy"]
        for slot, half_life in enumerate((7.0, 15.0, 7.0)):
            want[slot] = want[slot] * 2 ** (-gap / half_life) + 0.5 * mass[slot]
    assert energy[0].tolist() == pytest.approx(want, rel=1e-5)
    # Read later, nothing in between: the view decays it, without a step for every tick.
    aging.advance(1, 0, decoding=True)
    aging.advance(9 * STEP_TOKENS, 0, decoding=False)
    later = energy * aging.vectors().decay[region]
    assert later[0].tolist() == pytest.approx(
        [value * 2 ** (-10 / h) for value, h in zip(want, (7.0, 15.0, 7.0), strict=True)], rel=1e-5
    )


def test_h2o_is_the_limit_without_base_and_decay() -> None:
    aging = Aging(RegionTable(), torch.device("cpu"))
    policy = MemDecay(normalise="raw", eta=1.0, decay=False, mix=1.0)
    energy, score = torch.zeros(1, 4), torch.zeros(1, 4)
    for number in range(5):
        aging.advance(1, 0, decoding=True)
        mass = torch.rand(1, 4, generator=torch.Generator().manual_seed(number))
        found = policy.absorb(look(mass.tolist(), aging=aging, energy=energy, score=score))
        energy, score = found["energy"], found["score"]
    torch.testing.assert_close(energy, score)


def test_refresh_modes() -> None:
    aging = Aging(RegionTable({"other": {"cap": 2.0}}), torch.device("cpu"))
    aging.advance(1, 0, decoding=True)
    one = look([[0.5, 4.0]], aging=aging, energy=torch.tensor([[1.0, 1.9]]))
    soft = MemDecay(normalise="raw", refresh="soft", eta=0.5, decay=False).absorb(one)["energy"]
    assert soft[0].tolist() == pytest.approx([1.0 + 0.5 * 1.0 * 0.5, 1.9 + 0.5 * 0.1 * 1.0])
    energy = MemDecay(normalise="raw", eta=1.0, decay=False).absorb(one)["energy"]
    assert energy[0].tolist() == pytest.approx([1.5, 2.0]), "never above the cap"
    born = MemDecay(normalise="raw", refresh="impulse", threshold=1.0).absorb(one)["born"]
    assert born[0].tolist() == [0.0, 1.0]
    born = MemDecay(normalise="raw", refresh="impulse", threshold=4.0).absorb(one)["born"]
    assert born[0].tolist() == [0.0, 1.0], "the threshold is reached"
    assert set(MemDecay(refresh="none").absorb(one)) == {"score"}
    uncapped = look([[0.5]], energy=torch.tensor([[0.2]]))
    soft = MemDecay(normalise="raw", refresh="soft", eta=0.5, decay=False).absorb(uncapped)["energy"]
    assert soft[0].tolist() == pytest.approx([0.2 + 0.5 * 0.8 * 0.5]), "towards 1"


def test_attention_counts_for_all_steps_of_its_forward() -> None:
    found = MemDecay(normalise="raw", eta=0.5).absorb(look([[0.5, 0.25]], steps=3.0))
    assert found["energy"][0].tolist() == [0.75, 0.375]


@pytest.mark.parametrize("regions", [True, False])
def test_time_is_that_of_the_slot_s_region(regions) -> None:
    """Without regions it is that of ``other`` for all."""
    table = {"user": {"half_life": 8.0, "clock": "tokens"}, "other": {"half_life": 2.0, "clock": "steps"}}
    aging = Aging(RegionTable(table), torch.device("cpu"))
    aging.fade()
    aging.advance(STEP_TOKENS * 4, 0, decoding=False)
    slots = torch.tensor([[CODES[Region.USER], CODES[Region.OTHER]]])
    one = look([[1.0, 1.0]], aging=aging, region=slots, energy=torch.ones(1, 2))
    born = MemDecay(normalise="raw", refresh="impulse", regions=regions).absorb(one)["born"]
    assert born[0].tolist() == ([STEP_TOKENS * 4.0, 4.0] if regions else [4.0, 4.0])
    energy = MemDecay(normalise="raw", eta=0.0, regions=regions).absorb(one)["energy"]
    user = 2 ** (-STEP_TOKENS * 4 / 8) if regions else 0.25
    assert energy[0].tolist() == pytest.approx([user, 0.25])


def naive_normalise(mass, how, queries, new, sinks, value):
    rows = len(mass)

    def ratio(values):
        fair = sum(values) / rows
        return [min(one / fair, 16.0) for one in values]

    bare = [0.0 if row < sinks else one for row, one in enumerate(mass)]
    if how == "raw":
        return [one / queries for one in mass]
    if how == "ratio":
        return ratio(mass)
    if how == "log_ratio":
        return [math.log1p(one) for one in ratio(mass)]
    if how == "sink_excluded":
        return [math.log1p(one) for one in ratio(bare)]
    if how == "value_weighted":
        return [math.log1p(one) for one in ratio([a * b for a, b in zip(bare, value, strict=True)])]
    if how == "age_corrected":
        seen = [min(queries, rows - row) for row in range(rows)]
        return [math.log1p(one) for one in ratio([a / b for a, b in zip(bare, seen, strict=True)])]
    free = list(range(sinks, rows - new))
    order = sorted(free, key=lambda row: (mass[row], -row))
    return [order.index(row) / len(free) if row in free else 0.0 for row in range(rows)]


@pytest.mark.parametrize("how", NORMALISATIONS)
def test_normalisations_equal_naive_ones(how) -> None:
    generator = torch.Generator().manual_seed(3)
    mass = torch.rand(2, 24, generator=generator) ** 4
    mass[:, 0] = 90.0
    mass[:, 3] = 80.0  # more than sixteen times its fair share, without the sink
    mass[1, 5] = mass[1, 7]
    value = torch.rand(2, 24, generator=generator)
    got = normalise(look(mass.tolist(), queries=3, new=4, sinks=1, value=value), how)
    for row, line in enumerate(mass.tolist()):
        want = naive_normalise(line, how, 3, 4, 1, value[row].tolist())
        assert got[row].tolist() == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_value_norms_are_kept_with_their_slots(engines) -> None:
    session = engines("qwen2", layers=2).session(
        policy="memdecay", policy_options={"normalise": "value_weighted"}, budget=24, chunk=10, slack=4
    )
    for number in range(4):
        session.append_ids(random_ids(17, seed=number))
        session.force(random_ids(3, seed=number))
    ledger, rows = session.memory.ledger, session.memory.rows
    want = rows.values[:, :, : ledger.rows].norm(dim=-1).mean(1)
    want = want if ledger.groups > 1 else want.mean(0, keepdim=True)
    torch.testing.assert_close(ledger.value[:, : ledger.rows], want)


@pytest.mark.parametrize("granularity", ["session", "layer"])
def test_region_and_birth_stay_with_their_slots(engines, granularity) -> None:
    """After evictions, a rollback and a fork every slot has what its token's place says."""
    session = engines("qwen2", layers=2).session(
        policy="memdecay",
        granularity=granularity,
        budget=40,
        chunk=10,
        slack=4,
        regions={"memo": {"clock": "tokens"}},
    )
    regions = ["user", "memo", "scratchpad", "system", "memo", "plan", "user"]
    for number, region in enumerate(regions):
        session.append_ids(random_ids(13, seed=number), region=region)
        check_ledger(session)
    session.drop_last(5)
    session.force(random_ids(3))
    for one in (session, session.fork()):
        ledger, names = one.memory.ledger, one.memory.aging.table.names
        for group in range(ledger.groups):
            for row in range(ledger.rows):
                logical = int(ledger.logical[group, row])
                region = "assistant" if logical >= 86 else regions[logical // 13]
                assert names[int(ledger.region[group, row])] == region
                if region == "memo":  # chunks of 10 tokens start with each message
                    edge = 13 * (logical // 13)
                    want = edge + (10 if logical - edge < 10 else 13)
                    assert ledger.born[group, row] == want


def test_pages_leave_whole(engines) -> None:
    """All but one page that is cut to fit the budget is either there or gone."""
    session = engines("qwen2", layers=2).session(
        policy="memdecay", granularity="session", budget=64, chunk=32, slack=4, sinks=0,
        policy_options={"recent_ratio": 0.0, "recent_slots": 0, "page": 8, "spread": 0.0},
    )  # fmt: skip
    for number in range(6):
        session.append_ids(random_ids(32, seed=number))
    held = set(session.memory.ledger.logical[0, :64].tolist())
    pages = [sum(token in held for token in range(at, at + 8)) for at in range(0, 192, 8)]
    assert sum(0 < count < 8 for count in pages) <= 2, pages


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalise": "best"}, "normalise"),
        ({"refresh": "never"}, "refresh"),
        ({"reduce": "sum"}, "reduce"),
        ({"mix": 1.5}, "mix"),
        ({"persistent": -0.1}, "persistent"),
        ({"page_max": 2}, "page_max"),
        ({"page": 0}, "page"),
        ({"eta": -1}, "eta"),
        ({"recent_ratio": 1.0}, "recent_ratio"),
    ],
)
def test_options_are_checked(options, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_policy("memdecay", options)


def test_turns_count_messages_of_others() -> None:
    aging = Aging(RegionTable({"user": {"clock": "turns"}}), torch.device("cpu"))
    aging.advance(5, 1, decoding=False)
    aging.advance(1, 0, decoding=True)
    assert aging.times == {"tokens": 6.0, "steps": 5 / STEP_TOKENS + 1, "turns": 1.0}
    assert SimpleNamespace(now=aging.vectors().now).now[CODES[Region.USER]] == 1.0
