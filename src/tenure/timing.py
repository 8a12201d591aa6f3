"""A clock for work that a device may still be doing when the call that began it has returned."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock that only goes forward, read when all work that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
