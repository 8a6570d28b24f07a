"""A copy computes what the model computes, and running it leaves model, generators and threads alone."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost import to_channels_last
from torchboost.algorithms.autocast import autocast_forward
from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.graph.copies import (
    ReachesOriginal,
    copies_of,
    twin,
    undisturbed,
)
from torchboost.graph.matrix_uses import matrix_uses
from torchboost.graph.trace import evaluate, first_run, record_run, trace


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen, self.kept = nn.Linear(3, 2), 0, [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.layer(x)
        self.seen.append(y)
        self.kept["last"] = y
        return y


def test_activations_kept_as_attributes_are_copied_without_their_history():
    model = Stateful()
    model(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    made = twin(model)
    assert made.kept["last"] is made.seen[0]
    assert not made.seen[0].requires_grad
    assert model.seen[0].requires_grad
    made(torch.randn(4, 3))
    assert (model.calls, len(model.seen), made.calls) == (1, 1, 2)
    assert model.training
    assert not made.training


def test_covers_and_hooks_of_ours_stay_behind_and_those_of_the_user_come_along():
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    with autocast_forward(model), to_channels_last(model):
        made = twin(model)
    x = torch.randn(2, 3, 4, 4)
    assert "forward" not in vars(made)
    assert not made._forward_pre_hooks
    # The copy keeps the channels-last weights, so another kernel may add in another order: a few units in the last
    # place of float32. Under bfloat16, which the copy must not run in, the difference is a thousand times as large.
    torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-6)
    assert seen == [1, 1]


def test_what_cannot_be_copied_is_said():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be copied.*outside the model"):
        twin(model)


def test_mixed_precision_of_accelerate_stays_behind():
    operations = pytest.importorskip("accelerate.utils.operations")
    for own, covered in itertools.product([False, True], ["before", "behind"]):
        model, x = nn.Linear(8, 4), torch.randn(3, 8)
        if own:
            model.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model)
        expected = model(x)
        if covered == "before":
            autocast_forward(model)
        model._original_forward = model.forward  # as Accelerator.prepare_model does
        under = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
        model.forward = types.MethodType(operations.convert_outputs_to_fp32(under), model)
        if covered == "behind":
            autocast_forward(model)
        assert not torch.equal(model(x), expected)
        made = twin(model)
        assert torch.equal(made(x), expected)
        assert "_original_forward" not in vars(made)
        assert ("forward" in vars(made)) == own
        assert not torch.equal(model(x), expected)


class ThroughLambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.stem = lambda x: self.norm(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(x)).mean((2, 3)))


class Scaled(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.parent().scale


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def with_parent() -> nn.Module:
    model = plain()
    model.scale = nn.Parameter(torch.ones(1))
    model[2] = Scaled(model)
    model.forward = functools.partial(nn.Sequential.forward, model[:5])
    return model


def patched(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]], child: bool) -> nn.Module:
    model = plain()
    layer = model[1] if child else model
    layer.forward = wrap(layer.forward)
    return model


def timed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def call(*args: Tensor) -> Tensor:
        return forward(*args)

    return call


LEADING_BACK = [
    ThroughLambda,
    with_parent,
    lambda: patched(timed, child=False),
    lambda: patched(timed, child=True),
    lambda: patched(torch.enable_grad(), child=False),
    lambda: patched(torch.autocast("cpu", torch.bfloat16), child=True),
    lambda: patched(lambda forward: torch.compile(timed(forward), backend="eager"), child=False),
    lambda: patched(lambda forward: lambda x: forward(x), child=True),
]


def everything(model: nn.Module) -> list[object]:
    attributes = [{k: v for k, v in vars(module).items() if k[0] != "_"} for module in model.modules()]
    return [
        {name: (tensor._version, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()},
        [p.grad for p in model.parameters()],
        attributes,
    ]


def assert_unchanged(model: nn.Module, before: list[object]) -> None:
    after = everything(model)
    assert after[1:] == before[1:]
    for name, (version, value) in before[0].items():
        assert after[0][name][0] == version
        assert torch.equal(after[0][name][1], value)


def test_a_copy_that_leads_back_is_not_run_and_leaves_no_mark() -> None:
    for build in LEADING_BACK:
        model, x = build().train(), torch.randn(2, 3, 8, 8)
        before, generator = everything(model), torch.get_rng_state()
        with pytest.raises(ReachesOriginal, match="of the original"):
            evaluate(model, x)
        assert first_run(model, None, record_run) is None
        trace(model)
        assert matrix_uses(model, x) is None
        assert_unchanged(model, before)
        assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("reentrant", [None, True])
def test_gradients_of_a_parameter_outside_are_not_computed(reentrant: bool | None) -> None:
    scale = nn.Parameter(torch.ones(1))

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if reentrant is None:
                return self.inner(x) * scale
            return torch.utils.checkpoint.checkpoint(lambda y: self.inner(y) * scale, x, use_reentrant=reentrant)

    model = Outside()
    assert ChannelsLast().idle(model, torch.optim.SGD(model.parameters(), lr=0.1)) is None
    assert scale.grad is None


class Catches(nn.Module):
    """Computes with a layer that a function holds, and catches what this raises."""

    def __init__(self, inner: nn.Module, raises: bool) -> None:
        super().__init__()
        self.inner, self.raises = inner, raises
        self.back = lambda: inner

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.back()(x)
        except TypeError as error:
            if self.raises:
                raise RuntimeError("in another class") from error
            return x


def test_a_forward_that_catches_the_refusal_does_not_count() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ReachesOriginal, match="the weight of a Conv2d"):
        evaluate(Catches(nn.Conv2d(3, 4, 3), False), x)
    with pytest.raises(ReachesOriginal) as raised:
        evaluate(Catches(nn.Conv2d(3, 4, 3), True), x)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_other_errors_pass_and_threads_are_not_watched() -> None:
    model = plain()
    with pytest.raises(KeyError), undisturbed(model):
        raise KeyError
    outputs = []
    with undisturbed(model):
        thread = threading.Thread(target=lambda: outputs.append(model(torch.randn(2, 3, 8, 8))))
        thread.start()
        thread.join()
    assert len(outputs) == 1


def test_copies_of_a_copy_do_not_reach_the_first_original() -> None:
    model = ThroughLambda()
    with undisturbed(model) as copied, copies_of(model):
        pass
    with copies_of(model), pytest.raises(ReachesOriginal):
        evaluate(copied, torch.randn(2, 3, 8, 8))
