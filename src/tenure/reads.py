"""What the current step reads must fit the budget: checked before a message that begins a step is taken in."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.errors import BudgetError
from tenure.memory import Memory
from tenure.transcript import Message


def check_reads(memory: Memory, messages: Sequence[Message]) -> None:
    """Refuse a step whose reads the budget cannot hold at once.

    Only the last step that the messages begin is looked at: the others are over before anything is computed.

    Args:
        memory: of the session.
        messages: about to be read.

    Raises:
        BudgetError: with the numbers; nothing has changed.
    """
    begun = [(message.step, message.reads) for message in messages if message.step is not None]
    budget = memory.config.budget
    if not begun or budget is None or not memory.policy.follows_plan:
        return
    step, reads = begun[-1]
    if step in memory.plan:
        reads = (*memory.plan[step].reads, *reads)
    table, sinks = memory.ledger.spans, memory.config.sinks
    known = [table.get(name) for name in dict.fromkeys(reads) if isinstance(name, str) and name in table]
    tokens = sum(len(span) for span in known)
    pinned = sum(len(span) for span in table if span.pin == "hard" and span.id not in reads)
    need = tokens + pinned + sinks + 1
    if known and need > budget:
        raise BudgetError(
            f"step {step!r} reads {tokens} tokens of {len(known)} spans; with {pinned} pinned tokens, {sinks} sinks and "
            f"1 free slot it needs {need}, the budget is {budget}",
            option="reads",
            way_out="Let the step read less, or give a larger budget",
        )
