"""Half precision: what was measured decides, for the products that the network has."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchboost.core import hardware
from torchboost.core.hardware import (
    Streams,
    accelerators,
    device_fault,
    generator_states,
    half_precision,
    set_generator_states,
    streams_kept,
)
from torchboost.measure.machine import Kind, Products


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


def test_a_process_measures_once_for_each_product_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def planted(kind: Kind, device: torch.device) -> Products:
        measured.append(kind)
        return Products(kind=kind, ratio=2.0, pairs=9)

    monkeypatch.setattr(hardware, "half_speed", planted)
    hardware._decision.cache_clear()
    try:
        reason = half_precision("cpu", 0).reason
        assert reason == "a bfloat16 matrix product takes 0.50 times the time of a float32 one here"
        assert all(half_precision("cpu", count).fast for count in (0, 3, None))
        assert measured == ["matrix product", "convolution"]
        torch.set_num_threads(torch.get_num_threads() + 1)
        assert half_precision("cpu", 0).fast
        assert len(measured) == 3
    finally:
        hardware._decision.cache_clear()


def test_the_generators_of_every_kind_of_accelerator_are_read_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"cuda:0": torch.tensor([1]), "cuda:1": torch.tensor([2]), "mps:0": torch.tensor([3])}
    module = types.SimpleNamespace(
        get_rng_state=lambda device: states[str(device)],
        set_rng_state=lambda state, device: states.update({str(device): state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    devices = [torch.device(name) for name in ("mps:0", "cpu", "cuda:1", "meta", "cuda:0", "cuda:1")]
    found = accelerators([types.SimpleNamespace(device=device) for device in devices])  # type: ignore
    assert list(map(str, found)) == ["cuda:0", "cuda:1", "mps:0"]
    before = generator_states(found)
    assert [int(state) for state in before[1:]] == [1, 2, 3]
    states.update(dict.fromkeys(states, torch.tensor([9])))
    set_generator_states(before, found)
    assert [int(state) for state in states.values()] == [1, 2, 3]


def test_draws_are_forgotten_after_an_error_too():
    for error in (None, KeyError):
        streams = Streams()
        with pytest.raises(error) if error else contextlib.nullcontext(), streams_kept():
            wanted = torch.rand(2).tolist(), random.random(), np.random.rand()
            assert streams.drawn()
            if error:
                raise error
        assert not streams.drawn()
        assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == wanted
        streams.restore()
        assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == wanted


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand, np.random.randn])
def test_a_draw_from_any_generator_is_seen(draw: Callable[[], object]):
    np.random.seed(0)
    np.random.randn()  # it draws two numbers, and keeps one for the next call
    streams = Streams()
    assert not streams.used()
    draw()
    assert streams.used()
