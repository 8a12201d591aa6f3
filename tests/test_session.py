"""Sessions: rollback, turns, forks, sync, bad input. What a turn says is scripted (O5)."""

from __future__ import annotations

import base64
import math
import random
import time

import numpy as np
import pytest
import torch

from tenure import Plan, Step
from tenure.errors import (
    BudgetError,
    ConfigError,
    MessageError,
    ModelError,
    TenureError,
    UnknownSpanError,
)
from tenure.policies import POLICIES
from tenure.sampling import Sampler, SamplingOptions, sampling_options
from tests.chats import (
    SHAPE,
    assistant,
    chat_engine,
    chat_session,
    encode,
    joint,
    system,
    tokenizer,
    tool,
    user,
)
from tests.conftest import random_ids, stock_logits
from tests.oracles import Script, check_ledger, fresh_logits, state_of

EVICTING = [name for name in POLICIES if name != "full"]


def ids_of(session):
    return session.memory.ids.tolist()


def end_of_turn(template="chatml"):
    return tokenizer(template).eos_token_id


@pytest.fixture
def stock(models):
    return models("qwen2", **SHAPE)


def near(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# -- C01: rollback with edge values ------------------------------------------------------------------

MEMORIES = {
    "full": {"policy": "full", "positions": "logical"},
    "roomy": {"policy": "h2o", "budget": 64, "chunk": 8, "slack": 4},
    "compact": {"policy": "recency", "budget": 64, "chunk": 8, "slack": 4, "positions": "compact"},
}
memories = pytest.mark.parametrize("memory", MEMORIES)


@memories
@pytest.mark.parametrize(
    ("call", "count", "left"),
    [
        ("keep_first", 12, 12),
        ("keep_first", 0, 0),
        ("keep_first", 5, 5),
        ("drop_last", 0, 12),
        ("drop_last", 12, 0),
        ("drop_last", 1, 11),
    ],
)
def test_rollback(engines, models, memory, call, count, left):
    session = engines("qwen2").session(**MEMORIES[memory])
    ids, more = random_ids(12), random_ids(3, seed=1)
    session.append_ids(ids)
    getattr(session, call)(count)
    assert ids_of(session) == ids[:left]
    check_ledger(session)
    logits = session.feed(more)
    near(logits, stock_logits(models("qwen2"), ids[:left] + more)[left:])
    check_ledger(session)


@memories
@pytest.mark.parametrize("call", ["keep_first", "drop_last"])
@pytest.mark.parametrize("count", [13, 50, -1, -12, 2.0, "3", None])
def test_refused_rollback_changes_nothing(engines, models, memory, call, count):
    session = engines("qwen2").session(**MEMORIES[memory])
    ids, more = random_ids(12), random_ids(3, seed=1)
    session.append_ids(ids)
    before = state_of(session)
    with pytest.raises(ConfigError, match=rf"{call}: .* is not in 0..12"):
        getattr(session, call)(count)
    assert state_of(session) == before
    near(session.feed(more), stock_logits(models("qwen2"), ids + more)[12:])


def test_rollback_of_an_empty_session(engines):
    session = engines("qwen2").session(policy="full")
    session.keep_first(0)
    session.drop_last(0)
    with pytest.raises(ConfigError):
        session.drop_last(1)
    assert session.feed(random_ids(2)).isfinite().all()


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("count", [0, 3, 30, 70, 79])
def test_rollback_behind_evictions(engines, policy, count):
    """Rows that are gone stay gone; what is left agrees, and a fork that took the same way says the same."""
    session = engines("qwen3").session(policy=policy, budget=16, chunk=10, slack=3, sinks=2)
    session.append_ids(random_ids(80, seed=2))
    session.keep_first(count)
    check_ledger(session)
    twin = session.fork()
    more = random_ids(25, seed=3)
    outs = [one.feed(more) for one in (session, twin)]
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)
    check_ledger(session)


def test_rollback_works_on_a_slab_that_has_grown(engines, models, monkeypatch):
    """A slab grows inside a forward, where torch makes tensors that may not be changed outside of one."""
    monkeypatch.setattr("tenure.memory._FIRST_CAPACITY", 8)
    session = engines("qwen2").session(policy="full", chunk=5)
    ids = random_ids(50)
    session.append_ids(ids)
    assert session.memory.rows.capacity == 64
    session.keep_first(30)
    check_ledger(session)
    near(session.feed(ids[30:]), stock_logits(models("qwen2"), ids)[30:])
    twin = session.fork()
    twin.drop_last(45)
    check_ledger(twin)
    near(twin.feed(ids[5:]), stock_logits(models("qwen2"), ids)[5:])


@pytest.mark.parametrize("template", ["chatml", "tools", "reasoning", "headers"])
def test_rollback_to_a_message_boundary(engines, template):
    """Taking back the last message and sending another gives the template's own rendering with the other."""
    kept = [system("Be brief."), user("one"), assistant("two")]
    session = chat_session(engines, template)
    spans = session.append([*kept, user("a wrong turn")])
    session.drop_last(len(spans[-1]))
    session.append(user("three"))
    session.queue([], reply=True)
    session.engine.drain([session])
    assert ids_of(session) == joint_with_start(template, [*kept, user("three")])
    check_ledger(session)


def joint_with_start(template, messages):
    return joint(template, messages, prompt=True)


@pytest.mark.parametrize("template", ["chatml", "tools", "reasoning", "headers"])
def test_a_reply_goes_on_from_a_given_beginning(engines, template):
    """The beginning is part of the assistant's message, and the turn's text is what comes behind it."""
    session, alone = chat_session(engines, template), chat_session(engines, template)
    session.queue([user("one")], reply=True, beginning="Two is")
    turn = session.start_turn(max_tokens=3)
    session.engine.step([session])
    begun = joint_with_start(template, [user("one")])
    words = session.engine.tokenizer.encode("Two is", add_special_tokens=False)
    assert ids_of(session)[: len(begun) + len(words)] == [*begun, *words]
    assert session.memory.last_span.role == "assistant"
    while not turn.done:
        session.engine.step([session])
    turn.close()
    assert not turn.text.startswith("Two is")
    with pytest.raises(ConfigError, match="beginning"):
        alone.queue([user("one")], beginning="Two is")
    assert not alone.memory.waiting


def test_rollback_inside_a_message_leaves_the_ones_before(engines):
    """Half a message stays as text; the history before it is known, so no second system text is written."""
    session = chat_session(engines)
    spans = session.append([system("Be brief."), user("one"), assistant("two"), user("half of this goes")])
    left = spans[-1].start + 5
    session.keep_first(left)
    before = ids_of(session)
    session.append(user("three"))
    after = joint("chatml", [system("Be brief."), user("one"), assistant("two"), user("three")])
    assert ids_of(session) == before + after[spans[-1].start :]


def test_rollback_into_a_turn_goes_on_with_it(engines, stock):
    session = chat_session(engines)
    session.append([user("Count.")])
    text = "".join(session.generate(max_tokens=12))
    whole = ids_of(session) + [item for w in session.memory._backlog for item in w.ids]
    session.keep_first(len(session) - 6)
    again = "".join(session.generate(max_tokens=7))
    assert text.endswith(again)
    assert ids_of(session) + [item for w in session.memory._backlog for item in w.ids] == whole
    session.engine.drain([session])
    near(session.logits, fresh_logits(stock, session))
    check_ledger(session)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_rollback_into_the_closing_of_a_turn(engines, monkeypatch, cut):
    """Wherever the end of a turn is cut, the next message finds exactly one end of turn before it."""
    session = chat_session(engines)
    session.append([user("Say yes.")])
    Script([*encode("chatml", "yes"), end_of_turn()]).install(monkeypatch)
    assert "".join(session.generate()) == "yes"
    session.engine.drain([session])
    turn = len(session)
    session.append([user("next")])
    session.keep_first(turn + cut)
    session.append([user("other")])
    want = joint("chatml", [user("Say yes."), assistant("yes"), user("other")])
    got = ids_of(session)
    if cut < 3:  # at 1 the marker stands, and its line end is read anew
        assert got == want
    else:  # one token of "next" is left: text without a turn's end
        assert got[: turn + 2] == want[: turn + 2]
        assert got.count(end_of_turn()) == want.count(end_of_turn())
    check_ledger(session)


