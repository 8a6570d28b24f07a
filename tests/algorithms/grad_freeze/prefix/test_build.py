"""The halves: proven to hold still, and honest about whether their border is one row per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import cnn
from torchboost.algorithms.grad_freeze.prefix.build import Halves, build_halves
from torchboost.algorithms.grad_freeze.prefix.trace import Call, random_state, trace_forward


class Net(nn.Module):
    """A frozen layer, a trainable one, and a forward that a test gives."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.run = run

    def forward(self, *args: Tensor) -> Tensor:
        return self.run(self, *args)


def halves_of(model: nn.Module, *args: Tensor, blocked: set[str] | None = None) -> Halves:
    call = Call.of(args, {})
    assert call is not None
    halves = build_halves(trace_forward(model, call), call, set() if blocked is None else blocked)
    assert halves is not None
    return halves


def frozen_cnn() -> nn.Sequential:
    model = cnn().double()
    for module in model[:7]:
        module.requires_grad_(False)
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def test_without_norms_the_prefix_takes_no_copies() -> None:
    model = Net(lambda n, x: n.b(n.a(x)))
    assert halves_of(model, torch.ones(2, 4)).frozen[0] is model.a.weight


def test_the_signature_changes_with_weights_and_cut_only() -> None:
    model, x = frozen_cnn(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    first = halves_of(model, x).signature
    assert halves_of(model, x + 1).signature == first
    with torch.no_grad():
        model[9].weight.add_(1)
    assert halves_of(model, x).signature == first
    model[9].bias.requires_grad_(False)
    assert halves_of(model, x).signature == first
    with torch.no_grad():
        model[1].running_mean.add_(1)
    changed = halves_of(model, x).signature
    assert changed != first
    model[4].requires_grad_()
    assert halves_of(model, x).signature != changed


def functional_dropout(n: Net, x: Tensor) -> Tensor:
    return n.b(F.dropout(n.a(x), 0.5, n.training))


def stochastic_depth(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    return n.b(h * h.new_empty(h.shape[0], 1).bernoulli_(0.5))


def noise_for_both(n: Net, x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    return n.b(n.a(x) + noise) + noise


def counts(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(x) + n.count.add_(1))


@pytest.mark.parametrize("run", [functional_dropout, stochastic_depth, noise_for_both, counts])
def test_what_draws_or_counts_is_found_and_left_to_the_suffix(run: Any) -> None:
    model, x = Net(run), torch.randn(3, 4)
    torch.manual_seed(7)
    expected = model(x)
    after = random_state([])
    model.count.zero_()
    torch.manual_seed(7)
    halves = halves_of(model, x)
    outputs = halves.suffix(x, *halves.border((x,)))
    assert torch.equal(outputs, expected)
    assert random_state([]) == after
    assert halves.cut.border == ("a",)
    assert int(model.count) == (run is counts)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda n, x: n.b(n.a(x)), ""),
        (lambda n, x: n.b(n.a(x) - n.a(x).mean(0)), "depends on what else is in the batch"),
        (lambda n, x: n.b(n.a(x).sum(0)), "is not one row for each of 6 samples"),
        (lambda n, x: n.b(n.a(x)[:3]), "is not one row for each of 6 samples"),
        (lambda n, x: n.b(n.a(x).view(6, 4) + 1), "does not run on part of a batch"),
        (lambda n, x: n.b(n.a(n.a(x) + 1)).view(n.a(x).size(1), -1), "is not a tensor but int"),
    ],
)
def test_rows_that_are_no_samples_are_noticed_quietly(run: Any, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Net(run), torch.randn(6, 4)
    halves = halves_of(model, x)
    found = halves.check_rows((x,), halves.border((x,)), 6)
    assert reason in found
    assert bool(found) == bool(reason)
    assert halves.check_rows((x,), halves.border((x,)), 6) == found
    assert capfd.readouterr().err == ""  # torch.fx prints a traceback where a GraphModule is called


def test_a_batch_of_one_and_inputs_that_are_no_batch() -> None:
    x = torch.randn(1, 4)
    halves = halves_of(Net(lambda n, x: n.b(n.a(x) - n.a(x).sum(0))), x)
    assert "depends on what else" in halves.check_rows((x,), halves.border((x,)), 1)
    model = Net(lambda n, x, mask: n.b(n.a(x) * mask))
    x, mask = torch.randn(6, 4), torch.ones(4)
    halves = halves_of(model, x, mask)
    assert "input 1 of shape (4,)" in halves.check_rows((x, mask), halves.border((x, mask)), 6)


def test_nothing_frozen_at_the_front_gives_no_halves() -> None:
    model = Net(lambda n, x: n.a(n.b(x)))
    call = Call.of((torch.ones(2, 4),), {})
    assert call is not None
    assert build_halves(trace_forward(model, call), call, set()) is None
