"""Attention on CUDA devices: torch's fused kernels that give the log-sum-exp, with the same signatures.

Half precision takes the flash kernel, fp32 the memory-efficient one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tenure.kernels import reference
from tenure.kernels.reference import attend_weighted, attention_mass, in_two_calls, merge, rotate

__all__ = ["attend", "attend_weighted", "attention_mass", "decode", "extend", "merge", "rotate"]


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See :func:`tenure.kernels.reference.attend`."""
    heads = (k.shape[0], q.shape[1], k.shape[1], k.shape[2])
    keys, values = k[:, None].expand(heads), v[:, None].expand(heads)
    if q.dtype in (torch.float16, torch.bfloat16):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q, keys, values, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, causal, scale=scale
        )[:2]
    return out, lse[..., : q.shape[2]]  # both kernels may pad the queries


def extend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`tenure.kernels.reference.extend`."""
    return *in_two_calls(attend, q, k, v, scale), None


def decode(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`tenure.kernels.cpu.decode`."""
    out, lse = reference.attend(q, k, v, causal=False, scale=scale)
    return out, lse, attention_mass(q, k, lse, scale=scale)
