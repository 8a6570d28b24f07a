"""Group loss scaling: true gradients out of any scales, training where one scale fails, and clear refusals."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from tests.support.boosted import in_one_line
from tests.support.models import BottleneckNet, TinyGPT, batch_for, cnn, mlp
from torchboost import DynamicLossScale, GroupGradScaler, ScaleRule, Target, TrainStep, autocast_forward
from torchboost.algorithms import (
    Autocast,
    GradAccumulation,
    GradFreeze,
    GradientCentralization,
    LessBn,
    LossScaleGroup,
)
from torchboost.algorithms.loss_scale_group.borders import has_borders
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError, ScaleCollapseWarning


def deep(layers: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(8, 8), nn.Tanh())])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def all_equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def data(model: nn.Module, seed: int, size: int = 8):
    return batch_for(model, torch.Generator().manual_seed(seed), size)


def test_true_gradients_from_scales_over_twelve_orders_of_magnitude():
    model, plain = deep(), deep()
    scales = [10.0 ** (12 * i / 19) for i in range(20)]
    scales = scales[::2] + scales[::-2]  # they rise and fall
    scaler = GroupGradScaler(model, [str(2 * i) for i in range(20)], init_scale=scales)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    plain(x).square().sum().backward()
    scaler.scale(model(x).square().sum()).backward()
    for i, scale in enumerate(scales):
        raw = model[2 * i].weight.grad / plain[2 * i].weight.grad
        assert torch.equal(raw, torch.full_like(raw, 2.0 ** math.floor(math.log2(scale))))
    scaler.unscale_(optimizer)
    assert all_equal(gradients(model), gradients(plain))


def test_a_backward_pass_that_is_not_scaled_stays_as_it_was():
    model, plain = deep(4), deep(4)
    scaler = GroupGradScaler(model, 4)
    x = torch.randn(4, 8)
    for each in (model, plain):
        each(x).square().sum().backward()
    assert all_equal(gradients(model), gradients(plain))
    scaler.remove()


class TwoTasks(nn.Module):
    """Two heads whose losses weigh 1e-9 and 1e5: no single scale holds the gradients of both in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, x, y):
        with torch.autocast("cpu", torch.float16):
            small, large = self.small(x), self.large(x)
        return 1e-9 * F.cross_entropy(small.float(), y), 1e5 * F.cross_entropy(large.float(), y)


def train_tasks(make) -> tuple[list[float], list[float], int]:
    torch.manual_seed(0)
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-30)
    scaler = make(model)
    small, large, skipped = [], [], 0
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    for _ in range(60):
        losses = model(x, y)
        scaler.scale(losses[0] + losses[1]).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        small.append(float(losses[0].detach()) * 1e9)
        large.append(float(losses[1].detach()) / 1e5)
        skipped += scaler.overflowed
    return small, large, skipped


def test_group_scaling_trains_where_one_scale_fails():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScaleCollapseWarning)
        small, large, _ = train_tasks(lambda model: DynamicLossScale(2.0**16, floor=2.0**-10))
        assert large[-1] < 0.7 * large[0]
        assert small[-1] > 0.999 * small[0], "its gradients are lost"
        rule = ScaleRule(growth=2 ** (1 / 1000), shrink=2**-0.5, window=1, floor=2.0**-10, ceiling=2.0**40)
        small, large, skipped = train_tasks(
            lambda model: GroupGradScaler(model, ["small", "large"], init_scale=[2.0**30, 1.0], rule=rule)
        )
    assert large[-1] < 0.7 * large[0]
    assert small[-1] < 0.7 * small[0]
    assert skipped < 20


def test_half_precision_trains_a_conv_net_and_a_gpt():
    for make, dtype, how in [
        (BottleneckNet, torch.float16, "dynamic"),
        (BottleneckNet, torch.bfloat16, "group"),
        (TinyGPT, torch.bfloat16, "dynamic"),
        (TinyGPT, torch.float16, "group"),
    ]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = DynamicLossScale(2.0**14) if how == "dynamic" else GroupGradScaler(model, 2, init_scale=2.0**14)
        autocast_forward(model, dtype)
        step = TrainStep(Target(model, optimizer, scaler), lambda x, y, model=model: F.cross_entropy(model(x), y))
        x, y = data(model, 0)
        losses = [float(step(x, y).loss) for _ in range(12)]
        assert losses[-1] < 0.8 * losses[0]
        plain = make()
        plain.load_state_dict(model.state_dict())
        for each, scale in ((model, scaler.scale), (plain, lambda loss: loss)):
            each.zero_grad()
            scale(F.cross_entropy(each(x), y)).backward()
        scaler.unscale_(optimizer)
        norm = torch.cat([g.flatten() for g in gradients(plain)]).norm()
        far = torch.cat([(a - b).flatten() for a, b in zip(gradients(model), gradients(plain), strict=True)]).norm()
        assert far < 0.15 * norm


