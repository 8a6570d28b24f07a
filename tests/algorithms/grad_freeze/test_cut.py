"""Where a forward is cut, and that both halves together compute what it does, in whatever order it writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.frozen_nets import Net, named, with_rows
from torchboost.algorithms.grad_freeze.prefix import FastPrefix


def border_of(fast: FastPrefix) -> set[str]:
    return set() if fast._halves is None else set(fast._halves.cut.border)


def plain(n: Net, x: Tensor) -> Tensor:
    return n.b(n.relu(n.a2(n.relu(n.a(x)))))


def residual_in_place(n: Net, x: Tensor) -> Tensor:
    h = n.relu(n.a(x))
    out = n.a2(h)
    out += h
    out = n.relu(out)
    y = n.b(out)
    y += out
    return n.relu(y)


def border_written_after_it_is_read(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    y = h + n.b(x)
    h.relu_()
    return y + n.a2(h)


def written_before_anybody_trained_reads_it(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    y = n.b(h.clone())
    h.relu_()
    return y + n.a2(h)


def written_with_something_trained(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    h.mul_(2)
    h.add_(n.b(x))
    return n.a2(h)


def written_through_a_view(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    view = h.view(-1)
    view.add_(n.b(x).view(-1))
    return n.a2(h)


def input_written(n: Net, x: Tensor) -> Tensor:
    x = x.clone().add_(1)
    before = n.a(x)
    return n.b(before) + n.b(x)


def written_by_the_frozen_part(n: Net, x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(n.a(x))
    return n.b(y) + y


def two_handles_on_what_is_written(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    g = n.relu(h)
    g.add_(n.b(x))
    return n.a2(h) * g


def view_written(n: Net, x: Tensor) -> Tensor:
    h = n.a(x).flatten(1)
    return n.b(x) + n.relu(h).add_(n.b(x))


def mask_of_its_size(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    mask = h.new_zeros(h.shape[0], 1)
    return n.b(h) * (mask + 2)


def functional_in_place(n: Net, x: Tensor) -> Tensor:
    h = F.relu(n.a(x), True)
    h = F.relu(-h, inplace=True) + n.shift
    return n.b(F.leaky_relu_(h) + 1)


def sizes_of_the_border(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    rows = h.size(0)
    return n.b(h).view(rows, 2, h.shape[1] // 2).flatten(1) + torch.arange(rows)[:, None]


def sizes_of_something_inside(n: Net, x: Tensor) -> Tensor:
    inside = n.a(x)
    h = n.a2(inside)
    return n.b(h).view(inside.size(0), 2, 2).flatten(1)


def table_of_positions(n: Net, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device)
    table = n.table(places)
    return n.b(n.a(x) + table[0]) + table[1]


def input_used_late(n: Net, x: Tensor) -> Tensor:
    x = (x - n.shift) / 2
    return n.b(n.a(x)) + x


def out_of(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    g = n.a2(x)
    return n.b(torch.add(h, 1, out=g) + torch.relu_(h))


def border_added_to(n: Net, x: Tensor) -> Tensor:
    skip = h = n.a(x)
    h += n.b(torch.tanh(h))
    return h + skip


def frozen_value_added_to(n: Net, x: Tensor) -> Tensor:
    skip = h = n.a(x)
    h *= 2
    h -= n.a2(x)
    return n.b(torch.tanh(h)) + skip


def view_of_the_border_added_to(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    row = h[0]
    row += n.b(x)[1]
    return n.a2(h)


def size_added_to(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    rows = h.size(0)
    rows *= 2
    return n.b(h).view(rows, 2)


def everything_frozen(n: Net, x: Tensor) -> Tensor:
    return n.a2(n.a(x))


def buffer_written(n: Net, x: Tensor) -> Tensor:
    h = n.a(x) + n.shift
    n.shift.mul_(1.5)
    return n.b(h) + n.shift


def constants_and_containers(n: Net, x: Tensor) -> Any:
    return {"y": n.b(n.a(x)) + torch.tensor([1.0, 2.0, 3.0, 4.0]), "rest": (n.shift, None)}["y"]


def input_changed(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(x.view(-1, 4).add_(1)))


def functional_dropout(n: Net, x: Tensor) -> Tensor:
    return n.b(F.dropout(n.a(x), 0.5, n.training))


def stochastic_depth(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    return n.b(h * h.new_empty(h.shape[0], 1).bernoulli_(0.5))


def noise_for_both(n: Net, x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    return n.b(n.a(x) + noise) + noise


def counts(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(x) + n.shift.add_(1))


def dropout_in_the_trained_part(n: Net, x: Tensor) -> Tensor:
    return n.b(n.drop(n.a(x)))


FORWARDS = [
    (plain, {"relu_1"}),
    (residual_in_place, {"relu_1"}),
    (border_written_after_it_is_read, {"a"}),
    (written_before_anybody_trained_reads_it, {"clone", "a2"}),
    (written_by_the_frozen_part, {"clone"}),
    (two_handles_on_what_is_written, {"a"}),
    (view_written, {"relu"}),
    (mask_of_its_size, {"a"}),
    (written_with_something_trained, {"a"}),
    (written_through_a_view, {"a"}),
    (input_written, {"a"}),
    (functional_in_place, {"add_1"}),
    (sizes_of_the_border, {"a"}),
    (sizes_of_something_inside, {"a", "a2"}),
    (table_of_positions, {"add"}),
    (input_used_late, {"a"}),
    (out_of, {"add_1"}),
    (border_added_to, {"a", "tanh"}),
    (frozen_value_added_to, {"a", "tanh"}),
    (view_of_the_border_added_to, {"a"}),
    (size_added_to, {"a"}),
    (everything_frozen, {"a2"}),
    (buffer_written, {"a"}),
    (constants_and_containers, {"a"}),
    (input_changed, set()),
    (functional_dropout, {"a"}),
    (stochastic_depth, {"a"}),
    (noise_for_both, {"a"}),
    (counts, {"a"}),
    (dropout_in_the_trained_part, {"a"}),
]


@pytest.mark.parametrize(("forward", "border"), FORWARDS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_halves_compute_what_the_forward_does(forward: Any, border: set[str]) -> None:
    """In whatever order it writes, draws or counts; three times, of which the last two are from rows if they can be."""
    model, x = Net(forward), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    fast = with_rows(model)
    for number in range(3):
        seen = []
        for net in (model, twin):
            torch.manual_seed(number)
            outputs = named(fast, x.clone()) if net is model else net(x.clone())
            if outputs.requires_grad:
                outputs.sum().backward()
            seen.append((outputs, net.shift, *(p.grad for p in net.parameters()), torch.get_rng_state()))
        for ours, theirs in zip(*seen, strict=True):
            assert ours is theirs or torch.equal(ours, theirs)
    assert border_of(fast) == border


@pytest.mark.parametrize(
    ("module", "stops"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4).eval(), False),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), True),
        (nn.LayerNorm(4), False),
        (nn.Identity(), False),
        (nn.AlphaDropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout(0.5).eval(), False),
    ],
)
def test_norms_and_dropout_stop_the_prefix_where_they_look_at_the_batch_or_draw(module: nn.Module, stops: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4)).requires_grad_(False)
    model[0].train()
    fast = with_rows(model)
    named(fast, torch.randn(3, 4))
    assert border_of(fast) == ({"_0"} if stops else {"_2"})


class Adds(nn.Module):
    """Adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += self.layer(torch.tanh(x))
        return x


