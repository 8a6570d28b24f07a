"""Classes of the reference that wrap a network or an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.accumulation.gradient_window import GradientWindow
from torchboost.algorithms.less_bn import LessBNReport, remove_batch_norms
from torchboost.graph.norm_roles import Keep

__all__ = ["GradientAccumulation", "LessBN"]


class LessBN(nn.Module):
    """A network with fewer BatchNorm layers; see :func:`torchboost.remove_batch_norms` for what goes and what stays.

    Unlike the reference, whose Python half only sets a flag, the layers are really gone; and only the last linear
    layer of the network is normalised, with its bias kept.

    Args:
        network: Changed in place, then passed through to.
        fn_flag: Replace the last linear layer by one between normalised rows.
        keep: Which BatchNorm of a residual branch stays, the ``"last"`` or the ``"narrowest"``.
        keep_shortcut: Keep the BatchNorms of the shortcuts.
        keep_every: In plain stacks keep one of so many.
        blocks_per_norm: Keep a BatchNorm only in one of so many residual blocks.
        optimizer: Follows the change. If one exists already and is not given, new parameters (the head's factor, biases
            after folding) are announced by a ``NoEffectWarning``, since it does not train them.
        sample: Input to trace the network with; guessed where missing.

    Attributes:
        network: The network.
        report: What was found, removed and kept.

    Raises:
        IncompatibleError: The network is wrapped, sharded or compiled already.

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
        self.report: LessBNReport = remove_batch_norms(
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
        """Return what the network returns."""
        return self.network(*args, **kwargs)


class GradientAccumulation(GradientWindow):
    """Collects gradients that are handed over, and updates with their mean once ``max_accumulation_step`` are there.

    See :class:`~torchboost.algorithms.accumulation.gradient_window.GradientWindow`, under MindSpore's name. Where the
    loop itself calls ``backward()``, :class:`~torchboost.Accumulator` does the same without a second copy of the
    gradients.

    Args:
        max_accumulation_step: Calls per update, 1 or more.
        optimizer: Steps once per window, so hooks and schedulers on it follow the updates.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``max_accumulation_step`` is not an integer of 1 or more.

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
