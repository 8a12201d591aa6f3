"""``RowSegment`` and the attention of a pack, against plain lists of rows."""

from __future__ import annotations

import math

import pytest
import torch

from tenure.cache.attend import Forward, Statistics, Work
from tenure.cache.rows import Layout, RowSegment
from tenure.errors import IntegrityError
from tenure.kernels import cpu, reference

LAYOUT = Layout(layers=3, kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
INV_FREQ = torch.tensor([1.0, 0.3, 0.05, 0.01])


def cos_sin(positions, layer=0):
    angles = positions.float()[..., None] * INV_FREQ
    return angles.cos(), angles.sin()


class Table:
    """A segment beside the list of rows that it should hold, each with its position."""

    def __init__(self, capacity=16, groups=1, copy=True, seed=0):
        self.positions = torch.zeros(groups, capacity, dtype=torch.int64)
        self.segment = RowSegment(LAYOUT, capacity, self.positions, cos_sin, cpu, copy=copy)
        self.groups = groups
        self.rows = [[] for _ in range(LAYOUT.layers)]  # of each layer: (key, value, position)
        self.generator = torch.Generator().manual_seed(seed)
        self.next = 0

    def append(self, count):
        held = self.segment.rows
        places = torch.arange(self.next, self.next + count)
        self.positions[:, held : held + count] = places
        self.next += count
        for layer in range(LAYOUT.layers):
            k, v = torch.randn(2, LAYOUT.kv_heads, count, LAYOUT.head_dim, generator=self.generator)
            self.segment.append(layer, k, v, cpu.rotate(k, *cos_sin(places)))
            self.rows[layer] += [(k[:, i], v[:, i], int(place)) for i, place in enumerate(places)]
        self.segment.commit(count)

    def keep(self, index, poison=False):
        index = torch.tensor(index)
        kept = index.shape[1]
        self.positions[:, :kept] = self.positions.gather(1, index)
        self.segment.keep(index, poison=poison)
        for layer, rows in enumerate(self.rows):
            self.rows[layer] = [rows[i] for i in index[layer % len(index)].tolist()]

    def renumber(self):
        held = self.segment.rows
        self.positions[:, :held] = torch.arange(held)
        self.next = held
        self.rows = [[(k, v, place) for place, (k, v, _) in enumerate(rows)] for rows in self.rows]
        self.segment.renumber()

    def check(self):
        segment = self.segment
        for layer, rows in enumerate(self.rows):
            assert segment.rows == len(rows)
            if not rows:
                continue
            keys = torch.stack([k for k, _, _ in rows], 1)
            places = torch.tensor([place for _, _, place in rows])
            assert torch.equal(segment.raw[layer, :, : segment.rows], keys), "raw keys never change"
            values = torch.stack([v for _, v, _ in rows], 1)
            assert torch.equal(segment.values[layer, :, : segment.rows], values)
            want = reference.rotate(keys, *cos_sin(places))
            torch.testing.assert_close(segment.keys(layer, segment.rows), want, atol=1e-6, rtol=0)


copies = pytest.mark.parametrize("copy", [True, False], ids=["copy", "read"])


@copies
@pytest.mark.parametrize("groups", [1, 3])
def test_append_keep_renumber(copy, groups):
    table = Table(groups=groups, copy=copy)
    table.check()
    table.append(5)
    table.append(1)
    table.check()
    table.keep([[0, 2, 3, 5], [0, 1, 2, 3], [2, 3, 4, 5]][:groups])
    table.check()
    table.append(4)
    table.check()
    table.renumber()
    table.check()
    table.append(3)
    table.keep([[0, 1, 4, 10]] * groups, poison=True)
    table.check()
    table.keep([[0, 1, 2, 3]] * groups)  # nothing goes
    table.check()


@copies
def test_random_walk(copy):
    """200 steps of append, keep and renumber leave every key as it was given, turned once."""
    generator = torch.Generator().manual_seed(5)
    table = Table(capacity=24, groups=3, copy=copy, seed=5)
    for step in range(200):
        room = table.segment.capacity - table.segment.rows
        if room and step % 3:
            table.append(int(torch.randint(1, min(room, 7) + 1, (1,), generator=generator)))
        elif table.segment.rows > 1:
            kept = int(torch.randint(1, table.segment.rows, (1,), generator=generator))
            rows = [torch.randperm(table.segment.rows, generator=generator)[:kept] for _ in range(3)]
            table.keep([row.sort().values.tolist() for row in rows], poison=bool(step % 2))
        if step % 17 == 0:
            table.renumber()
        table.check()


def test_uncommitted_rows_do_not_count():
    table = Table()
    table.append(3)
    before = table.segment.raw[:, :, :3].clone()
    k = torch.full((2, 4, 8), 7.0)
    table.segment.append(0, k, k, k)  # a forward that fails after one layer
    assert table.segment.rows == 3
    assert torch.equal(table.segment.raw[:, :, :3], before)
    table.append(4)  # the next forward writes over it
    table.check()


def test_a_slab_never_overflows():
    table = Table(capacity=4)
    table.append(3)
    k = torch.zeros(2, 2, 8)
    with pytest.raises(IntegrityError, match="5 rows do not fit a slab of 4"):
        table.segment.append(0, k, k, k)
    table.check()


@copies
def test_poison_covers_what_was_freed_and_nothing_else(copy):
    table = Table(copy=copy)
    table.append(10)
    table.keep([[0, 1, 9]], poison=True)
    table.check()
    tensors = [table.segment.raw, table.segment.values]
    tensors += [table.segment.rotated] if copy else []
    for tensor in tensors:
        assert tensor[:, :, :3].isfinite().all()
        assert tensor[:, :, 3:].isnan().all()
    table.append(2)
    table.check()


@copies
def test_keep_none_clears(copy):
    table = Table(copy=copy)
    table.append(4)
    table.segment.keep(torch.empty(1, 0, dtype=torch.int64), poison=True)
    table.rows = [[] for _ in range(LAYOUT.layers)]
    table.check()
    table.append(2)
    table.check()


@copies
def test_nbytes_is_what_was_allocated(copy):
    table = Table(capacity=10, copy=copy)
    one = 3 * 2 * 10 * 8 * 4
    assert table.segment.nbytes == one * (3 if copy else 2)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in table.segment._tensors()
    }
    assert table.segment.nbytes == sum(storages.values())
    table.append(10)
    table.keep([[0]])
    assert table.segment.nbytes == one * (3 if copy else 2), "a slab is fixed"
    assert LAYOUT.token_bytes * 10 == one * 2
    table.segment.free()
    assert table.segment.nbytes == 0
    with pytest.raises(IntegrityError):
        table.append(1)


