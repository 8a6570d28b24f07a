import copy
import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import BottleneckNet, mlp
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights, train_share, wrap
from torchboost import (
    AutoBoost,
    ConfigError,
    Facts,
    IncompatibleError,
    NoEffectWarning,
    Plan,
    Target,
    TrainStep,
    boost,
    freeze_blocks,
)
from torchboost.algorithms import AccumulationSteps, BlockFreeze, LessBn
from torchboost.algorithms.grad_freeze.freezer import Freezing, compiled_prefixes
from torchboost.algorithms.grad_freeze.schedule import Switches
from torchboost.calibration.calibration import Calibration
from torchboost.calibration.choice import Choice, Verdict
from torchboost.core import attach_all

PATTERNS = ("continuous", "interval", "progressive")


def settings(pattern, **more):
    return BlockFreeze(**({"pattern": pattern, "groups": 4, "full_share": 0.25, "total_steps": 12} | more))


def start(pattern, *, seed=0, window=1, **more):
    torch.manual_seed(seed)
    model = BottleneckNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    target = Target(model, optimizer)
    accumulation = [AccumulationSteps(steps=window)] if window > 1 else []
    attached = attach_all(target, [settings(pattern, **more), *accumulation])
    return model, optimizer, TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)


def batch(step: int, size: int = 8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("norms", ["update", "eval"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_resume_at_every_step_is_bit_identical(pattern, norms, window):
    more = {"window": window, "total_steps": 12 // window}
    model, optimizer, step = start(pattern, norms=norms, **more)
    states, indices = [], []
    for number in range(12):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict())))
        indices.append(step.attached["grad_freeze"].index)
        step(*batch(number))
    assert len(set(indices)) > 1
    for number, (weights, moments, state) in enumerate(states):
        again, other, resumed = start(pattern, norms=norms, seed=7, **more)
        again.load_state_dict(weights)
        other.load_state_dict(moments)
        resumed.load_state_dict(state)
        for rest in range(number, 12):
            resumed(*batch(rest))
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_seed_gives_the_same_schedule_and_another_one_another():
    def indices(seed: int) -> list[int]:
        model = mlp()
        freezing = freeze_blocks(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            settings("interval", groups=3, total_steps=50),
            seed=seed,
        )
        return [freezing._schedule(step) for step in range(50)]

    assert indices(1) == indices(1) != indices(2)


def test_progressive_freezing_is_monotone_and_leaves_the_head():
    model, _, step = start("progressive")
    seen = []
    for number in range(12):
        seen.append(step.attached["grad_freeze"].index)
        step(*batch(number))
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 3
    assert all(p.requires_grad for p in model.head.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, as inductor loads
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.usefixtures("followed_flags")
def test_a_compiled_model_gets_as_many_graphs_as_announced(pattern, backend):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(4, 4), nn.Tanh())))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers(x)

    net = Net()
    net.compile(backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    freezing = freeze_blocks(net, optimizer, settings(pattern, groups=10, full_share=0.1, total_steps=24))
    before = counters["stats"]["unique_graphs"]
    seen = set()
    for number in range(24):
        seen.add(freezing.index)
        net.train()
        x = torch.randn(8 if number % 5 else 6, 4, generator=torch.Generator().manual_seed(number))
        net(x).square().mean().backward()
        frozen = set(freezing.frozen)
        assert all((p.grad is None) == (p in frozen) for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 3:
            net.eval()
            with torch.no_grad():
                net(x)
    assert 1 < len(seen) <= freezing.graphs <= settings(pattern).graphs() <= compiled_prefixes() == 3
    graphs = counters["stats"]["unique_graphs"] - before
    # Training and evaluation once for each number of frozen groups, and the second batch size once for each kind.
    assert graphs <= 2 * len(seen) + 2 <= torch._dynamo.config.recompile_limit
    assert not counters["recompile_limit"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_compiling_before_the_first_update_that_freezes_limits_the_graphs(pattern):
    """A level decides about compilation at the first training call, after freezing was attached."""

    def begun() -> tuple[nn.Module, torch.optim.Optimizer, Freezing]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
def test_a_resumed_run_keeps_the_schedule_of_its_checkpoint():
    """Freezing that began uncompiled stays as it was, also if the resumed model is compiled from the start."""
    chosen = settings("progressive", groups=10, full_share=0.5, total_steps=40)
    indices: dict[bool, list[int]] = {}
    state: dict[str, object] = {}
    for compiled in (False, True):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def test_compiling_after_freezing_began_warns_before_the_graphs_run_out():
    for prefixes, warned in ((None, True), (3, False)):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        freezing = freeze_blocks(
            model, optimizer, settings("progressive", groups=10, full_share=0.0, prefixes=prefixes)
        )
        while not freezing.index:
            optimizer.step()
        model.compile(backend="eager")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(freezing.step, 12):
                optimizer.step()
        assert [str(w.message) for w in seen if "set prefixes=3" in str(w.message)] == [str(w.message) for w in seen], (
            "nothing else warns"
        )
        assert len(seen) == warned


def test_prefixes_may_be_set():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, settings("continuous", groups=10, full_share=0.0, prefixes=4))
    assert {freezing._schedule(step) for step in range(30)} == {0, 2, 5, 7}


def test_schedules_are_functions_of_the_settings():
    assert isinstance(settings("progressive").schedule([0.25] * 4), Switches)
    first, second = (settings("interval").schedule([0.25] * 4, seed=3) for _ in range(2))
    assert [first(step) for step in range(50)] == [second(step) for step in range(50)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pattern": "random"}, "pattern='random': allowed are 'continuous'"),
        ({"full_share": 1.0}, "full_share=1.0: the share of updates that train everything"),
        ({"groups": 0}, "groups=0"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"total_steps": 10**400}, "more than 2"),
        ({"norms": "freeze"}, "norms='freeze'"),
        ({"prefixes": 1}, "prefixes=1: pass 2 or more"),
        ({"costs": (0.0, 0.0)}, "not all 0"),
        ({"step_seconds": -1.0}, "step_seconds=-1.0: pass seconds"),
        ({"recompile_seconds": float("nan")}, "recompile_seconds=nan: pass seconds"),
    ],
)
def test_bad_settings(bad, message):
    with pytest.raises(ValueError, match=message):
        BlockFreeze(**bad)


