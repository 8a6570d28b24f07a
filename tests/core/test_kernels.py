"""What decides which kernels run is described in plain values."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from torchboost.core.kernels import kernel_switches


def test_the_description_is_json_and_the_same_twice() -> None:
    assert json.loads(json.dumps(kernel_switches())) == kernel_switches()


def test_a_variable_and_a_flag_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_switches()
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    other = kernel_switches()
    assert other != before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the switch warns of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            assert kernel_switches() not in (before, other)
