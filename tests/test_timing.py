"""Clocks that wait for what a device is still doing; no device is needed to see that they do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tenure.bench.ruler.play import read
from tenure.bench.speed import Bench, PeakMemory, SpeedConfig
from tenure.commands import checks
from tenure.compress.gracekv.method import _timed
from tenure.timing import now
from tests.conftest import random_ids

CUDA = torch.device("cuda", 1)


@pytest.fixture
def events(monkeypatch):
    """Devices that were waited for, in order; tests add what they do between."""
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(device))
    return seen


def test_a_cpu_is_not_waited_for_and_a_cuda_device_is(events):
    first = now(torch.device("cpu"))
    assert events == []
    assert now(CUDA) >= first
    assert events == [CUDA]


def test_calls_of_a_bench_are_timed_on_its_own_device(events):
    bench = Bench.__new__(Bench)
    bench.config = SpeedConfig(model="none", device="cuda:1")
    assert bench.time(events.append, "call") >= 0
    assert events == [CUDA, "call", CUDA]


def test_a_context_is_read_when_the_device_has_read_it(events):
    session = SimpleNamespace(append_ids=lambda ids: events.append(ids))
    engine = SimpleNamespace(layout=SimpleNamespace(device=CUDA), session=lambda **options: session)
    assert read(engine, [7, 8], [9]).seconds >= 0
    assert events == [CUDA, [7, 8], CUDA]


def test_stages_of_a_compression_end_when_the_device_has_ended_them(events):
    context = SimpleNamespace(keys=SimpleNamespace(device=CUDA), seconds={})
    with _timed(context, "flow"):
        events.append("flow")
    assert events == [CUDA, "flow", CUDA]
    assert set(context.seconds) == {"flow"}


def test_the_doctor_s_speeds_are_of_that_clock(engines, monkeypatch):
    engine = engines("qwen2")
    ids = random_ids(80)
    ours = checks.Recorded(ids, len(ids), checks._open(engine).feed(ids))
    times = iter([10.0, 12.0, 16.0])
    monkeypatch.setattr(checks, "now", lambda device: next(times))
    assert "512 tokens/s reading, 4.0 answering" in checks.speed(engine, ours).detail


def test_peak_memory_of_the_process():
    with PeakMemory(torch.device("cpu")) as peak:
        held = torch.ones(20_000_000)
        while peak.bytes < held.nbytes:
            pass
    assert peak.bytes >= held.nbytes


def test_peak_memory_of_a_cuda_device(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 * device.index)
    with PeakMemory(CUDA) as peak:
        assert peak.bytes == 1000
    assert calls == [CUDA]
