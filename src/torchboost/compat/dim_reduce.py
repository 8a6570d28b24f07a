"""``DimReduce``: MindSpore's dimension-reduced step, built on :class:`~torchboost.algorithms.DimReduceOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.algorithms.dim_reduce.optimizer import DimReduceOptimizer
from torchboost.core.arguments import check_optimizer
from torchboost.core.step import Replay
from torchboost.errors import IncompatibleError

__all__ = ["DimReduce"]


class DimReduce:
    """Update the weights inside and outside a subspace, with gradients that were computed elsewhere.

    If you can change the loop, prefer :class:`~torchboost.algorithms.DimReduction`. It computes the basis, works in
    ``BoostTrainOneStepCell`` and keeps its state in the checkpoint.

    Args:
        network: Returns the loss of a batch when called with the inputs. The passes made here do not change a module's
            buffers.
        optimizer: An optimizer of the same weights. MindSpore passes its steps through it. Here they are applied
            directly, and the optimizer is not used.
        weight: The parameters, in the order of the columns of ``pca_mat_local``.
        pca_mat_local: The rows of the basis that this rank holds, a tensor or a NumPy array of shape ``(rows,
            weights)``. With k directions on R ranks these are the rows from ``k rank // R`` to ``k (rank + 1) // R``.
        n_components: Number of directions k.
        rho: Factor between the two trials of the line search.
        gamma: Momentum of the gradient outside the subspace.
        alpha: Step size along this gradient.
        sigma: Share of the decrease predicted by the slope that a trial must reach.
        rank: Rank of this process.
        rank_size: Number of ranks. They average their losses.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, ``network`` cannot be called, or ``pca_mat_local`` is not a
            matrix.
        ValueError: Shapes or settings do not fit.
        IncompatibleError: The job has another number of ranks.

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
            raise TypeError(
                f"network: found {type(network).__name__}; give a function or module that returns the loss of a batch."
            )
        check_optimizer(optimizer)
        weights = list(weight)
        local = _matrix(pca_mat_local, weights)
        group = _group(rank, rank_size)
        self.network = network
        self.optimizer = optimizer
        self.subspace = DimReduceOptimizer(
            weights,
            DimReduceBasis(local, group, n_components, orthonormal=False),
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
            loss: The loss of the batch at these weights.
            old_grad: The gradients, averaged over the ranks; None for a parameter without a gradient.
            weight: The parameters that this object was built with.
            weight_clone: The weights at which the step starts. They are first written into the parameters.
            *inputs: The inputs of the network, for the trials.

        Raises:
            ValueError: The weights are others, or the number or the shapes of the gradients do not fit. Nothing is
                changed.
        """
        parameters: list[Tensor] = self.subspace.param_groups[0]["params"]
        if [*map(id, weight)] != [*map(id, parameters)]:
            raise ValueError(
                "weight: found other parameters than this object was built with; give the same ones in order."
            )
        shapes = [parameter.shape for parameter in parameters]
        for name, tensors in (("old_grad", old_grad), ("weight_clone", weight_clone)):
            if len(tensors) != len(shapes) or any(
                tensor is not None and tensor.shape != shape for tensor, shape in zip(tensors, shapes, strict=True)
            ):
                raise ValueError(
                    f"{name}: the number or the shapes are not those of the weights; give one per weight, in order."
                )
        with torch.no_grad():
            for parameter, clone, gradient in zip(parameters, weight_clone, old_grad, strict=True):
                parameter.copy_(clone)
                parameter.grad = None if gradient is None else gradient.detach()
        replay = Replay(lambda: self.network(*inputs), parameters[0].device)
        replay.told(loss)
        self.subspace.step(replay)
        self.subspace.zero_grad()
        return loss


def _matrix(rows: Any, weights: Sequence[Tensor]) -> Tensor:
    """Return the rows as a tensor on the device of the weights."""
    numbers = isinstance(rows, np.ndarray) and rows.dtype.kind == "f"
    if not (isinstance(rows, Tensor) or numbers) or rows.ndim != 2:
        shape = f" of shape {tuple(rows.shape)} and {rows.dtype}" if hasattr(rows, "shape") else ""
        raise TypeError(
            f"pca_mat_local: found {type(rows).__name__}{shape}; give a floating point matrix, a tensor or a NumPy "
            "array, with one row per direction."
        )
    if isinstance(rows, Tensor) or not weights:
        return torch.as_tensor(rows)
    return torch.tensor(rows, dtype=weights[0].dtype, device=weights[0].device)


def _group(rank: int, rank_size: int) -> dist.ProcessGroup | None:
    running = dist.is_available() and dist.is_initialized()
    here = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if here != (rank, rank_size):
        raise IncompatibleError(
            f"DimReduce: found rank={rank} of rank_size={rank_size}, this process is rank {here[0]} of {here[1]}; give "
            "the numbers of the running job."
        )
    return dist.group.WORLD if rank_size > 1 else None