@pytest.mark.parametrize("policy", EVICTING)
def test_an_answer_behind_a_rollback_behind_evictions(engines, policy):
    """The last token is computed again for its logits, whether its row was evicted or not."""
    session = chat_session(engines, policy=policy, budget=24, chunk=16, slack=4, sinks=2)
    session.append([system("Be brief."), user("facts " * 20), user("again " * 10)])
    session.drop_last(7)
    first, second = (session.fork() for _ in range(2))
    texts = ["".join(one.generate(max_tokens=40)) for one in (first, second)]
    assert texts[0] == texts[1]
    for one in (session, first, second):
        check_ledger(one)
    first.drop_last(30)
    assert len("".join(first.generate(max_tokens=8))) > 0
    check_ledger(first)


# -- C03: five ways to end a turn --------------------------------------------------------------------

ANSWER = "The answer is 42 and that is all."
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
QUESTION = [system("Be helpful."), user("What is it?")]


def end_by_marker(session, monkeypatch):
    script = Script([*encode("tools", ANSWER), end_of_turn()]).install(monkeypatch)
    turn = session.start_turn()
    assert "".join(turn) == ANSWER
    assert turn.reason == "stop"
    assert len(turn.ids) == len(script.ids) - 1
    return assistant(ANSWER)


def end_by_limit(session, monkeypatch):
    ids = encode("tools", ANSWER)
    Script(ids).install(monkeypatch)
    turn = session.start_turn(max_tokens=5)
    text = "".join(turn)
    assert (turn.reason, turn.ids) == ("length", ids[:5])
    assert encode("tools", text) == ids[:5]
    return assistant(text)


def end_by_stop_string(session, monkeypatch):
    Script(encode("tools", ANSWER)).install(monkeypatch)
    turn = session.start_turn(stop=("2 and",))
    text = "".join(turn)
    assert (turn.reason, text) == ("stop", "The answer is 4")
    return assistant(text)


def end_by_cancel(session, monkeypatch):
    ids = encode("tools", ANSWER)
    Script(ids).install(monkeypatch)
    turn = session.start_turn()
    for _ in turn:
        if len(turn.ids) == 6:
            break
    assert turn.reason == "cancel"
    assert encode("tools", turn.text) == ids[:6]
    return assistant(turn.text)


def end_by_tool_call(session, monkeypatch):
    Script([*encode("tools", CALL), end_of_turn()]).install(monkeypatch)
    turn = session.start_turn()
    assert "".join(turn) == CALL
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a.py"}}}
    return assistant("", tool_calls=[call])


ENDS = [end_by_marker, end_by_limit, end_by_stop_string, end_by_cancel, end_by_tool_call]


@pytest.mark.parametrize("end", ENDS)
def test_the_next_turn_sees_a_history_with_turn_ends(engines, stock, monkeypatch, end):
    session = chat_session(engines, "tools")
    session.append(QUESTION)
    said = end(session, monkeypatch)
    check_ledger(session)
    held = len(session)
    session.queue(tool("def f(): ..."), reply=True)
    script = Script([*encode("tools", "Good."), end_of_turn()]).install(monkeypatch)
    turn = session.start_turn()
    while not script.logits:
        session.engine.step([session])
    # Turn 2 starts here: every id of the template's own rendering has its rows, and nothing else has.
    assert ids_of(session) == joint("tools", [*QUESTION, said, tool("def f(): ...")], prompt=True)
    assert session.memory.ledger.rows == len(session) > held
    near(script.logits[0], fresh_logits(stock, session))
    check_ledger(session)
    assert "".join(turn) == "Good."


@pytest.mark.parametrize("end", ENDS)
def test_turns_are_spans_of_the_assistant(engines, monkeypatch, end):
    session = chat_session(engines, "tools")
    session.append(QUESTION)
    said = end(session, monkeypatch)
    session.append(user("And then?"))
    spans = list(session.memory.ledger.spans)
    assert [span.role for span in spans] == ["system", "user", "assistant", "user"]
    content = said["content"] or CALL
    assert session.explain(spans[2].id).text == f"<|im_start|>assistant\n{content}<|im_end|>\n"


def test_a_template_without_a_header_gives_the_answer_its_own_span(engines, monkeypatch):
    """Mistral's kind: the generation prompt is empty, and a pinned question must not pin the answer."""
    session = chat_session(engines, "strict", budget=80, chunk=16, slack=4)
    span = session.append([user("Tell me.", pin="hard", span="question")])[0]
    size = len(span)
    Script([*encode("strict", "Well, this is so."), end_of_turn("strict")]).install(monkeypatch)
    assert "".join(session.generate()) == "Well, this is so."
    session.append([user("Why?")])
    spans = list(session.memory.ledger.spans)[1:]  # without the template's own start
    assert [s.role for s in spans] == ["user", "assistant", "user"]
    assert [s.pin for s in spans] == ["hard", None, None]
    assert len(spans[0]) == size
    assert session.explain(spans[1].id).text == "Well, this is so.</s>"
    assert ids_of(session) == joint(
        "strict", [user("Tell me."), assistant("Well, this is so."), user("Why?")]
    )


# -- turns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens_counts_tokens(engines, monkeypatch, count):
    session = chat_session(engines)
    session.append([user("Hi")])
    Script(encode("chatml", "one two three four five six")).install(monkeypatch)
    turn = session.generate(max_tokens=count)
    text = "".join(turn)
    assert len(turn.ids) == count
    assert turn.reason == "length"
    assert text == turn.text == tokenizer("chatml").decode(turn.ids)


def test_a_stop_string_at_the_very_first_token(engines, stock, monkeypatch):
    session = chat_session(engines)
    session.append([user("Hi")])
    session.queue([], reply=True)
    session.engine.drain([session])
    before = ids_of(session)
    Script(encode("chatml", "one two")).install(monkeypatch)
    first = tokenizer("chatml").decode(encode("chatml", "one two")[:1])
    turn = session.generate(stop=first)
    assert "".join(turn) == ""
    assert turn.reason == "stop"
    assert ids_of(session) == before
    assert session.memory.waiting == 0
    # The turn is open and empty: going on asks the model at the same place again.
    script = Script([*encode("chatml", "yes"), end_of_turn()]).install(monkeypatch)
    assert "".join(session.generate()) == "yes"
    near(script.logits[0], stock_logits(stock, before)[-1])
    assert ids_of(session) == before + encode("chatml", "yes")
    check_ledger(session)


def test_a_turn_goes_on_where_a_stop_string_ended_it(engines, stock, monkeypatch):
    """The logits behind what was taken back are not those of the cut turn."""
    session = chat_session(engines)
    session.append([user("Hi")])
    Script(encode("chatml", "alpha beta gamma")).install(monkeypatch)
    assert "".join(session.generate(stop=("gam",))) == "alpha beta "
    script = Script([end_of_turn()]).install(monkeypatch)
    assert "".join(session.generate()) == ""
    near(script.logits[0], fresh_logits(stock, session))
    assert ids_of(session)[-len(encode("chatml", "alpha beta ")) :] == encode("chatml", "alpha beta ")
    check_ledger(session)


