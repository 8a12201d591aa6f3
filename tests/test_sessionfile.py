"""Session files: what is read, and where an error is said to be."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tenure.bench.demo_session import build_demo, facts_found
from tenure.errors import ConfigError, SessionFileError
from tenure.messages import Message
from tenure.regions import Region
from tenure.sessionfile import Probe, dumps, load, parse
from tenure.transcript import Transcript
from tests.templates import tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"


def lines(*objects: object) -> list[bytes]:
    return [line if isinstance(line, bytes) else json.dumps(line).encode() for line in objects]


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(
        b"\n".join(
            lines(
                {"session": {"title": "A day", "format": 1}},
                {"role": "system", "content": "Be brief.", "pin": True},
                b"",
                {
                    "role": "user",
                    "content": "MAX = 3",
                    "span": "max",
                    "region": "retrieved",
                    "step": "define",
                },
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "content": "ok", "step": "use", "reads": ["max"]},
                {"role": "tool", "content": "ok", "reads": ["max"]},
                {"probe": "What is MAX?", "expect": ["3"], "reads": ["max"], "max_tokens": 8},
                {"probe": "Sure?", "keep": True, "step": "last", "span": "sure"},
            )
        )
    )
    session = load(path)
    assert session.title == "A day"
    assert [type(entry) for entry in session] == [Message] * 5 + [Probe] * 2
    assert session.messages[1].region is Region.RETRIEVED
    assert session.messages[0].pin == "hard"
    assert session.messages[4].step == "use"
    assert session.probes[0] == Probe("What is MAX?", "probe-1", ("3",), ("max",), 8)
    assert session.probes[1].message == Message("user", "Sure?", step="last", span="sure")
    plan = session.plan()
    assert [(step.id, step.reads) for step in plan.steps] == [
        ("define", ()),
        ("use", ("max",)),
        ("probe-1", ("max",)),
        ("last", ()),
    ]
    assert parse(dumps(session.entries, session.title).encode().splitlines()).entries == session.entries


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"role": "user", "content": ', "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"role": "user", "content": "\xff"}', "not UTF-8: byte 30 of the line"),
        (b"[]", "expected an object, got list"),
        ({"role": "user", "content": "x", "spam": 1, "eggs": 2}, "unknown fields: eggs, spam"),
        ({"role": "robot", "content": "x"}, "unknown role 'robot'"),
        ({"role": "user"}, "content: no text"),
        ({"role": "user", "content": "\ud83d"}, "half a surrogate pair"),
        ({"role": "user", "content": "x", "region": "sytem"}, "Did you mean 'system'"),
        (
            {"role": "user", "content": "x", "step": "s", "reads": ["b", "a", "c"]},
            "no earlier line defines 'b', 'c'",
        ),
        ({"role": "user", "content": "x", "reads": ["a"]}, "reads: no step is under way"),
        ({"role": "user", "content": "x", "span": "a"}, "'a' is defined in line 1 already"),
        ({"session": {}}, "the session line must be the first"),
        ({"probe": "?", "expect": "x"}, "expect: expected a list, got str"),
        ({"probe": "?", "expect": [""]}, "expect: must be a list of non-empty texts"),
        ({"probe": " "}, "probe: no question"),
        ({"probe": 1}, "probe: expected a text, got int"),
        ({"probe": "?", "max_tokens": True}, "max_tokens: expected a whole number, got bool"),
        ({"probe": "?", "max_tokens": 0}, "max_tokens: must be 1 or more"),
        ({"probe": "?", "keep": 1}, "keep: expected true or false"),
        ({"probe": "?", "span": "p"}, "a probe that is not kept leaves no span"),
        ({"probe": "?", "content": "x"}, "unknown fields: content"),
        ({"probe": "?", "reads": ["zz"]}, "no earlier line defines 'zz'"),
    ],
)
def test_errors_name_the_line(line: object, words: str) -> None:
    with pytest.raises(SessionFileError) as caught:
        parse(lines({"role": "user", "content": "x", "span": "a"}, b"  ", line), "day.jsonl")
    assert caught.value.line == 3
    assert str(caught.value).startswith("day.jsonl:3: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"session": {"titel": "x"}}, "unknown fields: titel"),
        ({"session": {"format": 2}}, "format 2 is unknown"),
        ({"session": 1}, "expected an object, got int"),
        ({"session": {"title": 1}}, "title: expected a text"),
    ],
)
def test_the_session_line(head: object, words: str) -> None:
    with pytest.raises(SessionFileError, match=words):
        parse(lines(head, "x"))


@pytest.mark.parametrize("content", [b"", b"\n \n", b'{"session": {}}\n'])
def test_nothing_to_play(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(SessionFileError, match=r"s\.jsonl: no messages"):
        load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SessionFileError, match="cannot be read: No such file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(SessionFileError, match="cannot be read"):
        load(tmp_path)


def test_a_byte_order_mark_is_no_content() -> None:
    assert parse([b'\xef\xbb\xbf{"role": "user", "content": "x"}\r\n']).messages == [Message("user", "x")]


def test_a_large_file_is_read_in_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    line = json.dumps({"role": "tool", "content": "x" * 1_000_000}).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(20):
            file.write(line)
    start = time.process_time()
    assert len(load(path)) == 20
    assert time.process_time() - start < 5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_examples_hold_their_facts(path: Path) -> None:
    session = load(path)
    assert session.title
    spans = {message.span: message.content for message in session.messages if message.span}
    assert len(session.probes) >= 5
    session.plan().validate(spans)
    for probe in session.probes:
        assert probe.reads
        assert probe.expect
        text = "\n".join(spans[span] for span in probe.reads)
        for fact in probe.expect:
            assert fact in text, f"{fact!r} is not in what {probe.question!r} reads"


# The session of `make demo`


@pytest.mark.parametrize("tokens", [3000, 9000])
def test_the_demo_has_the_length_that_was_asked_for(tokens: int) -> None:
    tok = tokenizer("tools")
    session = build_demo(tok, tokens)
    length = sum(len(piece.ids) for piece in Transcript(tok).open(session.messages))
    assert tokens - 100 < length <= tokens
    again = build_demo(tok, tokens)
    assert again == session
    assert build_demo(tok, tokens, seed=1).probes != session.probes


def test_the_demo_asks_for_what_its_definitions_say() -> None:
    session = build_demo(tokenizer("tools"), 3000)
    spans = {message.span: message.content for message in session.messages if message.span}
    assert len(session.probes) == 12
    session.plan().validate(spans)
    filler = "\n".join(message.content for message in session.messages if message.span is None)
    for probe in session.probes:
        assert facts_found(spans[probe.reads[0]], probe.expect) == [True]
        assert facts_found(filler.replace(probe.expect[0], "", 1), probe.expect) == [False]
        assert facts_found(probe.question, probe.expect) == [False]


@pytest.mark.parametrize("tokens", [100, 100_000_000])
def test_a_demo_that_cannot_be(tokens: int) -> None:
    with pytest.raises(ConfigError, match="tokens: "):
        build_demo(tokenizer("tools"), tokens) if tokens < 1000 else _without_files(tokens)


def _without_files(tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenure.bench.demo_session.MODULES", ("bisect", "no_such_module"))
        build_demo(tokenizer("tools"), tokens)


@pytest.mark.parametrize(
    ("answer", "expect", "found"),
    [
        ("It is 37.", ["37"], [True]),
        ("It is 370 or E37 or 37B.", ["37"], [False]),
        ("MAX_ROWS=1,750; see stalelease", ["1750", "STALELEASE"], [True, True]),
        ("(2, 9, 44,\n 210)", ["2, 9, 44, 210"], [True]),
        ("the harborqueue", ["HarborQueue", "Harbor"], [True, False]),
        ("error fq-7731!", ["FQ-7731"], [True]),
        ("", ["x"], [False]),
    ],
)
def test_facts(answer: str, expect: list[str], found: list[bool]) -> None:
    assert facts_found(answer, expect) == found


def test_regions_of_a_file() -> None:
    head = {"session": {"regions": {"memo": {"half_life": 300}, "user": {"base": 1.0}}}}
    lines = [head, {"role": "user", "content": "a", "region": "memo"}]
    lines.append({"role": "user", "content": "b", "region": "memo:pin=soft"})
    file = parse([json.dumps(line).encode() for line in lines])
    assert file.regions == head["session"]["regions"]
    assert [message.region for message in file.messages] == ["memo", "memo:pin=soft"]
    for regions, words in (("x.json", "expected an object"), ({"memo": {"half_life": 0}}, "half_life 0")):
        with pytest.raises(SessionFileError, match=words):
            parse([json.dumps({"session": {"regions": regions}}).encode(), json.dumps(lines[1]).encode()])
    with pytest.raises(SessionFileError, match="unknown region 'memo'"):
        parse([json.dumps(lines[1]).encode()])
