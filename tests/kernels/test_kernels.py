"""Every kernel module against the naive reference, and the reference against one plain softmax."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.kernels import common, cpu, cuda, kernels_for, reference

KERNELS = [cpu]
SHAPES = [  # kv heads, query heads a kv head, head size
    (1, 1, 16),
    (2, 2, 16),
    (1, 3, 64),
    (2, 4, 32),
    (2, 7, 64),
    (1, 2, 128),
]
# bf16 has 8 bits: outputs are rounded once, and the kernels may multiply in bf16 where the reference is fp32.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
# What the modules have in common runs on any device.
anywhere = pytest.mark.parametrize(
    "kernel", [cpu, common, cuda], ids=lambda module: module.__name__.rsplit(".", 1)[-1]
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def tensors(shape, queries, keys, dtype=torch.float32, seed=0):
    heads, groups, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, groups, queries, dim, generator=generator)
    k, v = (torch.randn(heads, keys, dim, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def near(got, want, dtype, factor=1.0):
    assert got.isfinite().all()
    torch.testing.assert_close(
        got.float(), want.float(), atol=factor * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def softmax_attention(q, k, v, scale, hidden=None):
    """One softmax over all keys, in fp64, without a log-sum-exp in sight."""
    logits = q.double() @ k.double()[:, None].transpose(-1, -2) * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    return logits.softmax(-1) @ v.double()[:, None], logits


@pytest.mark.parametrize(
    "kernel", [reference, *KERNELS], ids=lambda module: module.__name__.rsplit(".", 1)[-1]
)
@shapes
@dtypes
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (5, 5), (50, 333), (130, 131), (64, 640)])
def test_new_tokens_see_what_came_before_them(kernel, shape, dtype, queries, keys):
    """Query i stands at key m - n + i; large logits too, as Qwen2.5 has them. Rows may lie apart, as on a slab."""
    q, k, v = tensors(shape, queries, keys, dtype)
    heads, groups, dim = shape
    slab = torch.full((2, heads, keys + 9, dim), math.nan, dtype=dtype)
    slab[0, :, :keys], slab[1, :, :keys] = k, v
    packed = torch.full((heads * groups, queries + 6, dim), math.nan, dtype=dtype)
    packed[:, 4 : 4 + queries] = q.flatten(0, 1)
    apart = packed.view(heads, groups, queries + 6, dim)[:, :, 4 : 4 + queries]
    hidden = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    for scale, factor in ((0.3, 1.0), (8.0, 50.0 if dtype is torch.float32 else 3.0)):
        want, logits = softmax_attention(q, k, v, scale, hidden)
        window = min(5, queries)
        out, lse, mass = kernel.extend(
            apart, slab[0, :, :keys], slab[1, :, :keys], scale=scale, window=window
        )
        near(out, want, dtype, factor)
        near(lse, logits.logsumexp(-1), torch.float32, 50.0)  # logits reach hundreds
        if mass is not None:
            near(mass, logits.softmax(-1)[:, :, -window:].sum(2), torch.float32, 50.0)


@shapes
@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_a_softmax(shape, causal):
    q, k, v = tensors(shape, 7, 7)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    want, logits = softmax_attention(q, k, v, 0.3, hidden)
    out, lse = reference.attend(q, k, v, causal=causal, scale=0.3)
    near(out, want, torch.float32)
    near(lse, logits.exp().sum(-1).log(), torch.float32)


@kernels
@shapes
@dtypes
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(1, 1, True), (33, 33, True), (5, 90, False), (64, 3, False)]
)
def test_attend(kernel, shape, dtype, queries, keys, causal):
    q, k, v = tensors(shape, queries, keys, dtype)
    scale = shape[2] ** -0.5
    out, lse = kernel.attend(q, k, v, causal=causal, scale=scale)
    want, want_lse = reference.attend(q, k, v, causal=causal, scale=scale)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert out.shape == q.shape
    near(out, want, dtype)
    near(lse, want_lse, dtype)


@kernels
@shapes
def test_attend_takes_views_of_a_slab(kernel, shape):
    """Keys and values arrive as the first rows of a larger slab, queries as a transposed view."""
    heads, _, dim = shape
    q, k, v = tensors(shape, 6, 40)
    slab_k, slab_v = torch.full((2, heads, 100, dim), math.nan), torch.full((2, heads, 100, dim), math.nan)
    slab_k[1, :, :40], slab_v[1, :, :40] = k, v
    rows = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    out, _ = kernel.attend(rows, slab_k[1, :, :40], slab_v[1, :, :40], causal=False, scale=0.2)
    near(out, reference.attend(q, k, v, causal=False, scale=0.2)[0], torch.float32)


@anywhere
@shapes
@dtypes
@pytest.mark.parametrize("keys", [1, 2, 130])
def test_decode(kernel, shape, dtype, keys):
    q, k, v = tensors(shape, 1, keys, dtype)
    scale = shape[2] ** -0.5
    out, lse, mass = kernel.decode(q, k, v, scale=scale)
    want, want_lse = reference.attend(q, k, v, causal=False, scale=scale)
    near(out, want, dtype)
    near(lse, want_lse, dtype)
    assert out.dtype == dtype
    assert mass.dtype == torch.float32
    near(mass, reference.attention_mass(q, k, want_lse, scale=scale), dtype)
    near(mass.sum(-1), torch.ones(shape[:2]), dtype)


@anywhere
@shapes
@dtypes
@pytest.mark.parametrize("block", [None, 1, 7, 64])
@pytest.mark.parametrize(("window", "keys"), [(1, 1), (1, 50), (8, 50), (50, 50), (23, 130)])
def test_attention_mass(kernel, shape, dtype, block, window, keys, monkeypatch):
    """Whole or in blocks of keys, with windows on both sides of the block size."""
    heads, groups, dim = shape
    if block is not None:
        monkeypatch.setattr(common, "_BLOCK_BYTES", block * heads * groups * window * 4)
    q, k, v = tensors(shape, keys, keys, dtype)
    scale = dim**-0.5
    _, lse = reference.attend(q, k, v, causal=True, scale=scale)
    last = q[:, :, keys - window :], k, lse[:, :, keys - window :]
    mass = kernel.attention_mass(*last, scale=scale)
    assert mass.dtype == torch.float32
    near(mass, reference.attention_mass(*last, scale=scale), dtype, factor=window**0.5)
    # Each query hands out exactly 1.
    near(mass.sum(-1), torch.full(shape[:2], float(window)), dtype, factor=window)


@shapes
def test_reference_mass_is_the_sum_of_softmax_rows(shape):
    q, k, v = tensors(shape, 20, 20)
    _, logits = softmax_attention(q, k, v, 0.4, torch.ones(20, 20, dtype=torch.bool).triu(1))
    _, lse = reference.attend(q, k, v, causal=True, scale=0.4)
    mass = reference.attention_mass(q[:, :, 15:], k, lse[:, :, 15:], scale=0.4)
    near(mass, logits.softmax(-1)[:, :, 15:].sum(2), torch.float32)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes in fp32."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result.dtype == torch.float32:
            self.bytes = max(self.bytes, result.nbytes)
        return result


@anywhere
@pytest.mark.parametrize("queries", [128, 2000])
def test_attention_mass_memory_is_bounded_by_its_block(kernel, queries, monkeypatch):
    """A whole matrix of scores would be 10 or 160 MB."""
    monkeypatch.setattr(common, "_BLOCK_BYTES", 2**20)
    q, k, _ = tensors((1, 1, 8), queries, 20_000)
    lse = torch.full((1, 1, queries), 20.0)
    with Largest() as largest:
        kernel.attention_mass(q, k, lse, scale=0.3)
    assert 2**19 < largest.bytes <= 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_without_a_fused_kernel_is_bounded_by_its_block(dtype, monkeypatch):
    """Heads of 6 channels, which no fused kernel takes; weighted keys, which none knows."""
    monkeypatch.setattr(common, "_BLOCK_BYTES", 2**16)
    q, k, v = tensors((2, 3, 6), 70, 500, dtype)
    bias = torch.rand(500, generator=torch.Generator().manual_seed(1))
    with Largest() as largest:
        got = cuda.attend(q, k, v, causal=False, scale=0.4)
        weighted = cuda.attend_weighted(q[0], k[0], v[0], bias, scale=0.4)
    assert 2**15 < largest.bytes <= 2**16
    for one, want in (
        (got, reference.attend(q, k, v, causal=False, scale=0.4)),
        (weighted, reference.attend_weighted(q[0], k[0], v[0], bias, scale=0.4)),
    ):
        assert one[0].dtype == dtype
        torch.testing.assert_close(one, want)
    out = cuda.extend(q[:, :, :5], k, v, scale=0.4)[0]
    torch.testing.assert_close(out, reference.extend(q[:, :, :5], k, v, scale=0.4)[0])


@dtypes
def test_mass_on_cuda_is_taken_in_fp32(dtype):
    """A product in bf16 would be rounded by more than the logits differ."""
    q, k, _ = tensors((1, 2, 16), 8, 50, dtype)
    q, k = q * 30, k * 30
    lse = reference.attend(q, k, k, causal=False, scale=0.25)[1]
    got = cuda.attention_mass(q, k, lse, scale=0.25)
    near(got, reference.attention_mass(q, k, lse, scale=0.25), torch.float32, factor=100.0)


@kernels
@shapes
@dtypes
@pytest.mark.parametrize("cuts", [[20], [1, 39], [5, 20]])
def test_merge_of_segments_is_one_softmax(kernel, shape, dtype, cuts):
    q, k, v = tensors(shape, 9, 60, dtype)
    scale = shape[2] ** -0.5
    parts = [
        kernel.attend(q, k[:, a:b], v[:, a:b], causal=False, scale=scale)
        for a, b in itertools.pairwise([0, *cuts, 60])
    ]
    out, lse = kernel.merge(parts)
    want, want_lse = reference.attend(q, k, v, causal=False, scale=scale)
    assert out.dtype == dtype
    near(out, want, dtype)
    near(lse, want_lse, dtype)


@kernels
@pytest.mark.parametrize("side", [-50.0, 50.0])
def test_merge_survives_segments_far_apart(kernel, side):
    """A segment whose logits are hundreds lower or higher must not turn the other into NaN."""
    _, k, v = tensors((1, 2, 16), 3, 30)
    q = torch.ones(1, 2, 3, 16)
    k[:, 10:] += side  # logits 800 away from those of the first segment
    parts = [kernel.attend(q, k[:, a:b], v[:, a:b], causal=False, scale=1.0) for a, b in ((0, 10), (10, 30))]
    out, lse = kernel.merge(parts)
    want, _ = softmax_attention(q, k, v, 1.0)
    assert lse.isfinite().all()
    near(out, want, torch.float32, factor=10)


@anywhere
def test_decode_under_huge_logits(kernel):
    """Two equal keys far above all others share the mass, however large their logit is."""
    _, k, v = tensors((1, 2, 16), 1, 30)
    q = torch.full((1, 2, 1, 16), 11.3)
    k[:, 3] = k[:, 7] = 70.0
    out, _, mass = kernel.decode(q, k, v, scale=1.0)
    near(mass[:, :, [3, 7]], torch.full((1, 2, 2), 0.5), torch.float32)
    near(out, v[:, None, [3, 7]].mean(2, keepdim=True).expand_as(out), torch.float32)


@kernels
@pytest.mark.parametrize("gap", [0.0, 1.3, 20.0])
def test_merge_under_huge_logits(kernel, gap):
    """Heads of Qwen2.5 have log-sum-exps past 10,000, where fp32 goes in steps of 1e-3: the output must not scale."""
    generator = torch.Generator().manual_seed(4)
    one, two = torch.randn(2, 1, 2, 5, 16, generator=generator)
    lse = 12992.3 + torch.rand(1, 2, 5, generator=generator)
    out, _ = kernel.merge([(one, lse), (two, lse - gap)])
    share = torch.sigmoid((lse - gap).double() - lse.double())[..., None]
    near(out, (one.double() * (1 - share) + two.double() * share).float(), torch.float32)


@kernels
def test_merge_of_one_part_is_that_part(kernel):
    q, k, v = tensors((2, 2, 16), 4, 10)
    part = kernel.attend(q, k, v, causal=False, scale=0.25)
    out, lse = kernel.merge([part])
    assert torch.equal(out, part[0])
    assert torch.equal(lse, part[1])


@kernels
@dtypes
@pytest.mark.parametrize(("rotary", "dim"), [(16, 16), (8, 16), (2, 32)])
def test_rotate(kernel, dtype, rotary, dim):
    """Against complex multiplication in fp64; what is behind the rotary channels stays to the bit."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 11, dim, generator=generator).to(dtype)
    angles = torch.rand(11, rotary // 2, generator=generator, dtype=torch.float64) * 100
    pairs = torch.complex(x[..., : rotary // 2].double(), x[..., rotary // 2 : rotary].double())
    turned = pairs * torch.polar(torch.full_like(angles, 1.1), angles)
    want = torch.cat([turned.real, turned.imag, x[..., rotary:].double()], -1)
    cos, sin = (angles.cos() * 1.1).float(), (angles.sin() * 1.1).float()
    got = kernel.rotate(x, cos, sin)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got[..., rotary:], x[..., rotary:])
    near(got, want, dtype)
    near(reference.rotate(x, cos, sin), want, dtype)


@kernels
def test_rotate_rounds_once(kernel):
    """The result in bf16 is the fp32 result, rounded: no half-precision cosine comes between."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001, 3.0, 2.0, 0.5, 0.2])
    got = kernel.rotate(x, angles.cos(), angles.sin())
    want = reference.rotate(x.float(), angles.cos(), angles.sin())
    assert torch.equal(got, want.bfloat16())


@kernels
def test_rotation_depends_on_distance_only(kernel):
    """Turning query and key by the same angle more leaves their product (shift invariance)."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 32, generator=generator)[:, None].unbind()
    inv_freq = 10000.0 ** -(torch.arange(16) / 16)

    def product(at_q, at_k):
        a, b = (torch.tensor([at]) * inv_freq[None] for at in (at_q, at_k))
        turned = kernel.rotate(q, a.cos(), a.sin()), kernel.rotate(k, b.cos(), b.sin())
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(40, 3), product(40 + 1000, 3 + 1000), atol=1e-3, rtol=0)
    assert (product(40, 3) - product(41, 3)).abs() > 1e-3


def test_the_cpu_has_the_cpu_kernels():
    assert kernels_for(torch.device("cpu")) is cpu


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_kernel_modules_have_one_interface(name):
    import importlib

    module = importlib.import_module(f"tenure.kernels.{name}")
    assert {"rotate", "attend", "decode", "attention_mass", "merge"} <= set(vars(module))