def test_two_turns_in_a_row_are_one_turn(engines, stock):
    """After a limit, generating again goes on: 5 + 7 tokens are the 12 of one turn, with one header."""
    one, two = chat_session(engines), chat_session(engines)
    for session in (one, two):
        session.append([user("Count.")])
    whole = "".join(one.generate(max_tokens=12))
    parts = "".join(two.generate(max_tokens=5)) + "".join(two.generate(max_tokens=7))
    assert parts == whole
    for session in (one, two):
        session.append([user("Thanks.")])
    assert ids_of(one) == ids_of(two)
    assert [s.role for s in two.memory.ledger.spans] == ["system", "user", "assistant", "user"]
    near(two.logits, fresh_logits(stock, two))


def test_after_the_model_has_ended_its_turn_there_is_nothing_more(engines, monkeypatch):
    session = chat_session(engines)
    session.append([user("Hi")])
    Script([*encode("chatml", "yes"), end_of_turn(), end_of_turn()]).install(monkeypatch)
    assert "".join(session.generate()) == "yes"
    held = state_of(session)["backlog"], ids_of(session)
    Script([end_of_turn()]).install(monkeypatch)
    assert "".join(session.generate()) == ""
    session.engine.drain([session])
    assert ids_of(session) == held[1] + [token for _, ids in held[0] for token in ids]


def test_nothing_to_answer(engines):
    session = chat_session(engines)
    for call in (
        session.generate,
        lambda: session.ask([]),
        lambda: session.append([]),
        lambda: session.sync([]),
    ):
        before = state_of(session)
        with pytest.raises(MessageError, match="list of messages is empty"):
            call()
        assert state_of(session) == before
    assert session.ask("Hello", max_tokens=3) is not None
    assert len(session) > 0


def test_raw_ids_are_continued_without_a_header(engines, stock):
    session = chat_session(engines)
    ids = encode("chatml", "The quick brown fox")
    session.append_ids(ids)
    turn = session.generate(max_tokens=4)
    "".join(turn)
    session.engine.drain([session])
    assert ids_of(session) == ids + turn.ids
    want = list(ids)
    for _ in turn.ids:
        want.append(int(stock_logits(stock, want)[-1].argmax()))
    assert ids_of(session) == want
    session.append([user("Now talk.")])  # and messages may follow
    assert ids_of(session)[: len(want)] == want
    check_ledger(session)


def test_raw_ids_need_no_chat_template(engines):
    import copy

    bare = copy.deepcopy(tokenizer("chatml"))
    bare.chat_template = None
    session = engines("qwen2", tokenizer=bare, **SHAPE).session(policy="full")
    session.append_ids(encode("chatml", "The quick"))
    assert len("".join(session.generate(max_tokens=3))) > 0
    with pytest.raises(ModelError, match="no chat template"):
        session.append("Hello")
    check_ledger(session)


def test_no_tokenizer(engines):
    session = engines("qwen2").session(policy="full")
    session.append_ids(random_ids(4))
    for call in (
        session.generate,
        lambda: session.append("x"),
        lambda: session.ask("x"),
        lambda: session.sync(["x"]),
    ):
        before = state_of(session)
        with pytest.raises(ModelError, match="no tokenizer"):
            call()
        assert state_of(session) == before


def test_a_turn_in_the_making_blocks_everything_else(engines):
    session = chat_session(engines)
    session.append([user("Hi")])
    session.generate(max_tokens=3)
    turn = session.turn
    calls = [
        lambda: session.append("x"),
        lambda: session.generate(),
        lambda: session.keep_first(0),
        lambda: session.drop_last(0),
        lambda: session.append_ids([1]),
        lambda: session.sync(["x"]),
        lambda: session.feed([1]),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="still being generated"):
            call()
    turn.close()
    turn.close()
    assert (turn.reason, session.turn) == ("cancel", None)
    session.append("x")
    check_ledger(session)


def test_a_fork_in_the_middle_of_a_turn_has_its_text_so_far(engines):
    session = chat_session(engines)
    session.append([user("Hi")])
    turn = session.generate(max_tokens=6)
    pieces = iter(turn)
    while len(turn.ids) < 3:
        next(pieces)
    copy = session.fork()
    said = turn.ids[:3]
    "".join(pieces)
    assert turn.reason == "length"
    copy.append("x")
    start = ids_of(copy).index(said[0], len(ids_of(session)) - 7)
    assert ids_of(copy)[start : start + 3] == said
    assert ids_of(copy)[start + 3 :] != ids_of(session)[start + 3 :]
    session.append("x")
    for one in (session, copy):
        check_ledger(one)


def test_a_turn_that_goes_on_finishes_the_character_that_was_cut(engines, monkeypatch):
    """The caller saw half of it; what comes then is whole, as in the history."""
    ids = encode("chatml", "aé")
    assert len(ids) == 3
    session = chat_session(engines)
    session.append([user("Hi")])
    Script(ids).install(monkeypatch)
    assert "".join(session.generate(max_tokens=2)) == "a\ufffd"
    Script(ids[2:]).install(monkeypatch)
    assert "".join(session.generate(max_tokens=1)) == "é"
    session.append([user("Thanks.")])
    assert ids_of(session) == joint("chatml", [user("Hi"), assistant("aé"), user("Thanks.")])


def test_going_back_into_reasoning_goes_on_with_it(engines, monkeypatch):
    session = chat_session(engines)
    session.append([user("Hi")])
    Script(encode("chatml", "<think>\nlet us see what there is")).install(monkeypatch)
    "".join(session.generate(max_tokens=12))
    session.keep_first(len(session) - 1)
    assert session.memory.last_region == "scratchpad"
    Script(encode("chatml", " and then more")).install(monkeypatch)
    "".join(session.generate(max_tokens=3))
    assert session.memory.last_region == "scratchpad"
    regions = [region for _, region in session.memory.ledger.spans[-1].parts]
    assert regions.count("scratchpad") == 1  # one stretch


def test_forced_tokens_come_behind_those_that_wait(engines):
    session = chat_engine(engines).session(chunk=8, policy="full")
    waiting, forced = random_ids(40, seed=1), random_ids(3, seed=2)
    session.queue_ids(waiting)
    session.force(forced)
    assert ids_of(session) == waiting + forced
    assert session.memory.waiting == 0


def test_a_session_of_another_engine_is_not_stepped(engines):
    one, two = engines("llama").session(policy="full"), engines("qwen2").session(policy="full")
    for session in (one, two):
        session.queue_ids(random_ids(5))
    with pytest.raises(ConfigError, match="another engine"):
        one.engine.step([one, two])
    assert (len(one), len(two), one.memory.waiting) == (0, 0, 5)


def test_logits_that_are_no_numbers_end_one_turn_of_a_batch(engines):
    sessions = [chat_session(engines) for _ in range(3)]
    for session in sessions:
        session.append([user("Hi")])
        session.queue([], reply=True)
        session.engine.drain([session])
    sessions[1].logits = torch.full_like(sessions[1].logits, math.nan)
    alone = sessions[0].fork()
    with pytest.raises(ModelError, match="not finite"):
        alone.engine.generate(sessions, max_tokens=3)
    "".join(alone.generate(max_tokens=3))
    for session in (sessions[0], sessions[2]):
        assert ids_of(session) == ids_of(alone)
        check_ledger(session)


def test_a_batch_that_cannot_start_leaves_no_turn_open(engines):
    """One of three sessions has nothing to answer: the others can be used at once."""
    good, empty, last = (chat_session(engines) for _ in range(3))
    good.append("Hi")
    last.append("Hi")
    with pytest.raises(MessageError):
        good.engine.generate([good, empty, last], max_tokens=2)
    assert good.engine.generate([good, last], max_tokens=2)[0] is not None
    good.append("again")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 1}])
