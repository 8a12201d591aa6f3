"""Requests that are wrong: what is said of them, and that they harm nothing."""

from __future__ import annotations

import json

import httpx
import pytest

from tenure.serve.completions import _ascii
from tests.chats import user
from tests.serve.live import say, serving, tiny_engine

CHAT = "/v1/chat/completions"


def post(http, messages=None, **fields):
    body = {"model": "tiny", "messages": messages or [user("x")], "max_tokens": 2, **fields}
    return http.post(CHAT, json=body)


@pytest.mark.parametrize(
    "variables",
    [
        {"chat_template": "{% for a in range(9) %}{{ messages[0].content }}{% endfor %}"},
        {"tokenize": True},
        {"messages": []},
        {"conversation": []},
        {"tools": [{"a": 1}]},
        {"documents": []},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"return_dict": True},
        {"padding": True},
        {"truncation": True},
        {"max_length": 3},
        {"tokenizer_kwargs": {}},
        {"self": 1},
    ],
)
def test_variables_of_the_template_are_no_arguments_of_its_rendering(http, variables):
    for path, body in (
        (CHAT, {"messages": [user("x")]}),
        ("/v1/responses", {"input": "x"}),
    ):
        reply = http.post(path, json={"model": "tiny", "chat_template_kwargs": variables, **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (
            400,
            "invalid_value",
            "chat_template_kwargs",
        )
        assert next(iter(variables)) in error["message"]
    assert post(http, chat_template_kwargs={"enable_thinking": False}).status_code == 200


JSON = {"Content-Type": "application/json"}
BODY = b'{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"x"}]'
DEEP = "[" * 700 + "]" * 700
BOTTOMLESS = "[" * 200_000 + "]" * 200_000  # for the json module of any Python
HALF = '"\\ud800"'


def send(http, fields, path=CHAT, body=BODY):
    return http.post(path, content=body + b"," + fields.encode() + b"}", headers=JSON)


def refused(reply):
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return error["code"], error["param"], error["message"]


def test_a_body_that_is_no_json_is_told_from_one_of_another_type(http):
    code, param, message = refused(http.post(CHAT, content=b'{"model": "tiny",', headers=JSON))
    assert (code, param) == ("invalid_request", None)
    assert "not JSON at character 17" in message
    for content in (BODY + b"}", b""):
        code, param, message = refused(http.post(CHAT, content=content))
        assert (code, param) == ("invalid_request", None)
        assert "Content-Type: application/json" in message
    assert refused(http.post(CHAT, content=b'{"model": "\xff"}', headers=JSON))[:2] == (
        "invalid_request",
        None,
    )


@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"stop": 5}, "stop", "valid string or Input should be a valid list"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"messages": [user("x"), {"role": "user", "content": 5}]}, "messages[1].content", "valid string or"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"tool_choice": 5}, "tool_choice", "valid dictionary"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"temperature": 99}, "temperature", "less than or equal"),
    ],
)
def test_the_field_at_fault_is_named_as_the_client_wrote_it(http, fields, param, cause):
    code, named, message = refused(http.post(CHAT, json={"model": "tiny", "messages": [user("x")], **fields}))
    assert (code, named) == ("invalid_request", param)
    assert message.startswith(f"{param}: ")
    assert cause in message


def test_a_wrong_query_is_named(http):
    assert refused(http.get("/v1/sessions/x/memory?start=-1"))[1] == "start"


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ('"priority": 1' + "0" * 400, "clipped"),
        ('"priority": -1' + "0" * 400, "clipped"),
        ('"nvext": {"agent_hints": {"latency_sensitivity": 1' + "0" * 400 + "}}", "accepted"),
        ('"nvext": {"agent_hints": {' + HALF + ": 1}}", "rejected"),
        ('"hints": [{"message": 0, ' + HALF + ": 1}]", "rejected"),
        ('"hints": ' + DEEP, "rejected"),
    ],
)
def test_a_strange_hint_fails_no_request(http, fields, outcome):
    reply = send(http, fields)
    assert reply.status_code == 200, reply.text
    assert [one["outcome"] for one in reply.json()["tenure"]["hints"]] == [outcome]


FUNCTION = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]'
SCHEMA = '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [%s]}}}'


@pytest.mark.parametrize("value", [DEEP, HALF, "NaN", "-1e999"], ids=["deep", "half", "nan", "infinite"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (FUNCTION, "tools"),
        (SCHEMA, "response_format"),
        ('"chat_template_kwargs": {"a": %s}', "chat_template_kwargs"),
    ],
)
def test_data_without_end_or_that_is_no_text_is_refused(http, fields, param, value):
    assert refused(send(http, fields % value))[:2] == ("invalid_value", param)


@pytest.mark.parametrize("value", [DEEP, HALF, "NaN", "-1e999"], ids=["deep", "half", "nan", "infinite"])
def test_what_a_response_gives_back_is_checked(http, value):
    for fields, param in (
        ('"tools": [{"type": "function", "name": "f", "x": %s}]', "tools"),
        ('"tool_choice": {"type": "function", "name": "f", "x": %s}', "tool_choice"),
        ('"text": {"x": %s}', "text"),
    ):
        assert refused(send(http, fields % value, "/v1/responses", RESPONSE))[:2] == ("invalid_value", param)


