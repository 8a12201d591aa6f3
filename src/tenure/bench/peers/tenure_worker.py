"""Tenure as a peer."""

from __future__ import annotations

import time
from typing import Any

from tenure import Engine, Plan, Step
from tenure.bench.peers.worker import serve


class TenurePlayer:
    """A session with a plan: the questions at the end are its steps, one behind the turns."""

    def __init__(self, job: dict[str, Any]) -> None:
        options = job["options"]
        self.engine = Engine.load(
            job["model"], threads=job["threads"], weights=options.get("weights", "auto")
        )
        script = job["script"]
        steps = [Step("read")]
        steps += [Step(f"question-{number}", tuple(reads)) for number, reads in enumerate(script["reads"])]
        self.session = self.engine.session(
            budget=job["budget"], chunk=options.get("chunk", 2048), policy="foresight", plan=Plan(steps)
        )
        self.closing = script["closing"]
        self.spans = script["spans"]
        self.stop_ids = set(job["stop_ids"])
        self.number = 0

    def turn(self, ids: list[int], write: int) -> tuple[list[int], float]:
        """See :class:`~tenure.bench.peers.worker.Player`."""
        start = time.perf_counter()
        if self.number:
            self.session.queue_ids(self.closing)
        at = 0
        for first, stop, span in self.spans[self.number]:
            self.session.queue_ids(ids[at:first])
            self.session.queue_ids(ids[first:stop], span=span)
            at = stop
        self.session.queue_ids(ids[at:])
        self.engine.drain([self.session])
        self.number += 1
        written = [self._best()]
        first_token = time.perf_counter() - start
        while len(written) < write:
            self.session.force(written[-1:])
            written.append(self._best())
        self.session.force(written[-1:])
        return written, first_token

    def _best(self) -> int:
        assert self.session.logits is not None
        return int(self.session.logits.argmax())

    def ask(self, ids: list[int], write: int) -> list[int]:
        """See :class:`~tenure.bench.peers.worker.Player`."""
        kept, self.session = self.session, self.session.fork()
        try:
            self.session.append_ids([*self.closing, *ids])
            written: list[int] = []
            while len(written) < write and (token := self._best()) not in self.stop_ids:
                written.append(token)
                self.session.force([token])
            return written
        finally:
            self.session = kept


if __name__ == "__main__":
    serve(TenurePlayer)