def test_logits_that_are_no_numbers(engines, bad, options):
    """An error, not token 0; the session can go on."""
    session = chat_session(engines)
    session.append([user("Hi")])
    session.logits = torch.full_like(session.logits, bad)
    session.queue([], reply=True)
    run = session.engine.adapter.run
    object.__setattr__(session.engine.adapter, "run", lambda *args: run(*args) * bad)
    try:
        with pytest.raises(ModelError, match="not finite"):
            "".join(session.generate(max_tokens=3, **options))
    finally:
        object.__setattr__(session.engine.adapter, "run", run)
    check_ledger(session)
    assert ids_of(session) == joint("chatml", [user("Hi")], prompt=True)
    session.append([user("Still there?")])
    assert session.logits.isfinite().all()
    check_ledger(session)


# -- sampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1),
        ("min_p", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("stop", 5),
        ("max_token", 5),
    ],
)
def test_bad_sampling_options(engines, name, value):
    """Refused by name before anything is read."""
    session = chat_session(engines)
    session.append([user("Hi")])
    before = state_of(session)
    for call in (session.generate, lambda **options: session.ask("More", **options)):
        with pytest.raises(ConfigError) as caught:
            call(**{name: value})
        assert caught.value.option == name
        assert caught.value.way_out
        assert state_of(session) == before


def test_whole_numbers_and_no_stop_are_sampling_options(engines):
    texts = [
        chat_session(engines).ask("Hi", max_tokens=6, seed=5, **options)
        for options in ({"temperature": 1, "stop": None}, {"temperature": 1.0, "stop": []})
    ]
    assert texts[0] == texts[1]


def test_a_seed_gives_the_same_text(engines):
    def sample(seed, temperature=5.0):
        session = chat_session(engines)
        session.append([user("Hi")])
        turn = session.generate(max_tokens=12, temperature=temperature, seed=seed)
        "".join(turn)
        return turn.ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(None) != sample(None)
    assert sample(None, 0.0) == sample(7, 0.0)


