"""``DimReduce``: MindSpore's dimension-reduced step, over :class:`~torchboost.algorithms.SubspaceOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.subspace.basis import Block, SubspaceBasis, rows_of
from torchboost.algorithms.subspace.optimizer import SubspaceOptimizer
from torchboost.core.arguments import check_optimizer
from torchboost.core.closure import Replay
from torchboost.errors import IncompatibleError

__all__ = ["DimReduce"]


class DimReduce:
    """Takes gradients that were computed elsewhere, and updates the weights in a subspace and outside of it.

    Where the loop itself may change, :class:`~torchboost.algorithms.SubspaceDescent` makes the basis, works in
    ``BoostTrainOneStepCell`` and keeps its state in the checkpoint.

    Args:
        network: Returns the loss of a batch when it is called with the inputs. The passes made here
            leave a module's buffers as they are.
        optimizer: Of the same weights. The reference sends its steps through it; here they are applied directly, and
            it is left alone.
        weight: The parameters, in the order of the columns of ``pca_mat_local``.
        pca_mat_local: The rows of the basis that this rank holds, a tensor or a NumPy array of shape
            ``(rows, weights)``; with k directions over R ranks those from ``k rank // R`` to ``k (rank + 1) // R``.
        n_components: k.
        rho: Factor between the two trials of the line search.
        gamma: Momentum of the gradient outside the subspace.
        alpha: Step along it.
        sigma: Share of the decrease promised by the slope that a trial must reach.
        rank: Of this process.
        rank_size: Number of ranks, which average their losses.

    Raises:
        TypeError: ``optimizer`` is no optimizer, ``network`` cannot be called, or ``pca_mat_local`` is no matrix.
        ValueError: Shapes or settings do not fit.
        IncompatibleError: Another number of ranks is running.

    Example:
        >>> import torch, torchboost
        >>> layer = torch.nn.Linear(3, 1, bias=False)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        >>> network = lambda x: layer(x).square().mean()
        >>> weights = list(layer.parameters())
        >>> step = torchboost.DimReduce(network, optimizer, weights, torch.eye(2, 3), 2, 0.55, 0.9, 0.001, 0.4, 0, 1)
        >>> x = torch.randn(8, 3)
        >>> loss = network(x)
        >>> clones = [w.detach().clone() for w in weights]
        >>> loss = step(loss, torch.autograd.grad(loss, weights), weights, clones, x)
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        optimizer: Optimizer,
        weight: Sequence[Tensor],
        pca_mat_local: Tensor | np.ndarray,
        n_components: int,
        rho: float,
        gamma: float,
        alpha: float,
        sigma: float,
        rank: int,
        rank_size: int,
    ) -> None:
        if not callable(network):
            raise TypeError(f"network: found {type(network).__name__}; give what returns the loss of a batch.")
        check_optimizer(optimizer)
        weights = list(weight)
        local = _matrix(pca_mat_local, weights)
        group = _group(rank, rank_size)
        blocks = (Block(0, sum(w.numel() for w in weights), n_components),)
        (mine,) = rows_of(blocks, rank, rank_size)
        if len(local) != len(mine):
            raise ValueError(
                f"pca_mat_local: found {len(local)} rows; rank {rank} of {rank_size} holds rows {mine.start} "
                f"to {mine.stop} of {n_components}."
            )
        self.network = network
        self.optimizer = optimizer
        self.subspace = SubspaceOptimizer(
            weights,
            SubspaceBasis(blocks, (local,), group, orthonormal=False),
            lr=alpha,
            rho=rho,
            gamma=gamma,
            sigma=sigma,
            buffers=network.buffers() if isinstance(network, nn.Module) else (),
        )

    def __call__(
        self,
        loss: Tensor,
        old_grad: Sequence[Tensor | None],
        weight: Sequence[Tensor],
        weight_clone: Sequence[Tensor],
        *inputs: Any,
    ) -> Tensor:
        """Update ``weight`` and return ``loss``.

        Args:
            loss: Of the batch at these weights.
            old_grad: The gradients, averaged over the ranks; None where there is none.
            weight: The parameters this object was built with.
            weight_clone: Where the step begins; written into the weights first.
            *inputs: Of the network, for the trials.

        Raises:
            ValueError: Other weights, or other numbers or shapes of gradients; nothing was changed.
        """
        held = self.subspace.param_groups[0]["params"]
        if len(weight) != len(held) or any(a is not b for a, b in zip(weight, held, strict=True)):
            raise ValueError("weight: found other parameters than this object was built with; give the same, in order.")
        for name, given in (("old_grad", old_grad), ("weight_clone", weight_clone)):
            if len(given) != len(held) or any(
                g is not None and g.shape != w.shape for g, w in zip(given, held, strict=True)
            ):
                raise ValueError(
                    f"{name}: numbers or shapes are not those of the weights; give one for each, in order."
                )
        with torch.no_grad():
            for own, clone in zip(held, weight_clone, strict=True):
                own.copy_(clone)
        for own, gradient in zip(held, old_grad, strict=True):
            own.grad = None if gradient is None else gradient.detach()
        replay = Replay(lambda: self.network(*inputs), held[0].device)
        replay.told(loss)
        self.subspace.step(replay)
        self.subspace.zero_grad()
        return loss


def _matrix(given: Any, weights: Sequence[Tensor]) -> Tensor:
    """Return the rows as a tensor beside the weights."""
    numbers = isinstance(given, np.ndarray) and given.dtype.kind == "f"
    if not (isinstance(given, Tensor) or numbers) or given.ndim != 2:
        shape = f" of shape {tuple(given.shape)} and {given.dtype}" if hasattr(given, "shape") else ""
        raise TypeError(
            f"pca_mat_local: found {type(given).__name__}{shape}; give a matrix of floating point numbers, a tensor or "
            "a NumPy array, with a row per direction."
        )
    if isinstance(given, Tensor) or not weights:
        return torch.as_tensor(given)
    return torch.tensor(given, dtype=weights[0].dtype, device=weights[0].device)


def _group(rank: int, rank_size: int) -> dist.ProcessGroup | None:
    running = dist.is_available() and dist.is_initialized()
    here = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if here != (rank, rank_size):
        raise IncompatibleError(
            f"DimReduce: found rank={rank} of rank_size={rank_size}, this process is rank {here[0]} of {here[1]}; give "
            "the numbers of the running job."
        )
    return dist.group.WORLD if rank_size > 1 else None
