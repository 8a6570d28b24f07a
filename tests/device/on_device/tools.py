"""What measures and watches a run, on the device: random streams, clocks, memory, tune, Guard, inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from tests.device.on_device._training import batch, default_device, losses, network, step
from tests.support.pretend_device.waits import Waits
from torchboost.calibration.calibration import Calibration
from torchboost.calibration.search import Price
from torchboost.core.hardware import Streams, accelerators, streams_kept
from torchboost.inference import fast_copy
from torchboost.measure.stopwatch import Clock
from torchboost.optim import AdamW
from torchboost.tuning.tune import tune

GIB = 2**30
CUDA = torch.device("cuda")


def test_random_streams_of_the_device_are_restored():
    model = network("cnn", "cuda")
    devices = accelerators(model.parameters())
    with streams_kept(devices):
        first = torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), first)
    streams = Streams(devices)
    assert not streams.drawn()
    torch.rand(1, device="cuda")
    assert streams.drawn()


def test_a_clock_waits_for_the_device(monkeypatch):
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    Clock.of("cuda")()
    assert waited == [CUDA]


def test_a_trial_may_take_longer_for_the_price_of_compilation(monkeypatch):
    asked: list[Price | None] = []
    monkeypatch.setattr(Calibration, "seconds", lambda self, step, price=None, _=0.0: asked.append(price) or 0.3)
    model = network("cnn", "cuda")
    made = torchboost.boost(model, AdamW(model.parameters()), total_steps=10_000, calibrate=0.3)
    losses(made.model, made.optimizer, "cuda")
    assert {price is not None for price in asked} == {True}


@pytest.mark.parametrize("default", [None, "cuda"])
def test_a_guard_watches_without_waiting(default):
    with default_device(default):
        model = network("cnn", "cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        freeze = {"grad_freeze": {"groups": 2, "pattern": "continuous", "full_share": 0.5}}
        made = torchboost.boost(model, optimizer, level="O0", total_steps=80, calibrate=False, config={"extra": freeze})
        guard = torchboost.Guard(made, [0.1] * 80, block=4, tolerance=0.01)
        withdrawn = []
        for number in range(80):
            loss = step(made.model, made.optimizer, "cuda", number)
            with Waits() as waits:
                withdrawn.append(guard.update(loss))
            assert waits.total <= (number % 4 == 3), waits.seen
        resumed = torchboost.Guard(made, [0.1] * 80, block=4, tolerance=0.01)
        resumed.load_state_dict(guard.state_dict())
        resumed.update(loss)
    assert "grad_freeze" in withdrawn


def make(seed: int) -> Any:
    model = network("cnn", "cuda")
    data = [batch(model, 100 * seed + number, "cuda") for number in range(4)]

    def evaluate(trained: nn.Module) -> float:
        return -float(F.cross_entropy(trained(data[0][0]), data[0][1]))

    return model, torch.optim.SGD(model.parameters(), lr=0.05), F.cross_entropy, data, evaluate


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch.compiler.reset on a GPU
def test_a_tuning_ends():
    candidates = {"centralized": {"gradient_centralization": True}}
    with default_device("cuda"):
        report = tune(make, drop=1.0, budget=20.0, seeds=3, candidates=candidates, device="cuda")
    assert report.state == "complete", report.state
    assert [run.failure for run in report.runs if run.failure] == []


@pytest.mark.parametrize("default", [None, "cuda"])
def test_a_model_is_prepared_for_inference(default):
    with default_device(default):
        model = network("bottleneck", "cuda")
        losses(model, torch.optim.SGD(model.parameters(), lr=0.05), "cuda")
        inputs = batch(model, 0, "cuda")[0]
        wanted = model.eval()(inputs)
        fast = fast_copy(model, sample=inputs)
        assert torch.allclose(fast(inputs), wanted, rtol=1e-3, atol=1e-4)


def test_the_waste_meter_counts_what_the_host_waits_for():
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: Any) -> Any:
            outputs = self.layer(inputs)
            return outputs * 2 if outputs.sum().item() > 0 else outputs[outputs[:, 0] > 0]

    model = Reading().cuda()
    boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0", total_steps=2000)
    with torch.no_grad():
        model.layer.weight.fill_(1.0)
        model.layer.bias.fill_(1.0)
    found = {one.kind: one for one in boosted.waste(torch.ones(2, 4, device="cuda")).kinds}["host synchronisations"]
    assert "the host waits: 1 in a step" in found.found
    assert "tools.py" in found.found
    assert found.remedy
    with torch.no_grad():
        model.layer.bias.fill_(-9.0)
        model.layer.bias[0] = 9.0
    found = {one.kind: one for one in boosted.waste(torch.ones(2, 4, device="cuda")).kinds}["host synchronisations"]
    assert "the host waits: 3 in a step, most often at tools.py" in found.found
    assert "the backward pass (1)" in found.found  # the index of booleans is read again
