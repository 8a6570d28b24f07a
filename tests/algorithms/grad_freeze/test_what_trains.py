"""What the user froze, what the loss reaches, and gradients that freezing cannot follow."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.frozen_nets import scheduled
from tests.support.ranks import run_ranks
from torchboost import AutoBoost, IncompatibleError, NoEffectWarning, freeze_blocks
from torchboost.algorithms import GradFreeze

SETTINGS = GradFreeze(pattern="progressive", groups=6, full_share=0.25, total_steps=20)


def stack(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Net(nn.Module):
    """A body and parts behind it; ``use`` says which of these the loss goes through."""

    def __init__(self, parts: int, use: Callable[[int], Sequence[int]]) -> None:
        super().__init__()
        self.body = stack(4)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(parts))
        self.use = use
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.body(x))
        outputs = [self.parts[at](x) for at in self.use(self.calls)]
        return torch.stack([output.square().mean() for output in outputs or [x]]).sum()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def freeze(model: nn.Module, optimizer: Any, groups: int = 10, *, seed: int = 0, **more: Any) -> Any:
    settings = {"pattern": "progressive", "full_share": 0.25, "total_steps": 24} | more
    return freeze_blocks(model, optimizer, GradFreeze(groups=groups, **settings), seed=seed)


def train(model: Any, optimizer: Any, freezing: Any, *, updates: int = 24, set_to_none: bool = True) -> list[int]:
    """Train; every update must move something."""
    indices = []
    for step in range(updates):
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).sum().backward()
        indices.append(freezing.index)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return indices


def trains(model: Any) -> list[bool]:
    return [p.requires_grad for p in model.parameters()]


# What the loss reaches


@pytest.mark.parametrize("set_to_none", [True, False])
def test_something_that_the_loss_uses_trains_to_the_end(set_to_none: bool) -> None:
    ways: list[tuple[int, Any]] = [
        (3, lambda call: []),  # nothing behind the body is used
        (3, lambda call: [0]),  # the last two are not
        (2, lambda call: [call % 2]),  # heads by turns
        (2, lambda call: [0, 1]),  # two outputs
    ]
    for number, (parts, use) in enumerate(ways):
        model = Net(parts, use)
        optimizer = sgd(model)
        indices = train(model, optimizer, freeze(model, optimizer), set_to_none=set_to_none)
        assert indices == sorted(indices), number
        assert indices[-1] > 0, number


def test_the_last_group_is_the_last_one_that_every_update_reaches() -> None:
    for parts, use in ((3, lambda call: [0]), (2, lambda call: [call % 2])):
        model = Net(parts, use)
        optimizer = sgd(model)
        assert max(train(model, optimizer, freeze(model, optimizer, groups=4 + parts))) == 4


def test_heads_by_turns_may_be_frozen_from_the_second_update_on() -> None:
    for heads, direction in ((2, 1), (3, 1), (3, -1)):
        for more in ({"pattern": "interval", "full_share": 0.0}, {"pattern": "continuous", "full_share": 0.2}):
            for seed in range(4):
                model = Net(heads, lambda call, by=direction, heads=heads: [by * call % heads])
                optimizer = sgd(model)
                indices = train(model, optimizer, freeze(model, optimizer, 4 + heads, seed=seed, **more))
                assert any(indices[1:4])
                assert max(indices[heads:]) == 4  # as soon as all have been seen


def test_a_part_that_was_left_out_of_the_losses_trains_until_it_gets_a_gradient() -> None:
    model = Net(3, lambda call: [0, 2] if call > 2 else [2])
    optimizer = sgd(model)
    freezing = freeze(model, optimizer, groups=7, pattern="fixed", frozen=0)
    with pytest.raises(ValueError, match="index: found 7; pass 0 to 6"):
        freezing.freeze(7)
    unused, unseen, body = (list(m.parameters()) for m in (model.parts[1], model.parts[0], model.body))
    train(model, optimizer, freezing, updates=1)
    for call, expected in ((2, body), (3, body), (4, [*body, *unseen])):
        freezing.freeze(6)
        assert list(map(id, freezing.frozen)) == list(map(id, expected))
        weights = [sum(p.numel() for p in parameters) for parameters in (expected, model.parameters())]
        assert freezing.figures() == {"frozen": weights[0] / weights[1]}
        assert all(p.requires_grad for p in unused)
        model(torch.ones(3, 4)).backward()
        assert all(p.grad is not None for p in unseen) == (call == 3)
        optimizer.step()
        optimizer.zero_grad()


def test_norms_follow_their_block_unless_it_still_trains_or_the_user_keeps_them_in_eval_mode() -> None:
    model = Net(2, lambda call: [call % 2])
    model.parts[0] = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    for at in (1, 2):
        model.body[at] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norms: list[Any] = [model.body[1][1], model.parts[0][1], model.body[2][1]]  # pyright: ignore[reportIndexIssue]
    norms[2].eval()
    optimizer = sgd(model)
    freezing = freeze(model, optimizer, groups=9, pattern="fixed", frozen=0, norms="eval")
    for step in range(4):
        freezing.freeze(5 if step % 2 else 0)
        model(torch.randn(3, 4)).backward()
        assert [norm.training for norm in norms] == [step % 2 == 0, True, False]
        optimizer.step()
        optimizer.zero_grad()
    freezing.remove()
    assert [norm.training for norm in norms] == [True, True, False]


def test_parameters_of_another_optimizer_are_neither_frozen_nor_counted() -> None:
    model = Net(1, lambda call: [0])
    front, rest = list(model.body[0].parameters()), list(model.body[1:].parameters())
    mine, other = torch.optim.SGD(rest, lr=0.1), torch.optim.SGD([*front, *model.parts.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    freezing, reached = freeze(model, mine), set()
    for _ in range(24):
        scaler.scale(model(torch.randn(3, 4))).backward()
        assert all(p.grad is not None for p in front)
        assert any(p.grad is not None for p in rest)
        scaler.step(mine)
        scaler.step(other)
        scaler.update()
        mine.zero_grad()
        other.zero_grad()
        reached.add(freezing.index)
    assert max(reached) == 3


class Tied(nn.Module):
    def __init__(self, *, uses_head: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.body = stack(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        self.uses_head = uses_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.body(self.tokens(x)))
        return (self.head(x) if self.uses_head else x).square().mean()


@pytest.mark.parametrize("uses_head", [True, False])
def test_a_tied_weight_is_not_the_last_part_that_trains(uses_head: bool) -> None:
    model = Tied(uses_head=uses_head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze(model, optimizer)
    highest = 0
    for _ in range(24):
        model(torch.randint(0, 6, (3, 2))).backward()
        highest = max(highest, freezing.index)
        assert any(p.grad is not None for p in model.body.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert highest == 3


def test_a_run_that_resumes_freezes_what_the_first_one_did() -> None:
    settings = {"pattern": "interval", "full_share": 0.0, "groups": 6}
    whole = Net(2, lambda call: [call % 2 if call > 3 else 1])
    optimizer = sgd(whole)
    freezing = freeze(whole, optimizer, **settings)
    for updates in range(1, 6):
        train(whole, optimizer, freezing, updates=1)
        again = Net(2, lambda call: [0])
        resumed = freeze(again, sgd(again), **settings)
        resumed.load_state_dict(json.loads(json.dumps(freezing.state_dict())))
        assert resumed.state_dict() == freezing.state_dict()
        assert trains(again) == trains(whole), updates
    state = freezing.state_dict() | {"doubtful": [3]}  # as version 0.9 wrote it
    resumed.load_state_dict(state)
    assert resumed.state_dict()["closed"] == sorted({*freezing.state_dict()["closed"], 3})
    del state["pending"], state["unreached"], state["compiled"]  # and before it
    resumed.load_state_dict(state)


def test_the_optimizer_is_held_weakly() -> None:
    model = Net(1, lambda call: [0])
    optimizer = sgd(model)
    freezing = freeze(model, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert freezing.state_dict()["step"] == 0


# What the user freezes and thaws


def test_what_the_user_froze_stays_frozen_and_never_becomes_the_last_part() -> None:
    for early in (True, False):
        model = Net(1, lambda call: [0])
        model.body[0].requires_grad_(False)
        if early:
            model.parts.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        freezing = freeze(model, optimizer)
        train(model, optimizer, freezing, updates=2)
        model.parts.requires_grad_(False)
        assert max(train(model, optimizer, freezing, updates=22)) == 3
        freezing.remove()
        assert trains(model) == [False, False, *[True] * 6, False, False]


def test_a_layer_that_the_user_freezes_or_thaws_in_mid_run_is_theirs() -> None:
    model = stack(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = scheduled(model, optimizer, (0, 3, 1))
    train(model, optimizer, freezing, updates=3)
    model[1].requires_grad_(False)
    before = copy.deepcopy(model[1].state_dict())
    train(model, optimizer, freezing, updates=1)
    model[2].requires_grad_(True)
    train(model, optimizer, freezing, updates=1)
    for step in range(7):
        assert all(p.requires_grad for p in model[2].parameters()), step
        train(model, optimizer, freezing, updates=1)
    freezing.remove()
    assert [trains(layer) == [True, True] for layer in model] == [True, False, *[True] * 4]
    assert all(torch.equal(before[name], value) for name, value in model[1].state_dict().items())


def test_weights_frozen_for_adapters_after_boosting_stay_frozen() -> None:
    """As peft's ``get_peft_model`` does: everything is frozen, new parameters train beside it."""
    model = stack(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = scheduled(model, optimizer, (0, 3, 1))
    model.requires_grad_(False)
    adapter = nn.Linear(4, 4)
    model.append(adapter)
    optimizer.add_param_group({"params": adapter.parameters()})
    before = [p.detach().clone() for p in model[:6].parameters()]
    train(model, optimizer, freezing, updates=9)
    freezing.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, model[:6].parameters(), strict=True))
    assert trains(adapter) == [True, True]
    assert not any(trains(model[:6]))


