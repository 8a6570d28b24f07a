"""Half precision: what the CPU reports decides, unknown devices count as slow."""

from __future__ import annotations

import pytest
import torch

from torchboost.core.hardware import device_fault, half_precision_is_fast


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx512_f": True, "avx2": True}, False), ({}, False)],
)
def test_a_cpu_needs_bfloat16_instructions(
    capabilities: dict[str, bool], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert half_precision_is_fast("cpu") is (fast and torch.backends.mkldnn.is_available())


def test_an_older_torch_that_cannot_tell_promises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert half_precision_is_fast("cpu") is False


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_cuda_needs_compute_capability_8(
    capability: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert half_precision_is_fast(torch.device("cuda", 1)) is fast


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_device_that_was_never_measured_counts_as_slow(device: str) -> None:
    assert half_precision_is_fast(device) is False


def test_a_device_that_is_not_here_says_why() -> None:
    assert device_fault("cpu") is None
    for missing in ("cuda:99", "xpu:99"):
        fault = device_fault(missing)
        assert fault
        assert "\n" not in fault
