"""``Memory``: a session's token stream in its fixed budget; knows ids and spans, nothing of text.

One step is: prepare (make room, renumber if needed), forward, commit
(ledger, scores, evictions). A forward that fails or is interrupted changes nothing, except that positions may have
been renumbered for it.
"""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from tenure.aging import Aging
from tenure.cache.attend import Work
from tenure.cache.ragged import RaggedSegment
from tenure.cache.rows import CosSin, Layout, RowSegment
from tenure.capture import Capture
from tenure.compress.base import check_alike
from tenure.compress.late import Late
from tenure.config import SessionConfig
from tenure.errors import ConfigError, IntegrityError
from tenure.evictions import EvictionLog
from tenure.frozen import Frozen
from tenure.interrupt import uninterrupted
from tenure.kernels import Kernels
from tenure.ledger import Ledger
from tenure.past import Past
from tenure.plan import Plan
from tenure.policies import Look, Policy, View, make_policy, select
from tenure.positions import position_map
from tenure.region_table import RegionTable
from tenure.restore import restore
from tenure.stream import TokenStream
from tenure.tiers.record import Archive

POISON = os.environ.get("TENURE_POISON") == "1"
"""Fill freed slots with NaN and check every invariant after each step; the tests turn it on."""

_FIRST_CAPACITY = 4096
"""Slab of a session without a budget; doubled whenever it is full."""

_SHRUNK = 64
"""After a compression such a slab is cut to the rows left, rounded up to this."""


@dataclass(frozen=True)
class Device:
    """What a memory needs of the loaded model."""

    layout: Layout
    cos_sin: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
    """Of positions, their upper bound and a layer."""
    kernels: Kernels
    copy: bool


