"""Memory that was not written holds large numbers."""

from __future__ import annotations

import sys

import pytest
import torch

from torchboost.calibration.dirty_memory import dirty_memory, fill_freed_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only the allocator of glibc fills memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_handed_out_is_large(dtype):
    with dirty_memory():
        for size in (1, 7, 100, 5000, 300_000):
            assert (torch.empty(size, dtype=dtype).float().abs() > 1e29).all()
            assert not torch.zeros(size, dtype=dtype).any()
    for _ in range(3):  # and afterwards programs see what they saw before
        torch.empty(300_000).zero_()


def test_freed_memory_is_filled():
    fill_freed_memory({1000}, torch.device("cpu"))
    found = [torch.empty(1000) for _ in range(4)]
    assert any((each == 1e30).any() for each in found)
