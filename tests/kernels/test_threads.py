"""Threads of OpenMP: their number while several Python threads compute."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tenure.kernels.threads import compute_alone, openmp

COUNT = """
import os, threading, torch
from tenure.kernels.threads import give_up_helpers
torch.set_num_threads(3)
def threads(): return len(os.listdir("/proc/self/task"))
before = threads(); big = torch.ones(4_000_000); busy = threads(); give_up_helpers(); after = threads()
print(busy - before, after - before, float(big.sum()), threads() - before)
"""

pytestmark = pytest.mark.skipif(
    openmp() is None or not Path("/proc/self/task").exists(),
    reason="no GNU OpenMP of torch's own, or no /proc",
)


def test_helpers_are_given_up_and_come_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == ["2", "0", "4000000.0", "2"]


def test_a_thread_that_computes_alone() -> None:
    found = []

    def work() -> None:
        compute_alone()
        before = len(os.listdir("/proc/self/task"))
        found.append((torch.get_num_threads(), float(torch.ones(4_000_000).sum())))
        found.append(len(os.listdir("/proc/self/task")) - before)

    here = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(1, 4_000_000.0), 0]
    assert torch.get_num_threads() == here, "other threads compute as before"
