"""Logits against the stock model (O1) and against the masked reference (O2)."""

from __future__ import annotations

import pytest
import torch

from tenure.policies import POLICIES
from tests.conftest import random_ids, stock_logits, tiny_model
from tests.reference import MaskedReference

FAMILIES = ("llama", "qwen2", "qwen3")
EVICTING = [name for name in POLICIES if name != "full"]
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 10000.0,
    },
}


def chunked(ids: list[int], size: int, last: int = 0) -> list[list[int]]:
    body = ids[: len(ids) - last] if last else ids
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return [*pieces, ids[len(ids) - last :]] if last else pieces


@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_full_cache_equals_stock_model(models, engines, family, executor):
    ids = random_ids(200)
    session = engines(family, executor=executor).session(policy="full", positions="logical", chunk=64)
    logits = torch.cat([session.feed(ids[:90]), session.feed(ids[90:91]), session.feed(ids[91:])])
    torch.testing.assert_close(logits, stock_logits(models(family), ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotary_scalings(models, engines, family, scaling):
    options = {"rope_parameters": SCALINGS[scaling]}
    ids = random_ids(180, seed=1)
    session = engines(family, **options).session(policy="full", positions="logical", chunk=50)
    logits = session.feed(ids)
    torch.testing.assert_close(logits, stock_logits(models(family, **options), ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["phi"])
def test_partial_rotary(models, engines, family):
    ids = random_ids(120, seed=2)
    session = engines(family).session(policy="full", positions="logical", chunk=50)
    torch.testing.assert_close(session.feed(ids), stock_logits(models(family), ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rotate", ["copy", "read"])
@pytest.mark.parametrize("positions", ["bounded", "logical", "compact"])
@pytest.mark.parametrize("policy", EVICTING)
def test_evicting_session_equals_masked_reference(models, engines, policy, positions, rotate):
    """Prompt 200, budget 64 (C09), in pieces of 64, 17 and a last piece of 1."""
    family = FAMILIES[EVICTING.index(policy) % len(FAMILIES)]
    engine = engines(family, rotate=rotate)
    for size, last in ((64, 0), (17, 0), (40, 1)):
        session = engine.session(policy=policy, positions=positions, budget=64, chunk=64, slack=8, limit=None)
        reference = MaskedReference(models(family))
        for piece in chunked(random_ids(200, seed=3), size, last):
            want = reference.beside(session, piece)
            torch.testing.assert_close(session.feed(piece), want, atol=2e-4, rtol=0)
            assert session.memory.ledger.rows <= 64
            if positions == "bounded":
                assert session.memory.ledger.next_position <= session.config.position_limit
            if positions == "compact":
                assert session.memory.ledger.next_position == session.memory.ledger.rows


@pytest.mark.parametrize("policy", EVICTING)
def test_one_piece_longer_than_budget_sees_everything(models, engines, policy):
    """C09: a step's own queries see all they should; eviction comes after it."""
    ids = random_ids(200, seed=4)
    session = engines("qwen2").session(policy=policy, budget=64, chunk=256, slack=8)
    torch.testing.assert_close(session.feed(ids), stock_logits(models("qwen2"), ids), atol=1e-4, rtol=0)
    assert session.memory.ledger.rows == 64


@pytest.mark.parametrize("policy", EVICTING)
def test_causality_probe(engines, policy):
    """C09: a change of the last token leaves the logits before it bit-identical."""
    ids = random_ids(150, seed=5)
    outs = []
    for last in (11, 12):
        session = engines("llama").session(policy=policy, budget=48, chunk=64, slack=8)
        outs.append(torch.cat([session.feed(ids[:100]), session.feed([*ids[100:], last])]))
    assert torch.equal(outs[0][:-1], outs[1][:-1])
    assert not torch.equal(outs[0][-1], outs[1][-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_shift_invariance(engines, family):
    """The same relative positions give the same logits, wherever they are."""
    ids = random_ids(80, seed=6)
    outs = []
    for shift in (0, 37, 1900):
        session = engines(family).session(policy="full", positions="logical", chunk=32)
        session.memory.ledger.next_position = shift
        outs.append(session.feed(ids))
    for other in outs[1:]:
        torch.testing.assert_close(other, outs[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_500_renumbers_leave_the_error_of_one(models, dtype):
    """C07: the stored key has been rotated once, however often it was moved."""
    import copy

    from tenure import Engine

    model = copy.deepcopy(models("llama")).to(dtype)
    engine = Engine(model)
    session = engine.session(policy="random", budget=300, chunk=8, slack=4, positions="compact")
    session.append_ids(random_ids(300, seed=7))
    first = session.memory.rows.raw[:, :, :4].clone()  # the sinks stay for ever
    errors = []
    for round_ in range(500):
        session.append_ids(random_ids(1 + round_ % 7, seed=round_))
        rows = session.memory.ledger.rows
        cos, sin = engine.adapter.rope.cos_sin(torch.arange(rows), largest=rows)
        exact = engine.kernels.rotate(session.memory.rows.raw[:, :, :rows].double(), cos, sin)
        error = (session.memory.rows.rotated[:, :, :rows].double() - exact).abs().max().item()
        errors.append(error)
    assert session.stats().renumbers == 500
    assert torch.equal(session.memory.rows.raw[:, :, :4], first)
    assert errors[-1] <= 2 * errors[0] + 1e-12
    if dtype == torch.float32:
        assert errors[-1] <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("prompt", [3, 17, 40])
def test_a_bf16_prompt_beside_streams(family, prompt):
    """Few tokens run on kernels of their own, near the stock model in fp32."""
    import copy

    from tenure import Engine

    wide = {"hidden_size": 256, **({"head_dim": 64} if family == "qwen3" else {})}
    exact = tiny_model(family, **wide)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    engine = Engine(copy.deepcopy(exact).to(torch.bfloat16))
    texts = [random_ids(count, seed=count) for count in (300, 60, 400)]
    sessions = [engine.session(policy="h2o", budget=512, chunk=256) for _ in texts]
    for session, ids in zip(sessions[:2], texts[:2], strict=True):
        session.append_ids(ids[:-4])
    reader = sessions[2]
    reader.append_ids(texts[2][: -4 * prompt])
    for step in range(4):
        for session, ids in zip(sessions[:2], texts[:2], strict=True):
            session.queue_ids(ids[step - 4 :][:1])
        reader.queue_ids(texts[2][len(texts[2]) + (step - 4) * prompt :][:prompt])
        assert engine.step(sessions) == 2 + prompt
    for session, ids in zip(sessions, texts, strict=True):
        want = stock_logits(exact, ids)[-1]
        assert list(session.memory.ids) == ids
        assert (session.logits - want).norm() <= 0.03 * want.norm()
