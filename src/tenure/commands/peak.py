"""A session in a process of its own, whose peak of memory is held against what was said before; for the doctor.

``python -m tenure.commands.peak MODEL DTYPE WEIGHTS`` prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tenure.config import SessionConfig

BUDGET = CHUNK = 2048
_CHUNKS = 4
_LONGEST = 600
"""Seconds that the process may take."""


class PeakError(Exception):
    """The process came to no result; the text says why."""


def in_own_process(model: str, dtype: str, weights: str) -> dict[str, Any]:
    """Run :func:`measure` where nothing else has used memory before.

    Raises:
        PeakError: the process failed, was killed, or took too long.
    """
    command = [sys.executable, "-m", "tenure.commands.peak", model, dtype, weights]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LONGEST)
    except subprocess.TimeoutExpired as error:
        raise PeakError(f"the process was not done after {_LONGEST} s") from error
    except OSError as error:
        raise PeakError(f"the process did not start: {error}") from error
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip().splitlines()
        raise PeakError(said[-1] if said else f"the process ended with {done.returncode} and said nothing")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(model: str, dtype: str, weights: str = "auto") -> dict[str, Any]:
    """Load a model, say what a session needs, run it, and read the peak.

    Returns:
        Bytes: ``base`` (the process with its libraries and the tokenizer), ``weights``, ``slab``, ``activations``, their
        sum ``stated``, and ``peak``, the largest resident set while the session ran; 0 where the system does not tell
        (only Linux does).
    """
    import torch

    from tenure.commands.options import quiet_transformers
    from tenure.engine import Engine
    from tenure.footprint import footprint

    quiet_transformers()
    engine = Engine.load(model, dtype=dtype, weights=weights)
    need = footprint(engine, SessionConfig(budget=BUDGET, chunk=CHUNK, policy="h2o"))
    base = _status("VmRSS") - need.weights
    known = _reset_peak()
    session = engine.session(budget=BUDGET, chunk=CHUNK, policy="h2o")
    generator = torch.Generator().manual_seed(0)
    for _ in range(_CHUNKS):
        session.append_ids(torch.randint(0, engine.vocabulary, (CHUNK,), generator=generator).tolist())
    session.force([1] * 8)
    peak = _status("VmHWM") if known else 0
    return {"base": base, **asdict(need), "stated": base + need.total, "peak": peak}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:4])))
