"""Angles against the stock rotary modules, in value and in precision."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from tenure.errors import UnsupportedModelError
from tenure.models.rope import STATIC_KINDS, Rope, rope_kinds
from tests.conftest import tiny_model
from tests.test_exactness import SCALINGS

PAIRS = [(family, scaling) for family in ("llama", "qwen2", "qwen3", "mistral") for scaling in SCALINGS]


def test_every_static_kind_is_tested():
    assert set(SCALINGS) == set(STATIC_KINDS)


@pytest.mark.parametrize(("family", "scaling"), [*PAIRS, ("phi", None)])
def test_cos_and_sin_are_the_stock_models(models, family, scaling):
    options = (
        {"rope_parameters": SCALINGS[scaling]} if scaling else {}
    )  # phi: its own, of a part of each head
    model = models(family, **options)
    rope = Rope.of_layers(model)[0]
    assert rope.kind == (scaling or "default")
    positions = torch.tensor([0, 1, 7, 300, 4000])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 5, 1), positions[None])
    half = cos.shape[-1] // 2
    got = rope.cos_sin(positions, largest=4000)
    torch.testing.assert_close(got[0], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(got[1], sin[0, :, :half], atol=1e-6, rtol=0)
    assert rope.rotary_dim == 2 * half


def test_yarns_factor_is_applied_once():
    """A logit carries its square: 0.1 ln(4) + 1 on each of query and key, whatever was renumbered."""
    rope = Rope.of_layers(tiny_model("llama", layers=1, rope_parameters=SCALINGS["yarn"]))[0]
    want = 0.1 * math.log(4.0) + 1.0
    assert rope.attention_factor == pytest.approx(want)
    cos, sin = rope.cos_sin(torch.arange(50), largest=50)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, want**2))
    for kind in ("default", "linear", "llama3"):
        assert (
            Rope.of_layers(tiny_model("llama", layers=1, rope_parameters=SCALINGS[kind]))[0].attention_factor
            == 1.0
        )


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_survive_a_cast_of_the_model(models, dtype, scaling):
    """``model.to(bfloat16)`` rounds the buffer of the rotary module; ours is built from the config."""
    model = models("llama", rope_parameters=SCALINGS[scaling])
    exact = Rope.of_layers(model)[0]
    cast = copy.deepcopy(model).to(dtype)
    assert not torch.equal(cast.model.rotary_emb.inv_freq.float(), exact.inv_freq), "the cast has rounded it"
    rope = Rope.of_layers(cast)[0]
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope.inv_freq, exact.inv_freq)
    assert rope.attention_factor == exact.attention_factor


@pytest.mark.parametrize(("position", "fine"), [(1_000, 1e-4), (131_072, 1e-6), (2_000_000, 1e-6)])
def test_far_positions_keep_their_precision(position, fine):
    """fp32 angles are off by 4e-2 rad at 2M positions; ours go to fp64 before that shows."""
    rope = Rope.of_layers(tiny_model("llama", layers=1))[0]
    positions = torch.tensor([position - 1])
    cos, sin = rope.cos_sin(positions, largest=position)
    angles = (position - 1) * rope.inv_freq.double()
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0].double(), angles.cos(), atol=fine, rtol=0)
    torch.testing.assert_close(sin[0].double(), angles.sin(), atol=fine, rtol=0)


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)])
def test_positions_of_any_shape(shape):
    rope = Rope.of_layers(tiny_model("llama", layers=1))[0]
    cos, sin = rope.cos_sin(torch.zeros(shape, dtype=torch.int64), largest=1)
    assert cos.shape == sin.shape == (*shape, 8)


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({}, "default"),
        ({"rope_scaling": None}, "default"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "default"),
        ({"rope_parameters": {"rope_type": "dynamic"}, "rope_scaling": None}, "dynamic"),
    ],
)
def test_kinds_in_the_words_of_transformers_4_and_5(attributes, kind):
    assert rope_kinds(SimpleNamespace(**attributes)) == {"": kind}


def test_an_unknown_kind_is_refused():
    model = tiny_model("llama", layers=1)
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="'spiral'"):
        Rope.of_layers(model)[0]


def test_linear_and_default_differ():
    """The scaling is read at all: half the angle at a factor of 2."""
    default, linear = (
        Rope.of_layers(tiny_model("llama", layers=1, rope_parameters=SCALINGS[kind]))[0]
        for kind in ("default", "linear")
    )
    torch.testing.assert_close(linear.inv_freq * 2, default.inv_freq)
