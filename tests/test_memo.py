"""Kept encodings: the same ids and places as without, whatever the text and the order of asking."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.encode import Encoder
from tenure.memo import Memo, memo_of
from tests import templates
from tests.chats import tokenizer

PARTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "<|im_",
    "user\n",
    " fox",
    "é",
    "e\u0301",
    "👨‍👩‍👧",
    "\n",
    "  ",
    "<think>",
    "a",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), min_size=1, max_size=4))
def test_parts_encode_as_the_whole(texts):
    words = tokenizer("tools")
    encoder = Encoder(words)
    assert encoder._memo is not None
    for text in [*texts, "".join(texts)]:
        plain = words(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = encoder.encode(text)
        assert ids == plain["input_ids"]
        assert ends == [end for _, end in plain["offset_mapping"]]


def test_what_is_kept_is_asked_once_and_bounded():
    asked = []

    def call(texts):
        asked.extend(texts)
        return [([1] * len(text), list(range(1, len(text) + 1))) for text in texts]

    memo, marker = Memo(most=40), re.compile("#")
    assert memo.encode("ab#cd#ab", marker, call) == ([1] * 8, list(range(1, 9)))
    assert asked == ["ab", "#cd", "#ab"]
    memo.encode("ab#cd#ab#new", marker, call)
    assert asked[3:] == ["#new"]
    for number in range(30):
        memo.encode(f"#{number:04d}", marker, call)
    assert sum(map(len, memo._known)) <= 40
    memo.encode("x" * 100, marker, call)
    assert "x" * 100 not in memo._known, "one long text does not push all others out"


def test_other_tokenizers_keep_nothing():
    words = templates.tokenizer("tools")
    backend = words.backend_tokenizer
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    assert memo_of(words) is None
