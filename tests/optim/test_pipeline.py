from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from tests.support.trajectories import snapshot
from torchboost.core.closure import ClosureOptimizer, Replay
from torchboost.errors import IncompatibleError
from torchboost.optim.pipeline import STATE_KEY, GradientPipeline, Gradients
from torchboost.optim.rules.adam import Adam, AdamW
from torchboost.optim.rules.sgd import SGD
from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Decay, Unscale


class Average:
    """A transform with memory: replaces each gradient by a running mean."""

    scale_free = True

    def __call__(self, gradients: Gradients) -> None:
        for i, (grad, memory) in enumerate(zip(gradients.grads, gradients.memory, strict=True)):
            memory["mean"] = memory.get("mean", torch.zeros_like(grad)) * 0.5 + grad * 0.5
            memory["steps"] = memory.get("steps", 0) + 1
            gradients.grads[i] = memory["mean"].clone()


class Halve:
    scale_free = True

    def __call__(self, gradients: Gradients) -> None:
        torch._foreach_mul_(gradients.grads, 0.5)


class Probe:
    """Records what it sees."""

    scale_free = False

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def __call__(self, gradients: Gradients) -> None:
        assert len(gradients.params) == len(gradients.grads) == len(gradients.groups) == len(gradients.memory)
        for param, group in zip(gradients.params, gradients.groups, strict=True):
            assert any(param is member for member in group["params"])
        self.seen.append([grad.clone() for grad in gradients.grads])


CHAIN = (Decay(0.1), Centralize(), ClipNorm(0.5), ClipValue(0.05))


