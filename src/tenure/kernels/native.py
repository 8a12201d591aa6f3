"""The C kernels of this folder: built once with the user's compiler, kept in the cache folder.

They make decoding on a CPU read weights and keys at the speed of the memory, and attention of whole chunks run on
bf16 products where the CPU has them for vectors (AVX-512) and not for tiles (AMX, which torch's own kernel uses).
Where no compiler is at hand, or ``TENURE_NATIVE=0`` is set, torch's own operations do the work: slower, with the same
results to rounding.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tenure.kernels.build import BuildError, has_tiles, load

MAX_TOKENS = 8
"""Tokens up to which products on plain loops beat a matrix product."""

MAX_ROWS = 64
"""The same of products on bf16 vectors, where torch has them on vectors too."""

_TILED_ROWS = 16
"""The same where torch's products run on tiles (AMX): a guess, no such machine was at hand."""

_SINGLE = 3
"""Tokens up to which reading the weights is all that counts, so that activations may as well stay fp32."""

_BLOCK = 256
"""Keys of a step in ``flash.c``: packed keys are padded to it."""
_PART = 64
"""Rows of a session that are worth a thread of their own."""
_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int8: "i8"}
_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


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
            (name, _pointer)
            for name in ("cos", "sin", "raw", "values", "rotated", "mass", "other", "other_lse")
        ),
        *((name, _long) for name in ("capacity", "row", "mass_layer")),
        ("share", _float),
        ("mean", _int),
    )


