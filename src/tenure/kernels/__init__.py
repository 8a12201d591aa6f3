"""Attention, rotation and attention statistics, one module a device, all with the reference's signatures."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor


class Kernels(Protocol):
    """What a kernel module has; see :mod:`tenure.kernels.reference` and :mod:`tenure.kernels.cpu`."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate by position."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of one block and its log-sum-exp."""

    def attend_weighted(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one kv head's queries over keys with log-multiplicities."""

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attention of the newest tokens over a segment that ends with them, its log-sum-exp, perhaps the mass."""

    def decode(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of one query, its log-sum-exp and its probabilities."""

    def attention_mass(self, q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
        """Softmax mass each key received."""

    def merge(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Join blocks by their log-sum-exp."""


def kernels_for(device: torch.device) -> Kernels:
    """The kernel module for a device: ``cpu`` or ``cuda``."""
    if device.type == "cuda":
        from tenure.kernels import cuda

        return cast("Kernels", cuda)
    from tenure.kernels import cpu

    return cast("Kernels", cpu)
