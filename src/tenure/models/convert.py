"""GGUF file -> a folder that plain ``from_pretrained`` loads.

Done once per file: loading from GGUF unpacks every weight and rebuilds the tokenizer each time, which takes
most of a minute where the folder takes two seconds.

Three things differ on purpose from what transformers makes of the file:

- Word embeddings are tied where the original model ties them. Q4_K_M files of tied models hold the matrix
  twice, coarse as input embedding (Q5_0, Q4_K) and fine as output projection (Q8_0, Q6_K). The fine copy is
  kept for both: it is the nearer to the matrix that was trained, and the model has its true size again.
- The tokenizer is that of the original model also where GGUF or transformers loses a detail.
- The configuration carries its rotary parameters in the form of transformers 4 and in that of 5.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import TYPE_CHECKING, Any

from tenure.errors import ModelError
from tenure.models.gguf_file import GgufFacts, read_gguf
from tenure.models.gguf_tokenizer import save_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

_DROPPED_KEYS = ("_name_or_path", "_model_name_or_path", "quantization_config")
_CONFIG_FORM = "5.0.0"  # of rope_parameters; 4.57 takes a version just below for one with a broken tokenizer
_SAME_MATRIX = 0.5  # relative distance: two precisions of one matrix are below 0.3, two matrices above 1


def convert_gguf(
    gguf: Path,
    target: Path,
    *,
    facts: GgufFacts | None = None,
    tied: bool | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write configuration, generation configuration, tokenizer and ``model.safetensors`` into ``target``.

    Weights are bf16 if the file is quantised, and keep their precision if it is not.

    Args:
        gguf: the file to read.
        target: an empty folder. It is complete only when the call returns.
        facts: those of the file, if they are at hand.
        tied: whether the original model ties its word embeddings. None: tied if the file has no output
            projection, or one that is the embedding up to quantisation.
        on_step: called with (steps done, steps in all).

    Raises:
        ModelError: the file is damaged, or transformers cannot read it.
        UnsupportedModelError: see :func:`~tenure.models.gguf_file.read_gguf`.
    """
    on_step(0, 4)
    facts = facts or read_gguf(gguf)
    on_step(1, 4)
    dtype = _torch_dtype(facts)
    config, state = _load(gguf, facts, dtype)
    on_step(2, 4)
    stops = save_tokenizer(gguf, facts.tokens, target)
    on_step(3, 4)
    tie = _tie(state, facts, tied)
    _save_configs(config, facts, target, tie=tie, dtype=dtype, stops=stops)
    _save_weights(state, target / "model.safetensors")
    on_step(4, 4)


def _torch_dtype(facts: GgufFacts) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, facts.dtype)
    return found


def _load(gguf: Path, facts: GgufFacts, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration and the dense state dict."""
    import transformers

    extra: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # where it exists, weights stay packed unless asked otherwise
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        head_dim = facts.head_dim or config.hidden_size // config.num_attention_heads
        if head_dim != (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        ):
            config.head_dim = head_dim
        with contextlib.redirect_stderr(io.StringIO()):  # its two progress bars; ours is the caller's affair
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                **extra,
            )
    except ImportError as error:
        raise ModelError(f"a package for reading GGUF is missing: {error}", option=str(gguf)) from error
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot read this GGUF file: {error}",
            option=str(gguf),
            way_out="Use a folder with safetensors, or a hub id",
        ) from error
    state: dict[str, torch.Tensor] = model.state_dict()
    _check(gguf, facts, state, set(report["missing_keys"]), dtype)
    model.config.architectures = [type(model).__name__]
    return model.config, state


def _check(
    gguf: Path, facts: GgufFacts, state: dict[str, torch.Tensor], missing: set[str], dtype: torch.dtype
) -> None:
    """Every weight of the file is in the model, and the other way round.

    transformers fills weights that the file lacks with random numbers, and drops those it does not know.
    """
    missing -= {"lm_head.weight"} if not facts.has_output else set()
    wrong = missing | {name for name, tensor in state.items() if tensor.dtype != dtype or tensor.is_meta}
    if wrong:
        raise ModelError(
            f"{len(wrong)} weights of the model are not in the file or not readable, such as {min(wrong)}",
            option=str(gguf),
        )
    known = sum(t.numel() for name, t in state.items() if facts.has_output or name != "lm_head.weight")
    if known != facts.parameters:
        raise ModelError(
            f"the file holds {facts.parameters:,} weights, the model that transformers makes of it {known:,}",
            option=str(gguf),
            way_out="Use a folder with safetensors, or a hub id",
        )


def _tie(state: dict[str, torch.Tensor], facts: GgufFacts, tied: bool | None) -> bool:
    """Settle the word embeddings in ``state``; whether they are tied."""
    head, embedding = state.get("lm_head.weight"), state["model.embed_tokens.weight"]
    if tied is None:
        tied = not facts.has_output or head is None or _same_matrix(head, embedding)
    if tied:
        if facts.has_output and head is not None:
            state["model.embed_tokens.weight"] = head
        state.pop("lm_head.weight", None)
    return tied


def _same_matrix(a: torch.Tensor, b: torch.Tensor) -> bool:
    rows = slice(None, None, max(1, a.shape[0] // 4096))  # a sample is plenty: the two cases are far apart
    x, y = a[rows].float(), b[rows].float()
    return float((x - y).norm() / x.norm().clamp_min(1e-12)) < _SAME_MATRIX


def _decimal(value: Any) -> Any:
    """A float32 of the file as the decimal number that was meant: 1e-05 for 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _save_configs(
    config: Any, facts: GgufFacts, target: Path, *, tie: bool, dtype: torch.dtype, stops: list[int]
) -> None:
    from transformers import GenerationConfig

    data = {
        k: _decimal(v) for k, v in config.to_diff_dict().items() if k not in _DROPPED_KEYS and v is not None
    }
    rope = data.get("rope_parameters") or {}
    theta = _decimal(float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0))
    data |= {
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": tie,
        "transformers_version": _CONFIG_FORM,
        "rope_theta": theta,
        "rope_scaling": facts.rope_scaling,
        "rope_parameters": {**(facts.rope_scaling or {"rope_type": "default"}), "rope_theta": theta},
    }
    text = json.dumps(data, indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    ids = {key: data[key] for key in ("bos_token_id", "pad_token_id") if key in data}
    GenerationConfig(eos_token_id=stops, **ids).save_pretrained(target)


def _save_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"}
        )
    except SafetensorError as error:  # a full disk arrives as this, not as OSError
        raise ModelError(
            f"the converted weights cannot be written: {error}", option="TENURE_CACHE"
        ) from error
