"""A pipeline in front of any optimizer: order, loss scales, closures, removal."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from tests.support.trajectories import snapshot
from torchboost.core.step import ClosureOptimizer, Replay
from torchboost.errors import IncompatibleError
from torchboost.optim import (
    SGD,
    Adam,
    AdamW,
    Centralize,
    ClipNorm,
    ClipValue,
    Decay,
    GradientPipeline,
    Gradients,
    MixedOptimizer,
    Unscale,
)


class Doubled:
    """A transform that replaces each gradient."""

    scale_free = True

    def __call__(self, gradients: Gradients) -> None:
        gradients.grads[:] = [grad * 2 for grad in gradients.grads]


class Halve:
    scale_free = True

    def __call__(self, gradients: Gradients) -> None:
        torch._foreach_mul_(gradients.grads, 0.5)


class Refusal:
    scale_free = True

    def check(self, gradients: Gradients) -> None:
        if not all(grad.isfinite().all() for grad in gradients.grads):
            raise RuntimeError("found inf")

    def __call__(self, gradients: Gradients) -> None:
        pass


class Probe:
    """Records what it sees."""

    scale_free = False

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def __call__(self, gradients: Gradients) -> None:
        assert len(gradients.params) == len(gradients.grads) == len(gradients.groups)
        for param, group in zip(gradients.params, gradients.groups, strict=True):
            assert any(param is member for member in group["params"])
        self.seen.append([grad.clone() for grad in gradients.grads])


CHAIN = (Decay(0.1), Centralize(), ClipNorm(0.5), ClipValue(0.05))


def build(kind: Any = torch.optim.Adam, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = mlp()
    return model, kind(model.parameters(), lr=0.05, **options)


def backward(model: nn.Module, seed: int, scaler: Any = None) -> Tensor:
    x, y = batch_for(model, torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(model(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def hooks(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {key: len(value) for key, value in vars(optimizer).items() if key.endswith("_hooks")}


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def test_the_transforms_run_in_order_before_the_step_and_the_gradients_keep_their_work():
    forms: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, AdamW)
    for kind, options in itertools.product(kinds, forms):
        model, optimizer = build(kind, **options)
        probe = Probe()
        GradientPipeline(Centralize(), probe, Halve()).attach(optimizer)
        backward(model, 0)
        before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
        grads = grads_of(model)
        optimizer.step()
        assert [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()] == before  # changed in place
        for raw, seen, after in zip(grads, probe.seen[0], (p.grad for p in model.parameters()), strict=True):
            centred = raw - raw.mean(1, keepdim=True) if raw.ndim > 1 else raw
            torch.testing.assert_close(seen, centred)
            torch.testing.assert_close(after, centred / 2)

        by_hand, plain = build(kind, **options)
        for param, used in zip(by_hand.parameters(), model.parameters(), strict=True):
            param.grad = used.grad.clone()
        plain.step()
        assert snapshot(by_hand) == snapshot(model)


def pipelined(optimizer: torch.optim.Optimizer, *chain: Any) -> torch.optim.Optimizer:
    GradientPipeline(*(chain or CHAIN)).attach(optimizer)
    return optimizer


def test_two_pipelines_run_one_after_the_other_and_a_mixed_optimizer_clips_before_its_rules():
    def clipped_twice(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return pipelined(pipelined(torch.optim.SGD(params, lr=1.0, fused=True), ClipNorm(0.5)), ClipNorm(0.1))

    def mixed(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": part, "rule": "sgd", "fused": True, "lr": 1.0} for part in (params[:2], params[2:])]
        return MixedOptimizer(groups, weight_decay=0.0, transforms=(ClipNorm(0.1),))

    for make in (clipped_twice, mixed):
        model = mlp()
        backward(model, 0)
        params, before = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
        make(params).step()
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(params, before, strict=True)])
        assert float(moved.norm()) == pytest.approx(0.1, rel=1e-4)


def test_parameters_without_gradient_are_skipped_and_replaced_gradients_are_written_back():
    model, optimizer = build()
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    optimizer.step()
    backward(model, 0)
    model[0].weight.grad = None
    optimizer.step()
    assert [len(seen) for seen in probe.seen] == [0, 5]
    assert model[0].weight.grad is None
    GradientPipeline(Doubled()).attach(optimizer)
    expected = [p.grad * 2 for p in model.parameters() if p.grad is not None]
    optimizer.step()
    torch.testing.assert_close([p.grad for p in model.parameters() if p.grad is not None], expected)


def test_gradients_that_share_memory_are_each_changed_once():
    for transform in CHAIN:
        weights = []
        for expanded in (False, True):
            weight = nn.Parameter(torch.arange(6.0).view(2, 3))
            optimizer = pipelined(torch.optim.SGD([weight], lr=1.0), transform)
            gradient = torch.arange(3.0).expand(2, 3)  # as autograd.grad returns it for a sum
            weight.grad = gradient if expanded else gradient.clone(memory_format=torch.contiguous_format)
            optimizer.step()
            weights.append(weight.detach())
        assert torch.equal(*weights)
    for bad in [math.nan, math.inf]:  # gradients that are not finite reach the weights as in torch
        params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
        for param in params:
            param.grad = torch.ones(4, 3)
            param.grad[1, 1] = bad
        pipelined(torch.optim.SGD(params[:1], lr=0.1, fused=True), ClipNorm(1.0)).step()
        nn.utils.clip_grad_norm_(params[1:], 1.0)
        torch.optim.SGD(params[1:], lr=0.1, fused=True).step()
        torch.testing.assert_close(params[0], params[1], equal_nan=True)
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    params[0].grad = params[1].grad = torch.full((3,), 8.0)
    pipelined(torch.optim.SGD(params, lr=1.0), Unscale(8.0)).step()
    assert [param.tolist() for param in params] == [[0.0] * 3] * 2


def test_a_step_that_calls_the_step_of_its_base_class_is_transformed_once():
    """torch runs the hooks of both."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for kind in (Own, torch.optim.SGD, Own):
        param, grad = nn.Parameter(torch.ones(6, 4)), torch.arange(24.0).view(6, 4)
        optimizer = pipelined(kind([param], lr=1.0, fused=True), Unscale(10.0), ClipNorm(1e9))
        for _ in range(2):
            before = param.detach().clone()
            param.grad = grad.clone()
            optimizer.step()
            torch.testing.assert_close(before - param.detach(), grad / 10)


