"""kvpress as a peer: stands alone, without imports of Tenure, because it runs in an environment of its own.

One JSON object a line on stdin, one on stdout. The first line is the job, then come prompts and cells.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
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
        "kvpress-lagkv": lambda: kvpress.LagKVPress(compression_ratio=removed),
        "kvpress-keydiff": lambda: kvpress.KeyDiffPress(compression_ratio=removed),
        "kvpress-knorm": lambda: kvpress.KnormPress(compression_ratio=removed),
        "kvpress-tova": lambda: kvpress.TOVAPress(compression_ratio=removed),
        "kvpress-streaming": lambda: kvpress.StreamingLLMPress(compression_ratio=removed),
        "kvpress-kvzip": lambda: kvpress.KVzipPress(compression_ratio=removed),
    }
    return makers[name]()


class Reading:
    """A context that was read once, with what every attention layer was called with.

    Presses work in hooks behind each attention layer and change nothing but the cache, so they can be run behind
    the reading as well, any number of them on the same one.
    """

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.model, self.ids = model, ids
        self.cache = DynamicCache()
        self._calls: list[tuple[Any, dict[str, Any], Any]] = []
        hooks = []
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            layer.self_attn.masked_key_indices = None
            hooks.append(layer.self_attn.register_forward_hook(self._note, with_kwargs=True))
        started = time.perf_counter()
        model.model(input_ids=torch.tensor([ids]), past_key_values=self.cache)
        self.seconds = time.perf_counter() - started
        for hook in hooks:
            hook.remove()

    def _note(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        kept = {name: value for name, value in kwargs.items() if name != "past_key_values"}
        self._calls.append((module, kept, output[1]))

    def compressed(self, press: Any) -> tuple[Any, float]:
        """A compressed copy of the cache, and the seconds beyond the reading."""
        for module, _, _ in self._calls:
            module.masked_key_indices = None
        if press is None:
            return copy.deepcopy(self.cache), 0.0
        if isinstance(press, kvpress.KVzipPress):  # reads all of the context again by itself
            cache = DynamicCache()
            with press(self.model):
                self.model.model(input_ids=torch.tensor([self.ids]), past_key_values=cache)
                read = time.perf_counter()
            return cache, time.perf_counter() - read
        cache = copy.deepcopy(self.cache)
        started = time.perf_counter()
        press.post_init_from_model(self.model)
        for module, kwargs, attentions in self._calls:
            press.forward_hook(module, [], {**kwargs, "past_key_values": cache}, [None, attentions])
        return cache, time.perf_counter() - started


class Player:
    """Greedy decoding by hand on a compressed cache."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        torch.set_grad_enabled(False)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
        self.model = AutoModelForCausalLM.from_pretrained(job["path"], dtype=dtype).eval()
        self.stops = set(job["stop_ids"])
        self.model.model(input_ids=torch.arange(64)[None])  # warms up

    def prompt(self, before: list[int], question: list[int], most: int) -> None:
        """What the cells that follow are about."""
        self.before, self.question, self.most = before, question, most
        self.readings: dict[bool, Reading] = {}

    def cell(self, name: str, ratio: float, aware: bool) -> dict[str, Any]:
        """Compress and answer.

        With the question known, all of it but the last token is read with the context, as kvpress does it.
        """
        if aware not in self.readings:
            self.readings = {}  # one at a time: a reading holds the hidden states of every layer
            known = self.before + self.question[:-1] if aware else self.before
            self.readings[aware] = Reading(self.model, known)
        reading = self.readings[aware]
        rest = self.question[-1:] if aware else self.question
        press = None if name == "kvpress-full" else press_of(name, 1 - 1 / ratio)
        cache, seconds = reading.compressed(press)
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return {
            "ids": self.answer(cache, len(reading.ids), rest, self.most),
            "build_s": seconds,
            "prefill_s": reading.seconds,
            # Head-wise presses only hide entries: the cache is as large as before.
            "kv_bytes": kept,
        }

    def answer(self, cache: Any, start: int, question: list[int], most: int) -> list[int]:
        """Greedy tokens behind a question, positions going on from the whole context's length; uses the cache up."""
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
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("do") == "prompt":
            player.prompt(**command)
            answer: dict[str, Any] = {"ready": True}
        else:
            try:
                answer = player.cell(**command)
            except Exception as error:  # one press failing must not end the run
                answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
