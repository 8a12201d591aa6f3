"""Auto in a session: rules stay without a hint, the plan's spans stay whole, and the rest is MemDecay's."""

from __future__ import annotations

import pytest
import torch

from tenure import Plan, Step
from tenure.policies import make_policy
from tests.chats import chat_session, system, user
from tests.conftest import random_ids
from tests.oracles import check_ledger

OPTIONS = {"budget": 96, "chunk": 32, "slack": 8, "sinks": 2}


def auto(engines, plan=None, **options):
    return engines("qwen2", layers=2).session(policy="auto", plan=plan, **{**OPTIONS, **options})


def fill(session, rounds, region="tool_output"):
    for number in range(rounds):
        session.append_ids(random_ids(24, seed=100 + number), region=region)
        check_ledger(session)


@pytest.mark.parametrize("region", ["system", "tools", "system:half_life=3"])
def test_rules_stay_without_a_hint(engines, region) -> None:
    session = auto(engines)
    session.append_ids(random_ids(30), span="rules", region=region)
    session.append_ids(random_ids(30, seed=1), span="notes", region="scratchpad")
    fill(session, 12)
    assert session.explain("rules").resident == 1.0
    assert session.explain("rules").pin is None
    assert session.explain("notes").resident < 0.7


def test_rules_from_roles(engines) -> None:
    session = chat_session(engines, policy="auto", **OPTIONS)
    rules = session.append(system("Be brief and kind."))[0]
    for number in range(12):
        session.append(user(f"Some other text, number {number}."))
    assert session.explain(rules.id).resident == 1.0


def test_rules_cannot_starve_a_session(engines) -> None:
    """More rules than the budget: the first of them hold half of it, and the newest slots are there."""
    session = auto(engines)
    session.append_ids(random_ids(300), span="rules", region="system")
    fill(session, 8)
    logical = session.memory.ledger.logical[0, :96]
    rules = logical[logical < 300]
    assert len(rules) >= 48
    assert rules[:48].tolist() == list(range(48))
    assert (logical >= 300).sum() >= 40
    assert set(range(len(session) - 40, len(session))) <= set(logical.tolist())


def test_planned_spans_stay_whole_over_the_rest(engines) -> None:
    plan = Plan([Step("one", ("near",)), Step("two", ("far",)), Step("three", ("large",))])
    session = auto(engines, plan, policy_options={"min_recent": 16})
    session.append_ids(random_ids(10), region="system", span="rules")
    session.append_ids(random_ids(20, seed=1), span="far", region="scratchpad")
    session.append_ids(random_ids(20, seed=2), span="near", region="scratchpad")
    session.append_ids(random_ids(60, seed=3), span="large", region="scratchpad")
    fill(session, 10)
    assert session.explain("rules").resident == 1.0
    assert session.explain("near").resident == 1.0
    assert session.explain("far").resident == 1.0
    assert session.explain("large").resident == 0.0, "it does not fit whole, so it makes room"
    assert set(session.explain("large").evicted) == {"plan"}
    plan.finish("one")
    plan.finish("two")
    fill(session, 10)
    assert session.explain("near").resident < 1.0


def test_what_the_current_step_reads_pushes_rules_out(engines) -> None:
    """But for their beginning, which reads better than what is left of them by chance."""
    plan = Plan([Step("one", ("facts",))])
    session = auto(engines, plan)
    session.append_ids(random_ids(40), region="system", span="rules")
    session.append_ids(random_ids(50, seed=1), span="facts", region="tool_output")
    fill(session, 8)
    assert session.explain("facts").resident == 1.0
    rules = [token for token in session.memory.ledger.logical[0, :96].tolist() if token < 40]
    assert rules == list(range(20)), "what facts, sinks and a quarter of the budget for the newest leave"
    plan.finish("one")
    fill(session, 4)
    assert session.explain("facts").resident < 1.0


@pytest.mark.parametrize("region", ["tool_output", "system"])
@pytest.mark.parametrize("ruled", [False, True], ids=["alone", "beside rules"])
def test_what_is_superseded_goes_first(engines, region, ruled) -> None:
    plan = Plan()
    session = auto(engines, plan)
    session.append_ids(random_ids(8), span="start", region="system" if ruled else "user")
    session.append_ids(random_ids(16, seed=1), span="old", region=region)
    session.append_ids(random_ids(24, seed=2), span="other", region="scratchpad")
    plan.supersede("old", "new")
    session.append_ids(random_ids(48, seed=3), span="new", region="tool_output")
    session.memory.ledger.score[:, 8:24] = 1e6  # nothing else speaks for its going
    session.memory.ledger.energy[:, 8:24] = 1e6
    session.append_ids(random_ids(12, seed=4))
    assert dict(session.explain("old").evicted) == {"superseded": 12 * session.memory.ledger.groups}
    assert session.explain("other").resident == 1.0
    session.append_ids(random_ids(12, seed=5))
    assert session.explain("old").resident == 0.0
    check_ledger(session)


def test_without_rules_and_plan_it_is_memdecay(engines) -> None:
    kept = []
    for policy in ("auto", "memdecay"):
        session = engines("qwen2", layers=2).session(policy=policy, **OPTIONS)
        fill(session, 10, region="user")
        kept.append(session.memory.ledger.logical[:, :96].clone())
    assert torch.equal(*kept)


def test_who_names_nothing_gets_it(engines) -> None:
    session = engines("qwen2", layers=2).session()
    assert (session.config.policy, session.config.positions) == ("auto", "bounded")
    assert session.memory.policy == make_policy("auto")
