"""Planners at work: asked at each turn boundary; their edges enter the plan, and evicted spans are fetched.

A boundary is where messages are queued, and where a reply is requested without new ones. The edges of the turn under
way hang on an implicit step, ``turn-3`` for the third reply, which ends with the reply; a plan of the client's own
goes on beside it. What planners say can be wrong, late or too much: edges that the budget cannot hold are left out,
and a planner that fails is noted and passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from tenure.errors import TenureError
from tenure.planners.base import LATER, NOW, Context, Edge, Planner, Proposal
from tenure.planners.corpus import Corpus, document
from tenure.planners.keys import KeyArchive, looked_at
from tenure.reads import room, spare
from tenure.references import contents, settle
from tenure.steps import Step
from tenure.tiers.archive import SpanArchive
from tenure.tiers.spec import TierSpec
from tenure.tiers.stack import TierStack

if TYPE_CHECKING:
    from tenure.config import SessionConfig
    from tenure.engine import Engine
    from tenure.session import Session
    from tenure.spans import Span
    from tenure.tiers.record import Archive

_HOST = 4 << 30
"""Bytes of host memory for evicted spans where no tier is named, at most a quarter of what is free."""

_LOG = 512
"""Edges and problems that are remembered for explanations."""


class Planning:
    """The planners of one session.

    Args:
        planners: asked in this order.
    """

    def __init__(self, planners: Sequence[Planner]) -> None:
        self.planners = tuple(planners)
        self.edges: deque[Edge] = deque(maxlen=_LOG)
        """The latest edges that were entered into the plan, oldest first."""
        self.problems: deque[str] = deque(maxlen=_LOG)
        """The latest things that went wrong, oldest first."""
        self.counts: Counter[str] = Counter()
        self.corpus = Corpus()
        self.came: dict[str, int] = {}
        """The turn in which each span was seen."""
        self.turn = 1
        self.asked = False
        self.over = False
        """Whether the last message queued was the assistant's own, which ends a turn like a generated one."""
        self.latest: set[str] = set()
        self.now: dict[str, list[Edge]] = {}
        """Edges of the turn under way, by planner."""

    def archive(self, engine: Engine, config: SessionConfig, archive: Archive | None) -> Archive | None:
        """The archive that the planners need: the session's own, or host memory where no tier is named."""
        needed = any(planner.needs_archive for planner in self.planners) and config.budget is not None
        if archive is None and needed:
            most = min(_HOST, psutil.virtual_memory().available // 4)
            host = TierSpec(kind="host", capacity=most)
            archive = SpanArchive(TierStack([host], engine.fingerprint.digest))
        if archive is not None and any(planner.needs_keys for planner in self.planners):
            archive = KeyArchive(archive, looked_at(engine.layout.judges))
        return archive

    # -- boundaries ------------------------------------------------------------------------------

    def queued(self, session: Session, spans: Sequence[Span], *, reply: bool) -> None:
        """Messages wait to be computed.

        Args:
            session: theirs.
            spans: of the messages.
            reply: whether an answer is requested behind them.
        """
        if spans:
            if self.over:
                self.ended(session)
            self.over = spans[-1].role == "assistant" and not reply
            self.latest = {span.id for span in spans}
            self.asked = self.asked or reply
            self._boundary(session, self.latest, reply=reply)

    def requested(self, session: Session) -> None:
        """An answer is about to start. Planners are asked unless they were with the messages before it."""
        if self.asked:
            return
        self.asked = True
        fresh = set(self.latest)
        for span, _ in contents(session.memory):
            if not self.latest and span.role != "assistant":
                fresh = {span.id}  # raw ids: the last of them ask
        if fresh:
            self._boundary(session, fresh, reply=True)

    def ended(self, session: Session, *, calls: bool = False) -> None:
        """The turn is over, finished or cancelled.

        Args:
            session: its session.
            calls: it called tools: the results belong to the same turn, which is asked for anew with them.
        """
        self.asked = self.over = False
        self.latest = set()
        if not calls:
            session.plan.end_turn()
            self.turn += 1
            self.now.clear()

    # -- asking about it -------------------------------------------------------------------------

    def edges_of(self, span_id: str) -> tuple[Edge, ...]:
        """The latest edges of a span, newest first."""
        return tuple(edge for edge in reversed(self.edges) if edge.span == span_id)

    def to_json(self) -> dict[str, Any]:
        """Counts a planner, and the latest problem."""
        return {
            "planners": [planner.name for planner in self.planners],
            "counts": dict(sorted(self.counts.items())),
            "problem": self.problems[-1] if self.problems else None,
        }

    def fork(self) -> Planning:
        """For a fork of the session."""
        copy = Planning([planner.fork() for planner in self.planners])
        copy.edges.extend(self.edges)
        copy.problems.extend(self.problems)
        copy.counts.update(self.counts)
        copy.corpus, copy.came = self.corpus.fork(), dict(self.came)
        copy.turn, copy.asked, copy.over = self.turn, self.asked, self.over
        copy.latest, copy.now = set(self.latest), dict(self.now)
        return copy

    # -- inside ----------------------------------------------------------------------------------

    def _boundary(self, session: Session, fresh: set[str], *, reply: bool) -> None:
        gone, come = self.corpus.update(session)
        for span_id in gone:
            self.came.pop(span_id, None)
        self.came.update((one.id, self.turn) for one in come)
        if gone:
            session.plan.forget_spans(set(gone) - {one.id for one in come})
        new = [document(session, span, ids) for span, ids in contents(session.memory) if span.id in fresh]
        context = Context(session, gone, come, new, reply, self.turn)
        began = False
        for planner in self.planners:
            try:
                proposal = planner.propose(context)
            except TenureError as error:
                self._problem(planner.name, str(error))
            else:
                began |= self._enter(session, planner.name, proposal)
        settle(session)
        if began:
            self.counts["fetched"] += len(session.memory.restore(session.plan.current_reads))
        if session.plan.turn is not None:
            back = session.memory.restore(session.plan.turn.spans, guessed=True)
            self.counts["fetched"] += len(back)

    def _enter(self, session: Session, name: str, proposal: Proposal) -> bool:
        """Enter what a planner says into the plan. Returns whether it has begun a step."""
        plan, began = session.plan, False
        for step in proposal.steps:
            if step.id in plan:
                plan.confirm(step.id)
            else:
                plan.add(Step(step.id))
        for step_id in proposal.finished:
            if step_id in plan:
                plan.finish(step_id)
        if proposal.current is not None and proposal.current in plan:
            if session._step in (None, proposal.current):
                plan.begin(proposal.current)
                began = True
            else:
                self._problem(name, f"step {proposal.current!r} is not begun: {session._step!r} is under way")
        for problem in proposal.problems:
            self._problem(name, problem)
        for old, new in proposal.superseded.items():
            try:
                plan.supersede(old, new)
                self.counts[f"{name}.superseded"] += 1
            except TenureError as error:
                self._problem(name, str(error))
        edges = [
            replace(edge, planner=name)
            for edge in sorted(proposal.edges, key=lambda edge: -edge.score)
            if edge.step in (NOW, LATER) or edge.step in plan
        ]
        later = [edge.span for edge in edges if edge.step == LATER and isinstance(edge.span, str)]
        if proposal.expected or later:
            plan.expect([*([] if proposal.expected else plan.expected), *later])
        now = [edge for edge in edges if edge.step == NOW]
        if proposal.looked:
            plan.withdraw(plan.guessed.by(name))
            # What a planner says of the turn takes the place of what it said before.
            self.now.pop(name, None)
            held = [edge.span for others in self.now.values() for edge in others]
            overdue = [span for step in plan.overdue for span in step.spans]
            self.now[name] = now = self._fitting(session, [*held, *overdue], now, spare(session.memory))
            plan.end_turn()
            reads = [*map(str, held), *(str(edge.span) for edge in now)]
            if reads:
                plan.add_turn_reads(reads, name=f"turn-{self.turn}")
        entered = now + [edge for edge in edges if edge.step == LATER]
        for step_id in dict.fromkeys(edge.step for edge in edges if edge.step not in (NOW, LATER)):
            fits = self._fitting(session, plan[step_id].reads, (e for e in edges if e.step == step_id))
            plan.add_reads(step_id, [edge.span for edge in fits], guess=name)
            entered += fits
        self.edges.extend(entered)
        self.counts[f"{name}.proposed"] += len(proposal.edges)
        self.counts[f"{name}.entered"] += len(entered)
        return began

    def _problem(self, name: str, words: str) -> None:
        self.counts[f"{name}.problems"] += 1
        self.problems.append(f"{name}: {words}")

    def _fitting(
        self, session: Session, held: Iterable[object], edges: Iterable[Edge], spare: int | None = None
    ) -> list[Edge]:
        """Edges of one step whose spans fit half of the budget together with what the step reads already.

        What a step reads must fit beside pins, or the step is refused: planners may not bring that about. What they find
        for a turn must fit what the policy will keep for it, ``spare``, or it is fetched in vain.
        """
        table, most = session.memory.ledger.spans, room(session.memory)
        if most is not None:
            most = min(most, (session.config.budget or 0) // 2, most if spare is None else spare)
        reads = set(held)
        used = sum(len(table.get(read)) for read in reads if isinstance(read, str) and read in table)
        fits = []
        for edge in edges:
            if edge.span in reads:
                continue
            size = len(table.get(edge.span)) if isinstance(edge.span, str) and edge.span in table else 0
            if most is not None and used + size > most:
                self._problem(edge.planner, f"{edge.span} does not fit what {edge.when} may read")
                continue
            used += size
            reads.add(edge.span)
            fits.append(edge)
        return fits
