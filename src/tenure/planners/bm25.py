"""BM25 over an inverted index that grows and shrinks by one document at a time.

Own code, because the kept libraries (bm25s, rank-bm25) build their tables from a complete corpus: a session adds a
few spans a turn, takes some back and forks. The tests hold the scores against bm25s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable


class BM25:
    """Lucene's form of BM25 (Robertson and Zaragoza 2009; Kamphuis et al. 2020, "Lucene (accurate)").

    ``score = sum over query terms of idf * tf / (tf + k1 * (1 - b + b * length / mean))`` with
    ``idf = ln(1 + (N - df + 0.5) / (df + 0.5))``; a term counts once however often the query has it.

    Args:
        k1: how fast repetitions stop to count.
        b: how much long documents are held against themselves.
    """

    def __init__(self, *, k1: float = 1.2, b: float = 0.75) -> None:
        self.k1, self.b = k1, b
        self._postings: dict[Hashable, dict[str, int]] = {}
        self._documents: dict[str, tuple[frozenset[Hashable], int]] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, name: object) -> bool:
        return name in self._documents

    def add(self, name: str, terms: Iterable[Hashable]) -> None:
        """Enter a document; an older one of this name goes."""
        self.remove(name)
        counts = Counter(terms)
        for term, count in counts.items():
            self._postings.setdefault(term, {})[name] = count
        self._documents[name] = (frozenset(counts), counts.total())
        self._total += counts.total()

    def remove(self, name: str) -> None:
        """Take a document out; nothing happens without one of this name."""
        terms, length = self._documents.pop(name, (frozenset(), 0))
        self._total -= length
        for term in terms:
            del self._postings[term][name]
            if not self._postings[term]:
                del self._postings[term]

    def idf(self, term: Hashable) -> float:
        """Weight of a term; that of a term of no document is the largest."""
        found = len(self._postings.get(term, ()))
        return math.log(1 + (len(self._documents) - found + 0.5) / (found + 0.5))

    def scores(self, query: Iterable[Hashable]) -> dict[str, float]:
        """The score of every document that has a term of the query."""
        if not self._documents:
            return {}
        mean = self._total / len(self._documents)
        scores: dict[str, float] = {}
        for term in dict.fromkeys(query):
            idf = self.idf(term)
            for name, count in self._postings.get(term, {}).items():
                length = self._documents[name][1]
                weight = count / (count + self.k1 * (1 - self.b + self.b * length / mean))
                scores[name] = scores.get(name, 0.0) + idf * weight
        return scores

    def shared(self, name: str, query: Iterable[Hashable], most: int = 5) -> list[Hashable]:
        """The terms of the query that weigh most in a document, heaviest first."""
        terms = self._documents[name][0]
        return sorted((term for term in dict.fromkeys(query) if term in terms), key=self.idf, reverse=True)[
            :most
        ]

    def fork(self) -> BM25:
        """An independent copy."""
        copy = BM25(k1=self.k1, b=self.b)
        copy._postings = {term: dict(found) for term, found in self._postings.items()}
        copy._documents, copy._total = dict(self._documents), self._total
        return copy
