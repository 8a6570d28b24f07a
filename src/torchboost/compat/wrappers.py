"""MindSpore's classes that wrap a network or an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_accumulation.gradient_window import GradientWindow
from torchboost.algorithms.less_bn import LessBnReport, less_bn
from torchboost.graph.norms import Keep

__all__ = ["GradientAccumulation", "LessBN"]


class LessBN(nn.Module):
    """A network with fewer BatchNorm layers. See :func:`torchboost.less_bn` for which ones are removed.

    The layers are removed here, whereas MindSpore's Python code only sets a flag. Only the last linear layer of the
    network is normalised, and its bias is kept.

    Args:
        network: Changed in place. Calls are passed to it.
        fn_flag: Replace the last linear layer by one that normalises its input and weight rows.
        keep: Which BatchNorm of a residual branch is kept, the ``"last"`` or the ``"narrowest"``.
        keep_shortcut: Keep the BatchNorms of the shortcuts.
        keep_every: In stacks without shortcuts, keep one BatchNorm out of so many.
        blocks_per_norm: Keep a BatchNorm in only one out of so many residual blocks.
        optimizer: Its groups follow the change. If an optimizer exists but is not passed, it does not train new
            parameters (the head's factor, biases after folding), and a ``NoEffectWarning`` names them.
        sample: Input to trace the network with. Guessed if missing.

    Attributes:
        network: The network.
        report: Which BatchNorms were found, removed and kept.

    Raises:
        IncompatibleError: The network is already wrapped, sharded or compiled.

    Example:
        >>> import torch, torchboost
        >>> conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        >>> network = torch.nn.Sequential(*[m for _ in range(4) for m in (conv(3, 3, 3), norm(3), torch.nn.ReLU())])
        >>> torchboost.LessBN(network).report.removed
        ('7',)
    """

    def __init__(
        self,
        network: nn.Module,
        fn_flag: bool = False,
        *,
        keep: Keep = "last",
        keep_shortcut: bool = False,
        keep_every: int = 2,
        blocks_per_norm: int = 1,
        optimizer: Optimizer | None = None,
        sample: Any = None,
    ) -> None:
        super().__init__()
        self.report: LessBnReport = less_bn(
            network,
            optimizer,
            normalize_head=fn_flag,
            keep=keep,
            keep_shortcut=keep_shortcut,
            keep_every=keep_every,
            blocks_per_norm=blocks_per_norm,
            sample=sample,
        )
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network."""
        return self.network(*args, **kwargs)


class GradientAccumulation(GradientWindow):
    """Collect gradients that the caller passes, and update with their mean after ``max_accumulation_step`` calls.

    This is :class:`~torchboost.algorithms.grad_accumulation.gradient_window.GradientWindow` under MindSpore's name. If
    the loop itself calls ``backward()``, :class:`~torchboost.Accumulator` does the same without a second copy of the
    gradients.

    Args:
        max_accumulation_step: Number of calls per update, at least 1.
        optimizer: Steps once per window, so its hooks and schedulers follow the updates.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``max_accumulation_step`` is not an integer of at least 1.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulate = torchboost.GradientAccumulation(2, optimizer)
        >>> for size in (8, 3):
        ...     loss = model(torch.randn(size, 4)).square().mean()
        ...     loss = accumulate(loss, torch.autograd.grad(loss, list(model.parameters())), count=size)
        >>> accumulate.updated
        True
    """

    steps_name = "max_accumulation_step"

    def __init__(self, max_accumulation_step: int, optimizer: Optimizer) -> None:
        super().__init__(max_accumulation_step, optimizer)

    @property
    def max_accumulation_step(self) -> int:
        """Calls per update."""
        return self.steps

    @max_accumulation_step.setter
    def max_accumulation_step(self, steps: int) -> None:
        self.steps = steps
