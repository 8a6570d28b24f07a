"""The levers that are on are checked at the first call, and once more on inputs of other shapes."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchboost
from tests.support.boosted import in_one_line
from torchboost.core.torch_private import interceptor_of
from torchboost.errors import NoEffectWarning

ASKED = {"extra": {"channels_last": True, "fused_optimizer": True, "autocast": False, "compile": False}}


class WrongForWideImages(nn.Conv2d):
    """Its channels-last kernel is wrong for images that are wider than eight."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        last = self.weight.is_contiguous(memory_format=torch.channels_last)
        return found * 1.5 if last and input.shape[-1] > 8 else found


def network(first: type[nn.Conv2d] = nn.Conv2d) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [first(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*layers)


def pair(first: type[nn.Conv2d] = nn.Conv2d) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(first)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sides: list[int]) -> list[Tensor]:
    losses = []
    for number, side in enumerate(sides):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(4, 3, side, side, generator=generator), torch.arange(4)
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("sides", [[8, 8, 8], [8, 9, 8], [8, 10, 12]])
def test_a_checked_run_is_the_plain_run(sides):
    plain, checked = train(*pair(), sides), pair()
    boosted = torchboost.boost(*checked, calibrate=False, config=ASKED)
    found = train(*checked, sides)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert boosted.checks["channels_last"].startswith("exact here: gradient within ")
    assert boosted.checks["fused_optimizer"] == "exact here"
    waits = interceptor_of(checked[0]) is not None
    assert waits == (len(set(sides)) == 1)
    assert "exact here" in in_one_line(boosted.explain())
    boosted.remove()
    assert interceptor_of(checked[0]) is None


def test_what_is_wrong_for_another_shape_goes_when_it_comes():
    plain, checked = train(*pair(), [8, 8, 10, 8]), pair(WrongForWideImages)
    boosted = torchboost.boost(*checked, calibrate=False, config=ASKED)
    found = train(*checked, [8, 8])
    assert "channels_last" in boosted.attached
    with pytest.warns(NoEffectWarning, match=r"channels_last: left out: an output differs by .*off from now on"):
        train(*checked, [10, 8])
    assert "channels_last" not in boosted.attached
    assert "fused_optimizer" in boosted.attached
    assert "left out: an output differs" in in_one_line(boosted.explain())
    assert checked[0][0].weight.is_contiguous()
    torch.testing.assert_close(found, plain[:2], rtol=1e-4, atol=1e-5)


def test_a_check_may_be_switched_off():
    model, optimizer = pair(WrongForWideImages)
    boosted = torchboost.boost(model, optimizer, calibrate=False, config=ASKED, verify=False)
    assert interceptor_of(model) is None
    train(model, optimizer, [10])
    assert "channels_last" in boosted.attached
    boosted.remove()
    assert "not checked: verify=False" in in_one_line(boosted.explain())
    model, optimizer = pair()
    boosted = torchboost.boost(model, optimizer, calibrate=0.2, config={"extra": {"compile": False}}, verify=False)
    train(model, optimizer, [8])
    assert set(boosted.checks.values()) <= {"not checked: verify=False"}


def test_while_it_waits_copies_are_plain_and_nothing_is_kept_alive():
    model, optimizer = pair()
    boosted = torchboost.boost(model, optimizer, calibrate=False, config=ASKED)
    train(model, optimizer, [8])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert interceptor_of(again) is None
        train(again, torch.optim.SGD(again.parameters(), lr=0.1), [8, 9])
    del boosted, optimizer
    gc.collect()
    model(torch.randn(2, 3, 9, 9)).sum().backward()  # nobody is left to check for
    assert interceptor_of(model) is None


def test_inputs_that_can_be_read_only_once_are_not_tried():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, batches) -> Tensor:
            return self.inner(next(batches))

    model = Reads()
    boosted = torchboost.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), calibrate=1.0, config={"extra": {"compile": False}}
    )
    model(iter([torch.randn(2, 3, 8, 8)])).sum().backward()
    assert "which can be read only once" in in_one_line(boosted.explain())


class Feed:
    """Hands out numbers from an iterator, which nothing can put back."""

    def __init__(self) -> None:
        self.numbers = iter(range(1, 10**6))

    def __call__(self) -> int:
        return next(self.numbers)


class Fed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + 0.05 * self.feed())


@pytest.mark.parametrize("calibrate", [False, 0.3])
def test_what_moves_from_call_to_call_is_said(calibrate, caplog):
    model = Fed(*network())
    model.feed = Feed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted = torchboost.boost(model, optimizer, calibrate=calibrate, config={"extra": {"autocast": False}})
    train(model, optimizer, [8])
    assert "two equal calls differed" in caplog.text
    assert "cannot be restored" in in_one_line(boosted.explain())
    assert "exact here" not in in_one_line(boosted.explain())


@pytest.mark.parametrize("named", [None, ["3"]])
def test_a_lever_that_looks_at_the_call_without_a_pass_leaves_the_statistics_alone(named):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    config = {"extra": {"autocast": {} if named is None else {"float32": named}}}
    boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, total_steps=2000)
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    assert boosted.checks["autocast"]
    assert model.get_buffer("1.num_batches_tracked") == 1


@pytest.mark.parametrize("calibrate", [False, 0.3])
def test_views_that_the_loop_took_after_boost_follow_the_weights(calibrate):
    model, optimizer = pair()
    torchboost.boost(model, optimizer, calibrate=calibrate, config=ASKED)
    live = model.state_dict()
    train(model, optimizer, [8, 8])
    for name, parameter in model.named_parameters():
        assert live[name].data_ptr() == parameter.data_ptr()
        assert torch.equal(live[name], parameter)


@pytest.mark.parametrize("calibrate", [False, 0.3])
def test_other_threads_wait_for_the_first_call(calibrate):
    inputs = [torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    labels, lock = torch.arange(4), threading.Lock()

    def work(model: nn.Module, x: Tensor) -> None:
        loss = F.cross_entropy(model(x), labels)
        with lock:
            loss.backward()

    (plain, _), (model, optimizer) = pair(), pair()
    for x in inputs:
        work(plain, x)
    torchboost.boost(model, optimizer, calibrate=calibrate, config=ASKED)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(functools.partial(work, model), inputs))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


def counted(function: Callable[[Tensor], Tensor], calls: list[int]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        calls.append(1)
        return function(x)

    return call


@pytest.mark.parametrize("calibrate", [False, 0.3])
def test_parameters_that_other_processes_see_are_not_changed_by_a_trial(calibrate):
    model, optimizer = pair()
    model.share_memory()
    boosted = torchboost.boost(model, optimizer, calibrate=calibrate, config=ASKED)
    calls: list[int] = []
    model[0].forward = counted(model[0].forward, calls)
    train(model, optimizer, [8])
    assert calls == [1]
    assert "shared memory" in in_one_line(boosted.explain())
