"""``RowSegment``: the appendable, evictable part of a session's cache, on one slab allocated once.

Rows are the same in number for every layer and kv head and lie in logical order. Which token a row holds may
differ between layers; the ledger knows. Keys are raw; the rotated copy is derived from them and rebuilt whenever
positions change, so no rounding ever compounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tenure.errors import IntegrityError
from tenure.kernels import Kernels


class CosSin(Protocol):
    """The angles of positions."""

    def __call__(self, positions: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Positions ``[...]`` to cosines and sines ``[..., r/2]``, fp32, as a layer rotates them."""


@dataclass(frozen=True)
class Layout:
    """Shape of a model's keys and values: ``layers`` x ``kv_heads`` x rows x ``head_dim``.

    Args:
        layers: of the model.
        kv_heads: of each layer.
        head_dim: channels of a head.
        dtype: of keys and values.
        device: where they are.
        windows: for each layer how many tokens a query sees, itself included, None for all; empty where all see all.
        alike: all layers see all tokens and rotate them by the same angles.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()
    alike: bool = True

    @cached_property
    def judges(self) -> frozenset[int]:
        """Layers whose attention tells what one kept set for all should hold: those that see all, if any do."""
        seeing = [layer for layer, window in enumerate(self.windows) if window is None]
        return frozenset(seeing or range(self.layers))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers: what an unbounded cache grows by."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Segment(Protocol):
    """A block of cached keys and values that queries can attend to."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def attend(self, layer: int, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of ``[G, g, n, D]`` rotated queries over the whole segment, and its log-sum-exp."""


