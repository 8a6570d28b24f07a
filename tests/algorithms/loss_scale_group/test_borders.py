"""Borders: identity forward, another scale backward, in every kind of container."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchboost.algorithms.loss_scale_group.borders import Ratios, ScaleBorders, change_scale, has_borders
from torchboost.errors import IncompatibleError


def test_the_ratio_is_read_in_the_backward_pass_and_may_exceed_half_precision():
    ratio = torch.ones(())
    x = torch.full((3,), 2.0**-20, dtype=torch.float16, requires_grad=True)
    y = change_scale(x, ratio)
    assert torch.equal(x, y)
    ratio.data.fill_(2.0**20)
    y.backward(torch.full((3,), 2.0**-18, dtype=torch.float16))
    assert x.grad.tolist() == [4.0] * 3
    assert x.grad.dtype is torch.float16


def test_nothing_happens_without_a_gradient():
    x = torch.ones(2)
    assert change_scale(x, torch.ones(())) is x
    with torch.no_grad():
        y = torch.ones(2, requires_grad=True)
        assert change_scale(y, torch.ones(())) is y


Pair = namedtuple("Pair", "a b")


class Own(tuple):
    def __new__(cls, one):
        return super().__new__(cls, (one,))


class Keyed(dict):
    def __init__(self, name, value):
        super().__init__(a=value)
        self.name = name


@dataclasses.dataclass
class Derived:
    a: torch.Tensor
    factor: dataclasses.InitVar[float] = 1.0
    built: int = 0

    def __post_init__(self, factor):
        self.built += 1
        self.twice = self.a * 2


@dataclasses.dataclass
class Output:
    a: torch.Tensor
    note: str = "x"


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.make = make

    def forward(self, x):
        return self.make(x * self.weight)


KINDS = [
    (lambda t: t, lambda o: o),
    (lambda t: [t, None], lambda o: o[0]),
    (lambda t: (t, 3), lambda o: o[0]),
    (lambda t: {"a": (t,)}, lambda o: o["a"][0]),
    (lambda t: Pair(t, 1), lambda o: o.a),
    (lambda t: Output(t), lambda o: o.a),
    (lambda t: Own(t), lambda o: o[0]),
    (lambda t: Keyed("n", t), lambda o: o["a"]),
    (lambda t: defaultdict(list, a=t), lambda o: o["a"]),
    (lambda t: Derived(t), lambda o: o.a * o.built),
    (lambda t: Derived(t), lambda o: o.twice / 2),
    (lambda t: torch.max(t[None], 0), lambda o: o.values),
]


def test_outputs_of_every_kind():
    for make, read in KINDS:
        module = Returns(make)
        ratios = Ratios(2)
        borders = ScaleBorders([{"m": module}], ratios)
        x = torch.ones(2, requires_grad=True)
        out = module(x)
        assert type(out) is type(make(torch.ones(2)))
        ratios.set([1.0, 8.0])
        read(out).sum().backward()
        assert module.weight.grad.tolist() == [8.0, 8.0]
        assert x.grad.tolist() == [1.0, 1.0]
        borders.remove()
        module.weight.grad = None
        read(module(x)).sum().backward()
        assert module.weight.grad.tolist() == [1.0, 1.0]


def test_an_object_that_hides_tensors_is_refused():
    hiding = (Opaque, "Opaque"), (lambda t: MappingProxyType({"a": t}), "mappingproxy"), (lambda t: {t}, "set")
    for make, name in hiding:
        module = Returns(make)
        borders = ScaleBorders([{"m": module}], Ratios(2))
        with pytest.raises(IncompatibleError, match=rf"'m' takes or returns a {name}.*into one group"):
            module(torch.ones(2))
        borders.remove()


def test_one_border_between_two_groups_in_half_precision():
    """Through the scale 1 of the rest the gradient would vanish in float16."""
    first, second = nn.Linear(2, 2, bias=False).half(), nn.Linear(2, 2, bias=False).half()
    ratios = Ratios(3)
    ScaleBorders([{"a": first}, {"b": second}], ratios)
    out = second(first(torch.ones(1, 2, dtype=torch.float16)))
    assert out.dtype is torch.float32
    ratios.set([1.0, 2.0**30, 2.0**32])
    out.backward(torch.full((1, 2), 2.0**-30))
    assert first.weight.grad.isfinite().all()
    assert first.weight.grad.abs().min() > 0


def test_a_skip_connection_over_groups_is_right():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            y = self.a(x)
            return (self.c(torch.tanh(self.b(y)) + y) * y).sum()

    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    ratios = Ratios(4)
    ScaleBorders([{"a": net.a}, {"b": net.b}, {"c": net.c}], ratios)
    x = torch.randn(4, 3)
    plain(x).backward()
    scales = [4.0, 2.0**20, 2.0**-10, 2.0**5]
    loss = net(x)
    ratios.set(scales)
    (loss * 4.0).backward()
    for name, scale in zip("abc", scales[1:], strict=True):
        assert torch.equal(getattr(net, name).weight.grad / scale, getattr(plain, name).weight.grad)


def test_a_module_that_is_never_called_is_found():
    attention = nn.MultiheadAttention(4, 2)
    borders = ScaleBorders([{"out_proj": attention.out_proj}], Ratios(2))
    borders.check_called()
    x = torch.randn(3, 1, 4)
    attention(x, x, x)[0].sum().backward()
    with pytest.raises(IncompatibleError, match="'out_proj' is in a group but is never called itself"):
        borders.check_called()


def test_an_operation_in_place_on_a_border_is_refused_by_torch_and_fine_inside_of_the_group():
    x = torch.ones(3, 2)
    for inside, fails in ((["0"], True), (["0", "1"], False)):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
        plain = copy.deepcopy(model)
        ratios = Ratios(2)
        ScaleBorders([{name: model.get_submodule(name) for name in inside}], ratios)
        if fails:
            with pytest.raises(RuntimeError, match="is being modified inplace"):
                model(x)
            continue
        loss = model(x).sum()
        ratios.set([1.0, 16.0])
        loss.backward()
        plain(x).sum().backward()
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad * 16)
        assert torch.equal(model[2].weight.grad, plain[2].weight.grad)


def test_activation_checkpointing():
    for reentrant in [False, True]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        plain = copy.deepcopy(model)
        ratios = Ratios(3)
        ScaleBorders([{"0": model[0], "1": model[1]}, {"2": model[2]}], ratios)
        scales = [1.0, 2.0**12, 2.0**-5]
        for blocks in (model, plain):
            x = torch.ones(2, 4, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            if blocks is model:
                ratios.set(scales)
            x.square().sum().backward()
        for block, other, scale in zip(model, plain, (*scales[1:2] * 2, scales[2]), strict=True):
            assert torch.equal(block[0].weight.grad, other[0].weight.grad * scale)


def test_models_with_borders_can_be_copied_and_pickled():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    ScaleBorders([{"0": model[0]}], Ratios(2))
    x = torch.randn(3, 2)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_borders_are_found_and_a_copy_of_the_model_alone_has_none():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    ratios = Ratios(3)
    borders = ScaleBorders([{"0": model[0]}, {"2": model[2]}], ratios)
    ratios.set([1.0, 4.0, 16.0])
    assert has_borders(nn.Sequential(model))
    assert not has_borders(model[1])
    twin, own = copy.deepcopy((model, borders))
    assert has_borders(twin)
    twin(torch.ones(1, 2)).sum().backward()
    assert twin[2].bias.grad.tolist() == [16.0, 16.0]
    own.remove()
    assert not has_borders(twin)
    alone = copy.deepcopy(model)
    assert not has_borders(alone)
    alone(torch.ones(1, 2)).sum().backward()
    assert alone[2].bias.grad.tolist() == [1.0, 1.0]
    borders.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
