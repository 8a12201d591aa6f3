"""What the current step reads must fit the budget: checked before a message that begins a step is taken in."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tenure.errors import BudgetError
from tenure.pins import stays
from tenure.references import contents, finder, reopen
from tenure.spans import Span
from tenure.steps import Read, Step

if TYPE_CHECKING:
    from tenure.frozen import Frozen
    from tenure.memory import Memory
    from tenure.pieces import Piece
    from tenure.sessionbase import SessionBase


def room(memory: Memory) -> int | None:
    """Slots that the reads of one step may take now, as the policy counts them; None without a budget."""
    budget = memory.row_budget
    return None if budget is None else memory.policy.room(budget, stays(memory))


def spare(memory: Memory) -> int | None:
    """Slots that the turn under way may read on planners' word, as the policy counts them; None without a budget."""
    return None if memory.row_budget is None else memory.policy.spare(memory.view())


def needed(memory: Memory) -> int:
    """Slots that compressed tokens may not take: :func:`~tenure.pins.stays`, and what the current step reads."""
    reads = memory.plan.current_reads if memory.policy.follows_plan else ()
    spans = [memory.ledger.spans.get(name) for name in set(reads) if name in memory.ledger.spans]
    return stays(memory) + sum(len(span) for span in spans if span.pin != "hard")


def check_reads(
    session: SessionBase, pieces: Sequence[Piece], upto: int | None = None, yielding: Collection[Span] = ()
) -> None:
    """Refuse a step whose reads the budget cannot hold at once. Planners' guesses among them give way first.

    Only the last step that the pieces begin is looked at: the others are over before anything is computed. A reference
    counts if the session can tell its span by then; a span that is compressed and can come back is no longer compressed
    when it has.

    Args:
        session: whose memory and plan.
        pieces: about to be read.
        upto: tokens of the session that stay before them; None for all, with those that wait.
        yielding: spans whose hard pins are about to give way.

    Raises:
        BudgetError: with the numbers; nothing has changed.
    """
    memory = session.memory
    step = next((one.step for one in reversed(pieces) if one.step is not None), None)
    if step is None or memory.config.budget is None or not memory.policy.follows_plan:
        return
    plan = session.plan.copy()
    if upto is not None:
        reopen(plan, memory, upto)
    if step not in plan:
        plan.add(Step(step))
    plan.add_reads(step, (read for one in pieces if one.step == step for read in one.reads))
    spans = memory.ledger.spans
    only = None  # references may fit any span
    if not plan.pending:
        only = {*plan[step].spans, *(span.id for span in spans.pinned)}
    held = [
        (span, ids if upto is None else ids[: upto - span.start])
        for span, ids in contents(memory, only)
        if upto is None or (span.start < upto and span.id in spans)
    ]
    coming = _behind(held, pieces)
    for known in (held, coming):  # in the order in which the session settles references
        plan.resolve(finder(known, session.searchable))
    frozen = memory.frozen if upto is None else memory.frozen.before(upto)
    yields = {span.id for span in yielding}
    gone: list[Read] = []
    while (short := _short(memory, plan[step], coming, frozen, yields)) and (left := plan.guessed.of(step)):
        gone.append(left[-1])
        plan.withdraw([(step, left[-1])])
    if short:
        raise short
    find = finder(coming, session.searchable)
    for read in session.plan.guessed.of(step) if gone else ():
        if read in gone or (not isinstance(read, str) and set(gone) & set(find(read))):
            session.plan.withdraw([(step, read)])


def _short(
    memory: Memory,
    step: Step,
    coming: Sequence[tuple[Span, array[int]]],
    frozen: Frozen,
    yielding: Collection[str],
) -> BudgetError | None:
    """What is wrong with a step's reads, given all spans that there will be."""
    reads = set(step.spans)
    known = [(span, ids) for span, ids in coming if span.id in reads]
    for span, _ in known if memory.archive is not None else ():
        frozen = frozen.without(span.start, span.stop)
    budget, sinks = (memory.config.budget or 0) - frozen.slots, memory.config.sinks
    tokens = sum(len(ids) for _, ids in known)
    pinned = sum(
        len(ids)
        for span, ids in coming
        if span.pin == "hard" and span.id not in reads and span.id not in yielding
    )
    most = memory.policy.room(budget, pinned + sinks)
    if not known or tokens <= most:
        return None
    newest = budget - pinned - sinks - most
    return BudgetError(
        f"step {step.id!r} reads {tokens} tokens of {len(known)} spans; with {pinned} pinned tokens, {sinks} sinks and "
        f"{newest} slots for the newest tokens it needs {budget - most + tokens}, the budget is {budget}"
        + (f" besides {frozen.slots} compressed" if frozen.slots else ""),
        option="reads",
        way_out="Let the step read less, pin less, or give a larger budget",
    )


def _behind(
    held: Sequence[tuple[Span, array[int]]], pieces: Sequence[Piece]
) -> list[tuple[Span, array[int]]]:
    """Spans and their ids as they will be with the pieces read; those without an id get one that no span can have."""
    found = list(held)
    for number, piece in enumerate(pieces):
        ids = array("I", piece.ids)
        if piece.kind == "closing" and found and found[-1][0].pin != "hard":
            span, before = found[-1]
            found[-1] = (span, before + ids)
            continue
        message = piece.kind in ("message", "prompt")
        name = piece.span or f"\0{number}"
        found.append((Span(name, 0, 0, piece.region, piece.role, piece.pin, message=message), ids))
    return found