class Steps:
    """One forward's decode steps, for :meth:`Native.attention`.

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


class Native:
    """Bindings; tensors are on the CPU and contiguous, activations fp32.

    Attributes:
        int8_span: activations that share a scale where a product with int8 weights rounds them to int8 as well; 0 where
            they stay fp32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = library.tenure_rms_norm
        self._norm.argtypes = [_pointer] * 3 + [_long] * 2 + [_float]
        self._norm_rows = library.tenure_norm_rows
        self._norm_rows.argtypes = [_pointer] * 4 + [_long] * 2 + [_float]
        self._gate_rows = library.tenure_gate_rows
        self._gate_rows.argtypes = [_pointer] * 2 + [_long] * 2
        self._rotate_rows = library.tenure_rotate_rows
        self._rotate_rows.argtypes = [_pointer] * 4 + [_long] * 6
        for function in (self._norm_rows, self._gate_rows, self._rotate_rows):
            function.restype = None
        self._linear = {dtype: getattr(library, f"tenure_linear_{name}") for dtype, name in _NAMES.items()}
        for function in self._linear.values():
            function.argtypes = [_pointer] * 5 + [_long] * 3 + [_int] * 2
        self._attention = {
            dtype: getattr(library, f"tenure_attention_{_NAMES[dtype]}")
            for dtype in (torch.bfloat16, torch.float32)
        }
        for function in self._attention.values():
            function.argtypes = [_pointer] + [_long] * 2 + [_pointer] * 3 + [_long] * 6 + [_float]
            function.restype = None
        self._ragged = {
            dtype: getattr(library, f"tenure_ragged_{_NAMES[dtype]}") for dtype in self._attention
        }
        for function in self._ragged.values():
            function.argtypes = [_pointer] * 10 + [_long] * 5 + [_float] + [_pointer] * 2
        self.int8_span = int(library.tenure_int8_span())
        if self.int8_span:
            self._product_int8 = library.tenure_product_i8
            self._product_int8.argtypes = [_pointer] * 5 + [_long] * 3 + [_int]
            self._product_int8.restype = None
        self._widest = int(library.tenure_can_attend())
        if self._widest:
            self._attend = library.tenure_attend
            self._attend.argtypes = [_pointer] * 6 + [_long] * 12 + [_float]
            self._attend.restype = None
            self._extend = library.tenure_extend
            self._extend.argtypes = [_pointer] * 7 + [_long] * 14 + [_float]
            self._extend.restype = None
            self._extend_words = library.tenure_extend_words
            self._extend_words.argtypes = [_long] * 3
            self._extend_words.restype = _long
            self._mass = library.tenure_mass
            self._mass.argtypes = [_pointer] * 4 + [_long] * 9 + [_float]
            self._rows = library.tenure_linear_rows
            self._rows.argtypes = [_pointer] * 4 + [_long] * 3 + [_int] * 2
            self._round = library.tenure_round
            self._round.argtypes = [_pointer] * 2 + [_long]

    def can_read(self, keys: Tensor, rotated: Tensor | None) -> bool:
        """Whether :meth:`attention` can work on a slab of this kind."""
        return rotated is not None and keys.device.type == "cpu" and keys.dtype in self._attention

    def can_attend(self, q: Tensor) -> bool:
        """Whether :meth:`attend` takes queries of this kind."""
        dim = q.shape[-1]
        return q.dtype == torch.bfloat16 and dim % 64 == 0 and dim <= self._widest

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, first: int, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of a run of queries, of which query ``i`` sees the keys ``0 .. first + i``.

        Args:
            q: ``[G, g, n, D]`` bf16; heads and rows may have any stride, as in ``k`` and ``v``.
            k: ``[G, m, D]``.
            v: ``[G, m, D]``.
            first: key at which the first query stands; at least ``m`` for queries that see all.
            scale: factor on the logits.

        Returns:
            Output ``[G, g, n, D]`` bf16 and log-sum-exp ``[G, g, n]`` fp32.
        """
        kv_heads, group, n, dim = q.shape
        m = k.shape[1]
        q = q.reshape(kv_heads * group, n, dim)
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(kv_heads, group, n, dim, dtype=q.dtype)
        lse = torch.empty(kv_heads, group, n)
        pack = torch.empty(kv_heads * dim * (-(-m // _BLOCK) * _BLOCK), dtype=torch.int32)
        self._attend(
            *(tensor.data_ptr() for tensor in (q, k, v, out, lse, pack)),
            *(kv_heads, group, n, m, dim),
            *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
            min(first, m),
            scale,
        )
        return out, lse

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """:meth:`attend` for few queries, the last of the keys, with the attention mass of the last ``window``.

        Args:
            q: ``[G, g, n, D]`` bf16, as in :meth:`attend`.
            k: ``[G, m, D]``, ``m >= n``.
            v: ``[G, m, D]``.
            window: queries whose mass is collected; 0 for none.
            scale: factor on the logits.

        Returns:
            Output, log-sum-exp, and mass ``[G, g, m]`` fp32 or None.
        """
        kv_heads, group, n, dim = q.shape
        m, threads = k.shape[1], torch.get_num_threads()
        q = q.reshape(kv_heads * group, n, dim)
        if q.stride(2) != 1:
            q = q.contiguous()
        parts = max(1, min(threads // math.gcd(threads, kv_heads), m // _BLOCK))
        width = -(-m // (64 * parts)) * 64
        out = torch.empty(kv_heads, group, n, dim, dtype=q.dtype)
        lse = torch.empty(kv_heads, group, n)
        mass = torch.empty(kv_heads, group, m) if window else None
        scratch = torch.empty(kv_heads * parts * self._extend_words(group * n, width, dim))
        self._extend(
            *(tensor.data_ptr() for tensor in (q, k, v, out, lse)),
            None if mass is None else mass.data_ptr(),
            scratch.data_ptr(),
            *(parts, width, kv_heads, group, n, m, dim),
            *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
            window,
            scale,
        )
        return out, lse, mass

    def attention_mass(self, q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
        """See :func:`tenure.kernels.reference.attention_mass`; strides as in :meth:`attend`."""
        kv_heads, group, n, dim = q.shape
        m = k.shape[1]
        q = q.reshape(kv_heads * group, n, dim)
        lse = lse.contiguous()
        mass = torch.empty(kv_heads, group, m)
        self._mass(
            *(tensor.data_ptr() for tensor in (q, k, lse, mass)),
            *(kv_heads, group, n, m, dim),
            *(stride for tensor in (q, k) for stride in tensor.stride()[:2]),
            scale,
        )
        return mass

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis: ``[..., width]`` fp32, weight ``[width]`` fp32."""
        width = weight.numel()
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
        return out

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
        """Root-mean-square norm of many tokens.

        Args:
            x: ``[tokens, width]`` bf16, contiguous; ``add`` is added to it in place.
            weight: ``[width]`` fp32.
            eps: added to the mean square.
            add: like ``x``, or None.
        """
        out = torch.empty_like(x)
        more = None if add is None else add.contiguous()
        self._norm_rows(
            x.data_ptr(),
            None if more is None else more.data_ptr(),
            *(tensor.data_ptr() for tensor in (weight, out)),
            *(x.numel() // x.shape[-1], x.shape[-1], eps),
        )
        return out

    def gate_rows(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[tokens, 2 * width]`` bf16, gate before up; ``[tokens, width]``."""
        x = x.contiguous()
        out = x.new_empty(len(x), x.shape[1] // 2)
        self._gate_rows(x.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def can_rotate(self, x: Tensor, cos: Tensor) -> bool:
        """Whether :meth:`rotate_rows` takes these."""
        alike = x.dim() == 3 and cos.dim() == 2 and cos.shape[0] == x.shape[1]
        return alike and x.dtype == torch.bfloat16 and x.stride(2) == 1 and cos.dtype == torch.float32

    def rotate_rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See :func:`tenure.kernels.reference.rotate`: ``x`` ``[heads, T, D]``, ``cos`` and ``sin`` ``[T, r/2]``."""
        heads, rows, dim = x.shape
        out = x.new_empty(heads, rows, dim)
        cos, sin = cos.contiguous(), sin.contiguous()
        self._rotate_rows(
            *(tensor.data_ptr() for tensor in (x, cos, sin, out)),
            *(heads, rows, dim, cos.shape[1], x.stride(0), x.stride(1)),
        )
        return out

    def linear(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        add: bool = False,
        gated: bool = False,
    ) -> Tensor:
        """``out (+)= scale * (weight @ x) + bias`` for a few tokens.

        Args:
            weight: ``[outputs, width]`` bf16, fp32 or int8.
            x: ``[tokens, width]`` fp32, at most :meth:`few` of them for speed.
            out: ``[tokens, outputs]`` fp32, half as wide if gated.
            scale: ``[outputs]`` fp32, for int8.
            bias: ``[outputs]`` fp32.
            add: add to ``out`` instead of writing it.
            gated: the first half of the outputs are a gate: ``out = silu(gate) * up``.
        """
        outputs, width = weight.shape
        if len(x) > _SINGLE and weight.dtype == torch.bfloat16 and self._widest:
            rounded = torch.empty(x.shape, dtype=torch.bfloat16)
            self._round(x.data_ptr(), rounded.data_ptr(), x.numel())
            return self.linear_rows(weight, rounded, out, bias=bias, add=add, gated=gated)
        self._linear[weight.dtype](
            weight.data_ptr(),
            None if scale is None else scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            outputs,
            width,
            add,
            gated,
        )
        return out

    def linear_rows(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        add: bool = False,
        gated: bool = False,
    ) -> Tensor:
        """:meth:`linear` on bf16 products: ``x`` ``[tokens, width]`` bf16, like the weight."""
        outputs, width = weight.shape
        self._rows(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            outputs,
            width,
            add,
            gated,
        )
        return out

    def can_multiply(self, x: Tensor) -> bool:
        """Whether :meth:`product` takes activations of this kind, and is faster than torch with the weights unpacked."""
        return bool(self.int8_span) and x.dtype == torch.bfloat16 and not has_tiles()

    def product(
        self, weight: Tensor, x: Tensor, *, scale: Tensor, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        """:meth:`linear` of many tokens, on int8 products.

        Args:
            weight: ``[outputs, width]`` int8.
            x: ``[tokens, width]`` bf16.
            scale: ``[outputs]`` fp32.
            bias: ``[outputs]`` fp32.
            gated: see :meth:`linear`.

        Returns:
            ``[tokens, outputs]`` bf16, half as wide if gated.
        """
        outputs, width = weight.shape
        x = x.contiguous()
        out = x.new_empty(len(x), outputs // 2 if gated else outputs)
        self._product_int8(
            *(tensor.data_ptr() for tensor in (weight, scale)),
            None if bias is None else bias.data_ptr(),
            *(tensor.data_ptr() for tensor in (x, out)),
            *(len(x), outputs, width, gated),
        )
        return out

    def few(self, dtype: torch.dtype) -> int:
        """Tokens up to which :meth:`linear` with a weight of this dtype is faster here than products of many tokens."""
        if dtype != torch.bfloat16 or not self._widest:
            return MAX_TOKENS
        return _TILED_ROWS if has_tiles() else MAX_ROWS

    @property
    def has_products(self) -> bool:
        """Whether :meth:`attend` and :meth:`linear_rows` are there."""
        return bool(self._widest)

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


@functools.cache
def native() -> Native | None:
    """The kernels, built if need be; None where they cannot be had."""
    if os.environ.get("TENURE_NATIVE") == "0":
        return None
    try:
        found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
        compiler = shlex.split(os.environ.get("CC", "")) or found[:1]
        return Native(load(compiler)) if compiler else None
    except (OSError, ValueError, subprocess.SubprocessError, BuildError, AttributeError) as error:
        warnings.warn(f"native kernels could not be built, decoding will be slower: {error}", stacklevel=2)
        return None
