"""Regions inside a message: reasoning, tool schemas, custom regions, region pins, and what the model writes."""

from __future__ import annotations

import pytest

from tenure.errors import BudgetError, ConfigError, MessageError
from tests.chats import assistant, chat_session, encode, system, tokenizer, user
from tests.oracles import Script, check_ledger

THOUGHT = "<think>\nThe key is under the mat.\n</think>"
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"path": "text"}}}]


def text_by_region(session) -> dict[str, str]:
    """What each region holds, decoded; slots are read from the ledger."""
    memory, ledger = session.memory, session.memory.ledger
    names, found = memory.aging.table.names, {}
    for group in range(ledger.groups):
        assert ledger.region[group, : ledger.rows].tolist() == ledger.region[0, : ledger.rows].tolist()
    for row in range(ledger.rows):
        name = names[int(ledger.region[0, row])]
        found.setdefault(name, []).append(memory.ids[int(ledger.logical[0, row])])
    decode = session.engine.tokenizer.decode
    return {name: decode(ids) for name, ids in found.items()}


def test_reasoning_inside_an_answer_is_scratchpad(engines) -> None:
    session = chat_session(engines)
    spans = session.append([system("Be brief."), user("Where?"), assistant(THOUGHT + "\nUnder the mat.")])
    texts = text_by_region(session)
    assert texts["scratchpad"] == THOUGHT
    assert texts["assistant"].endswith("Under the mat.<|im_end|>\n")
    assert len(spans) == 3, "one span a message"
    assert spans[2].region == "assistant"
    assert [region for _, region in spans[2].parts] == ["scratchpad", "assistant"]
    session.append(user("And?"))
    session.drop_last(len(session) - spans[2].start - spans[2].parts[0][0] - 3)
    assert text_by_region(session)["scratchpad"].startswith("<think>")
    check_ledger(session)


def test_tool_schemas_inside_the_rules_are_tools(engines) -> None:
    session = chat_session(engines, "tools")
    session = session.engine.session(policy="full", tools=TOOLS)
    session.append([system("Be brief."), user("Read it.")])
    texts = text_by_region(session)
    assert "read_file" in texts["tools"]
    assert "Be brief." in texts["system"]
    assert "read_file" not in texts["system"]
    assert "Read it." in texts["user"]


def test_what_the_model_thinks_is_scratchpad(engines, monkeypatch) -> None:
    session = chat_session(engines)
    words = encode("chatml", "Well. <think> Which? </think> That. ")
    Script(words).install(monkeypatch)
    session.ask([system("Be brief."), user("Where?")], max_tokens=len(words))
    session.append(user("Thanks."))
    texts = text_by_region(session)
    assert texts["scratchpad"].strip().endswith("</think>")
    assert "Which?" in texts["scratchpad"]
    assert "That." in texts["assistant"]
    assert "Well." in texts["assistant"]


def test_marks_never_change_the_ids(engines) -> None:
    plain, marked = chat_session(engines), chat_session(engines, regions={"memo": {"half_life": 9}})
    texts = ["One.", "", "   ", THOUGHT]
    hints = [{"region": "memo"}, {"pin": True}, {"pin": "hard", "region": "plan"}, {"region": "user:base=1"}]
    plain.append([system("S")] + [user(text) for text in texts])
    spans = marked.append([system("S")] + [user(t, **hint) for t, hint in zip(texts, hints, strict=True)])
    assert plain.memory.ids == marked.memory.ids
    assert [span.pin for span in spans] == [None] * 5, "an empty message has nothing to pin"
    assert spans[1].region == "memo"


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ("memos", "Did you mean 'memo'"),
        ("memo:half_life=long", "'long' is no number"),
        ("memo:speed=3", "'speed' is no field"),
        ({"name": "memo", "half_life": 0}, "half_life"),
        ({"half_life": 3}, "unknown region"),
        (3, "expected a text"),
    ],
)
def test_wrong_regions_are_refused_with_their_message(engines, region, words) -> None:
    session = chat_session(engines, regions={"memo": {}})
    with pytest.raises(MessageError, match=words) as caught:
        session.append([user("a"), user("b", region=region)])
    assert caught.value.index == 1
    assert len(session) == 0


def test_a_hard_pin_of_a_region_is_held_and_counted(engines) -> None:
    options = {"policy": "h2o", "budget": 60, "chunk": 32, "slack": 4, "regions": {"system": {"pin": "hard"}}}
    session = chat_session(engines, **options)
    rules = session.append(system("Keep all of this."))[0]
    assert rules.pin == "hard"
    for number in range(8):
        session.append(user(f"Some other text, number {number}."))
        check_ledger(session)
    assert session.explain(rules.id).resident == 1.0
    before = len(session)
    with pytest.raises(BudgetError):
        session.append(system("Far too much. " * 30))
    assert len(session) == before
    with pytest.raises(BudgetError):
        session.append_ids(list(range(20, 90)), region="system")


def test_a_soft_pin_of_a_region_goes_last(engines) -> None:
    options = {"policy": "recency", "budget": 60, "chunk": 32, "slack": 4, "sinks": 0}
    kept = {}
    for regions in ({}, {"plan": {"pin": "soft"}}):
        session = chat_session(engines, regions=regions, **options)
        span = session.append(user("The plan.", region="plan"))[0]
        for number in range(8):
            session.append(user(f"Some other text, number {number}."))
        kept[bool(regions)] = session.explain(span.id).resident
    assert kept == {False: 0.0, True: 1.0}


def test_unknown_regions_of_raw_ids_are_refused(engines) -> None:
    session = chat_session(engines)
    with pytest.raises(ConfigError, match="unknown region"):
        session.append_ids([20, 21], region="nonsense")
    assert tokenizer("chatml") is session.engine.tokenizer


def test_a_stored_session_ages_on(engines) -> None:
    """Custom regions, parts, clocks, births and waiting tokens come back with a stored session."""
    from tenure.sessionstate import describe, rebuild

    session = chat_session(
        engines, policy="memdecay", budget=64, chunk=32, slack=4, regions={"memo": {"clock": "turns"}}
    )
    session.append(
        [system("Be brief."), user("One.", region="memo:half_life=3"), assistant(THOUGHT + "Two.")]
    )
    session.queue([user("Three.", region="memo"), assistant(THOUGHT)])
    state, tensors = describe(session)
    twin = rebuild(session.engine, state, tensors)
    assert twin.memory.aging.times == session.memory.aging.times
    for one in (session, twin):
        one.append(user("Four. " * 20))
    assert text_by_region(twin) == text_by_region(session)
    assert twin.memory.aging.table.names == session.memory.aging.table.names
    assert [span.parts for span in twin.memory.ledger.spans] == [s.parts for s in session.memory.ledger.spans]
    for name in ("region", "born", "energy", "score"):
        left, right = (getattr(one.memory.ledger, name) for one in (session, twin))
        assert (left == right).all(), name
