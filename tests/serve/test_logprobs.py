"""Log-probabilities: a token's own bytes, where its text begins, none behind a stop text."""

from __future__ import annotations

import json

import pytest

from tenure.sampling import TokenChoice
from tenure.serve.logprobs import Placed, listed, spelt
from tests.chats import tokenizer, user
from tests.oracles import Script
from tests.test_detokenize import sentence_piece

WORDS = tokenizer("tools")


class Sure(Script):
    """A script that is sure of itself."""

    def __call__(self, logits):
        token = super().__call__(logits)
        self.choice = TokenChoice(token, -0.5, ((token, -0.5), (token - 1, -2.0)))
        return token


@pytest.fixture
def say(monkeypatch):
    def say(text):
        ids = [*WORDS(text, add_special_tokens=False)["input_ids"], WORDS.eos_token_id]
        monkeypatch.setattr("tenure.turn.Sampler", lambda options, stop_ids: Sure(ids))

    return say


def spelt_out(content):
    return b"".join(bytes(one["bytes"]) for one in content).decode()


@pytest.mark.parametrize("text", ["é😀", "안녕하세요", "a 👨‍👩‍👧 b", " two words", "\ufffd"])
def test_bytes_are_the_tokens_own(text):
    ids = WORDS(text, add_special_tokens=False)["input_ids"]
    assert spelt_out([spelt(WORDS, TokenChoice(token, -1.0, ())) for token in ids]) == text


def test_bytes_of_vocabularies_with_byte_fallback():
    words = sentence_piece()
    smile = [4 + byte for byte in "😀".encode()]
    content = [spelt(words, TokenChoice(token, -1.0, ())) for token in [1, 2, *smile, 3]]
    assert spelt_out(content) == " Hello world😀!"
    assert [one["token"] for one in content[:2]] == [" Hello", " world"]


def test_parts_of_characters_do_not_fall_together_in_a_list():
    pieces = set(WORDS("😀é", add_special_tokens=False)["input_ids"])
    top = tuple((token, -1.0) for token in pieces)
    shown = listed(WORDS, [Placed(TokenChoice(token, -1.0, top), 0) for token in pieces])
    assert len(pieces) > 2
    assert len(shown["top_logprobs"][0]) == len(set(shown["tokens"])) == len(pieces)


@pytest.mark.parametrize("stop", ["STOP", "two STOP", " th", "o"])
def test_tokens_behind_a_stop_text_are_not_listed(http, say, stop):
    say("one two STOP three")
    body = {
        "model": "tiny",
        "messages": [user("Count.")],
        "stop": [stop],
        "logprobs": True,
        "top_logprobs": 1,
    }
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = (choice["logprobs"] or {"content": []})["content"]
    text = choice["message"]["content"]
    assert text == "one two STOP three".partition(stop)[0]
    said = spelt_out(content)
    assert said.startswith(text)
    assert len(said) - len(text) < len(content[-1]["token"]) if content else not text, "no whole token more"
    pieces = ""
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for one in json.loads(line[6:])["choices"]:
                    pieces += spelt_out((one["logprobs"] or {"content": []})["content"])
    assert pieces == said


@pytest.mark.parametrize("text", ["one two three", "é and 😀 and 안녕 at last"])
def test_offsets_say_where_a_tokens_text_begins(http, say, text):
    say(text)
    body = {"model": "tiny", "prompt": "Count: ", "max_tokens": 90, "logprobs": 2}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == text
    logs = choice["logprobs"]
    starts = logs["text_offset"]
    assert len(starts) == len(logs["tokens"]) == len(logs["top_logprobs"])
    assert starts[0] == 0
    for token, start in zip(logs["tokens"], starts, strict=True):
        assert token.startswith("bytes:") or text[start : start + len(token)] == token
    streamed = []
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for one in json.loads(line[6:])["choices"]:
                    streamed += (one["logprobs"] or {"text_offset": []})["text_offset"]
    assert streamed == starts