@copies
def test_grow_keeps_every_row(copy):
    table = Table(capacity=4, copy=copy)
    table.append(4)
    grown = torch.zeros(1, 32, dtype=torch.int64)
    grown[:, :4] = table.positions
    table.positions = grown
    table.segment.grow(32, grown)
    assert table.segment.capacity == 32
    table.check()
    table.append(20)
    table.keep([[0, 3, 5, 23]])
    table.renumber()
    table.check()


@copies
def test_a_clone_is_independent(copy):
    table = Table(copy=copy)
    table.append(6)
    positions = table.positions.clone()
    twin = table.segment.clone(positions)
    assert not {t.data_ptr() for t in twin._tensors()} & {t.data_ptr() for t in table.segment._tensors()}
    held = [tensor.clone() for tensor in twin._tensors()]
    table.keep([[1, 5]], poison=True)
    table.renumber()
    table.append(3)
    table.check()
    assert twin.rows == 6
    for now, then in zip(twin._tensors(), held, strict=True):
        assert torch.equal(now[:, :, :6], then[:, :, :6])
    positions[:, :6] += 100  # a clone reads its own positions
    twin.renumber()
    table.check()
    want = reference.rotate(twin.raw[0, :, :6], *cos_sin(positions[0, :6]))
    torch.testing.assert_close(twin.keys(0, 6), want)


@copies
def test_a_whole_segment_can_be_attended_to(copy):
    table = Table(copy=copy)
    table.append(7)
    q = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(9))
    for layer in range(LAYOUT.layers):
        out, lse = table.segment.attend(layer, q, scale=0.3)
        keys, values = table.segment.keys(layer, 7), table.segment.values[layer, :, :7]
        want, want_lse = reference.attend(q, keys, values, causal=False, scale=0.3)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=0)


