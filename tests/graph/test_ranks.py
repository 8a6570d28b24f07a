"""The number of dimensions is only said if no input could give another one."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from torchboost.graph.ranks import rank_of


def ranks(model: nn.Module) -> list[int | None]:
    found: dict[fx.Node, int | None] = {}
    graph = fx.symbolic_trace(model).graph
    for node in graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        found[node] = rank_of(node, module, found)
    return list(found.values())[1:-1]


class By(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.BatchNorm2d(3), function

    def forward(self, x):
        return self.function(self.norm(x))


def test_flattening_and_norms_of_images_settle_it():
    head = [nn.Flatten(), nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Dropout()]
    assert ranks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), *head)) == [None, None, 2, 2, 2, 2, 2]
    assert ranks(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0))) == [4, 4, 4, None]
    assert ranks(nn.Sequential(nn.BatchNorm3d(3), nn.Conv3d(3, 3, 1))) == [5, None]


@pytest.mark.parametrize(
    ("function", "rank"),
    [
        (lambda x: x.flatten(1), 2),
        (lambda x: torch.flatten(x, start_dim=1), 2),
        (lambda x: x.flatten(1, 2), None),
        (lambda x: x.flatten(), None),
        (lambda x: x.view(4, -1), 2),
        (lambda x: x.reshape((4, 2, -1)), 3),
        (lambda x: x.mean((2, 3)), 2),
        (lambda x: x.mean(dim=[2, 3], keepdim=True), 4),
        (lambda x: x.sum((2, 3), True), None),
        (lambda x: x.mean(), None),
        (lambda x: torch.relu(x) + 1, 4),
        (lambda x: x[0], None),
    ],
)
def test_calls(function, rank):
    assert ranks(By(function))[-1] == rank
