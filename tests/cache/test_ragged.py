"""``RaggedSegment`` against one plain softmax over the tokens that its entries stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tenure.cache.attend import Forward, Singles, Statistics, Work
from tenure.cache.ragged import Entries, RaggedSegment
from tenure.cache.rows import Layout, RowSegment
from tenure.errors import IntegrityError
from tenure.frozen import Frozen
from tenure.kernels import cpu, reference
from tenure.kernels.native import native

LAYOUT = Layout(layers=2, kv_heads=3, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
GROUP = 2
INV_FREQ = torch.tensor([1.0, 0.3, 0.05, 0.01])
SCALE = LAYOUT.head_dim**-0.5


def cos_sin(positions, layer=0):
    angles = positions.float()[..., None] * INV_FREQ
    return angles.cos(), angles.sin()


def entries(lengths, seed=0, tokens=2, dtype=torch.float32, multiplicity=True):
    """Random entries; each stands for ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths).view(LAYOUT.layers, LAYOUT.kv_heads)
    total = int(lengths.sum())
    start = torch.cat([torch.arange(int(n)) * tokens for n in lengths.flatten()] or [torch.zeros(0)]).int()
    bias = torch.rand(total, generator=generator) * 2 if multiplicity else torch.zeros(total)
    return Entries(
        lengths,
        torch.randn(total, LAYOUT.head_dim, generator=generator).to(dtype),
        torch.randn(total, LAYOUT.head_dim, generator=generator).to(dtype),
        bias,
        start + 1,
        start,
        start + tokens,
        torch.rand(total, generator=generator),
    )


def of(made, kernels=cpu, copy=True):
    made.check(LAYOUT)
    return RaggedSegment.of(made, cos_sin, kernels, copy=copy)


def replace_rotated(segment):
    return RaggedSegment(segment.entries, None, segment.cos_sin, segment.kernels)


def queries(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYOUT.kv_heads, GROUP, count, LAYOUT.head_dim, generator=generator)


def naive(made, layer, head, q):
    """Unnormalised sums in fp64 over the entries of a head, each repeated as its multiplicity says."""
    flat = layer * LAYOUT.kv_heads + head
    stop = int(made.lengths.flatten()[: flat + 1].sum())
    part = slice(stop - int(made.lengths.flatten()[flat]), stop)
    keys = reference.rotate(made.keys[part].float(), *cos_sin(made.position[part])).double()
    weight = (q.double() @ keys.T * SCALE).exp() * made.bias[part].double().exp()
    return weight @ made.values[part].double(), weight.sum(-1)


LENGTHS = [5, 1, 0, 2, 0, 9]


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_attend_is_one_softmax_with_multiplicities(kernels, copy, count):
    segment = of(entries(LENGTHS), kernels, copy)
    q = queries(count)
    for layer in range(LAYOUT.layers):
        out, lse = segment.attend(layer, q, scale=SCALE)
        for head in range(LAYOUT.kv_heads):
            top, total = naive(segment.entries, layer, head, q[head])
            if not segment.entries.lengths[layer, head]:
                assert (lse[head] == -math.inf).all()
                assert (out[head] == 0).all()
                continue
            torch.testing.assert_close(out[head].double(), top / total[..., None], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[head].double(), total.log(), atol=1e-5, rtol=1e-5)


