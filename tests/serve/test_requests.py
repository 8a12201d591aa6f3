"""Requests that are wrong: what is said of them, and that they harm nothing."""

from __future__ import annotations

import httpx
import pytest

from tests.chats import user
from tests.serve.live import serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def live():
    with serving(resident=4) as live:
        yield live


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=30) as http:
        yield http


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
