"""Compile in place: same object, same keys, counted graphs, and an ordinary model again after removal."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchboost
from tests.support.models import BottleneckNet, batch_for, cnn, mlp
from tests.support.trajectories import identical, train
from torchboost import Target
from torchboost.algorithms import Compile
from torchboost.core import attach_all
from torchboost.core.torch_private import mode_options
from torchboost.errors import IncompatibleError, NoEffectWarning

EAGER = Compile(backend="eager")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def target_of(model: nn.Module) -> Target:
    return Target(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def test_the_same_object_trains_the_same_and_its_graphs_are_counted() -> None:
    for make, fullgraph in itertools.product([mlp, cnn, BottleneckNet], [False, True]):
        torch.compiler.reset()
        torch.manual_seed(1)
        plain = target_of(make())
        expected = train(plain, 4, 3)
        torch.manual_seed(1)
        model = make()
        target = target_of(model)
        keys = list(model.state_dict())
        compiled = Compile(backend="eager", fullgraph=fullgraph).attach(target)
        assert target.model is model
        assert list(model.state_dict()) == keys
        assert compiled.graphs == 0
        assert identical(train(target, 4, 3), expected)
        assert compiled.graphs == 1
        model.eval()
        model(batch_for(model, torch.Generator())[0])
        assert compiled.graphs == (2 if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) else 1)


def test_a_flip_of_requires_grad_is_one_more_graph_and_trains_what_it_should() -> None:
    model = BottleneckNet()
    target = target_of(model)
    compiled = EAGER.attach(target)
    train(target, 1, 3)
    for count, flag in ((2, False), (3, True)):
        model.stem.requires_grad_(flag)
        before = model.stem[0].weight.detach().clone()
        target.optimizer.zero_grad()
        train(target, 1, 4)
        assert torch.equal(model.stem[0].weight, before) is not flag
        assert compiled.graphs <= count
    assert compiled.graphs >= 2


def test_a_layer_that_was_frozen_at_first_is_trained_when_it_is_thawed() -> None:
    model = BottleneckNet()
    target = target_of(model)
    Compile(backend="aot_eager").attach(target)
    for flag in (False, True, False):
        model.stem.requires_grad_(flag)
        before = model.stem[0].weight.detach().clone()
        target.optimizer.zero_grad()
        train(target, 1, 3)
        assert torch.equal(model.stem[0].weight, before) is not flag


def test_removal_does_not_touch_a_compilation_of_somebody_else() -> None:
    model = BottleneckNet()
    compiled = EAGER.attach(target_of(model))
    model.compile(backend="eager")
    theirs = model._compiled_call_impl
    compiled.remove()
    assert model._compiled_call_impl is theirs


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces a hook
def test_hooks_on_the_root_are_part_of_the_compiled_call() -> None:
    for model in (mlp(), BottleneckNet()):
        model.register_forward_hook(lambda module, args, output: output * 2)
        inputs, _ = batch_for(model, torch.Generator().manual_seed(0))
        expected = model(inputs)
        with Compile(backend="aot_eager").attach(target_of(model)):
            torch.testing.assert_close(model(inputs), expected)


@pytest.mark.parametrize("make", [cnn, BottleneckNet])
def test_hooks_from_before_boost_run_in_the_graphs_that_the_check_compiled(make: Callable[[], nn.Module]) -> None:
    """The check takes hooks off, and the graphs that it compiles do not stay for the run."""

    def course(compiled: bool) -> list[Tensor]:
        torch.manual_seed(1)
        target = target_of(make())
        for module in target.model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda module, args, output: 1.5 * output)
        if compiled:
            config = {"boost": {"mode": "manual"}, "extra": {"compile": {"backend": "eager"}}}
            assert "compile" in torchboost.boost(target.model, target.optimizer, level="O0", config=config).explain()
        train(target, 2, 3)
        return list(target.model.state_dict().values())

    for found, expected in zip(course(True), course(False), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("where", ["whole", "part", "wrapped", "part wrapped"])
def test_a_model_that_is_compiled_already_is_refused(where: str) -> None:
    model: nn.Module = BottleneckNet()
    if where == "whole":
        model.compile(backend="eager")
    elif where == "part":
        model.blocks.compile(backend="eager")
    elif where == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model.blocks = torch.compile(model.blocks, backend="eager")
    target = target_of(model)
    before = model._compiled_call_impl
    with pytest.raises(IncompatibleError, match="already compiled"):
        attach_all(target, [EAGER])
    assert model._compiled_call_impl is before
    assert "already compiled" in (EAGER.idle(model, target.optimizer) or "")


def test_what_cannot_work_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="inducktor"):
        attach_all(target_of(model), [Compile(backend="inducktor")])
    with pytest.raises(ValueError, match="only 'inductor' has modes"):
        Compile(backend="eager", mode="reduce-overhead")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(IncompatibleError, match=r"needs a C\+\+ compiler"):
        attach_all(target_of(model), [Compile()])
    assert model._compiled_call_impl is None


def _penalised(target: Target, steps: int) -> list[float]:
    """Train with a penalty on the gradient with respect to the inputs."""
    losses = []
    for step in range(steps):
        inputs, _ = batch_for(target.model, torch.Generator().manual_seed(step))
        inputs.requires_grad_()
        loss = target.model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + gradient.square().sum()).backward()
        target.optimizer.step()
        target.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_gradient_penalty_trains_as_without_the_compiler() -> None:
    torch.manual_seed(1)
    expected = _penalised(target_of(mlp()), 3)
    torch.manual_seed(1)
    target = target_of(mlp())
    with Compile(backend="aot_eager").attach(target) as compiled:
        assert _penalised(target, 3) == expected
        assert compiled.graphs == 0
        train(target, 1, 3)
        assert compiled.graphs == 1


def test_a_second_derivative_of_parameters_turns_the_compiler_off_for_the_next_call() -> None:
    target = target_of(mlp())
    weights = list(target.model.parameters())
    inputs, _ = batch_for(target.model, torch.Generator().manual_seed(0))

    def step() -> None:
        loss = target.model(inputs).square().mean()
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        (loss + sum(g.square().sum() for g in gradients)).backward()

    with Compile(backend="aot_eager").attach(target):
        with pytest.warns(NoEffectWarning, match="create_graph=True"), pytest.raises(RuntimeError, match="double"):
            step()
        step()


def test_a_parameter_among_the_inputs_is_compiled() -> None:
    class Prompted(nn.Module):
        def forward(self, prompt: torch.Tensor) -> torch.Tensor:
            return prompt * 2

    model = Prompted()
    prompt = nn.Parameter(torch.ones(3))
    with EAGER.attach(Target(model, torch.optim.SGD([prompt], lr=0.1))) as compiled:
        model(prompt).sum().backward()
        assert compiled.graphs == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_generated_code_trains_like_eager() -> None:
    torch.manual_seed(1)
    plain = target_of(cnn())
    train(plain, 3, 3)
    torch.manual_seed(1)
    target = target_of(cnn())
    with Compile().attach(target):
        train(target, 3, 3)
    for p, q in zip(target.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_modes_that_a_trial_may_choose() -> None:
    def modes(made: Compile, device: str = "cuda") -> list[str | None]:
        return [form.algorithm.mode for form in made.forms(torch.device(device)) if isinstance(form.algorithm, Compile)]

    assert modes(Compile()) == ["reduce-overhead", "max-autotune-no-cudagraphs"]
    assert modes(Compile(mode="reduce-overhead")) == ["max-autotune"]
    assert modes(Compile(mode="max-autotune")) == modes(Compile(), "cpu") == modes(EAGER) == []
    assert [form.algorithm.dynamic for form in Compile(dynamic=False).forms(torch.device("cuda"))] == [False, False]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, as it loads inductor
def test_torch_knows_the_options_of_cuda_graphs() -> None:
    options = {**mode_options("reduce-overhead"), "triton.cudagraph_skip_dynamic_graphs": True}
    assert options["triton.cudagraphs"] is True
    torch.compile(mlp(), options=options)  # refuses options that it does not know
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(mlp(), options={"triton.cudagraph_skip": True})


def test_what_is_dropped_frees_the_memory_of_cuda_graphs() -> None:
    def graphs() -> int:
        model(inputs)
        return compiled.graphs

    model = BottleneckNet()
    inputs, _ = batch_for(model, torch.Generator().manual_seed(0))
    compiled = EAGER.attach(target_of(model))
    assert graphs() == graphs() == 1
    Compile().forget()
    assert graphs() == 1
    Compile(mode="reduce-overhead").forget()
    assert graphs() == 2, "everything compiles once more"
