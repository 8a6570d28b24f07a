"""A covered forward: in any order of covering and removal, under copies, and without a trace afterwards."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchboost import NoEffectWarning
from torchboost.core.forward import ForwardWatch, cover_forward, own_forward, plain_hook
from torchboost.core.torch_private import store_in_order

X = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[Any]:
        return [self.weight.item() * x]


class Owner:
    """An object outside of the model, whose method is its forward."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def run(self, x: Tensor) -> list[Any]:
        self.calls += 1
        return [self.model.weight.item() + x]


def adding(mark: str) -> Any:
    def around(forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return [*forward(module, *args, **kwargs), mark]

    return around


def subtracting(model: nn.Module) -> Any:
    """A forward that the user set on the instance."""
    return types.MethodType(lambda self, x: [self.weight.item() - x], model)


def zeroed(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def test_covers_lie_on_top_of_each_other_and_slide_beneath() -> None:
    model = Net()
    for mark, innermost in (("a", False), ("b", False), ("c", True), ("d", True)):
        cover_forward(model, adding(mark), innermost=innermost)
    assert model(X) == [X, "d", "c", "a", "b"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_script_compiles_the_forward_under_a_cover() -> None:
    """Its source names ``F``. If this fails, torch can script no ``nn.Linear`` any more in this process."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    cover_forward(model, lambda forward, module, args, kwargs: forward(module, *args, **kwargs))
    assert torch.equal(torch.jit.script(model)(x), model(x))


def test_removal_in_any_order_leaves_no_trace() -> None:
    for own, order in itertools.product([False, True], itertools.permutations("abc")):
        model = Net()
        if own:
            model.forward = subtracting(model)
        before = dict(vars(model))
        value = 1 - X if own else X
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


def test_foreign_covers_keep_working_after_removal() -> None:
    for own, value in ((False, X), (True, X + 1)):
        model = Net()
        if own:
            model.forward = Owner(model).run
        first = cover_forward(model, adding("a"))
        inner = model.forward
        model.forward = foreign = lambda x, inner=inner: [*inner(x), "foreign"]
        assert own_forward(model) is foreign
        second = cover_forward(model, adding("b"))
        assert model(X) == [value, "a", "foreign", "b"]
        first.remove()
        assert model(X) == [value, "foreign", "b"]
        second.remove()
        assert set(vars(model)) == {*vars(Net()), "forward"}
        assert vars(model)["forward"] is foreign
        assert model(X) == [value, "foreign"]


def test_a_foreign_cover_that_copies_our_attributes_stays_after_removal() -> None:
    model = Net()
    cover = cover_forward(model, adding("a"))
    inner: Any = model.forward
    model.forward = types.MethodType(functools.wraps(inner)(lambda self, x: [*inner(x), "foreign"]), model)
    assert model(X) == [X, "a", "foreign"]
    cover.remove()
    assert model(X) == [X, "foreign"]


def test_replicas_of_data_parallel_compute_with_their_own_weights() -> None:
    for own in (False, True):
        model = Net()
        if own:
            model.forward = subtracting(model)
        covers = [cover_forward(model, adding("a")), cover_forward(model, adding("b"))]
        for marks in (["a", "b"], ["a"], *([] if own else [[]])):
            replica = model._replicate_for_data_parallel()
            replica.weight = torch.tensor(3.0)
            assert replica(X) == [3 - X if own else 3 * X, *marks]
            assert model(X) == [1 - X if own else X, *marks]
            covers[len(marks) - 1].remove()
        assert own or "_replicate_for_data_parallel" not in vars(model)


def reloaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([Net]):
        return torch.load(file)


def ours(module: nn.Module, args: Any, kwargs: Any, outputs: list[Any]) -> list[Any]:
    return [*outputs, "hook"]


ours.__module__ = cover_forward.__module__


def test_a_copy_is_plain_and_has_its_own_weights() -> None:
    for how in [copy.deepcopy, copy.copy, reloaded]:
        model = Net()
        a, b = cover_forward(model, adding("a")), cover_forward(model, adding("b"), innermost=True)
        hook = plain_hook(model, model.register_forward_hook(ours, with_kwargs=True, always_call=True))
        twin = how(model)
        assert set(vars(twin)) == set(vars(Net()))
        hooks = (twin._forward_hooks, twin._forward_hooks_with_kwargs, twin._forward_hooks_always_called)
        assert not any(hooks)
        if how is not copy.copy:
            zeroed(model)
        assert twin(X) == [X]
        assert model(X) == [X if how is copy.copy else 0.0, "b", "a", "hook"]
        for effect in (a, hook, b):
            assert "__getstate__" in vars(model)
            effect.remove()
        assert set(vars(model)) == set(vars(Net()))


def theirs(module: nn.Module, args: Any, outputs: list[Any]) -> list[Any]:
    return [*outputs, "theirs"]


def of_the_original(module: nn.Module, args: Any) -> None:
    raise AssertionError("this hook belongs to the original")


of_the_original.__module__ = cover_forward.__module__


class Own(Net):
    """A class that says itself what a copy holds."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copied": True}


def test_hooks_of_the_user_and_the_rule_of_a_class_hold_for_copies() -> None:
    model = Net()
    model.register_forward_hook(theirs)
    plain_hook(model, model.register_forward_pre_hook(of_the_original))
    assert copy.deepcopy(model)(X) == [X, "theirs"]
    model = Own()
    with cover_forward(model, adding("a")):
        twin = copy.deepcopy(model)
    assert vars(twin)["copied"] is True
    assert twin(X) == [X]


def test_a_copy_keeps_a_forward_of_the_users_own() -> None:
    model = Net()
    model.forward = subtracting(model)
    with cover_forward(model, adding("a")):
        twin = copy.deepcopy(model)
        zeroed(twin)
    assert twin(X) == [-X]
    assert model(X) == [1 - X]


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
        cover = cover_forward(model, adding("a"))
        held = model.forward
        assert own_forward(model) is before["forward"]
        twin = copy.deepcopy(model)
        zeroed(model)
        assert twin(X) == [X if inside else X + 1]
        assert set(vars(twin)) == set(before)
        copied = twin.forward.__self__
        assert type(copied) is type(owner)
        assert copied is twin.part if inside else copied.model is twin
        assert inside or owner.calls == 0
        cover.remove()
        assert vars(model) == before
        assert held(X) == model(X), "who holds the cover calls through it"


def update(gradient: float | None, optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    optimizer.step()


def test_steps_without_gradients_do_not_count_and_a_call_before_is_enough() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ForwardWatch("some_algorithm", model, optimizer) as watch:
        watch.called = True
        update(1.0, optimizer)
    ForwardWatch("some_algorithm", model, optimizer)
    update(None, optimizer)
    update(0.0, optimizer)
    with pytest.warns(NoEffectWarning, match="some_algorithm"):
        update(1.0, optimizer)
    update(1.0, optimizer)  # once


class Hook:
    """A hook before the forward that is an object, with another one after it."""

    def __call__(self, module: nn.Module, args: object) -> None:
        pass

    def leave(self, module: nn.Module, args: object, outputs: object) -> None:
        pass


def test_a_module_with_hooks_in_another_order_than_theirs_compiles():
    layer, hooks = nn.Linear(2, 2), [Hook(), Hook()]
    for place, hook in enumerate(hooks):
        layer.register_forward_pre_hook(hook)
        layer.register_forward_hook(hook.leave, prepend=bool(place))
    store_in_order(layer)
    assert [hook.__self__ for hook in dict.values(layer._forward_hooks)] == hooks[::-1]
    x = torch.ones(1, 2)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
