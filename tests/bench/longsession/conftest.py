"""A random model with a tokenizer, and a short session for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenure.bench.longsession.task import build
from tests.bench.longsession.tiny import SETTINGS
from tests.templates import tokenizer


@pytest.fixture(scope="module")
def engine(engines):
    fast = tokenizer("chatml")
    return engines("llama", vocab_size=len(fast), tokenizer=fast)


@pytest.fixture(scope="module")
def task(engine):
    made = build(engine.tokenizer, tokens=SETTINGS.tokens, seed=0)
    return replace(made, probes=tuple(replace(probe, max_tokens=8) for probe in made.probes))
