"""The loop that every worker runs: a job on the first line of stdin, then one command a line; answers on stdout.

Stands alone, without imports of Tenure, because it also runs in the peers' environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol


class Player(Protocol):
    """What a peer must be able to do. Token ids in, token ids out."""

    def turn(self, ids: list[int], write: int) -> tuple[list[int], float]:
        """Read ``ids``, write exactly ``write`` tokens; returns them and the seconds to the first."""

    def ask(self, ids: list[int], write: int) -> list[int]:
        """Answer a question with at most ``write`` tokens and forget it."""


def memory() -> dict[str, int]:
    """Largest resident set so far of this process and its children, in bytes."""
    total = 0
    pids = [os.getpid()]
    for pid in pids:
        try:
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                pids += [int(child) for child in file.read().split()]
            with open(f"/proc/{pid}/status", encoding="ascii") as file:
                line = next(line for line in file if line.startswith("VmHWM"))
            total += 1024 * int(line.split()[1])
        except (OSError, StopIteration, ValueError):
            continue
    return {"peak_bytes": total}


def serve(make: Any) -> None:
    """Run a worker: ``make(job)`` gives the player."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; stdout is ours alone
    player: Player = make(json.loads(sys.stdin.readline()))

    def say(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        if command["do"] == "turn":
            written, first = player.turn(command["ids"], command["write"])
            seconds = time.perf_counter() - start
            say(written=len(written), seconds=seconds, first_token=first, **memory())
        else:
            say(ids=player.ask(command["ids"], command["write"]), seconds=time.perf_counter() - start)
