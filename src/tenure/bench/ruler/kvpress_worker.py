"""kvpress as a peer: stands alone, without imports of Tenure, because it runs in an environment of its own.

One JSON object a line on stdin, one on stdout. The first line is the job, then come prompts and cells.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def press_of(name: str, removed: float) -> Any:
    """A press by name, for the share of the entries that it removes."""
    makers = {
        "kvpress-snapkv": lambda: kvpress.SnapKVPress(compression_ratio=removed),
        "kvpress-expected": lambda: kvpress.ExpectedAttentionPress(compression_ratio=removed),
        "kvpress-adakv-expected": lambda: kvpress.AdaKVPress(
            kvpress.ExpectedAttentionPress(compression_ratio=removed)
        ),
        "kvpress-adakv-snapkv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=removed)),
        "kvpress-pyramidkv": lambda: kvpress.PyramidKVPress(compression_ratio=removed),
        "kvpress-criticalkv": lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(compression_ratio=removed)),
        "kvpress-lagkv": lambda: kvpress.LagKVPress(compression_ratio=removed),
        "kvpress-keydiff": lambda: kvpress.KeyDiffPress(compression_ratio=removed),
        "kvpress-knorm": lambda: kvpress.KnormPress(compression_ratio=removed),
        "kvpress-tova": lambda: kvpress.TOVAPress(compression_ratio=removed),
        "kvpress-streaming": lambda: kvpress.StreamingLLMPress(compression_ratio=removed),
        "kvpress-kvzip": lambda: kvpress.KVzipPress(compression_ratio=removed),
    }
    return makers[name]()


class Player:
    """Greedy decoding by hand on a compressed cache."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        torch.set_grad_enabled(False)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
        self.model = AutoModelForCausalLM.from_pretrained(job["path"], torch_dtype=dtype).eval()
        self.stops = set(job["stop_ids"])
        self.prefill: dict[int, float] = {}

    def read(self, ids: list[int], press: Any) -> tuple[Any, float]:
        """A cache of the ids, compressed if there is a press, and the seconds."""
        cache = DynamicCache()
        started = time.perf_counter()
        with press(self.model) if press is not None else nullcontext():
            self.model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        return cache, time.perf_counter() - started

    def cell(
        self, before: list[int], question: list[int], most: int, name: str, ratio: float, aware: bool
    ) -> Any:
        """Compress and answer.

        With the question known, all of it but the last token is read with the context, as kvpress does it.
        """
        known = before + question[:-1] if aware else before
        rest = question[-1:] if aware else question
        if len(known) not in self.prefill:
            self.read(known, None)  # warms up
            self.prefill[len(known)] = self.read(known, None)[1]
        press = None if name == "kvpress-full" else press_of(name, 1 - 1 / ratio)
        cache, seconds = self.read(known, press)
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return {
            "ids": self.answer(cache, len(known), rest, most),
            "build_s": max(0.0, seconds - self.prefill[len(known)]),
            "prefill_s": self.prefill[len(known)],
            # Head-wise presses only hide entries: the cache is as large as before.
            "kv_bytes": kept,
        }

    def answer(self, cache: Any, start: int, question: list[int], most: int) -> list[int]:
        """Greedy tokens behind a question, positions going on from the whole context's length."""
        cache = copy.deepcopy(cache)
        ids = question
        written: list[int] = []
        while len(written) < most:
            places = torch.arange(start, start + len(ids))[None]
            out = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=places)
            start += len(ids)
            best = int(out.logits[0, -1].argmax())
            if best in self.stops:
                break
            written.append(best)
            ids = [best]
        return written


def main() -> None:
    """Answer commands until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; stdout is ours alone
    player = Player(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True, "version": getattr(kvpress, "__version__", None)}), file=out, flush=True)
    prompt: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("do") == "prompt":
            prompt = command
            answer: dict[str, Any] = {"ready": True}
        else:
            try:
                answer = player.cell(**prompt, **command)
            except Exception as error:  # one press failing must not end the run
                answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
