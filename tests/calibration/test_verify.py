"""Levers that are right stay, and the one that is wrong goes with the number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchboost.algorithms import Autocast, ChannelsLast, Compile, FusedOptimizer
from torchboost.calibration.certificate import verified
from torchboost.calibration.passes import on_real_inputs
from torchboost.core.algorithm import Algorithm, Attachment, Target


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))


def checked(levers: list[Algorithm], model: nn.Module | None = None, optimizer: Any = None) -> dict[str, str]:
    """Return what is said of each lever."""
    model = network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    with on_real_inputs(Target(model, optimizer), ((torch.randn(4, 3, 8, 8),), {})) as passes:
        verdicts = verified(levers, passes, [optimizer])
        assert not passes.snapshot.restore()
    return {verdict.lever: verdict.reason for verdict in verdicts if verdict.kept != verdict.reason.startswith("left")}


def kept(texts: dict[str, str]) -> set[str]:
    return {name for name, text in texts.items() if not text.startswith("left out")}


class WrongFormat(ChannelsLast):
    """A lever of this name whose convolution is wrong."""

    def attach(self, target: Target) -> Attachment:
        return Attachment(target.model[4].register_forward_hook(lambda *c: c[2] * 1.01))


class Raises(ChannelsLast):
    def attach(self, target: Target) -> Attachment:
        raise RuntimeError("planted")


@dataclass(frozen=True, kw_only=True)
class WrongUpdate(Algorithm):
    name: ClassVar[str] = "fused_optimizer"

    def attach(self, target: Target) -> Attachment:
        def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1e-2)

        return Attachment(target.optimizer.register_step_post_hook(spoil))


def test_right_levers_stay_and_say_how_far_they_are():
    found = checked([Autocast(), ChannelsLast(), FusedOptimizer()])
    assert kept(found) == {"autocast", "channels_last", "fused_optimizer"}
    assert found["channels_last"].startswith("exact here: gradient")
    assert found["fused_optimizer"] == "exact here"
    assert found["autocast"].startswith("checked: the gradient differs by")


def test_the_wrong_one_goes_and_the_others_stay():
    found = checked([Autocast(), WrongFormat(), FusedOptimizer()])
    assert kept(found) == {"autocast", "fused_optimizer"}
    assert found["channels_last"].startswith("left out: an output differs by")
    found = checked([Autocast(), Raises()])
    assert sorted(kept(found)) == ["autocast"]
    assert found["channels_last"] == "left out: it raised RuntimeError: planted"


def test_a_wrong_update_goes_and_a_first_rate_of_0_hides_nothing():
    model = network()
    for rate in (1e-3, 0.0, torch.tensor(0.0)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        found = checked([ChannelsLast(), WrongUpdate()], model, optimizer)
        assert sorted(kept(found)) == ["channels_last"]
        assert found["fused_optimizer"].startswith("left out: its update differs by")


def test_an_optimizer_that_cannot_be_copied_is_said():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["lock"] = (each for each in ())  # generators cannot be copied
    found = checked([FusedOptimizer()], model, optimizer)
    assert sorted(kept(found)) == ["fused_optimizer"]
    assert found["fused_optimizer"].startswith("not checked: TypeError")


def test_compiled_code_that_draws_other_numbers_is_not_compared():
    class Noisy(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + torch.randn(input.shape))

    model = Noisy(*network())
    found = checked([Compile(backend="eager"), ChannelsLast()], model)
    assert kept(found) == {"compile", "channels_last"}
    assert found["compile"] == "not checked: it draws other random numbers"


class KeepsItsWrites(ChannelsLast):
    """Hands the model a copy of its input, as compiled code in another memory format does."""

    def attach(self, target: Target) -> Attachment:
        return Attachment(target.model.register_forward_pre_hook(lambda _, args: tuple(x.clone() for x in args)))


def test_a_write_into_an_input_that_does_not_reach_the_loop_is_found():
    found = checked([KeepsItsWrites()], nn.Sequential(nn.ReLU(inplace=True), *network()))
    assert "an output differs by" in found["channels_last"]
    assert kept(checked([KeepsItsWrites()])) == {"channels_last"}
    assert kept(checked([ChannelsLast()], nn.Sequential(nn.ReLU(inplace=True), *network()))) == {"channels_last"}


def test_compiled_code_that_keeps_writes_in_its_copy_is_found():
    levers = [ChannelsLast(), Compile(backend="aot_eager")]
    found = checked(levers, nn.Sequential(nn.ReLU(inplace=True), *network()))
    assert kept(found) != {"channels_last", "compile"}
    assert kept(checked(levers)) == {"channels_last", "compile"}
