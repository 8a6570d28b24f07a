"""One network under two optimizers: a list in place of the optimizer, and the loop steps both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import torchboost
from tests.support.ranks import run_ranks
from torchboost import IncompatibleError, NoEffectWarning, Target, boost
from torchboost.algorithms import ChannelsLast, FusedOptimizer, GradientCentralization, LessBn
from torchboost.calibration.passes import Passes
from torchboost.calibration.snapshot import Snapshot, plain
from torchboost.calibration.trial import Contestant
from torchboost.core.algorithm import attach_all
from torchboost.core.step import TrainStep
from torchboost.front import boosted_of
from torchboost.measure.stopwatch import Clock

LEVERS = {"channels_last": True, "fused_optimizer": True}
EXACT = {"extra": LEVERS | {"autocast": False, "compile": False}}
Make = Callable[[nn.Module], list[Optimizer]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    parts += [nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def residual() -> nn.Module:
    from torchboost.workloads.models import BasicBlock, ResNet

    torch.manual_seed(0)
    return ResNet(BasicBlock, [1, 1], width=8)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    filters = [p for p in model.parameters() if p.ndim == 4]
    return filters, [p for p in model.parameters() if p.ndim != 4]


def sgd_and_adamw(model: nn.Module) -> list[Optimizer]:
    filters, rest = split(model)
    return [SGD(filters, 0.05, momentum=0.9), AdamW(rest, 0.01)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    filters, rest = split(model)
    return [torchboost.optim.Muon(filters, lr=0.01), AdamW(rest, 0.01)]


def adamw_and_sgd(model: nn.Module) -> list[Optimizer]:
    return sgd_and_adamw(model)[::-1]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 12, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        images, labels = batch(step)
        F.cross_entropy(model(images), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module, make: Make = sgd_and_adamw) -> None:
    """Muon computes in bfloat16, so that other rounding of a gradient moves its update by a hundredth."""
    atol = 1e-3 if make is muon_and_adamw else 1e-5
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-4, atol=atol)


def registered(optimizer: Optimizer) -> int:
    found = [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    return sum(map(len, found))


@pytest.mark.parametrize("make", [sgd_and_adamw, adamw_and_sgd, muon_and_adamw])
@pytest.mark.parametrize("calibrate", [False, 0.2])
def test_training_is_that_of_a_plain_loop(make: Make, calibrate: bool | float):
    reference = network()
    train(reference, make(reference), range(6))
    model = network()
    boosted = boost(model, given := make(model), config=EXACT, calibrate=calibrate)
    returned, optimizers = boosted
    assert returned is model
    assert type(optimizers) is list
    assert all(map(lambda a, b: a is b, optimizers, given))
    train(model, optimizers, range(6))
    same(model, reference, make)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not boosted.withdrawn
    assert all(boosted_of(optimizer) is boosted for optimizer in given)


def test_a_trial_steps_copies_of_both():
    torch.manual_seed(1)
    model = residual()
    optimizers = sgd_and_adamw(model)
    boosted = boost(model, optimizers, total_steps=5000, calibrate=0.5, config={"extra": {"compile": False}})
    before = copy.deepcopy(model.state_dict())
    model(batch(0)[0])
    assert boosted.choice is not None
    assert boosted.choice.source == "trial", boosted.explain()
    for name, value in before.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(model.state_dict()[name], value), name
    assert not any(optimizer.state for optimizer in optimizers)
    train(model, optimizers, range(2))
    assert all(optimizer.state for optimizer in optimizers)


def ticking() -> Clock:
    """Return a clock that is a second later at each reading. A lap is read twice: when it is queued, and at its end."""
    ticks = itertools.count()
    return Clock(read=lambda: float(next(ticks)))


def test_a_part_of_each_optimizer_is_timed_for_the_whole():
    model = network()
    optimizers = sgd_and_adamw(model)
    with plain(model):
        call = ((batch(0)[0],), {})
        snapshot = Snapshot(model, call)
        contestant = Contestant(Passes(model, call, snapshot), optimizers, (), None)
        contestant.copies = [
            (made, pairs, share) for (made, pairs, _), share in zip(contestant.copies, (0.5, 1.0), strict=True)
        ]
        assert contestant.step(ticking()) == 2 * (1 + 1 / 0.5 + 1)
        assert contestant.host_share == 0.5
        contestant.copies = [(made, pairs, 0.25) for made, pairs, _ in contestant.copies]
        assert contestant.step(ticking()) == 2 * (1 + 1 / 0.25 + 1 + 1 / 0.25 + 1)
        snapshot.restore()


def test_both_are_fused_and_both_are_centralised():
    model = network()
    first, second = sgd_and_adamw(model)
    config = {"extra": LEVERS | {"less_bn": False}}
    boosted = boost(model, [second, first], level="O2", total_steps=5000, calibrate=False, config=config)
    assert "gradient_centralization" in boosted.attached
    images, labels = batch(0)
    F.cross_entropy(model(images), labels).backward()
    first.step()
    second.step()
    assert first.param_groups[0]["fused"]
    assert second.param_groups[0]["fused"]
    means = [p.grad.flatten(1).mean(1) for p in model.parameters() if p.grad is not None and p.ndim > 1]
    assert [mean.numel() for mean in means] == [8, 8, 4]
    assert all(float(mean.abs().max()) < 1e-6 for mean in means)
    assert "fused_optimizer" in boosted.explain()


@pytest.mark.parametrize("make", [sgd_and_adamw, adamw_and_sgd, muon_and_adamw])
def test_removal_leaves_no_trace(make: Make):
    model = network()
    optimizers = make(model)
    before = [(registered(one), one.param_groups[0].get("fused")) for one in optimizers]
    boosted = boost(model, optimizers, total_steps=5000, calibrate=False, config=EXACT)
    train(model, optimizers, range(2))
    boosted.remove()
    assert [(registered(one), one.param_groups[0].get("fused")) for one in optimizers] == before
    for optimizer in optimizers:
        assert boosted_of(optimizer) is None
        for parameter, state in optimizer.state.items():
            assert parameter.is_contiguous()
            assert all(
                value.stride() == parameter.stride() for value in state.values() if value.shape == parameter.shape
            )
    assert not model._forward_pre_hooks
    reference = network()
    plain_optimizers = make(reference)
    train(reference, plain_optimizers, range(4))
    train(model, optimizers, range(2, 4))
    same(model, reference, make)


@pytest.mark.parametrize("make", [adamw_and_sgd, muon_and_adamw])
def test_a_resumed_run_continues_and_a_plain_one_can_load_it(make: Make):
    whole = network()
    train(whole, make(whole), range(6))
    model = network()
    boosted = boost(model, optimizers := make(model), config=EXACT, calibrate=False)
    train(model, optimizers, range(3))
    states = [copy.deepcopy(one.state_dict()) for one in (model, *optimizers, boosted)]
    for resume in (lambda m, o: boost(m, o, config=EXACT, calibrate=False), lambda m, o: None):
        again = network()
        others = make(again)
        made = resume(again, others)
        parts = [again, *others] + ([] if made is None else [made])
        for part, state in zip(parts, copy.deepcopy(states), strict=False):
            part.load_state_dict(state)
        train(again, others, range(3, 6))
        same(again, whole, make)


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_that_less_bn_replaces_are_followed_in_both(trained: bool):
    model = residual()
    optimizers = adamw_and_sgd(model)
    if trained:
        train(model, optimizers, range(2))
    before = set(model.parameters())
    with attach_all(Target(model, optimizers[0], others=(optimizers[1],)), [LessBn(keep="narrowest")]):
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        assert len(held) == len(set(held))
        assert set(held) == set(model.parameters())
        assert before - set(held)
        assert bool(set(held) - before) == trained  # the biases of folded layers
        assert all(parameter in set(held) for optimizer in optimizers for parameter in optimizer.state)
        train(model, optimizers, range(2))


def test_what_works_with_one_optimizer_is_left_out_with_the_reason():
    model = residual()
    extra = {"grad_accumulation": {"steps": 2}, "loss_scale_group": True}
    boosted = boost(model, sgd_and_adamw(model), level="O2", total_steps=5000, calibrate=False, config={"extra": extra})
    left_out = dict(boosted.plan.dropped)
    for name in ("grad_freeze", "grad_accumulation", "loss_scale_group"):
        assert left_out[name] == "it works with one optimizer, and this model has 2"
    model = residual()
    boost(model, sgd_and_adamw(model), level="O2", config={"extra": LEVERS})  # no warning of a missing length
    target = Target(model, SGD(split(model)[0], 0.1), others=(SGD(split(model)[1], 0.1),))
    with pytest.raises(IncompatibleError, match="'grad_freeze' works with one optimizer, but the target has 2"):
        attach_all(target, [torchboost.algorithms.GradFreeze(total_steps=10)])


def test_a_lever_is_idle_only_if_it_is_for_both():
    class Own(SGD):
        def step(self, closure: Any = None):
            return super().step(closure)

    model = network()
    filters, rest = split(model)
    algorithms = (FusedOptimizer(), ChannelsLast(), GradientCentralization())
    plan = torchboost.Plan(level="O0", mode="auto", algorithms=algorithms)
    fused = plan.fit(model, torch.optim.Rprop(rest), SGD(filters, 0.1))
    assert [a.name for a in fused.algorithms] == [a.name for a in algorithms]
    neither = plan.fit(model, torch.optim.Rprop(rest), torch.optim.Rprop(filters))
    assert "fused_optimizer" in dict(neither.dropped)
    assert "Own has its own step" in dict(plan.fit(model, SGD(rest, 0.1), Own(filters, 0.1)).dropped)["channels_last"]
    reasons = dict(neither.dropped)["fused_optimizer"]
    assert "Rprop has no fused form" in reasons
    assert "first" not in reasons  # the reason is that of both
    rprop = torch.optim.Rprop(rest)
    with attach_all(Target(model, rprop, others=(sgd := SGD(filters, 0.1),)), [FusedOptimizer()]):
        assert sgd.param_groups[0]["fused"]
    assert not sgd.param_groups[0]["fused"]


def test_explain_says_which_optimizers_are_fused():
    def line(*optimizers: Optimizer) -> str:
        boosted = boost(model, list(optimizers), config=EXACT, calibrate=False)
        return next(row.did for row in boosted.levers.explanation().rows if row.name == "fused_optimizer")

    model = network()
    filters, rest = split(model)
    assert line(SGD(filters, 0.1), AdamW(rest)).endswith("in one kernel; on for SGD (first), AdamW (second)")
    assert "; on for AdamW (second); left out for Rprop (first): Rprop has no fused form" in line(
        torch.optim.Rprop(filters), AdamW(rest)
    )
    assert line(AdamW(filters, fused=True), AdamW(rest)).endswith(
        "; on for AdamW (second); left out for AdamW (first): already fused"
    )
    assert "AdamW (first): already fused; Rprop (second): Rprop has no fused form" in line(
        AdamW(filters, fused=True), torch.optim.Rprop(rest)
    )
    assert line(AdamW(model.parameters())).endswith("in one kernel")


def test_a_list_of_one_is_a_list_too():
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    boosted = boost(model, [optimizer], config={"extra": {"grad_accumulation": {"steps": 2}}}, level="O0")
    _, (front,) = boosted
    assert front is not optimizer
    assert boosted_of(front) is boosted_of(optimizer) is boosted
    before = split(model)[0][0].detach().clone()
    train(model, [front], range(1))
    assert torch.equal(split(model)[0][0], before)
    train(model, [front], range(1, 2))
    assert not torch.equal(split(model)[0][0], before)
    assert boost(model, [front], level="O0").optimizer == [optimizer]


def test_wrong_lists_are_refused_before_anything_changes():
    model = network()
    filters, rest = split(model)
    one, two = SGD(filters, 0.1), SGD([*rest, filters[0]], 0.1)
    with pytest.raises(ValueError, match=r"optimizer 0, a SGD, and optimizer 1, a SGD, both hold 1 of the parameters"):
        boost(model, [one, two])
    with pytest.raises(ValueError, match="both hold"):
        boost(model, [one, one])
    with pytest.raises(ValueError, match="empty list"):
        boost(model, [])
    with pytest.raises(TypeError, match="found int 3"):
        boost(model, [one, 3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="belongs to the model"):
        boost(model, [one, SGD(network().parameters(), 0.1)])
    assert not registered(one)
    assert not registered(two)
    assert model[0].weight.is_contiguous()


def test_a_second_boost_removes_the_first_with_both():
    model = network()
    optimizers = sgd_and_adamw(model)
    first = boost(model, optimizers, config=EXACT, calibrate=False)
    counts = [registered(one) for one in optimizers]
    second = boost(model, first.optimizer, config=EXACT, calibrate=False)
    assert first.explain().startswith("removed")
    assert [registered(one) for one in optimizers] == counts
    assert all(boosted_of(one) is second for one in optimizers)
    with pytest.warns(NoEffectWarning, match=r"the parameters of SGD \(first\)\. .*boost\(model, \[first") as seen:
        third = boost(model, optimizers[1], config=EXACT, calibrate=False)
    assert seen[0].filename == __file__
    assert second.explain().startswith("removed")
    assert boosted_of(optimizers[0]) is None
    assert boosted_of(optimizers[1]) is third
    assert third.optimizer is optimizers[1]


def test_a_part_of_the_model_with_one_of_its_optimizers_names_the_list():
    model = network()
    head = AdamW(model[-1].parameters(), 0.01)
    whole = boost(model, [SGD(model[:-1].parameters(), 0.05), head], config=EXACT, calibrate=False)
    with pytest.warns(NoEffectWarning, match=r"removed by the one with AdamW, .* the parameters of SGD \(first\)"):
        boost(model[-1], head, level="O0")
    assert whole.explain().startswith("removed")


def test_boosting_one_optimizer_after_the_other_names_the_list():
    model = network()
    one, two = sgd_and_adamw(model)
    first = boost(model, one, config=EXACT, calibrate=False)
    with pytest.warns(NoEffectWarning, match=r"SGD is removed by the one with AdamW, .*boost\(model, \[first") as seen:
        boost(model, two, config=EXACT, calibrate=False)
    assert seen[0].filename == __file__
    assert first.explain().startswith("removed")
    boost(model, SGD(model.parameters(), 0.1), config=EXACT, calibrate=False)  # over the same parameters: a new run


def test_the_step_of_boost_updates_with_both():
    reference = network()
    train(reference, sgd_and_adamw(reference), range(3))
    model = network()
    step = boost(model, sgd_and_adamw(model), config=EXACT, calibrate=False).step(F.cross_entropy)
    for number in range(3):
        step(*batch(number))
    same(model, reference)
    scaled = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = boost(scaled, sgd_and_adamw(scaled), config=EXACT, calibrate=False, scaler=scaler).step(F.cross_entropy)
    for number in range(3):
        step(*batch(number))
    same(scaled, reference)


def test_the_step_of_boost_refuses_a_line_search_beside_another_optimizer():
    from torchboost.core.step import ClosureOptimizer

    class Search(ClosureOptimizer, SGD):
        pass

    model = network()
    filters, rest = split(model)
    with pytest.raises(IncompatibleError, match="one of the 2 optimizers needs the loss"):
        TrainStep(Target(model, SGD(filters, 0.1), others=(Search(rest, 0.1),)), lambda x: model(x).mean())


def trained_on_ranks(make: Make, how: str) -> tuple[list[float], list[str]]:
    """Train under DDP, each rank on batches of its own; return all weights, and the levers that are on."""
    model = network()
    optimizers, boosted = make(model), None
    if how != "plain":
        measured = how == "measured"
        extra = {name: on for name, on in EXACT["extra"].items() if not (measured and on)}
        seconds = 0.2 if measured else False
        boosted = boost(model, optimizers, total_steps=5000, calibrate=seconds, config={"extra": extra})
    parallel = DistributedDataParallel(model)
    step = None if boosted is None or how != "step" else boosted.step(F.cross_entropy, model=parallel)
    for number in range(dist.get_rank(), 12, 2):
        if step is not None:
            step(*batch(number))
        else:
            train(parallel, optimizers, range(number, number + 1))
    assert boosted is None or not boosted.withdrawn
    weights = [entry for p in model.parameters() for entry in p.detach().flatten().tolist()]
    return weights, [] if boosted is None else sorted(boosted.attached)


def all_trained_on_ranks() -> list[dict[str, tuple[list[float], list[str]]]]:
    ways = ("plain", "named", "measured", "step")
    return [{how: trained_on_ranks(make, how) for how in ways} for make in (sgd_and_adamw, adamw_and_sgd)]


@pytest.mark.dist
def test_ranks_train_as_in_a_plain_loop():
    first, second = run_ranks(all_trained_on_ranks, 2)
    assert first == second
    for runs in first:
        plain_weights, _ = runs.pop("plain")
        for how, (weights, levers) in runs.items():
            torch.testing.assert_close(weights, plain_weights, rtol=1e-4, atol=1e-5, msg=how)
            assert how == "measured" or levers == sorted(LEVERS)
