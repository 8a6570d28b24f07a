"""Modules are replaced completely or not at all, and nothing writes over what others read."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.nn import functional as F

from tests.support.removal_nets import NormAct
from torchboost.graph.surgery import changing, held_elsewhere, need_copies, optimizers_holding, replace_module
from torchboost.graph.trace import trace


def test_replaces_a_module_under_every_name_and_in_every_parent():
    shared = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU(), shared), "b": nn.ModuleList([shared])})
    new = nn.Identity()
    replace_module(model, shared, new)
    assert model["a"][0] is model["a"][2] is model["b"][0] is new
    assert shared not in set(model.modules())


def test_the_new_module_takes_the_training_flag_but_for_parts_that_it_took_over():
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout().eval()))
    new = nn.Sequential(model[0][1], nn.Dropout().eval())
    replace_module(model, model[0], new)
    assert [module.training for module in new.modules()] == [True, False, True]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def layer_and_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))


def fold(model: nn.Sequential) -> None:
    replace_module(model, model[1], nn.Identity())
    model[0].bias = Parameter(torch.zeros(2))


def test_a_group_may_run_empty_and_the_optimizers_still_step():
    for kind, foreach in itertools.product((torch.optim.SGD, torch.optim.Adam), (False, True)):
        model = layer_and_norm()
        groups = [[{"params": list(part.parameters())} for part in model] for _ in range(2)]
        optimizers = [stepped(kind(some, lr=0.1, foreach=foreach)) for some in groups]
        with changing(model, optimizers):
            fold(model)
        for optimizer in optimizers:
            assert [len(g["params"]) for g in optimizer.param_groups] == [2, 0]
            assert set(optimizer.state) <= {model[0].weight}
            stepped(optimizer)


def test_named_parameters_keep_their_names_in_step():
    model = layer_and_norm()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with changing(model, [optimizer]):
        fold(model)
    group = optimizer.param_groups[0]
    assert group["param_names"] == ["0.weight", "0.bias"]
    assert group["params"][1] is model[0].bias
    optimizer.load_state_dict(optimizer.state_dict())


def test_names_that_do_not_fit_are_refused_before_anything_changes():
    model = layer_and_norm()
    named = list(model.named_parameters())
    optimizer = stepped(torch.optim.Adam([{"params": named[:1]}, {"params": named[1:]}], lr=0.1))
    optimizer.param_groups[1]["param_names"].append("c")
    with pytest.raises(ValueError, match=r"group 1 lists 3 names for 2 parameters"), changing(model, [optimizer]):
        raise AssertionError
    assert set(optimizer.state) == set(model.parameters())


def test_an_error_puts_model_and_optimizers_back():
    for error in [RuntimeError, KeyboardInterrupt]:
        model = nn.Sequential(*layer_and_norm(), nn.Sequential(nn.Dropout().eval()))
        optimizer = stepped(torch.optim.Adam(model.named_parameters(), lr=0.1))
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        weight, names = model[0].weight.detach().clone(), list(optimizer.param_groups[0]["param_names"])
        with pytest.raises(error), changing(model, [optimizer], written=[model[0].weight]):  # noqa: PT012
            with changing(model, [optimizer]):
                model[0].weight.data.fill_(3.0)
                fold(model)
                replace_module(model, model[2], nn.Sequential(model[2][0]).eval())
                model.eval()
            assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias"]
            raise error
        assert dict(model.named_modules()) == modules
        assert [name for name, module in model.named_modules() if not module.training] == ["2.0"]
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
        assert torch.equal(model[0].weight, weight)
        assert model[0].bias is None
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, parameters.values()))
        assert optimizer.param_groups[0]["param_names"] == names
        assert set(optimizer.state) == set(parameters.values())


def test_what_the_optimizer_does_not_hold_stays_out():
    model = nn.Sequential(*layer_and_norm(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with changing(model, [optimizer]):
        fold(model)
    assert optimizer.param_groups[0]["params"] == list(model[2].parameters())


def test_modules_that_attributes_hold_are_found():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(7)])
    model.inner = nn.Module()
    model.path = [model[0], {"b": (model[1],)}]
    model.inner.call = model[2].forward
    model.inner.later = partial(print, model[3])
    model.inner.hidden = [nn.Sequential(model[4])]
    model.path.append(model.path)
    found = held_elsewhere(model)
    assert {at for at in range(7) if model[at] in found} == {0, 1, 2, 3, 4}
    assert found[model[0]] == "'path' of the model"
    assert found[model[2]] == "'call' of 'inner'"


def test_optimizers_that_hold_a_parameter_are_found():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [first.weight]}, {"params": [first.bias]}], lr=0.1)
    assert optimizers_holding([first.bias, second.bias]) == [optimizer]
    assert optimizers_holding(second.parameters()) == []


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 1)


def copied(model: nn.Module, *norms: nn.Module) -> list[bool]:
    flow = trace(model, sample=torch.randn(2, 4, 6, 6))
    assert flow.traced in ("fx", "run")
    places = [flow.calls(norm)[0] for norm in norms]
    return [place in need_copies(flow, places) for place in places]


class Around(nn.Module):
    """``step`` gets the input, what the norm gives, and a convolution."""

    def __init__(self, step, traceable: bool):
        super().__init__()
        self.norm, self.conv, self.step, self.traceable = nn.BatchNorm2d(4), conv(), step, traceable

    def forward(self, x):
        if not self.traceable and x.sum() > float("inf"):
            return x
        x = x.tanh()
        return self.step(x, self.norm(x), self.conv)


def add_in_place(x, y, conv):
    y += conv(x)
    return conv(y)


def write_late(x, y, conv):
    x.mul_(2)
    return conv(y)


def write_to_a_view(x, y, conv):
    y.flatten(1).relu_()
    return conv(y) + x


def write_to_a_sibling(x, y, conv):
    first, second = y.chunk(2, 1)
    first.neg_()
    return conv(torch.cat([second, x[:, :2]], 1))


HARMLESS = {
    "reads": lambda x, y, conv: conv(y) + x,
    "activates": lambda x, y, conv: conv(F.relu(y)) + x,
}
HARMFUL = {
    "keyword": lambda x, y, conv: conv(F.relu(y, inplace=True)) + x,
    "positional": lambda x, y, conv: conv(F.hardtanh(y, -1.0, 1.0, True)) + x,
    "method": lambda x, y, conv: conv(y.relu_()) + x,
    "+=": add_in_place,
    "the input, later": write_late,
    "a view": write_to_a_view,
    "a sibling": write_to_a_sibling,
    "handed out": lambda x, y, conv: (conv(x), y),
}


def test_a_copy_is_needed_if_something_writes_in_place_or_the_norm_ends_the_model():
    cases = [*((name, step, False) for name, step in HARMLESS.items()), *((n, s, True) for n, s in HARMFUL.items())]
    for (name, step, expected), traceable in itertools.product(cases, (True, False)):
        model = Around(step, traceable)
        assert copied(model, model.norm) == [expected], (name, traceable)


def test_behind_a_layer_that_feeds_nothing_else_no_copy_is_needed():
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv())
    assert copied(model, model[1]) == [False]
    model[0].register_forward_hook(lambda *_: None)  # it may keep what it sees
    assert copied(model, model[1]) == [True]


def test_an_activation_inside_the_norm_writes_too():
    model = nn.Sequential(nn.Tanh(), NormAct(4), conv(), NormAct(4), conv())
    assert copied(model, model[1], model[3]) == [True, False]
