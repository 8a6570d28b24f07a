import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchboost import IncompatibleError, NoEffectWarning
from torchboost.algorithms.freeze import BlockFreeze, freeze_blocks

SETTINGS = BlockFreeze(pattern="progressive", groups=6, full_share=0.25, total_steps=20)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, drop: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.last = nn.Linear(4, 2)
        self.reentrant, self.drop, self.calls = reentrant, drop, 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        for at, block in enumerate(self.blocks):
            if self.drop and self.calls > 6 and at == self.calls % 4:
                continue
            x = x + (block(x) if self.drop else checkpoint(block, x, use_reentrant=self.reentrant))
        return self.last(x)


def run(model, *, settings=SETTINGS, updates: int = 20, set_to_none: bool = True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, settings)
    highest = 0
    for step in range(updates):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        highest = max(highest, freezing.index)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.no_grad():
            model(torch.zeros(1, 4))  # a look in between, without gradients
    return highest


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("settings", [SETTINGS, BlockFreeze(pattern="fixed", groups=6, frozen=2)])
def test_reentrant_checkpointing_behind_the_frozen_part_is_refused(settings, set_to_none):
    with pytest.raises(IncompatibleError, match=r"'blocks\.\d' runs without gradients.*Pass use_reentrant=False"):
        run(Checkpointed(reentrant=True), settings=settings, set_to_none=set_to_none)


def test_checkpointing_without_reentry_is_fine():
    assert run(Checkpointed(reentrant=False)) == 5


def test_blocks_that_a_pass_leaves_out_are_not_taken_for_it():
    assert run(Checkpointed(reentrant=False, drop=True)) > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing_of_inputs_that_require_gradients_is_fine():
    model = Checkpointed(reentrant=True)
    model.first.register_forward_hook(
        lambda module, args, output: output.requires_grad_() if torch.is_grad_enabled() else output
    )
    assert run(model) == 5


class Momentum(nn.Module):
    """Runs a part under ``no_grad`` whose parameters nobody froze."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.teacher = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.layers(x) - target


def test_a_part_that_never_has_gradients_is_not_taken_for_it():
    assert run(Momentum()) > 0


def test_gradients_that_no_backward_pass_accumulated_leave_everything_trained():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
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


def test_gradients_from_before_attaching_tell_nothing():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    freezing = freeze_blocks(model, optimizer, SETTINGS)
    for _ in range(12):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
    assert freezing.index > 0
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
