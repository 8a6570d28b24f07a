from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import FORMS, SHAPES, give_grads, parameters, same, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim import Adam, AdamW, AdamWeightDecay, Lamb, MixedOptimizer, RMSProp


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return values(optimizer)[1:]


def reference(params: list[nn.Parameter], steps: int, **options: Any) -> list[torch.Tensor]:
    """The formulas of the documentation in float64."""
    lr, (beta1, beta2), eps = options["lr"], options["betas"], options["eps"]
    weights = [param.detach().double() for param in params]
    mean, square, most = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    for step in range(steps):
        give_grads(params, step)
        one = 1 - beta1 ** (step + 1) if options["bias_correction"] else 1.0
        two = 1 - beta2 ** (step + 1) if options["bias_correction"] else 1.0
        for i, param in enumerate(params):
            grad, weight = (-1 if options["maximize"] else 1) * param.grad.double(), weights[i]
            if options["decoupled_weight_decay"]:
                weight = weight * (1 - lr * 0.1)
            else:
                grad = grad + 0.1 * weight
            mean[i] = beta1 * mean[i] + (1 - beta1) * grad
            square[i] = beta2 * square[i] + (1 - beta2) * grad**2
            most[i] = torch.maximum(most[i], square[i])
            used = most[i] if options["amsgrad"] else square[i]
            ahead = beta1 * mean[i] + (1 - beta1) * grad if options["nesterov"] else mean[i]
            if options["eps_uncorrected"]:
                weights[i] = weight - lr * two**0.5 / one * ahead / (used.sqrt() + eps)
            else:
                weights[i] = weight - lr / one * ahead / ((used / two).sqrt() + eps)
    return weights


FLAGS = ("amsgrad", "nesterov", "decoupled_weight_decay", "bias_correction", "eps_uncorrected", "maximize")


def test_every_combination_of_flags_follows_the_formulas():
    for flags in itertools.product([False, True], repeat=len(FLAGS)):
        options: dict[str, Any] = {**dict(zip(FLAGS, flags, strict=True)), "lr": 0.05, "betas": (0.8, 0.9), "eps": 0.01}
        params = parameters(SHAPES[:2])
        wanted = reference(params, 5, **options)
        train(Adam(params, weight_decay=0.1, **options), params, range(5))
        for param, want in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.detach().double(), want, rtol=2e-5, atol=2e-6, msg=str(options))


def test_without_bias_correction_in_every_form():
    for form in FORMS.values():
        options = {"lr": 0.05, "betas": (0.9, 0.999), "eps": 1e-6}
        flags = dict.fromkeys(FLAGS, False) | {"decoupled_weight_decay": True}
        params = parameters(SHAPES[:2])
        wanted = reference(params, 5, **options, **flags)
        optimizer = AdamWeightDecay(params, weight_decay=0.1, **options, **form)
        train(optimizer, params, range(5))
        for param, want in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.detach().double(), want, rtol=2e-5, atol=2e-6)
            assert optimizer.state[param]["step"] == 5


def test_long_memory_without_bias_correction():
    """The kernels are told a large step, at which a beta close to 1 must be forgotten too."""
    flags = dict.fromkeys(FLAGS, False) | {"decoupled_weight_decay": True}
    options = {"lr": 0.05, "betas": (1 - 1e-9, 1 - 1e-9), "eps": 1e-6}
    for form in FORMS.values():
        params = parameters([(5,)])
        wanted = reference(params, 2, **options, **flags)
        train(AdamWeightDecay(params, weight_decay=0.1, **options, **form), params, range(2))
        torch.testing.assert_close(params[0].detach().double(), wanted[0], rtol=1e-4, atol=1e-5)


def test_forms_without_a_kernel_are_refused():
    for flag, form in itertools.product(["nesterov", "eps_uncorrected"], ["fused", "capturable"]):
        with pytest.raises(ValueError, match=f"{flag}: torch has no kernel"):
            Adam(parameters(), **{flag: True, form: True})
        optimizer = Adam(parameters(), **{form: True})
        optimizer.param_groups[0][flag] = True
        with pytest.raises(ValueError, match=f"{flag}: torch has no kernel"):
            optimizer.step()