def test_removal_leaves_no_trace_and_a_copy_has_no_pipeline():
    model, optimizer = build()
    twin, plain = build()
    before = hooks(optimizer)
    attachment = GradientPipeline(Doubled(), Decay(0.1)).attach(optimizer)
    assert hooks(optimizer) != before
    assert not any(hooks(copy.deepcopy(optimizer)).values())
    attachment.remove()
    attachment.remove()
    assert hooks(optimizer) == before
    assert vars(optimizer).keys() == vars(plain).keys()
    steps(model, optimizer, range(2))
    steps(twin, plain, range(2))
    assert snapshot(model) == snapshot(twin)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()


def test_under_grad_scaler_the_transforms_see_true_gradients():
    for kind, unscaled, fused in itertools.product(
        [torch.optim.SGD, torch.optim.AdamW, AdamW], [False, True], (False, True)
    ):
        model, optimizer = build(kind, fused=fused)
        probe, free = Probe(), Halve()
        GradientPipeline(probe, ClipNorm(0.5), free).attach(optimizer)
        twin, plain = build(kind, fused=fused)
        GradientPipeline(ClipNorm(0.5), Halve()).attach(plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        for seed in range(4):
            optimizer.zero_grad()
            backward(model, seed, scaler)
            if seed == 2:  # an overflow
                next(iter(model.parameters())).grad[0, 0] = math.inf
                before = snapshot(model)
            scaled, scale = grads_of(model), scaler.get_scale()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale")
            if seed == 2:
                assert snapshot(model) == before
                continue
            torch.testing.assert_close(probe.seen[-1], [grad / scale for grad in scaled])
            plain.zero_grad()
            backward(twin, seed)
            plain.step()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-6)


def test_scale_free_transforms_leave_the_scale_to_the_kernel_and_after_a_refusal_the_run_can_go_on():
    model, optimizer = build(torch.optim.SGD, fused=True)
    twin, plain = build(torch.optim.SGD, fused=True)
    scales = []
    pipelined(optimizer, Centralize()).register_step_post_hook(lambda one, *_: scales.append(float(one.grad_scale)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(model, 0, scaler)
    scaler.step(optimizer)
    backward(twin, 0)
    pipelined(plain, Centralize()).step()
    assert scales == [1024.0]
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))

    model, optimizer = build(fused=True)
    pipelined(optimizer, ClipNorm(1.0), Refusal())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = snapshot(model)
    backward(model, 0, scaler)
    model[0].weight.grad[0, 0] = math.inf
    grads = grads_of(model)
    with pytest.raises(RuntimeError, match="found inf"):
        scaler.step(optimizer)
    assert snapshot(model) == before
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert not hasattr(optimizer, "grad_scale")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    backward(model, 0, scaler)
    scaler.step(optimizer)
    assert snapshot(model) != before


