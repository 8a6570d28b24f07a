"""Where a forward is cut, and that both halves together compute what it does, in whatever order it writes."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.frozen_nets import Net, named, with_rows
from torchboost import IncompatibleError
from torchboost.algorithms.grad_freeze.cache import FastPrefix

# Forwards that cannot be traced


def branches(n: Net, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def drops_layers(n: Net, x: Tensor) -> Tensor:
    return n.a(x) if torch.rand(()) < 0.5 else x


def drops_layers_in_python(n: Net, x: Tensor) -> Tensor:
    return n.a(x) if random.random() < 0.5 else x


def draws_by_numpy(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(x) + float(np.random.rand()))


def stops_gradients(n: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return n.a(x)


def lowers_precision(n: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return n.a(x)


def counts_in_place(n: Net, x: Tensor) -> Tensor:
    n.shift += 1
    return x


def counts_in_python(n: Net, x: Tensor) -> Tensor:
    n.calls = getattr(n, "calls", 0) + 1
    return x * n.calls


def sets_an_item(n: Net, x: Tensor) -> Tensor:
    y = n.a(x)
    y[:, 0] = 0
    return y


UNTRACED = [
    (branches, "TraceError"),
    (drops_layers, "random numbers"),
    (drops_layers_in_python, "random numbers"),
    (draws_by_numpy, "random numbers"),
    (stops_gradients, "switches gradients or autocast"),
    (lowers_precision, "switches gradients or autocast"),
    (counts_in_place, r"sets attributes of its modules \(shift\)"),
    (counts_in_python, r"sets attributes of its modules \(calls\)"),
    (sets_an_item, "item assignment"),
]


def test_what_a_trace_would_get_wrong_is_refused_and_nothing_changes() -> None:
    for run, reason in UNTRACED:
        model = Net(run)
        before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
        fast, names = with_rows(model), set(vars(model))
        with pytest.raises(IncompatibleError, match=reason) as caught:
            named(fast, torch.randn(3, 4, generator=torch.Generator()))
        assert "freezing itself does not need it" in str(caught.value)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert set(vars(model)) == names
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Where a forward is cut


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


def input_written(n: Net, x: Tensor) -> Tensor:
    x = x.clone().add_(1)
    before = n.a(x)
    return n.b(before) + n.b(x)


def two_handles_on_what_is_written(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    g = n.relu(h)
    g.add_(n.b(x))
    return n.a2(h) * g


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


def everything_frozen(n: Net, x: Tensor) -> Tensor:
    return n.a2(n.a(x))


def buffer_written(n: Net, x: Tensor) -> Tensor:
    h = n.a(x) + n.shift
    n.shift.mul_(1.5)
    return n.b(h) + n.shift


def constants_and_containers(n: Net, x: Tensor) -> Any:
    return {"y": n.b(n.a(x)) + torch.tensor([1.0, 2.0, 3.0, 4.0]), "rest": (n.shift, None)}["y"]


def functional_dropout(n: Net, x: Tensor) -> Tensor:
    return n.b(F.dropout(n.a(x), 0.5, n.training))


def counts(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(x) + n.shift.add_(1))


def view_of_the_input_written(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    view = x.view_as(h)
    return n.b(h) + view.add_(n.b(h)) + x


def view_of_the_input_written_after_its_last_use(n: Net, x: Tensor) -> Tensor:
    view = x[:, :4]
    view.mul_(2)
    return n.b(n.a(view))


def halves_of_channels(n: Net, x: Tensor) -> Tensor:
    left, right = n.a(x).chunk(2, 1)
    return n.b(n.a2(torch.cat([right, left], 1)))


def shape_changed_in_place(n: Net, x: Tensor) -> Tensor:
    h = n.a(x)
    dimensions = h.dim()
    h.unsqueeze_(2)
    return n.b(h.squeeze(2)) * dimensions


FORWARDS = [
    (shape_changed_in_place, {"a"}),
    (view_of_the_input_written, set()),
    (view_of_the_input_written_after_its_last_use, set()),
    (halves_of_channels, {"a2"}),
    (plain, {"relu_1"}),
    (residual_in_place, {"relu_1"}),
    (border_written_after_it_is_read, {"a"}),
    (two_handles_on_what_is_written, set()),
    (mask_of_its_size, {"a", "new_zeros"}),
    (input_written, {"a", "add_"}),
    (functional_in_place, {"add_1"}),
    (sizes_of_the_border, {"a"}),
    (sizes_of_something_inside, {"a", "a2"}),
    (table_of_positions, {"add"}),
    (input_used_late, {"a", "truediv"}),
    (out_of, {"add_1"}),
    (everything_frozen, {"a2"}),
    (buffer_written, {"add"}),
    (constants_and_containers, {"a"}),
    (functional_dropout, {"a"}),
    (counts, {"a"}),
]


def border_of(fast: FastPrefix) -> set[str]:
    return set() if fast._halves is None else set(fast._halves.names)


def test_the_halves_compute_what_the_forward_does() -> None:
    """In whatever order it writes, draws or counts; three times, of which the last two are from rows if they can be."""
    for forward, border in FORWARDS:
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
                assert ours is theirs or torch.equal(ours, theirs), forward
        assert border_of(fast) == border, forward


def test_norms_and_dropout_stop_the_prefix_where_they_look_at_the_batch_or_draw() -> None:
    for module, border in (
        (nn.BatchNorm1d(4), {"_0"}),
        (nn.BatchNorm1d(4).eval(), {"_2"}),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), set()),
        (nn.LayerNorm(4), {"_2"}),
        (nn.Identity(), {"_2"}),
        (nn.AlphaDropout(0.1), {"_0"}),
        (nn.Dropout(0.0), {"_2"}),
        (nn.Dropout(0.5).eval(), {"_2"}),
    ):
        model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4)).requires_grad_(False)
        model[0].train()
        fast = with_rows(model)
        named(fast, torch.randn(3, 4))
        assert border_of(fast) == border, module


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
    assert "no frozen part comes first" in str(fast.report())


NO_ROWS = [
    (lambda n, x: n.b(n.a(x) - n.a(x).mean(0)), "depends on what else is in the batch"),
    (lambda n, x: n.b(n.a(x).sum(0)), "is not one row for each of 6 samples"),
    (lambda n, x: n.b(n.a(x)[:3]), "is not one row for each of 6 samples"),
    (lambda n, x: n.b(n.a(x).view(6, 4) + 1), "does not run on part of a batch"),
    (two_handles_on_what_is_written, "'a' at its border and 'relu' at its border share memory"),
]


def test_rows_that_are_no_samples_are_noticed_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    for run, reason in NO_ROWS:
        model, x = Net(run), torch.randn(6, 4)
        expected = model(x)
        fast = with_rows(model)
        for _ in range(2):
            assert torch.equal(named(fast, x), expected)
        note = str(fast.report())
        assert "nothing is cached: " in note
        assert reason in note
        assert fast.report().rows == 0
    assert capfd.readouterr().err == ""  # torch.fx prints a traceback where a GraphModule is called
    for run, rows in (
        (lambda n, x: n.b(n.a(x) - n.a(x).sum(0)), torch.randn(1, 4)),
        (lambda n, x: n.b(n.a(x).flip(0)), torch.randn(5, 4)),
        (lambda n, x: n.b(n.a(x) / n.a(x).abs().max()), torch.arange(16.0).view(4, 4)),
    ):
        fast = with_rows(Net(run))
        named(fast, rows)
        assert "depends on what else" in fast.report().note
    fast = with_rows(Net(lambda n, x, mask=1: n.b(n.a(x) * mask)))
    named(fast, torch.randn(6, 4), torch.ones(4))
    assert "input 1, of shape (4,)" in fast.report().note