def test_draws_follow_the_softmax():
    """20,000 draws against the probabilities that temperature, top-p and min-p leave."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])

    def shares(**options):
        draw = Sampler(SamplingOptions(seed=3, **options))
        return torch.bincount(torch.tensor([draw(logits) for _ in range(4000)]), minlength=5) / 4000

    def want(temperature=1.0, keep=5):
        p = (logits / temperature).softmax(0)
        p[keep:] = 0
        return p / p.sum()

    near_enough = {"atol": 0.03, "rtol": 0}
    torch.testing.assert_close(shares(temperature=1.0), want(), **near_enough)
    torch.testing.assert_close(shares(temperature=2.0), want(2.0), **near_enough)
    p = logits.softmax(0)
    assert p[:2].sum() < 0.9 < p[:3].sum()
    torch.testing.assert_close(shares(temperature=1.0, top_p=0.9), want(keep=3), **near_enough)
    assert p[1] / p[0] > 0.3 > p[2] / p[0]
    torch.testing.assert_close(shares(temperature=1.0, min_p=0.3), want(keep=2), **near_enough)
    assert shares(temperature=1.0, top_p=1e-6)[0] == 1
    assert Sampler(SamplingOptions())(logits) == 0


def test_defaults_are_greedy():
    assert sampling_options() == SamplingOptions(temperature=0.0, top_p=1.0, min_p=0.0, stop=())
    assert SamplingOptions(stop="end").stop == ("end",)


# -- C11: tiny contexts ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.99])
def test_tiny_contexts_keep_a_row(engines, models, policy, tokens, ratio):
    """A ratio of a tiny context is a budget of one: one row stays, and both questions get the same answer."""
    budget = max(1, int(tokens * (1 - ratio)))
    session = engines("qwen2").session(policy=policy, budget=budget, sinks=0, chunk=8, slack=2)
    ids = random_ids(tokens)
    near(session.feed(ids), stock_logits(models("qwen2"), ids))
    assert session.stats().resident == min(budget, tokens) >= 1
    check_ledger(session)
    question = random_ids(4, seed=1)
    first, second = (session.fork().feed(question) for _ in range(2))
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert len(session) == tokens, "a fork leaves the original as it was"
    check_ledger(session)


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("budget", [5, 6, 8])
def test_tiny_budgets_keep_all_that_fits(engines, models, policy, budget):
    for tokens in (1, 2, 3, 5):
        session = engines("qwen2").session(policy=policy, budget=budget, chunk=8, slack=2)
        ids = random_ids(tokens)
        near(session.feed(ids), stock_logits(models("qwen2"), ids))
        assert session.stats().resident == tokens
        answer = session.fork().feed(random_ids(9, seed=1))
        assert answer.isfinite().all()
        check_ledger(session)


def test_budget_zero_is_refused(engines):
    for budget, sinks in ((0, 4), (0, 0), (4, 4), (-5, 0)):
        with pytest.raises(ConfigError, match=r"budget: .*Give at least"):
            engines("qwen2").session(budget=budget, sinks=sinks)


# -- C12: pins fill the window -----------------------------------------------------------------------


def window(engines, template="chatml"):
    return chat_session(engines, template, policy="h2o", budget=256, chunk=64, slack=32)


def pinned_text(tokens):
    """A message of exactly so many tokens in ChatML, marker and line ends included."""
    frame = len(joint("chatml", [system("x")])) - 1
    return "a 1" * 400 if tokens is None else "z" * (tokens - frame)


def test_pins_larger_than_the_window_are_refused_at_once(engines):
    session = window(engines)
    session.append([system("Be brief."), user("Hi")])
    before = state_of(session)
    start = time.monotonic()
    with pytest.raises(
        BudgetError, match=r"pinned tokens 0 \+ 300 new, 4 sinks .* need 305, the budget is 256"
    ):
        session.append([system(pinned_text(300), pin="hard")])
    with pytest.raises(BudgetError):
        session.append_ids(random_ids(300), pin="hard")
    with pytest.raises(BudgetError):
        session.sync([system(pinned_text(300), pin="hard"), user("Hi")])
    with pytest.raises(BudgetError):
        session.ask([user(pinned_text(300), pin="hard")])
    assert time.monotonic() - start < 2
    assert state_of(session) == before
    assert session.ask("Still there?", max_tokens=4) is not None
    check_ledger(session)


def test_pins_just_below_the_window_leave_room_to_read(engines):
    """(b): what does not fit beside the pins is read and then evicted, and explain tells."""
    session = window(engines)
    session.append([system(pinned_text(250), pin="hard", span="rules")])
    start = time.monotonic()
    span = session.append([user("z" * 20, span="news")])[0]
    assert time.monotonic() - start < 2
    check_ledger(session)
    assert session.stats().resident == 256
    assert session.explain("rules").resident == 1.0
    report = session.explain("news")
    lost = sum(report.evicted.values())
    assert set(report.evicted) == {"budget"}
    assert report.resident == pytest.approx(1 - lost / (len(span) * 2))
    assert session.ask("?", max_tokens=40) is not None
    assert session.explain("rules").resident == 1.0
    check_ledger(session)
    with pytest.raises(BudgetError, match=r"pinned tokens 250 \+"):
        session.append([user("more", pin="hard")])


@pytest.mark.parametrize("positions", ["bounded", "logical", "compact"])
def test_limits_count_produced_tokens(engines, monkeypatch, positions):
    """(c): 600 tokens through a window of 256, many evictions, and exactly 600 come out."""
    session = chat_session(engines, policy="h2o", budget=256, chunk=64, slack=32, positions=positions)
    session.append([system(pinned_text(40), pin="hard", span="rules"), user("Go on for ever.")])
    Script(encode("chatml", "the ") * 700).install(monkeypatch)
    turn = session.generate(max_tokens=600)
    "".join(turn)
    assert (len(turn.ids), turn.reason) == (600, "length")
    assert session.explain("rules").resident == 1.0
    assert session.stats().evicted >= 600 - 256 - 32
    check_ledger(session)


def test_a_result_larger_than_the_window_is_read_and_reported(engines, stock):
    session = window(engines, "tools")
    session.append([system("Be helpful.", pin="hard", span="rules"), user("Read it.")])
    before = len(session)
    start = time.monotonic()
    span = session.append([tool("x 1 " * 150, span="result")])[0]
    assert time.monotonic() - start < 2
    assert len(session) - before == len(span) > 400
    report = session.explain("result")
    assert report.resident < 1
    assert report.evicted["budget"] == sum(report.evicted.values())
    assert session.explain("rules").resident == 1.0
    assert session.ask("And?", max_tokens=5) is not None
    check_ledger(session)


def test_closing_tokens_never_overfill_the_pins(engines):
    """A tool result whose closing is held back fills the window to the last slot; the closing still comes."""
    sizes = []
    for letters in range(40, 50):
        session = chat_session(engines, "tools", policy="recency", budget=64, chunk=32, slack=8, sinks=2)
        session.append([user("go")])
        try:
            session.append([tool("z" * letters, pin="hard", span="result")])
        except BudgetError:
            break
        sizes.append(len(session.memory.ledger.spans.get("result")))
        session.append([user("What now? " * 10)])
        check_ledger(session)  # hard pins stay
        assert session.explain("result").resident == 1.0
        want = joint("tools", [user("go"), tool("z" * letters), user("What now? " * 10)])
        assert ids_of(session) == want
    assert sizes[-1] == 64 - 2 - 1, "the last of the texts has filled the window"


@pytest.mark.parametrize("number", range(3, 7))
def test_closing_tokens_take_no_name_that_raw_ids_are_given(engines, number):
    session = chat_session(engines, "tools")
    session.append([user("go"), tool("22", pin="hard", span="result")])
    session.append_ids([5, 6, 7], span=f"tool-{number}")
    assert ids_of(session)[-3:] == [5, 6, 7]
    assert len(session.memory.ledger.spans.get(f"tool-{number}")) == 3
    session.check_integrity()


# -- C22: reasoning that the template drops ----------------------------------------------------------


def think(thought, text):
    return f"<think>\n{thought}\n</think>\n\n{text}"


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_sync_reuses_exactly_what_is_common(engines, stock, monkeypatch):
    """Five turns of a client that sends everything and no reasoning: the template drops it from old turns."""
    session = chat_session(engines, "reasoning")
    history = [system("Think first.")]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    turns = [user("What is two?"), tool("1"), tool("22"), tool("333"), user("Then tell me.")]
    reused = []
    for number, message in enumerate(turns):
        history.append(message)
        want = joint("reasoning", history, prompt=True)
        shared = common(ids_of(session), want)
        cached = session.sync(history)
        assert cached == shared
        assert ids_of(session) == want
        near(session.logits, fresh_logits(stock, session))
        check_ledger(session)
        reused.append((cached, len(want)))
        text = "" if 0 < number < 4 else f"It is {number}."
        written = think(
            f"hm {number}",
            text or f'<tool_call>\n{{"name": "look", "arguments": {{"at": {number}}}}}\n</tool_call>',
        )
        Script([*encode("reasoning", written), end_of_turn("reasoning")]).install(monkeypatch)
        assert "".join(session.generate()) == written
        calls = (
            {"tool_calls": [{**call, "function": {"name": "look", "arguments": {"at": number}}}]}
            if 0 < number < 4
            else {}
        )
        history.append(assistant(text, **calls))
    assert reused[0][0] == 0
    assert all(0 < cached < total for cached, total in reused[1:])


def test_a_session_keeps_what_it_wrote(engines, stock, monkeypatch):
    """Session mode: the reasoning is history, nothing is read twice, and the ids only grow."""
    session = chat_session(engines, "reasoning")
    before: list[int] = []
    for number, message in enumerate([user("What is two?"), tool("1"), tool("22"), user("Then tell me.")]):
        session.queue([message], reply=True)
        written = think(f"hm {number}", f"Step {number}.")
        script = Script([*encode("reasoning", written), end_of_turn("reasoning")]).install(monkeypatch)
        assert "".join(session.generate()) == written
        session.engine.drain([session])
        now = ids_of(session)
        assert now[: len(before)] == before
        near(script.logits[0], stock_logits(stock, now[: -len(script.ids) + 1])[-1])
        before = now
    text = tokenizer("reasoning").decode(before)
    assert [text.count(f"hm {number}\n</think>") for number in range(4)] == [1, 1, 1, 1]
    exported = session._transcript.export()
    assert [entry["reasoning"] for entry in exported if entry["role"] == "assistant"] == ["as generated"] * 4


def test_sync_again_computes_one_token(engines, stock):
    session = chat_session(engines)
    history = [system("Be brief."), user("one"), assistant("two"), user("three")]
    assert session.sync(history) == 0
    before, spans = ids_of(session), [span.id for span in session.memory.ledger.spans]
    assert session.sync(history) == len(before) - 1
    assert ids_of(session) == before
    assert [span.id for span in session.memory.ledger.spans] == spans
    near(session.logits, fresh_logits(stock, session))
    check_ledger(session)


def test_sync_to_a_shorter_history(engines, stock, monkeypatch):
    """Taking back and asking at once: the logits are those of the end, not of what was taken back."""
    session = chat_session(engines, "strict")  # its header is empty: nothing new is read before the answer
    session.sync([user("one"), assistant("two"), user("three")])
    cached = session.sync([user("one")], reply=False)
    assert cached == len(session) == len(joint("strict", [user("one")]))
    script = Script([end_of_turn("strict")]).install(monkeypatch)
    "".join(session.generate())
    near(script.logits[0], fresh_logits(stock, session))
    check_ledger(session)


def test_sync_gives_a_changed_message_its_own_marks(engines):
    """The new message shares its first tokens with the old one: id, region and pin are those of the new."""
    session = chat_session(engines, budget=128, chunk=32, slack=8, policy="h2o")
    start = [system("Be brief."), user("one"), assistant("two")]
    session.sync([*start, user("the quick brown fox", span="old", pin="hard")])
    session.sync([*start, user("the quick lazy dog", span="new", region="retrieved")])
    report = session.explain("new")
    assert (report.pin, report.region) == (None, "retrieved")
    assert report.text == "<|im_start|>user\nthe quick lazy dog<|im_end|>\n"
    with pytest.raises(UnknownSpanError):
        session.explain("old")
    session.sync([*start, user("the quick lazy cat", span="new", pin="hard")])
    assert session.explain("new").pin == "hard"
    check_ledger(session)
    with pytest.raises(MessageError, match="'new' is the id of an earlier span"):
        session.sync([*start, user("the quick lazy cat", span="new"), user("x", span="new")])
    check_ledger(session)


def test_sync_gives_marks_to_rows_of_a_ledger_that_has_grown(engines, monkeypatch):
    """Its arrays were made in a step, in inference mode, and cannot be written to outside."""
    monkeypatch.setattr("tenure.memory._FIRST_CAPACITY", 16)
    session = chat_session(engines)
    start = [system("Be brief."), user("one"), assistant("two")]
    session.sync([*start, user("the quick brown fox", span="old")])
    assert session.memory.ledger.region.is_inference()
    session.sync([*start, user("the quick lazy dog", span="new", region="retrieved")])
    report = session.explain("new")
    assert (report.region, report.text) == ("retrieved", "<|im_start|>user\nthe quick lazy dog<|im_end|>\n")
    check_ledger(session)


def test_sync_frees_the_id_of_a_span_that_the_preamble_goes_on_with(engines):
    session = chat_session(engines)
    session.sync([system("Be brief.", span="mine")], reply=False)
    session.sync([user("one"), user("two", span="mine")], reply=False)
    assert session.explain("mine").text == "<|im_start|>user\ntwo<|im_end|>\n"
    check_ledger(session)


def test_refused_syncs_change_nothing(engines):
    session = chat_session(engines, "strict", budget=64, chunk=16, slack=4, policy="h2o")
    session.sync([user("one"), assistant("two"), user("three")])
    before = state_of(session)
    for bad in (
        [user("one"), user("two")],
        [system("rules"), user("one")],
        [user("one"), {"role": "user"}],
        [user("one"), assistant("a", span="s"), user("b", span="s")],
        [user("z" * 80, pin="hard")],
    ):
        with pytest.raises((MessageError, BudgetError)):
            session.sync(bad)
        assert state_of(session) == before


# -- C24, C35, C36, C37: what messages hold ----------------------------------------------------------


def test_one_start_of_text_in_a_whole_session(engines, monkeypatch):
    session = chat_session(engines, "headers")
    start = tokenizer("headers").bos_token_id
    stop = tokenizer("headers").convert_tokens_to_ids("<|eot_id|>")
    session.append([system("Be brief."), user("one"), assistant("two"), tool("3")])
    for number in range(2):
        Script([*encode("headers", f"answer {number}"), stop]).install(monkeypatch)
        assert session.ask(f"question {number}") == f"answer {number}"
    assert ids_of(session).count(start) == 1
    assert ids_of(session)[0] == start
    assert stop in session.stop_ids


def test_nul_characters_are_ordinary(engines, monkeypatch):
    session = chat_session(engines, "tools")
    session.append([user("Read the file.")])
    parts = ["\0\0", "x" * 700, "\0", "data " * 100, "\0\0\0", "CODEWORD-7319"]
    text = "".join(parts)
    held = len(session)
    span = session.append([tool(text, span="file")])[0]
    session.append([user("What was the word?")])
    block = encode("tools", text)
    assert ids_of(session)[held : held + len(span)] != []
    assert contains(ids_of(session), block), "the tokenizer's own ids of the whole string, in place"
    assert contains(ids_of(session), encode("tools", "CODEWORD-7319"))
    assert text in session.explain("file").text
    Script([*encode("tools", "7319"), end_of_turn("tools")]).install(monkeypatch)
    assert "".join(session.generate()) == "7319"
    twin = session.fork()
    assert ids_of(twin) == ids_of(session)
    before = state_of(session)
    for bad in (user("x", span="a\0b"), user("x", step="a\0b"), user("x", reads=["a\0"])):
        with pytest.raises(MessageError):
            session.append([bad])
        assert state_of(session) == before
    check_ledger(session)


def contains(ids, part):
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


RUNS = {
    "letter": lambda size: "a" * size,
    "dashes": lambda size: "-" * size,
    "base64": lambda size: base64.b64encode(random.Random(1).randbytes(size)).decode()[:size],
}


@pytest.mark.parametrize("kind", RUNS)
def test_huge_unbroken_runs_take_linear_time(engines, kind):
    """Rendering and queueing only: 512 KiB below three times 256 KiB, and the count is the tokenizer's."""

    def seconds(size, tries):
        best = math.inf
        for attempt in range(tries):
            text = RUNS[kind](size + attempt)  # another text each time: encoded ones are kept
            session = chat_session(engines, policy="recency", budget=64, chunk=2048, slack=8)
            start = time.process_time()
            session.queue([user(text, span="run")])
            taken = 0
            while ids := session.memory.take():  # the engine's loop, without a model behind it
                taken += len(ids)
                session.memory._enter(len(ids))
            best = min(best, time.process_time() - start)
        assert taken == len(joint("chatml", [user(text)]))
        return best

    small, large = seconds(2**18, 2), seconds(2**19, 1)
    assert large < 3 * small + 0.2
    assert large < 15


