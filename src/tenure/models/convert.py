"""GGUF file -> a folder that plain ``from_pretrained`` loads.

Done once per file: a GGUF load unpacks every weight and rebuilds the tokenizer each time, which takes most of a
minute where the folder takes a second or two.

Three things differ on purpose from what transformers makes of the file:

- Word embeddings are tied where the original model ties them. Q4_K_M files of tied models hold the matrix twice, coarse
  as input embedding (Q5_0, Q4_K) and fine as output projection (Q8_0, Q6_K). The fine copy is kept for both: it is the
  nearer to the matrix that was trained, and the model has its true size again.
- The tokenizer is that of the original repository also where the GGUF form loses a detail (Unicode NFC of Qwen), and
  is saved with a class that takes ``tokenizer.json`` literally.
- The configuration carries its rotary parameters in the form of transformers 4 and in that of 5.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import ModelError
from tenure.models.gguf_file import GgufFacts, read_gguf
from tenure.models.gguf_tokenizer import save_tokenizer

if TYPE_CHECKING:
    import torch

# Marks of where the object came from, and defaults of every transformers config that say nothing of a language model.
_DROPPED_KEYS = (
    *("_name_or_path", "_model_name_or_path", "quantization_config", "transformers_version", "torch_dtype"),
    *("id2label", "label2id", "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder"),
    *("chunk_size_feed_forward", "problem_type"),
)
_SAME_MATRIX = 0.5  # relative distance: two precisions of one matrix stay below 0.3, independent matrices are at 1 or more


def convert_gguf(
    gguf: Path, target: Path, *, tied: bool | None = None, on_step: Callable[[int, int], None] | None = None
) -> None:
    """Write ``config.json``, ``generation_config.json``, the tokenizer and ``model.safetensors`` into ``target``.

    Weights are bf16 if the file is quantised, and keep their precision if it is not.

    Args:
        gguf: the file to read.
        target: an empty folder. It is complete only when the call returns.
        tied: whether the original model ties its word embeddings. None: tied if the file has no output projection,
            or one that is the embedding up to quantisation.
        on_step: called with (steps done, steps in all).

    Raises:
        ModelError: the file is damaged, or transformers cannot read it.
        UnsupportedModelError: see :func:`~tenure.models.gguf_file.read_gguf`.
    """
    step = on_step or (lambda done, total: None)
    step(0, 4)
    facts = read_gguf(gguf)
    step(1, 4)
    dtype = _dtype(facts)
    config, state = _load(gguf, facts, dtype)
    step(2, 4)
    tie = _tie(state, facts, tied)
    stops = save_tokenizer(gguf, facts, target)
    step(3, 4)
    _save_configs(config, facts, target, tie=tie, dtype=dtype, stops=stops)
    _save_weights(state, target / "model.safetensors")
    step(4, 4)


def _dtype(facts: GgufFacts) -> torch.dtype:
    import torch

    if facts.matrix_types <= {"F32"}:
        return torch.float32
    if facts.matrix_types <= {"F32", "F16"}:
        return torch.float16
    return torch.bfloat16


def _load(gguf: Path, facts: GgufFacts, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration, corrected, and the dense state dict."""
    import transformers

    extra: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # since transformers 5 weights stay packed unless asked otherwise
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _correct(config, facts)
        with contextlib.redirect_stderr(io.StringIO()):  # its two progress bars; ours is the caller's affair
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, config=config, dtype=dtype, **extra
            )
    except ImportError as error:
        raise ModelError(f"reading a GGUF file needs a package that is missing: {error}", option=str(gguf)) from error
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot read this GGUF file: {error}",
            option=str(gguf),
            way_out="Use a folder with safetensors, or a hub id",
        ) from error
    state: dict[str, torch.Tensor] = model.state_dict()
    wrong = [name for name, tensor in state.items() if tensor.dtype != dtype or tensor.is_meta]
    if wrong:
        raise ModelError(f"{len(wrong)} weights were not unpacked, the first is {wrong[0]}", option=str(gguf))
    model.config.architectures = [type(model).__name__]
    return model.config, state


def _correct(config: Any, facts: GgufFacts) -> None:
    if facts.head_dim is not None and facts.head_dim != getattr(config, "head_dim", None):
        default = config.hidden_size // config.num_attention_heads
        if hasattr(config, "head_dim") or facts.head_dim != default:
            config.head_dim = facts.head_dim


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

    data = {k: _decimal(v) for k, v in config.to_dict().items() if k not in _DROPPED_KEYS and v is not None}
    data["dtype"] = data["torch_dtype"] = str(dtype).removeprefix("torch.")
    data["tie_word_embeddings"] = tie
    rope = dict(data.get("rope_parameters") or {})
    theta = float(rope.pop("rope_theta", data.get("rope_theta", 10_000.0)))
    scaling = facts.rope_scaling
    data["rope_theta"] = theta
    data["rope_scaling"] = scaling
    data["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    _write_json(target / "config.json", data)
    ids = {key: data[key] for key in ("bos_token_id", "pad_token_id") if key in data}
    GenerationConfig(eos_token_id=stops, **ids).save_pretrained(target)


def _save_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Force all files of ``folder``, and the folder itself, to disk."""
    for path in (*sorted(folder.iterdir()), folder):
        if os.name == "nt" and path.is_dir():
            continue  # Windows cannot open folders; its rename is journalled
        handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
