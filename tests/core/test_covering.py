"""A covered forward: in any order of covering and removal, under copies, and without a trace afterwards."""

from __future__ import annotations

import copy
import io
import types
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.covering import cover_forward, own_forward, plain_hook


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[Any]:
        return [self.weight.item() * x]


def adding(mark: str) -> Any:
    def around(forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return [*forward(module, *args, **kwargs), mark]

    return around


X = 2.0


def test_covers_lie_on_top_of_each_other_and_slide_beneath() -> None:
    model = Net()
    cover_forward(model, adding("a"))
    cover_forward(model, adding("b"))
    cover_forward(model, adding("c"), innermost=True)
    cover_forward(model, adding("d"), innermost=True)
    assert model(X) == [X, "d", "c", "a", "b"]


def test_removal_in_any_order_leaves_no_trace() -> None:
    for own in [False, True]:
        for order in ["abc", "acb", "bac", "bca", "cab", "cba"]:
            model = Net()
            if own:
                model.forward = types.MethodType(lambda self, x: [-x], model)
            before = dict(vars(model))
            value = -X if own else X
            covers = {"a": cover_forward(model, adding("a")), "b": cover_forward(model, adding("b"))}
            covers["c"] = cover_forward(model, adding("c"), innermost=True)
            left = ["c", "a", "b"]
            for name in order:
                assert own_forward(model) is before.get("forward")
                assert model(X) == [value, *left]
                left.remove(name)
                covers[name].remove()
                covers[name].remove()
            assert model(X) == [value]
            assert vars(model) == before


def test_a_foreign_cover_on_top_keeps_working_after_removal() -> None:
    model = Net()
    effect = cover_forward(model, adding("a"))
    inner = model.forward
    model.forward = foreign = lambda x: [*inner(x), "foreign"]
    assert own_forward(model) is foreign
    assert model(X) == [X, "a", "foreign"]
    effect.remove()
    assert set(vars(model)) == {*vars(Net()), "forward"}
    assert vars(model)["forward"] is foreign
    assert model(X) == [X, "foreign"]


def test_replicas_of_data_parallel_compute_with_their_own_weights() -> None:
    model = Net()
    covers = [cover_forward(model, adding("a")), cover_forward(model, adding("b"))]
    for marks in (["a", "b"], ["a"], []):
        replica = model._replicate_for_data_parallel()
        replica.weight = torch.tensor(3.0)
        assert replica(X) == [3 * X, *marks]
        assert model(X) == [X, *marks]
        covers[len(marks) - 1].remove()
    assert "_replicate_for_data_parallel" not in vars(model)


def reloaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([Net]):
        return torch.load(file)


def test_a_copy_is_plain_and_has_its_own_weights() -> None:
    for how in [copy.deepcopy, copy.copy, reloaded]:
        model = Net()
        a, b = cover_forward(model, adding("a")), cover_forward(model, adding("b"), innermost=True)
        hook = plain_hook(model, model.register_forward_hook(_ours, with_kwargs=True, always_call=True))
        twin = how(model)
        assert set(vars(twin)) == set(vars(Net()))
        assert not twin._forward_hooks
        assert not twin._forward_hooks_with_kwargs
        assert not twin._forward_hooks_always_called
        with torch.no_grad():
            model.weight.mul_(1 if how is copy.copy else 0)
        assert twin(X) == [X]
        assert model(X) == [X if how is copy.copy else 0.0, "b", "a", "hook"]
        for effect in (a, hook, b):
            assert "__getstate__" in vars(model)
            effect.remove()
        assert set(vars(model)) == set(vars(Net()))


def _ours(module: nn.Module, args: Any, kwargs: Any, outputs: list[Any]) -> list[Any]:
    return [*outputs, "hook"]


_ours.__module__ = cover_forward.__module__


def test_hooks_of_the_user_stay_in_copies() -> None:
    model = Net()
    model.register_forward_hook(_theirs)
    plain_hook(model, model.register_forward_pre_hook(_pre))
    assert copy.deepcopy(model)(X) == [X, "theirs"]


def _theirs(module: nn.Module, args: Any, outputs: list[Any]) -> list[Any]:
    return [*outputs, "theirs"]


def _pre(module: nn.Module, args: Any) -> None:
    raise AssertionError("this hook belongs to the original")


_pre.__module__ = cover_forward.__module__


class Own(Net):
    """A class that says itself what a copy holds."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copied": True}


def test_the_rule_of_a_class_for_its_copies_stays() -> None:
    model = Own()
    with cover_forward(model, adding("a")):
        twin = copy.deepcopy(model)
    assert vars(twin)["copied"] is True
    assert twin(X) == [X]


def test_a_copy_keeps_a_forward_of_the_users_own() -> None:
    model = Net()
    model.forward = types.MethodType(lambda self, x: [self.weight.item() - x], model)
    with cover_forward(model, adding("a")):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.weight.zero_()
    assert twin(X) == [-X]
    assert model(X) == [1 - X]


class Owner:
    """An object outside of the model, whose method is its forward."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def run(self, x: Tensor) -> list[Any]:
        self.calls += 1
        return [self.model.weight.item() + x]


def test_a_forward_that_is_a_method_of_another_object_stays_one_in_a_copy() -> None:
    for inside in [False, True]:
        model = Net()
        if inside:
            model.part = Net()
            owner: Any = model.part
            model.forward = owner.forward
        else:
            owner = Owner(model)
            model.forward = owner.run
        before = dict(vars(model))
        value = X if inside else X + 1
        cover = cover_forward(model, adding("a"))
        assert own_forward(model) is before["forward"]
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert twin(X) == [value]
        assert set(vars(twin)) == set(before)
        copied = twin.forward.__self__
        assert type(copied) is type(owner)
        assert copied is twin.part if inside else copied.model is twin
        if not inside:
            assert owner.calls == 0
        cover.remove()
        assert vars(model) == before


def test_a_foreign_cover_between_two_of_ours_on_a_forward_of_the_users_own() -> None:
    model = Net()
    model.forward = Owner(model).run
    first = cover_forward(model, adding("a"))
    inner = model.forward
    model.forward = foreign = lambda x: [*inner(x), "foreign"]
    second = cover_forward(model, adding("b"))
    assert model(X) == [X + 1, "a", "foreign", "b"]
    first.remove()
    assert model(X) == [X + 1, "foreign", "b"]
    second.remove()
    assert vars(model)["forward"] is foreign
    assert model(X) == [X + 1, "foreign"]


def test_replicas_of_data_parallel_keep_a_forward_of_the_users_own() -> None:
    model = Net()
    model.forward = types.MethodType(lambda self, x: [self.weight.item() - x], model)
    with cover_forward(model, adding("a")):
        replica = model._replicate_for_data_parallel()
        replica.weight = torch.tensor(3.0)
        assert replica(X) == [3 - X, "a"]
        assert model(X) == [1 - X, "a"]


def test_who_holds_a_cover_of_the_users_own_forward_calls_through_it_after_removal() -> None:
    model = Net()
    model.forward = Owner(model).run
    cover = cover_forward(model, adding("a"))
    held, twin = model.forward, copy.deepcopy(model)
    cover.remove()
    with torch.no_grad():
        model.weight.zero_()
    assert held(X) == model(X) == [X]
    assert twin(X) == [X + 1]