class RowSegment:
    """Raw keys, values and a rotated copy of the keys, on a fixed slab.

    Args:
        layout: the model's shape.
        capacity: slots a (layer, kv head).
        positions: ``[layers or 1, capacity]``, the ledger's rotary positions, shared and read only here.
        cos_sin: angles of positions.
        kernels: the kernel module of the device.
        copy: keep the rotated copy; otherwise keys are rotated whenever they are read.
    """

    def __init__(
        self,
        layout: Layout,
        capacity: int,
        positions: Tensor,
        cos_sin: CosSin,
        kernels: Kernels,
        *,
        copy: bool = True,
    ) -> None:
        self.layout = layout
        self.capacity = capacity
        self.rows = 0
        self._positions = positions
        self._cos_sin = cos_sin
        self._kernels = kernels
        shape = (layout.layers, layout.kv_heads, capacity, layout.head_dim)
        self.raw = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        self.values = torch.zeros_like(self.raw)
        self.rotated = torch.zeros_like(self.raw) if copy else None

    def _tensors(self) -> list[Tensor]:
        return [self.raw, self.values] if self.rotated is None else [self.raw, self.values, self.rotated]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the rotated copy included."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def append(self, layer: int, k: Tensor, v: Tensor, rotated: Tensor) -> None:
        """Write the rows of new tokens behind the committed ones; they count only once committed.

        Args:
            layer: which layer.
            k: raw keys ``[G, n, D]``.
            v: values ``[G, n, D]``.
            rotated: the keys at their positions ``[G, n, D]``.
        """
        rows = slice(self.rows, self.rows + k.shape[1])
        if rows.stop > self.capacity:
            raise IntegrityError(f"{rows.stop} rows do not fit a slab of {self.capacity}")
        self.raw[layer, :, rows] = k
        self.values[layer, :, rows] = v
        if self.rotated is not None:
            self.rotated[layer, :, rows] = rotated

    def commit(self, count: int) -> None:
        """Count ``count`` rows that every layer has appended."""
        self.rows += count

    def keys(self, layer: int, stop: int) -> Tensor:
        """Rotated keys of the first ``stop`` rows, ``[G, stop, D]``; a view where the copy is kept."""
        if self.rotated is not None:
            return self.rotated[layer, :, :stop]
        cos, sin = self._cos_sin(self._positions[layer % len(self._positions), :stop], layer)
        return self._kernels.rotate(self.raw[layer, :, :stop], cos, sin)

    def slab(self) -> tuple[Tensor, Tensor, Tensor]:
        """Raw keys, values and rotated keys, ``[layers, G, capacity, D]``, with room for one more row.

        Only with the rotated copy.
        """
        if self.rotated is None:
            raise IntegrityError("the session keeps no rotated copy of its keys")
        if self.rows >= self.capacity:
            raise IntegrityError(f"{self.rows + 1} rows do not fit a slab of {self.capacity}")
        return self.raw, self.values, self.rotated

    def attend(self, layer: int, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See :class:`Segment`."""
        return self._kernels.attend(
            q, self.keys(layer, self.rows), self.values[layer, :, : self.rows], causal=False, scale=scale
        )

    def fill(self, keys: Tensor, values: Tensor, odd: tuple[Tensor, Tensor] | None = None) -> None:
        """Take rows that were saved as the only ones; positions are the ledger's already.

        Args:
            keys: raw keys ``[layers, kv_heads, rows, D]``.
            values: like ``keys``.
            odd: what :meth:`odd_rows` gave.
        """
        self.rows = keys.shape[2]
        self.raw[:, :, : self.rows] = keys
        self.values[:, :, : self.rows] = values
        self.renumber()
        if self.rotated is not None and odd is not None:
            self.rotated[:, :, odd[0]] = odd[1].to(self.rotated)

    def odd_rows(self) -> tuple[Tensor, Tensor] | None:
        """Rows of the rotated copy that a rebuild would not give to the bit: another kernel has rotated them.

        Returns:
            Row numbers ``[n]`` and their rotated keys ``[layers, kv_heads, n, D]``; None without a copy.
        """
        if self.rotated is None:
            return None
        odd = torch.zeros(self.rows, dtype=torch.bool, device=self.raw.device)
        for layer in range(self.layout.layers):
            odd |= (self._rotated(layer) != self.rotated[layer, :, : self.rows]).any(-1).any(0)
        return odd.nonzero().flatten(), self.rotated[:, :, : self.rows][:, :, odd]

    def hide(self, count: int) -> list[Tensor]:
        """Take the newest rows out of sight, to be overwritten; what they held, for :meth:`unhide`."""
        saved = [tensor[:, :, self.rows - count : self.rows].clone() for tensor in self._tensors()]
        self.rows -= count
        return saved

    def unhide(self, saved: list[Tensor]) -> None:
        """Put hidden rows back."""
        count = saved[0].shape[2]
        for tensor, rows in zip(self._tensors(), saved, strict=True):
            tensor[:, :, self.rows : self.rows + count] = rows
        self.rows += count

    def keep(self, index: Tensor, *, poison: bool = False) -> None:
        """Keep the rows ``index`` ``[layers or 1, kept]``, ascending, and free the rest.

        Args:
            index: row numbers, one kept set a layer or one for all.
            poison: fill freed rows with NaN, so that a read of one shows in the output.
        """
        kept = index.shape[1]
        for layer in range(self.layout.layers):
            rows = index[layer % len(index)]
            # Rows before the first gap do not move.
            fixed = int((rows == torch.arange(kept, device=rows.device)).sum())
            for tensor in self._tensors():
                if fixed < kept:
                    tensor[layer, :, fixed:kept] = tensor[layer].index_select(1, rows[fixed:])
                if poison:
                    tensor[layer, :, kept:] = float("nan")
        self.rows = kept

    def copy(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Raw keys and values of some rows, ``[layers, kv_heads, stop - start, D]``, copied to host memory."""
        return _to_host(self.raw[:, :, start:stop]), _to_host(self.values[:, :, start:stop])

    def copy_runs(self, starts: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Like :meth:`copy`, of ``count`` rows that begin elsewhere in each group of layers."""
        runs = [starts[layer % len(starts)] for layer in range(self.layout.layers)]
        keys, values = (
            torch.stack([tensor[layer, :, run : run + count].cpu() for layer, run in enumerate(runs)])
            for tensor in (self.raw, self.values)
        )
        return keys, values

    def splice(self, order: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows that had left back among the others. The rotated copy is stale until :meth:`renumber`.

        Args:
            order: ``[layers or 1, rows + n]``, for each row its place in the rows followed by the new ones.
            keys: raw keys ``[layers, kv_heads, n, D]``.
            values: like ``keys``.
        """
        kept, total = self.rows, order.shape[1]
        if total > self.capacity:
            raise IntegrityError(f"{total} rows do not fit a slab of {self.capacity}")
        for tensor, new in ((self.raw, keys), (self.values, values)):
            tensor[:, :, kept:total] = new
            for layer in range(self.layout.layers):
                index = order[layer % len(order)]
                tensor[layer, :, :total] = tensor[layer].index_select(1, index)
        self.rows = total

    def value_norms(self, rows: slice, groups: int) -> Tensor:
        """Norms of the values of some rows, a mean over kv heads and the layers of a group, ``[groups, n]`` fp32."""
        norms: Tensor = torch.linalg.vector_norm(self.values[:, :, rows].float(), dim=-1).mean(1)
        return norms if groups > 1 else norms.mean(0, keepdim=True)

    def renumber(self) -> None:
        """Rebuild the rotated copy from the raw keys after positions have changed or rows came back."""
        if self.rotated is None:
            return
        for layer in range(self.layout.layers):
            self.rotated[layer, :, : self.rows] = self._rotated(layer)

    def _rotated(self, layer: int) -> Tensor:
        cos, sin = self._cos_sin(self._positions[layer % len(self._positions), : self.rows], layer)
        return self._kernels.rotate(self.raw[layer, :, : self.rows], cos, sin)

    def grow(self, capacity: int, positions: Tensor) -> None:
        """Move to a slab of another size, which holds the rows."""
        extra = capacity - self.capacity
        self.raw, self.values, *rest = (torch.nn.functional.pad(t, (0, 0, 0, extra)) for t in self._tensors())
        self.rotated = rest[0] if rest else None
        self.capacity = capacity
        self._positions = positions

    def free(self) -> None:
        """Give the memory back; nothing can be appended or attended to afterwards."""
        self.capacity = 0
        self.raw, self.values, *rest = (tensor.new_empty(0) for tensor in self._tensors())
        self.rotated = rest[0] if rest else None

    def clone(self, positions: Tensor) -> RowSegment:
        """An independent copy of the slab that reads its positions from ``positions``."""
        copy = RowSegment.__new__(RowSegment)
        copy.__dict__.update(self.__dict__)
        copy.raw, copy.values = self.raw.clone(), self.values.clone()
        copy.rotated = None if self.rotated is None else self.rotated.clone()
        copy._positions = positions
        return copy


def _to_host(rows: Tensor) -> Tensor:
    """A copy in host memory, made layer by layer: a device gathers what it sends in memory of its own."""
    copy = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
    for layer in range(len(rows)):
        copy[layer] = rows[layer]
    return copy
