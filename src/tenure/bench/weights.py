"""``tenure bench weights``: what int8 weights and bf16 change, against fp32, on real text."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tenure.engine import Engine
from tenure.errors import ConfigError

_CHUNK = 256
"""Logits of a chunk are held in fp32."""


def run(model: str, *, tokens: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Compare next-token distributions over a source file of the standard library.

    Args:
        model: by name.
        tokens: length of the text.
        note: told what is going on.

    Returns:
        For ``bf16`` and ``int8``: mean KL divergence from fp32 in nats, share of positions with the same most likely
        token, and the perplexity beside that of fp32.
    """
    text = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text(encoding="utf-8")
    result: dict[str, Any] = {"model": model, "tokens": tokens}
    note("fp32")
    engine = Engine.load(model, dtype="fp32")
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < tokens:
        raise ConfigError(
            f"the text has {len(ids):,} tokens, not {tokens:,}", option="tokens", way_out="Give fewer"
        )
    ids = ids[:tokens]
    reference = _log_probabilities(engine, ids)
    result["fp32"] = {"perplexity": _perplexity(reference, ids)}
    del engine
    for name, options in (("bf16", {"dtype": "bf16"}), ("int8", {"dtype": "bf16", "weights": "int8"})):
        note(name)
        found = _log_probabilities(Engine.load(model, **options), ids)
        result[name] = {
            "kl": (reference.exp() * (reference - found)).sum(-1).mean().item(),
            "same_top": (reference.argmax(-1) == found.argmax(-1)).float().mean().item(),
            "perplexity": _perplexity(found, ids),
        }
    return result


def _log_probabilities(engine: Engine, ids: list[int]) -> torch.Tensor:
    """``[tokens, vocabulary]``, in chunks that take the path of filling, and single tokens that of decoding."""
    session = engine.session(policy="full")
    half = len(ids) // 2
    parts = [session.feed(ids[start : min(start + _CHUNK, half)]) for start in range(0, half, _CHUNK)]
    parts += [session.feed([token]) for token in ids[half:]]
    return torch.cat(parts).log_softmax(-1)


def _perplexity(found: torch.Tensor, ids: list[int]) -> float:
    targets = torch.tensor(ids[1:])[:, None]
    return found[:-1].gather(1, targets).mean().neg().exp().item()
