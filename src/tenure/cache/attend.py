"""One forward's attention: new tokens of several sessions, each over its own segments.

Sessions are packed one after another into a single row of tokens, so a prefill chunk of one and a decode token of
another share every matrix product; only attention looks at them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tenure.cache.ragged import RaggedSegment
from tenure.cache.rows import RowSegment
from tenure.errors import IntegrityError
from tenure.kernels import Kernels
from tenure.kernels.common import attend_within, beside_sinks
from tenure.kernels.decoding import Step, Steps
from tenure.kernels.native import Native

Watch = Callable[[int, Tensor, Tensor], None]
"""Told of each layer's unrotated queries ``[H, new, D]`` and their log-sum-exp ``[G, g, new]`` over all keys."""


@dataclass(frozen=True)
class Statistics:
    """Attention mass a policy asks for.

    Args:
        window: the last so many queries of a chunk; 0 takes all.
        reduce: how query heads are joined into one score a slot.
    """

    window: int
    reduce: Literal["max", "mean"]


@dataclass(eq=False)
class Work:
    """The part of one session in a forward.

    Args:
        rows: where new tokens are appended.
        start: first column of the session in the pack.
        stop: behind its last column.
        frozen: further segments, which every new token sees.
        statistics: what to collect, or None.
        groups: 1 or the number of layers: granularity of the kept sets.
        logical: ``[groups, rows + new]``, the token of each row; only for layers that see a window.
        watch: for compressors, which judge keys by queries; keeps a forward off the native kernels.
        mass: ``[groups, rows + new]`` fp32, filled by the forward; None without statistics.
    """

    rows: RowSegment
    start: int
    stop: int
    frozen: Sequence[RaggedSegment] = ()
    statistics: Statistics | None = None
    groups: int = 1
    logical: Tensor | None = None
    watch: Watch | None = None
    mass: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.statistics is not None:
            self.mass = torch.zeros(
                self.groups, self.rows.rows + self.stop - self.start, device=self.rows.layout.device
            )

    @property
    def share(self) -> float:
        """Weight of a layer's mass: layers that share one kept set are averaged."""
        return 1.0 if self.groups > 1 else 1.0 / len(self.rows.layout.judges)

    def judges(self, layer: int) -> bool:
        """Whether a layer's mass counts."""
        return self.groups > 1 or layer in self.rows.layout.judges


