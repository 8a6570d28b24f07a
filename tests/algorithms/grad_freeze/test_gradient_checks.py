import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_ranks
from torchboost import IncompatibleError, NoEffectWarning
from torchboost.algorithms.grad_freeze.algorithm import BlockFreeze, freeze_blocks

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
        run(Checkpointed(reentrant=True), settings=settings, set_to_none=set_to_none, updates=1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("pattern", ["continuous", "interval", "progressive"])
def test_reentrant_checkpointing_is_refused_at_the_first_update(pattern):
    model = Checkpointed(reentrant=True)
    said = r"will be frozen, its inputs.*would get none then.*use_reentrant=False"
    with pytest.raises(IncompatibleError, match=said):
        run(model, settings=BlockFreeze(pattern=pattern, groups=6, full_share=0.9, total_steps=99), updates=1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("around", [False, True])
def test_the_look_at_the_first_pass_breaks_no_compiled_graph(around):
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


def _refused_on_a_rank() -> str:
    model = DistributedDataParallel(Checkpointed(reentrant=True))
    with pytest.raises(IncompatibleError) as caught:
        run(model, updates=1)
    return str(caught.value)


@pytest.mark.dist
def test_reentrant_checkpointing_is_refused_on_all_ranks():
    first, second = run_ranks(_refused_on_a_rank, 2)
    assert first == second
    assert "'module.blocks.0' runs without gradients" in first


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_part_of_another_implementation_is_refused_when_it_loses_its_gradients(monkeypatch):
    monkeypatch.setattr("torchboost.core.torch_private.CheckpointFunction", object)
    with pytest.raises(IncompatibleError, match=r"are frozen, its inputs.*got none in this update"):
        run(Checkpointed(reentrant=True))


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


class Dummy(Checkpointed):
    """A further input of each checkpointed part requires a gradient."""

    def forward(self, x):
        x = self.first(x)
        dummy = torch.zeros((), requires_grad=True)
        for block in self.blocks:
            x = x + checkpoint(lambda x, _, block=block: block(x), x, dummy, use_reentrant=True)
        return self.last(x)


class Asks(Checkpointed):
    """Inner values are made to require gradients."""

    def forward(self, x):
        x = self.first(x)
        if torch.is_grad_enabled():
            x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.last(x)


class TwoViews(Checkpointed):
    """The same parts run without gradients and with them, beside a custom function."""

    def forward(self, x):
        x = Twice.apply(self.first(x))
        with torch.no_grad():
            target = self.blocks[0](x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) + target.mean()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("kind", [Asks, TwoViews])
def test_parts_that_keep_their_gradients_are_fine(kind):
    assert run(kind(reentrant=True)) == 5


def test_a_further_input_that_requires_gradients_tells_nothing():
    assert run(Dummy(reentrant=True), updates=2) == 0


def test_the_look_at_the_first_pass_survives_passes_that_fail_and_leaves_nothing_behind():
    model = Checkpointed(reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezing = freeze_blocks(model, optimizer, SETTINGS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    assert torch.overrides._len_torch_function_stack() == 0
    model(torch.zeros(3, 4)).sum().backward()
    assert torch.overrides._len_torch_function_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    freezing.remove()


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
