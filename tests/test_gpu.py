"""The same oracles on a CUDA device. Run with `pytest -m gpu` where there is one."""

from __future__ import annotations

import copy

import pytest
import torch

from tenure import Engine
from tenure.config import EngineConfig
from tenure.kernels import cpu, cuda, reference
from tenure.models.folder import free_memory
from tests.chats import user
from tests.conftest import random_ids, stock_logits
from tests.kernels.test_kernels import SHAPES, TOLERANCE, near, tensors
from tests.oracles import check_ledger
from tests.planners.chats import drowned
from tests.reference import MaskedReference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


DEVICE = "cuda"


def on_gpu(model, dtype=torch.float32, tokenizer=None, **options):
    moved = copy.deepcopy(model).to(DEVICE, dtype)
    return Engine(moved, tokenizer, config=EngineConfig(device=DEVICE, **options), name="tiny")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rotate", ["copy", "read"])
def test_full_cache_equals_the_stock_model(models, family, rotate):
    ids = random_ids(200)
    session = on_gpu(models(family), rotate=rotate).session(policy="full", positions="logical", chunk=64)
    logits = torch.cat([session.feed(ids[:90]), session.feed(ids[90:91]), session.feed(ids[91:])]).cpu()
    torch.testing.assert_close(logits, stock_logits(models(family), ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("policy", ["recency", "h2o", "foresight"])
@pytest.mark.parametrize("positions", ["bounded", "logical", "compact"])
def test_an_evicting_session_equals_the_masked_reference(models, policy, positions):
    model = models("qwen3")
    session = on_gpu(model).session(policy=policy, positions=positions, budget=64, chunk=64, slack=8)
    masked = MaskedReference(model)
    ids = random_ids(300, seed=3)
    for start in range(0, 300, 50):
        piece = ids[start : start + 50]
        want = masked.beside(session, piece)
        torch.testing.assert_close(session.feed(piece).cpu(), want, atol=1e-3, rtol=0)
        check_ledger(session)


def test_a_bf16_session_decodes_past_its_budget(models):
    session = on_gpu(models("llama"), torch.bfloat16).session(policy="h2o", budget=64, chunk=64, slack=8)
    session.append_ids(random_ids(200))
    session.force(random_ids(60, seed=1))
    check_ledger(session)
    assert session.feed(random_ids(4)).isfinite().all()


def grow(session, count, seed):
    """Read more tokens into the last span."""
    session.memory.queue(random_ids(count, seed=seed), session.memory.last_span)
    session.engine.drain([session])


@pytest.mark.parametrize("reopened", ["saved", "rolled back"])
def test_spans_on_tiers_go_on_where_they_were_reopened(models, tmp_path, reopened):
    """What was captured before comes from a file or a store, and what is captured behind it from the device."""
    engine = on_gpu(models("qwen3"), tiers=("host:1M",))
    session = engine.session(policy="recency", budget=64, chunk=32, slack=8)
    session.append_ids(random_ids(100), span="long")
    session.append_ids(random_ids(16, seed=1), span="open")
    if reopened == "saved":
        assert [len(part) for part in session.memory.capture.parts] == [16]
        session.save(tmp_path / "session")
        session = engine.restore(tmp_path / "session")
    else:
        session.append_ids(random_ids(20, seed=2), span="taken back")
        session.keep_first(108)
        assert [len(part) for part in session.memory.capture.parts] == [8]
    grow(session, 8, seed=3)
    ids = session.memory.ids[100:]
    session.append_ids(random_ids(100, seed=4), span="last")
    assert {part.keys.device.type for part in session.memory.capture.parts} == {"cpu"}
    record = session.memory.archive.get("open")
    assert list(record.ids) == ids.tolist()
    assert session.fetch(["open"]) == ["open"]
    assert session.feed(random_ids(4)).isfinite().all()
    check_ledger(session)


@pytest.mark.parametrize("scorer", ["keys", "both"])
def test_spans_come_back_by_their_keys(models, scorer):
    def engines(family, *, tokenizer, **options):
        return on_gpu(models(family, **options), tokenizer=tokenizer)

    options = {"scorer": scorer, "most": 2, "allowance": 96}
    session = drowned(engines, planner="retrieval", planner_options=options)
    session.ask(user("What does FeeRule round?"), max_tokens=2)
    assert session.planning.edges
    assert all(session.explain(edge.span).resident == 1.0 for edge in session.planning.edges)
    check_ledger(session)


@pytest.mark.parametrize("method", ["gracekv", "snapkv"])
def test_a_session_is_compressed_twice(models, method):
    session = on_gpu(models("qwen2")).session(policy="full", chunk=64)
    for seed in (1, 2):
        session.append_ids(random_ids(150, seed=seed))
        assert session.compress(ratio=4, method=method).entries
    assert len(session.memory.frozen.segments) == 2
    assert session.feed(random_ids(20, seed=3)).isfinite().all()
    session.force(random_ids(4, seed=4))
    check_ledger(session)


def test_an_empty_session_has_nothing_to_compress(models):
    session = on_gpu(models("qwen2")).session(policy="full")
    assert session.compress(ratio=4).entries == 0
    assert session.feed(random_ids(4)).isfinite().all()


def test_memory_that_is_given_back_to_torch_is_free():
    before = free_memory("cuda")
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    assert free_memory("cuda") <= before - held.nbytes
    del held
    assert free_memory("cuda") == before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (50, 333), (64, 64)])
def test_kernels_equal_the_reference(shape, dtype, queries, keys):
    q, k, v = (tensor.cuda() for tensor in tensors(shape, queries, keys, dtype))
    for got, want in zip(
        cuda.extend(q, k, v, scale=0.3)[:2], reference.extend(q, k, v, scale=0.3)[:2], strict=True
    ):
        near(got, want, dtype)
    lse = reference.attend(q, k, v, causal=False, scale=0.3)[1]
    near(
        cuda.attention_mass(q, k, lse, scale=0.3),
        reference.attention_mass(q, k, lse, scale=0.3),
        torch.float32,
        factor=100.0,
    )


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 6), (torch.float32, 12), (torch.bfloat16, 12), (torch.bfloat16, 264)]
)
def test_odd_head_sizes_equal_the_reference(dtype, dim):
    q, k, v = (tensor.cuda() for tensor in tensors((2, 3, dim), 50, 333, dtype))
    for got, want in zip(
        cuda.extend(q, k, v, scale=0.1)[:2], reference.extend(q, k, v, scale=0.1)[:2], strict=True
    ):
        near(got, want, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decoding_and_weighted_keys_equal_those_on_the_cpu(dtype):
    q, k, v = tensors((2, 3, 64), 50, 333, dtype)
    bias = torch.rand(333, generator=torch.Generator().manual_seed(1))
    on_device = [tensor.cuda() for tensor in (q, k, v, bias)]
    got = cuda.decode(on_device[0][:, :, :1], *on_device[1:3], scale=0.1)
    for one, want in zip(got, cpu.decode(q[:, :, :1], k, v, scale=0.1), strict=True):
        near(one.cpu(), want, dtype)
    got = cuda.attend_weighted(on_device[0][0], on_device[1][0], on_device[2][0], on_device[3], scale=0.1)
    for one, want in zip(got, reference.attend_weighted(q[0], k[0], v[0], bias, scale=0.1), strict=True):
        near(one.cpu(), want, dtype)
