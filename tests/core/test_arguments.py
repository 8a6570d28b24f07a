"""Wrong arguments are refused at every way in, with what was found, before anything is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from torchboost import AutoBoost, Facts, Plan, Target, WithLoss, boost
from torchboost.core.arguments import check_number, check_scaler, check_sens


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MODEL = net()
OPTIMIZER = sgd(MODEL)
PLAN = Plan.of("O1")
MODULE = r"must be a torch\.nn\.Module, found list\."
OPTIM = r"must be a torch\.optim\.Optimizer, found list\."
WRONG = {
    "boost, model": (lambda: boost([MODEL], OPTIMIZER), MODULE),
    "boost, optimizer": (lambda: boost(MODEL, [[OPTIMIZER]]), OPTIM),
    "boost, loss": (lambda: boost(MODEL, OPTIMIZER, level="O0").step("O1"), r"loss_fn must be .*, found str 'O1'\."),
    "boost, class": (lambda: boost(MODEL, OPTIMIZER, level="O0").step(nn.MSELoss), r"give MSELoss\(\)\."),
    "boost, scaler": (
        lambda: boost(MODEL, OPTIMIZER, scaler=True),
        r"scaler must be .*, found bool True\.",
    ),
    "measure": (lambda: Facts.measure([MODEL]), MODULE),
    "transform, model": (lambda: PLAN.transform([MODEL]), MODULE),
    "transform, optimizer": (lambda: PLAN.transform(MODEL, [OPTIMIZER]), OPTIM),
    "fit, model": (lambda: PLAN.fit([MODEL], OPTIMIZER), MODULE),
    "fit, optimizer": (lambda: PLAN.fit(MODEL, [OPTIMIZER]), OPTIM),
    "attach": (lambda: PLAN.attach(MODEL), r"torchboost\.Target, found Sequential; .*Target\(model, optimizer\)"),
    "fold": (lambda: torchboost.fold_batch_norms([MODEL]), MODULE),
    "reduce": (lambda: torchboost.less_bn([MODEL]), MODULE),
    "channels_last": (lambda: torchboost.to_channels_last([MODEL]), MODULE),
    "autocast": (lambda: torchboost.autocast_forward([MODEL]), MODULE),
    "fuse": (lambda: torchboost.fuse_optimizer([OPTIMIZER]), OPTIM),
    "centralize": (lambda: torchboost.centralize_gradients([OPTIMIZER]), OPTIM),
    "target, model": (lambda: Target([MODEL], OPTIMIZER), MODULE),
    "target, optimizer": (lambda: Target(MODEL, [OPTIMIZER]), OPTIM),
    "target, scaler": (lambda: Target(MODEL, OPTIMIZER, torch.amp.GradScaler), "found the class GradScaler"),
    "with loss, backbone": (lambda: WithLoss([MODEL], F.mse_loss), "backbone " + MODULE),
    "with loss, loss": (lambda: WithLoss(MODEL, None), r"loss_fn must be .*, found None\."),
    "auto, scaler": (
        lambda: AutoBoost("O1").network_auto_process_train(MODEL, OPTIMIZER, scaler=1.0),
        r"scaler must be .*, found float 1\.0\.",
    ),
}


@pytest.mark.parametrize("where", WRONG)
def test_wrong_types_are_refused_before_anything_changes(where):
    call, message = WRONG[where]
    before = {name: value.stride() for name, value in MODEL.state_dict().items()}
    with pytest.raises(TypeError, match=message):
        call()
    assert {name: value.stride() for name, value in MODEL.state_dict().items()} == before
    assert not MODEL._forward_pre_hooks
    assert not OPTIMIZER._optimizer_step_pre_hooks
    assert "fused" not in OPTIMIZER.param_groups[0] or not OPTIMIZER.param_groups[0]["fused"]


@pytest.mark.parametrize(
    "call",
    [
        AutoBoost("O1").network_auto_process_train,
        boost,
        PLAN.fit,
        torchboost.BoostTrainOneStepCell,
    ],
)
def test_an_optimizer_of_another_network_is_refused(call):
    model, other = net(), net()
    with pytest.raises(ValueError, match=r"none of the 4 parameters of the optimizer belongs to the \w+, a Sequential"):
        call(model, sgd(other))
    assert isinstance(model[1], nn.BatchNorm2d)
    for param in [model[0].bias, *model[1].parameters()]:
        param.requires_grad_(False)
    part = torch.optim.SGD([model[0].weight, *other.parameters()], lr=0.1)
    call(model, part)


@pytest.mark.parametrize("value", ["1", True, None, [1.0], float])
def test_sens_is_a_number(value):
    with pytest.raises(TypeError, match="sens must be a number, found"):
        check_sens(value)
    check_sens(-2)


def test_anything_with_the_methods_of_a_scaler_is_one():
    class Scaler:
        scale = unscale_ = step = update = get_scale = lambda self, *args: None

    for scaler in (None, torch.amp.GradScaler("cpu"), Scaler()):
        check_scaler(scaler)


@pytest.mark.parametrize("value", ["1", True, None, -1, float("nan"), float("inf"), 0])
def test_numbers_out_of_range_are_refused_with_what_was_found(value):
    kind = TypeError if isinstance(value, (str, bool, type(None))) else ValueError
    with pytest.raises(kind, match=f"lr: found {value!r}; give a finite number above 0"):
        check_number("lr", value, above=True)
    check_number("lr", 0.0)


@pytest.mark.parametrize("layers", [[nn.LazyLinear(8)], [nn.LazyConv2d(8, 3)], [nn.Linear(2, 2), nn.LazyLinear(8)]])
def test_a_lazy_module_is_told_to_run_first(layers):
    model = nn.Sequential(*layers)
    with pytest.raises(ValueError, match="of a lazy module, which has no shape yet; call model"):
        boost(model, sgd(model), total_steps=10_000)
    with pytest.raises(ValueError, match="of a lazy module"):
        torchboost.prepare(model)
    boost(model, sgd(model), level="O0").remove()
