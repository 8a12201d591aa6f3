"""Bindings of what lies between attention: products with weights, norms, gates and rotations, of few tokens or many."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tenure.kernels.binding import FLOAT, INT, LONG, NAMES, POINTER, bind
from tenure.kernels.build import has_tiles

MAX_TOKENS = 8
"""Tokens up to which products on plain loops beat a matrix product."""

MAX_ROWS = 64
"""The same of products on bf16 vectors, where torch has them on vectors too."""

_TILED_ROWS = 16
"""The same where torch's products run on tiles (AMX): a guess, no such machine was at hand."""

_SINGLE = 3
"""Tokens up to which reading the weights is all that counts, so that activations may as well stay fp32."""


class Products:
    """Tensors are on the CPU and contiguous, activations fp32 where nothing else is said.

    Attributes:
        int8_span: activations that share a scale where a product with int8 weights rounds them to int8 as well; 0 where
            they stay fp32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = bind(library, "tenure_rms_norm", [POINTER] * 3 + [LONG] * 2 + [FLOAT])
        self._norm_rows = bind(library, "tenure_norm_rows", [POINTER] * 4 + [LONG] * 2 + [FLOAT])
        self._gate_rows = bind(library, "tenure_gate_rows", [POINTER] * 2 + [LONG] * 2)
        self._rotate_rows = bind(library, "tenure_rotate_rows", [POINTER] * 4 + [LONG] * 6)
        of_linear = [POINTER] * 5 + [LONG] * 3 + [INT] * 2
        self._linear = {
            dtype: bind(library, f"tenure_linear_{name}", of_linear) for dtype, name in NAMES.items()
        }
        self.int8_span = int(library.tenure_int8_span())
        if self.int8_span:
            self._product_int8 = bind(library, "tenure_product_i8", [POINTER] * 5 + [LONG] * 3 + [INT])
        self._widest = int(library.tenure_can_attend())
        if self._widest:
            self._rows = bind(library, "tenure_linear_rows", [POINTER] * 4 + [LONG] * 3 + [INT] * 2)
            self._round = bind(library, "tenure_round", [POINTER] * 2 + [LONG])

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
        """Whether the processor has bf16 products, so that :meth:`linear_rows` and attention on them are there."""
        return bool(self._widest)
