"""A loop that calls a part of the model instead of the model, as a training step of Lightning does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchboost.algorithms.autocast import Autocast
from torchboost.core.algorithm import Algorithm, Target, attach_all
from torchboost.errors import NoEffectWarning


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("algorithm", [Autocast()])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_update_says_so(algorithm: Algorithm, compiled: bool) -> None:
    torch.compiler.reset()
    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach_all(Target(model, optimizer), [algorithm])
    x = torch.randn(2, 3, 8, 8)
    model.training_step(x).backward()
    with pytest.warns(NoEffectWarning, match=f"{algorithm.name} had no effect: .* Outer itself .* one of net"):
        optimizer.step()
    optimizer.step()
    attached.remove()
    assert not optimizer._optimizer_step_post_hooks
    attach_all(Target(model, optimizer), [algorithm])
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    graphs = []
    for _ in range(3):
        call(x).square().mean().backward()
        optimizer.step()
        graphs.append(dict(torch._dynamo.utils.counters["stats"]).get("unique_graphs", 0))
    assert graphs[0] == graphs[2]
