"""``RaggedSegment``: frozen keys and values, with an own number of entries for every (layer, kv head).

An entry stands for one token or for several: its log-multiplicity is added to its logit, as if it were there that many
times. Entries lie flat, layer by layer, head by head, and within a head in logical order. A segment never changes:
what truncates it or gives it other positions makes a new one, and forks share what they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from tenure.cache.rows import CosSin, Layout
from tenure.errors import IntegrityError
from tenure.kernels import Kernels


@dataclass(frozen=True, eq=False)
class Entries:
    """Compressed keys and values before they are put to use: ``N`` entries, flat.

    Args:
        lengths: ``[layers, kv_heads]`` int64, entries of each head.
        keys: ``[N, D]`` raw keys.
        values: ``[N, D]``.
        bias: ``[N]`` fp32 log-multiplicities, 0 for an entry that is one token.
        position: ``[N]`` int32 rotary positions.
        start: ``[N]`` int32 logical index of the first token that an entry stands for.
        stop: ``[N]`` int32, behind the last one.
        worth: ``[N]`` fp32: where room is short, the least go first. A method gives it by a measure of its own; in a
            segment it is the place among the entries of one making, see :meth:`ranked`.
    """

    lengths: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor
    position: Tensor
    start: Tensor
    stop: Tensor
    worth: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def owner(self) -> Tensor:
        """``[N]`` number of each entry's head, ``layer * kv_heads + head``."""
        heads = self.lengths.flatten()
        return torch.repeat_interleave(torch.arange(len(heads), device=heads.device), heads)

    def ranked(self) -> Entries:
        """With the place of each as its worth, from 0 for the least to below 1: comparable whatever made them."""
        place = self.worth.argsort(stable=True).argsort()
        return replace(self, worth=place / max(1, len(self)))

    def keep(self, mask: Tensor) -> Entries:
        """The entries of a mask ``[N]``."""
        count = torch.bincount(self.owner[mask], minlength=self.lengths.numel())
        return Entries(
            count.view_as(self.lengths),
            *(getattr(self, name)[mask].contiguous() for name in _ARRAYS),
        )

    def check(self, layout: Layout) -> None:
        """Raise IntegrityError if the parts do not fit together or a model of this shape."""
        total = int(self.lengths.sum())
        arrays = [getattr(self, name) for name in _ARRAYS]
        if any(len(array) != total for array in arrays):
            raise IntegrityError(f"{total} entries, arrays of {[len(array) for array in arrays]}")
        owner = self.owner
        inside = owner[1:] == owner[:-1]
        checks = {
            f"lengths {tuple(self.lengths.shape)} are not {layout.layers} x {layout.kv_heads}": self.lengths.shape
            == (layout.layers, layout.kv_heads),
            f"heads of {self.keys.shape[-1]} channels, not {layout.head_dim}": self.keys.shape[-1]
            == self.values.shape[-1]
            == layout.head_dim,
            "a multiplicity is below one or not finite": bool(
                (self.bias.isfinite() & (self.bias >= -1e-6)).all()
            ),
            "an entry stands for no token": bool((self.stop > self.start).all()),
            "entries of a head are not in logical order": bool((self.start.diff()[inside] >= 0).all()),
            "a key or value is not finite": bool(self.keys.isfinite().all() and self.values.isfinite().all()),
            "a worth is no number": not bool(self.worth.isnan().any()),
        }
        broken = [text for text, holds in checks.items() if not holds]
        if broken:
            raise IntegrityError("; ".join(broken))


_ARRAYS = tuple(item.name for item in fields(Entries) if item.name != "lengths")
"""What there is of each entry."""


def in_order(owner: Tensor, start: Tensor) -> Tensor:
    """Numbers of entries head by head, in logical order within one: ``owner`` and ``start`` as in :class:`Entries`."""
    return (owner.long() * (int(start.max()) + 1) + start).argsort(stable=True)


