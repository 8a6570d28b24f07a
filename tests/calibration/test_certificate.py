"""What a comparison says, against which bound, and which levers may stay."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from torchboost.algorithms import Autocast, ChannelsLast, Compile, FusedOptimizer
from torchboost.calibration import certificate as module
from torchboost.calibration.certificate import Certificate, Finding, allowed, verified
from torchboost.calibration.passes import Passes, on_real_inputs
from torchboost.calibration.snapshot import Snapshot
from torchboost.core.algorithm import Algorithm, Attachment, Target
from torchboost.optim import MixedOptimizer


@dataclass(frozen=True, kw_only=True)
class Off(Algorithm):
    """Multiplies what a layer returns by a number."""

    name: ClassVar[str] = "channels_last"

    by: Any
    layer: int = 0

    def attach(self, target: Target) -> Attachment:
        return Attachment(target.model[self.layer].register_forward_hook(lambda *c: c[2] * self.by))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


def certificate(model: nn.Module, x: Tensor | None = None) -> Certificate:
    call = (torch.randn(16, 8) if x is None else x,), {}
    snapshot = Snapshot(model, call)
    return Certificate(Passes(model, call, snapshot))


def test_equal_passes_agree_and_the_model_stays():
    model = network()
    weights = [p.detach().clone() for p in model.parameters()]
    found = certificate(model).check([])
    assert found == type(found)(reason="", gradient=0.0, outputs=0.0)
    assert all(map(torch.equal, weights, model.parameters()))


def test_what_is_off_is_named_with_its_size():
    made = certificate(network())
    for by, said in ((1.01, "an output differs by 1.0e-02"), (float("nan"), "an output differs by inf")):
        assert said in made.check([Off(by=by, layer=3)]).reason


def test_a_gradient_is_named_by_its_parameter():
    @dataclass(frozen=True, kw_only=True)
    class WrongGradient(Algorithm):
        name: ClassVar[str] = "channels_last"

        def attach(self, target: Target) -> Attachment:
            return Attachment(target.model[3].weight.register_hook(lambda gradient: gradient * 1.01))

    assert certificate(network()).check([WrongGradient()]).reason == (
        "the gradient of 3.weight differs by 1.0e-02 of its size"
    )


def test_lower_precision_has_its_own_bound():
    made = certificate(network())
    assert made.check([Autocast()]).reason
    found = made.check([Autocast()], rounding=2**-8)
    assert found.reason == ""
    assert 1e-4 < found.gradient < 0.1
    assert made.check([Off(by=3.0)], rounding=2**-8).reason
    exact, tf32, bfloat16 = (allowed(0.0, 1.0, None, rounding=size) for size in (0.0, 2**-11, 2**-8))
    assert exact < tf32 < bfloat16


@dataclass(frozen=True, kw_only=True)
class RoundedFactors(Algorithm):
    """Rounds the factors of every product, forward and backward, as a GPU does in TF32."""

    name: ClassVar[str] = "matmul_precision"

    bits: int = 10

    def attach(self, target: Target) -> Attachment:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return round_(x) @ round_(weight).t() + bias

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                x, weight = ctx.saved_tensors
                g = round_(gradients[0])
                return g @ round_(weight), g.t() @ round_(x), gradients[0].sum(0)

        def round_(tensor: Tensor) -> Tensor:
            mantissa, exponent = tensor.frexp()
            return torch.ldexp((mantissa * 2 ** (self.bits + 1)).round() / 2 ** (self.bits + 1), exponent)

        layers = [layer for layer in target.model.modules() if isinstance(layer, nn.Linear)]
        hooks = [
            layer.register_forward_hook(lambda m, args, out: Product.apply(args[0], m.weight, m.bias))
            for layer in layers
        ]
        return Attachment(*hooks)


def test_tf32_is_within_its_bound_and_a_worse_precision_is_not():
    made = certificate(network())
    assert made.check([RoundedFactors()]).reason, "TF32 counts as exact"
    found = made.check([RoundedFactors()], rounding=2**-11)
    assert found.reason == ""
    assert 1e-5 < found.gradient < 1e-2
    assert made.check([RoundedFactors(bits=3)], rounding=2**-11).reason
    assert made.check([Off(by=1.1)], rounding=2**-11).reason


def test_the_program_may_have_set_the_precision_of_one_backend():
    """Torch then refuses to name one precision for all."""
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        backend.matmul.fp32_precision = "tf32"
        try:
            assert certificate(network()).check([]).reason == ""
        finally:
            backend.matmul.fp32_precision = "none"


def test_other_shapes_and_missing_gradients_are_said():
    @dataclass(frozen=True, kw_only=True)
    class Cuts(Algorithm):
        name: ClassVar[str] = "channels_last"

        detach: bool

        def attach(self, target: Target) -> Attachment:
            change = (lambda out: out.detach()) if self.detach else (lambda out: out[:, :1])
            return Attachment(target.model[0 if self.detach else 3].register_forward_hook(lambda *c: change(c[2])))

    made = certificate(network())
    assert made.check([Cuts(detach=True)]).reason == "other parameters have a gradient"
    assert made.check([Cuts(detach=False)]).reason == "the outputs have other shapes"


def test_a_loss_that_is_no_number_may_stay_none():
    x = torch.randn(16, 8)
    x[0] = float("nan")
    assert certificate(network(), x).check([]).reason == ""


def test_the_precision_of_the_plain_pass_counts():
    """A model that computes in bfloat16 itself rounds by more."""

    class Lower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def __getitem__(self, index: int) -> nn.Module:
            return self.net[index]

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    assert certificate(Lower()).check([Off(by=1.002)]).reason == ""
    assert certificate(network()).check([Off(by=1.002)]).reason


def test_dropout_is_compared_at_zero_and_other_draws_are_noticed():
    assert not certificate(network()).is_random

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + torch.randn(x.shape))

    assert certificate(Noisy()).is_random


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only the allocator of glibc fills memory")
def test_memory_that_is_handed_out_holds_large_numbers():
    with module._dirty_memory():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for size in (1, 7, 100, 5000, 300_000):
                assert (torch.empty(size, dtype=dtype).float().abs() > 1e29).all()
                assert not torch.zeros(size, dtype=dtype).any()
    module._fill_freed_memory({1000}, torch.device("cpu"))
    assert any((torch.empty(1000) == 1e30).any() for _ in range(4))


def images() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))


def checked(levers: list[Algorithm], model: nn.Module | None = None, optimizer: Any = None) -> dict[str, str]:
    """Return what is said of each lever."""
    model = images() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    with on_real_inputs(Target(model, optimizer), ((torch.randn(4, 3, 8, 8),), {})) as passes:
        results = verified(levers, passes, [optimizer])
        assert not passes.snapshot.restore()
    return {name: result.text for name, result in results.items() if result.kept != result.text.startswith("left")}


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
    assert found["channels_last"].startswith("exact here: gradient within ")
    assert found["fused_optimizer"] == "exact here"
    assert found["autocast"].startswith("checked: the gradient differs by")


def test_a_network_that_magnifies_rounding_is_not_said_to_be_exact(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Certificate, "check", lambda *_, **__: Finding("", 2e-3, 1e-6))
    text = "checked: the gradient differs by 2e-03, within 64 times what rounding alone does"
    assert checked([ChannelsLast()]) == {"channels_last": text}


def test_the_wrong_one_goes_and_the_others_stay():
    found = checked([Autocast(), WrongFormat(), FusedOptimizer()])
    assert kept(found) == {"autocast", "fused_optimizer"}
    assert found["channels_last"].startswith("left out: an output differs by")
    found = checked([Autocast(), Raises()])
    assert sorted(kept(found)) == ["autocast"]
    assert found["channels_last"] == "left out: it raised RuntimeError: planted"


def test_a_wrong_update_goes_and_a_first_rate_of_0_hides_nothing():
    model = images()
    for rate in (1e-3, 0.0, torch.tensor(0.0)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        found = checked([ChannelsLast(), WrongUpdate()], model, optimizer)
        assert sorted(kept(found)) == ["channels_last"]
        assert found["fused_optimizer"].startswith("left out: its update differs by")


@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.0, 0.0)])
def test_the_check_of_an_update_leaves_warnings_to_the_step_of_the_loop(rates: tuple[float, float]):
    """The step of the loop warns if all groups got one rate. At a first rate of 0 the check sets one by itself."""
    model = images()
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "rule": "muon", "lr": 0.02}, {"params": others, "lr": 1e-3}]
    optimizer = MixedOptimizer(groups)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    assert checked([FusedOptimizer()], model, optimizer) == {"fused_optimizer": "exact here"}


def test_an_optimizer_that_cannot_be_copied_is_said():
    model = images()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["lock"] = (each for each in ())  # generators cannot be copied
    found = checked([FusedOptimizer()], model, optimizer)
    assert sorted(kept(found)) == ["fused_optimizer"]
    assert found["fused_optimizer"].startswith("not checked: TypeError")


def test_compiled_code_that_draws_other_numbers_is_not_compared():
    class Noisy(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + torch.randn(input.shape))

    model = Noisy(*images())
    found = checked([Compile(backend="eager"), ChannelsLast()], model)
    assert kept(found) == {"compile", "channels_last"}
    assert found["compile"] == "not checked: it draws other random numbers"


class KeepsItsWrites(ChannelsLast):
    """Hands the model a copy of its input, as compiled code in another memory format does."""

    def attach(self, target: Target) -> Attachment:
        return Attachment(target.model.register_forward_pre_hook(lambda _, args: tuple(x.clone() for x in args)))


def test_a_write_into_an_input_that_does_not_reach_the_loop_is_found():
    found = checked([KeepsItsWrites()], nn.Sequential(nn.ReLU(inplace=True), *images()))
    assert "an output differs by" in found["channels_last"]
    assert kept(checked([KeepsItsWrites()])) == {"channels_last"}
    assert kept(checked([ChannelsLast()], nn.Sequential(nn.ReLU(inplace=True), *images()))) == {"channels_last"}


def test_writes_into_an_input_reach_the_loop_from_compiled_code():
    levers = [ChannelsLast(), Compile(backend="aot_eager")]
    assert kept(checked(levers, nn.Sequential(nn.ReLU(inplace=True), *images()))) == {"channels_last", "compile"}