def test_a_long_line_is_read_in_a_fixed_slab(engines):
    session = chat_session(engines, policy="recency", budget=256, chunk=2048, slack=32)
    kv_bytes = session.stats().kv_bytes
    session.append([user(RUNS["base64"](2**16), span="blob")])
    stats = session.stats()
    assert stats.tokens == len(joint("chatml", [user(RUNS["base64"](2**16))]))
    assert stats.kv_bytes == kv_bytes < stats.full_kv_bytes
    assert stats.resident == 256
    check_ledger(session)


S, U, A = system("be kind"), user("hello"), assistant("good day")
CALLS = assistant("", tool_calls=[{"id": "c1", "function": {"name": "look", "arguments": {}}}])
LISTS = {
    "s u a s u": [S, U, A, system("be quick"), user("again")],
    "s s u": [S, system("be quick"), U],
    "u u": [U, user("again")],
    "a u": [A, U],
    "s u call u tool": [S, U, CALLS, user("wait"), tool("7", tool_call_id="c1")],
    "developer": [{"role": "developer", "content": "be kind"}, U],
    "s": [S],
}


@pytest.mark.parametrize("order", LISTS)
@pytest.mark.parametrize("template", ["chatml", "tools", "reasoning", "strict", "moving", "headers"])
def test_mixed_roles_give_the_same_in_both_modes(engines, template, order):
    """Rendered the same in one list, one by one and by sync; or refused with the message's index."""
    messages = LISTS[order]
    together, single, synced = (chat_session(engines, template) for _ in range(3))
    texts = [m["content"] for m in messages if m["content"]]
    refusal = None
    try:
        together.append(messages)
    except TenureError as error:
        refusal = error
    if refusal is not None:
        assert isinstance(refusal, MessageError)
        assert refusal.index in range(len(messages))
        assert len(together) == 0
        with pytest.raises(MessageError):
            synced.sync(messages, reply=False)
        assert len(synced) == 0
        assert together.ask([U], max_tokens=2) is not None, "the session still works"
        return
    synced.sync(messages, reply=False)
    assert ids_of(synced) == ids_of(together)
    text = tokenizer(template).decode(ids_of(together))
    places = [text.find(part) for part in texts]
    assert -1 not in places
    assert places == sorted(places)
    assert [text.count(part) for part in set(texts)] == [1] * len(set(texts))
    if template == "reasoning" and any(m["role"] == "assistant" for m in messages):
        return  # it writes a last answer otherwise than one that others follow
    try:
        for message in messages:
            single.append([message])
    except MessageError:
        return  # a template may want to see an answer in the same list
    single.queue([], reply=True)
    together.queue([], reply=True)
    for session in (single, together):
        session.engine.drain([session])
    assert ids_of(single) == ids_of(together)
    check_ledger(together)


@pytest.mark.parametrize(
    "bad",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "wizard", "content": "x"},
        {"content": "x"},
        user("half \ud800"),
        user("x", region="attic"),
        user("x", pin="maybe"),
        user("x", span=""),
        {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
        7,
        None,
    ],
)
def test_bad_messages_change_nothing(engines, bad):
    session = chat_session(engines)
    session.append([user("one", span="taken")])
    before = state_of(session)
    for call in (session.append, session.queue, session.sync, session.ask):
        with pytest.raises(MessageError) as caught:
            call([user("fine"), bad])
        assert caught.value.index == 1
        assert state_of(session) == before
    session.append("two")
    check_ledger(session)


# -- spans -------------------------------------------------------------------------------------------


def test_span_ids_are_unique_also_while_they_wait(engines):
    session = chat_session(engines)
    session.queue([user("one", span="a")])
    before = state_of(session)
    for again in ([user("two", span="a")], [user("x", span="b"), user("y", span="b")]):
        with pytest.raises(MessageError, match="is the id of an earlier span"):
            session.queue(again)
        assert state_of(session) == before
    with pytest.raises(MessageError):
        session.append_ids([1, 2], span="a")
    assert state_of(session) == before
    session.append([user("two", span="b")])
    with pytest.raises(MessageError):
        session.append([user("three", span="a")])
    assert [s.id for s in session.memory.ledger.spans if s.role == "user"] == ["a", "b"]
    check_ledger(session)