class Memory(TokenStream):
    """The KV state of one session.

    Args:
        config: checked options.
        device: shape and angles of the model.
        plan: read for the next readers of spans, never changed here.
        archive: where whole spans are put before they can be evicted; None loses what is evicted.
    """

    def __init__(
        self, config: SessionConfig, device: Device, plan: Plan, archive: Archive | None = None
    ) -> None:
        self.config = config
        self.device = device
        self.plan = plan
        self.policy: Policy = make_policy(config.policy, config.policy_options)
        self.positions = position_map(config.positions, config.position_limit)
        granularity = config.granularity or self.policy.granularity
        groups = device.layout.layers if granularity == "layer" else 1
        capacity = config.capacity or _FIRST_CAPACITY
        super().__init__(Ledger(groups, capacity, device.layout.device), config.chunk)
        self.rows = RowSegment(
            device.layout, capacity, self.ledger.position, self.angles, device.kernels, copy=device.copy
        )
        self.frozen = Frozen()
        """What was compressed; its slots are part of the budget."""
        if config.compress:
            check_alike(device.layout, "compress")
        self.late = Late(config.compress, config.compress_ratio) if config.compress else None
        self.aging = Aging(RegionTable(config.regions), device.layout.device)
        self.past = Past()
        self.evictions = EvictionLog()
        self._capture = None if archive is None else Capture(archive)

    @property
    def archive(self) -> Archive | None:
        """Where whole spans are put before they can be evicted."""
        return None if self._capture is None else self._capture.archive

    @property
    def capture(self) -> Capture | None:
        """What puts them there; None without an archive."""
        return self._capture

    @property
    def row_budget(self) -> int | None:
        """Rows that may stay: the budget less what is compressed."""
        return None if self.config.budget is None else self.config.budget - self.frozen.slots

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, rotated copies included."""
        return self.rows.nbytes + self.frozen.nbytes

    @property
    def angles(self) -> CosSin:
        """Cosines and sines of positions."""
        # Bounded positions never pass the limit; for the others fp64 is the safe side.
        largest = self.config.position_limit
        cos_sin = self.device.cos_sin

        def of(positions: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
            return cos_sin(positions, largest or int(positions.max()) if positions.numel() else 0, layer)

        return of

    # -- one step --------------------------------------------------------------------------------

    def prepare(self, count: int) -> None:
        """Make room for ``count`` tokens, which may leave gaps; then renumber if the position map asks for it."""
        ledger = self.ledger
        if ledger.rows + count > self.rows.capacity:
            if self.policy.evicts:
                self._evict()  # a decode burst has used the slack
            else:
                self.resize(1 << (ledger.rows + count - 1).bit_length())
        if self.positions.renumber(ledger.next_position, count, ledger.gaps):
            self._renumber()
        ledger.stage(count)

    def work(self, start: int, count: int) -> Work:
        """This session's part of a pack, at columns ``start .. start + count``."""
        return Work(
            self.rows,
            start,
            start + count,
            frozen=self.frozen.segments,
            statistics=self.policy.statistics,
            groups=self.ledger.groups,
            logical=self.ledger.logical[:, : self.rows.rows + count],
            watch=None if self.late is None else self.late.watch(count),
        )

    def commit(self, work: Work, *, decoding: bool) -> None:
        """Enter the tokens of a forward, score, and evict down to the budget.

        Args:
            work: of the forward.
            decoding: its one token is of an answer; evict only when the slack is used up.
        """
        count = work.stop - work.start
        self.past.coming(self, decoding=decoding)
        turns = self._enter(count)
        self.rows.commit(count)
        self.ledger.commit(count)
        if self.late is not None:
            self.late.saw(work.watch, self.ledger.length)
        steps = self.aging.advance(count, turns, decoding=decoding)
        self.aging.enter(self.ledger, count)
        if work.mass is not None:
            self._learn(work.mass, count, steps)
        self._chunk_left -= count
        if not self._chunk_left or not self._backlog:
            self._chunk_left = self.config.chunk
            budget = self.row_budget
            if budget is not None and self.ledger.rows > budget + (self.config.slack if decoding else 0):
                self._evict()
        self.past.come(self, decoding=decoding)
        if POISON:
            self.check_integrity()

    def _learn(self, mass: Tensor, count: int, steps: float) -> None:
        """Let the policy take in the attention of one forward."""
        ledger, rows = self.ledger, slice(0, self.ledger.rows)
        if self.policy.values:
            new = slice(ledger.rows - count, ledger.rows)
            ledger.value[:, new] = self.rows.value_norms(new, ledger.groups)
        window = self.policy.statistics.window if self.policy.statistics else 0
        look = Look(
            **{name: array[:, rows] for name, array in ledger.arrays.items() if name != "position"},
            mass=mass,
            new=count,
            queries=min(window or count, count),
            steps=steps,
            sinks=self.config.sinks,
            table=self.aging,
        )
        for name, values in self.policy.absorb(look).items():
            getattr(ledger, name)[:, rows] = values
            self.past.wrote(name)

    def view(self) -> View:
        """What the policy sees now."""
        ledger = self.ledger
        rows = ledger.rows
        logical = ledger.logical[:, :rows]
        readers = torch.full((max(1, len(ledger.spans)),), -1, device=logical.device)
        pins = torch.zeros_like(readers)
        for span_id in self.plan.superseded:
            if span_id in ledger.spans:
                readers[ledger.spans.index_at(ledger.spans.get(span_id).start)] = -2
        for span_id, delta in self.plan.planned().items():
            if span_id in ledger.spans:
                readers[ledger.spans.index_at(ledger.spans.get(span_id).start)] = delta
        current = torch.zeros_like(readers, dtype=torch.bool)
        for span_id in self.plan.current_reads:
            if span_id in ledger.spans:
                current[ledger.spans.index_at(ledger.spans.get(span_id).start)] = True
        for span in ledger.spans.pinned:
            pins[ledger.spans.index_at(span.start)] = 2 if span.pin == "hard" else 1
        owner = ledger.span_index(logical).clamp_(min=0)
        region = ledger.region[:, :rows]
        return View(
            logical=logical,
            score=ledger.score[:, :rows],
            region=region,
            born=ledger.born[:, :rows],
            energy=ledger.energy[:, :rows],
            table=self.aging.vectors(),
            readers=readers[owner],
            current=current[owner],
            pin=self.aging.pins(pins[owner], region),
            span=owner,
            sizes=ledger.span_sizes().to(logical.device),
            length=ledger.length,
            budget=rows if self.row_budget is None else self.row_budget,
            sinks=self.config.sinks,
        )

    def _evict(self) -> None:
        self.capture_new()
        view = self.view()
        index = select(self.policy, view)
        reasons: dict[int, str] = {}
        for number in view.span.flatten().bincount().nonzero().flatten().tolist():
            reason = self.plan.loss_reason(self.ledger.spans[number].id)
            if reason is not None:
                reasons[number] = "spilled" if reason == "plan" and self._capture is not None else reason
        self.evictions.record(view, index, self.policy.told(view), reasons)
        self._keep(index, reasons)

    def capture_new(self) -> None:
        """Capture what is new while every layer still has it."""
        if self._capture is not None:
            self._capture.take(self.ledger, self.rows, self.ids)

    def restore(self, span_ids: Iterable[str], *, guessed: bool = False) -> list[str]:
        """Bring evicted spans back from the archive; see :func:`tenure.restore.restore`."""
        back = restore(self, span_ids, guessed=guessed)
        if POISON:
            self.check_integrity()
        return back

    def drop(self, index: Tensor, reason: str) -> None:
        """Keep the rows ``index`` ``[groups, kept]`` only, and count the rest as lost for a reason."""
        self.capture_new()
        view = self.view()
        self.evictions.record(view, index, self.policy.told(view), reason)
        self._keep(index, reason)

    def _keep(self, index: Tensor, reasons: dict[int, str] | str) -> None:
        self.ledger.keep(index, reasons)
        self.rows.keep(index, poison=POISON)
        self._close_gaps()

    def _close_gaps(self) -> None:
        if self.positions.renumber(self.ledger.next_position, 0, self.ledger.gaps):
            self._renumber()

    def _renumber(self) -> None:
        self.ledger.renumber()
        self.rows.renumber()
        self.frozen = self.frozen.placed(self.ledger)

    def resize(self, capacity: int) -> None:
        """Move the rows to a slab of another size."""
        if capacity != self.rows.capacity:
            self.ledger.grow(capacity)
            self.rows.grow(capacity, self.ledger.position)

    def freeze(self, frozen: Frozen) -> None:
        """Take other frozen segments; the slab of a session with a budget makes room for them, or takes it back."""
        self.frozen = frozen
        self.ledger.blocks = frozen.blocks
        capacity = self.config.capacity
        if capacity is not None and self.ledger.rows <= capacity - frozen.slots:
            self.resize(capacity - frozen.slots)

    @torch.inference_mode()
    def compress(self, index: Tensor, segment: RaggedSegment) -> None:
        """Let a frozen segment stand for the rows that are not in ``index`` ``[groups, kept]``, ascending.

        Their tokens count as evicted, with the reason ``compressed``.
        """
        with uninterrupted():
            self.capture_new()
            self.ledger.keep(index, "compressed")
            self.rows.keep(index, poison=POISON)
            self.freeze(self.frozen.add(segment))
            if self.config.capacity is None:
                self.resize(-(-max(1, self.ledger.rows) // _SHRUNK) * _SHRUNK)
            self._close_gaps()
        if POISON:
            self.check_integrity()

    # -- changes from outside --------------------------------------------------------------------

    @torch.inference_mode()
    def keep_first(self, count: SupportsIndex) -> int:
        """Keep the first ``count`` tokens and take back the rest; 0 clears the session.

        Clocks and scores go back with them, see :mod:`tenure.past`.

        Returns:
            The count as a plain number.

        Raises:
            ConfigError: out of range; nothing has changed.
        """
        count = checked_count(count, len(self.ids), "keep_first", "Give a length up to the present")
        with uninterrupted():
            self.drop_backlog()
            if self._capture is not None:
                self.capture_new()
                self._capture.truncate(self.ledger, self.rows, self.ids, count)
            self.evictions.truncate(count)
            self.past.back(self, count)
            index = self.ledger.truncate(count, self.config.sinks)
            self.rows.keep(index, poison=POISON)
            self.freeze(self.frozen.before(count))
            self.ledger.next_position = max(self.ledger.next_position, self.frozen.behind)
            self._close_gaps()
            if self.late is not None:
                self.late.truncate(count)
            del self.ids[count:]
        if POISON:
            self.check_integrity()
        return count

    def retake_last(self) -> None:
        """Take the last token back into the backlog, so that its logits are computed again."""
        span, region, last = self.last_span, self.last_region, self.ids[-1]
        self.keep_first(len(self.ids) - 1)
        if span is not None:
            self.queue([last], span, region)

    def fork(self, plan: Plan) -> Memory:
        """An independent copy, backlog included, that follows ``plan``."""
        copy = Memory.__new__(Memory)
        copy.__dict__.update(self.__dict__)
        copy.plan = plan
        copy.ids = array("I", self.ids)
        copy.ledger = self.ledger.clone()
        copy.rows = self.rows.clone(copy.ledger.position)
        copy.aging, copy.evictions, copy.past = self.aging.fork(), self.evictions.fork(), self.past.fork()
        copy.late = None if self.late is None else self.late.fork()
        copy._capture = None if self._capture is None else self._capture.fork()
        copy._backlog = self._fork_backlog(copy.ledger.spans)
        return copy

    def free(self) -> None:
        """Give slab and archive back; ids and ledger can still be read."""
        self.drop_backlog()
        self._capture = None
        self.rows.free()
        self.frozen = Frozen()

    def check_integrity(self) -> None:
        """Raise IntegrityError if cache, ledger and token list disagree."""
        self.ledger.check_integrity(self.rows.rows, len(self.ids), self.config.position_limit)
        ahead = [one for one in self.frozen.segments if one.stop > len(self.ids)]
        if ahead or self.ledger.blocks != self.frozen.blocks:
            raise IntegrityError("compressed segments do not belong to the session's tokens")


def checked_count(count: SupportsIndex, most: int, option: str, way_out: str) -> int:
    """A number of tokens.

    Raises:
        ConfigError: it is no whole number from 0 to ``most``.
    """
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise ConfigError(f"{count} is not in 0..{most}", option=option, way_out=way_out)
    return number