def build(
    kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = mlp()
    return model, kind(model.parameters(), lr=0.05, **options)


def backward(model: nn.Module, seed: int, scaler: Any = None) -> torch.Tensor:
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


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_chain_runs_in_order_before_the_step(options):
    model, optimizer = build(**options)
    probe = Probe()
    GradientPipeline(Centralize(), probe, Halve()).attach(optimizer)
    backward(model, 0)
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for raw, seen, after in zip(grads, probe.seen[0], (p.grad for p in model.parameters()), strict=True):
        centred = raw - raw.mean(1, keepdim=True) if raw.ndim > 1 else raw
        torch.testing.assert_close(seen, centred)
        torch.testing.assert_close(after, centred / 2)

    by_hand, plain = build(**options)
    for param, used in zip(by_hand.parameters(), model.parameters(), strict=True):
        param.grad = used.grad.clone()
    plain.step()
    assert snapshot(by_hand) == snapshot(model)


def test_parameters_without_gradient_are_skipped():
    model, optimizer = build()
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    optimizer.step()
    backward(model, 0)
    model[0].weight.grad = None
    optimizer.step()
    assert [len(seen) for seen in probe.seen] == [0, 5]
    assert model[0].weight.grad is None


def test_a_changed_gradient_keeps_its_memory_and_a_replaced_one_is_written_back():
    model, optimizer = build()
    attachment = GradientPipeline(Centralize()).attach(optimizer)
    backward(model, 0)
    before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
    optimizer.step()
    assert [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()] == before
    attachment.remove()
    GradientPipeline(Average()).attach(optimizer)
    expected = [p.grad * 0.5 for p in model.parameters()]
    optimizer.step()
    for param, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, value)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_resume_is_bit_identical_and_the_memory_rides_in_the_state_dict(options, tmp_path):
    model, optimizer = build(**options)
    attachment = GradientPipeline(Average()).attach(optimizer)
    steps(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    own = copy.deepcopy(attachment.state_dict())
    steps(model, optimizer, range(3, 6))

    file = torch.load(tmp_path / "file.pt", weights_only=True)
    again, other = build(**options)
    live = GradientPipeline(Average()).attach(other)
    again.load_state_dict(file["model"])
    other.load_state_dict(file["optimizer"])
    assert live.state_dict()["memory"][0]["Average.steps"] == 3
    steps(again, other, range(3, 6))
    assert snapshot(again) == snapshot(model)

    file = torch.load(tmp_path / "file.pt", weights_only=True)
    third, bare = build(**options)
    third.load_state_dict(file["model"])
    bare.load_state_dict(file["optimizer"])
    assert STATE_KEY not in bare.state_dict()
    late = GradientPipeline(Average()).attach(bare)
    late.load_state_dict(own)
    steps(third, bare, range(3, 6))
    assert snapshot(third) == snapshot(model)


def test_a_file_without_memory_loads_and_clears_it():
    model, optimizer = build()
    plain = copy.deepcopy(optimizer.state_dict())
    attachment = GradientPipeline(Average()).attach(optimizer)
    assert optimizer.state_dict().keys() == plain.keys()
    steps(model, optimizer, range(2))
    assert attachment.state_dict()
    optimizer.load_state_dict(plain)
    assert attachment.state_dict() == {}


def test_the_memory_is_copied_on_load_and_kept_when_the_optimizer_refuses():
    model, optimizer = build()
    attachment = GradientPipeline(Average()).attach(optimizer)
    steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert attachment.state_dict()["memory"][0]["Average.steps"] == 2
    optimizer.load_state_dict(saved)
    assert attachment.state_dict()["memory"][0]["Average.mean"] is not saved[STATE_KEY][0]["memory"][0]["Average.mean"]


def test_two_pipelines_keep_their_memories_apart():
    model, optimizer = build()
    GradientPipeline(Average()).attach(optimizer)
    GradientPipeline(Centralize()).attach(optimizer)
    GradientPipeline(Average(), Halve()).attach(optimizer)
    steps(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert [entry["transforms"] for entry in saved[1][STATE_KEY]] == [["Average"], ["Average", "Halve"]]
    steps(model, optimizer, range(3, 5))

    again, other = build()
    GradientPipeline(Average()).attach(other)
    GradientPipeline(Centralize()).attach(other)
    GradientPipeline(Average(), Halve()).attach(other)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    steps(again, other, range(3, 5))
    assert snapshot(again) == snapshot(model)


def test_a_state_of_other_transforms_or_parameters_is_refused():
    model, optimizer = build()
    attachment = GradientPipeline(Average()).attach(optimizer)
    steps(model, optimizer, range(1))
    state = attachment.state_dict()
    other = GradientPipeline(Halve()).attach(optimizer)
    with pytest.raises(ValueError, match=r"\['Average'\], but the attached transforms are \['Halve'\]"):
        other.load_state_dict(state)
    small = GradientPipeline(Average()).attach(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(ValueError, match="entry for parameter 5, but the optimizer has 1"):
        small.load_state_dict(state)


def test_removal_leaves_no_trace():
    model, optimizer = build()
    twin, plain = build()
    before = hooks(optimizer)
    attachment = GradientPipeline(Average(), Decay(0.1)).attach(optimizer)
    assert hooks(optimizer) != before
    attachment.remove()
    attachment.remove()
    assert hooks(optimizer) == before
    assert vars(optimizer).keys() == vars(plain).keys()
    steps(model, optimizer, range(2))
    steps(twin, plain, range(2))
    assert snapshot(model) == snapshot(twin)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("transform", CHAIN, ids=lambda transform: type(transform).__name__)
def test_expanded_gradients_are_transformed_like_others(transform):
    results = []
    for expanded in (False, True):
        weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        GradientPipeline(transform).attach(optimizer)
        gradient = torch.arange(3.0).expand(2, 3)  # as autograd.grad returns it for a sum
        weight.grad = gradient if expanded else gradient.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_under_grad_scaler_with_unscale_the_transforms_see_true_gradients(kind, fused):
    model, optimizer = build(kind, fused=fused)
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(2):
        optimizer.zero_grad()
        backward(model, seed, scaler)
        scaled = [p.grad.clone() for p in model.parameters()]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        for grad, seen in zip(scaled, probe.seen[-1], strict=True):
            torch.testing.assert_close(seen, grad / 1024)


def test_an_ordinary_optimizer_needs_no_unscale():
    model, optimizer = build()
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(model, 0, scaler)
    scaled = [p.grad.clone() for p in model.parameters()]
    scaler.step(optimizer)
    for grad, seen in zip(scaled, probe.seen[0], strict=True):
        torch.testing.assert_close(seen, grad / 1024)


def test_a_fused_optimizer_with_the_scale_still_in_is_refused_and_can_go_on():
    model, optimizer = build(fused=True)
    GradientPipeline(Centralize(), ClipNorm(1.0), ClipValue(0.1)).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = snapshot(model)
    backward(model, 0, scaler)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(
        IncompatibleError, match=r"ClipNorm, ClipValue needs unscaled gradients.*scaler.unscale_\(optimizer\)"
    ):
        scaler.step(optimizer)
    assert snapshot(model) == before
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert not hasattr(optimizer, "grad_scale")

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert snapshot(model) != before


def test_scale_free_transforms_work_on_scaled_gradients_of_a_fused_optimizer():
    model, optimizer = build(torch.optim.SGD, fused=True)
    twin, plain = build(torch.optim.SGD, fused=True)
    GradientPipeline(Centralize()).attach(optimizer)
    GradientPipeline(Centralize()).attach(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(model, 0, scaler)
    scaler.step(optimizer)
    backward(twin, 0)
    plain.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_under_a_scheduler_the_chain_runs_once_per_step():
    model, optimizer = build()
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
        scheduler.step()
    assert len(probe.seen) == 3


def test_a_copied_optimizer_has_no_chain():
    _, optimizer = build()
    GradientPipeline(Probe()).attach(optimizer)
    assert not any(hooks(copy.deepcopy(optimizer)).values())


def test_with_a_closure_the_chain_runs_on_the_gradients_it_makes():
    model, optimizer = build(torch.optim.SGD)
    twin, plain = build(torch.optim.SGD)
    GradientPipeline(Average(), Halve()).attach(optimizer)
    GradientPipeline(Average(), Halve()).attach(plain)
    for seed in range(3):

        def closure(seed: int = seed) -> torch.Tensor:
            optimizer.zero_grad()
            return backward(model, seed)

        loss = optimizer.step(closure) if seed else optimizer.step(closure=closure)
        plain.zero_grad()
        assert torch.equal(loss, backward(twin, seed))
        plain.step()
    assert snapshot(model) == snapshot(twin)


def test_a_closure_without_backward_does_not_run_the_chain_again():
    model, optimizer = build(torch.optim.SGD)
    probe = Probe()
    GradientPipeline(probe, Halve()).attach(optimizer)
    for seed in range(2):
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step(lambda: torch.zeros(()))
    assert len(probe.seen) == 2


CLOSURE_CASES: dict[str, Any] = {
    "SGD": lambda params: pipelined(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "Adam-fused": lambda params: pipelined(torch.optim.Adam(params, lr=0.1, fused=True)),
    "Adam-foreach": lambda params: pipelined(torch.optim.Adam(params, lr=0.1, foreach=True)),
    "own SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, transforms=CHAIN),
    "own Adam-fused": lambda params: Adam(params, lr=0.1, fused=True, transforms=CHAIN),
    "own Adam, chain in front": lambda params: pipelined(Adam(params, lr=0.1)),
}


def pipelined(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    GradientPipeline(*CHAIN).attach(optimizer)
    return optimizer


@pytest.mark.parametrize("case", CLOSURE_CASES)
def test_a_closure_equals_the_plain_loop_with_accumulation(case):
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
    weights = []
    for by_hand in (False, True):
        model, optimizer = build(torch.optim.LBFGS, max_iter=4)
        if not by_hand:
            GradientPipeline(ClipValue(0.05), Decay(0.1)).attach(optimizer)
        for update in range(3):

            def closure(update: int = update, model: nn.Module = model, by_hand: bool = by_hand) -> torch.Tensor:
                model.zero_grad()
                loss = backward(model, update)
                if by_hand:
                    params = list(model.parameters())
                    grads = [param.grad for param in params]
                    for transform in (ClipValue(0.05), Decay(0.1)):
                        with torch.no_grad():
                            transform(Gradients(params, grads, [{}] * len(params), [{} for _ in params]))
                return loss

            optimizer.step(closure)
        weights.append(snapshot(model))
    assert weights[0] == weights[1]


def test_a_chain_that_cannot_reach_the_gradients_is_refused():
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


def test_lbfgs_sees_changed_gradients_in_every_evaluation():
    model, optimizer = build(torch.optim.LBFGS, max_iter=3)
    probe = Probe()
    GradientPipeline(probe).attach(optimizer)
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        evaluations.append(1)
        return backward(model, 0)

    optimizer.step(closure)
    assert len(probe.seen) == len(evaluations) > 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_under_a_compiled_step():
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer = build(torch.optim.SGD, momentum=0.9)
        GradientPipeline(Centralize(), Decay(0.1), ClipNorm(0.5)).attach(optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in range(4):
            optimizer.zero_grad()
            backward(model, seed)
            step()
        results.append([p.detach().clone() for p in model.parameters()])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)
    torch._dynamo.reset()


@pytest.mark.parametrize("bad", [Centralize, lambda gradients: None, "centralize", None])
def test_what_is_no_transform_is_refused(bad):
    with pytest.raises(TypeError, match="found"):
        GradientPipeline(bad)


def test_an_empty_pipeline_and_a_wrong_optimizer_are_refused():
    with pytest.raises(ValueError, match="no transform"):
        GradientPipeline()
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, found Linear"):
        GradientPipeline(Halve()).attach(nn.Linear(1, 1))


def test_the_pipeline_prints_its_chain():
    assert repr(GradientPipeline(Centralize(), ClipNorm(1.0))).startswith("GradientPipeline(Centralize(")


KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, AdamW]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_fused_optimizer_moves_as_by_hand_and_keeps_clipped_gradients(kind, fused):
    ends = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = mlp()
        params = list(model.parameters())
        optimizer = kind(params, lr=0.01, fused=fused)
        if not by_hand:
            GradientPipeline(Centralize(), ClipNorm(0.5)).attach(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            if by_hand:
                for param in (param for param in params if param.ndim > 1):
                    param.grad -= param.grad.mean(tuple(range(1, param.ndim)), keepdim=True)
                nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
        ends.append([p.detach() for p in params] + [p.grad for p in params])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_reach_the_weights_as_in_torch(bad):
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(4, 3)
        param.grad[1, 1] = bad
    ours, theirs = torch.optim.SGD(params[:1], lr=0.1, fused=True), torch.optim.SGD(params[1:], lr=0.1, fused=True)
    GradientPipeline(ClipNorm(1.0)).attach(ours)
    ours.step()
    nn.utils.clip_grad_norm_(params[1:], 1.0)
    theirs.step()
    torch.testing.assert_close(params[0], params[1], equal_nan=True)


def test_a_step_that_calls_the_step_of_its_base_class_is_transformed_once():
    """torch runs the hooks of both."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for kind in (Own, torch.optim.SGD, Own):
        param, grad = nn.Parameter(torch.ones(6, 4)), torch.arange(24.0).view(6, 4)
        optimizer = kind([param], lr=1.0, fused=True)
        GradientPipeline(Unscale(10.0), ClipNorm(1e9)).attach(optimizer)
        for _ in range(2):
            before = param.detach().clone()
            param.grad = grad.clone()
            optimizer.step()
            torch.testing.assert_close(before - param.detach(), grad / 10)
