import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchboost.algorithms.grad_freeze.algorithm import BlockFreeze, freeze_blocks
from torchboost.algorithms.grad_freeze.freezer import Freezing


def stack(count: int, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


class Net(nn.Module):
    """A body and parts behind it; ``use`` says which of these the loss goes through."""

    def __init__(self, parts: int, use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = stack(4)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(parts))
        self.use = use
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.body(x))
        outputs = [self.parts[at](x) for at in self.use(self.calls)]
        return sum(output.square().mean() for output in outputs) if outputs else x.square().mean()


def freeze(model, optimizer, groups: int = 10, **more) -> Freezing:
    settings = {"pattern": "progressive", "full_share": 0.25, "total_steps": 24} | more
    return freeze_blocks(model, optimizer, BlockFreeze(groups=groups, **settings))


def train(model, optimizer, freezing, *, updates: int = 24, set_to_none: bool = True) -> list[int]:
    """Train; every update must move something."""
    indices = []
    for step in range(updates):
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).backward()
        indices.append(freezing.index)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return indices


@pytest.mark.parametrize(
    ("parts", "use"),
    [
        (3, lambda call: []),  # nothing behind the body is used
        (3, lambda call: [0]),  # the last two are not
        (2, lambda call: [call % 2]),  # heads by turns
        (2, lambda call: [0, 1]),  # two outputs
    ],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_something_that_the_loss_uses_trains_to_the_end(parts, use, set_to_none):
    model = Net(parts, use)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    indices = train(model, optimizer, freeze(model, optimizer), set_to_none=set_to_none)
    assert indices == sorted(indices)
    assert indices[-1] > 0


def test_the_last_group_is_the_last_one_that_every_update_reaches():
    model = Net(3, lambda call: [0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert max(train(model, optimizer, freeze(model, optimizer, groups=7))) == 4
    model = Net(2, lambda call: [call % 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert max(train(model, optimizer, freeze(model, optimizer, groups=6))) == 4


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(
    "more", [{"pattern": "interval", "full_share": 0.0}, {"pattern": "continuous", "full_share": 0.2}]
)
def test_heads_by_turns_may_be_frozen_from_the_second_update_on(heads, direction, more):
    for seed in range(8):
        model = Net(heads, lambda call: [direction * call % heads])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = BlockFreeze(groups=4 + heads, total_steps=24, **more)
        freezing = freeze_blocks(model, optimizer, settings, seed=seed)
        indices = train(model, optimizer, freezing)
        assert any(indices[1:4])
        assert max(indices[heads:]) == 4  # as soon as all have been seen


def _heads_by_turns_on_ranks() -> tuple[list[int], list[float]]:
    model = Net(2, lambda call: [call % 2])
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    settings = BlockFreeze(groups=6, pattern="continuous", full_share=0.2, agree_within=60.0)
    indices = train(ddp, optimizer, freeze_blocks(ddp, optimizer, settings), updates=8)
    return indices, [float(p.sum()) for p in model.parameters()]


@pytest.mark.dist
def test_heads_by_turns_on_two_ranks():
    first, second = run_ranks(_heads_by_turns_on_ranks, 2)
    assert first == second
    assert first[0] == [0, 1, 2, 3, 4, 4, 0, 1]


def same(found, wanted) -> bool:
    return list(map(id, found)) == list(map(id, wanted))


def test_a_part_that_was_left_out_of_the_losses_trains_until_it_gets_a_gradient():
    model = Net(3, lambda call: [0, 2] if call > 3 else [2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, BlockFreeze(groups=7, pattern="fixed", frozen=0))
    unused, unseen = list(model.parts[1].parameters()), list(model.parts[0].parameters())
    train(model, optimizer, freezing, updates=1)
    freezing.freeze(6)
    assert same(freezing.frozen, model.body.parameters())
    model(torch.ones(3, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    freezing.freeze(6)
    model.calls = 3
    model(torch.ones(3, 4)).backward()
    assert all(p.grad is not None for p in unseen)
    optimizer.step()
    freezing.freeze(6)
    assert same(freezing.frozen, [*model.body.parameters(), *unseen])
    assert all(p.requires_grad for p in unused)


def test_norms_of_a_part_that_still_trains_are_left_alone():
    model = Net(2, lambda call: [call % 2])
    model.parts[0] = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    model.body[1] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norms = [model.body[1][1], model.parts[0][1]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, BlockFreeze(groups=9, pattern="fixed", frozen=0, norms="eval"))
    last = len(freezing._prefixes) - 1
    for step in range(4):
        freezing.freeze(last if step else 0)
        model(torch.randn(3, 4)).backward()
        assert [norm.training for norm in norms] == ([True, True] if step == 0 else [False, True])
        optimizer.step()
        optimizer.zero_grad()


def test_what_the_user_froze_at_the_end_never_becomes_the_last_part():
    model = Net(1, lambda call: [0])
    model.parts.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert max(train(model, optimizer, freeze(model, optimizer))) == 3
    later = Net(1, lambda call: [0])
    optimizer = torch.optim.SGD(later.parameters(), lr=0.1)
    freezing = freeze(later, optimizer)
    train(later, optimizer, freezing, updates=2)
    later.parts.requires_grad_(False)
    assert max(train(later, optimizer, freezing, updates=22)) == 3


def test_parameters_of_another_optimizer_are_neither_frozen_nor_counted():
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
        torch.manual_seed(0)
        self.tokens = nn.Embedding(6, 4)
        self.body = stack(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        self.uses_head = uses_head

    def forward(self, x):
        x = torch.tanh(self.body(self.tokens(x)))
        return (self.head(x) if self.uses_head else x).square().mean()


@pytest.mark.parametrize("uses_head", [True, False])
def test_a_tied_weight_counts_only_for_uses_that_are_not_cut_off(uses_head):
    model = Tied(uses_head=uses_head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze(model, optimizer)
    highest = 0
    for _ in range(24):
        model(torch.randint(0, 6, (3, 2))).backward()
        highest = max(highest, freezing.index)
        assert any(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert highest == (4 if uses_head else 3)


def test_what_was_seen_is_part_of_the_checkpoint():
    model = Net(3, lambda call: [0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze(model, optimizer)
    train(model, optimizer, freezing, updates=20)
    other = Net(3, lambda call: [0])
    resumed = freeze(other, torch.optim.SGD(other.parameters(), lr=0.1))
    resumed.load_state_dict(freezing.state_dict())
    assert resumed.index == freezing.index > 0


def test_a_run_that_resumes_freezes_what_the_first_one_did():
    settings = {"pattern": "interval", "full_share": 0.0, "groups": 6}
    whole = Net(2, lambda call: [call % 2 if call > 3 else 1])
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    freezing = freeze(whole, optimizer, **settings)
    for updates in range(1, 6):
        train(whole, optimizer, freezing, updates=1)
        again = Net(2, lambda call: [0])
        resumed = freeze(again, torch.optim.SGD(again.parameters(), lr=0.1), **settings)
        resumed.load_state_dict(freezing.state_dict())
        assert resumed.state_dict() == freezing.state_dict()
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in whole.parameters()], updates


def test_the_optimizer_is_held_weakly():
    model = Net(1, lambda call: [0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze(model, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert freezing.state_dict()["step"] == 0
