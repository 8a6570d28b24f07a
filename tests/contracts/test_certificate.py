"""The certificate finds every wrong kernel, and raises no false alarm on networks of every shape."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.portraits import changes, portrait
from tests.support.zoo import ZOO
from torchboost.algorithms import Autocast, ChannelsLast, FusedOptimizer
from torchboost.calibration.certificate import Certificate, verified
from torchboost.calibration.passes import on_real_inputs
from torchboost.core.algorithm import Algorithm, Attachment, Target

KINDS = ("garbage", "noise", "stale", "unwritten")
PLACES = ("forward", "inputs", "weights")
"""A kernel of the forward pass, and the two of the backward pass."""
_NOISE = 0.01


def layers(model: nn.Module) -> list[str]:
    """Return the names of the layers into which a kernel can be planted."""
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.Linear))]


@dataclass(frozen=True, kw_only=True)
class Planted(Algorithm):
    """A lever with one wrong kernel.

    Args:
        layer: Name of the layer.
        kind: One number of 1e30; 1 % noise; the result of an earlier call; or a result of which an eighth is read from
            memory that was not written.
        place: Which kernel of the layer.
    """

    name: ClassVar[str] = "channels_last"

    layer: str
    kind: str
    place: str

    def attach(self, target: Target) -> Attachment:
        """Compute the layer with the wrong kernel."""
        module, memory = target.model.get_submodule(self.layer), {}

        def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            wrong = lambda value: _wrong(value, self.kind, memory)  # noqa: E731
            if self.place == "forward":
                return _Forward.apply(output, wrong)
            if self.place == "inputs":
                output.register_hook(wrong)
            return output

        handles = [module.register_forward_hook(hook)]
        if self.place == "weights":
            handles.append(module.weight.register_hook(lambda value: _wrong(value, self.kind, memory)))
        return Attachment(*handles)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, wrong: Any) -> Tensor:
        return wrong(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _wrong(value: Tensor, kind: str, memory: dict[str, Tensor]) -> Tensor:
    if kind == "noise":
        generator = torch.Generator().manual_seed(5)
        size = _NOISE * value.detach().square().mean().sqrt()
        return value + size * torch.randn(value.shape, generator=generator)
    if kind == "garbage":
        found = value.clone()
        found.view(-1)[found.numel() // 2] = 1e30
        return found
    if kind == "stale":
        earlier = memory.setdefault("earlier", torch.zeros_like(value))
        memory["earlier"] = value.detach().clone()
        return earlier.clone()
    found = value.clone()
    part = max(1, found.numel() // 8)
    found.view(-1)[-part:] = torch.empty(4 * part)[-part:]
    return found


COMPARED = [name for name in ZOO if name != "checkpointed_reentrant"]
"""All but the one whose backward pass cannot run without writing to ``.grad``."""
FEW = ["gpt_tied", "convnext", "dropout", "complex_parameters"]


def network(draw: random.Random) -> tuple[nn.Module, torch.Tensor]:
    """Return a small random network of convolutions and norms, and a batch for it."""
    width, sides = draw.choice((4, 8, 12)), draw.choice((2, 2, 2, 3))
    conv, norm, pool = (
        (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d)
        if sides == 2
        else (nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d)
    )
    parts: list[nn.Module] = []
    channels = 3
    for _ in range(draw.randint(1, 4)):
        kernel = draw.choice((1, 3))
        parts.append(conv(channels, width, kernel, padding=kernel // 2, bias=draw.random() < 0.5))
        parts += draw.choice(([norm(width)], [nn.GroupNorm(2, width)], []))
        parts.append(draw.choice((nn.ReLU, nn.GELU, nn.Tanh))())
        channels = width
    head = [pool(1), nn.Flatten(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 5)]
    torch.manual_seed(draw.randrange(10**6))
    return nn.Sequential(*parts, *head), torch.randn(draw.choice((4, 8)), 3, *[draw.choice((6, 8, 9))] * sides)


@pytest.mark.parametrize("kind", KINDS)
def test_planted_kernels_are_found(kind):
    """25 networks for each kind: with those of the others, 100."""
    for seed in range(25):
        draw = random.Random(f"{kind} {seed}")
        model, x = network(draw)
        lever = Planted(layer=draw.choice(layers(model)), kind=kind, place=draw.choice(PLACES))
        before, target = portrait(model), Target(model, torch.optim.SGD(model.parameters()))
        with on_real_inputs(target, ((x,), {})) as passes:
            found = Certificate(passes).check([lever])
            assert not passes.snapshot.restore()
        assert found.reason, (lever, found)
        assert changes(before, portrait(model)) == {}


def alarms(name: str, seed: int) -> dict[str, str]:
    """Return what the certificate says against levers that are right."""
    torch.manual_seed(seed)
    model = ZOO[name].build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = ZOO[name].batch(torch.Generator().manual_seed(seed))
    levers: list[Algorithm] = [ChannelsLast(), FusedOptimizer(), Autocast()]
    levers = [lever for lever in levers if lever.idle(model, optimizer) is None]
    with on_real_inputs(Target(model, optimizer), (batch.args, batch.kwargs)) as passes:
        results = verified(levers, passes, [optimizer])
        assert not passes.snapshot.restore()
    gone = {name: result.text for name, result in results.items() if not result.kept}
    return {name: text for name, text in gone.items() if "it raised" not in text}  # that is no comparison


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in COMPARED]
)
def test_right_levers_raise_no_alarm(name):
    for seed in range(5):
        assert alarms(name, seed) == {}, seed
