"""Wrong kernels, planted into one layer of a network, for tests of what must notice them. Plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchboost.core.algorithm import Algorithm, Attachment, Target

__all__ = ["KINDS", "PLACES", "Planted", "layers"]

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
