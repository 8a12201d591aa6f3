"""Families that run on transformers' own layers: against the stock model (O1) and the masked reference (O2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from tenure import Engine
from tenure.config import EngineConfig
from tenure.errors import ConfigError, UnsupportedModelError
from tenure.models.adapter import STOCK_FAMILIES, check_supported
from tests.conftest import random_ids, stock_logits, tiny_model
from tests.reference import MaskedReference

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWED = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2},
    "gemma": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        **WINDOWED,
    },
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        **WINDOWED,
    },
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": {"attention_multiplier": 0.2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "ministral": {
        "head_dim": 16,
        **WINDOWED,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "olmo": {"clip_qkv": 2.0},
    "olmo3": {
        **WINDOWED,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": None, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "starcoder2": {"sliding_window": 24},
}


@pytest.fixture(scope="module", params=STOCK_FAMILIES)
def stock(request):
    """A stock model whose norms are not all ones, so that one in the wrong place would show."""
    if request.param not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers is older than this family")
    model = tiny_model(request.param, **OPTIONS.get(request.param, {}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    return model


@pytest.fixture(scope="module")
def engine(stock):
    return Engine(copy.deepcopy(stock))


def test_full_cache_equals_stock_model(stock, engine):
    ids = random_ids(150)
    session = engine.session(policy="full", positions="logical", chunk=64)
    logits = torch.cat([session.feed(ids[:90]), session.feed(ids[90:91]), session.feed(ids[91:])])
    torch.testing.assert_close(logits, stock_logits(stock, ids), atol=1e-4, rtol=0)
    assert engine.adapter.executor == "transformers"


def test_evicting_session_equals_masked_reference(stock, engine):
    session = engine.session(policy="h2o", positions="bounded", budget=48, chunk=32, slack=8, limit=96)
    reference = MaskedReference(stock)
    ids = random_ids(200, seed=3)
    for start in range(0, 200, 25):
        piece = ids[start : start + 25]
        want = reference.beside(session, piece)
        torch.testing.assert_close(session.feed(piece), want, atol=2e-4, rtol=0)
    assert session.memory.ledger.rows <= 48
    assert session.memory.ledger.next_position < 200 - 48


def test_compression_reads_how_heads_are_joined(engine):
    layout, config = engine.layout, engine.adapter.model.config
    weight = engine.adapter.output_projection(1)
    assert weight.shape == (config.hidden_size, config.num_attention_heads, layout.head_dim)
    session = engine.session(policy="full", chunk=64)
    session.append_ids(random_ids(150))
    before = session.stats().kv_bytes
    if not layout.alike:
        with pytest.raises(ConfigError, match="method: some of this model's layers see a window"):
            session.compress(ratio=4, method="gracekv")
        with pytest.raises(ConfigError, match="compress: some of this model's layers see a window"):
            engine.session(budget=48, chunk=32, slack=8, compress="gracekv")
        assert session.stats().kv_bytes == before
    else:
        session.compress(ratio=4, method="gracekv")
        assert session.stats().kv_bytes < before / 2
    session.append_ids(random_ids(10, seed=1))


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "mixtral": OPTIONS["mixtral"],
    "phi3": OPTIONS["phi3"],
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {**OPTIONS["qwen3_moe"], "use_sliding_window": True},
    "smollm3": {
        **OPTIONS["smollm3"],
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("granularity", ["session", "layer"])
def test_windows(family, granularity):
    """Sliding windows where they are an option, once longer than a chunk and once of few tokens."""
    ids = random_ids(200, seed=3)
    for size in (40, 3):
        model = tiny_model(family, **{**WINDOWS[family], "sliding_window": size})
        engine = Engine(copy.deepcopy(model))
        assert set(engine.layout.windows) <= {size, None}
        assert size in engine.layout.windows
        full = engine.session(policy="full", positions="logical", chunk=64)
        torch.testing.assert_close(full.feed(ids), stock_logits(model, ids), atol=1e-4, rtol=0)
        session = engine.session(
            policy="h2o", positions="bounded", budget=48, chunk=32, slack=8, limit=96, granularity=granularity
        )
        reference = MaskedReference(model)
        for start in [*range(0, 175, 25), *range(175, 200)]:
            piece = ids[start : start + (25 if start < 175 else 1)]
            want = reference.beside(session, piece)
            torch.testing.assert_close(session.feed(piece), want, atol=2e-4, rtol=0)


def test_windows_need_the_stock_executor():
    model = tiny_model("mistral", sliding_window=16)
    for options in ({"executor": "fused"}, {"weights": "int8"}):
        with pytest.raises(UnsupportedModelError, match="mistral: there is no fused executor for sliding"):
            Engine(model, config=EngineConfig(**options))
    assert Engine(model).adapter.executor == "transformers"


def test_other_layers_are_refused_by_name():
    config = transformers.Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UnsupportedModelError, match=r"model qwen2: linear_attention layers"):
        check_supported(config)
