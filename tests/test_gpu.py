"""The same oracles on a CUDA device. Run with `pytest -m gpu` where there is one."""

from __future__ import annotations

import copy

import pytest
import torch

from tenure import Engine
from tenure.config import EngineConfig
from tenure.kernels import cuda, reference
from tests.conftest import random_ids, stock_logits
from tests.kernels.test_kernels import SHAPES, TOLERANCE, near, tensors
from tests.oracles import check_ledger
from tests.reference import MaskedReference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


def on_gpu(model, dtype=torch.float32, rotate="copy"):
    moved = copy.deepcopy(model).to("cuda", dtype)
    return Engine(moved, config=EngineConfig(device="cuda", rotate=rotate), name="tiny")


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
        session.memory.prepare(len(piece))
        ledger = session.memory.ledger
        held = slice(0, ledger.rows)
        want = masked.run(
            piece, ledger.logical[:, held].cpu(), ledger.position[:, held].cpu(), ledger.next_position
        )
        torch.testing.assert_close(session.feed(piece).cpu(), want, atol=1e-3, rtol=0)
        check_ledger(session)


def test_a_bf16_session_decodes_past_its_budget(models):
    session = on_gpu(models("llama"), torch.bfloat16).session(policy="h2o", budget=64, chunk=64, slack=8)
    session.append_ids(random_ids(200))
    session.force(random_ids(60, seed=1))
    check_ledger(session)
    assert session.feed(random_ids(4)).isfinite().all()


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
