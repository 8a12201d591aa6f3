"""The C kernels against the same arithmetic in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from tenure.kernels import reference
from tenure.kernels.native import MAX_TOKENS, native
from tenure.models.weights import Projection

pytestmark = pytest.mark.skipif(native() is None, reason="no C compiler")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(got, want, tolerance=1e-5):
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def projection(dtype, outputs, width, bias):
    weight = numbers(outputs, width, seed=1)
    offset = numbers(outputs, seed=2) if bias else None
    if dtype is torch.int8:
        return Projection.of(weight, offset, int8=True)
    return Projection.of(weight.to(dtype), offset, int8=False)


def dense(made):
    """The weight that a projection stands for, in fp64."""
    weight = made.weight.double()
    return weight if made.weight.dtype is not torch.int8 else weight * made.scale.double()[:, None]


def seen(x, dtype):
    """What the kernel multiplies by: more than a few tokens are rounded where there are bf16 products."""
    rounds = dtype is torch.bfloat16 and len(x) > 3 and native().has_products
    return x.bfloat16() if rounds else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, MAX_TOKENS])
@pytest.mark.parametrize(("outputs", "width"), [(1, 5), (7, 33), (64, 96)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_linear(dtype, tokens, outputs, width, bias, add):
    made = projection(dtype, outputs, width, bias)
    x, before = numbers(tokens, width, seed=3), numbers(tokens, outputs, seed=4)
    out = before.clone() if add else torch.full_like(before, math.nan)
    made.few(native(), x, out, add=add)
    want = seen(x, dtype).double() @ dense(made).T
    want += numbers(outputs, seed=2).double() if bias else 0
    near(out, want + before.double() if add else want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear(dtype, tokens, bias):
    made = projection(dtype, 22, 17, bias)
    x = numbers(tokens, 17, seed=3)
    out = torch.full((tokens, 11), math.nan)
    made.few(native(), x, out, gated=True)
    both = x.double() @ dense(made).T + (numbers(22, seed=2).double() if bias else 0)
    gate, up = both.chunk(2, -1)
    near(out, torch.nn.functional.silu(gate) * up, 1e-4)


def test_int8_rounds_to_a_scale_a_row():
    weight = numbers(9, 40, seed=5) * torch.logspace(-3, 3, 9)[:, None]
    made = Projection.of(weight, None, int8=True)
    largest = weight.abs().amax(1)
    assert ((dense(made) - weight).abs().amax(1) <= largest / 127 * 0.51).all()


@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 16)], ids=str)
def test_rms_norm(shape):
    x, weight = numbers(*shape, seed=6), numbers(shape[-1], seed=7)
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    near(native().rms_norm(x, weight, torch.empty_like(x), 1e-6), want)
    near(native().rms_norm(x, weight, x, 1e-6), want)  # in place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "half"), [(1, 1, 8, 4), (2, 2, 16, 8), (2, 4, 16, 3), (3, 3, 24, 12)]
)
@pytest.mark.parametrize("row", [0, 1, 40, 255, 256, 600])
@pytest.mark.parametrize("mean", [False, True])
def test_attention(dtype, kv_heads, group, dim, half, row, mean):
    """One token behind ``row`` others: what it appends, reads and weighs; NaN everywhere else."""
    heads, capacity = kv_heads * group, row + 3
    slab = tuple(torch.full((kv_heads, capacity, dim), math.nan, dtype=dtype) for _ in range(3))
    raw, values, rotated = slab
    for number, tensor in enumerate(slab):
        tensor[:, :row] = numbers(kv_heads, row, dim, seed=number).to(dtype)
    qkv = numbers(heads + 2 * kv_heads, dim, seed=8)
    angles = numbers(half, seed=9)
    cos, sin = angles.cos(), angles.sin()
    out, mass = torch.full((heads, dim), math.nan), torch.full((row + 1,), 0.5)
    native().attention(qkv, cos, sin, slab, row, out, scale=0.3, mass=mass, share=0.25, mean=mean)

    q, k, v = qkv[:heads], qkv[heads : heads + kv_heads], qkv[heads + kv_heads :]
    turned = reference.rotate(k[:, None], cos, sin)[:, 0]
    assert torch.equal(raw[:, row], k.to(dtype))
    assert torch.equal(values[:, row], v.to(dtype))
    near(rotated[:, row], turned, 1e-6 if dtype is torch.float32 else 8e-3)
    assert all(tensor[:, row + 1 :].isnan().all() for tensor in slab)

    query = reference.rotate(q[:, None], cos, sin).double()
    keys = rotated[:, : row + 1].double().repeat_interleave(group, 0)
    shares = (query @ keys.transpose(1, 2) * 0.3).softmax(-1)
    near(out, (shares @ values[:, : row + 1].double().repeat_interleave(group, 0))[:, 0], 1e-4)
    joined = shares[:, 0].mean(0) if mean else shares[:, 0].amax(0)
    near(mass, 0.5 + 0.25 * joined, 1e-5)


def test_attention_without_mass():
    slab = tuple(torch.zeros(1, 4, 8) for _ in range(3))
    out = torch.full((2, 8), math.nan)
    qkv = numbers(4, 8)
    native().attention(
        qkv, torch.ones(4), torch.zeros(4), slab, 0, out, scale=1.0, mass=None, share=1.0, mean=False
    )
    near(out, qkv[3].expand(2, 8))


def test_what_the_kernels_can_read():
    slab = torch.zeros(1, 2, 8)
    assert native().can_read(slab, slab)
    assert native().can_read(slab.bfloat16(), slab.bfloat16())
    assert not native().can_read(slab.half(), slab.half())
    assert not native().can_read(slab, None), "without a rotated copy"


def test_loading_the_kernels_leaves_denormals_alone():
    """A library linked with fast maths would turn them off for the whole process."""
    assert native() is not None
    assert float(torch.tensor(1e-40) * 0.5) > 0
    assert 5e-324 * 1.0 > 0
