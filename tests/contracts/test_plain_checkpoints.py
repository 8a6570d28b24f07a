"""Checkpoints of a boosted run have the flags and strides of a plain run, so PyTorch alone resumes from them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import cnn
from tests.support.trajectories import train
from torchboost import boost
from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.core.algorithm import Target, attach_all


def sgd(model: nn.Module, **options: bool) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    for _ in range(steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_has_the_strides_from_before(fused: bool) -> None:
    model = cnn()
    plain, optimizer = copy.deepcopy(model), sgd(model, fused=fused)
    target = Target(model, optimizer)
    attached = attach_all(target, [ChannelsLast()])
    train(target, 2, 3)
    live = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    saved = optimizer.state_dict()["state"]
    for buffer, entry, before in zip(live, saved.values(), plain.parameters(), strict=True):
        assert torch.equal(entry["momentum_buffer"], buffer)
        assert entry["momentum_buffer"].stride() == before.stride()
    assert [entry["momentum_buffer"] for entry in optimizer.state.values()] == live
    assert any(not buffer.is_contiguous() for buffer in live)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(optimizer.state[p]["momentum_buffer"].stride() == p.stride() for p in model.parameters())
    attached.remove()
    assert all(optimizer.state[p]["momentum_buffer"].is_contiguous() for p in model.parameters())


def without_norms() -> nn.Module:
    """The gradient of a bias in front of a BatchNorm is rounding, which Adam would make as large as any other."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


RESUMED = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    ("name", "assign"), [*((name, False) for name in RESUMED), *((name, True) for name in RESUMED if name != "fused")]
)
def test_a_checkpoint_is_resumed_without_torchboost(name, assign, tmp_path):
    """Kernels that are assigned stay channels-last, which a fused kernel does not take with moments that are not."""
    make = RESUMED[name]
    config = {"extra": {"channels_last": True, "fused_optimizer": True, "autocast": False}}
    whole, model, resumed = (without_norms() for _ in range(3))
    reference = make(whole.parameters())
    go_on(whole, reference, 8)
    boosted = boost(model, make(model.parameters()), calibrate=False, config=config)
    assert {"channels_last"} | ({"fused_optimizer"} if name != "fused" else set()) <= set(boosted.attached)
    go_on(model, boosted.optimizer, 4)
    torch.save({"model": model.state_dict(), "optimizer": boosted.optimizer.state_dict()}, tmp_path / "file.pt")
    saved = torch.load(tmp_path / "file.pt", weights_only=True)
    assert all(value.untyped_storage().nbytes() == 4 * value.numel() for value in saved["model"].values())
    resumed.load_state_dict(saved["model"], assign=assign)
    optimizer = make(resumed.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    go_on(resumed, optimizer, 4)
    for found, wanted in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
