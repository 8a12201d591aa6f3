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

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[outputs, width]`` that it stands for; a copy where it is stored in int8."""
        if self.scale is None:
            return self.weight.to(dtype)
        return torch.mul(self.weight, self.scale.to(dtype)[:, None])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``[tokens, width]`` in the model's dtype. int8 is unpacked for one product where no kernel takes it.

        torch's bf16 product on CPUs compiles code for each number of tokens and keeps it, megabytes a number. So it gets
        multiples of what our kernel does well, and the kernel the rest.
        """
        weight = self.weight
        kernels = native() if weight.device.type == "cpu" else None
        if self.scale is not None:
            if kernels is not None and len(x) <= kernels.few(weight.dtype):
                return self.few(kernels, x.float(), torch.empty(len(x), self.outputs)).to(x.dtype)
            if kernels is not None and kernels.can_multiply(x):
                return kernels.product(weight, x, scale=self.scale, bias=self._bias)
            weight = self.dense(x.dtype)
        kernels = kernels if weight.dtype == torch.bfloat16 else None
        if kernels is None or not kernels.has_products:
            return functional.linear(x, weight, self.bias)
        few = kernels.few(weight.dtype)
        most = len(x) - len(x) % few if len(x) > few else 0
        if most == len(x):
            return functional.linear(x, weight, self.bias)
        out = x.new_empty(len(x), self.outputs)
        if self.bias is None:
            torch.mm(x[:most], weight.t(), out=out[:most])
        else:
            torch.addmm(self.bias, x[:most], weight.t(), out=out[:most])
        rest = torch.empty(len(x) - most, self.outputs)
        out[most:] = kernels.linear_rows(weight, x[most:].contiguous(), rest, bias=self._bias)
        return out

    def gated(self, kernels: Native, x: Tensor) -> Tensor:
        """``silu(gate) * up`` where the outputs are a gate and an up projection, one behind the other.

        Args:
            kernels: of this CPU.
            x: ``[tokens, width]`` bf16.
        """
        if self.scale is not None and kernels.can_multiply(x):
            return kernels.product(self.weight, x, scale=self.scale, bias=self._bias, gated=True)
        return kernels.gate_rows(self(x))

    def few(
        self, kernels: Native, x: Tensor, out: Tensor, *, add: bool = False, gated: bool = False
    ) -> Tensor:
        """Apply to a few fp32 tokens; see :meth:`~tenure.kernels.native.Native.linear`."""
        return kernels.linear(self.weight, x, out, scale=self.scale, bias=self._bias, add=add, gated=gated)

    @cached_property
    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.float()
