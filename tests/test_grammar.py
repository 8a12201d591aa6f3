"""Grammars: whatever a model prefers, the text is of the form asked for."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tenure.errors import ConfigError
from tenure.grammar import Grammar
from tenure.sampling import Sampler, SamplingOptions
from tests.chats import SHAPE, chat_session, tokenizer, user
from tests.conftest import stock_logits

WORDS = tokenizer("tools")
STOP = {WORDS.eos_token_id}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 6}, "line": {"type": "integer"}},
    "required": ["path", "line"],
    "additionalProperties": False,
}


def write(grammar, seed, most=400, bias=None):
    """What a model with random logits writes."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed, grammar=grammar), STOP)
    ids = []
    while len(ids) < most and not sampler.finished:
        logits = torch.randn(448, generator=generator)
        if bias is not None:
            logits[bias] += 5
        token = sampler(logits)
        if token in STOP:
            break
        ids.append(token)
    assert len(ids) < most
    return WORDS.decode(ids)


@pytest.mark.parametrize("seed", range(8))
def test_json_of_a_schema(seed):
    data = json.loads(write(Grammar.json_schema(WORDS, SCHEMA), seed))
    assert sorted(data) == ["line", "path"]
    assert isinstance(data["line"], int)
    assert len(data["path"]) <= 6


def test_any_object():
    close = WORDS("}", add_special_tokens=False)["input_ids"]
    assert isinstance(json.loads(write(Grammar.json_object(WORDS), 1, bias=close)), dict)


@pytest.mark.parametrize("seed", range(4))
def test_patterns_and_choices(seed):
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", write(Grammar.regex(WORDS, "[a-c]{3}-[0-9]{2}"), seed))
    assert write(Grammar.choice(WORDS, ["yes", 'no "never"\n']), seed) in ("yes", 'no "never"\n')


def test_a_marker_is_its_one_token():
    text = "start: " + " ".join(Grammar.term(WORDS, part) for part in ("<tool_call>", "\n{}", "</tool_call>"))
    sampler = Sampler(SamplingOptions(grammar=Grammar.lark(WORDS, text)), STOP)
    ids = []
    while not sampler.finished:
        ids.append(sampler(torch.zeros(448)))
        if ids[-1] in STOP:
            break
    assert WORDS.decode([token for token in ids if token not in STOP]) == "<tool_call>\n{}</tool_call>"
    assert ids[0] == WORDS.convert_tokens_to_ids("<tool_call>")


def test_each_turn_has_its_own_matcher():
    grammar = Grammar.json_schema(WORDS, SCHEMA)
    assert write(grammar, 3) == write(grammar, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema(WORDS, {"type": "frob"}),
        lambda: Grammar.json_schema(WORDS, "{not json"),
        lambda: Grammar.regex(WORDS, "a("),
        lambda: Grammar.lark(WORDS, "begin: nothing"),
        lambda: Grammar.choice(WORDS, []),
    ],
)
def test_a_broken_grammar_is_refused_before_any_turn(make):
    with pytest.raises(ConfigError, match=r"schema|grammar"):
        make()


def test_a_turn_in_a_grammar_ends_by_itself(engines):
    session = chat_session(engines, "tools")
    text = session.ask([user("Where?")], grammar=Grammar.choice(WORDS, ["here", "there"]), max_tokens=20)
    assert text in ("here", "there")
    assert session.ask([user("And?")], max_tokens=3) is not None


def test_log_probabilities_are_the_models_own(engines, models):
    session = chat_session(engines, "tools")
    session.append([user("Hi")])
    turn = session.generate(max_tokens=5, logprobs=3, temperature=0.9, seed=1)
    text = "".join(turn)
    assert text == turn.text
    assert [choice.token for choice in turn.choices] == turn.ids
    logits = stock_logits(models("qwen2", **SHAPE), session.memory.ids.tolist()).log_softmax(-1)
    first = len(session) - len(turn.ids)
    for place, choice in enumerate(turn.choices, first):
        assert choice.logprob == pytest.approx(float(logits[place, choice.token]), abs=1e-3)
        values, ids = logits[place].topk(3)
        assert [token for token, _ in choice.top] == ids.tolist()
        assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_a_temperature_next_to_nothing_is_none():
    logits = torch.tensor([0.1, 3.0, 2.999])
    for temperature in (0.0, 1e-300, 1e-8):
        assert Sampler(SamplingOptions(temperature=temperature, seed=0))(logits) == 1