FREEZE = GradFreeze(groups=3, full_share=0.3, total_steps=12)
WINDOWS = GradAccumulation(steps=2)
COMBINATIONS = {
    "freeze": [FREEZE],
    "accumulation": [WINDOWS],
    "all": [FREEZE, WINDOWS, LessBn(), GradientCentralization()],
}


def steps_of(algorithms, scaler=None, bad: int = -1, seed: int = 0):
    torch.manual_seed(0)
    model = BottleneckNet()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), scaler, seed=seed)
    attached = attach_all(target, algorithms)
    poison = {"value": 1.0}
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y) * poison["value"], attached=attached)
    return model, target, step, poison


def test_every_combination_trains_to_the_bit_like_unscaled_and_skips_an_overflow():
    for how, name in itertools.product(["dynamic", "group"], COMBINATIONS):
        plain, _, plain_step, _ = steps_of(COMBINATIONS[name])
        group = [LossScaleGroup(groups=3, init_scale=2.0**12)] if how == "group" else []
        model, target, step, poison = steps_of(
            [*COMBINATIONS[name], *group], None if group else DynamicLossScale(2.0**12)
        )
        for number in range(6):
            plain_step(*data(plain, number))
            assert not step(*data(model, number)).overflow
        assert target.scaler.get_scale() >= 2.0**12
        assert all_equal(plain.state_dict().values(), model.state_dict().values())
        skipped = 0
        for number in range(6, 12):
            poison["value"] = math.inf if number == 8 else 1.0
            before = [p.detach().clone() for p in model.parameters()]
            state = copy.deepcopy(target.optimizer.state_dict()["state"])
            out = step(*data(model, number))
            skipped += bool(out.overflow)
            if out.overflow:
                assert all_equal(before, model.parameters())
                after = target.optimizer.state_dict()["state"]
                assert all(torch.equal(after[k]["momentum_buffer"], v["momentum_buffer"]) for k, v in state.items())
        assert skipped == 1
        assert step.updated
        assert all(p.isfinite().all() for p in model.parameters())