def test_with_a_closure_the_pipeline_runs_on_the_gradients_it_makes():
    model, optimizer = build(torch.optim.SGD)
    twin, plain = build(torch.optim.SGD)
    for each in (optimizer, plain):
        GradientPipeline(Doubled(), Centralize()).attach(each)
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            return backward(model, seed)

        loss = optimizer.step(closure) if seed else optimizer.step(closure=closure)
        plain.zero_grad()
        assert torch.equal(loss, backward(twin, seed))
        plain.step()
    assert snapshot(model) == snapshot(twin)
    probe = Probe()
    GradientPipeline(probe, Halve()).attach(optimizer)
    for seed in range(2):  # a closure without a backward pass does not run it again
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step(lambda: torch.zeros(()))
    assert len(probe.seen) == 2


CLOSURE_CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: pipelined(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "Adam-fused": lambda params: pipelined(torch.optim.Adam(params, lr=0.1, fused=True)),
    "Adam-foreach": lambda params: pipelined(torch.optim.Adam(params, lr=0.1, foreach=True)),
    "own SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, transforms=CHAIN),
    "own Adam-fused": lambda params: Adam(params, lr=0.1, fused=True, transforms=CHAIN),
    "own Adam, pipeline in front": lambda params: pipelined(Adam(params, lr=0.1)),
}


def test_a_closure_equals_the_plain_loop_with_accumulation():
    for case in CLOSURE_CASES:
        weights = []
        for by_closure in (False, True):
            torch.manual_seed(3)
            model = mlp()
            optimizer = CLOSURE_CASES[case](model.parameters())
            for update in range(3):
                optimizer.zero_grad()
                for micro in range(2):
                    backward(model, 10 * update + micro)
                if by_closure:
                    optimizer.step(lambda model=model, update=update: backward(model, 10 * update + 2))
                else:
                    backward(model, 10 * update + 2)
                    optimizer.step()
            weights.append(snapshot(model))
        assert weights[0] == weights[1]


def test_a_closure_that_is_called_again_and_again_equals_one_that_transforms_by_hand():
    weights, evaluations, probe = [], [], Probe()
    for by_hand in (False, True):
        model, optimizer = build(torch.optim.LBFGS, max_iter=4)
        if not by_hand:
            GradientPipeline(probe, ClipValue(0.05), Decay(0.1)).attach(optimizer)
        for update in range(3):

            def closure(update: int = update, model: nn.Module = model, by_hand: bool = by_hand) -> Tensor:
                evaluations.append(by_hand)
                model.zero_grad()
                loss = backward(model, update)
                params = list(model.parameters())
                grads = [param.grad for param in params]
                for transform in (ClipValue(0.05), Decay(0.1)) if by_hand else ():
                    with torch.no_grad():
                        transform(Gradients(params, grads, [{}] * len(params)))
                return loss

            optimizer.step(closure)
        weights.append(snapshot(model))
    assert weights[0] == weights[1]
    assert len(probe.seen) == evaluations.count(False) > 3


def test_a_pipeline_that_cannot_reach_the_gradients_is_refused():
    class Looking(ClosureOptimizer):
        def step(self, closure: Any = None) -> Any:
            return closure()

    model = mlp()
    optimizer = Looking(model.parameters(), {})
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    replay = Replay(lambda: torch.zeros(()), torch.device("cpu"))
    for closure in (lambda: torch.zeros(()), replay):
        with pytest.raises(IncompatibleError, match="Probe cannot reach the gradients"):
            optimizer.step(closure)
    backward(model, 0)
    replay.told(torch.zeros(()))
    optimizer.step(replay)
    assert len(probe.seen) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_under_a_compiled_step():
    weights = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer = build(torch.optim.SGD, momentum=0.9)
        GradientPipeline(Centralize(), Decay(0.1), ClipNorm(0.5)).attach(optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in range(2):
            optimizer.zero_grad()
            backward(model, seed)
            step()
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*weights)
    torch._dynamo.reset()


def test_what_is_refused():
    wrong: Any
    for wrong, make in itertools.product(
        (Centralize, lambda gradients: None, "centralize", None),
        (GradientPipeline, lambda transform: SGD(mlp().parameters(), lr=0.1, transforms=(transform,))),
    ):
        with pytest.raises(TypeError, match=r"found .*(transform|give an instance)"):
            make(wrong)
    with pytest.raises(ValueError, match="no transform"):
        GradientPipeline()
    wrong = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, found Linear"):
        GradientPipeline(Halve()).attach(wrong)
    assert repr(GradientPipeline(Centralize(), ClipNorm(1.0))).startswith("GradientPipeline(Centralize(")
