"""Calls of tools in a text: however it is cut into pieces, the same text and calls come out (C29)."""

from __future__ import annotations

import json
import random

import pytest

from tenure.sampling import Sampler, SamplingOptions
from tenure.toolcalls import CallStream, ToolCall, call_grammar, fold, form_of
from tests import templates
from tests.chats import chat_session, encode, tokenizer, tool, user
from tests.oracles import Script, check_ledger

_PATH = r'"a {b} \"c\" </tool_call>"'
READ = (
    f'<tool_call>\n{{"name": "read", "arguments": {{"path": {_PATH}, "n": [1, {{"x": 2}}]}}}}\n</tool_call>'
)
SAY = '<tool_call>\n{"name": "say", "arguments": {"text": "안녕 é"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 8}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def split(text, form="hermes", seed=None):
    """Text and calls of a stream of pieces; one piece, one character each, or random pieces."""
    stream, parts = CallStream(form), []
    generator, at = random.Random(seed), 0
    while at < len(text):
        size = len(text) if seed is None else 1 if seed == 0 else generator.randint(1, 9)
        parts += stream.push(text[at : at + size])
        at += size
    parts += stream.finish()
    plain = "".join(part for part in parts if isinstance(part, str))
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    assert [call.id for call in stream.calls] == [part.id for part in parts if isinstance(part, ToolCall)]
    assert len({call.id for call in stream.calls}) == len(calls)
    return plain, calls


R = ("read", {"path": 'a {b} "c" </tool_call>', "n": [1, {"x": 2}]})
S = ("say", {"text": "안녕 é"})


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        (READ, "", [R]),
        (f"Let me look.\n{READ}", "Let me look.", [R]),
        (f"First\n\n{READ}\nthen {SAY}\n", "First\nthen", [R, S]),
        (f"{READ}\n{SAY}\n{READ}", "", [R, S, R]),
        ("just text with a < and <tool and spaces  ", "just text with a < and <tool and spaces  ", []),
        ("<tool_call>\n{broken}\n</tool_call> after", "<tool_call>\n{broken}\n</tool_call> after", []),
        (f"<tool_call>oops</tool_call>{SAY}", "<tool_call>oops</tool_call>", [S]),
        ('<tool_call>\n{"name": "say", "arg', '<tool_call>\n{"name": "say", "arg', []),
        ('<tool_call>\n{"name": "say"}\n</tool', "", [("say", {})]),
        ("<tool_call>[1, 2]</tool_call>", "<tool_call>[1, 2]</tool_call>", []),
        ("   ", "   ", []),
        ("", "", []),
    ],
)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_text_and_calls(text, plain, calls, seed):
    assert split(text, seed=seed) == (plain, calls)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_bare_objects(seed):
    one = '{"name": "say", "parameters": {"text": "}{"}}'
    assert split(one, "bare", seed) == ("", [("say", {"text": "}{"})])
    assert split(f"{one}; {one}", "bare", seed)[1] == [("say", {"text": "}{"})] * 2
    assert split('A set {"name": "x"} here', "bare", seed) == ('A set {"name": "x"} here', [])
    assert split('{"a": 1} is JSON', "bare", seed) == ('{"a": 1} is JSON', [])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("many", [True, False])
def test_a_grammar_of_calls(seed, many):
    import torch

    words = tokenizer("tools")
    stop = {words.eos_token_id}
    grammar = call_grammar(words, TOOLS, "hermes", many=many)
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed, grammar=grammar), stop)
    generator = torch.Generator().manual_seed(seed)
    ids = []
    while len(ids) < 600:
        logits = torch.randn(448, generator=generator)
        logits[list(stop)] += 4
        token = sampler(logits)
        if token in stop or sampler.finished:
            ids += [] if token in stop else [token]
            break
        ids.append(token)
    plain, calls = split(words.decode(ids))
    assert plain == ""
    assert len(calls) >= 1 if many else len(calls) == 1
    for name, arguments in calls:
        assert name in ("read", "now")
        assert name == "now" or (set(arguments) == {"path"} and len(arguments["path"]) <= 8)


def test_forms_of_templates():
    assert form_of(templates.TOOLS) == "hermes"
    assert form_of(templates.CHATML) is None


def test_folding_keeps_order_and_marks():
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
    messages = [
        user("Go", pin="soft"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        tool("found"),
    ]
    folded, more = fold(messages, TOOLS)
    assert more == 1
    assert [message["role"] for message in folded] == ["system", "user", "assistant", "user"]
    assert '"name": "now"' in folded[0]["content"]
    assert folded[1]["pin"] == "soft"
    assert split(folded[2]["content"]) == ("", [("read", {"path": "x"})])
    assert "found" in folded[3]["content"]
    again, more = fold([{"role": "system", "content": "Rules."}, *messages], TOOLS)
    assert more == 0
    assert again[0]["content"].startswith("Rules.")


def script(monkeypatch, text):
    Script([*encode("tools", text), tokenizer("tools").eos_token_id] * 2).install(monkeypatch)


def test_a_turn_that_calls_is_history_as_the_template_writes_it(engines, monkeypatch):
    session = chat_session(engines, "tools", tools=TOOLS)
    session.append([user("What is in a?")])
    script(monkeypatch, f"Look:\n{SAY}\n{SAY}")
    turn = session.generate()
    assert "".join(turn) == turn.text
    assert [call.name for call in turn.calls] == ["say", "say"]
    results = [tool(str(place), tool_call_id=call.id) for place, call in enumerate(turn.calls)]
    session.append(results)
    calls = [call.to_openai() for call in turn.calls]
    for call in calls:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    whole = [user("What is in a?"), {"role": "assistant", "content": "Look:", "tool_calls": calls}, *results]
    session.queue([], reply=True)
    session.engine.drain([session])
    assert session.memory.ids.tolist() == templates.joint(tokenizer("tools"), whole, True, tools=TOOLS)
    check_ledger(session)
    assert [len(entry["tool_calls"]) for entry in session._transcript.export()][1] == 2


def test_a_step_of_the_plan_ends_with_its_answer_and_not_with_a_call(engines, monkeypatch):
    session = chat_session(engines, "tools", tools=TOOLS)
    session.append([user("Do it", step="s1")])
    script(monkeypatch, SAY)
    turn = session.generate()
    "".join(turn)
    assert turn.calls
    assert session.plan.finished == frozenset()
    session.append([tool("done", tool_call_id=turn.calls[0].id)])
    script(monkeypatch, "All done.")
    "".join(session.generate())
    assert session.plan.finished == {"s1"}


def test_without_tools_a_call_is_text(engines, monkeypatch):
    session = chat_session(engines, "tools")
    session.append([user("Hi")])
    script(monkeypatch, SAY)
    turn = session.generate()
    assert "".join(turn) == SAY
    assert turn.calls == []


def test_one_call_ends_the_turn(engines, monkeypatch):
    session = chat_session(engines, "tools", tools=TOOLS)
    session.append([user("Hi")])
    script(monkeypatch, f"{SAY}\n{SAY}")
    turn = session.generate(one_call=True)
    "".join(turn)
    assert len(turn.calls) == 1
    assert turn.reason == "stop"
