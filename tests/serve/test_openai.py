"""The real ``openai`` client against a live server. What the model says is scripted (O5) where it matters."""

from __future__ import annotations

import json

import openai
import pytest

from tests import templates
from tests.chats import joint, system, tokenizer, tool, user
from tests.serve.live import say, serving

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 8}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
TWO = (
    'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"text": "a {\\"b\\"} </tool_call> c"}}\n</tool_call>\n'
    'and\n<tool_call>\n{"name": "find", "arguments": {"text": "안녕"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def live():
    with serving(resident=4) as live:
        yield live


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for name in ("other", "an/other"):
        with pytest.raises(openai.NotFoundError, match=f"'{name}' is not served; this server has 'tiny'"):
            client.models.retrieve(name)


def test_chat_and_its_stream(client):
    messages = [system("Be brief."), user("Which fox?")]
    options = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 1.0, "seed": 7}
    whole = client.chat.completions.create(**options)
    text, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
        else:
            assert usage is None
            usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason] == reasons[-1:]
    assert usage.completion_tokens == whole.usage.completion_tokens <= 12
    assert whole.usage.prompt_tokens == len(joint("tools", messages, True))


def test_parallel_calls_in_both_modes_and_results_in_any_order(live, client, monkeypatch):
    say(monkeypatch, TWO)
    messages = [user("Find both.")]
    options = {"model": "tiny", "messages": messages, "tools": [FIND], "max_tokens": 400}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me look.\nand"
    calls, text, reasons = {}, "", []
    for chunk in client.chat.completions.create(**options, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or []:
            one = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            one["arguments"] += call.function.arguments or ""
    assert text == whole.message.content
    assert [reason for reason in reasons if reason] == ["tool_calls"] == reasons[-1:]
    assert sorted(calls) == [0, 1]
    assert len({call["id"] for call in calls.values()}) == 2
    given = [json.loads(call["arguments"]) for call in calls.values()]
    assert given == [{"text": 'a {"b"} </tool_call> c'}, {"text": "안녕"}]
    assert [json.loads(call.function.arguments) for call in whole.message.tool_calls] == given

    say(monkeypatch, "Both found.")
    made = whole.message.tool_calls
    results = [tool("second", tool_call_id=made[1].id), tool("first", tool_call_id=made[0].id)]
    messages += [whole.message.model_dump(exclude_none=True), *results]
    last = client.chat.completions.create(**{**options, "messages": messages})
    assert last.choices[0].message.content == "Both found."
    assert last.choices[0].finish_reason == "stop"
    name = last.model_extra["tenure"]["session_id"]
    ids = next(held for held in live.sessions() if held.id == name).session.memory.ids.tolist()
    decoded = tokenizer("tools").decode(ids)
    assert decoded.index("first") < decoded.index("second"), "next to the calls that they answer"
    assert last.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_forced_call_is_valid_whatever_the_model_prefers(client, choice):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[user("Go.")],
        tools=[FIND, {"type": "function", "function": {"name": "now"}}],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=300,
        temperature=1.0,
        seed=3,
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("find", "now")
    if call.function.name == "find":
        assert set(arguments) == {"text"}
    else:
        assert choice == "required"


def test_no_calls_where_none_are_wanted(client, monkeypatch):
    say(monkeypatch, TWO)
    answer = client.chat.completions.create(
        model="tiny", messages=[user("Go.")], tools=[FIND], tool_choice="none", max_tokens=400
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == TWO


def test_json_of_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[user("Give.")],
            response_format=form,
            temperature=1.2,
            seed=seed,
            max_tokens=200,
        )
        data = json.loads(answer.choices[0].message.content)
        assert sorted(data) == ["n", "ok"]
        assert answer.choices[0].finish_reason == "stop"


def test_several_answers(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[user("Vary.")], n=3, temperature=1.5, seed=1, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    alone = client.chat.completions.create(
        model="tiny", messages=[user("Vary.")], temperature=1.5, seed=2, max_tokens=8
    )
    assert alone.choices[0].message.content == answer.choices[1].message.content, (
        "a fork is as good as a session"
    )


def test_stop_strings_and_logprobs(client, monkeypatch):
    say(monkeypatch, "one two STOP three")
    answer = client.chat.completions.create(
        model="tiny", messages=[user("Count.")], stop=["STOP"], logprobs=True, top_logprobs=2, max_tokens=50
    )
    assert answer.choices[0].message.content == "one two "
    monkeypatch.undo()
    answer = client.chat.completions.create(
        model="tiny", messages=[user("Count on.")], logprobs=True, top_logprobs=2, max_tokens=5
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in content)


def test_responses_go_on_from_each_other_also_from_an_older_one(client, monkeypatch):
    say(monkeypatch, "First answer.", "Second answer.", "Other answer.")
    first = client.responses.create(model="tiny", input="Say one.", instructions="Be brief.")
    assert first.output_text == "First answer."
    assert first.status == "completed"
    second = client.responses.create(
        model="tiny", input="Say two.", instructions="Be brief.", previous_response_id=first.id
    )
    whole = [
        system("Be brief."),
        user("Say one."),
        {"role": "assistant", "content": "First answer."},
        user("Say two."),
    ]
    assert second.usage.input_tokens == len(joint("tools", whole, True))
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.model_extra["tenure"]["how"] == "continued"
    other = client.responses.create(
        model="tiny", input="Say three, not two.", instructions="Be brief.", previous_response_id=first.id
    )
    assert other.output_text == "Other answer."
    assert other.model_extra["tenure"]["how"] == "branched"
    assert client.responses.retrieve(second.id).output_text == "Second answer."
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="?", previous_response_id=second.id)


def test_a_stream_of_a_response_equals_the_response(client, monkeypatch):
    flat = {"type": "function", **FIND["function"]}
    say(monkeypatch, TWO)
    options = {"model": "tiny", "input": [user("Find both.")], "tools": [flat]}
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"

    def shape(items):
        return [
            (item.type, item.content[0].text)
            if item.type == "message"
            else (item.type, item.name, item.arguments)
            for item in items
        ]

    assert shape(events[-1].response.output) == shape(whole.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert shape(done) == shape(whole.output)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text

    say(monkeypatch, "Done.")
    calls = [item for item in whole.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    last = client.responses.create(model="tiny", input=outputs, tools=[flat], previous_response_id=whole.id)
    assert last.output_text == "Done."


def test_structured_output_of_a_response(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    answer = client.responses.create(model="tiny", input="n?", text=form, max_output_tokens=100)
    assert set(json.loads(answer.output_text)) == {"n"}
    cut = client.responses.create(model="tiny", input="n?", max_output_tokens=2)
    assert cut.status in ("incomplete", "completed")


def test_raw_completions(client):
    first = client.completions.create(model="tiny", prompt="The quick brown", max_tokens=6)
    assert first.choices[0].finish_reason in ("stop", "length")
    words = tokenizer("tools")("The quick brown")["input_ids"]
    assert first.usage.prompt_tokens == len(words)
    again = client.completions.create(model="tiny", prompt=words, max_tokens=6)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == len(words) - 1
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model="tiny", prompt=words, max_tokens=6, stream=True)
    )
    assert text == first.choices[0].text
    both = client.completions.create(model="tiny", prompt=["The quick brown", "lazy dog"], max_tokens=6, n=1)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == first.choices[0].text


def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="other", messages=[user("Hi")])
    for wrong in (
        {"n": 0},
        {"temperature": -1},
        {"messages": []},
        {"messages": [{"role": "owner", "content": ""}]},
    ):
        for mode in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**{"model": "tiny", "messages": [user("Hi")], **wrong, **mode})
            assert caught.value.body["code"]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="tiny", messages=[user("Hi")], tool_choice="required")


def test_the_history_is_what_the_template_writes(live, client, monkeypatch):
    say(monkeypatch, TWO, "fine")
    messages = [system("Rules."), user("Find.")]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=[FIND], max_tokens=400)
    message = first.choices[0].message
    messages += [
        message.model_dump(exclude_none=True),
        *(tool(f"result {place}", tool_call_id=call.id) for place, call in enumerate(message.tool_calls)),
    ]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=[FIND], max_tokens=9)
    for call in messages[2]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    want = templates.joint(tokenizer("tools"), messages, True, tools=[FIND])
    held = next(one for one in live.sessions() if one.id == second.model_extra["tenure"]["session_id"])
    assert held.session.memory.ids.tolist()[: len(want)] == want
    assert second.usage.prompt_tokens == len(want)
