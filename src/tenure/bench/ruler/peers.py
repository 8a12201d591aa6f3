"""``tenure bench peers ruler``: the same prompts and weights under NVIDIA's kvpress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tenure.bench import record
from tenure.bench.peers.drive import Peer, Worker, python_of
from tenure.bench.ruler.run import Settings, check_folder, check_tasks, load, merged, summary
from tenure.bench.ruler.tasks import Prompt, encode, made_of, make
from tenure.engine import compute_dtype
from tenure.errors import ConfigError
from tenure.models.sources import resolve

KVPRESS = "kvpress==0.5.5"
_TORCH = "torch==2.13.0"
"""A build for the CPU; what kvpress would take else is gigabytes larger."""
PRESSES = (
    "kvpress-snapkv",
    "kvpress-adakv-snapkv",
    "kvpress-adakv-expected",
    "kvpress-expected",
    "kvpress-pyramidkv",
    "kvpress-lagkv",
    "kvpress-keydiff",
    "kvpress-knorm",
    "kvpress-tova",
    "kvpress-streaming",
    "kvpress-kvzip",
)
"""CAKE is not in kvpress; PyramidKV is the press that gives layers different budgets. CriticalKV fails on Qwen2."""


def run(
    model: str,
    results: Path,
    *,
    tokens: Sequence[int],
    families: Sequence[str],
    presses: Sequence[str] | None,
    ratios: Sequence[float],
    modes: Sequence[str],
    seeds: Iterable[int],
    threads: int,
    resume: bool,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Play the prompts.

    Args:
        model: a catalog name or a folder.
        results: folder; a file a prompt goes to ``MODEL-kvpress`` in it, the summary to ``MODEL-kvpress.json``.
        tokens: lengths of the contexts.
        families: of tasks.
        presses: names of ``PRESSES``; None takes all.
        ratios: tokens for each entry.
        modes: ``agnostic``, ``aware``.
        seeds: of the prompts.
        threads: of the worker.
        resume: leave prompts alone that have a file.
        note: told what is going on.

    Raises:
        ConfigError: an option is not usable, or a file to go on from is of other tasks or another model.
    """
    names = list(PRESSES if presses is None else presses)
    if unknown := [name for name in names if name not in PRESSES]:
        raise ConfigError(
            f"{unknown[0]!r} is not known", option="presses", way_out="Known: " + ", ".join(PRESSES)
        )
    Settings(  # checks them
        model=model, tokens=tuple(tokens), families=tuple(families), ratios=tuple(ratios), modes=tuple(modes)
    )
    name = model.rstrip("/").rsplit("/", 1)[-1] + "-kvpress"
    seeds = list(seeds)
    check_folder(results / name, tokens, families, seeds)
    waiting: list[tuple[Path, dict[str, Any], dict[str, Any] | None]] = []
    for length in tokens:
        for seed in seeds:
            for family in families:
                path = results / name / f"{family}-{length}-{seed:04d}.json"
                old = load(path) if resume and path.exists() else None
                if old:
                    check_tasks(path, old, family, {"model": model})
                if old is None or not _has(old, names, ratios, modes):
                    head = {"model": model, "family": family, "tokens": length, "seed": seed}
                    waiting.append((path, {**made_of(family), **head}, old))
    if waiting:
        _play_all(model, threads, waiting, names, ratios, modes, note)
    summed = summary(results / name)
    record.write(
        results / f"{name}.json",
        {"bench": "ruler", **record.origin(), "peer": KVPRESS, "model": model, **summed},
    )
    return {"cells": len(summed["cells"])}


def _play_all(
    model: str,
    threads: int,
    waiting: Sequence[tuple[Path, dict[str, Any], dict[str, Any] | None]],
    names: Sequence[str],
    ratios: Sequence[float],
    modes: Sequence[str],
    note: Callable[[str], None],
) -> None:
    """Play prompts and write a file of each: its path, what it says of the prompt, and what it held before."""
    from transformers import AutoTokenizer

    found = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    peer = Peer("kvpress", "../ruler/kvpress_worker.py", needs=KVPRESS, along=(_TORCH,))
    job = {
        "path": str(found.path),
        "dtype": "bf16" if compute_dtype("auto", torch.device("cpu")) is torch.bfloat16 else "fp32",
        "threads": threads,
        "stop_ids": _stops(tokenizer),
    }
    worker = Worker(peer, python_of(peer, note), job)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    try:
        for path, head, old in waiting:
            note("{family}, {tokens} tokens, seed {seed}".format(**head))
            prompt = make(head["family"], head["seed"], head["tokens"], count)
            cells, failed = _play(worker, tokenizer, prompt, names, ratios, modes)
            if old:
                cells, failed = merged(old["cells"], cells), old["failed"] | failed
            origin = {"bench": "ruler", **record.origin(), "peer": KVPRESS}
            record.write(path, {**origin, **head, "failed": failed, "cells": cells})
    finally:
        worker.close()


def _play(
    worker: Worker,
    tokenizer: Any,
    prompt: Prompt,
    names: Sequence[str],
    ratios: Sequence[float],
    modes: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Cells of one prompt, and what presses said that failed."""
    before, question = encode(tokenizer, prompt)
    worker.do(do="prompt", before=before, question=question, most=prompt.most)
    cells: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    grid = [("kvpress-full", 1.0, "any")]
    grid += [(press, ratio, mode) for mode in modes for press in names for ratio in ratios]
    for press, ratio, mode in grid:
        told = worker.do(do="cell", name=press, ratio=ratio, aware=mode == "aware")
        if "error" in told:
            failed[press] = told["error"]
            continue
        reply = tokenizer.decode(told.pop("ids"))
        cell = {"method": press, "mode": mode, "ratio": ratio, **told}
        cells.append(cell | {"score": prompt.score(reply), "context_tokens": len(before), "reply": reply})
    return cells, failed


def _has(
    found: Mapping[str, Any], names: Sequence[str], ratios: Sequence[float], modes: Sequence[str]
) -> bool:
    """Whether each press has its cells, or has failed."""
    known = {(cell["method"], cell["mode"], cell["ratio"]) for cell in found["cells"]}
    return all(
        name in found["failed"] or (name, mode, ratio) in known
        for name in names
        for mode in modes
        for ratio in ratios
    )


def _stops(tokenizer: Any) -> list[int]:
    """The end of a text, and what ends a turn in the model's template."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False)).rpartition("b")[2]
    closing = tokenizer.encode(text, add_special_tokens=False)[:1]
    return sorted({tokenizer.eos_token_id, *closing})
