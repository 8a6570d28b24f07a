"""A frozen run: what moves, what keeps its bytes, resuming, compilation, and the settings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

from tests.support.frozen_nets import scheduled
from tests.support.models import BottleneckNet
from torchboost import (
    Facts,
    IncompatibleError,
    NoEffectWarning,
    Plan,
    Target,
    TrainStep,
    boost,
    freeze_blocks,
)
from torchboost.algorithms import GradAccumulation, GradFreeze, LessBn
from torchboost.algorithms.compile import Compile
from torchboost.algorithms.grad_freeze.freezer import compiled_prefixes
from torchboost.calibration.calibration import Calibration
from torchboost.calibration.choice import Choice, Verdict
from torchboost.core import attach_all
from torchboost.graph.blocks import blocks_of
from torchboost.workloads.models import GPT

PATTERNS = ("continuous", "interval", "progressive")


def settings(pattern: str, **more: Any) -> GradFreeze:
    return GradFreeze(**({"pattern": pattern, "groups": 4, "full_share": 0.25, "total_steps": 12} | more))


def network(seed: int = 0, **options: Any) -> tuple[BottleneckNet, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = BottleneckNet()
    return model, torch.optim.SGD(model.parameters(), **({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | options))


def start(schedule: Iterable[int] = (0, 2), *, seed: int = 0, norms: Any = "update", **options: Any) -> Any:
    model, optimizer = network(seed, **options)
    return model, optimizer, scheduled(model, optimizer, tuple(schedule), norms=norms)


def started(pattern: str, *, seed: int = 0, window: int = 1, **more: Any) -> Any:
    model, optimizer = network(seed)
    target = Target(model, optimizer)
    accumulation = [GradAccumulation(steps=window)] if window > 1 else []
    attached = attach_all(target, [settings(pattern, **more), *accumulation])
    return model, optimizer, TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)


def batch(step: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# What moves


def test_flags_follow_the_schedule_from_the_first_update_on_and_equal_a_loop_by_hand() -> None:
    schedule = (1, 0, 3, 2, 0, 1)
    model, optimizer, freezing = start(schedule)
    by_hand, plain = network()
    blocks, groups = [block.parameters for block in blocks_of(by_hand)], copy.copy(optimizer.param_groups[0]["params"])
    for step, index in enumerate((*schedule, 1)):
        for at, parameters in enumerate(blocks):
            for p in parameters:
                p.requires_grad_(at >= index)
        assert freezing.index == index
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in by_hand.parameters()]
        assert len(freezing.frozen) == (0, 3, 15, 24)[index]
        train(by_hand, plain, [step])
        train(model, optimizer, [step])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], groups, strict=True))
    moments = sum(s["momentum_buffer"].numel() for s in optimizer.state.values())
    assert moments == sum(p.numel() for p in model.parameters()), "one set of moments"


def test_what_counts_as_an_update() -> None:
    model, optimizer, freezing = start((1, 2), momentum=0.0)  # without a state, so that each checkpoint steps it
    for updates in range(2):
        get_optimizer_state_dict(model, optimizer)
        assert (freezing.step, freezing.index) == (updates, 1 + updates)
        train(model, optimizer, [updates])
    model, optimizer, freezing = start(lr=0.0)
    train(model, optimizer, [0])
    assert freezing.step == 1
    model, optimizer, freezing = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = batch(0)
    for factor, step in ((float("inf"), 0), (1.0, 1)):
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert freezing.step == step


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
def test_frozen_weights_moments_and_norms_keep_their_bytes(rule: Any) -> None:
    for how in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.manual_seed(0)
        model = BottleneckNet()
        momentum = {"momentum": 0.9} if rule is torch.optim.SGD else {}
        optimizer = rule(model.parameters(), lr=0.01, weight_decay=0.1, **momentum, **how)
        scheduled(model, optimizer, [0] * 3 + [2] * 60, norms="eval")
        train(model, optimizer, range(3))
        frozen = [p for p in model.parameters() if not p.requires_grad]
        parts, head = (model.stem, model.blocks[0]), model.head.weight.detach().clone()
        before = [value.clone() for part in parts for value in part.state_dict().values()]
        moments = copy.deepcopy([optimizer.state[p] for p in frozen])
        for step in range(10):
            model.train()  # as loops do at each epoch
            train(model, optimizer, [step])
        after = [value for part in parts for value in part.state_dict().values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), how
        for kept, p in zip(moments, frozen, strict=True):
            assert kept.keys() == optimizer.state[p].keys()
            assert all(torch.equal(torch.as_tensor(kept[k]), torch.as_tensor(optimizer.state[p][k])) for k in kept)
        assert not torch.equal(model.head.weight, head)


def test_norms_go_on_updating_unless_told_otherwise_and_come_back_with_their_block() -> None:
    model, optimizer, _ = start((2,))
    before = model.stem[1].running_mean.clone()
    train(model, optimizer, [0])
    assert not torch.equal(model.stem[1].running_mean, before)
    model, optimizer, _ = start((2, 0), norms="eval")
    for step, training in enumerate((False, True, False)):
        assert model.stem[1].training == training
        train(model, optimizer, [step])
    model.eval()
    train(model, optimizer, [3])
    assert not any(module.training for module in model.modules()), "the model is in eval mode"


def test_the_backward_pass_stops_at_the_border_and_stores_nothing_before_it() -> None:
    model, _, _ = start((3,), norms="eval")
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t.numel()) or t, lambda t: t):
        features = model.blocks(model.stem(batch(0)[0]))
    assert not features.requires_grad
    assert stored == []


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("followed_flags")
def test_tied_weights_train_through_their_last_use_only(compiled: bool) -> None:
    torch.manual_seed(0)
    model = GPT(16, context=8, layers=2, heads=2, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compiled:
        model.compile(backend="aot_eager")
    freezing = scheduled(model, optimizer, (0, 2))
    tokens = torch.randint(0, 16, (2, 8))
    names = {name for name, _ in model.named_parameters()}
    behind = {n for n in names if n == "tokens.weight" or n[:8] in ("blocks.1", "norm.wei", "norm.bia")}
    for expected in (names, behind):
        model(tokens).sum().backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == expected
        optimizer.step()
        optimizer.zero_grad()
    freezing.freeze(2)
    assert not model.blocks[0](model.tokens(tokens)).requires_grad
    freezing.remove()
    assert model.tokens(tokens).requires_grad
    assert not model.tokens._forward_hooks


def test_the_end_of_the_run_and_remove_give_everything_back() -> None:
    model, optimizer = network()
    freezing = scheduled(model, optimizer, (0, 2), total_steps=4, norms="eval")
    train(model, optimizer, range(4))
    assert freezing.index == 0
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())
    with pytest.warns(NoEffectWarning, match="update 5 comes after the end of the run, total_steps=4") as seen:
        train(model, optimizer, range(3))
    assert len(seen) == 1
    assert freezing.index == 0
    model, optimizer, freezing = start((3,), norms="eval")
    assert not model.stem[1].training
    freezing.remove()
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks


# Resuming


@pytest.mark.parametrize(
    ("pattern", "norms", "window"),
    [("continuous", "eval", 1), ("interval", "update", 1), ("progressive", "eval", 1), ("progressive", "update", 2)],
)
def test_resume_at_every_step_is_bit_identical(pattern: str, norms: str, window: int) -> None:
    more: dict[str, Any] = {"window": window, "total_steps": 12 // window, "norms": norms}
    model, optimizer, step = started(pattern, **more)
    states, indices = [], []
    for number in range(12):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict())))
        indices.append(step.attached["grad_freeze"].index)
        step(*batch(number))
    assert len(set(indices)) > 1
    if pattern == "progressive":
        assert (indices, indices[0], indices[-1]) == (sorted(indices), 0, 3)
        assert all(p.requires_grad for p in model.head.parameters())
    for number, state in enumerate(states):
        again, other, resumed = started(pattern, seed=7, **more)
        for part, saved in zip((again, other, resumed), state, strict=True):
            part.load_state_dict(saved)
        for rest in range(number, 12):
            resumed(*batch(rest))
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_checkpoint_of_another_schedule_is_refused_before_anything_changes() -> None:
    _, optimizer, freezing = start((0, 3))
    optimizer.step()
    model, _, other = start((0, 1))
    with pytest.raises(ValueError, match=r"froze 24 parameters at update 1, but these settings freeze 3; attach with"):
        other.load_state_dict(freezing.state_dict())
    assert other.step == 0
    assert all(p.requires_grad for p in model.parameters())


# Compilation


def ten_layers() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(4, 4), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, as inductor loads
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.usefixtures("followed_flags")
def test_a_compiled_model_gets_as_many_graphs_as_announced(pattern: str, backend: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model, optimizer = ten_layers()
    model.compile(backend=backend)
    freezing = freeze_blocks(model, optimizer, settings(pattern, groups=10, full_share=0.1, total_steps=24))
    before = counters["stats"]["unique_graphs"]
    seen = set()
    for number in range(24):
        seen.add(freezing.index)
        model.train()
        x = torch.randn(8 if number % 5 else 6, 4, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        frozen = set(freezing.frozen)
        assert all((p.grad is None) == (p in frozen) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(x)
    assert 1 < len(seen) <= freezing.graphs <= settings(pattern).graphs() <= compiled_prefixes() == 3
    graphs = counters["stats"]["unique_graphs"] - before
    # Training and evaluation once for each number of frozen groups, and the second batch size once for each kind.
    assert graphs <= 2 * len(seen) + 2 <= torch._dynamo.config.recompile_limit
    assert not counters["recompile_limit"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_compiling_before_the_first_update_that_freezes_limits_the_graphs(pattern: str) -> None:
    """A level decides about compilation at the first training call, after freezing was attached."""

    def begun() -> Any:
        model, optimizer = ten_layers()
        chosen = settings(pattern, groups=10, full_share=0.5, total_steps=40)
        return model, optimizer, freeze_blocks(model, optimizer, chosen)

    model, optimizer, freezing = begun()
    model.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        indices, states = [], []
        for _ in range(40):
            indices.append(freezing.index)
            states.append(freezing.state_dict())
            optimizer.step()
    assert 1 < len(set(indices)) <= freezing.graphs <= compiled_prefixes() == 3
    for number, state in enumerate(states):
        model, optimizer, resumed = begun()
        resumed.load_state_dict(state)
        model.compile(backend="eager")
        rest = []
        for _ in range(number, 40):
            rest.append(resumed.index)
            optimizer.step()
        assert rest == indices[number:]


@pytest.mark.usefixtures("followed_flags")
def test_a_resumed_run_keeps_the_schedule_of_its_checkpoint() -> None:
    """Freezing that began uncompiled stays as it was, also if the resumed model is compiled from the start."""
    chosen = settings("progressive", groups=10, full_share=0.5, total_steps=40)
    indices: dict[bool, list[int]] = {}
    state: dict[str, Any] = {}
    for compiled in (False, True):
        model, optimizer = ten_layers()
        if compiled:
            model.compile(backend="eager")
        freezing = freeze_blocks(model, optimizer, chosen)
        if compiled:
            freezing.load_state_dict(state)
        indices[compiled] = []
        for step in range(30 if compiled else 0, 40):
            if step == 30:
                state = freezing.state_dict()
            if step >= 30:
                indices[compiled].append(freezing.index)
            optimizer.step()
    assert indices[True] == indices[False]
    assert len(set(indices[True])) > 1


def test_compiling_after_freezing_began_warns_before_the_graphs_run_out() -> None:
    for prefixes, warned in ((None, True), (3, False)):
        model, optimizer = ten_layers()
        chosen = settings("progressive", groups=10, full_share=0.0, prefixes=prefixes)
        freezing = freeze_blocks(model, optimizer, chosen)
        while not freezing.index:
            optimizer.step()
        model.compile(backend="eager")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(freezing.step, 12):
                optimizer.step()
        assert ["set prefixes=3" in str(w.message) for w in seen] == [True] * warned, "nothing else warns"


@pytest.mark.parametrize("first", ["compile", "freezing"])
def test_what_a_level_compiles_is_trained_again_when_it_is_thawed(first: str, monkeypatch: Any) -> None:
    """A level attaches compile first, a trial that keeps it attaches it last. It needs no setting in any torch."""
    monkeypatch.setattr("torchboost.algorithms.grad_freeze.checks.compiler_follows_flags", lambda: False)
    model, optimizer = network()
    compilation = Compile(backend="aot_eager")
    if first == "compile":
        compilation.attach(Target(model, optimizer))
    scheduled(model, optimizer, (2, 0, 3))
    if first == "freezing":
        compilation.attach(Target(model, optimizer))
    for frozen in (True, False, True):
        before = model.stem[0].weight.detach().clone()
        train(model, optimizer, [0])
        assert torch.equal(model.stem[0].weight, before) is frozen
    other, optimizer = network()
    other.compile(backend="eager")
    with pytest.raises(IncompatibleError, match="pytorch#139476"):
        scheduled(other, optimizer, (0, 1))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, as it compiles
def test_a_level_that_compiles_at_the_first_call_needs_few_graphs(monkeypatch: Any) -> None:
    """The trial keeps compilation, after O2 has attached freezing. It knows how many graphs the run pays for."""
    counted = []

    def kept(self: Calibration, *_: object, **__: object) -> Choice:
        counted.append(self.graphs)
        verdicts = (Verdict(lever=lever.name, kept=lever.name == "compile", reason="planted") for lever in self.levers)
        return Choice(verdicts=tuple(verdicts), source="trial")

    monkeypatch.setattr(Calibration, "measure", kept)
    (model, optimizer), total = network(), 2000
    model, optimizer = boosted = boost(model, optimizer, level="O2", total_steps=total, calibrate=1.0)
    with torch.compiler.set_stance("force_eager"):
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    assert {"compile", "grad_freeze"} <= set(boosted.attached)
    freezing: Any = boosted.attached["grad_freeze"]
    (row,) = (row for row in boosted.levers.explanation().rows if row.name == "grad_freeze")
    indices = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(total):
            indices.append(freezing.index)
            optimizer.step()
    assert 1 < len(set(indices)) <= freezing.graphs <= counted[0] <= compiled_prefixes()
    assert row.did.endswith(f"freezing begins after update {indices.count(0):,}")


# Settings


def test_defaults_are_those_of_the_levels_and_the_length_is_required() -> None:
    plan = Plan.of("O2", {"extra": {"grad_freeze": True}}, Facts(total_steps=5000))
    assert [a for a in plan.algorithms if a.name == "grad_freeze"] == [GradFreeze(total_steps=5000)]
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    missing = r"total_steps: found none, .* pass the number of updates of the whole run"
    with pytest.raises(ValueError, match=missing):
        freeze_blocks(model, optimizer, GradFreeze())
    config = {"extra": {"grad_freeze": {"groups": 4}}}
    assert Plan.of("O0", config, Facts()).algorithms == (GradFreeze(groups=4),)  # a trainer adds the length later
    with pytest.raises(ValueError, match=missing):
        boost(model, optimizer, level="O0", config=config)
    plan = Plan.of("O0", {"extra": {"grad_freeze": {"groups": 4}}}, Facts(total_steps=77))
    assert plan.algorithms == (GradFreeze(groups=4, total_steps=77),)
    section = {"param_groups": 4, "freeze_type": 0, "freeze_p": 0.4, "total_steps": 100}
    plan = Plan.of("O0", {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": section}, Facts())
    assert plan.algorithms == (GradFreeze(groups=4, pattern="continuous", full_share=0.4, total_steps=100),)


def test_bad_settings() -> None:
    for bad, message in (
        ({"pattern": "random"}, "pattern='random': allowed are 'continuous'"),
        ({"full_share": 1.0}, "full_share=1.0: the share of updates that train everything"),
        ({"groups": 0}, "groups=0"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"total_steps": 10**400}, "more than 2"),
        ({"norms": "freeze"}, "norms='freeze'"),
        ({"prefixes": 1}, "prefixes=1: pass 2 or more"),
        ({"cache_mebibytes": None}, "cache_mebibytes=None: pass 0 or more"),
        ({"agree_within": -1.0}, "agree_within=-1.0: pass seconds"),
        ({"frozen": 2}, "only 'fixed' reads it"),
        ({"pattern": "fixed", "frozen": 10}, "less than the number of groups, 10"),
        ({"cache_mebibytes": 1}, "use norms='eval'"),
        ({"cache_mebibytes": -1}, "0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            GradFreeze(**{"total_steps": 10} | bad)


def test_settings_that_do_not_fit_are_refused_before_anything_changes() -> None:
    model, optimizer = network()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="total_steps: found none"):
        attach_all(Target(model, optimizer), [LessBn(keep="narrowest"), GradFreeze()])
    assert [name for name, _ in model.named_modules()] == names
    with pytest.raises(IncompatibleError, match="set cache_mebibytes=0"):
        attach_all(
            Target(nn.DataParallel(model), optimizer), [settings("fixed", norms="eval", cache_mebibytes=1, frozen=1)]
        )
    with pytest.raises(IncompatibleError, match=r"LBFGS\.step needs a closure"):
        scheduled(model, torch.optim.LBFGS(model.parameters()), (1,))
    assert all(p.requires_grad for p in model.parameters())


def test_more_groups_than_blocks_are_said_and_one_block_is_idle() -> None:
    model, optimizer = network()
    with pytest.warns(NoEffectWarning, match="found groups=5, but the model has 4 blocks"):
        freeze_blocks(model, optimizer, GradFreeze(groups=5, pattern="interval", total_steps=10)).remove()
    freeze_blocks(model, optimizer, GradFreeze(pattern="interval", total_steps=10))  # the default is no request
    single = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    idle = GradFreeze(total_steps=10)
    assert idle.idle(single, optimizer) == "the model is a single block, which always trains"
    with pytest.warns(NoEffectWarning, match="a single block"):
        freeze_blocks(single, optimizer, idle)


def test_a_seed_gives_the_same_schedule_and_prefixes_may_be_set() -> None:
    def indices(seed: int = 0, pattern: str = "interval", **more: Any) -> list[int]:
        model, optimizer = ten_layers()
        chosen = settings(pattern, groups=10, total_steps=50, **more)
        freezing = freeze_blocks(model, optimizer, chosen, seed=seed)
        seen = []
        for _ in range(30):
            seen.append(freezing.index)
            optimizer.step()
        return seen

    assert indices(1) == indices(1) != indices(2)
    assert set(indices(pattern="continuous", full_share=0.0, prefixes=4)) == {0, 2, 5, 7}


def test_the_cache_trains_as_without_it_on_any_schedule() -> None:
    for pattern, more, prefixes in (("fixed", {"frozen": 3}, 1), ("progressive", {}, 4)):
        steps = 6 if pattern == "fixed" else 12
        plain, _, slow = started(pattern, norms="eval", total_steps=steps, **more)
        more |= {"cache_mebibytes": 1}
        model, _, step = started(pattern, norms="eval", total_steps=steps, **more)
        fast, sizes = step.attached["grad_freeze"].fast, set()
        for number in range(steps):
            at = number % 2
            expected = slow(*batch(at)).loss
            with fast.samples(range(4 * at, 4 * at + 4)):
                assert torch.equal(step(*batch(at)).loss, expected)
            sizes.add(fast.report().parameters)
        assert len(sizes) == prefixes
        assert fast.report().hit_rate == pytest.approx(2 / 3) or pattern != "fixed"
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
        step.attached.remove()
        assert "forward" not in vars(model)
