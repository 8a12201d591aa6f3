"""What the adapter refuses, what it leaves alone, and its two executors against each other."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tenure import Engine
from tenure.config import EngineConfig
from tenure.errors import ModelError, TenureError, UnsupportedModelError
from tenure.kernels.native import native
from tenure.models.adapter import ATTENTION, Adapter, IdentityRotary, check_supported, windows_of
from tests.conftest import random_ids, stock_logits, tiny_model

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
    "rope_theta": 10000.0,
}


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8), "gpt2"),
        (transformers.GPTNeoXConfig(num_hidden_layers=1), "gpt_neox"),
        (transformers.Gemma2Config(num_hidden_layers=1), "gemma2"),
        (transformers.CohereConfig(num_hidden_layers=1), "cohere"),
        (transformers.GlmConfig(num_hidden_layers=1), "glm"),
        (transformers.HunYuanDenseV1Config(num_hidden_layers=1), "hunyuan_v1_dense"),
        (transformers.DeepseekV3Config(num_hidden_layers=1), "deepseek_v3"),
        (transformers.MambaConfig(num_hidden_layers=1), "mamba"),
        (transformers.BloomConfig(), "bloom"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_families_are_refused_by_name(config, name):
    with pytest.raises(
        UnsupportedModelError, match=rf"model {name}.*not supported.*families: llama, mistral"
    ):
        check_supported(config)


def test_windows_of_layers():
    some = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 3}
    assert windows_of(transformers.MistralConfig(sliding_window=4096, num_hidden_layers=2)) == (4096, 4096)
    assert windows_of(transformers.Qwen2Config(**some, max_window_layers=1)) == (None, 16, 16)
    assert windows_of(transformers.Qwen3Config(**some, max_window_layers=0)) == (16, 16, 16)


def test_a_window_that_is_switched_off_is_none():
    assert windows_of(transformers.MistralConfig(sliding_window=None)) == ()
    assert windows_of(transformers.Qwen2Config(use_sliding_window=False, sliding_window=4096)) == ()
    assert windows_of(transformers.LlamaConfig()) == ()


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tables_that_change_with_length_are_refused_by_name(family, scaling):
    """C05: of the two documented ways, refusal at load."""
    model = tiny_model(family, layers=1, rope_parameters=scaling, max_position_embeddings=256)
    with pytest.raises(UnsupportedModelError, match=scaling["rope_type"]) as caught:
        Engine(model)
    assert family in str(caught.value)
    assert "default, linear, llama3 or yarn" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "engine"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, {}),
        ("mistral", {"sliding_window": 16}, {"executor": "fused"}),
        ("phi", {}, {"executor": "fused"}),
        ("phi", {}, {"weights": "int8"}),
    ],
)
def test_a_refused_model_is_left_as_it_was(family, options, engine):
    model = tiny_model(family, layers=1, **options)
    ids = random_ids(20)
    before, rotary = stock_logits(model, ids), model.model.rotary_emb
    implementation = model.config._attn_implementation
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(TenureError):
        Engine(model, config=EngineConfig(**engine))
    assert model.model.rotary_emb is rotary
    assert model.config._attn_implementation == implementation
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert torch.equal(stock_logits(model, ids), before)


# -- attaching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi"])
def test_attach(models, family):
    model = copy.deepcopy(models(family)).train()
    adapter = Adapter.attach(model)
    assert adapter.executor == ("transformers" if family == "phi" else "fused")
    assert isinstance(model.model.rotary_emb, IdentityRotary)
    assert model.config._attn_implementation == ATTENTION
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layout = adapter.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (3, 4 if family == "phi" else 2, 16)
    assert layout.token_bytes == 2 * 3 * layout.kv_heads * 16 * 4
    assert adapter.rope.rotary_dim == (8 if family == "phi" else 16)
    with pytest.raises(ModelError, match="runs on this model already"):
        Adapter.attach(model)


VARIANTS = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-head": ("llama", {"head_dim": 24}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-head": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {}),
}


def walk(engine, **options):
    """Logits of chunks, single tokens and forced decoding of one session, evictions included."""
    session = engine.session(policy="h2o", budget=40, chunk=32, slack=6, **options)
    rows = [session.feed(random_ids(50, seed=1)), session.feed(random_ids(1, seed=2))]
    for number in range(12):
        session.force(random_ids(1, seed=10 + number))
        rows.append(session.logits[None].clone())
    return torch.cat(rows), session


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_equals_transformers(engines, models, variant):
    family, options = VARIANTS[variant]
    outs, sessions = zip(
        *(walk(engines(family, executor=executor, **options)) for executor in ("fused", "transformers")),
        strict=True,
    )
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=0)
    one, two = (session.memory.ledger for session in sessions)
    assert torch.equal(one.logical[:, : one.rows], two.logical[:, : two.rows])
    torch.testing.assert_close(one.score[:, : one.rows], two.score[:, : two.rows], atol=1e-4, rtol=1e-4)
    ids = random_ids(60, seed=3)
    fused = engines(family, **options).session(policy="full", chunk=64)
    torch.testing.assert_close(
        fused.feed(ids), stock_logits(models(family, **options), ids), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_native_kernels_all_stays_the_same(engines, models, monkeypatch, variant):
    family, options = VARIANTS[variant]
    want, _ = walk(engines(family, **options))
    monkeypatch.setattr("tenure.models.fused.native", lambda: None)
    got, _ = walk(Engine(copy.deepcopy(models(family, **options))))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_joined_weights_are_no_second_copy(models, variant):
    """The parts are views of the joined weight, hold the old numbers, and nothing else was allocated."""
    family, options = VARIANTS[variant]
    model = copy.deepcopy(models(family, **options))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    adapter = Adapter.attach(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    block = model.model.layers[0]
    for parts in (
        [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj],
        [block.mlp.gate_proj, block.mlp.up_proj],
    ):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    unique = {parameter.data_ptr(): parameter for parameter in before.values()}
    tied = options.get("tie_word_embeddings", False)
    assert adapter.weight_bytes == sum(parameter.nbytes for parameter in unique.values())
    assert (adapter.run._logits.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied


@pytest.mark.skipif(native() is None, reason="no C compiler")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_int8_weights_are_near_and_small(engines, models, family):
    model = copy.deepcopy(models(family))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    linear = [(name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    whole = sum(one.weight.numel() for name, one in linear)
    rest = sum(one.nbytes for name, one in model.named_parameters()) - whole * model.dtype.itemsize
    rest += model.lm_head.weight.nbytes if tied else 0
    engine = Engine(model, config=EngineConfig(weights="int8"))
    want, _ = walk(engines(family))
    got, session = walk(engine)
    correlation = torch.corrcoef(torch.stack([got.flatten(), want.flatten()]))[0, 1]
    assert correlation > 0.98
    scales = 4 * sum(one.out_features for _, one in linear)
    assert 0 <= engine.adapter.weight_bytes - (whole + scales + rest) < 4096, "the parts are given up"
    assert engine.adapter.run._layers[0].down.weight.dtype == torch.int8
    session.check_integrity()


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_the_output_projection_is_read_in_any_form(models, weights):
    """Compressors weigh heads by it."""
    model = copy.deepcopy(models("qwen2"))
    want = [layer.self_attn.o_proj.weight.detach().clone() for layer in model.model.layers]
    adapter = Engine(model, config=EngineConfig(weights=weights)).adapter
    heads, dim = model.config.num_attention_heads, adapter.layout.head_dim
    for layer, weight in enumerate(want):
        got = adapter.output_projection(layer)
        assert got.shape == (model.config.hidden_size, heads, dim)
        step = weight.abs().amax(1, keepdim=True).float() / 127
        off = (got.flatten(1) - weight).abs().float()
        assert (off <= (0.51 * step if weights == "int8" else 0)).all()


def test_int8_without_native_kernels_is_refused(models, monkeypatch):
    monkeypatch.setattr("tenure.models.fused.native", lambda: None)
    with pytest.raises(ModelError, match=r"weights: .*compiler"):
        Engine(copy.deepcopy(models("llama")), config=EngineConfig(weights="int8"))


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({}, torch.float16, "bf16 or fp32, not in float16"),
        ({"hidden_act": "gelu"}, torch.float32, "silu, not gelu"),
    ],
)
def test_int8_names_what_the_kernels_do_not_take(models, options, dtype, words):
    with pytest.raises(ModelError, match=rf"weights: .*{words}"):
        Engine(copy.deepcopy(models("llama", **options)).to(dtype), config=EngineConfig(weights="int8"))