def test_a_raw_prompt_that_is_no_text_is_refused(http):
    reply = send(http, f'"prompt": {HALF}', "/v1/completions", b'{"model": "tiny", "max_tokens": 1')
    assert refused(reply)[:2] == ("invalid_value", "prompt")


def test_what_is_no_text_and_what_is_no_route_is_told(http):
    reply = http.post(CHAT, content=b'{"model": "\xff"}', headers=JSON)
    assert refused(reply) == ("invalid_request", None, "the body is not UTF-8 at byte 11")
    reply = http.get("/chat/completions")
    assert reply.status_code == 404
    assert "/v1" in reply.json()["error"]["message"]


WRONG = '{"type": "object", "properties": {"a": {"type": "strin"}}}'
RIGHT = '{"type": "object", "properties": {"a": {"type": "string"}}}'
RESPONSE = b'{"model": "tiny", "input": "x", "max_output_tokens": 1'


def _form(schema: str) -> str:
    return (
        '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ' + schema + "}}"
    )


def _tool(schema: str) -> str:
    return (
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + schema + "}}]"
        ', "tool_choice": "auto"'
    )


@pytest.mark.parametrize(
    ("path", "start", "fields", "param"),
    [
        (CHAT, None, _form(WRONG), "response_format"),
        (CHAT, None, f"{_form(WRONG)}, {_tool(RIGHT)}", "response_format"),
        (CHAT, None, f"{_form(RIGHT)}, {_tool(WRONG)}", "tools"),
        (CHAT, None, '"response_format": {"type": "xml"}', "response_format"),
        (CHAT, None, '"response_format": {"type": "json_schema", "json_schema": []}', "response_format"),
        (
            "/v1/responses",
            RESPONSE,
            '"text": {"format": {"type": "json_schema", "name": "x", "schema": ' + WRONG + "}}",
            "text.format",
        ),
        ("/v1/responses", RESPONSE, '"text": {"format": {"type": "xml"}}', "text.format"),
        ("/v1/responses", RESPONSE, '"text": {"format": "json_object"}', "text.format"),
    ],
)
def test_a_schema_that_cannot_be_used_is_blamed_on_its_field(http, path, start, fields, param):
    reply = send(http, fields, path, start) if start else send(http, fields, path)
    code, named, message = refused(reply)
    assert (code, named) == ("invalid_value", param)
    assert param in message


@pytest.mark.parametrize("arguments", ['{"a": ' + DEEP + "}", json.dumps('{"a": ' + BOTTOMLESS + "}")])
def test_deep_arguments_of_a_call_are_refused(http, arguments):
    call = '{"id": "a", "type": "function", "function": {"name": "f", "arguments": ' + arguments + "}}"
    message = '{"role": "assistant", "content": "x", "tool_calls": [' + call + "]}"
    reply = http.post(CHAT, content='{"model": "tiny", "messages": [' + message + "]}", headers=JSON)
    assert refused(reply)[0] == "invalid_value"


def test_a_call_with_half_a_character_does_not_lose_the_answer(http, monkeypatch):
    say(monkeypatch, '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d"}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    whole = post(http, tools=tools, max_tokens=200)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "\ufffd"}
    streamed = post(http, tools=tools, max_tokens=200, stream=True).text
    assert "error" not in streamed
    assert '"finish_reason":"tool_calls"' in streamed
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    given = http.post("/v1/responses", json={"model": "tiny", "input": "x", "tools": [tool]})
    assert given.status_code == 200
    assert given.json()["output"][0]["arguments"] == '{"a": "\ufffd"}'
    messages = [user("x"), choice["message"], {"role": "tool", "content": "y", "tool_call_id": "z"}]
    messages[2]["tool_call_id"] = choice["message"]["tool_calls"][0]["id"]
    assert post(http, messages, tools=tools, max_tokens=200).status_code == 200


@pytest.mark.parametrize("template", ["tools", "chatml"])
def test_calls_are_read_alike_with_and_without_tools_in_the_template(template):
    with serving(tiny_engine(template)) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        for call in (
            {},
            {"function": "f"},
            {"function": {"name": 5}},
            {"function": {"name": "f", "arguments": 5}},
        ):
            messages = [user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("y")]
            code, param, message = refused(post(http, messages))
            assert (code, param) == ("invalid_message", "messages[1]")
            assert "tool_calls[0]" in message
        call = {"function": {"name": "f", "arguments": "{}"}}
        messages = [user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("y")]
        assert post(http, messages).status_code == 200


def test_a_choice_of_another_type_is_told_from_an_unknown_function(http):
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    assert "'allowed_tools' is not read" in refused(post(http, tools=tools, tool_choice=choice))[2]
    choice = {"type": "function", "function": {"name": "g"}}
    assert "not among the tools" in refused(post(http, tools=tools, tool_choice=choice))[2]


def test_a_refusal_among_the_parts_is_text(http):
    part = {"type": "refusal", "refusal": "I would rather not."}
    messages = [user("x"), {"role": "assistant", "content": [part]}, user("y")]
    told = [user("x"), {"role": "assistant", "content": part["refusal"]}, user("y")]
    assert (
        post(http, messages).json()["usage"]["prompt_tokens"]
        == post(http, told).json()["usage"]["prompt_tokens"]
    )


@pytest.mark.parametrize("name", ["a", "é✓", " a", "a ", " ", "a  b"])
def test_a_header_can_say_every_name(name):
    said = _ascii(name)
    assert said.isascii()
    assert said == said.strip() != ""