# -- a pack of sessions ------------------------------------------------------------------------------


def forward_of(works, first):
    positions = torch.cat(
        [torch.arange(at, at + w.stop - w.start) for w, at in zip(works, first, strict=True)]
    )
    cos, sin = cos_sin(positions)
    return Forward(work=works, cos=cos, sin=sin, kernels=cpu, scale=0.35)


@copies
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_a_pack_equals_a_softmax_for_each_session(copy, groups, reduce, window):
    """Two sessions, one with a chunk and one with a single token: outputs and statistics of each."""
    tables = [Table(groups=groups, copy=copy, seed=1), Table(groups=groups, copy=copy, seed=2)]
    tables[0].append(5)
    tables[1].append(8)
    tables[1].keep([[0, 3, 4, 7]] * groups)
    counts = [4, 1]
    works = []
    for table, count, start in zip(tables, counts, (0, 4), strict=True):
        held = table.segment.rows
        table.positions[:, held : held + count] = torch.arange(table.next, table.next + count)
        statistics = Statistics(window=window, reduce=reduce)
        works.append(Work(table.segment, start, start + count, statistics=statistics, groups=groups))
    forward = forward_of(works, [table.next for table in tables])
    generator = torch.Generator().manual_seed(3)
    want_mass = [torch.zeros_like(work.mass) for work in works]
    for layer in range(LAYOUT.layers):
        q = torch.randn(4, 5, 8, generator=generator)
        k, v = torch.randn(2, 2, 5, 8, generator=generator)
        out = forward.attend(layer, q, k, v)
        for number, (table, count, work) in enumerate(zip(tables, counts, works, strict=True)):
            part = slice(work.start, work.stop)
            rows = table.rows[layer]
            places = [place for _, _, place in rows] + list(range(table.next, table.next + count))
            keys = torch.cat([torch.stack([key for key, _, _ in rows], 1), k[:, part]], 1)
            values = torch.cat([torch.stack([value for _, value, _ in rows], 1), v[:, part]], 1)
            keys = reference.rotate(keys, *cos_sin(torch.tensor(places)))
            turned = reference.rotate(q[:, part], *cos_sin(torch.arange(table.next, table.next + count)))
            logits = turned @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.35
            hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
            logits[..., len(rows) :] = logits[..., len(rows) :].masked_fill(hidden, -math.inf)
            shares = logits.softmax(-1)
            want = (shares @ values.repeat_interleave(2, 0)).transpose(0, 1)
            torch.testing.assert_close(out[part], want, atol=1e-5, rtol=0)
            seen = shares[:, -window:] if window else shares
            mass = seen.sum(1).amax(0) if reduce == "max" else seen.sum(1).mean(0)
            want_mass[number][layer % groups] += mass / (1 if groups > 1 else LAYOUT.layers)
    for work, want in zip(works, want_mass, strict=True):
        torch.testing.assert_close(work.mass, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_frozen_segments_are_seen_by_every_new_token(count):
    table, frozen = Table(seed=1), Table(seed=2)
    table.append(4)
    frozen.append(6)
    held = table.segment.rows
    table.positions[:, held : held + count] = torch.arange(table.next, table.next + count)
    work = Work(table.segment, 0, count, frozen=[frozen.segment])
    forward = forward_of([work], [table.next])
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(4, count, 8, generator=generator)
    k, v = torch.randn(2, 2, count, 8, generator=generator)
    out = forward.attend(0, q, k, v)
    new = torch.arange(table.next, table.next + count)
    keys = torch.cat(
        [frozen.segment.keys(0, 6), table.segment.keys(0, 4), reference.rotate(k, *cos_sin(new))], 1
    )
    values = torch.cat([frozen.segment.values[0, :, :6], table.segment.values[0, :, :4], v], 1)
    logits = reference.rotate(q, *cos_sin(new)) @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.35
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    logits[..., 10:] = logits[..., 10:].masked_fill(hidden, -math.inf)
    want = (logits.softmax(-1) @ values.repeat_interleave(2, 0)).transpose(0, 1)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
