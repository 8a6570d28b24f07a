from __future__ import annotations

import os

import pytest
import torch

from torchboost.measure import memory
from torchboost.measure.memory import PeakMemory

CPU = torch.device("cpu")
MEBIBYTE = 2**20

readable = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell the peak of a process"
)


@readable
def test_the_peak_is_seen_although_it_was_freed():
    with PeakMemory(CPU) as peak:
        held = torch.ones(10 * MEBIBYTE)
        del held
    assert peak.bytes is not None
    assert 39 * MEBIBYTE <= peak.bytes < 60 * MEBIBYTE


@readable
def test_an_earlier_higher_peak_does_not_count():
    large = torch.ones(30 * MEBIBYTE)
    del large
    with PeakMemory(CPU) as peak:
        held = [torch.ones(MEBIBYTE) for _ in range(5)]
        del held
    assert peak.bytes is not None
    assert 19 * MEBIBYTE <= peak.bytes < 40 * MEBIBYTE


@readable
def test_what_was_held_before_does_not_count():
    held = torch.ones(20 * MEBIBYTE)
    with PeakMemory(CPU) as peak:
        held += 1
    assert peak.bytes is not None
    assert peak.bytes < 20 * MEBIBYTE


def test_none_if_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(memory, "_reset", lambda: False)
    with PeakMemory(CPU) as peak:
        torch.ones(MEBIBYTE)
    assert peak.bytes is None


def test_none_on_other_devices():
    with PeakMemory(torch.device("meta")) as peak:
        pass
    assert peak.bytes is None


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_on_an_accelerator_its_allocator_counts(kind, monkeypatch):
    module = getattr(torch, kind)
    for name, value in {"memory_allocated": 5, "max_memory_allocated": 45, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(module, name, lambda device, value=value: value)
    with PeakMemory(torch.device(kind)) as peak:
        pass
    assert peak.bytes == 40


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_torch_allocates():
    with PeakMemory(torch.device("cuda")) as peak:
        held = torch.ones(10 * MEBIBYTE, device="cuda")
        del held
    assert peak.bytes == 40 * MEBIBYTE
