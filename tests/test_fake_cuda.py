"""Where tensors lie, on fake CUDA devices: an operation that mixes devices raises there, and nothing is computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.cache.rows import Layout, RowSegment
from tenure.capture import Capture
from tenure.engine import Engine, compute_dtype
from tenure.kernels import cuda
from tenure.ledger import Ledger
from tenure.models.folder import free_memory
from tenure.models.rope import Rope
from tenure.planners.keys import _largest
from tenure.regions import Region
from tenure.spans import Span
from tenure.tiers.record import SpanRecord
from tests.conftest import random_ids
from tests.test_restore import Shelf

CUDA = torch.device("cuda", 0)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Indexing(TorchFunctionMode):
    """Takes indices apart into views: torch's own indexing wants a guard of the device, which a build for CPUs lacks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            return part_of(*args)
        if func is Tensor.__setitem__:
            return part_of(*args[:2]).copy_(args[2])
        return func(*args, **(kwargs or {}))


def part_of(tensor: Tensor, index: object) -> Tensor:
    """``tensor[index]`` of numbers, slices without a step, None and an ellipsis in front."""
    parts = index if isinstance(index, tuple) else (index,)
    dim = 0
    for one in parts:
        if one is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif one is Ellipsis:
            dim = tensor.dim() - sum(part is not None for part in parts[1:])
        elif isinstance(one, slice):
            start, stop, _ = one.indices(tensor.shape[dim])
            tensor, dim = tensor.narrow(dim, start, stop - start), dim + 1
        else:
            tensor = tensor.select(dim, one)
    return tensor


@contextmanager
def fake_devices() -> Iterator[None]:
    with FakeTensorMode(), Indexing():
        yield


def devices(record):
    return {tensor.device.type for tensor in (record.keys, record.values, record.score)}


def test_captured_rows_wait_in_host_memory_and_join_what_a_file_had():
    ids = array("I", random_ids(30))
    with fake_devices():
        ledger = Ledger(1, 64, CUDA)
        layout = Layout(layers=2, kv_heads=1, head_dim=8, dtype=BF16, device=CUDA)
        rows = RowSegment(layout, 64, ledger.position, lambda positions: (positions, positions), cuda)
        shelf = Shelf()
        capture = Capture(shelf)
        ledger.spans.add(Span("open", 0, 10, Region.USER))
        ledger.rows = ledger.length = 10
        capture.take(ledger, rows, ids)
        assert [devices(part) for part in capture.parts] == [{"cpu"}]
        saved = [torch.empty(2, 1, 10, 8, dtype=BF16), torch.empty(2, 1, 10, 8, dtype=BF16)]
        capture.resume(10, [SpanRecord("open", 0, ids[:10], *saved, torch.empty(1, 10))])
        ledger.spans.get("open").stop = 16
        ledger.spans.add(Span("next", 16, 20, Region.USER))
        ledger.rows = ledger.length = 20
        capture.take(ledger, rows, ids)
        assert devices(shelf.records["open"]) == {"cpu"}
        assert shelf.records["open"].keys.shape == (2, 1, 16, 8)


def test_keys_are_scored_beside_a_model_on_the_device():
    with fake_devices():
        rope = Rope(inv_freq=torch.empty(8, device=CUDA), attention_factor=1.0, kind="default")
        engine = SimpleNamespace(
            adapter=SimpleNamespace(ropes=[rope], scale=0.25), layout=SimpleNamespace(device=CUDA)
        )
        spans = [torch.empty(2, tokens, 16, dtype=BF16) for tokens in (5, 1, 3)]
        found = _largest(engine, 0, torch.empty(4, 3, 16), spans, 100)
        assert found.shape == (4, 3, 3)
        assert found.device.type == "cpu"


class Called(TorchDispatchMode):
    """Names of the operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "kernel"),
    [
        (BF16, 64, (9, 0), "flash"),
        (FP16, 256, (8, 0), "flash"),
        (BF16, 264, (9, 0), "efficient"),
        (FP16, 64, (7, 5), "efficient"),
        (BF16, 64, (7, 5), None),
        (BF16, 12, (9, 0), None),
        (FP32, 64, (9, 0), "efficient"),
        (FP32, 12, (7, 5), "efficient"),
        (FP32, 6, (9, 0), None),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_size_has_a_kernel(dtype, dim, capability, kernel, causal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with fake_devices():
        q = torch.empty(2, 3, 5, dim, dtype=dtype, device=CUDA)
        k, v = (torch.empty(2, 5, dim, dtype=dtype, device=CUDA) for _ in range(2))
        with Called() as called:
            out, lse = cuda.attend(q, k, v, causal=causal, scale=0.3)
        assert (out.shape, out.dtype, out.device) == (q.shape, dtype, CUDA)
        assert (lse.shape, lse.dtype, lse.device) == (q.shape[:3], FP32, CUDA)
    fused = [name for name in called.names if "scaled_dot_product" in name]
    assert fused == ([] if kernel is None else [f"aten::_scaled_dot_product_{kernel}_attention"])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_statistics_stay_on_the_device(dtype, monkeypatch):
    monkeypatch.setattr("tenure.kernels.common._BLOCK_BYTES", 2**10)
    with fake_devices():
        q = torch.empty(2, 3, 7, 16, dtype=dtype, device=CUDA)
        k = torch.empty(2, 90, 16, dtype=dtype, device=CUDA)
        lse = torch.empty(2, 3, 7, device=CUDA)
        bias = torch.empty(90, device=CUDA)
        made = [
            cuda.attention_mass(q, k, lse, scale=0.3),
            *cuda.decode(q[:, :, :1], k, k, scale=0.3),
            *cuda.attend_weighted(q[0], k[0], k[0], bias, scale=0.3),
        ]
        assert {one.device for one in made} == {CUDA}


@pytest.mark.parametrize(("ampere", "dtype"), [(True, BF16), (False, FP16)])
def test_bf16_is_the_default_where_the_device_itself_computes_in_it(ampere, dtype, monkeypatch):
    asked = []

    def supported(including_emulation=True):
        return including_emulation or ampere

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(asked.append(device)))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    other = torch.device("cuda", 1)
    assert compute_dtype("auto", other) is dtype
    assert asked == [other]


def test_what_joining_the_weights_leaves_over_is_given_back_at_load(monkeypatch):
    done = []
    found = SimpleNamespace(path="", weight_bytes=0, parameters=0)
    model = SimpleNamespace(to=lambda device: done.append(device))
    monkeypatch.setattr("tenure.engine.compute_device", torch.device)
    monkeypatch.setattr("tenure.models.sources.resolve", lambda name: found)
    monkeypatch.setattr("tenure.models.folder.check_memory", lambda *_, **__: None)
    monkeypatch.setattr("tenure.models.load.check_config", lambda path: None)
    monkeypatch.setattr("tenure.models.load.load_tokenizer", lambda path: None)
    monkeypatch.setattr("tenure.models.load.load_weights", lambda path, dtype: model)
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: done.append("joined"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))
    Engine.load("any", dtype="fp32", device="cuda:0")
    assert done == [CUDA, "joined", "given back"]


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch):
    held = {
        "reserved_bytes.all.current": 700,
        "allocated_bytes.all.current": 400,
        "inactive_split_bytes.all.current": 50,
    }
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device) or 1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: (asked.append(device), held)[1])
    assert free_memory("cuda:1") == 1250
    assert asked == ["cuda:1", "cuda:1"]
    held.clear()  # before torch has used the device
    assert free_memory("cuda:1") == 1000
