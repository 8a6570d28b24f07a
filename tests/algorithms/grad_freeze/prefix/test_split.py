"""Where a forward is cut, and that both halves together compute what it does, in whatever order it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torchboost.algorithms.grad_freeze.prefix.split import Cut, cut_forward
from torchboost.algorithms.grad_freeze.prefix.trace import Call, TracedForward, trace_forward


class Net(nn.Module):
    """Layers ``a`` (frozen) and ``b`` (trainable), a frozen table, a buffer, and a forward that a test gives."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.a, self.a2, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(8, 4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(4))
        for module in (self.a, self.a2, self.table):
            module.requires_grad_(False)
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


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
    torch.add(h, n.b(x), out=g) if False else None
    return n.b(torch.relu_(h) + g)


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


FORWARDS = [
    (plain, {"relu_1"}),
    (residual_in_place, {"relu_1"}),
    (border_written_after_it_is_read, {"a"}),
    (written_before_anybody_trained_reads_it, {"clone", "a2"}),
    (two_handles_on_what_is_written, {"a"}),
    (view_written, {"relu"}),
    (mask_of_its_size, {"a"}),
    (written_with_something_trained, {"a"}),
    (written_through_a_view, {"a"}),
    (input_written, {"a"}),
    (functional_in_place, {"add_1"}),
    (sizes_of_the_border, {"a"}),
    (sizes_of_something_inside, {"a2", "size"}),
    (table_of_positions, {"add"}),
    (input_used_late, {"a"}),
    (out_of, {"add"}),
    (border_added_to, {"a", "tanh"}),
    (frozen_value_added_to, {"a", "tanh"}),
    (view_of_the_border_added_to, {"a"}),
    (size_added_to, {"a"}),
    (everything_frozen, {"a2"}),
    (buffer_written, {"a"}),
]


def traced_of(model: nn.Module, x: Tensor) -> TracedForward:
    call = Call.of((x,), {})
    assert call is not None
    return trace_forward(model, call)


def run(cut: Cut, traced: TracedForward, x: Tensor) -> tuple[Tensor, ...]:
    prefix = fx.GraphModule(traced.targets, cut.prefix)
    with torch.no_grad():
        border = [value.detach() if isinstance(value, Tensor) else value for value in prefix(x)]
    return fx.GraphModule(traced.targets, cut.suffix)(x, *border)


@pytest.mark.parametrize(("forward", "border"), FORWARDS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_halves_compute_what_the_forward_does(forward: Any, border: set[str]) -> None:
    model = Net(forward)
    x = torch.randn(3, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(x.clone())
    if expected.requires_grad:
        expected.sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.load_state_dict(state)
    traced = traced_of(model, x)
    cut = cut_forward(traced)
    assert set(cut.border) == border
    outputs = run(cut, traced, x.clone())
    assert torch.equal(outputs, expected)
    if expected.requires_grad:
        outputs.sum().backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(p.grad, gradient)


def test_the_input_may_be_written_to_but_then_stays_in_the_suffix() -> None:
    model = Net(lambda n, x: n.b(n.a(x.view(-1, 4).add_(1))))
    traced = traced_of(model, torch.zeros(3, 4))
    cut = cut_forward(traced)
    assert cut.border == ()
    x = torch.zeros(3, 4)
    run(cut, traced, x)
    assert torch.equal(x, torch.ones(3, 4))


def test_dropout_stops_the_prefix_in_training_mode_only() -> None:
    model = Net(lambda n, x: n.b(n.a2(n.drop(n.a(x)))))
    x = torch.randn(3, 4)
    assert cut_forward(traced_of(model, x)).border == ("a",)
    model.drop.p = 0.0
    assert cut_forward(traced_of(model, x)).border == ("a2",)
    model.drop.p = 0.5
    model.drop.eval()
    assert cut_forward(traced_of(model, x)).border == ("a2",)


@pytest.mark.parametrize(
    ("module", "stops"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4).eval(), False),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), True),
        (nn.LayerNorm(4), False),
        (nn.Identity(), False),
        (nn.AlphaDropout(0.1), True),
    ],
)
def test_norms_stop_the_prefix_where_they_look_at_the_batch(module: nn.Module, stops: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4)).requires_grad_(False)
    assert cut_forward(traced_of(model, torch.randn(3, 4))).border == (("_0",) if stops else ("_2",))


def test_hooked_modules_and_named_nodes_stop_the_prefix() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    x = torch.randn(3, 4)
    assert cut_forward(traced_of(model, x), blocked={"_2"}).border == ("_1",)
    model[1].register_forward_hook(lambda *_: None)
    assert cut_forward(traced_of(model, x)).border == ("_0",)


class Adds(nn.Module):
    """Adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += self.layer(torch.tanh(x))
        return x


@pytest.mark.parametrize("hook", ["forward", "instance"])
def test_a_module_that_is_not_looked_into_may_write_to_its_inputs(hook: str) -> None:
    model = Net(lambda n, x: (lambda h: n.adds(h) + n.a2(h))(n.a(x)))
    model.adds = Adds()
    if hook == "forward":
        model.adds.register_forward_hook(lambda *_: None)
    else:
        model.adds.forward = model.adds.forward
    x = torch.randn(3, 4)
    traced = traced_of(model, x)
    cut = cut_forward(traced)
    assert torch.equal(run(cut, traced, x), model(x))
    assert cut.border == ("a",)


def test_a_weight_shared_with_the_trained_part_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[2].weight = model[0].weight.requires_grad_()
    assert cut_forward(traced_of(model, torch.randn(3, 4))).border == ()


def test_it_says_which_inputs_the_prefix_reads() -> None:
    model = Net(lambda n, x, y: n.b(n.a(y)) + x)
    call = Call.of((torch.ones(2, 4), torch.ones(2, 4)), {})
    assert call is not None
    cut = cut_forward(trace_forward(model, call))
    assert cut.inputs == (1,)
