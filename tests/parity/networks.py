"""The network of the oracle's training cases, and the comparison of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.conftest import Case

__all__ = ["adam_eps", "assert_step", "mlp", "parameters_of", "single"]


def single(value: Any) -> Any:
    """The reference rounds its settings to float32."""
    if isinstance(value, (bool, str)):
        return value
    return [single(entry) for entry in value] if isinstance(value, list) else float(np.float32(value))


def parameters_of(case: Case) -> list[nn.Parameter]:
    """Return the parameters of a case without a network."""
    return [nn.Parameter(torch.from_numpy(case.arrays[f"p{i}.init"].copy())) for i in range(len(case.meta["params"]))]


def adam_eps(optimizer: torch.optim.Optimizer, update: int, eps: float = 1e-8) -> None:
    """The reference adds epsilon before the second moment is corrected for its start at zero, torch after."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            group["eps"] = eps / (1 - group["betas"][1] ** update) ** 0.5


def mlp(case: Case) -> tuple[nn.Sequential, dict[str, nn.Parameter]]:
    """Return three dense layers with tanh between, and their parameters by the reference's names."""
    width = case.meta["hyper"]["net"]
    sizes = (width["i"], width["h"]), (width["h"], width["h"]), (width["h"], width["o"])
    layers = {f"fc{number}": nn.Linear(i, o) for number, (i, o) in enumerate(sizes, start=1)}
    named = {f"{name}.{part}": param for name, layer in layers.items() for part, param in layer.named_parameters()}
    for name, param in named.items():
        param.data.copy_(torch.from_numpy(case.arrays[f"init/{name}"]))
    first, second, last = layers.values()
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last), named


def assert_step(case: Case, step: int, loss: Tensor, named: Mapping[str, Tensor]) -> None:
    """Compare the loss of a step and the weights after it."""
    wanted = torch.tensor(case.arrays["loss"][step])
    torch.testing.assert_close(loss.detach(), wanted, equal_nan=True, **case.meta["tolerance"])
    for name, param in named.items():
        wanted = torch.from_numpy(case.arrays[f"param/{name}"][step])
        torch.testing.assert_close(param.detach(), wanted, **case.meta["tolerance"])
