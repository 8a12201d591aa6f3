"""BM25 held against a kept library that builds its table from the whole corpus."""

from __future__ import annotations

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.planners.bm25 import BM25
from tenure.planners.words import identifiers, words

TEXTS = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12), min_size=1, max_size=8)
QUERY = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)


def library(corpus: list[list[str]], query: list[str]) -> np.ndarray:
    model = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    model.index(corpus, show_progress=False)
    known = [term for term in query if any(term in text for text in corpus)]
    return model.get_scores(known) if known else np.zeros(len(corpus))


@settings(max_examples=60, deadline=None)
@given(TEXTS, QUERY, st.data())
def test_scores_after_adding_and_removing(texts, query, data):
    index = BM25()
    for number, text in enumerate(texts):
        index.add(str(number), text)
    left = dict(enumerate(texts))
    for number in data.draw(st.sets(st.sampled_from(sorted(left)), max_size=len(left) - 1)):
        index.remove(str(number))
        del left[number]
    twin = index.fork()
    twin.add("other", ["a", "a", "z"])
    again = data.draw(st.sampled_from(sorted(left)))
    index.add(str(again), texts[-1])
    left[again] = texts[-1]
    found = index.scores(query + query)
    wanted = library(list(left.values()), query)
    assert [found.get(str(number), 0.0) for number in left] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert "other" not in index
    twin.remove("other")
    assert len(twin) == len(left)


def test_shared_terms_are_the_rarest_first():
    index = BM25()
    for name, text in {"x": "the fee rule", "y": "the status", "z": "the rule of status"}.items():
        index.add(name, text.split())
    assert index.shared("x", ["the", "rule", "fee", "of"], 2) == ["fee", "rule"]
    index.remove("nothing")
    assert BM25().scores(["a"]) == {}


def test_words_and_identifiers():
    text = "class FeeRule: MAX_FEE = 0.25  # see HTTPServer2, x, 48"
    assert words(text)[:6] == ["class", "feerule", "fee", "rule", "max_fee", "max"]
    assert "0.25" in words(text)
    assert "httpserver2" in words(text)
    assert "http" in words(text)
    assert identifiers(text) == {"FeeRule", "MAX_FEE", "HTTPServer2", "0.25"}
    assert words("shards Class was MAX_ITEMS") == [
        "shards",
        "shard",
        "class",
        "was",
        "max_items",
        "max_item",
        "max",
        "items",
        "item",
    ]
    assert words("größe_über 상태값") == ["größe_über", "größe", "über", "상태값"]
