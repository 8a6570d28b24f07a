"""Half precision: what was measured decides, for the products that the network has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchboost.core import hardware
from torchboost.core.hardware import device_fault, half_precision, half_precision_is_fast
from torchboost.measure.machine import Products


@pytest.mark.parametrize(
    ("products", "convolutions", "count", "fast", "said"),
    [
        (1.5, 0.5, 0, True, "a bfloat16 matrix product takes 0.67 times the time of a float32 one here"),
        (0.5, 2.0, 0, False, "matrix product takes 2.0 times the time"),
        (0.5, 2.0, 53, False, "matrix product takes 2.0 times the time"),
        (2.0, 0.5, 53, False, "convolution takes 2.0 times the time"),
        (2.0, 0.5, None, False, "convolution takes 2.0 times the time"),
        (2.0, 1.5, 53, True, "and a bfloat16 convolution takes 0.67 times"),
        (1.24, 2.0, 53, False, "0.81 times the time of a float32 one here (autocast pays from 0.80 times on down)"),
        (1.26, 1.26, None, True, "0.79 times"),
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
        return Products(kind="matrix product", ratio=2.0, pairs=9)

    monkeypatch.setattr("torchboost.core.hardware.half_speed", noted)
    half_precision("cpu", 0)
    assert seen == ["matrix product"]


def planted_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "device_name", lambda device: "a GPU")


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_that_cannot_be_timed_needs_compute_capability_8(
    capability: tuple[int, int], fast: bool, bfloat16: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bfloat16(None, None, fault="out of memory")
    planted_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = half_precision(torch.device("cuda", 1), 0)
    assert found.fast is fast
    assert f"compute capability {capability[0]}.{capability[1]}" in found.reason


def test_a_gpu_that_was_timed_is_judged_by_its_times(
    bfloat16: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bfloat16(1.0, 1.0)
    planted_gpu(monkeypatch)
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


class Measured:
    """Plants the next measurement in another process, and counts how many were asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.next = Products(kind="matrix product", ratio=2.0, pairs=9)

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


def test_a_machine_is_measured_once(measured: Measured) -> None:
    first = half_precision("cpu", 0)
    assert first.reason == "a bfloat16 matrix product takes 0.50 times the time of a float32 one here"
    assert half_precision("cpu", 0) == first
    measured.plant(0.5)
    again = half_precision("cpu", 0)
    assert again.fast
    assert again.reason == f"{first.reason}, as measured earlier on this machine"
    assert measured.count == 1


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS"])
def test_other_kernels_are_measured_on_their_own(
    variable: str, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert half_precision_is_fast("cpu", 0)
    measured.plant(0.5)
    monkeypatch.setenv(variable, "7")
    assert not half_precision_is_fast("cpu", 0)


def test_another_number_of_threads_is_measured_on_its_own(measured: Measured) -> None:
    assert half_precision_is_fast("cpu", 0)
    measured.plant(0.5)
    torch.set_num_threads(2)
    assert not half_precision_is_fast("cpu", 0)


def test_a_measurement_on_a_busy_machine_counts_until_there_is_a_better_one(measured: Measured) -> None:
    measured.plant(2.0, in_time=False)
    assert half_precision_is_fast("cpu", 0)
    measured.plant(0.5, in_time=False)
    assert half_precision_is_fast("cpu", 0)  # no better than the first
    measured.plant(None)
    assert half_precision_is_fast("cpu", 0)
    measured.plant(0.5)
    assert not half_precision_is_fast("cpu", 0)
    measured.plant(2.0)
    assert not half_precision_is_fast("cpu", 0)
    assert measured.count == 4


@pytest.mark.parametrize(("before", "fast"), [(2.0, True), (0.5, False)])
def test_near_the_threshold_the_earlier_decision_stays(before: float, fast: bool, measured: Measured) -> None:
    measured.plant(before, in_time=False)
    half_precision("cpu", 0)
    measured.plant(1.15)
    found = half_precision("cpu", 0)
    assert found.fast is fast
    assert "0.87 times" in found.reason


def test_near_the_threshold_it_is_off_without_a_cache(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHBOOST_CACHE", "off")
    for ratio in (1.05, 1.1, 1.15, 1.2):
        measured.plant(ratio)
        assert not half_precision_is_fast("cpu", 0)
    assert measured.count == 4


def test_what_could_not_be_measured_is_not_kept(measured: Measured, tmp_path: Path) -> None:
    for ratio, pairs in ((None, 0), (2.0, 1)):
        measured.plant(ratio, pairs=pairs)
        assert not half_precision_is_fast("cpu", 0)
    assert list(tmp_path.iterdir()) == []


def damaged(content: dict[str, object]) -> list[bytes]:
    """Return files that no run has written, made from one that was."""
    found = content["found"]
    assert isinstance(found, dict)
    changes = [{"found": found | change} for change in ({"ratio": 0.0}, {"ratio": -1.0}, {"ratio": None}, {"pairs": 1})]
    others = [{"key": "0" * 64}, {"format": 2}, {"fast": "perhaps"}, {"found": 3}]
    infinite = json.dumps(content | {"found": found | {"ratio": float("inf")}})
    return [json.dumps(content | change).encode() for change in changes + others] + [
        *(infinite.encode(), infinite.replace("Infinity", "NaN").encode(), b"", b"{", b"[]", b"\xff\x00" * 9),
        json.dumps(content).encode()[:-9],
    ]


def test_a_damaged_or_foreign_file_counts_as_absent_and_is_replaced(measured: Measured, tmp_path: Path) -> None:
    half_precision("cpu", 0)
    (file,) = (tmp_path / "bfloat16").iterdir()
    whole = file.read_bytes()
    for content in damaged(json.loads(whole)):
        file.write_bytes(content)
        measured.plant(0.5)
        assert not half_precision_is_fast("cpu", 0), content
        assert json.loads(file.read_bytes())["fast"] is False
    file.unlink()
    file.mkdir()
    measured.plant(0.5)
    assert not half_precision_is_fast("cpu", 0)


def test_a_folder_that_cannot_be_written_is_harmless(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHBOOST_CACHE", "/dev/null")
    assert half_precision_is_fast("cpu", 0)
    measured.plant(0.5)
    assert not half_precision_is_fast("cpu", 0)


def test_both_products_are_kept(measured: Measured, tmp_path: Path) -> None:
    half_precision("cpu", 3)
    half_precision("cpu", 0)
    half_precision("cpu")
    assert measured.count == 2
    assert len(list((tmp_path / "bfloat16").iterdir())) == 2
