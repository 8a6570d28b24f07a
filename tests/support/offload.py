"""Offloaded Adam without an accelerator: every parameter counts as one of a device. And how its tests train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchboost.optim.rules.offload import AdamOffload, _Lane

SMALL = 8192 / 2**20
"""The smallest chunk, in MiB."""


class Remote(AdamOffload):
    """Takes all parameters for those of a device, with copies that are made at once."""

    def _far(self, param: Tensor) -> bool:
        return True

    def _lane(self, device: torch.device) -> _Lane:
        return _Lane(device)


def small_network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 31))
    return net.to(dtype)


def give_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_grads(model, step)
        optimizer.step()


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)


def assert_same_state(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
    one, two = first.state_dict()["state"], second.state_dict()["state"]
    assert one.keys() == two.keys()
    for index, entries in one.items():
        assert entries.keys() == two[index].keys()
        for key, value in entries.items():
            assert torch.equal(value.cpu(), two[index][key].cpu()), (index, key)
