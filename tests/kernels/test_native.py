"""The C kernels against the same arithmetic in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import psutil
import pytest
import torch

from tenure.kernels import reference
from tenure.kernels.decoding import Step, Steps
from tenure.kernels.native import native
from tenure.kernels.products import MAX_TOKENS
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
    """What the kernel multiplies by: more than a few tokens are rounded where there are bf16 products, and all of them
    where there are int8 products, a span with a scale of its own."""
    if dtype is torch.int8 and (span := native().int8_span):
        spans = torch.nn.functional.pad(x, (0, -x.shape[1] % span)).unflatten(1, (-1, span))
        top = spans.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        rounded = (spans * (127 / top)).round().double() * (top.double() / 127)
        return rounded.flatten(1)[:, : x.shape[1]]
    rounds = dtype is torch.bfloat16 and len(x) > 3 and native().has_products
    return x.bfloat16() if rounds else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, MAX_TOKENS, 13, 31])
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
@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("large", [1.0, 60.0])
def test_gated_linear(dtype, tokens, bias, large):
    made = projection(dtype, 22, 17, bias)
    x = numbers(tokens, 17, seed=3) * large
    out = torch.full((tokens, 11), math.nan)
    made.few(native(), x, out, gated=True)
    both = seen(x, dtype).double() @ dense(made).T + (numbers(22, seed=2).double() if bias else 0)
    gate, up = both.chunk(2, -1)
    near(out, torch.nn.functional.silu(gate) * up, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_any_number_of_tokens(dtype, tokens, bias):
    """In two parts where torch's is not good at the number: no row is lost, none is taken twice."""
    made = projection(dtype, 48, 96, bias)
    made = replace(made, bias=None if made.bias is None else made.bias.bfloat16())
    x = numbers(tokens, 96, seed=3).bfloat16()
    rounded = tokens <= native().few(dtype) or (native().can_multiply(x) and dtype is torch.int8)
    taken = seen(x.float(), dtype) if rounded else x
    want = taken.double() @ dense(made).T + (made.bias.double() if bias else 0)
    near(made(x), want, 0.1)  # bf16 results up to 30, int8 weights rounded once more


