"""A projection's weight in one of its storage forms: as loaded, or int8 with one scale an output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from tenure.kernels.native import Native, native


@dataclass(frozen=True)
class Projection:
    """``x @ weight.T + bias``.

    Args:
        weight: ``[outputs, width]``, in the model's dtype or int8.
        bias: ``[outputs]`` in the model's dtype, or None.
        scale: ``[outputs]`` fp32 for int8, else None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, int8: bool) -> Projection:
        """Store a weight as it is, or quantised to int8, symmetric, by the largest value of each output."""
        if not int8:
            return cls(weight, bias)
        scale = weight.abs().amax(1).float().clamp(min=1e-12) / 127
        packed = torch.empty(weight.shape, dtype=torch.int8)
        for start in range(0, len(weight), 4096):  # a block at a time: the fp32 form of it all is large
            part = slice(start, start + 4096)
            packed[part] = (weight[part].float() / scale[part, None]).round().to(torch.int8)
        return cls(packed, bias, scale)

    @property
    def outputs(self) -> int:
        """Width of the result."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``[tokens, width]`` in the model's dtype. int8 is unpacked for the length of the product."""
        weight = self.weight
        kernels = native() if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else None
        if kernels is not None and kernels.has_products and len(x) <= kernels.few(weight.dtype):
            out = torch.empty(len(x), self.outputs)
            return kernels.linear_rows(weight, x.contiguous(), out, bias=self._bias).to(x.dtype)
        if self.scale is not None:
            weight = torch.mul(weight, self.scale.to(x.dtype)[:, None])
        return functional.linear(x, weight, self.bias)

    def few(
        self, kernels: Native, x: Tensor, out: Tensor, *, add: bool = False, gated: bool = False
    ) -> Tensor:
        """Apply to a few fp32 tokens; see :meth:`~tenure.kernels.native.Native.linear`."""
        return kernels.linear(self.weight, x, out, scale=self.scale, bias=self._bias, add=add, gated=gated)

    @cached_property
    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.float()
