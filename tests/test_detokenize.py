"""Pieces of text: joined they are the text, and none holds half a character or a stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tenure.detokenize import TextStream
from tenure.errors import ConfigError
from tests.templates import tokenizer

TOK = tokenizer("chatml")
EOS = TOK.eos_token_id

SAMPLES = [
    "👨‍👩‍👧‍👦 family",
    "안녕하세요 세계",
    "e\u0301 and n\u0303",
    " leading",
    "a\u2028b\u0085c",
    "x != y . z , w ?",
    "\ufffd real one",
    "tab\tnul\0end",
    "漢字かな",
]


def encode(text: str) -> list[int]:
    ids: list[int] = TOK(text, add_special_tokens=False)["input_ids"]
    return ids


def decode(ids: list[int]) -> str:
    return TOK.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(ids: list[int], **options: object) -> tuple[list[str], TextStream]:
    text = TextStream(TOK, **options)  # type: ignore[arg-type]
    return [*[text.push(token) for token in ids], text.finish()], text


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.sampled_from(SAMPLES), st.text()), st.integers(0, 12))
def test_joined_pieces_are_the_text_wherever_it_is_cut(text: str, cut: int) -> None:
    ids = encode(text)
    ids = ids[: max(0, len(ids) - cut)]
    pieces, found = stream(ids)
    assert "".join(pieces) == decode(ids)
    for piece in pieces[:-1]:
        if "\ufffd" in piece:
            assert "\ufffd" in decode(ids)
    assert found.kept_ids() == (ids, "")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(TOK) - 1), max_size=60))
@example(encode("é")[:1] * 40 + encode(" ok"))
def test_any_ids_at_all(ids: list[int]) -> None:
    pieces, _ = stream(ids)
    assert "".join(pieces) == decode(ids)


def test_half_a_character_waits() -> None:
    ids = encode("👍")
    assert len(ids) > 1
    pieces, _ = stream(ids)
    assert pieces == [*[""] * (len(ids) - 1), "👍", ""]
    pieces, _ = stream(ids[:-1])
    assert pieces == [*[""] * (len(ids) - 1), decode(ids[:-1])]


def test_special_tokens_are_silent() -> None:
    ids = [EOS, *encode("a"), EOS, *encode("b")]
    pieces, found = stream(ids)
    assert "".join(pieces) == "ab"
    assert found.kept_ids() == (ids, "")
    assert found.stopped is None


def test_a_stop_id_ends_the_text() -> None:
    ids = encode("hello")
    pieces, found = stream([*ids, EOS, *encode("more")], stop_ids=[EOS])
    assert "".join(pieces) == "hello"
    assert found.stopped == EOS
    assert found.kept_ids() == (ids, "")


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab 👍\n", max_size=30),
    st.lists(st.text(alphabet="ab 👍\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_the_first_stop_string_ends_the_text(text: str, stops: list[str]) -> None:
    ids = encode(text)
    pieces, found = stream(ids, stop=stops)
    given_out = "".join(pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert given_out == (text[: min(ends)[1]] if ends else text)
    assert (found.stopped is not None) == bool(ends)
    kept, rest = found.kept_ids()
    assert decode(kept) + rest == given_out
    assert kept == ids[: len(kept)]
    for more in range(len(kept) + 1, len(ids) + 1):  # the longest such start
        assert not given_out.startswith(decode(ids[:more])) or "\ufffd" in decode(ids[:more])


def test_what_may_become_a_stop_string_waits() -> None:
    pieces, found = stream(
        [token for word in ("a", "<", "|", "b", "<", "|", "e", "n", "d") for token in encode(word)],
        stop="<|end",
    )
    assert pieces == ["a", "", "", "<|b", "", "", "", "", "", ""]
    assert found.stopped == "<|end"
    kept, rest = found.kept_ids()
    assert (decode(kept), rest) == ("a<|b", "")


def test_a_stop_string_inside_a_token_leaves_text_to_encode() -> None:
    ids = encode("The value")
    word = encode(" value")
    assert len(word) == 1
    pieces, found = stream(ids, stop="alue")
    assert "".join(pieces) == "The v"
    kept, rest = found.kept_ids()
    assert (decode(kept), rest) == ("The", " v")


def test_nothing_comes_after_the_end() -> None:
    text = TextStream(TOK, stop=["b"])
    assert [text.push(token) for token in encode("a") + encode("b") + encode("c")] == ["a", "", ""]
    assert text.finish() == ""


@pytest.mark.parametrize("stop", [[""], [1], ""])
def test_stop_strings_are_texts(stop: object) -> None:
    with pytest.raises(ConfigError, match="stop: stop strings must be non-empty"):
        TextStream(TOK, stop=stop)  # type: ignore[arg-type]


def sentence_piece() -> PreTrainedTokenizerFast:
    words = {
        "<unk>": 0,
        "▁Hello": 1,
        "▁world": 2,
        "!": 3,
        **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)},
    }
    backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_spaces_of_sentence_piece_vocabularies() -> None:
    tok = sentence_piece()
    smile = [4 + byte for byte in "😀".encode()]
    text = TextStream(tok)
    pieces = [text.push(token) for token in [1, 2, *smile, 3, 1, *smile[:2]]] + [text.finish()]
    assert pieces[:6] == ["Hello", " world", "", "", "", "😀"]
    assert "".join(pieces).startswith("Hello world😀! Hello")
    assert "".join(pieces) == tok.decode([1, 2, *smile, 3, 1, *smile[:2]], clean_up_tokenization_spaces=False)


def test_a_text_goes_on_from_what_was_said_before() -> None:
    tok = sentence_piece()
    smile = [4 + byte for byte in "😀".encode()]
    text = TextStream(tok, before=[1, 2])
    assert text.push(2) + text.push(3) + text.finish() == " world!"
    assert TextStream(tok).push(2) == "world"
    text = TextStream(tok, before=[1, *smile[:2]])
    assert [text.push(token) for token in smile[2:]] == ["", "😀"]
    assert text.kept_ids() == (smile[2:], "")
    assert TextStream(tok, before=[1, *smile[:2]]).finish() == ""
    text = TextStream(tok, stop=["w"], before=[1, *smile[:3]])
    assert text.push(smile[3]) + text.push(2) == "😀 "
    assert text.kept_ids() == (smile[3:], " ")


def test_time_a_token_does_not_grow() -> None:
    broken = encode("é")[:1]
    times = []
    for size in (500, 4000):
        start = time.process_time()
        stream(broken * size)
        times.append((time.process_time() - start) / size)
    assert times[1] < 3 * times[0]