def test_given_ids_never_meet_made_ones(engines):
    """The names that unnamed messages get make way for names that the caller gives."""
    session = chat_session(engines)
    session.append([user("one"), user("two", span="user-2"), user("three"), user("four", span="user-3")])
    session.append([user("five", span="user-7"), user("six"), user("seven")])
    ids = [s.id for s in session.memory.ledger.spans]
    assert len(ids) == len(set(ids)) == 8
    assert {"user-2", "user-3", "user-7"} <= set(ids)
    before = state_of(session)
    with pytest.raises(MessageError, match="'user-6' is the id of an earlier span"):
        session.append([user("taken", span="user-6")])
    assert state_of(session) == before
    check_ledger(session)


def test_readers_are_the_steps_that_still_will_read(engines):
    steps = [Step(name, ("facts",)) for name in ("passed", "late", "done", "now", "next")]
    plan = Plan([*steps, Step("end")], expire_after=1)
    session = chat_engine(engines).session(policy="full", plan=plan)
    session.append([user("The code is 7319.", span="facts")])
    for name in ("done", "now"):
        plan.begin(name)
    plan.finish("done")
    plan.begin("next")
    plan.confirm("late")
    assert session.explain("facts").readers == ("late", "now", "next")
    plan.begin("end")
    assert (session.explain("facts").readers, plan.delta("facts")) == (("next",), 0)
    plan.finish("next")
    assert (session.explain("facts").readers, plan.delta("facts")) == ((), None)


@pytest.mark.parametrize("count", [np.int64(5), torch.tensor(5)])
def test_lengths_may_be_whole_numbers_of_any_library(engines, count):
    session = chat_session(engines)
    session.append([user("Hello there")])
    length = len(session)
    session.drop_last(count)
    assert len(session) == length - 5
    session.keep_first(count)
    assert len(session) == 5
    for wrong in (np.float64(1), np.array([1, 2]), "1", None, -1, 6):
        with pytest.raises(ConfigError, match=r"is not in 0\.\.5"):
            session.keep_first(wrong)
    check_ledger(session)


def test_explain_and_stats(engines):
    plan = Plan([Step("one", ("facts",)), Step("two", ("facts", "later"))])
    session = chat_engine(engines).session(policy="h2o", budget=32, chunk=16, slack=4, plan=plan)
    session.append(
        [system("Be brief."), user("The code is 7319.", span="facts", region="retrieved", pin="soft")]
    )
    session.append([user("filler " * 40)])
    stats, report = session.stats(), session.explain("facts")
    assert report.to_json()["id"] == "facts"
    assert (report.region, report.role, report.pin) == ("retrieved", "user", "soft")
    assert report.text == "<|im_start|>user\nThe code is 7319.<|im_end|>\n"
    assert report.tokens == len(joint("chatml", [S, user("The code is 7319.")])) - len(joint("chatml", [S]))
    assert report.readers == ("one", "two")
    held = session.memory.ledger.logical[:, : stats.resident]
    inside = (held >= report.start) & (held < report.start + report.tokens)
    assert report.resident_by_layer == pytest.approx((inside.sum(1) / report.tokens).tolist())
    assert report.resident == pytest.approx(sum(report.resident_by_layer) / 2)
    if report.positions:
        low, high = report.positions
        assert 0 <= low <= high < stats.next_position
        assert low <= stats.next_position - report.rotary_gap <= high
    layout = session.engine.layout
    assert stats.tokens == len(session)
    assert (stats.resident, stats.budget) == (32, 32)
    assert stats.evicted == stats.tokens - 32
    assert stats.kv_bytes == (32 + 16 + 4) * layout.layers * layout.kv_heads * layout.head_dim * 4 * 3
    assert stats.full_kv_bytes == stats.tokens * layout.layers * layout.kv_heads * layout.head_dim * 4 * 2
    assert stats.planned_residency == pytest.approx(report.resident)
    assert stats.spans == 3
    assert stats.to_json()["resident"] == 32
    with pytest.raises(UnknownSpanError, match="no span 'nope'"):
        session.explain("nope")


def test_raw_ids_are_checked(engines):
    session = engines("qwen2").session(policy="h2o", budget=16, chunk=8, slack=2)
    session.append_ids(random_ids(5))
    before = state_of(session)
    for bad in ([1, 320], [-1], [1.5], ["a"], [None]):
        for call in (session.append_ids, session.feed):
            with pytest.raises(ConfigError, match="ids"):
                call(bad)
            assert state_of(session) == before
    session.append_ids([])
    assert session.feed([]).numel() == 0
    assert state_of(session) == before
    given = torch.tensor([3, 4, 5])
    span = session.append_ids(given)
    given[0] = 9
    assert ids_of(session)[-3:] == [3, 4, 5]
    assert len(span) == 3


def test_an_empty_list_of_ids_is_no_start_of_a_session(engines):
    session = chat_session(engines, "headers")
    session.append_ids([])
    session.append([user("one")])
    assert ids_of(session) == joint("headers", [user("one")])


def test_raw_ids_between_messages_come_behind_a_closing(engines):
    """A tool result's end waits for what follows; raw ids must not come before it."""
    session = chat_session(engines, "tools")
    session.append([user("go"), tool("7")])
    extra = encode("tools", "raw text")
    session.append_ids(extra, span="raw")
    whole = joint("tools", [user("go"), tool("7")])
    assert ids_of(session) == whole + extra
    session.append([user("next")])
    assert ids_of(session)[: len(whole) + len(extra)] == whole + extra
    turn_open = session.generate(max_tokens=2)
    "".join(turn_open)
    with pytest.raises(ConfigError, match="an assistant turn is open"):
        session.append_ids(extra)
    check_ledger(session)


# -- forks, plans, context manager -------------------------------------------------------------------


def test_a_fork_shares_nothing_that_changes(engines, monkeypatch):
    plan = Plan([Step("one", ("facts",))])
    session = chat_engine(engines).session(policy="foresight", budget=48, chunk=16, slack=4, plan=plan)
    session.append([system("Be brief."), user("facts " * 6, span="facts")])
    session.queue([user("waiting " * 5, span="wait")])  # a backlog is copied too
    before = state_of(session)
    twin = session.fork()
    assert state_of(twin) == before
    twin.append([user("more " * 30, step="two", reads=["facts"])])
    twin.plan.finish("one")
    Script([*encode("chatml", "yes"), end_of_turn()]).install(monkeypatch)
    "".join(twin.generate())
    twin.drop_last(5)
    assert state_of(session) == before
    assert session.plan.to_json() == plan.to_json()
    check_ledger(twin)
    other = state_of(twin)
    session.append([user("the other way " * 20)])
    session.keep_first(3)
    assert state_of(twin) == other
    check_ledger(session)


def test_a_fork_answers_like_the_original(engines):
    session = chat_session(engines, policy="h2o", budget=48, chunk=16, slack=4)
    session.append([system("Be brief."), user("facts " * 30)])
    twin = session.fork()
    assert session.ask("What?", max_tokens=10) == twin.ask("What?", max_tokens=10)
    assert ids_of(session) == ids_of(twin)


def test_an_empty_plan_given_by_the_caller_is_the_sessions(engines):
    plan = Plan()
    session = chat_engine(engines).session(plan=plan, budget=64, chunk=16, slack=4)
    assert session.plan is plan
    plan.add(Step("one", ("facts",)))
    session.append([user("x", span="facts")])
    assert session.explain("facts").readers == ("one",)


