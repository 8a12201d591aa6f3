"""Hidden tests: right code passes all of them, and no fact can be wrong without one failing."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from fractions import Fraction

import pytest

from tenure.bench.longsession.checks import CHECKS, fee_of, telling_amounts
from tenure.bench.longsession.facts import Facts, definitions, solution
from tenure.bench.longsession.sandbox import run_checks
from tenure.bench.longsession.task import probes


def draw(seed: int) -> Facts:
    return Facts.draw(random.Random(seed))


@pytest.mark.parametrize("seed", range(3))
def test_the_right_code_passes(seed):
    facts = draw(seed)
    for probe in probes(facts):
        assert run_checks(f"```python\n{solution(facts)[probe.name]}```", probe.checks) == [True] * CHECKS


@pytest.mark.parametrize("probe", probes(draw(0)), ids=lambda probe: probe.name)
def test_a_wrong_fact_fails(probe):
    facts = draw(0)
    guesses = {"rounding": "ROUND_HALF_EVEN", "quantum": "0.01", "fixed_value": "1.00", "share_value": "0.05"}
    answer = solution(facts)[probe.name]
    # The names of fee_for's constants are its own affair; a value that is kept under another name is right.
    for name in set(probe.facts) - ({"fixed", "share"} if probe.name == "fee_for" else set()):
        wrong = answer.replace(getattr(facts, name), guesses.get(name, "Other"))
        passed = run_checks(f"```python\n{wrong}```", probe.checks)
        if probe.name == "module" and name in ("refused", "rounding"):
            continue  # asked for by the other two probes
        assert sum(passed) < CHECKS, name


def rounded(value: Fraction, quantum: Fraction, mode: str) -> Fraction:
    """Rounding of a positive value, from the definition of each mode."""
    steps = value / quantum
    low, rest = math.floor(steps), steps - math.floor(steps)
    up = {
        "ROUND_UP": rest > 0,
        "ROUND_CEILING": rest > 0,
        "ROUND_DOWN": False,
        "ROUND_FLOOR": False,
        "ROUND_HALF_UP": rest >= Fraction(1, 2),
        "ROUND_HALF_DOWN": rest > Fraction(1, 2),
    }[mode]
    return (low + up) * quantum


@pytest.mark.parametrize("seed", range(12))
def test_fees(seed):
    facts = draw(seed)
    for amount in telling_amounts(facts):
        exact = Fraction(facts.fixed_value) + Fraction(facts.share_value) * Fraction(amount)
        assert Fraction(fee_of(facts, amount)) == rounded(exact, Fraction(facts.quantum), facts.rounding)


@pytest.mark.parametrize("seed", range(6))
def test_amounts_tell_the_mode_from_the_usual_one(seed):
    facts = draw(seed)
    plain = [
        (Decimal(facts.fixed_value) + Decimal(facts.share_value) * amount).quantize(Decimal(facts.quantum))
        for amount in telling_amounts(facts)
    ]
    assert plain != [fee_of(facts, amount) for amount in telling_amounts(facts)]


def test_every_fact_is_defined_and_none_is_given_away():
    facts = draw(5)
    told = "\n".join(definitions(facts).values())
    asked = "\n".join(probe.question for probe in probes(facts))
    for name, value in facts.to_json().items():
        assert value in told, name
        assert value not in asked, name