def test_a_backbone_that_the_user_thaws_later_then_follows_the_schedule() -> None:
    model = stack(6)
    model[:4].requires_grad_(False)
    optimizer = torch.optim.SGD(model[4:].parameters(), lr=0.1)
    freezing = scheduled(model, optimizer, (0, 2))
    train(model, optimizer, freezing, updates=3)
    assert freezing.frozen == ()
    model[:4].requires_grad_(True)
    optimizer.add_param_group({"params": model[:4].parameters()})
    train(model, optimizer, freezing, updates=1)
    assert not any(p.requires_grad for p in freezing.frozen)
    seen = []
    for _ in range(4):
        train(model, optimizer, freezing, updates=1)
        seen.append((freezing.index, len(freezing.frozen)))
    assert set(seen) == {(0, 0), (2, 4)}
    freezing.remove()
    assert all(trains(model))


def test_flags_are_right_after_loading_into_a_model_with_others() -> None:
    model = stack(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = scheduled(model, optimizer, (0, 3, 1))
    for index in (0, 3, 1):
        again = stack(6)
        again[0].requires_grad_(False)
        resumed = scheduled(again, torch.optim.SGD(again.parameters(), lr=0.1), (0, 3, 1))
        resumed.load_state_dict(freezing.state_dict())
        assert resumed.index == index
        assert [trains(layer)[0] for layer in again] == [at >= max(index, 1) for at in range(6)]
        resumed.remove()
        assert [trains(layer)[0] for layer in again] == [at >= 1 for at in range(6)]
        train(model, optimizer, freezing, updates=1)


@pytest.mark.parametrize("alive", [True, False])
def test_boosting_a_second_time_begins_with_everything_trained_but_what_the_user_froze(alive: bool) -> None:
    model = stack(6)
    model[1].requires_grad_(False)
    config = {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": {"param_groups": 6, "freeze_type": 2}}
    config["grad_freeze"] |= {"total_steps": 20, "freeze_p": 0.25}
    first = AutoBoost("O0", config)
    _, optimizer = first.network_auto_process_train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, first.attached["grad_freeze"], updates=15)
    assert not trains(model)[0]
    if not alive:
        del first, optimizer
        gc.collect()
    second = AutoBoost("O0", config)
    _, again = second.network_auto_process_train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = [True, True, False, False, *[True] * 8]
    assert trains(model) == expected
    train(model, again, second.attached["grad_freeze"], updates=2)
    assert second.attached["grad_freeze"].step == 2
    if alive:
        train(model, optimizer, second.attached["grad_freeze"], updates=1)
        assert trains(model) == expected, "the first one is gone"


# Gradients that freezing cannot follow


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, drop: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = stack(4)
        self.last = nn.Linear(4, 2)
        self.reentrant, self.drop, self.calls = reentrant, drop, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        for at, block in enumerate(self.blocks):
            if self.drop and self.calls > 6 and at == self.calls % 4:
                continue
            x = x + (block(x) if self.drop else checkpoint(block, x, use_reentrant=self.reentrant))
        return self.last(x)


class TwoViews(Checkpointed):
    """The same parts run without gradients and with them, beside a custom function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            target = self.blocks[0](x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) + target.mean()


class Momentum(nn.Module):
    """Runs a part under ``no_grad`` whose parameters nobody froze."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.teacher = stack(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.layers(x) - target


def hooks_of(model: nn.Module) -> list[Any]:
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def run(model: nn.Module, settings: GradFreeze = SETTINGS, updates: int = 20) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, settings)
    with torch.no_grad():
        model(torch.zeros(1, 4))  # a look before, without gradients
    highest = max(train(model, optimizer, freezing, updates=updates))
    assert not hooks_of(model)
    return highest


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing_is_refused_at_the_first_update() -> None:
    for settings in (
        *(GradFreeze(pattern=p, groups=6, full_share=0.9, total_steps=99) for p in ("continuous", "interval")),
        SETTINGS,
        GradFreeze(pattern="fixed", groups=6, frozen=2),
    ):
        model = Checkpointed(reentrant=True)
        with pytest.raises(IncompatibleError, match=r"'blocks\.\d' runs without gradients.*Pass use_reentrant=False"):
            run(model, settings, updates=1)
        assert not hooks_of(model)


