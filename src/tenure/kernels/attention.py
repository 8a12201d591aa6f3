"""Bindings of attention of whole chunks on bf16 products (``flash.c``)."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from tenure.kernels.binding import FLOAT, LONG, POINTER, bind

_BLOCK = 256
"""Keys of a step in ``flash.c``: packed keys are padded to it."""


class Attention:
    """Attention of many queries; tensors are on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._widest = int(library.tenure_can_attend())
        if self._widest:
            self._attend = bind(library, "tenure_attend", [POINTER] * 6 + [LONG] * 12 + [FLOAT])
            self._extend = bind(library, "tenure_extend", [POINTER] * 7 + [LONG] * 14 + [FLOAT])
            self._extend_words = bind(library, "tenure_extend_words", [LONG] * 3, LONG)
            self._mass = bind(library, "tenure_mass", [POINTER] * 4 + [LONG] * 9 + [FLOAT])

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
