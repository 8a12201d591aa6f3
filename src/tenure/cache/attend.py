"""One forward's attention: new tokens of several sessions, each over its own segments.

Sessions are packed one after another into a single row of tokens, so a prefill chunk of one and a decode token of
another share every matrix product; only attention looks at them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tenure.cache.ragged import RaggedSegment
from tenure.cache.rows import RowSegment
from tenure.kernels import Kernels
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


@dataclass
class Work:
    """The part of one session in a forward.

    Args:
        rows: where new tokens are appended.
        start: first column of the session in the pack.
        stop: behind its last column.
        frozen: further segments, which every new token sees.
        statistics: what to collect, or None.
        groups: 1 or the number of layers: granularity of the kept sets.
        watch: for compressors, which judge keys by queries; keeps a forward off the native kernels.
        mass: ``[groups, rows + new]`` fp32, filled by the forward; None without statistics.
    """

    rows: RowSegment
    start: int
    stop: int
    frozen: Sequence[RaggedSegment] = ()
    statistics: Statistics | None = None
    groups: int = 1
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
        return 1.0 if self.groups > 1 else 1.0 / self.rows.layout.layers


@dataclass(frozen=True)
class Forward:
    """Everything the attention function needs for one forward of the model.

    Args:
        work: the sessions, in pack order.
        cos: ``[T, r/2]`` fp32 at the rotary positions of the pack's new tokens.
        sin: like ``cos``.
        kernels: the kernel module of the device.
        scale: factor on the logits.
    """

    work: Sequence[Work]
    cos: Tensor
    sin: Tensor
    kernels: Kernels
    scale: float

    def steps(self, native: Native) -> bool:
        """Whether every session decodes one token on a slab that the native kernels can read."""
        return all(self._steps(native, work) for work in self.work)

    @staticmethod
    def _steps(native: Native, work: Work) -> bool:
        one = work.stop - work.start == 1 and work.watch is None
        return one and native.can_read(work.rows.raw, work.rows.rotated)

    def step(self, native: Native, layer: int, qkv: Tensor, out: Tensor) -> None:
        """Append and attend for one token of each session.

        Args:
            native: the kernels.
            layer: which layer.
            qkv: unrotated queries, keys and values ``[T, heads + 2 kv_heads, D]`` fp32.
            out: ``[T, heads, D]`` fp32.
        """
        for work in self.work:
            self._step(native, layer, work, qkv[work.start], out[work.start])

    def _step(self, native: Native, layer: int, work: Work, qkv: Tensor, out: Tensor) -> None:
        statistics, mass = work.statistics, work.mass
        other = None
        if work.frozen:
            other = self._frozen(native, layer, work, qkv)
            if other is None:
                self._step_frozen(layer, work, qkv, out)
                return
        native.attention(
            qkv,
            self.cos[work.start],
            self.sin[work.start],
            work.rows.slab(layer),
            work.rows.rows,
            out,
            scale=self.scale,
            mass=None if mass is None else mass[layer % work.groups],
            share=work.share,
            mean=statistics is not None and statistics.reduce == "mean",
            other=other,
        )

    def _frozen(self, native: Native, layer: int, work: Work, qkv: Tensor) -> tuple[Tensor, Tensor] | None:
        """One token's attention over the frozen segments of a session; None if the kernels cannot read one."""
        other: tuple[Tensor, Tensor] | None = None
        for segment in work.frozen:
            flat = segment.flat(layer)
            if flat is None:
                return None
            entries, offsets, longest = flat
            other = native.ragged(
                qkv,
                self.cos[work.start],
                self.sin[work.start],
                entries,
                offsets,
                longest,
                scale=self.scale,
                other=other,
            )
        return other

    def _step_frozen(self, layer: int, work: Work, qkv: Tensor, out: Tensor) -> None:
        """One token of a session with frozen segments: ``qkv`` ``[heads + 2 kv_heads, D]``, ``out`` ``[heads, D]``."""
        heads, dim = out.shape
        layout = work.rows.layout
        q, k, v = torch.split(qkv, [heads, layout.kv_heads, layout.kv_heads])
        cos, sin = self.cos[work.start], self.sin[work.start]
        q = self.kernels.rotate(q, cos, sin).to(layout.dtype)
        raw, v = k.to(layout.dtype)[:, None], v.to(layout.dtype)[:, None]
        work.rows.append(layer, raw, v, self.kernels.rotate(raw, cos, sin))
        shaped = q.view(layout.kv_heads, heads // layout.kv_heads, 1, dim)
        out.copy_(self._session(layer, work, shaped)[0].view(heads, dim))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, native: Native | None = None) -> Tensor:
        """Append the new keys and values of a layer and attend.

        Args:
            layer: which layer.
            q: unrotated queries ``[H, T, D]``.
            k: unrotated keys ``[G, T, D]``.
            v: values ``[G, T, D]``.
            native: kernels for the sessions that decode one token beside others that read text; None has none.

        Returns:
            ``[T, H, D]``.
        """
        heads, total, dim = q.shape
        kv_heads = k.shape[0]
        rotated_q = self.kernels.rotate(q, self.cos, self.sin).view(kv_heads, heads // kv_heads, total, dim)
        rotated_k = self.kernels.rotate(k, self.cos, self.sin)
        out = q.new_empty(total, heads, dim)
        for work in self.work:
            if native is not None and self._steps(native, work):
                qkv = torch.cat([one[:, work.start] for one in (q, k, v)]).float()
                single = torch.empty(heads, dim)
                self._step(native, layer, work, qkv, single)
                out[work.start] = single
                continue
            part = slice(work.start, work.stop)
            work.rows.append(layer, k[:, part], v[:, part], rotated_k[:, part])
            one, lse = self._session(layer, work, rotated_q[:, :, part])
            if work.watch is not None:
                work.watch(layer, q[:, part], lse)
            out[part] = one.reshape(heads, work.stop - work.start, dim).transpose(0, 1)
        return out

    def _session(self, layer: int, work: Work, q: Tensor) -> tuple[Tensor, Tensor]:
        rows, new = work.rows.rows, work.stop - work.start
        keys, values = work.rows.keys(layer, rows + new), work.rows.values[layer, :, : rows + new]
        mass: Tensor | None = None
        if new == 1:
            out, lse, mass = self.kernels.decode(q, keys, values, scale=self.scale)
            if work.frozen:
                other = self.kernels.merge([one.attend(layer, q, scale=self.scale) for one in work.frozen])
                mass = mass * torch.sigmoid(lse - other[1])  # the share of the rows
                out, lse = self.kernels.merge([(out, lse), other])
        else:
            parts = [segment.attend(layer, q, scale=self.scale) for segment in work.frozen]
            parts.append(self.kernels.extend(q, keys, values, scale=self.scale))
            out, lse = self.kernels.merge(parts)
            if work.statistics is not None:
                window = min(work.statistics.window or new, new)
                mass = self.kernels.attention_mass(
                    q[:, :, new - window :], keys, lse[:, :, new - window :], scale=self.scale
                )
        if work.statistics is not None and mass is not None and work.mass is not None:
            joined = mass.flatten(0, 1)
            joined = joined.amax(0) if work.statistics.reduce == "max" else joined.mean(0)
            work.mass[layer % work.groups].add_(joined, alpha=work.share)
        return out, lse
