"""Half precision: what was measured decides, for the products that the network has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchboost.core.hardware import device_fault, half_precision, half_precision_is_fast
from torchboost.measure.machine import half_speed


@pytest.mark.parametrize(
    ("products", "convolutions", "count", "fast", "said"),
    [
        (1.5, 0.5, 0, True, "a bfloat16 matrix product takes 0.67 times the time of a float32 one here"),
        (0.5, 2.0, 0, False, "matrix product takes 2.0 times the time"),
        (0.5, 2.0, 53, False, "matrix product takes 2.0 times the time"),
        (2.0, 0.5, 53, False, "convolution takes 2.0 times the time"),
        (2.0, 0.5, None, False, "convolution takes 2.0 times the time"),
        (2.0, 1.5, 53, True, "and a bfloat16 convolution takes 0.67 times"),
        (1.09, 2.0, 53, False, "0.92 times the time of a float32 one here (autocast pays from 0.91 times on down)"),
        (1.11, 1.11, None, True, "0.90 times"),
        (None, 2.0, 53, False, "a bfloat16 matrix product does not run here: no kernel"),
    ],
)
def test_what_was_measured_decides(
    products: float | None,
    convolutions: float,
    count: int | None,
    fast: bool,
    said: str,
    bfloat16: Callable[..., None],
) -> None:
    bfloat16(products, convolutions, fault="no kernel")
    found = half_precision("cpu", count)
    assert found.fast is fast
    assert said in found.reason
    assert half_precision_is_fast("cpu", count) is fast


def test_only_what_the_network_needs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(kind: str, device: torch.device) -> object:
        seen.append(kind)
        return half_speed("matrix product")

    monkeypatch.setattr("torchboost.core.hardware.half_speed", noted)
    half_precision("cpu", 0)
    assert seen == ["matrix product"]


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_that_cannot_be_timed_needs_compute_capability_8(
    capability: tuple[int, int], fast: bool, bfloat16: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bfloat16(None, None, fault="out of memory")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = half_precision(torch.device("cuda", 1), 0)
    assert found.fast is fast
    assert f"compute capability {capability[0]}.{capability[1]}" in found.reason


def test_a_gpu_that_was_timed_is_judged_by_its_times(
    bfloat16: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bfloat16(1.0, 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert half_precision_is_fast("cuda:0") is False


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_device_that_is_not_measured_counts_as_slow(device: str) -> None:
    assert half_precision(device).fast is False
    assert half_precision(device).reason == f"the speed of bfloat16 is not measured on {device}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_here_counts_as_slow() -> None:
    assert half_precision("cuda").fast is False


def test_a_device_that_is_not_here_says_why() -> None:
    assert device_fault("cpu") is None
    for missing in ("cuda:99", "xpu:99"):
        fault = device_fault(missing)
        assert fault
        assert "\n" not in fault
