"""RULER's task families (arXiv 2404.06654), generated here: contexts of a given length with questions and answers.

Wording follows RULER's templates. Its essays, word lists and question-answer sets are not shipped: prose is the
language reference that comes with Python, words are made up of syllables, two-hop questions are about invented people.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from tenure.errors import ConfigError

FAMILIES = ("single", "multikey", "multivalue", "multiquery", "variables", "common", "frequent", "twohop")
VERSIONS: dict[str, int] = {**dict.fromkeys((*FAMILIES, "continuation"), 1), "twohop": 2}
"""Of each family's tasks; results of two versions are never put together."""
PROSE = ("multikey", "multivalue", "multiquery", "twohop", "continuation")
"""Families whose filler is :func:`prose`, which is another text under another Python."""

_SHORT = 1000
"""Tokens of a context below which its prose comes in sentences, not in paragraphs."""

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


@dataclass(frozen=True)
class Prompt:
    """A context and what is asked about it.

    Args:
        family: one of ``FAMILIES``, or ``continuation``.
        context: text to be compressed.
        question: asked after it.
        prefix: how the answer begins.
        answers: texts that must be in it.
        most: longest answer in tokens.
        any_of: one of the answers is enough.
    """

    family: str
    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    most: int
    any_of: bool = False

    def score(self, reply: str) -> float:
        """Share of the answers that a reply has, as RULER counts it."""
        found = [answer.lower() in reply.lower() for answer in self.answers]
        return float(any(found)) if self.any_of else sum(found) / len(found)


@functools.cache
def prose() -> tuple[str, ...]:
    """Paragraphs of real English prose, in order: the language reference that every Python has."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = re.sub(r"\s+", " ", paragraph).strip()
            if len(text) > 80 and re.match(r"[A-Z]", text) and text.endswith(".") and "|" not in text:
                found.append(text.replace("*", ""))
    return tuple(found)


@functools.cache
def prose_key() -> str:
    """Hash of :func:`prose`: two Pythons with the same make the same prompts."""
    return blake2b("\n".join(prose()).encode(), digest_size=16).hexdigest()


@functools.cache
def sentences() -> tuple[str, ...]:
    """:func:`prose` cut finer: a paragraph may be as long as all of a short context."""
    return tuple(piece for paragraph in prose() for piece in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph))


def made_of(family: str) -> dict[str, Any]:
    """What a family's prompts depend on beside seed and length: ``task_version``, and ``prose`` where it has some."""
    return {"task_version": VERSIONS[family], **({"prose": prose_key()} if family in PROSE else {})}


def word(rng: random.Random, syllables: int = 3) -> str:
    """An invented word."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(syllables))


def words(rng: random.Random, count: int) -> list[str]:
    """Invented words, all different."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[word(rng)] = None
    return list(found)


def make(family: str, seed: int, tokens: int, count: Callable[[str], int]) -> Prompt:
    """A prompt whose context has at most ``tokens`` tokens and as near to it as its parts allow.

    Args:
        family: one of ``FAMILIES``.
        seed: of all that is random.
        tokens: length of the context.
        count: tokens of a text.

    Raises:
        ConfigError: what is hidden in it is longer.
    """
    maker = _MAKERS[family]
    filler = sentences() if tokens < _SHORT else prose()

    def build(size: int) -> Prompt:
        return maker(random.Random(f"{family} {seed}"), size, filler)

    low, high = 1, 2
    while count(build(high).context) <= tokens:
        low, high = high, high * 2
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if count(build(middle).context) <= tokens else (low, middle)
    made = build(low)
    if (least := count(made.context)) > tokens:
        raise ConfigError(
            f"{family!r} needs a context of {least:,} tokens, not {tokens:,}",
            option="tokens",
            way_out="Give more",
        )
    return made


def _spread(rng: random.Random, filler: list[str], needles: list[str]) -> str:
    """Needles at random depths of the filler, in their order."""
    places = sorted(rng.sample(range(len(filler) + 1), min(len(needles), len(filler) + 1)))
    places += [len(filler)] * (len(needles) - len(places))
    parts = list(filler)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        parts.insert(place, needle)
    return " ".join(parts)


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


_INTRO = "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers afterwards.\n"  # noqa: E501


def _ask(keys: list[str]) -> tuple[str, str]:
    named = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
    return (
        f"\nWhat are all the special magic numbers for {named} mentioned in the provided text?",
        f"The special magic numbers for {named} mentioned in the provided text are",
    )


def _some(rng: random.Random, filler: Sequence[str], size: int) -> list[str]:
    """So many pieces in a row, from anywhere."""
    start = rng.randrange(len(filler))
    return [filler[(start + number) % len(filler)] for number in range(size)]


def _single(rng: random.Random, size: int, _: Sequence[str]) -> Prompt:
    key, value = "-".join(words(rng, 2)), _number(rng)
    context = _INTRO + _spread(rng, [_NOISE] * size, [_needle(key, value)])
    question, prefix = _ask([key])
    question = question.replace("What are all the", "What is the").replace("numbers", "number")
    prefix = prefix.replace("numbers", "number").replace(" are", " is")
    return Prompt("single", context, question, prefix, (value,), 32)


def _multikey(rng: random.Random, size: int, filler: Sequence[str]) -> Prompt:
    keys = ["-".join(words(rng, 2)) for _ in range(4)]
    values = [_number(rng) for _ in keys]
    needles = [_needle(*pair) for pair in zip(keys, values, strict=True)]
    asked = rng.randrange(4)
    context = _INTRO + _spread(rng, _some(rng, filler, size), needles)
    question, prefix = _ask([keys[asked]])
    question = question.replace("What are all the", "What is the").replace("numbers", "number")
    prefix = prefix.replace("numbers", "number").replace(" are", " is")
    return Prompt("multikey", context, question, prefix, (values[asked],), 32)


