"""The use of a parameter is a fact of the forward pass, whatever modules are called."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.trajectories import snapshot
from torchboost.graph.matrix_uses import matrix_uses


def places(model: nn.Module, sample: object = None) -> dict[str, str]:
    uses = matrix_uses(model, sample)
    assert uses is not None
    assert uses.keys() == set(model.parameters())
    return {name: uses[parameter].place for name, parameter in model.named_parameters()}


class Experts(nn.Module):
    """Bare parameters: a stack of experts, a table of positions, a bias table that is indexed, a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.randn(3, 6, 6))
        self.positions = nn.Parameter(torch.randn(5, 6))
        self.bias_table = nn.Parameter(torch.randn(9, 6))
        self.scale = nn.Parameter(torch.ones(1, 5, 6))
        self.gate = nn.Parameter(torch.randn(6, 6))
        self.leave = nn.Parameter(torch.randn(2, 6))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.positions + self.bias_table[torch.arange(5)]
        x = torch.bmm((x * self.scale).flatten(0, 1).expand(3, -1, -1), self.experts).mean(0).view(x.shape)
        x = x @ self.gate.to(torch.float64).float().T.contiguous()
        return F.linear(x, self.leave)


def test_bare_parameters_by_what_happens_to_them():
    found = places(Experts(), torch.randn(2, 5, 4))
    assert found == {
        "enter.weight": "input",
        "enter.bias": "other",
        "experts": "hidden",
        "positions": "other",
        "bias_table": "lookup",
        "scale": "other",
        "gate": "hidden",
        "leave": "output",
        "unused.weight": "not reached",
        "unused.bias": "not reached",
    }


def test_a_backbone_whose_output_is_a_sum_of_many_layers_has_no_output_layer():
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x)
            return x + self.second(x)

    assert places(Backbone(), torch.randn(2, 4))["second.weight"] == "hidden"


def test_two_heads_are_both_outputs():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.body(x).relu()
            return {"left": self.left(x), "right": self.right(x).softmax(-1)}

    found = places(Two(), torch.randn(2, 4))
    assert (found["body.weight"], found["left.weight"], found["right.weight"]) == ("input", "output", "output")


def test_recurrent_layers():
    for kind in [nn.LSTM, nn.GRU, nn.RNN]:

        class Recurrent(nn.Module):
            def __init__(self, kind: type[nn.RNNBase] = kind) -> None:
                super().__init__()
                self.table, self.layers, self.head = (
                    nn.Embedding(9, 4),
                    kind(4, 6, 2, batch_first=True),
                    nn.Linear(6, 3),
                )

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.layers(self.table(tokens))[0][:, -1])

        found = places(Recurrent(), torch.randint(0, 9, (2, 5)))
        matrices = {name for name in found if name.startswith("layers.weight")}
        assert {found[name] for name in matrices} == {"hidden"}
        assert (found["table.weight"], found["head.weight"]) == ("lookup", "output")


def test_attention_of_torch_without_its_fused_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 2))
    found = places(model, torch.randn(2, 5, 3))
    hidden = {name for name, place in found.items() if place == "hidden"}
    assert {name.rpartition("layers.")[2] for name in hidden} == {
        f"{number}.{part}"
        for number in (0, 1)
        for part in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    }


def test_in_place_sums_and_views_keep_the_trail():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 2)
            hidden = self.body(x)
            hidden += x
            out[:, :] = self.head(hidden)
            return out.view(-1, 2)

    found = places(InPlace(), torch.randn(3, 4))
    assert (found["body.weight"], found["head.weight"]) == ("input", "output")


def test_the_model_the_generators_and_the_gradients_stay_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before, state = snapshot(model), torch.get_rng_state()
    model.train()
    matrix_uses(copy.copy(model))
    matrix_uses(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
    assert model.training
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