@dataclass(frozen=True)
class Forward:
    """Everything the attention function needs for one forward of the model.

    Args:
        work: the sessions, in pack order.
        cos: ``[T, r/2]`` fp32 at the rotary positions of the pack's new tokens.
        sin: like ``cos``.
        kernels: the kernel module of the device.
        scale: factor on the logits.
        others: ``cos`` and ``sin`` for the layers that rotate by other angles.
    """

    work: Sequence[Work]
    cos: Tensor
    sin: Tensor
    kernels: Kernels
    scale: float
    others: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        singles: Singles | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Append the new keys and values of a layer and attend.

        Args:
            layer: which layer.
            q: unrotated queries ``[H, T, D]``.
            k: unrotated keys ``[G, T, D]``.
            v: values ``[G, T, D]``.
            singles: sessions that decode one token beside others that read text, for the native kernels.
            sinks: ``[H]``, the logit of a key without a value that each query head sees besides; not with ``singles``.

        Returns:
            ``[T, H, D]``.
        """
        heads, total, dim = q.shape
        kv_heads = k.shape[0]
        cos, sin = self.others.get(layer, (self.cos, self.sin))
        rotated_q = self.kernels.rotate(q, cos, sin).view(kv_heads, heads // kv_heads, total, dim)
        rotated_k = self.kernels.rotate(k, cos, sin)
        idle = None if sinks is None else sinks.float().view(kv_heads, -1, 1)
        out = q.new_empty(total, heads, dim)
        if singles is not None:
            columns = [work.start for work in singles.work]
            qkv = torch.cat([one[:, columns] for one in (q, k, v)]).transpose(0, 1).float().contiguous()
            single = torch.empty(len(columns), heads, dim)
            singles.attend(layer, qkv, single)
            out[columns] = single.to(out.dtype)
        for work in self.work:
            if singles is not None and work in singles.work:
                continue
            part = slice(work.start, work.stop)
            work.rows.append(layer, k[:, part], v[:, part], rotated_k[:, part])
            one, lse = self._session(layer, work, rotated_q[:, :, part], idle)
            if work.watch is not None:
                work.watch(layer, q[:, part], lse)
            out[part] = one.reshape(heads, work.stop - work.start, dim).transpose(0, 1)
        return out

    def _session(self, layer: int, work: Work, q: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, new = work.rows.rows, work.stop - work.start
        keys, values = work.rows.keys(layer, rows + new), work.rows.values[layer, :, : rows + new]
        statistics = work.statistics if work.judges(layer) else None
        sees = work.rows.layout.windows[layer] if work.rows.layout.windows else None
        mass: Tensor | None = None
        if sees is not None:
            if work.frozen or work.logical is None:
                raise IntegrityError(
                    "a layer that sees a window has compressed tokens, or rows without tokens"
                )
            watched = 0 if statistics is None else min(statistics.window or new, new)
            out, lse, mass = attend_within(
                q, keys, values, work.logical[layer % work.groups],
                window=sees, scale=self.scale, sinks=sinks, watched=watched,
            )  # fmt: skip
        elif new == 1:
            out, lse, mass = self.kernels.decode(q, keys, values, scale=self.scale)
            if work.frozen:
                other = self.kernels.merge([one.attend(layer, q, scale=self.scale) for one in work.frozen])
                mass = mass * torch.sigmoid(lse - other[1])  # the share of the rows
                out, lse = self.kernels.merge([(out, lse), other])
            if sinks is not None:
                mass = mass * torch.sigmoid(lse - sinks)
                out, lse = beside_sinks(out, lse, sinks)
        else:
            window = 0 if statistics is None else min(statistics.window or new, new)
            # The mass over these rows alone is not the one over frozen segments and sinks too.
            alone = not work.frozen and sinks is None
            own, own_lse, mass = self.kernels.extend(
                q, keys, values, scale=self.scale, window=window if alone else 0
            )
            parts = [segment.attend(layer, q, scale=self.scale) for segment in work.frozen]
            out, lse = self.kernels.merge([*parts, (own, own_lse)])
            if sinks is not None:
                out, lse = beside_sinks(out, lse, sinks)
            if window and mass is None:
                mass = self.kernels.attention_mass(
                    q[:, :, new - window :], keys, lse[:, :, new - window :], scale=self.scale
                )
        if statistics is not None and mass is not None and work.mass is not None:
            joined = mass.flatten(0, 1)
            joined = joined.amax(0) if statistics.reduce == "max" else joined.mean(0)
            work.mass[layer % work.groups].add_(joined, alpha=work.share)
        return out, lse


class Singles:
    """The sessions of a forward that decode one token on slabs that the native kernels read.

    Args:
        forward: the forward.
        work: the sessions, at least one.
        native: the kernels.
        heads: query heads of the model.
    """

    def __init__(self, forward: Forward, work: Sequence[Work], native: Native, heads: int) -> None:
        self.work = tuple(work)
        self._forward = forward
        self._native = native
        self._steps = Steps([self._step(one) for one in work], heads)

    @classmethod
    def of(cls, forward: Forward, native: Native, heads: int) -> Singles | None:
        """Those of a forward; None where there are none."""
        work = [one for one in forward.work if cls._can_read(native, one)]
        return cls(forward, work, native, heads) if work else None

    @staticmethod
    def _can_read(native: Native, work: Work) -> bool:
        one = work.stop - work.start == 1 and work.watch is None
        slab = one and native.can_read(work.rows.raw, work.rows.rotated)
        return slab and all(segment.flat(0) is not None for segment in work.frozen)

    def _step(self, work: Work) -> Step:
        return Step(
            slab=work.rows.slab(),
            row=work.rows.rows,
            cos=self._forward.cos[work.start],
            sin=self._forward.sin[work.start],
            mass=work.mass,
            share=work.share,
            mean=work.statistics is not None and work.statistics.reduce == "mean",
        )

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        """Append one token of each session to a layer and attend.

        Args:
            layer: which layer.
            qkv: unrotated queries, keys and values ``[sessions, heads + 2 kv_heads, D]`` fp32.
            out: ``[sessions, heads, D]`` fp32.
        """
        others = [
            self._frozen(layer, work, qkv[n]) if work.frozen else None for n, work in enumerate(self.work)
        ]
        self._native.attention(self._steps, layer, qkv, out, scale=self._forward.scale, others=others)

    def _frozen(self, layer: int, work: Work, qkv: Tensor) -> tuple[Tensor, Tensor] | None:
        """One token's attention over the frozen segments of its session."""
        other: tuple[Tensor, Tensor] | None = None
        for segment in work.frozen:
            flat = segment.flat(layer)
            if flat is None:
                raise IntegrityError("a frozen segment lost its rotated keys")
            entries, offsets, longest = flat
            other = self._native.ragged(
                qkv,
                self._forward.cos[work.start],
                self._forward.sin[work.start],
                entries,
                offsets,
                longest,
                scale=self._forward.scale,
                other=other,
            )
        return other
