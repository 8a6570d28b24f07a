"""Modules of the reference that wrap a network."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.less_bn import LessBNReport, reduce_batch_norm
from torchboost.core.norm_roles import Keep

__all__ = ["LessBN"]


class LessBN(nn.Module):
    """A network with fewer BatchNorm layers; see :func:`torchboost.reduce_batch_norm` for what goes and what stays.

    Unlike the reference, whose Python half only sets a flag, the layers are really gone; and only the last linear
    layer of the network is normalised, with its bias kept.

    Args:
        network: Changed in place, then passed through to.
        fn_flag: Replace the last linear layer by one between normalised rows.
        keep: Which BatchNorm of a residual branch stays, the ``"last"`` or the ``"narrowest"``.
        keep_shortcut: Keep the BatchNorms of the shortcuts.
        keep_every: In plain stacks keep one of so many.
        blocks_per_norm: Keep a BatchNorm only in one of so many residual blocks.
        optimizer: Follows the change where it exists already.
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
        self.report: LessBNReport = reduce_batch_norm(
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
