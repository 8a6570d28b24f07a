"""Half precision: what was measured decides, for the products that the network has. Kernels have switches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchboost.core import hardware
from torchboost.core.hardware import device_fault, half_precision, kernel_switches
from torchboost.measure.machine import Products


def test_what_was_measured_decides(bfloat16: Callable[..., None]) -> None:
    for products, convolutions, count, fast, said in (
        (1.5, 0.5, 0, True, "a bfloat16 matrix product takes 0.67 times the time of a float32 one here"),
        (0.5, 2.0, 53, False, "matrix product takes 2.0 times the time"),
        (2.0, 0.5, 53, False, "convolution takes 2.0 times the time"),
        (2.0, 0.5, None, False, "convolution takes 2.0 times the time"),
        (2.0, 1.5, 53, True, "and a bfloat16 convolution takes 0.67 times"),
        (1.24, 2.0, 53, False, "0.81 times the time of a float32 one here (autocast pays from 0.80 times on down)"),
        (1.26, 1.26, None, True, "0.79 times"),
        (None, 2.0, 53, False, "a bfloat16 matrix product does not run here: no kernel"),
    ):
        bfloat16(products, convolutions, fault="no kernel")
        found = half_precision("cpu", count)
        assert found.fast is fast
        assert said in found.reason


def test_a_gpu_is_judged_by_its_times_and_without_them_by_its_compute_capability(
    bfloat16: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "device_name", lambda device: "a GPU")
    for capability, ratio, fast in (((7, 5), None, False), ((8, 0), None, True), ((9, 0), 1.0, False)):
        bfloat16(ratio, ratio, fault="out of memory")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        found = half_precision(torch.device("cuda", 1), 0)
        assert found.fast is fast
        assert (f"compute capability {capability[0]}.{capability[1]}" in found.reason) is (ratio is None)


def test_a_device_that_is_not_measured_or_not_here_counts_as_slow_and_says_why() -> None:
    for device in ("mps", "xpu", "meta"):
        assert half_precision(device).fast is False
        assert half_precision(device).reason == f"the speed of bfloat16 is not measured on {device}"
    assert torch.cuda.is_available() or half_precision("cuda").fast is False
    assert device_fault("cpu") is None
    for missing in ("cuda:99", "xpu:99"):
        fault = device_fault(missing)
        assert fault
        assert "\n" not in fault


class Measured:
    """Plants the next measurement in another process, and counts how many were asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.plant(2.0)

    def __call__(self, kind: str, device: torch.device) -> Products:
        self.count += 1
        return self.next

    def plant(self, ratio: float | None, *, in_time: bool = True, pairs: int = 9) -> None:
        self.next = Products(kind="matrix product", ratio=ratio, pairs=pairs, in_time=in_time, fault="no kernel")
        hardware._decision.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """A machine with a cache folder."""
    planted = Measured()
    monkeypatch.setattr("torchboost.core.hardware.half_speed", planted)
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path))
    return planted


def test_a_machine_is_measured_once_for_each_product(measured: Measured, tmp_path: Path) -> None:
    first = half_precision("cpu", 0)
    assert first.reason == "a bfloat16 matrix product takes 0.50 times the time of a float32 one here"
    assert half_precision("cpu", 0) == first
    measured.plant(0.5)
    again = half_precision("cpu", 0)
    assert again.fast
    assert again.reason == f"{first.reason}, as measured earlier on this machine"
    assert measured.count == 1
    measured.plant(2.0)
    assert all(half_precision("cpu", count).fast for count in (3, 0, None))
    assert measured.count == 2
    assert len(list((tmp_path / "bfloat16").iterdir())) == 2


def test_other_kernels_and_threads_are_measured_on_their_own(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert half_precision("cpu", 0).fast
    for variable in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "7")
            measured.plant(0.5)
            assert not half_precision("cpu", 0).fast
    torch.set_num_threads(2)
    measured.plant(0.5)
    assert not half_precision("cpu", 0).fast


def test_the_switches_of_kernels_are_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_switches()
    assert json.loads(json.dumps(before)) == before == kernel_switches()
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    other = kernel_switches()

    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert len({json.dumps(each) for each in (before, other, kernel_switches())}) == 3


def test_only_an_undisturbed_measurement_is_kept_and_only_a_good_record_counts(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ratio, pairs, in_time, fast in ((None, 0, True, False), (2.0, 1, True, False), (2.0, 9, False, True)):
        measured.plant(ratio, pairs=pairs, in_time=in_time)
        assert half_precision("cpu", 0).fast is fast
    assert list(tmp_path.iterdir()) == []
    measured.plant(2.0)
    half_precision("cpu", 0)
    (file,) = (tmp_path / "bfloat16").iterdir()
    whole = json.loads(file.read_bytes())
    for change in ({"products": {**whole["products"], "pairs": 1}}, {"products": "perhaps"}):
        file.write_text(json.dumps(whole | change))
        measured.plant(0.5)
        assert not half_precision("cpu", 0).fast
    assert json.loads(file.read_bytes())["products"]["ratio"] == 0.5
    monkeypatch.setenv("TORCHBOOST_CACHE", "off")
    measured.plant(2.0)
    assert half_precision("cpu", 0).fast
