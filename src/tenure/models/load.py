"""A folder -> the model and its tokenizer, every weight of it in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tenure.errors import ModelError, TenureError, UnsupportedModelError
from tenure.models.adapter import FAMILIES, check_supported, unknown_family
from tenure.models.rope import check_rope

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_DECODER = ("layers.", "embed_tokens.", "lm_head.")  # in the names of weights that change what a model says
_UNPACKED = "mxfp4"  # the one form of quantised weights that is taken: gpt-oss has no other
_WHOLE = "Fetch or save the model again, with the config.json that belongs to its weights"


def check_config(folder: Path) -> None:
    """Refuse a model that cannot be run before any of its weights is read.

    Raises:
        UnsupportedModelError: its family, a part of it, or its quantised weights.
        ModelError: its configuration cannot be read.
    """
    from transformers import AutoConfig

    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = data.get("model_type")
    if family is None:
        raise ModelError("config.json names no model_type", option=str(folder), way_out=_WHOLE)
    method = _packing(data.get("quantization_config"))
    if method not in (None, _UNPACKED):
        raise UnsupportedModelError(
            f"its weights are quantised ({method}), which is not supported",
            option=f"model {family}",
            way_out="Use the original weights, perhaps with --weights int8, or a GGUF file",
        )
    try:
        with _said_by(folder, "the configuration cannot be read"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ModelError as error:
        if family in FAMILIES:
            raise
        raise unknown_family(family) from error
    check_supported(config)
    check_rope(config)


def _packing(packed: Any) -> Any:
    """How weights are quantised, by the part of a configuration that says so."""
    return packed.get("quant_method", "unknown") if isinstance(packed, dict) else packed


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZERS):  # transformers may make up an empty one
        raise ModelError(
            "the folder has no tokenizer",
            option=str(folder),
            way_out="Add its tokenizer.json, which save_pretrained of the tokenizer writes",
        )
    with _said_by(folder, "the tokenizer cannot be read"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def load_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder; of one that reads pictures or sound besides text, its language model.

    Experts in MXFP4 are unpacked.

    transformers fills weights that are missing with random numbers: those are refused.

    Raises:
        ModelError: weights are missing, left over, of another shape, or cannot be read.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        Mxfp4Config,
    )

    with _said_by(folder, "the weights cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        plain = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        packed = _packing(getattr(config, "quantization_config", None)) == _UNPACKED
        unpack = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
        model, report = (AutoModelForCausalLM if plain else AutoModelForImageTextToText).from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, with the shapes
            **unpack,
        )
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{name} has the shape {tuple(stored)} in the files and {tuple(expected)} in config.json",
            option=str(folder),
            way_out=_WHOLE,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{len(missing)} weights of the model are not in its files, such as {missing[0]}",
            option=str(folder),
            way_out=_WHOLE,
        )
    left = sorted(
        name
        for name in report["unexpected_keys"]
        if any(part in name for part in _DECODER) and not name.endswith("rotary_emb.inv_freq")
    )
    if left:
        raise ModelError(
            f"{len(left)} weights in the files have no place in the model, such as {left[0]}",
            option=str(folder),
            way_out=_WHOLE,
        )
    return _language_model(model)


def _language_model(model: Any) -> Any:
    """A model without what reads other things than text."""
    from transformers import AutoModelForCausalLM

    inner = getattr(model.model, "language_model", None)
    if inner is None:
        return model
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    text.model, text.lm_head, text.generation_config = inner, model.lm_head, model.generation_config
    return text.eval()


@contextmanager
def _said_by(folder: Path, what: str) -> Iterator[None]:
    """Errors of transformers as ours; they are of any type, from those of validators to ZeroDivisionError."""
    try:
        yield
    except TenureError:
        raise
    except Exception as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ModelError(
            f"{what}: {said or type(error).__name__}", option=str(folder), way_out=_WHOLE
        ) from error