@pytest.mark.parametrize("tokens", [9, 14, 1030])
@pytest.mark.parametrize(("outputs", "width"), [(2, 5), (22, 17), (86, 131), (64, 128)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("large", [2.0**-5, 2.0])
def test_products_of_many_tokens_with_int8_weights(tokens, outputs, width, bias, large):
    """Widths and numbers of outputs that fill no tile, more tokens than a packing serves; gated, too."""
    x = (127 * numbers(tokens, width, seed=3).tanh()).round()
    x[:, :: native().int8_span or 1] = 127  # so that nothing is rounded
    x = (x * large).bfloat16()
    if not native().can_multiply(x):
        pytest.skip("no integer products on vectors")
    made = projection(torch.int8, outputs, width, bias)
    made = replace(made, bias=None if made.bias is None else made.bias.bfloat16())
    want = x.double() @ dense(made).T + (made.bias.double() if bias else 0)
    near(made(x), want, 0.01)
    gate, up = want.chunk(2, -1)
    near(made.gated(native(), x), torch.nn.functional.silu(gate) * up, 0.01)


def test_int8_products_of_a_token_are_the_same_alone_and_in_a_chunk():
    """Both kernels round activations alike, so that the chunk does not show in what a session says."""
    x = numbers(40, 200, seed=3).bfloat16()
    if not native().can_multiply(x):
        pytest.skip("no integer products on vectors")
    made = projection(torch.int8, 96, 200, True)
    made = replace(made, bias=made.bias.bfloat16())
    alone = torch.cat([made(row[None]) for row in x])
    near(alone, made(x), 0.01)
    assert (alone == made(x)).float().mean() > 0.98  # the rest differs by the order of fp32 sums


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("place", [0, 63, 150])
def test_int8_products_show_what_is_no_number(tokens, place):
    """Rounded to an integer it would be gone without a trace."""
    made = projection(torch.int8, 40, 200, False)
    x = numbers(tokens, 200, seed=3)
    x[1, place] = math.nan
    got = made.few(native(), x, torch.empty(tokens, 40))
    assert got.isnan().any(1).tolist() == [row == 1 for row in range(tokens)]
    if native().can_multiply(x.bfloat16()):
        assert made(x.bfloat16()).isnan().any(1).tolist() == [row == 1 for row in range(tokens)]


@pytest.mark.slow
def test_products_of_many_numbers_of_tokens_take_no_memory():
    """torch alone keeps 110 MB of compiled code after these 153 numbers."""
    made = projection(torch.bfloat16, 256, 256, False)
    x = numbers(2048, 256, seed=3).bfloat16()
    process = psutil.Process()
    made(x)
    before = process.memory_info().rss
    for tokens in range(65, 2048, 13):
        made(x[:tokens])
    assert process.memory_info().rss - before < 50e6


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


@pytest.mark.parametrize("shape", [(1, 8), (3, 33), (5, 2, 64)], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_norm_of_rows(shape, adds):
    x, weight = numbers(*shape, seed=6).bfloat16(), numbers(shape[-1], seed=7)
    more = numbers(*shape, seed=8).bfloat16() if adds else None
    added = x + more if adds else x.clone()
    wide = added.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    near(native().norm_rows(x, weight, 1e-6, more), want, 0.005)
    assert torch.equal(x, added)


@pytest.mark.parametrize("half", [1, 40, 67])
def test_gates_of_rows(half):
    x = (numbers(5, 2 * half, seed=6) * 30).bfloat16()
    x[0, 0], x[1, 0] = -3e4, 3e4  # where e^x is no fp32 number
    gate, up = x.double().chunk(2, -1)
    want = gate * torch.special.expit(gate) * up
    near(native().gate_rows(x), want, 0.005)


@pytest.mark.parametrize(("dim", "half"), [(16, 8), (18, 5)])
def test_rotation_of_rows(dim, half):
    """Heads that lie apart, channels beyond the rotary size."""
    x = numbers(7, 3, dim, seed=6).bfloat16().transpose(0, 1)
    angles = numbers(7, half, seed=7)
    cos, sin = angles.cos(), angles.sin()
    assert native().can_rotate(x, cos)
    got = native().rotate_rows(x, cos, sin)
    near(got, reference.rotate(x.double(), cos.double(), sin.double()), 0.005)
    assert torch.equal(got[..., 2 * half :], x[..., 2 * half :])
    assert not native().can_rotate(x.float(), cos)
    assert not native().can_rotate(x, cos[:1])


class Sessions:
    """Sessions of one token behind ``rows`` others each; NaN where the kernel must not read."""

    def __init__(self, rows, *, dtype, kv_heads, group, dim, half, layers=1, mean=False, groups=1):
        self.kv_heads, self.group, self.layers = kv_heads, group, layers
        self.mean, self.groups = mean, groups
        self.qkv = numbers(len(rows), kv_heads * (group + 2), dim, seed=8)
        self.steps = []
        for n, row in enumerate(rows):
            slab = tuple(
                torch.full((layers, kv_heads, row + 3, dim), math.nan, dtype=dtype) for _ in range(3)
            )
            for number, tensor in enumerate(slab):
                tensor[:, :, :row] = numbers(layers, kv_heads, row, dim, seed=number + 10 * n).to(dtype)
            angles = numbers(half, seed=9 + n)
            mass = torch.full((groups, row + 1), 0.5)
            self.steps.append(Step(slab, row, angles.cos(), angles.sin(), mass, 0.25, mean))

    def attend(self, layer, others=()):
        heads = self.kv_heads * self.group
        out = torch.full((len(self.steps), heads, self.qkv.shape[-1]), math.nan)
        steps = Steps(self.steps, heads)
        native().attention(steps, layer, self.qkv, out, scale=0.3, others=others)
        return out

    def shares(self, n, layer):
        """Softmax of one session's token ``[heads, 1, row + 1]``, fp64."""
        step, heads = self.steps[n], self.kv_heads * self.group
        query = reference.rotate(self.qkv[n, :heads, None], step.cos, step.sin).double()
        keys = step.slab[2][layer, :, : step.row + 1].double().repeat_interleave(self.group, 0)
        return (query @ keys.transpose(1, 2) * 0.3).softmax(-1)

    def check(self, out, layer):
        heads = self.kv_heads * self.group
        for n, step in enumerate(self.steps):
            raw, values, rotated = (tensor[layer] for tensor in step.slab)
            k, v = self.qkv[n, heads : heads + self.kv_heads], self.qkv[n, heads + self.kv_heads :]
            turned = reference.rotate(k[:, None], step.cos, step.sin)[:, 0]
            assert torch.equal(raw[:, step.row], k.to(raw.dtype))
            assert torch.equal(values[:, step.row], v.to(raw.dtype))
            near(rotated[:, step.row], turned, 1e-6 if raw.dtype is torch.float32 else 8e-3)
            assert all(tensor[:, step.row + 1 :].isnan().all() for tensor in (raw, values, rotated))
            shares = self.shares(n, layer)
            near(
                out[n],
                (shares @ values[:, : step.row + 1].double().repeat_interleave(self.group, 0))[:, 0],
                1e-4,
            )

    def joined(self, n, layer):
        shares = self.shares(n, layer)[:, 0]
        return shares.mean(0) if self.mean else shares.amax(0)


SHAPES = [
    (1, 1, 8, 4),
    (2, 2, 16, 8),
    (2, 4, 16, 3),
    (3, 3, 24, 12),
    (3, 3, 64, 32),
    (1, 7, 64, 32),
    (1, 9, 128, 32),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim", "half"), SHAPES)
@pytest.mark.parametrize("rows", [[0], [1], [40], [255], [256], [600], [300, 0, 15, 512]], ids=str)
@pytest.mark.parametrize("mean", [False, True])
def test_attention(dtype, kv_heads, group, dim, half, rows, mean):
    """One token behind ``rows`` others of each session: what it appends, reads and weighs."""
    made = Sessions(rows, dtype=dtype, kv_heads=kv_heads, group=group, dim=dim, half=half, mean=mean)
    made.check(made.attend(0), 0)
    for n, step in enumerate(made.steps):
        near(step.mass[0], 0.5 + 0.25 * made.joined(n, 0), 1e-5)


@pytest.mark.parametrize("groups", [1, 3], ids=["shared", "layers"])
def test_attention_of_layers(groups):
    made = Sessions(
        [5, 290], dtype=torch.bfloat16, kv_heads=2, group=2, dim=64, half=32, layers=3, groups=groups
    )
    for layer in range(3):
        made.check(made.attend(layer), layer)
    for n, step in enumerate(made.steps):
        parts = torch.stack([made.joined(n, layer) for layer in range(3)])
        near(step.mass, 0.5 + 0.25 * (parts if groups == 3 else parts.sum(0, keepdim=True)), 1e-5)


def test_attention_without_mass():
    slab = tuple(torch.zeros(1, 1, 4, 8) for _ in range(3))
    out = torch.full((1, 2, 8), math.nan)
    qkv = numbers(1, 4, 8)
    steps = Steps([Step(slab, 0, torch.ones(4), torch.zeros(4))], 2)
    native().attention(steps, 0, qkv, out, scale=1.0)
    near(out[0], qkv[0, 3].expand(2, 8))


def test_mass_of_a_session_longer_than_a_stack():
    rows, dim = 2_200_000, 8
    raw, values, rotated = (torch.zeros(1, 1, rows, dim, dtype=torch.bfloat16) for _ in range(3))
    mass = torch.zeros(1, rows)
    straight = torch.ones(dim // 2), torch.zeros(dim // 2)
    steps = Steps([Step((raw, values, rotated), rows - 1, *straight, mass=mass, mean=True)], 2)
    steps.parts, steps.width = 1, rows
    steps.scratch = torch.empty(2 * (rows + dim + 2))
    native().attention(steps, 0, numbers(1, 4, dim), torch.empty(1, 2, dim), scale=0.0)
    near(mass, torch.full((1, rows), 1 / rows), 1e-10)


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