def test_what_the_kernels_refuse_is_refused_before_anything_changes():
    params = [*parameters(SHAPES[:2]), *parameters([(2,)], dtype=torch.complex64)]
    give_grads(params, 0)
    for options, text in (({"capturable": True}, "capturable=True needs"), ({"fused": True}, "fused=True needs")):
        optimizer = Adam([{"params": params[:2], **options}, {"params": params[2:], **options}])
        before = values(optimizer)
        with pytest.raises(IncompatibleError, match=text):
            optimizer.step()
        assert values(optimizer) == before
        assert not optimizer.state


def test_complex_weights_are_refused_without_a_kernel_for_them():
    for rule, options in ((Adam, {"nesterov": True}), (Adam, {"eps_uncorrected": True}), (Lamb, {}), (RMSProp, {})):
        params = parameters([(4,)], dtype=torch.complex64)
        give_grads(params, 0)
        optimizer = rule(params, **options)
        with pytest.raises(IncompatibleError, match=r"needs? real parameters"):
            optimizer.step()
        assert not optimizer.state


def test_channels_last_and_other_precisions():
    for dtype in [torch.float64, torch.bfloat16, torch.float16]:
        mine, other = ([nn.Parameter(torch.ones(4, 3, 2, 2, dtype=dtype)[..., ::1])] for _ in range(2))
        for params in (mine, other):
            params[0].data = params[0].data.to(memory_format=torch.channels_last)
        left, right = AdamW(mine, lr=0.1), torch.optim.AdamW(other, lr=0.1)
        train(left, mine, range(3))
        train(right, other, range(3))
        assert same(mine, other)
        assert left.state[mine[0]]["exp_avg"].stride() == right.state[other[0]]["exp_avg"].stride()


def test_fused_kernels_get_gradients_and_moments_in_the_layout_of_the_weights():
    """They walk through memory in order, and would pair the wrong numbers."""
    runs = []
    for fused in (True, False):
        param = nn.Parameter(torch.ones(4, 3, 3, 3).to(memory_format=torch.channels_last))
        optimizer = Adam([param], lr=0.1, fused=fused)
        for step in range(3):
            param.grad = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            state = optimizer.state[param]
            state["exp_avg"] = state["exp_avg"].contiguous()  # as a checkpoint of another layout brings it
        runs.append(param)
    torch.testing.assert_close(*runs)


def test_a_file_of_adam_does_not_change_how_adamw_decays():
    for ours in [AdamW, torch.optim.AdamW, MixedOptimizer]:
        other = parameters()
        right = torch.optim.Adam(other, lr=0.01, weight_decay=0.1)
        train(right, other, range(2))
        left = ours([param.detach().clone().requires_grad_() for param in other])
        left.load_state_dict(copy.deepcopy(right.state_dict()))
        assert left.param_groups[0]["decoupled_weight_decay"] is True


def test_a_file_of_torch_keeps_its_bias_correction():
    """The file does not name it: dropping it would make the first updates up to 30 times as large."""
    for theirs in [torch.optim.Adam, torch.optim.AdamW]:
        other = parameters()
        right = theirs(other, lr=0.01, weight_decay=0.1)
        train(right, other, range(2))
        ours = [param.detach().clone().requires_grad_() for param in other]
        left = AdamWeightDecay(ours, lr=0.01)
        saved = copy.deepcopy(right.state_dict())
        left.load_state_dict(saved)
        assert left.param_groups[0]["bias_correction"] is True
        assert "bias_correction: True" in repr(left)
        assert "bias_correction" not in saved["param_groups"][0]
        train(left, ours, range(2, 5))
        train(right, other, range(2, 5))
        assert state_of(left) == state_of(right)
        own = AdamWeightDecay(parameters(), lr=0.01)
        own.load_state_dict(copy.deepcopy(AdamWeightDecay(parameters(), lr=0.02).state_dict()))
        assert (own.param_groups[0]["bias_correction"], own.param_groups[0]["lr"]) == (False, 0.02)
