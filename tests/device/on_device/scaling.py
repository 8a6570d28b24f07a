"""Loss scalers and the check of gradients on the device: one wait in an update, and the numbers of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchboost
from tests.device.on_device._rules import DEVICES, RULES, parameters, reloaded, step
from tests.device.on_device._training import CLOSE, batch, losses, network
from tests.support.pretend_device.waits import Waits
from torchboost.optim import SGD, AdamW

SCALERS: dict[str, Callable[[nn.Module, str], Any]] = {
    "DynamicLossScale": lambda model, device: torchboost.DynamicLossScale(1024.0),
    "GroupGradScaler": lambda model, device: torchboost.GroupGradScaler(model, 2),
    "GradScaler": lambda model, device: torch.amp.GradScaler(device, init_scale=1024.0),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "AdamW": lambda model: AdamW(model.parameters()),
    "AdamW-fused": lambda model: AdamW(model.parameters(), fused=True),
    "SGD-fused": lambda model: SGD(model.parameters(), lr=0.01, fused=True),
}
SCALER = pytest.mark.parametrize("scaler", SCALERS)
OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@SCALER
@OPTIMIZER
def test_a_scaled_run_has_the_losses_of_the_cpu_and_waits_once_in_an_update(scaler, optimizer):
    seen = []
    for device in DEVICES:
        model = network("cnn", device)
        made, scale = OPTIMIZERS[optimizer](model), SCALERS[scaler](model, device)
        seen.append(losses(model, made, device, scaler=scale))
    assert seen[1] == pytest.approx(seen[0], rel=CLOSE["rtol"], abs=CLOSE["atol"])
    inputs, labels = batch(model, 4, "cuda")
    scale.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
    with Waits() as waits:
        scale.step(made)
        scale.update()
    assert waits.total <= 1, waits.seen


@SCALER
def test_an_overflow_skips_the_update_and_the_scaler_resumes(scaler):
    model = network("cnn", "cuda")
    made, scale = OPTIMIZERS["AdamW"](model), SCALERS[scaler](model, "cuda")
    losses(model, made, "cuda", scaler=scale)
    before = [param.detach().clone() for param in model.parameters()]
    inputs, labels = batch(model, 4, "cuda")
    scale.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.fill_(torch.inf)
    scale.step(made)
    scale.update()
    assert all(map(torch.equal, before, model.parameters()))
    other = SCALERS[scaler](network("cnn", "cuda"), "cuda")
    other.load_state_dict(reloaded(scale.state_dict(), "cuda"))
    assert other.state_dict() == scale.state_dict()


@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith("AdamOffload")])
def test_a_checked_update_waits_once(name):
    params = parameters(name, "cuda")
    made: Any = RULES[name](params, nonfinite="skip")
    for number in range(3):
        step(made, params, number)
    with Waits() as waits:
        made.step()
    assert waits.total == (2 if made.chain else 1), waits.seen  # what transforms make is checked, too
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    made.step()
    assert all(map(torch.equal, before, params))
