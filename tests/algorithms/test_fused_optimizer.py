"""Fused steps equal ordinary ones, in every situation in which the fused kernels alone would not."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import batch_for, cnn, mlp
from tests.support.trajectories import train
from tests.support.wrapped import train_share
from torchboost import Target
from torchboost.algorithms import ChannelsLast, FusedOptimizer, fuse_optimizer
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.optim import LARS, SGD, Adam, AdamWeightDecay, MixedOptimizer, muon_groups
from torchboost.optim.rules.options import miscomputes

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=1e-3),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


OURS: dict[str, Make] = {
    "our sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "our adam": lambda params: Adam(params, lr=0.01, weight_decay=0.1),
    "our adam weight decay": lambda params: AdamWeightDecay(params, lr=0.01, weight_decay=0.1),
    "our lars": lambda params: LARS(params, lr=1.0, coefficient=0.02),
}
ALL = OPTIMIZERS | OURS


def momentum(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def pair(make: Make, build: Callable[[], nn.Module] = mlp) -> tuple[Target, Target]:
    model = build()
    plain = copy.deepcopy(model)
    return Target(model, make(model.parameters())), Target(plain, make(plain.parameters()))


def assert_same(one: Target, other: Target, tolerance: float = 1e-6) -> None:
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=tolerance)


def step_on_equal_gradients(one: Target, other: Target) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        one.optimizer.step()
        other.optimizer.step()


def test_fused_steps_equal_ordinary_steps_and_removal_leaves_no_trace() -> None:
    for name, make in ALL.items():
        fused, plain = pair(make, cnn if name in OURS else mlp)
        optimizer, before = fused.optimizer, set(vars(fused.optimizer))
        attached = attach_all(fused, [FusedOptimizer()])
        assert optimizer.param_groups[0]["fused"] is True
        assert fused.optimizer is optimizer
        for target in (fused, plain):
            train(target, 5, 3)
        assert_same(fused, plain)
        attached.remove()
        for target in (fused, plain):
            train(target, 2, 4)
        assert_same(fused, plain)
        assert set(vars(optimizer)) == before
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_load_state_dict_post_hooks
        assert optimizer.defaults == plain.optimizer.defaults
        mine, theirs = optimizer.state_dict(), plain.optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert [list(state) for state in mine["state"].values()] == [list(state) for state in theirs["state"].values()]
    optimizer = torch.optim.Adam(mlp().parameters(), foreach=True)  # an explicit foreach comes back
    with fuse_optimizer(optimizer):
        assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, None)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, True)


def test_under_a_scaler_with_overflow_in_the_first_step() -> None:
    for unscale, name in itertools.product([True, False], ["nesterov", "adamw"]):
        fused, plain = pair(OPTIMIZERS[name])
        seen: list[float] = []
        fuse_optimizer(fused.optimizer)
        for target in (fused, plain):
            weight = target.model[0].weight
            target.optimizer.register_step_pre_hook(
                lambda *_, seen=seen, weight=weight: seen.append(weight.grad.norm().item())
            )
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(target.optimizer, 0.9)
            generator = torch.Generator().manual_seed(0)
            for factor in (float("inf"), 1.0, 1.0, float("nan"), 1.0):
                x, y = batch_for(target.model, generator)
                scaler.scale(F.cross_entropy(target.model(x), y) * factor).backward()
                if unscale:
                    scaler.unscale_(target.optimizer)
                    nn.utils.clip_grad_norm_(target.model.parameters(), 0.5)
                before = scaler.get_scale()
                scaler.step(target.optimizer)
                scaler.update()
                if scaler.get_scale() == before:
                    scheduler.step()
                target.optimizer.zero_grad()
            assert scaler.get_scale() == 2.0**10
            assert not hasattr(target.optimizer, "grad_scale")
        assert_same(fused, plain)
        assert len(seen) == 6
        assert seen[:3] == pytest.approx(seen[3:], rel=1e-4)


def test_parameters_that_start_late_join_with_the_right_momentum() -> None:
    fused, plain = pair(momentum)
    fuse_optimizer(fused.optimizer)
    for target in (fused, plain):
        target.model[0].requires_grad_(False)
        train(target, 2, 3)
        target.model[0].requires_grad_(True)
        train(target, 3, 4)
        for step, parameter in enumerate(target.model[0].parameters(), 4):
            target.optimizer.state[parameter] = {}  # begins again
            train(target, step, step + 1)
    assert_same(fused, plain)


LAYOUTS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.full((1,), 2.0).expand(64),
    lambda: torch.arange(320.0).view(64, 5)[:, 0],
    lambda: torch.arange(128.0)[::2],
)


def test_gradients_of_one_axis_that_are_not_dense() -> None:
    for make, layout in itertools.product(ALL.values(), LAYOUTS):
        ours, theirs = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))
        fused, plain = make([ours]), make([theirs])
        fuse_optimizer(fused)
        for _ in range(3):
            ours.grad, theirs.grad = layout(), layout().clone()
            fused.step()
            plain.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_parameter_with_gaps_leaves_its_group_as_it_is_or_takes_it_back() -> None:
    for make in ALL.values():
        whole = torch.ones(8, 32)
        sliced, dense = nn.Parameter(whole[:, :16]), nn.Parameter(torch.ones(4))
        optimizer = make([{"params": [sliced]}, {"params": [dense]}])
        with pytest.warns(
            NoEffectWarning, match=r"group 0: \w+ has a parameter of shape \(8, 16\) with strides \(32, 1\)"
        ):
            fuse_optimizer(optimizer)
        assert [group["fused"] for group in optimizer.param_groups] == [None, True]
        sliced.grad, dense.grad = torch.ones(8, 16), torch.ones(4)
        optimizer.step()
        assert torch.equal(whole[:, 16:], torch.ones(8, 16))
        assert bool((sliced != 1).all())
        assert bool((dense != 1).all())
    whole, weight = torch.ones(8, 32), nn.Parameter(torch.ones(8, 16))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    fuse_optimizer(optimizer)
    weight.grad = torch.ones(8, 16)
    optimizer.step()
    weight.data = whole[:, :16]  # gaps that come later
    with pytest.warns(NoEffectWarning, match="group 0 can no longer be fused: a parameter of shape"):
        optimizer.step()
    assert torch.equal(whole[:, 16:], torch.ones(8, 16))
    assert optimizer.param_groups[0]["fused"] is None


def test_state_that_a_loop_writes_in_another_memory_format_is_brought_into_line() -> None:
    for name in ["nesterov", "adamw", "adagrad"]:
        fused, plain = pair(OPTIMIZERS[name], cnn)
        fused.model.to(memory_format=torch.channels_last)
        fuse_optimizer(fused.optimizer)
        for _ in range(2):
            step_on_equal_gradients(fused, plain)
            for state in fused.optimizer.state.values():
                state |= {key: value.contiguous() for key, value in state.items()}
        step_on_equal_gradients(fused, plain)
        assert_same(fused, plain)


def test_a_memory_format_that_changes_before_or_later_takes_the_state_along() -> None:
    for name, later in itertools.product(("nesterov", "adamw", "adagrad"), (False, True)):
        fused, plain = pair(OPTIMIZERS[name], cnn)
        if later:
            fuse_optimizer(fused.optimizer)
        for target in (fused, plain):
            train(target, 2, 3)
        fused.model.to(memory_format=torch.channels_last)
        if not later:
            fuse_optimizer(fused.optimizer)
        step_on_equal_gradients(fused, plain)
        assert_same(fused, plain)


def test_groups_added_later_are_fused_and_restored_or_left_as_they_are() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = momentum([first])
    effect = fuse_optimizer(optimizer)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert optimizer.param_groups[1]["fused"] is True
    first.grad, second.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    assert torch.equal(second.detach(), torch.full((2,), 0.5))
    effect.remove()
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    real, complex_ = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([real], lr=0.1)
    fuse_optimizer(optimizer)
    optimizer.add_param_group({"params": [complex_]})
    real.grad, complex_.grad = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    with pytest.warns(NoEffectWarning, match="group 1 was added and cannot be fused"):
        optimizer.step()
    optimizer.step()
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]
    torch.testing.assert_close(complex_.detach(), torch.full((2,), 0.8 + 0j))


def step_with_closure(target: Target, gradients: list[Tensor | None], named: bool) -> None:
    def closure() -> float:
        for p, gradient in zip(target.model.parameters(), gradients, strict=True):
            p.grad = None if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
        return 1.0

    call: Any = target.optimizer.step
    assert (call(closure=closure) if named else call(closure)) == 1.0


def test_gradients_that_a_closure_makes() -> None:
    for name in ALL:
        fused, plain = pair(ALL[name], cnn)
        fused.model.to(memory_format=torch.channels_last)
        fuse_optimizer(fused.optimizer)
        generator = torch.Generator().manual_seed(7)
        for step in range(3):
            gradients: list[Tensor | None] = [
                torch.randn(p.shape, generator=generator) for p in plain.model.parameters()
            ]
            if step == 0:
                gradients[0] = None  # frozen, and thawed at the second step
            step_with_closure(fused, gradients, step == 1)
            step_with_closure(plain, gradients, step == 1)
        assert_same(fused, plain)


@pytest.mark.parametrize("channels_last", [False, True])
def test_hooks_that_come_later_may_change_the_layout_of_gradients_and_state(channels_last: bool) -> None:
    def turned(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            strides = (1, len(parameter)) if parameter.ndim == 2 else torch.empty(parameter.shape).stride()
            parameter.grad = torch.empty_strided(parameter.shape, strides).copy_(parameter.grad)
            for name, value in optimizer.state[parameter].items():
                if name != "step":
                    optimizer.state[parameter][name] = torch.empty_strided(parameter.shape, strides).copy_(value)

    algorithms = [ChannelsLast(), FusedOptimizer()] if channels_last else [FusedOptimizer()]
    ends = []
    for chosen in ([], algorithms):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(5, 3, 4, 4)
        with attach_all(Target(model, optimizer), chosen):
            for step in range(6):
                if step == 2:
                    optimizer.register_step_pre_hook(turned)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                assert not chosen or optimizer.param_groups[0]["fused"]
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_an_unfused_run_keeps_the_optimizer_fused() -> None:
    fused, plain = pair(OPTIMIZERS["adamw"], cnn)
    train(plain, 3, 3)
    fused.model.to(memory_format=torch.channels_last)
    effect = fuse_optimizer(fused.optimizer)
    fused.model.load_state_dict(plain.model.state_dict())
    fused.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    assert fused.optimizer.param_groups[0]["fused"] is True
    kernel = fused.model[0].weight
    assert fused.optimizer.state[kernel]["exp_avg"].stride() == kernel.stride()
    step_on_equal_gradients(fused, plain)
    assert_same(fused, plain)
    effect.remove()
    assert fused.optimizer.param_groups[0]["fused"] is None


def test_copies_have_the_flags_of_the_user() -> None:
    for make in ALL.values():
        target, _ = pair(make)
        flags = [[{k: g.get(k) for k in ("fused", "foreach")} for g in target.optimizer.param_groups]]
        flags += [{k: target.optimizer.defaults.get(k) for k in ("fused", "foreach")}]
        attributes = set(vars(target.optimizer))
        with fuse_optimizer(target.optimizer):
            train(target, 2, 3)
            both = target.model, target.optimizer
            copies = [copy.deepcopy(both), pickle.loads(pickle.dumps(both))]
            train(target, 2, 4)
        for model, optimizer in copies:
            assert [[{k: g.get(k) for k in ("fused", "foreach")} for g in optimizer.param_groups]] == flags[:1]
            assert {k: optimizer.defaults.get(k) for k in ("fused", "foreach")} == flags[1]
            train(Target(model, optimizer), 2, 4)
            assert_same(Target(model, optimizer), target)
        assert "__getstate__" not in set(vars(target.optimizer)) - attributes


def test_an_optimizer_that_is_fused_already_gets_the_same_care() -> None:
    for attach in [
        lambda target: fuse_optimizer(target.optimizer),
        lambda target: attach_all(target, [ChannelsLast()]),
    ]:
        for name in ["nesterov", "adamw"]:
            fused, plain = pair(OPTIMIZERS[name], cnn)
            fused.optimizer.param_groups[0]["fused"] = True  # as after loading the checkpoint of a fused run
            fused.model.to(memory_format=torch.channels_last)
            assert FusedOptimizer().idle(fused.model, fused.optimizer) == "already fused"
            effect = attach(fused)
            fused.model[0].requires_grad_(False)
            plain.model[0].requires_grad_(False)
            train(fused, 2, 3)
            train(plain, 2, 3)
            fused.model[0].requires_grad_(True)
            plain.model[0].requires_grad_(True)
            step_on_equal_gradients(fused, plain)
            assert_same(fused, plain)
            effect.remove()
            assert fused.optimizer.param_groups[0]["fused"] is True


def test_sparse_gradients_switch_their_group_back() -> None:
    table, linear = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([{"params": table.parameters()}, {"params": linear.parameters()}], lr=0.1)
    fuse_optimizer(optimizer)
    before = table.weight.detach().clone()
    linear(table(torch.tensor([1, 3]))).sum().backward()
    with pytest.warns(NoEffectWarning, match="group 0 has sparse gradients"):
        optimizer.step()
    assert [group["fused"] for group in optimizer.param_groups] == [None, True]
    moved = (table.weight != before).any(1).tolist()
    assert moved == [False, True, False, True, False]
    optimizer.step()
    plain = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)  # sparse momentum can be fused over and loaded
    plain.step()
    saved = plain.state_dict()
    fuse_optimizer(plain)
    plain.load_state_dict(saved)
    with pytest.warns(NoEffectWarning, match="sparse gradients"):
        plain.step()
    assert plain.state[table.weight]["momentum_buffer"].is_sparse


def test_tables_with_sparse_gradients_are_known_before_the_first_step() -> None:
    table, linear = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)
    model = nn.Sequential(table, linear)
    together = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "sparse gradients" in (FusedOptimizer().idle(model, together) or "")
    apart = torch.optim.SGD([{"params": table.parameters()}, {"params": linear.parameters()}], lr=0.1)
    assert FusedOptimizer().idle(model, apart) is None
    with pytest.warns(NoEffectWarning, match="group 0: sparse gradients"):
        FusedOptimizer().attach(Target(model, apart))
    assert [group["fused"] for group in apart.param_groups] == [None, True]
    assert FusedOptimizer().idle(model, apart) == "already fused"


class Overridden(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Inherited(torch.optim.SGD):
    pass


def test_it_says_why_it_cannot_help() -> None:
    for make, reason in [
        (lambda p: torch.optim.RMSprop(p), "RMSprop has no fused form"),
        (lambda p: Overridden(p), "Overridden has no fused form"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), r"dampening=0\.5"),
        (lambda p: torch.optim.AdamW(p, weight_decay=torch.tensor(0.1)), "tensor as weight_decay"),
        (lambda p: Adam(p, nesterov=True), "nesterov: torch has no kernel"),
    ]:
        model = mlp()
        optimizer = make(model.parameters())
        before = copy.deepcopy(optimizer.param_groups)
        with pytest.warns(NoEffectWarning, match=reason):
            effect = fuse_optimizer(optimizer)
        effect.remove()
        assert [g.get("fused") for g in optimizer.param_groups] == [g.get("fused") for g in before]
        assert FusedOptimizer().idle(model, optimizer) is not None
        assert not optimizer._optimizer_step_pre_hooks
    assert FusedOptimizer().idle(model, Inherited(model.parameters(), lr=0.1)) is None
    real, complex_ = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([{"params": [real]}, {"params": [complex_]}], lr=0.1)
    with pytest.warns(NoEffectWarning, match=r"group 1: SGD cannot be fused for torch\.complex64 Tensor on cpu"):
        fuse_optimizer(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]
    assert optimizer.defaults["fused"] is None
    optimizer = torch.optim.Adam(model.parameters(), differentiable=True)  # refused before anything changes
    with pytest.raises(IncompatibleError, match="Adam was built with differentiable=True"):
        fuse_optimizer(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces its optimizer
def test_a_compiled_step_traces_the_preparation() -> None:
    torch.compiler.reset()
    fused, plain = pair(momentum)
    fuse_optimizer(fused.optimizer)
    graphs: list[Any] = []
    compiled = torch.compile(fused.optimizer.step, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)

    def step(inputs: Tensor, labels: Tensor) -> None:
        F.cross_entropy(fused.model(inputs), labels).backward()
        compiled()
        fused.optimizer.zero_grad()

    train(step, 4, 3, model=fused.model)
    train(plain, 4, 3)
    assert_same(fused, plain)
    assert graphs


def test_no_low_precision_model_moves_as_a_wrong_kernel_would_move_it():
    for make, dtype in itertools.product(
        [momentum, lambda params: SGD(params, lr=0.05, momentum=0.9)], [torch.bfloat16, torch.float16]
    ):
        target, plain = pair(make, lambda dtype=dtype: mlp().to(dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            fuse_optimizer(target.optimizer)
        for _ in range(3):
            for p, q in zip(target.model.parameters(), plain.model.parameters(), strict=True):
                p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).to(dtype)
                q.grad = p.grad.clone()
            target.optimizer.step()
            plain.optimizer.step()
        assert_same(target, plain, tolerance=0.02)


def test_a_model_cast_later_is_not_given_to_a_wrong_kernel():
    if not miscomputes(torch.optim.SGD, torch.bfloat16, torch.device("cpu")):
        pytest.skip("this torch computes right steps in bfloat16")
    target, plain = pair(momentum)
    fuse_optimizer(target.optimizer)
    step_on_equal_gradients(target, plain)
    for one in (target, plain):
        one.model.to(torch.bfloat16)
        for p in one.model.parameters():
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).to(torch.bfloat16)
    with pytest.warns(NoEffectWarning, match="computes wrong steps in torch.bfloat16"):
        target.optimizer.step()
    plain.optimizer.step()
    assert_same(target, plain, tolerance=0.02)


def test_the_groups_of_a_mixed_optimizer_that_have_a_fused_form_are_fused():
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    targets = []
    for own in (model, twin):
        groups = muon_groups(own, muon={"lr": 0.02, "ns_dtype": torch.float32}, adamw={"lr": 0.01})
        targets.append(Target(own, MixedOptimizer(groups)))
    with fuse_optimizer(targets[0].optimizer):  # no warning about Muon, which has no such form
        assert [group.get("fused") for group in targets[0].optimizer.param_groups] == [None, True]
        for target in targets:
            train_share(target, target.model, steps=4)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert [group.get("fused") for group in targets[0].optimizer.param_groups] == [None, None]
