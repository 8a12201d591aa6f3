"""Attention, rotation and attention statistics, one module a device, all with the reference's signatures."""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """The kernel module for a device: ``cpu`` or ``cuda``.

    Each has ``rotate``, ``attend``, ``decode``, ``attention_mass`` and ``merge``.
    """
    if device.type == "cuda":
        from tenure.kernels import cuda

        return cuda
    from tenure.kernels import cpu

    return cpu
