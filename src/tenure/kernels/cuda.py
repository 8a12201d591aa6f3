"""Attention on CUDA devices: torch's fused kernels that give the log-sum-exp, with the same signatures.

Half precision takes the flash kernel where the device has one (Ampere and later), fp32 and older devices the
memory-efficient one. What neither takes, odd head sizes above all, is computed in plain torch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tenure.kernels import common
from tenure.kernels.common import attend_weighted, decode
from tenure.kernels.reference import in_two_calls, merge, rotate

__all__ = ["attend", "attend_weighted", "attention_mass", "decode", "extend", "merge", "rotate"]

_WIDEST_FLASH = 256
"""Largest head size of the flash kernel."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See :func:`tenure.kernels.reference.attend`."""
    kernel = _fused(q)
    if kernel is None:
        return common.attend(q, k, v, causal=causal, scale=scale)
    heads = (k.shape[0], q.shape[1], k.shape[1], k.shape[2])
    keys, values = k[:, None].expand(heads), v[:, None].expand(heads)
    if kernel == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q, keys, values, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, causal, scale=scale
        )[:2]
    return out, lse[..., : q.shape[2]]  # both kernels may pad the queries


def _fused(q: Tensor) -> Literal["flash", "efficient"] | None:
    """Which of torch's fused kernels takes queries of this dtype and head size on their device, if one does."""
    dim, half = q.shape[-1], q.dtype != torch.float32
    if dim % (8 if half else 4):
        return None
    if not half:
        return "efficient"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "efficient" if q.dtype == torch.float16 else None
    return "flash" if dim <= _WIDEST_FLASH else "efficient"


def extend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`tenure.kernels.reference.extend`."""
    return *in_two_calls(attend, q, k, v, scale), None


def attention_mass(q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """See :func:`tenure.kernels.reference.attention_mass`; in fp32, some keys at a time."""
    return common.attention_mass(q.float(), k, lse, scale=scale)
