"""transformers as a peer: the whole DynamicCache, or text truncated to the budget."""

from __future__ import annotations

import copy
import time
from inspect import signature
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaModel

from tenure.bench.peers.worker import serve

_CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
_CHUNK = 2048
"""Tokens a forward: one of a whole long prompt would need a mask of all its tokens by all its tokens."""


class TransformersPlayer:
    """Greedy decoding by hand on a DynamicCache."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        torch.set_grad_enabled(False)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
        self.model = AutoModelForCausalLM.from_pretrained(job["path"], dtype=dtype).eval()
        self.keep = job["budget"] if job["options"].get("truncate") else None
        self.closing = job["script"]["closing"]
        self.stop_ids = set(job["stop_ids"])
        self.history: list[int] = []
        self.cache = DynamicCache(config=self.model.config)

    def turn(self, ids: list[int], write: int) -> tuple[list[int], float]:
        """See :class:`~tenure.bench.peers.worker.Player`."""
        start = time.perf_counter()
        new = [*(self.closing if self.history else []), *ids]
        if self.keep is not None:
            self.cache = DynamicCache(config=self.model.config)
            best = self._read((self.history + new)[-max(self.keep, len(new)) :])
        else:
            best = self._read(new)
        self.history += new
        first_token = time.perf_counter() - start
        written = [best]
        while len(written) < write:
            written.append(self._read(written[-1:]))
        self._read(written[-1:])
        self.history += written
        return written, first_token

    def ask(self, ids: list[int], write: int) -> list[int]:
        """See :class:`~tenure.bench.peers.worker.Player`."""
        kept, self.cache = self.cache, copy.deepcopy(self.cache)
        best = self._read([*self.closing, *ids])
        written: list[int] = []
        while len(written) < write and best not in self.stop_ids:
            written.append(best)
            best = self._read([best])
        self.cache = kept
        return written

    def _read(self, ids: list[int]) -> int:
        for start in range(0, len(ids), _CHUNK):
            part = torch.tensor([ids[start : start + _CHUNK]])
            logits = self.model(part, use_cache=True, logits_to_keep=1, **{_CACHE: self.cache}).logits
        return int(logits[0, -1].argmax())


if __name__ == "__main__":
    serve(TransformersPlayer)