def test_a_window_that_was_resumed_may_hold_gradients_of_a_module_that_was_not_called_again():
    """A branch of the model was used before the checkpoint and not after it."""

    def built() -> tuple[nn.ModuleList, GroupGradScaler, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        return model, GroupGradScaler(model, [["1"]]), torch.optim.SGD(model.parameters(), lr=0.1)

    def scaled(model: nn.ModuleList, scaler: GroupGradScaler, *, both: bool) -> None:
        hidden = model[0](torch.ones(1, 2))
        scaler.scale((model[1](hidden) if both else hidden).sum()).backward()

    model, scaler, optimizer = built()
    scaled(model, scaler, both=True)
    again, resumed, other = built()
    resumed.load_state_dict(scaler.state_dict())
    for own, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert theirs.grad is not None
        own.grad = theirs.grad.clone()
    for each in ((model, scaler, optimizer), (again, resumed, other)):
        scaled(*each[:2], both=False)
        each[1].step(each[2])
        each[1].update()
    assert all_equal(model.parameters(), again.parameters())


def test_the_report_and_the_warning_name_the_group():
    model = mlp()
    scaler = GroupGradScaler(model, ["0", ["2", "3"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.register_hook(lambda grad: grad * math.nan)
    step = TrainStep(Target(model, optimizer, scaler), lambda x, y: F.cross_entropy(model(x), y))
    with pytest.warns(ScaleCollapseWarning, match=r"scale of group '0' fell .* 8 overflows in a row"):
        assert all(step(*data(model, number)).overflow for number in range(9))
    found = {status.name: status for status in scaler.report}
    assert list(found) == ["rest of the model", "0", "2, 3"]
    assert (found["0"].overflows, found["0"].in_a_row, found["2, 3"].overflows) == (9, 9, 0)
    assert found["0"].scale < 2.0**12 < 2.0**16 < found["2, 3"].scale


def overflowing(scaler: GroupGradScaler, model: nn.Module, module: nn.Module) -> list[int]:
    """Return the overflows of each group, where the gradients of one module are not finite."""
    scaler.scale(model(data(model, 0)[0]).sum()).backward()
    for param in module.parameters(recurse=False):
        param.grad = torch.full_like(param, math.nan)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    model.zero_grad()
    return [status.overflows for status in scaler.report]


def test_groups_by_name_and_number():
    model = BottleneckNet()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    scaler = GroupGradScaler(model, [names])
    for number, name in enumerate(names[::3], start=1):
        assert overflowing(scaler, model, model.get_submodule(name)) == [0, number]
    scaler.remove()
    model = mlp()
    scaler = GroupGradScaler(model, ["0", "[24]"])
    assert [overflowing(scaler, model, model[place]) for place in (0, 2, 4)] == [[1, 0], [1, 1], [1, 2]]
    assert [status.name for status in GroupGradScaler(mlp(), 3).report] == ["0", "2", "4"]


def test_a_list_of_modules_stands_for_what_it_holds():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    model = Stack()
    plain = copy.deepcopy(model)
    scaler = GroupGradScaler(model, ["layers"])
    x = torch.randn(2, 4)
    plain(x).sum().backward()
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all_equal(gradients(model), gradients(plain))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        return self.head(self.body(self.wte(x)))


def test_tied_weights_are_refused_by_name_and_left_to_the_rest_by_number():
    model = Tied()
    with pytest.raises(IncompatibleError, match=r"'wte.weight' is shared by 'wte' and 'head'.*into one group"):
        GroupGradScaler(model, ["wte", "body"])
    assert not any(m._forward_hooks for m in model.modules())
    plain = copy.deepcopy(model)
    scaler = GroupGradScaler(model, 3)
    ids = torch.tensor([[1, 2, 3]])
    plain(ids).square().sum().backward()
    scaler.scale(model(ids).square().sum()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all_equal(gradients(model), gradients(plain))


def test_bad_groups():
    model = mlp()
    bad: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "found 0; give 1 or more"),
        (True, TypeError, "found True; give a number of groups"),
        ([], ValueError, "each group needs at least one module name"),
        ([[]], ValueError, "each group needs at least one module name"),
        ([3], TypeError, "found 3; give names of modules"),
        ([nn.Conv3d], TypeError, "give names of modules"),
        (["layer9"], ValueError, r"no module of the model is 'layer9'.*named_modules"),
        (["0", "0"], ValueError, "'0' is in group 1 and, itself or a part of it, in group 2"),
    ]
    for groups, error, text in bad:
        with pytest.raises(error, match=text):
            GroupGradScaler(model, groups)
        assert not any(m._forward_hooks for m in model.modules())
    rule: Any = {"window": 2}
    with pytest.raises(TypeError, match=r"rule: found dict; give a torchboost.ScaleRule\(\.\.\.\)"):
        GroupGradScaler(model, ["0", "2"], rule=rule)


def test_bad_settings_of_the_algorithm():
    with pytest.raises(ValueError, match="floor, ceiling: found 8"):
        LossScaleGroup(floor=8.0, ceiling=4.0)
    with pytest.raises(ValueError, match=r"init_scale: found 0\.25"):
        LossScaleGroup(init_scale=[0.25, 8.0])
    model = mlp()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="found 3 scales for 2 groups"):
        attach_all(target, [LossScaleGroup(groups=["0", "2"], init_scale=[1.0, 2.0, 4.0])])
    target.scaler = DynamicLossScale()
    with pytest.raises(IncompatibleError, match="the target has a scaler already, a DynamicLossScale"):
        attach_all(target, [LossScaleGroup()])


def test_it_brings_the_scaler_that_float16_asks_for():
    model = cnn()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attached = attach_all(target, [Autocast(dtype="float16"), LossScaleGroup(groups=2)])
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)
    assert math.isfinite(float(step(*data(model, 0)).loss))
    assert step.updated
    attached.remove()
    assert target.scaler is None


def states(boosted: torchboost.Boosted) -> dict[str, str]:
    return {row.name: row.state for row in boosted.levers.explanation().rows if row.name == "loss_scale_group"}


@pytest.mark.parametrize("way", ["scaler", "step"])
def test_a_loop_that_does_not_scale_is_told_that_nothing_is_in_effect(way):
    model = deep(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted = torchboost.boost(model, optimizer, config={"extra": {"loss_scale_group": True}}, calibrate=False)
    told = "not in effect: scale with boosted.scaler, or call boosted.step(loss_fn)"
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert told in in_one_line(boosted.explain())
    assert states(boosted) == {"loss_scale_group": "idle"}
    optimizer.zero_grad()
    if way == "step":
        boosted.step(F.mse_loss)(x, y)
    else:
        boosted.scaler.scale(F.mse_loss(model(x), y)).backward()
        boosted.scaler.step(optimizer)
        boosted.scaler.update()
    assert told not in in_one_line(boosted.explain())
    boosted.remove()


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_removal_between_backward_and_step_leaves_true_gradients(unscaled):
    model, plain = deep(3), deep(3)
    x = torch.randn(4, 8)
    scaler = GroupGradScaler(model, ["0", "2"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(x).square().sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.remove()
    plain(x).square().sum().backward()
    assert all_equal(gradients(model), gradients(plain))
    scaler.step(optimizer)
    scaler.update()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all_equal(model.parameters(), plain.parameters())


def test_a_removal_in_a_window_completes_the_mean_of_its_batches():
    model = cnn()
    plain = copy.deepcopy(model)
    extra = {"loss_scale_group": {"groups": 2}, "grad_accumulation": {"steps": 4}}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    boosted = torchboost.boost(model, optimizers[0], "O0", config={"extra": extra})
    step, updated = boosted.step(F.cross_entropy), []
    for seed in range(5):
        if seed == 2:
            boosted.remove()
        x, y = data(model, seed)
        step(x, y)
        updated.append(step.updated)
        (F.cross_entropy(plain(x), y) / (4 if seed < 4 else 1)).backward()
        if seed > 2:
            optimizers[1].step()
            plain.zero_grad()
    assert updated == [False, False, False, True, True]
    assert all_equal(model.parameters(), plain.parameters())


def test_a_second_scaler_on_a_model_is_refused_while_the_first_is_there():
    """Where their groups differ, each would take the other's borders for its own."""
    model, plain = deep(3), deep(3)
    first = GroupGradScaler(model, ["0", "2"], init_scale=2.0**9)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for again in (lambda: GroupGradScaler(model, ["4"]), lambda: attach_all(target, [LossScaleGroup(groups=2)])):
        with pytest.raises(IncompatibleError, match=r"already has a GroupGradScaler.*remove\(\)"):
            again()
    assert target.scaler is None
    twin = copy.deepcopy(model)
    first.remove()
    x = torch.randn(2, 8)
    plain(x).sum().backward()
    for each in (model, twin):  # a copy of a model with borders has none of its own
        scaler = GroupGradScaler(each, ["2", "4"], init_scale=[2.0**3, 2.0**12])
        scaler.scale(each(x).sum()).backward()
        scaler.unscale_(torch.optim.SGD(each.parameters(), lr=0.1))
        assert all_equal(gradients(each), gradients(plain))


def test_the_borders_go_with_the_scaler():
    model = deep(2)
    scaler = GroupGradScaler(model, 2)
    assert has_borders(model)
    del scaler
    assert not has_borders(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_has_its_borders_too():
    class Net(nn.Sequential):
        def forward(self, input):
            for layer in self:
                input = layer(input)
            return input

    torch.manual_seed(0)
    model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    scaler = GroupGradScaler(model, ["0", "2", "4"], init_scale=[2.0**20, 2.0**4, 2.0**9])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.compile(backend="aot_eager", fullgraph=True)
    for number in range(3):
        x = torch.randn(4, 8)
        model.zero_grad()
        plain.zero_grad()
        plain(x).square().sum().backward()
        # Other scales are other numbers in the same memory, no other graph.
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            scaler.scale(model(x).square().sum()).backward()
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad * 2.0**20), number
        scaler.unscale_(optimizer)
        assert all_equal(gradients(model), gradients(plain))
        scaler.update()


def test_a_model_that_is_compiled_already_is_refused():
    model = mlp()
    model.compile(backend="eager")
    for compiled in (model, torch.compile(mlp(), backend="eager")):
        with pytest.raises(IncompatibleError, match="set the borders first"):
            GroupGradScaler(compiled, 2)


def test_settings_are_values():
    value = LossScaleGroup(groups=[["a", "b"], "c"], init_scale=[4.0, 8.0])
    assert value.groups == (("a", "b"), "c")
    assert hash(value) == hash(LossScaleGroup(groups=(("a", "b"), "c"), init_scale=(4.0, 8.0)))
    assert LossScaleGroup().idle(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())) is not None