def test_messages_move_the_plan(engines, monkeypatch):
    session = chat_session(engines)
    session.append([user("a", span="a"), user("b", step="one", reads=["a"])])
    assert session.plan.current.id == "one"
    Script([*encode("chatml", "done"), end_of_turn()] * 3).install(monkeypatch)
    turn = session.generate()
    next(iter(turn))  # and away
    turn.close()
    assert turn.reason == "cancel"
    assert session.plan.current.id == "one", "a cancelled turn has not done its step"
    session.ask([user("again")])
    assert session.plan.finished == {"one"}
    session.append([user("c", step="two"), user("d", step="three", reads=["b"])])
    assert session.plan.finished == {"one", "two"}
    assert session.plan.current.id == "three"


def test_the_step_of_a_turn_may_be_taken_out_meanwhile(engines, monkeypatch):
    session = chat_session(engines, plan=Plan([Step("fix"), Step("report")]))
    Script([*encode("chatml", "done"), end_of_turn()] * 3).install(monkeypatch)
    session.queue(user("a", step="fix"), reply=True)
    turn = session.start_turn(max_tokens=9)
    session.engine.step([session])
    session.plan.remove("fix")
    assert "".join(turn) == "done"
    assert session.plan.finished == frozenset()
    assert session.plan.current.id == "report"
    session.ask(user("b"), max_tokens=9)
    assert session.plan.finished == frozenset(), "the message belongs to no step"
    session.ask(user("c", step="report"), max_tokens=9)
    assert session.plan.finished == {"report"}


def test_a_sync_follows_the_messages_that_are_new(engines, monkeypatch):
    session = chat_session(engines)
    Script([*encode("chatml", "done"), end_of_turn()] * 5).install(monkeypatch)
    fetched = []
    restore = session.memory.restore
    monkeypatch.setattr(
        session.memory, "restore", lambda spans: fetched.append(list(spans)) or restore(spans)
    )
    talk = [user("a", span="a"), user("b", step="one", reads=["a"])]
    session.sync(talk)
    assert "".join(session.generate()) == "done"
    assert session.plan.finished == {"one"}
    assert fetched == [["a"]]
    talk += [assistant("done"), user("c")]
    session.sync(talk)
    assert session.plan.finished == {"one"}, "its step is over, and stays so"
    assert fetched == [["a"]]
    "".join(session.generate())
    talk += [assistant("done"), user("d", step="two", reads=["a"])]
    session.sync(talk)
    assert session.plan.current.id == "two"
    "".join(session.generate())
    assert session.plan.finished == {"one", "two"}
    session.sync(talk)
    assert session.plan.finished == {"one"}, "the answer is wanted once more"
    assert session.plan.current.id == "two"
    "".join(session.generate())
    assert session.plan.finished == {"one", "two"}
    assert fetched == [["a"]] * 3


def test_leaving_a_session_frees_its_slab(engines):
    with chat_session(engines, policy="h2o", budget=32, chunk=16, slack=4) as session:
        session.append([user("Hi", span="hi")])
        turn = session.generate(max_tokens=50)
        next(iter(turn))
        assert session.stats().kv_bytes > 0
    assert turn.reason == "cancel"
    assert session.stats().kv_bytes == 0
    assert session.explain("hi").tokens > 0, "the ledger still answers"
    session.check_integrity()
    for call in (
        lambda: session.append("x"),
        session.generate,
        session.fork,
        lambda: session.keep_first(0),
        lambda: session.append_ids([1]),
        lambda: session.feed([1]),
        lambda: session.sync(["x"]),
    ):
        with pytest.raises(ConfigError, match="the session is closed"):
            call()
    assert session.engine.step([session]) == 0
    session.close()


def test_an_error_inside_the_block_is_not_swallowed(engines):
    session = chat_session(engines)

    def block():
        with session:
            session.append([user("Hi")])
            for _ in session.generate(max_tokens=50):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert session.stats().kv_bytes == 0


# -- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "sizes"),
    [(10, [16, 32, 32, 64, 64, 64, 128, 128, 128, 128, 128, 128]), (16, [16, 32, 64, 64, 128])],
)
def test_a_full_cache_doubles(engines, monkeypatch, chunk, sizes):
    """Positions bounded with policy full: nothing is evicted, so the slab follows the session."""
    monkeypatch.setattr("tenure.memory._FIRST_CAPACITY", 16)
    session = engines("qwen2").session(policy="full", positions="bounded", chunk=chunk)
    token = session.stats().kv_bytes // 16
    for number, size in enumerate(sizes):
        session.append_ids(random_ids(chunk, seed=number))
        assert session.stats().kv_bytes // token == size
        check_ledger(session)


def test_a_slab_that_cannot_grow_leaves_the_session(engines, models, monkeypatch):
    from tenure.cache.rows import RowSegment

    monkeypatch.setattr("tenure.memory._FIRST_CAPACITY", 16)
    session = engines("qwen2").session(policy="full", chunk=10)
    ids = random_ids(30)
    session.append_ids(ids[:10])
    grow = RowSegment.grow

    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(RowSegment, "grow", full)
    with pytest.raises(RuntimeError, match="allocate"):
        session.append_ids(ids[10:20])
    monkeypatch.setattr(RowSegment, "grow", grow)
    assert ids_of(session) == ids[:10]
    near(session.feed(ids[20:]), stock_logits(models("qwen2"), ids)[20:])
    check_ledger(session)


@pytest.mark.parametrize("policy", EVICTING)
def test_an_evicting_session_never_grows(engines, policy):
    session = engines("qwen2").session(policy=policy, budget=24, chunk=12, slack=6)
    kv_bytes = session.stats().kv_bytes
    addresses = [tensor.data_ptr() for tensor in session.memory.rows._tensors()]
    for number in range(8):
        session.append_ids(random_ids(30, seed=number))
        session.force(random_ids(15, seed=number))
        assert session.stats().resident <= 30
    assert session.stats().kv_bytes == kv_bytes
    assert [tensor.data_ptr() for tensor in session.memory.rows._tensors()] == addresses


def test_decoding_evicts_in_bursts_of_the_slack(engines):
    session = engines("qwen2").session(policy="recency", budget=24, chunk=12, slack=6)
    session.append_ids(random_ids(40))
    residents = [session.stats().resident]
    for token in random_ids(9, seed=1):
        session.force([token])
        residents.append(session.stats().resident)
    assert residents == [24, 25, 26, 27, 28, 29, 30, 24, 25, 26]


def test_a_policy_is_told_how_many_queries_were_counted(engines, monkeypatch):
    from tenure.policies import MemDecay

    told, absorb = [], MemDecay.absorb
    monkeypatch.setattr(
        MemDecay, "absorb", lambda self, look: told.append(look.queries) or absorb(self, look)
    )
    for window in (4, 0):
        session = engines("qwen2").session(
            policy="memdecay", policy_options={"window": window}, budget=24, chunk=12
        )
        session.append_ids(random_ids(15))
    assert told == [4, 3, 12, 3]


def test_keys_at_far_positions_are_rotated_in_double_precision(engines):
    session = engines("qwen2").session(policy="recency", budget=24, chunk=12, positions="logical")
    far = torch.tensor([5_000_003])
    cos, _ = session.memory.angles(far)
    turns = far.double() * session.engine.adapter.rope.inv_freq.double()
    torch.testing.assert_close(cos[0], turns.cos().float(), atol=1e-6, rtol=0)


def test_a_forks_plan_is_followed_by_the_fork_alone(engines):
    session = engines("qwen2").session(policy="foresight", budget=32, chunk=16, slack=4)
    session.append_ids(random_ids(40, seed=1))
    session.append_ids(random_ids(10), span="facts")
    fork = session.fork()
    fork.plan.add(Step("go", ("facts",)))
    for one in (session, fork):
        one.append_ids(random_ids(100, seed=2))
    assert session.explain("facts").resident < 1.0
    assert fork.explain("facts").resident == 1.0