def _multivalue(rng: random.Random, size: int, filler: Sequence[str]) -> Prompt:
    key = "-".join(words(rng, 2))
    values = [_number(rng) for _ in range(4)]
    context = _INTRO + _spread(rng, _some(rng, filler, size), [_needle(key, value) for value in values])
    return Prompt("multivalue", context, *_ask([key]), tuple(values), 96)


def _multiquery(rng: random.Random, size: int, filler: Sequence[str]) -> Prompt:
    keys = ["-".join(words(rng, 2)) for _ in range(4)]
    values = [_number(rng) for _ in keys]
    needles = [_needle(*pair) for pair in zip(keys, values, strict=True)]
    context = _INTRO + _spread(rng, _some(rng, filler, size), needles)
    return Prompt("multiquery", context, *_ask(keys), tuple(values), 96)


def _variables(rng: random.Random, size: int, _: Sequence[str]) -> Prompt:
    names = [name.upper()[:5] for name in words(rng, 40)]
    names = list(dict.fromkeys(names))[:10]
    value = str(rng.randint(10_000, 99_999))
    chain, other = names[:5], names[5:]
    lines = [f"VAR {chain[0]} = {value}"] + [f"VAR {b} = VAR {a}" for a, b in pairwise(chain)]
    decoy = [f"VAR {other[0]} = {rng.randint(10_000, 99_999)}"]
    decoy += [f"VAR {b} = VAR {a}" for a, b in pairwise(other)]
    mixed: list[str] = []
    left, right = list(lines), list(decoy)
    while left or right:
        side = left if left and (not right or rng.random() < 0.5) else right
        mixed.append(side.pop(0) + ".")
    context = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        + _spread(rng, [_NOISE] * size, mixed)
    )
    question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    prefix = f"Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are:"  # noqa: E501
    return Prompt("variables", context, question, prefix, tuple(chain), 48)


def _common(rng: random.Random, size: int, _: Sequence[str]) -> Prompt:
    """Ten words come about ten times as often as all others: up to thirty times, in short lists less."""
    every = words(rng, 10 + max(1, size * 4))
    common, rare = every[:10], every[10:]
    listed = common * 30 + rare * 3
    rng.shuffle(listed)
    body = " ".join(f"{number + 1}. {one}" for number, one in enumerate(listed[: 30 + size * 12]))
    context = "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n"  # noqa: E501
    question = "\nQuestion: What are the 10 most common words in the above list?"
    return Prompt(
        "common",
        context + body,
        question,
        "Answer: The top 10 words that appear most often in the list are:",
        tuple(common),
        96,
    )


def _frequent(rng: random.Random, size: int, _: Sequence[str]) -> Prompt:
    """Coded words whose frequencies fall as those of a zeta distribution with exponent 2."""
    vocabulary = words(rng, 60)
    weights = [1 / (rank + 1) ** 2 for rank in range(len(vocabulary))]
    body = " ".join(rng.choices([*vocabulary, "..."], [*weights, 0.3], k=size * 10))
    top = sorted(set(body.split()) - {"..."}, key=lambda one: (-body.split().count(one), one))[:3]
    context = "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words.\n"  # noqa: E501
    question = "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?"  # noqa: E501
    prefix = "Answer: According to the coded text above, the three most frequently appeared words are:"
    return Prompt("frequent", context + body, question, prefix, tuple(top), 48)


def _twohop(rng: random.Random, size: int, filler: Sequence[str]) -> Prompt:
    """Where the company of somebody has its seat, among documents about other people and companies.

    The answer begins with the first hop, so that a model may write it out: those of 0.5 and 1.5 billion parameters
    name the company where they are asked for the town at once, whatever is left of the context.
    """
    people = [
        one.capitalize() + " " + two.capitalize()
        for one, two in zip(words(rng, 12), words(rng, 12), strict=True)
    ]
    firms, towns = [one.capitalize() for one in words(rng, 12)], [one.capitalize() for one in words(rng, 12)]
    facts = [f"{person} works for the company {firm}." for person, firm in zip(people, firms, strict=True)]
    facts += [
        f"The company {firm} has its seat in the town of {town}."
        for firm, town in zip(firms, towns, strict=True)
    ]
    order = list(range(12))
    rng.shuffle(order)
    needles = [facts[number] for number in order] + [facts[12 + number] for number in rng.sample(order, 12)]
    asked = rng.randrange(12)
    context = "Answer the question based on the given documents.\n\nThe following are given documents.\n\n"
    context += _spread(rng, _some(rng, filler, size), needles)
    question = f"\nQuestion: In which town is the seat of the company that {people[asked]} works for?"
    prefix = f"Answer: {people[asked]} works for the company"
    return Prompt("twohop", context, question, prefix, (towns[asked],), 32, any_of=True)


_MAKERS: dict[str, Callable[[random.Random, int, Sequence[str]], Prompt]] = {
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "variables": _variables,
    "common": _common,
    "frequent": _frequent,
    "twohop": _twohop,
}


def encode(tokenizer: Any, prompt: Prompt) -> tuple[list[int], list[int]]:
    """Token ids of a chat up to the context's end, and of what follows up to the start of the answer."""
    chat = [{"role": "user", "content": prompt.context + "\0" + prompt.question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + prompt.prefix
    before, after = text.split("\0")
    return (
        tokenizer.encode(before, add_special_tokens=False),
        tokenizer.encode(after, add_special_tokens=False),
    )