def test_costs_are_one_per_block():
    model = BottleneckNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"costs: found 2, the model has 4 blocks \(stem\.0, blocks\.0"):
        freeze_blocks(model, optimizer, BlockFreeze(pattern="progressive", costs=(0.5, 0.5)))


def test_costs_are_refused_before_another_algorithm_changes_the_model():
    model = BottleneckNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_modules()]
    algorithms = [LessBn(keep="narrowest"), BlockFreeze(pattern="progressive", costs=(0.5, 0.5))]
    with pytest.raises(ValueError, match="costs: found 2, the model has 4 blocks"):
        attach_all(Target(model, optimizer), algorithms)
    assert [name for name, _ in model.named_modules()] == names


def test_more_groups_than_blocks_are_said_and_one_block_is_idle():
    model = BottleneckNet()
    with pytest.warns(NoEffectWarning, match="found groups=10, but the model has 4 blocks"):
        freeze_blocks(model, torch.optim.SGD(model.parameters(), lr=0.1), BlockFreeze(total_steps=10))
    single = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    assert BlockFreeze().idle(single, optimizer) == "the model is a single block, which always trains"
    with pytest.warns(NoEffectWarning, match="a single block"):
        freeze_blocks(single, optimizer)


def test_the_references_section_decides_the_settings():
    section = {"param_groups": 4, "freeze_type": 2, "freeze_p": 0.4, "total_steps": 100}
    plan = Plan.of("O0", {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": section}, Facts())
    assert plan.algorithms == (BlockFreeze(groups=4, pattern="progressive", full_share=0.4, total_steps=100),)


def test_the_length_of_the_run_comes_from_the_facts_where_nobody_sets_it():
    plan = Plan.of("O0", {"extra": {"grad_freeze": {"groups": 4}}}, Facts(total_steps=77))
    assert plan.algorithms == (BlockFreeze(groups=4, total_steps=77),)
    with pytest.raises(ConfigError, match="full_share"):
        Plan.of("O0", {"extra": {"grad_freeze": {"full_share": 2.0}}}, Facts())


def test_auto_boost_freezes_in_an_unmodified_loop():
    torch.manual_seed(0)
    model = BottleneckNet()
    section = {"param_groups": 4, "freeze_type": 0, "freeze_p": 0.0, "total_steps": 8}
    booster = AutoBoost("O0", {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": section})
    model, optimizer = booster.network_auto_process_train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for number in range(3):
        x, y = batch(number)
        F.cross_entropy(model(x), y).backward()
        counts.append(sum(p.grad is None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert counts == [3, 15, 24]
    state = json.loads(json.dumps(booster.attached.state_dict()))["grad_freeze"]
    assert (state["step"], state["frozen"], state["closed"], state["doubtful"]) == (3, 3, [], [])


def _trained(kind: str, pattern: str) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = BottleneckNet()
    for module in model.modules():  # statistics of a share of the batch are not those of the batch
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    wrapped = wrap(model, kind)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    freezing = freeze_blocks(wrapped, optimizer, settings(pattern, total_steps=10, full_share=0.2))
    train_share(Target(wrapped, optimizer), model, steps=8)
    return all_weights(wrapped), freezing.index


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("pattern", ["progressive"])
def test_two_ranks_equal_one_process(kind, pattern):
    first, second = run_ranks(_trained, 2, kind, pattern)
    assert first == second
    weights, index = _trained("single", pattern)
    assert first[1] == index > 0
    assert first[0] == pytest.approx(weights, abs=1e-6)


def test_a_fixed_prefix_is_frozen_from_beginning_to_end():
    model, _, step = start("fixed", frozen=2)
    for number in range(3):
        assert sum(not p.requires_grad for p in model.parameters()) == 15
        step(*batch(number))
    with pytest.raises(ValueError, match="only 'fixed' reads it"):
        BlockFreeze(frozen=2)
    with pytest.raises(ValueError, match="less than the number of groups, 4"):
        settings("fixed", frozen=4)


def test_the_cache_trains_alike_and_skips_what_it_has_seen(tmp_path):
    plain, _, slow = start("fixed", frozen=3, norms="eval")
    model, _, step = start("fixed", frozen=3, norms="eval", cache_mebibytes=1, cache_path=str(tmp_path))
    fast = step.attached["grad_freeze"].fast
    for _ in range(3):
        for number in range(2):
            expected = slow(*batch(number)).loss
            with fast.samples(range(8 * number, 8 * number + 8)):
                loss = step(*batch(number)).loss
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    report = fast.report()
    assert report.rows == 16
    # The first update is watched through hooks; what it gave is forgotten when they go, and not counted.
    assert report.hit_rate == pytest.approx(3 / 5)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    step.attached.remove()
    assert "forward" not in vars(model)
    assert not list(tmp_path.iterdir())


def test_the_cache_follows_a_schedule():
    _, _, slow = start("progressive", norms="eval")
    _, _, step = start("progressive", norms="eval", cache_mebibytes=1)
    sizes = set()
    for number in range(12):
        expected = slow(*batch(number)).loss
        torch.testing.assert_close(step(*batch(number)).loss, expected, rtol=1e-3, atol=1e-4)
        sizes.add(step.attached["grad_freeze"].fast.report().parameters)
    assert len(sizes) == 4


@pytest.mark.usefixtures("followed_flags")
def test_the_cache_needs_a_bare_model_and_settled_norms():
    with pytest.raises(ValueError, match="use norms='eval'"):
        BlockFreeze(cache_mebibytes=1)
    with pytest.raises(ValueError, match="0 or more"):
        BlockFreeze(cache_mebibytes=-1)
    model = BottleneckNet()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(IncompatibleError, match="set cache_mebibytes=0"):
        attach_all(Target(model, optimizer), [settings("fixed", norms="eval", cache_mebibytes=1)])
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, as it compiles
def test_a_level_that_compiles_at_the_first_call_needs_few_graphs(monkeypatch):
    """The trial keeps compilation, after O2 has attached freezing. It knows how many graphs the run pays for."""
    counted = []

    def kept(self: Calibration, *_: object, **__: object) -> Choice:
        counted.append(self.graphs)
        verdicts = (Verdict(lever=lever.name, kept=lever.name == "compile", reason="planted") for lever in self.levers)
        return Choice(verdicts=tuple(verdicts), source="trial")

    monkeypatch.setattr(Calibration, "measure", kept)
    model, total = BottleneckNet(), 2000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = boosted = boost(model, optimizer, level="O2", total_steps=total, calibrate=1.0)
    with torch.compiler.set_stance("force_eager"):
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    assert {"compile", "grad_freeze"} <= set(boosted.attached)
    freezing = boosted.attached["grad_freeze"]
    frozen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(total):
            frozen.add(freezing.index)
            optimizer.step()
    assert 1 < len(frozen) <= freezing.graphs <= counted[0] <= compiled_prefixes()