def test_an_entry_with_ln_2_is_two_equal_entries():
    once = entries([3, 3, 3, 3, 3, 3], multiplicity=False)
    twice = Entries(once.lengths * 2, *(x.repeat_interleave(2, 0) for x in (once.keys, once.values, once.bias)),
                    *(x.repeat_interleave(2, 0) for x in (once.position, once.start, once.stop, once.worth)))  # fmt: skip
    double = of(replace(once, bias=once.bias + math.log(2)))
    q = queries(3)
    for layer in range(LAYOUT.layers):
        for a, b in zip(
            double.attend(layer, q, scale=SCALE), of(twice).attend(layer, q, scale=SCALE), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("copy", [True, False])
def test_segments_are_joined_and_the_entries_of_most_worth_stay(copy):
    parts = [of(entries(LENGTHS, seed, tokens=seed + 1), copy=copy) for seed in range(3)]
    whole = RaggedSegment.joined(parts)
    whole.entries.check(LAYOUT)
    assert (whole.rotated is not None) == copy
    q = queries(3)
    for layer in range(LAYOUT.layers):
        outs, lses = zip(*(one.attend(layer, q, scale=SCALE) for one in parts), strict=True)
        lse = torch.stack(lses).logsumexp(0)
        share = (torch.stack(lses) - lse).exp().nan_to_num()
        want = (share[..., None] * torch.stack(outs)).sum(0)
        out, joined = whole.attend(layer, q, scale=SCALE)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(joined, lse, atol=1e-5, rtol=1e-5)
    worth = whole.entries.worth
    for count in (len(worth), 7, 1):
        left = whole.best(count)
        left.entries.check(LAYOUT)
        assert len(left.entries) == count
        assert torch.equal(left.entries.worth.sort().values, worth.sort().values[len(worth) - count :])
    assert whole.best(0) is None
    assert RaggedSegment.joined(parts[:1]) is parts[0]
    frozen = Frozen(tuple(parts))
    assert frozen.within(frozen.slots) is frozen
    assert frozen.within(3).slots == 3
    assert frozen.within(3).entries == 3 * len(LENGTHS)
    assert frozen.within(0) == Frozen()


def test_ranks_are_comparable_whatever_the_measure():
    one = entries([4, 0, 0, 0, 0, 0])
    for scale in (1e-6, 1e6):
        made = replace(one, worth=torch.tensor([3.0, -1.0, 2.0, 2.0]) * scale).ranked()
        assert made.worth.tolist() == [0.75, 0.0, 0.25, 0.5]


def test_of_equal_worth_the_later_entries_stay():
    one = of(replace(entries([4, 0, 0, 0, 0, 0]), worth=torch.zeros(4)))
    assert one.best(2).entries.start.tolist() == one.entries.start[2:].tolist()


def test_a_file_without_worths_is_read():
    one = of(entries(LENGTHS))
    state = {name: array for name, array in one.state().items() if name != "worth"}
    again = RaggedSegment.load(state, LAYOUT, cos_sin, cpu)
    assert torch.equal(again.entries.keys, one.entries.keys)
    assert (again.entries.worth == 0).all()


def test_bf16_stays_near_fp32():
    made = entries(LENGTHS)
    half = replace(made, keys=made.keys.bfloat16(), values=made.values.bfloat16())
    for count in (1, 4):
        q = queries(count)
        out, _ = of(made).attend(0, q, scale=SCALE)
        got, lse = of(half).attend(0, q.bfloat16(), scale=SCALE)
        assert got.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        torch.testing.assert_close(got.float(), out, atol=6e-2, rtol=3e-2)


class Pack:
    """A session's rows and frozen segments in one forward, and the plain sums beside it."""

    def __init__(self, frozen, rows=4, new=1, statistics=None, watch=None):
        generator = torch.Generator().manual_seed(5)
        capacity = rows + new + 1
        positions = torch.arange(20, 20 + capacity)[None].repeat(1, 1)
        self.segment = RowSegment(LAYOUT, capacity, positions, cos_sin, cpu)
        self.frozen, self.rows, self.new = frozen, rows, new
        self.k, self.v = torch.randn(
            2, LAYOUT.layers, LAYOUT.kv_heads, rows + new, LAYOUT.head_dim, generator=generator
        )
        self.q = torch.randn(LAYOUT.kv_heads * GROUP, new, LAYOUT.head_dim, generator=generator)
        self.rotated = cpu.rotate(self.k, *cos_sin(positions[0, : rows + new]))
        if rows:
            for layer in range(LAYOUT.layers):
                self.segment.append(layer, *(x[layer, :, :rows] for x in (self.k, self.v, self.rotated)))
            self.segment.commit(rows)
        self.angles = cos_sin(positions[0, rows : rows + new])
        self.work = Work(self.segment, 0, new, frozen=frozen, statistics=statistics, watch=watch)
        self.forward = Forward([self.work], *self.angles, cpu, SCALE)

    def expected(self, layer):
        """Output and probabilities over the rows, ``[H, new, D]`` and ``[H, new, rows + new]``."""
        q = cpu.rotate(self.q, *self.angles).view(LAYOUT.kv_heads, GROUP, self.new, LAYOUT.head_dim)
        logits = q.double() @ self.rotated[layer].double()[:, None].transpose(-1, -2) * SCALE
        index = torch.arange(self.rows + self.new)
        logits = logits.masked_fill(index > index[self.rows :, None], -math.inf)
        weight = logits.exp()
        top, total = weight @ self.v[layer].double()[:, None], weight.sum(-1)
        for segment in self.frozen:
            for head in range(LAYOUT.kv_heads):
                more, mass = naive(segment.entries, layer, head, q[head])
                top[head] += more
                total[head] += mass
        shape = (LAYOUT.kv_heads * GROUP, self.new, -1)
        return (top / total[..., None]).reshape(shape), (weight / total[..., None]).reshape(shape)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("segments", [1, 2])
def test_rows_and_frozen_segments_are_one_softmax(rows, new, segments):
    frozen = [of(entries(LENGTHS)), of(entries([0, 0, 0, 3, 0, 0], seed=3))][
        :segments
    ]  # two heads are empty in both
    pack = Pack(frozen, rows, new, Statistics(window=0, reduce="mean"))
    for layer in range(LAYOUT.layers):
        out = pack.forward.attend(layer, pack.q, pack.k[layer, :, rows:], pack.v[layer, :, rows:])
        want, _ = pack.expected(layer)
        torch.testing.assert_close(out.transpose(0, 1).double(), want, atol=1e-5, rtol=1e-5)
    mass = sum(pack.expected(layer)[1].mean(0).sum(0) for layer in range(LAYOUT.layers)) / LAYOUT.layers
    torch.testing.assert_close(pack.work.mass[0].double(), mass, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("readable", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_the_decode_step_is_the_same(segments, readable, reduce):
    frozen = [
        of(entries(LENGTHS)),
        of(entries([0, 0, 4, 3, 1, 0], seed=3)),
        of(entries([300, 1, 0, 290, 2, 513], seed=4)),
    ]
    kernels = native()
    if not readable:  # what the kernels cannot read goes the slow way
        frozen = [replace_rotated(one) for one in frozen]
    pack = Pack(frozen[:segments], statistics=Statistics(window=0, reduce=reduce))
    singles = None if kernels is None else Singles.of(pack.forward, kernels, LAYOUT.kv_heads * GROUP)
    assert (singles is not None) == (readable and kernels is not None)
    for layer in range(LAYOUT.layers):
        out = pack.forward.attend(layer, pack.q, pack.k[layer, :, -1:], pack.v[layer, :, -1:], singles)
        torch.testing.assert_close(out[0].double(), pack.expected(layer)[0][:, 0], atol=1e-5, rtol=1e-5)
        assert torch.equal(pack.segment.raw[layer, :, 4], pack.k[layer, :, -1])
    joined = [pack.expected(layer)[1][:, 0] for layer in range(LAYOUT.layers)]
    joined = [one.mean(0) if reduce == "mean" else one.amax(0) for one in joined]
    torch.testing.assert_close(pack.work.mass[0].double(), sum(joined) / LAYOUT.layers, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("new", [1, 3])
def test_a_watcher_sees_raw_queries_and_their_log_sum_exp(new):
    seen = {}
    pack = Pack([of(entries(LENGTHS))], new=new, watch=lambda layer, q, lse: seen.update({layer: (q, lse)}))
    for layer in range(LAYOUT.layers):
        pack.forward.attend(layer, pack.q, pack.k[layer, :, 4:], pack.v[layer, :, 4:])
        q, lse = seen[layer]
        assert torch.equal(q, pack.q)
        q = cpu.rotate(q, *pack.angles).view(LAYOUT.kv_heads, GROUP, new, -1)
        logits = q @ pack.rotated[layer][:, None].transpose(-1, -2) * SCALE
        share = (logits - lse[..., None]).exp().flatten(0, 1)
        want = pack.expected(layer)[1]
        torch.testing.assert_close(share[want > 0].double(), want[want > 0], atol=1e-5, rtol=1e-5)


def test_nbytes_is_what_is_allocated():
    made = entries(LENGTHS)
    total, dim = 17, LAYOUT.head_dim
    plain = total * (2 * dim * 4 + 4 + 3 * 4 + 4) + 6 * 8
    assert of(made, copy=False).nbytes == plain
    assert of(made).nbytes == plain + total * dim * 4
    assert of(made).slots == 3  # 17 / 6


def test_parts_by_logical_index():
    segment = of(entries(LENGTHS))
    before = segment.before(5)  # entries 0-2 and 2-4; 4-6 reaches past it
    assert before.entries.lengths.tolist() == [[2, 1, 0], [2, 0, 2]]
    assert before.stop == 4
    before.entries.check(LAYOUT)
    assert torch.equal(before.rotated, cpu.rotate(before.entries.keys, *cos_sin(before.entries.position)))
    assert segment.before(1) is None
    assert segment.before(18) is segment
    rest = segment.without(2, 5)
    assert rest.entries.lengths.tolist() == [[3, 1, 0], [1, 0, 7]]
    assert segment.without(0, 18) is None
    assert segment.inside(2, 6).tolist() == [[2, 0, 0], [1, 0, 2]]
    assert segment.inside(0, 18).tolist() == segment.entries.lengths.tolist()


def test_state_and_back():
    segment = of(entries(LENGTHS))
    again = RaggedSegment.load(segment.state(), LAYOUT, cos_sin, cpu)
    q = queries(2)
    for a, b in zip(segment.attend(1, q, scale=SCALE), again.attend(1, q, scale=SCALE), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(IntegrityError, match="lacks bias"):
        RaggedSegment.load({k: v for k, v in segment.state().items() if k != "bias"}, LAYOUT, cos_sin, cpu)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lengths", torch.tensor([[5, 1, 0], [2, 0, 8]]), "16 entries"),
        ("bias", torch.full((17,), -1.0), "multiplicity"),
        ("stop", torch.zeros(17, dtype=torch.int32), "no token"),
        ("start", torch.arange(17, 0, -1, dtype=torch.int32) - 1, "logical order"),
        ("keys", torch.full((17, 8), math.nan), "not finite"),
    ],
)
def test_broken_entries_are_found(field, value, message):
    made = replace(entries(LENGTHS), **{field: value})
    if field == "start":
        made = replace(made, stop=made.start + 1)
    with pytest.raises(IntegrityError, match=message):
        made.check(LAYOUT)


def test_other_positions_rotate_the_same_raw_keys():
    segment = of(entries(LENGTHS))
    moved = segment.placed(torch.arange(len(segment.entries)) + 100)
    assert torch.equal(moved.entries.keys, segment.entries.keys)
    assert torch.equal(moved.rotated, cpu.rotate(moved.entries.keys, *cos_sin(moved.entries.position)))
    assert torch.equal(segment.entries.position, entries(LENGTHS).position), "the old one is as it was"


def test_a_shift_of_everything_changes_nothing():
    segment, q = of(entries(LENGTHS, tokens=1)), queries(2)
    out = []
    for shift in (0, 500):
        at = cpu.rotate(q, *cos_sin(torch.tensor([shift + 12, shift + 13])))
        moved = segment.placed(segment.entries.start + shift)
        out.append(moved.attend(0, at, scale=SCALE)[0])
    torch.testing.assert_close(*out, atol=1e-4, rtol=1e-4)
