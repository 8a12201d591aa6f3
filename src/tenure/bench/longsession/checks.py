"""The hidden unit tests of the three probes, five each."""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from decimal import Decimal

from tenure.bench.longsession.facts import Facts, solution

CHECKS = 5
"""Hidden tests a probe."""


@dataclass(frozen=True, slots=True)
class Checks:
    """What an answer's code is held against.

    Args:
        before: code that the answer may rely on.
        tests: statements, each run on its own behind the answer's code; one that raises has failed.
    """

    before: str
    tests: tuple[str, ...]


_IMPORTS = "import decimal\nfrom decimal import *\n"


def fee_of(facts: Facts, amount: Decimal) -> Decimal:
    """The fee rule in our own words, against which answers are compared."""
    fee = Decimal(facts.fixed_value) + Decimal(facts.share_value) * amount
    return fee.quantize(Decimal(facts.quantum), rounding=getattr(decimal, facts.rounding))


def telling_amounts(facts: Facts) -> list[Decimal]:
    """Amounts that tell rules apart: zero, one that needs no rounding, below half, above half, and a tie.

    Where no amount hits a kind exactly, the nearest one to it is taken.
    """
    fixed, share, quantum = Decimal(facts.fixed_value), Decimal(facts.share_value), Decimal(facts.quantum)
    wanted = {"exact": Decimal(0), "below": Decimal("0.3"), "above": Decimal("0.7"), "tie": Decimal("0.5")}
    best: dict[str, tuple[Decimal, bool, Decimal]] = {}
    for units in range(1, 5_000):
        amount = Decimal(units) * Decimal("0.05")
        fee = fixed + share * amount
        rest = fee / quantum % 1
        # A tie is to show that the mode is not the one that `quantize` takes by itself.
        even = fee.quantize(quantum) == fee_of(facts, amount)
        for kind, target in wanted.items():
            off = (abs(rest - target), even, amount)
            if kind not in best or off < best[kind]:
                best[kind] = off
    return [Decimal(0), *(best[kind][2] for kind in wanted)]


def fee_checks(facts: Facts) -> Checks:
    """``fee_for``: the answer brings constants and function."""
    tests = (
        f'assert fee_for(Decimal("{amount}")) == Decimal("{fee_of(facts, amount)}")'
        for amount in telling_amounts(facts)
    )
    return Checks(_IMPORTS, tuple(tests))


def settle_checks(facts: Facts) -> Checks:
    """``settle``: the project's other parts exist; the answer has to use their names, values and codes."""
    f = facts
    amount = Decimal("731.45")
    make = f'record = {f.record}("r-1", Decimal("{amount}"))\n'
    refuse = (
        f'record = {f.record}("r-2", Decimal("{amount}"), "{f.settled}")\n'
        "caught = None\n"
        "try:\n    settle(record)\nexcept Exception as error:\n    caught = error\n"
    )
    return Checks(
        _IMPORTS + solution(f)["around_settle"],
        (
            make + f'assert settle(record) == Decimal("{fee_of(f, amount)}")',
            make + f'settle(record)\nassert record.{f.mark} == "{f.settled}"',
            refuse + f'assert type(caught).__name__ == "{f.error}"',
            refuse + f'assert "{f.code}" in str(caught)',
            refuse + f'assert caught is not None and record.{f.mark} == "{f.refused}"',
        ),
    )


def module_checks(facts: Facts) -> Checks:
    """The module: everything is the answer's own."""
    f = facts
    amount = telling_amounts(f)[-1]
    make = f'record = {f.record}("r-1", Decimal("{amount}"))\n'
    return Checks(
        _IMPORTS,
        (
            make
            + f'assert (record.{f.reference}, record.{f.amount}) == ("r-1", Decimal("{amount}"))\n'
            + f'assert record.{f.mark} == "{f.initial}"',
            f'assert ({f.fixed}, {f.share}) == (Decimal("{f.fixed_value}"), Decimal("{f.share_value}"))',
            f'assert fee_for(Decimal("{amount}")) == Decimal("{fee_of(f, amount)}")',
            make
            + f'assert settle(record) == Decimal("{fee_of(f, amount)}")\nassert record.{f.mark} == "{f.settled}"',
            f'record = {f.record}("r-2", Decimal("{amount}"), "{f.settled}")\n'
            "caught = None\n"
            "try:\n    settle(record)\nexcept Exception as error:\n    caught = error\n"
            f'assert type(caught).__name__ == "{f.error}" and "{f.code}" in str(caught)',
        ),
    )
