"""Bindings of decoding: one new token of each session, over its slab and its frozen entries."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tenure.kernels.binding import FLOAT, INT, LONG, NAMES, POINTER, bind

_PART = 64
"""Rows of a session that are worth a thread of their own."""


@dataclass(frozen=True, eq=False)
class Step:
    """One session's part of a decode step.

    Args:
        slab: raw keys, values and rotated keys, ``[layers, kv_heads, capacity, D]``.
        row: where the token goes; it sees the rows before it and itself.
        cos: ``[r/2]`` fp32 at the token's position.
        sin: like ``cos``.
        mass: ``[groups, row + 1]`` fp32, of one group or one a layer, that gets ``share`` times the attention mass
            added, or None.
        share: see ``mass``.
        mean: join query heads by their mean, else by their maximum.
    """

    slab: tuple[Tensor, Tensor, Tensor]
    row: int
    cos: Tensor
    sin: Tensor
    mass: Tensor | None = None
    share: float = 1.0
    mean: bool = False


class _Step(ctypes.Structure):
    """``Step`` of ``native.c``."""

    _fields_ = (
        *(
            (name, POINTER)
            for name in ("cos", "sin", "raw", "values", "rotated", "mass", "other", "other_lse")
        ),
        *((name, LONG) for name in ("capacity", "row", "mass_layer")),
        ("share", FLOAT),
        ("mean", INT),
    )


class Steps:
    """One forward's decode steps, for :meth:`Decoding.attention`.

    Args:
        steps: of each session, at least one; all slabs have the same layers, kv heads and width.
        heads: query heads.
    """

    def __init__(self, steps: Sequence[Step], heads: int) -> None:
        self._steps = tuple(steps)  # their tensors must stay
        self.heads = heads
        raw = steps[0].slab[0]
        self.dtype = raw.dtype
        _, self.kv_heads, _, self.dim = raw.shape
        self.half = steps[0].cos.shape[-1]
        longest = max(step.row for step in steps) + 1
        threads = torch.get_num_threads()
        self.parts = 1 if len(steps) % threads == 0 else max(1, min(threads, longest // _PART))
        self.width = -(-longest // self.parts)
        self.scratch = torch.empty(len(steps) * self.parts * heads * (self.width + self.dim + 2))
        self.known = (_Step * len(steps))(*(self._described(step) for step in steps))

    @staticmethod
    def _described(step: Step) -> _Step:
        mass = step.mass
        return _Step(
            *(tensor.data_ptr() for tensor in (step.cos, step.sin, *step.slab)),
            *(None if mass is None else mass.data_ptr(), None, None),
            *(step.slab[0].shape[2], step.row),
            0 if mass is None or len(mass) == 1 else mass.stride(0),
            step.share,
            step.mean,
        )


class Decoding:
    """Attention of one token a session; tensors are on the CPU and contiguous, activations fp32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        dtypes = (torch.bfloat16, torch.float32)
        of_steps = [POINTER] + [LONG] * 2 + [POINTER] * 3 + [LONG] * 6 + [FLOAT]
        of_entries = [POINTER] * 10 + [LONG] * 5 + [FLOAT] + [POINTER] * 2
        self._attention = {
            dtype: bind(library, f"tenure_attention_{NAMES[dtype]}", of_steps) for dtype in dtypes
        }
        self._ragged = {dtype: bind(library, f"tenure_ragged_{NAMES[dtype]}", of_entries) for dtype in dtypes}

    def can_read(self, keys: Tensor, rotated: Tensor | None) -> bool:
        """Whether :meth:`attention` can work on a slab of this kind."""
        return rotated is not None and keys.device.type == "cpu" and keys.dtype in self._attention

    def attention(
        self,
        steps: Steps,
        layer: int,
        qkv: Tensor,
        out: Tensor,
        *,
        scale: float,
        others: Sequence[tuple[Tensor, Tensor] | None] = (),
    ) -> None:
        """Append one token of each session to a layer's slab and attend.

        Args:
            steps: of this forward.
            layer: which layer.
            qkv: ``[sessions, heads + 2 kv_heads, D]`` fp32, unrotated.
            out: ``[sessions, heads, D]`` fp32.
            scale: factor on the logits.
            others: of each session, attention over further keys, from :meth:`ragged`, to be joined with; none by
                default.
        """
        for known, other in zip(steps.known, others, strict=False):
            known.other, known.other_lse = (
                (None, None) if other is None else (one.data_ptr() for one in other)
            )
        self._attention[steps.dtype](
            steps.known,
            len(steps.known),
            layer,
            qkv.data_ptr(),
            out.data_ptr(),
            steps.scratch.data_ptr(),
            *(steps.parts, steps.width, steps.heads, steps.kv_heads, steps.dim, steps.half),
            scale,
        )

    def ragged(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        entries: tuple[Tensor, Tensor, Tensor],
        offsets: Tensor,
        longest: int,
        *,
        scale: float,
        other: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One token's attention over frozen entries of a layer.

        Args:
            qkv: ``[heads + 2 kv_heads, D]`` fp32, unrotated.
            cos: ``[r/2]`` fp32 at the token's position.
            sin: like ``cos``.
            entries: rotated keys and values ``[N, D]``, log-multiplicities ``[N]``.
            offsets: ``[kv_heads + 1]`` int64, where each head's entries begin.
            longest: of all heads.
            scale: factor on the logits.
            other: attention over further keys, to be joined with.

        Returns:
            ``[heads, D]`` fp32 and the log-sum-exp ``[heads]``, -1e30 without a key.
        """
        keys, values, bias = entries
        kv_heads, dim = len(offsets) - 1, keys.shape[1]
        heads = len(qkv) - 2 * kv_heads
        out, lse = torch.empty(heads, dim), torch.empty(heads)
        scratch = torch.empty(heads, longest)
        self._ragged[keys.dtype](
            *(one.data_ptr() for one in (qkv, cos, sin, keys, values, bias, offsets, out, lse, scratch)),
            heads,
            kv_heads,
            dim,
            cos.shape[-1],
            longest,
            scale,
            *(None, None) if other is None else (other[0].data_ptr(), other[1].data_ptr()),
        )
        return out, lse
