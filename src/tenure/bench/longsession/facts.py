"""The facts of a session: what its three definitions fix, drawn from a seed so that no model can know them."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

# Words for names. What is drawn is the combination; the values below are new in each session.
_OWNERS = (
    *("Kestrel", "Marlin", "Badger", "Heron", "Lynx", "Osprey", "Stoat", "Wombat", "Ibis", "Tapir", "Gannet"),
    *("Civet", "Plover", "Narwhal", "Bittern", "Ocelot", "Pangolin", "Quokka", "Shrike", "Vole", "Weasel"),
)
_NOUNS = ("Parcel", "Lease", "Docket", "Voucher", "Claim", "Consignment", "Booking", "Permit", "Charter")
_REFS = ("waybill", "folio", "ticket_no", "serial_tag", "docket_id", "barcode", "slip_no")
_AMOUNTS = ("gross_sum", "net_total", "claim_value", "due_sum", "levy_base", "face_value", "raw_total")
_MARKS = ("phase", "standing", "condition_tag", "stage_mark", "ledger_mark", "progress_tag", "desk_state")
_FIXED = ("TARIFF", "SURCHARGE", "TOLL", "RETAINER", "STIPEND", "UPLIFT", "DOCKING")
_SHARE = ("RATIO", "LEVY", "MARGIN", "FRACTION", "QUOTIENT", "SLICE", "TITHE")
_ERRORS = ("Refusal", "Deadlock", "Breach", "Standoff", "Mismatch", "Blockade", "Mutiny")
_STATES = (
    *("QUARANTINED", "DORMANT", "SHELVED", "LAPSED", "STRANDED", "DEFERRED", "MUZZLED", "ADRIFT", "BENCHED"),
    *("FERRIED", "GILDED", "TETHERED", "EMBERED", "HUSHED", "MOORED", "VAULTED"),
)
# The modes and quanta that come to mind first (half even, 0.01) are left out: they would be guessed.
_ROUNDINGS = ("ROUND_UP", "ROUND_DOWN", "ROUND_HALF_UP", "ROUND_HALF_DOWN", "ROUND_CEILING", "ROUND_FLOOR")
_QUANTA = ("0.1", "0.001", "0.0001")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the definitions say.

    Args:
        record: class of the records.
        reference: its first field, a text.
        amount: its second field, a Decimal.
        mark: its third field, the status.
        initial: status of a new record.
        settled: status of a settled one.
        refused: status of a refused one.
        fixed: name of the constant part of a fee.
        fixed_value: its value.
        share: name of the share of the amount.
        share_value: its value.
        rounding: name of a rounding mode of ``decimal``.
        quantum: what fees are rounded to.
        error: the exception.
        code: its error code.
    """

    record: str
    reference: str
    amount: str
    mark: str
    initial: str
    settled: str
    refused: str
    fixed: str
    fixed_value: str
    share: str
    share_value: str
    rounding: str
    quantum: str
    error: str
    code: str

    @classmethod
    def draw(cls, rng: random.Random) -> Facts:
        """New facts."""
        owners = rng.sample(_OWNERS, 4)
        initial, settled, refused = rng.sample(_STATES, 3)
        return cls(
            record=owners[0] + rng.choice(_NOUNS),
            reference=rng.choice(_REFS),
            amount=rng.choice(_AMOUNTS),
            mark=rng.choice(_MARKS),
            initial=initial,
            settled=settled,
            refused=refused,
            fixed=f"{owners[1].upper()}_{rng.choice(_FIXED)}",
            fixed_value=f"{rng.randint(1, 9)}.{rng.randint(0, 9)}{rng.randint(1, 9)}",
            share=f"{owners[2].upper()}_{rng.choice(_SHARE)}",
            share_value=f"0.0{rng.randint(10, 98)}{rng.randint(1, 9)}",
            rounding=rng.choice(_ROUNDINGS),
            quantum=rng.choice(_QUANTA),
            error=owners[3] + rng.choice(_ERRORS),
            code=f"E{rng.randint(1013, 9989)}",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


RECORD = ("record", "reference", "amount", "mark", "initial", "settled", "refused")
FEES = ("fixed", "fixed_value", "share", "share_value", "rounding", "quantum")
ERRORS = ("error", "code")


def definitions(facts: Facts) -> dict[str, str]:
    """The text of each definition, by the id of its span.

    Rules are given as code, so that a small model that still has a definition can use it: the experiment asks what
    was kept, not how well the model programs.
    """
    f = facts
    keep = "Keep it in mind, it will be needed later."
    return {
        "def-record": (
            f"Definition 1 of 3, the records. {keep}\n```python\n{_record(f)}```\n"
            f'A new record has {f.mark} "{f.initial}", a settled one "{f.settled}", a refused one "{f.refused}".'
        ),
        "def-fees": (
            f"Definition 2 of 3, the fees. {keep}\n```python\n{_constants(f)}\n{_fee_for(f)}```\n"
            f"Fees are rounded with {f.rounding} to the quantum {f.quantum}."
        ),
        "def-errors": (
            f"Definition 3 of 3, the exception and settling. {keep}\n```python\n{_error(f)}\n{_settle(f)}```\n"
            f"The error code is {f.code}."
        ),
    }


def solution(facts: Facts) -> dict[str, str]:
    """Right answers by probe; hidden tests take missing parts from them, and the tests of the tests all of them."""
    f = facts
    head = "from decimal import *\n\n"
    fees = f"{_constants(f)}\n{_fee_for(f)}\n"
    return {
        "fee_for": head + fees,
        "settle": _settle(f),
        "around_settle": head + _record(f) + fees + _error(f),
        "module": f"{head}{_record(f)}\n{fees}{_error(f)}\n{_settle(f)}",
    }


def _record(f: Facts) -> str:
    return (
        f"class {f.record}:\n"
        f'    def __init__(self, {f.reference}, {f.amount}, {f.mark}="{f.initial}"):\n'
        + "".join(f"        self.{name} = {name}\n" for name in (f.reference, f.amount, f.mark))
    )


def _constants(f: Facts) -> str:
    return f'{f.fixed} = Decimal("{f.fixed_value}")\n{f.share} = Decimal("{f.share_value}")\n'


def _fee_for(f: Facts) -> str:
    return (
        "def fee_for(amount):\n"
        f"    fee = {f.fixed} + {f.share} * amount\n"
        f'    return fee.quantize(Decimal("{f.quantum}"), rounding={f.rounding})\n'
    )


def _error(f: Facts) -> str:
    return f"class {f.error}(Exception):\n    pass\n"


def _settle(f: Facts) -> str:
    return (
        "def settle(record):\n"
        f'    if record.{f.mark} != "{f.initial}":\n'
        f'        record.{f.mark} = "{f.refused}"\n'
        f'        raise {f.error}("{f.code}")\n'
        f'    record.{f.mark} = "{f.settled}"\n'
        f"    return fee_for(record.{f.amount})\n"
    )
