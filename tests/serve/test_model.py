"""The openai client's chat, streaming, tools, JSON schema and responses on a trained model."""

from __future__ import annotations

import json

import openai
import pytest

from tenure import Engine
from tenure.config import SessionConfig
from tests.chats import user
from tests.serve.live import serving
from tests.serve.test_openai import FIND

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-coder-0.5b"])
def client(request):
    engine = Engine.load(request.param)
    with (
        serving(engine, session=SessionConfig(budget=1024, chunk=512), resident=2) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        client.name = request.param
        yield client


def test_chat_goes_on_from_its_own_answer(client):
    messages = [user("What is the capital of France? Answer in one word.")]
    first = client.chat.completions.create(model=client.name, messages=messages, max_tokens=24)
    assert "Paris" in first.choices[0].message.content
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model=client.name, messages=messages, max_tokens=24, stream=True
        )
    )
    assert text == first.choices[0].message.content
    messages += [first.choices[0].message.model_dump(exclude_none=True), user("And of Italy?")]
    second = client.chat.completions.create(model=client.name, messages=messages, max_tokens=24)
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert reused >= first.usage.prompt_tokens + first.usage.completion_tokens - 1, "also what it said itself"


def test_tools_and_their_results(client):
    messages = [user("Find the text fox.")]
    options = {"model": client.name, "tools": [FIND], "max_tokens": 80}
    first = client.chat.completions.create(messages=messages, tool_choice="required", **options)
    (call, *_) = first.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"text"}
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    for one in first.choices[0].message.tool_calls:
        messages.append({"role": "tool", "content": "fox is in line 7", "tool_call_id": one.id})
    last = client.chat.completions.create(messages=messages, **options)
    assert last.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_json_of_a_schema(client):
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 20},
            "country": {"enum": ["France", "Italy"]},
        },
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model=client.name,
        messages=[user("Italy and its capital, as JSON.")],
        response_format=form,
        max_tokens=80,
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"capital", "country"}


def test_responses(client):
    first = client.responses.create(
        model=client.name, input="What is the capital of France? Answer in one word.", max_output_tokens=24
    )
    assert "Paris" in first.output_text
    second = client.responses.create(
        model=client.name,
        input="And of Italy?",
        previous_response_id=first.id,
        max_output_tokens=24,
    )
    assert second.output_text.strip()
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
