"""vLLM on the CPU as a peer. Stands alone in the environment of its wheel."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
from worker import serve


class VllmPlayer:
    """Offline engine with prefix caching."""

    def __init__(self, job: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(job["options"].get("kv_gb", 4)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job['threads'] - 1}")
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            model=job["path"],
            dtype="bfloat16" if job["dtype"] == "bf16" else "float32",
            max_model_len=job["context"],
            enable_prefix_caching=True,
            enforce_eager=bool(job["options"].get("eager", True)),
            max_num_seqs=1,
        )
        self.closing = job["script"]["closing"]
        self.history: list[int] = []

    def turn(self, ids: list[int], write: int) -> tuple[list[int], float]:
        """See ``worker.Player``. The first token is asked for alone, the rest follows from the prefix cache."""
        self.history += [*(self.closing if self.history else []), *ids]
        start = time.perf_counter()
        first = self._complete(self.history, 1, ignore_eos=True)
        first_token = time.perf_counter() - start
        written = first + self._complete(self.history + first, write - 1, ignore_eos=True)
        self.history += written
        return written, first_token

    def ask(self, ids: list[int], write: int) -> list[int]:
        """See ``worker.Player``."""
        return self._complete([*self.history, *self.closing, *ids], write, ignore_eos=False)

    def _complete(self, prompt: list[int], write: int, *, ignore_eos: bool) -> list[int]:
        params = self.params(max_tokens=write, temperature=0.0, ignore_eos=ignore_eos)
        (result,) = self.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(result.outputs[0].token_ids)


if __name__ == "__main__":
    serve(VllmPlayer)