@pytest.mark.parametrize("hook", ["forward", "instance"])
def test_a_module_that_is_not_looked_into_stops_the_prefix_and_may_write_to_its_inputs(hook: str) -> None:
    model = Net(lambda n, x: (lambda h: n.adds(h) + n.a2(h))(n.a(x)))
    model.adds = Adds().requires_grad_(False)
    if hook == "forward":
        model.adds.register_forward_hook(lambda *_: None)
    else:
        model.adds.forward = model.adds.forward
    x = torch.randn(3, 4)
    fast, expected = with_rows(model), model(x)
    assert torch.equal(named(fast, x), expected)
    assert torch.equal(named(fast, x), expected)
    assert border_of(fast) == {"a"}


def test_a_weight_shared_with_the_trained_part_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[2].weight = model[0].weight.requires_grad_()
    fast = with_rows(model)
    named(fast, torch.randn(3, 4))
    assert "no frozen part comes first" in str(fast)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda n, x: n.b(n.a(x) - n.a(x).mean(0)), "depends on what else is in the batch"),
        (lambda n, x: n.b(n.a(x).sum(0)), "is not one row for each of 6 samples"),
        (lambda n, x: n.b(n.a(x)[:3]), "is not one row for each of 6 samples"),
        (lambda n, x: n.b(n.a(x).view(6, 4) + 1), "does not run on part of a batch"),
    ],
)
def test_rows_that_are_no_samples_are_noticed_quietly(run: Any, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Net(run), torch.randn(6, 4)
    expected = model(x)
    fast = with_rows(model)
    for _ in range(2):
        assert torch.equal(named(fast, x), expected)
    assert "nothing is cached: " in str(fast)
    assert reason in str(fast)
    assert fast.report().rows == 0
    assert capfd.readouterr().err == ""  # torch.fx prints a traceback where a GraphModule is called


def test_a_batch_of_one_and_inputs_that_are_no_batch() -> None:
    fast = with_rows(Net(lambda n, x: n.b(n.a(x) - n.a(x).sum(0))))
    named(fast, torch.randn(1, 4))
    assert "depends on what else" in str(fast)
    fast = with_rows(Net(lambda n, x, mask=1: n.b(n.a(x) * mask)))
    named(fast, torch.randn(6, 4), torch.ones(4))
    assert "input 1, of shape (4,)" in str(fast)
