from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchboost.bench.workloads.contestants import Recipe, build_loop, plan_for
from torchboost.bench.workloads.data import synthetic_images
from torchboost.bench.workloads.jobs import Job, find_job
from torchboost.core.algorithm import Algorithm, Attachment, Target
from torchboost.plan import Dropped, Plan

DATA = synthetic_images(32, size=8, classes=4)


def tiny_model(data: object) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )


def tiny_job() -> Job:
    return Job(
        name="tiny",
        title="tiny",
        model_name="tiny",
        load=lambda path, limit: DATA.limited(limit),
        build=tiny_model,
        optimizer=find_job("digits").optimizer,
        loss=F.cross_entropy,
        batch=8,
        epochs=2,
    )


@dataclass(frozen=True, kw_only=True)
class Halved(Algorithm):
    """Halves every gradient; visible in the weights and nowhere else."""

    name: ClassVar[str] = "halved"

    def attach(self, target: Target) -> Attachment:
        def halve(optimizer: Optimizer, args: object, kwargs: object) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

        return Attachment(target.optimizer.register_step_pre_hook(halve))


def halving_planner(level: str, added: Sequence[str], model: nn.Module, optimizer: Optimizer, total_steps: int) -> Plan:
    return Plan(level=level, mode="manual", algorithms=(Halved(),), dropped=(Dropped("less_bn", "not today"),))


def weights(name: str, **settings: Any) -> torch.Tensor:
    loop = build_loop(Recipe.parse(name), tiny_job(), DATA, seed=1, steps=8, **settings)
    for inputs, labels in DATA.train(8, seed=0, epoch=0):
        loop.step(inputs, labels)
    return torch.cat([p.detach().flatten() for p in loop.model.parameters()])


@pytest.mark.parametrize(
    ("name", "kind", "planned", "compiled"),
    [
        ("stock", "stock", (), False),
        ("hand", "hand", (), False),
        ("hand+compile", "hand", (), True),
        ("hand+compile+less_bn", "algorithm", ("less_bn",), True),
        ("stock+compile", "algorithm", ("compile",), False),
        ("O2", "level", (), False),
        ("O1+compile", "level", ("compile",), False),
    ],
)
def test_names_say_what_they_are(name: str, kind: str, planned: tuple[str, ...], compiled: bool) -> None:
    recipe = Recipe.parse(name)
    assert (recipe.kind, recipe.planned, recipe.compiled_by_hand) == (kind, planned, compiled)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stok", "found 'stok'.*Did you mean 'stock'"),
        ("hand+", "each addition once"),
        ("hand+a+a", "each addition once"),
    ],
)
def test_bad_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.parse(name)


def test_stock_is_the_loop_one_would_write() -> None:
    job = tiny_job()
    model = job.model(DATA, 1)
    optimizer = job.optimizer(model.parameters())
    schedule = job.schedule(optimizer, 8)
    for inputs, labels in DATA.train(8, seed=0, epoch=0):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(weights("stock"), expected)


@pytest.mark.parametrize("name", ["stock", "hand", "O0", "O1"])
def test_a_model_in_evaluation_mode_is_trained_in_training_mode(name: str) -> None:
    job = replace(tiny_job(), build=lambda data: tiny_model(data).eval())
    loop = build_loop(Recipe.parse(name), job, DATA, seed=1, steps=8)
    assert all(module.training for module in (*loop.model.modules(), *loop.predict.modules()))


def test_hand_loop_computes_the_same_in_float32(bfloat16: Callable[..., None]) -> None:
    bfloat16(0.5, 2.0)
    loop = build_loop(Recipe.parse("hand"), tiny_job(), DATA, seed=1, steps=8)
    assert loop.model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert loop.notes == ["by hand: fused optimizer, channels-last"]
    torch.testing.assert_close(weights("hand"), weights("stock"), rtol=1e-3, atol=1e-5)


def test_hand_loop_takes_bfloat16_where_it_is_fast() -> None:
    seen: list[torch.dtype] = []
    loop = build_loop(Recipe.parse("hand"), tiny_job(), DATA, seed=1, steps=8)
    loop.model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loop.step(*next(DATA.train(8, seed=0, epoch=0)))
    assert seen == [torch.bfloat16]
    assert "bfloat16 autocast" in loop.notes[0]


def test_level_o0_is_bit_identical_to_stock() -> None:
    assert torch.equal(weights("O0"), weights("stock"))


def test_levels_and_additions_go_through_the_planner() -> None:
    loop = build_loop(Recipe.parse("O1"), tiny_job(), DATA, seed=1, steps=8, planner=halving_planner)
    assert [row.name for row in loop.algorithms] == ["halved"]
    assert loop.algorithms[0].settings == "Halved()"
    assert [(row.name, row.reason) for row in loop.dropped] == [("less_bn", "not today")]
    assert not torch.equal(weights("stock+halved", planner=halving_planner), weights("stock"))
    assert not torch.equal(weights("hand+halved", planner=halving_planner), weights("hand"))


def test_the_planner_gets_the_base_of_an_addition_as_level_o0() -> None:
    seen: list[tuple[str, tuple[str, ...]]] = []

    def planner(level: str, added: Sequence[str], model: nn.Module, optimizer: Optimizer, total_steps: int) -> Plan:
        seen.append((level, tuple(added)))
        return Plan(level=level, mode="auto", algorithms=())

    for name in ("stock", "hand", "hand+less_bn", "O2", "O1+compile"):
        build_loop(Recipe.parse(name), tiny_job(), DATA, seed=0, steps=8, planner=planner)
    assert seen == [("O0", ("less_bn",)), ("O2", ()), ("O1", ("compile",))]


def test_the_real_planner_knows_levels_and_single_algorithms() -> None:
    model = tiny_model(None)
    optimizer = tiny_job().optimizer(model.parameters())
    assert plan_for("O0", (), model, optimizer, 8).algorithms == ()
    single = plan_for("O0", ("gradient_centralization",), model, optimizer, 8)
    assert [a.name for a in single.algorithms] == ["gradient_centralization"]
    level = plan_for("O1", (), model, optimizer, 8)
    assert {a.name for a in level.algorithms} | {d.name for d in level.dropped} >= {"less_bn", "channels_last"}
    with pytest.raises(ValueError, match="no_such_thing"):
        plan_for("O0", ("no_such_thing",), model, optimizer, 8)


def test_a_plan_with_accumulation_is_refused() -> None:
    class Accumulator:
        steps, ready = 2, False

        def micro_step(self) -> AbstractContextManager[None]:
            return nullcontext()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            del state_dict

    @dataclass(frozen=True, kw_only=True)
    class Accumulating(Algorithm):
        name: ClassVar[str] = "accumulating"

        def attach(self, target: Target) -> Attachment:
            target.accumulator = Accumulator()
            return Attachment()

    def planner(level: str, added: Sequence[str], model: nn.Module, optimizer: Optimizer, total_steps: int) -> Plan:
        return Plan(level=level, mode="manual", algorithms=(Accumulating(),))

    with pytest.raises(ValueError, match="accumulates gradients"):
        build_loop(Recipe.parse("O1"), tiny_job(), DATA, seed=0, steps=8, planner=planner)