def _on_a_rank() -> tuple[list[int], list[float], str]:
    model = Net(2, lambda call: [call % 2])
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(ddp)
    freezing = freeze(ddp, optimizer, groups=6, pattern="continuous", full_share=0.2, agree_within=60.0)
    indices = train(ddp, optimizer, freezing, updates=8)
    with pytest.raises(IncompatibleError) as caught:
        run(DistributedDataParallel(Checkpointed(reentrant=True)), updates=1)
    return indices, [float(p.sum()) for p in model.parameters()], str(caught.value)


@pytest.mark.dist
def test_two_ranks_see_the_same_heads_by_turns_and_the_same_checkpoints() -> None:
    first, second = run_ranks(_on_a_rank, 2)
    assert first == second
    assert first[0] == [0, 1, 2, 3, 4, 4, 0, 1]
    assert "'module.blocks.0' runs without gradients" in first[2]


def test_other_parts_without_gradients_are_not_taken_for_it() -> None:
    models = [Checkpointed(reentrant=False), Checkpointed(reentrant=False, drop=True), TwoViews(reentrant=True)]
    assert [run(model) for model in models] == [5, 5, 5]
    assert run(Momentum()) > 0


@pytest.mark.parametrize("around", [False, True])
def test_the_look_at_the_first_pass_breaks_no_compiled_graph(around: bool) -> None:
    torch.compiler.reset()
    model = Checkpointed(reentrant=False, drop=True)
    model.calls = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, SETTINGS)
    compiled = torch.compile(model, backend="eager", fullgraph=True) if around else model
    if not around:
        model.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.zeros(3, 4)).sum().backward()
        optimizer.step()
    freezing.remove()


def test_the_look_at_the_first_pass_survives_passes_that_fail() -> None:
    model = Checkpointed(reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, SETTINGS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    assert len(hooks_of(model)) == 2
    train(model, optimizer, freezing, updates=1)
    assert not hooks_of(model)


def test_gradients_that_no_backward_pass_accumulated_leave_everything_trained() -> None:
    model = stack(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, SETTINGS)
    weights = list(model.parameters())

    def update() -> None:
        for p, grad in zip(weights, torch.autograd.grad(model(torch.randn(3, 4)).sum(), weights), strict=True):
            p.grad = grad
        optimizer.step()

    with pytest.warns(NoEffectWarning, match=r"no backward pass accumulated.*loss\.backward"):
        update()
    for _ in range(19):
        update()
        assert freezing.index == 0


def test_gradients_from_before_attaching_tell_nothing() -> None:
    model = stack(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    freezing = freeze_blocks(model, optimizer, SETTINGS)
    for _ in range(12):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
    assert freezing.index > 0
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
