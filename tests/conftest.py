"""Tiny random models, and an environment in which a read of a freed slot shows."""

from __future__ import annotations

import os

os.environ["TENURE_POISON"] = "1"
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny models: threads that wait for each other cost more than they save

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tenure import Engine
from tenure.config import EngineConfig

VOCAB = 320


def tiny_model(family: str, *, layers: int = 3, seed: int = 0, **options: Any) -> Any:
    """A random fp32 model of a family; one seed gives one set of weights."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    if family in ("qwen3", "mistral"):
        sizes["head_dim"] = 16
    if family == "mistral":
        sizes["sliding_window"] = None
    if family == "phi":
        sizes["num_key_value_heads"] = 4
        sizes["partial_rotary_factor"] = 0.5
    if "rope_parameters" in options and int(transformers.__version__.split(".")[0]) < 5:
        scaling = dict(options.pop("rope_parameters"))  # transformers 4 has two fields for it
        options["rope_theta"] = scaling.pop("rope_theta", 10000.0)
        options["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Small initial weights give nearly uniform attention, under which few mistakes would show.
            if parameter.dim() > 1:
                parameter.mul_(4)
            elif parameter.abs().sum() == 0:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="session")
def models() -> Callable[..., Any]:
    """``models(family)``: a stock model that no test may change."""
    made: dict[str, Any] = {}

    def get(family: str, **options: Any) -> Any:
        key = repr((family, sorted(options.items(), key=str)))
        if key not in made:
            made[key] = tiny_model(family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def engines(models: Callable[..., Any]) -> Callable[..., Engine]:
    """``engines(family, executor=..., rotate=...)``: an engine on a copy of the stock model."""
    made: dict[str, Engine] = {}

    def get(
        family: str, *, executor: str = "auto", rotate: str = "copy", tokenizer: Any = None, **options: Any
    ) -> Engine:
        key = repr((family, executor, rotate, id(tokenizer), sorted(options.items(), key=str)))
        if key not in made:
            made[key] = Engine(
                copy.deepcopy(models(family, **options)),
                tokenizer,
                config=EngineConfig(executor=executor, rotate=rotate),
                name=f"tiny-{family}",
            )
        return made[key]

    return get


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids that are not special in any tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, VOCAB, (count,), generator=generator).tolist()


@torch.no_grad()
def stock_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of the unmodified model over all ids, ``[n, vocabulary]``."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()