@dataclass(frozen=True, eq=False)
class RaggedSegment:
    """See the module; satisfies :class:`~tenure.cache.rows.Segment`.

    Args:
        entries: keys, values and what they stand for.
        rotated: ``[N, D]`` keys at their positions; None rotates whenever they are read.
        cos_sin: angles of positions.
        kernels: the kernel module of the device.
    """

    entries: Entries
    rotated: Tensor | None
    cos_sin: CosSin
    kernels: Kernels

    @classmethod
    def of(cls, entries: Entries, cos_sin: CosSin, kernels: Kernels, *, copy: bool = True) -> RaggedSegment:
        """A segment of entries.

        Args:
            entries: checked already.
            cos_sin: angles of positions.
            kernels: the kernel module of the device.
            copy: keep a rotated copy of the keys.
        """
        rotated = kernels.rotate(entries.keys, *cos_sin(entries.position)) if copy else None
        return cls(entries, rotated, cos_sin, kernels)

    @cached_property
    def _offsets(self) -> list[list[int]]:
        """Where the entries of each head begin, ``[layers][kv_heads + 1]``."""
        lengths = self.entries.lengths
        ends = lengths.flatten().cumsum(0).view_as(lengths)
        offsets: list[list[int]] = torch.cat([ends[:, :1] - lengths[:, :1], ends], 1).tolist()
        return offsets

    @cached_property
    def _local(self) -> tuple[Tensor, int]:
        """Offsets within each layer ``[layers, kv_heads + 1]`` int64, and the longest head's length."""
        offsets = torch.tensor(self._offsets)
        return offsets - offsets[:, :1], int(self.entries.lengths.max())

    def flat(self, layer: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, int] | None:
        """What the native kernel reads of a layer: rotated keys, values and multiplicities, offsets, longest head.

        None where it cannot read them: without a rotated copy, or not on a CPU.
        """
        if self.rotated is None or self.rotated.device.type != "cpu":
            return None
        start, stop = self._offsets[layer][0], self._offsets[layer][-1]
        entries = (self.rotated[start:stop], self.entries.values[start:stop], self.entries.bias[start:stop])
        return entries, self._local[0][layer], self._local[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated: keys, values, the rotated copy, and what is known of each entry."""
        arrays = [getattr(self.entries, item.name) for item in fields(self.entries)]
        arrays += [] if self.rotated is None else [self.rotated]
        return sum(int(array.nbytes) for array in arrays)

    @cached_property
    def slots(self) -> int:
        """Entries a (layer, kv head), a mean over all of them, rounded up: what counts against a budget."""
        heads: int = self.entries.lengths.numel()
        return math.ceil(len(self.entries) / heads)

    @cached_property
    def start(self) -> int:
        """First logical index that an entry stands for."""
        return int(self.entries.start.min()) if len(self.entries) else 0

    @cached_property
    def stop(self) -> int:
        """Behind the last logical index."""
        return int(self.entries.stop.max()) if len(self.entries) else 0

    def attend(self, layer: int, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See :class:`~tenure.cache.rows.Segment`; a head without entries gives 0 and a log-sum-exp of -inf."""
        entries = self.entries
        offsets = self._offsets[layer]
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
        keys = self._keys(offsets[0], offsets[-1])
        for head, (start, stop) in enumerate(pairwise(offsets)):
            if stop > start:
                out[head], lse[head] = self.kernels.attend_weighted(
                    q[head],
                    keys[start - offsets[0] : stop - offsets[0]],
                    entries.values[start:stop],
                    entries.bias[start:stop],
                    scale=scale,
                )
        return out, lse

    def _keys(self, start: int, stop: int) -> Tensor:
        if self.rotated is not None:
            return self.rotated[start:stop]
        part = slice(start, stop)
        return self.kernels.rotate(self.entries.keys[part], *self.cos_sin(self.entries.position[part]))

    def placed(self, position: Tensor) -> RaggedSegment:
        """The same entries at the positions ``[N]``."""
        moved = replace(self.entries, position=position.to(torch.int32))
        return RaggedSegment.of(moved, self.cos_sin, self.kernels, copy=self.rotated is not None)

    def where(self, mask: Tensor) -> RaggedSegment | None:
        """A segment of the entries of a mask ``[N]``; itself if that is all of them, None if it is none."""
        if bool(mask.all()):
            return self
        if not bool(mask.any()):
            return None
        rotated = None if self.rotated is None else self.rotated[mask].contiguous()
        return RaggedSegment(self.entries.keep(mask), rotated, self.cos_sin, self.kernels)

    @classmethod
    def joined(cls, segments: Sequence[RaggedSegment]) -> RaggedSegment:
        """All entries of some segments of one session in one, head by head in logical order."""
        if len(segments) == 1:
            return segments[0]
        parts = [one.entries for one in segments]
        owner, start = torch.cat([one.owner for one in parts]), torch.cat([one.start for one in parts])
        order = in_order(owner, start)

        def of(name: str) -> Tensor:
            return torch.cat([getattr(one, name) for one in parts])[order]

        lengths = torch.stack([one.lengths for one in parts]).sum(0)
        entries = Entries(lengths, **{name: of(name) for name in _ARRAYS})
        copies = [one.rotated for one in segments if one.rotated is not None]
        rotated = torch.cat(copies)[order] if len(copies) == len(segments) else None
        return cls(entries, rotated, segments[0].cos_sin, segments[0].kernels)

    def best(self, count: int) -> RaggedSegment | None:
        """The ``count`` entries of most worth, ties to the later ones; None if that is none of them."""
        order = self.entries.worth.flip(0).sort(descending=True, stable=True).indices[:count]
        mask = torch.zeros(len(self.entries), dtype=torch.bool, device=order.device)
        mask[len(mask) - 1 - order] = True
        return self.where(mask)

    def before(self, length: int) -> RaggedSegment | None:
        """What stands for tokens before logical index ``length`` alone; None if nothing does."""
        return self.where(self.entries.stop <= length)

    def without(self, start: int, stop: int) -> RaggedSegment | None:
        """What stands for no token of ``start .. stop``; None if nothing does."""
        return self.where((self.entries.stop <= start) | (self.entries.start >= stop))

    def inside(self, start: int, stop: int) -> Tensor:
        """Entries of each head that begin in ``start .. stop``, ``[layers, kv_heads]``."""
        entries = self.entries
        mask = (entries.start >= start) & (entries.start < stop)
        lengths = entries.lengths
        return torch.bincount(entries.owner[mask], minlength=lengths.numel()).view_as(lengths)

    def state(self) -> dict[str, Tensor]:
        """All that :meth:`load` needs, by name."""
        return {item.name: getattr(self.entries, item.name) for item in fields(self.entries)}

    @classmethod
    def load(
        cls,
        state: Mapping[str, Tensor],
        layout: Layout,
        cos_sin: CosSin,
        kernels: Kernels,
        *,
        copy: bool = True,
    ) -> RaggedSegment:
        """A segment from its :meth:`state`.

        Raises:
            IntegrityError: a part is missing, or does not fit the others or the model.
        """
        if "bias" in state:  # files of before entries had a worth
            state = {"worth": torch.zeros_like(state["bias"]), **state}
        if missing := {item.name for item in fields(Entries)} - set(state):
            raise IntegrityError(f"a compressed segment lacks {sorted(missing)[0]}")
        entries = Entries(**{item.name: state[item.name].to(layout.device) for item in fields(Entries)})
        entries.check(layout)
        return cls.of(entries, cos_sin, kernels, copy=copy)
