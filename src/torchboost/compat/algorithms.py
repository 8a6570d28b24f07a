"""MindSpore's classes for one algorithm each: ``LessBN``, ``GradientAccumulation``, ``AdaSum`` and ``DimReduce``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum import adasum_
from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.algorithms.dim_reduce.optimizer import Subspace
from torchboost.algorithms.grad_accumulation.optimizer import GradientWindow
from torchboost.algorithms.less_bn import LessBnReport, less_bn
from torchboost.compat.process import ParameterProcess
from torchboost.core.arguments import check_optimizer
from torchboost.core.step import Replay
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError


class LessBN(nn.Module):
    """A network with fewer BatchNorm layers. See :func:`torchboost.less_bn` for which ones are removed.

    The layers are removed here, whereas MindSpore's Python code only sets a flag. Only the last linear layer of the
    network is normalised, and its bias is kept.

    Args:
        network: Changed in place. Calls are passed to it.
        fn_flag: Replace the last linear layer by one that normalises its input and weight rows.
        optimizer: Its groups follow the change. If an optimizer exists but is not passed, it does not train new
            parameters (the head's factor, biases after folding), and a ``NoEffectWarning`` names them.
        **settings: Of :func:`torchboost.less_bn`, such as ``keep_shortcut`` and ``sample``. ``keep`` is ``"last"``
            unless given.

    Attributes:
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
        self, network: nn.Module, fn_flag: bool = False, *, optimizer: Optimizer | None = None, **settings: Any
    ) -> None:
        super().__init__()
        chosen: dict[str, Any] = {"keep": "last", **settings}
        self.report: LessBnReport = less_bn(network, optimizer, normalize_head=fn_flag, **chosen)
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network."""
        return self.network(*args, **kwargs)


class GradientAccumulation(GradientWindow):
    """Collect gradients that the caller passes, and update with their mean after ``max_accumulation_step`` calls.

    If the loop itself calls ``backward()``, :class:`~torchboost.Accumulator` does the same without a second copy of the
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

    def __init__(self, max_accumulation_step: int, optimizer: Optimizer) -> None:
        super().__init__(max_accumulation_step, optimizer)


class AdaSum:
    """Combine the deltas of local steps: the mean inside a node, the adaptive sum across nodes.

    Every rank must create the object at the same point, because it creates process groups.
    :class:`~torchboost.algorithms.AdaptiveSum` does the same for a whole training loop and computes the deltas itself.

    Args:
        rank: Rank of this process.
        device_number: Number of ranks on a node.
        group_number: Number of nodes.
        parameter_tuple: The parameters, in the same order on all ranks.
        fusion: The :class:`~torchboost.ParameterProcess` that numbered the parameters. Parameters with one number share
            a set of collectives. With None all do.

    Raises:
        ValueError: The numbers do not match the running job, or the index does not fit the parameters.

    Cost: see :func:`~torchboost.algorithms.adaptive_sum.adasum_`.

    Example:
        >>> import torch, torchboost
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> adasum = torchboost.AdaSum(0, 1, 1, (weight,))  # one rank on one node: nothing to combine
        >>> adasum([torch.ones(2)], [weight], [torch.zeros(2)])
        [tensor([1., 1.])]
        >>> weight.tolist()
        [-1.0, -1.0]
    """

    def __init__(
        self,
        rank: int,
        device_number: int,
        group_number: int,
        parameter_tuple: Sequence[Tensor],
        *,
        fusion: ParameterProcess | None = None,
    ) -> None:
        self._shapes = [param.shape for param in parameter_tuple]
        index = (0,) * len(self._shapes) if fusion is None else fusion.fusion_index(parameter_tuple)
        self._packs = [[i for i, other in enumerate(index) if other == number] for number in dict.fromkeys(index)]
        topology = Topology.current(device_number)
        found, here = (rank, device_number, group_number), (topology.rank, topology.devices_per_node, topology.nodes)
        if found != here or device_number * group_number != topology.world_size:
            raise ValueError(
                f"rank, device_number, group_number: found {found} in rank {topology.rank} of {topology.world_size}; "
                "give this rank, the ranks on a node and the number of nodes, after torch.distributed."
                "init_process_group."
            )
        self._groups = NodeGroups.of(topology) if topology.world_size > 1 else None

    def __call__(
        self, delta_weights: Sequence[Tensor], parameters: Sequence[Tensor], old_parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Set each parameter to ``old - combined delta``, equal on all ranks, and return the combined deltas.

        Args:
            delta_weights: The changes of the step, ``old - new``, with the shapes of the parameters. Not changed.
            parameters: Set in place.
            old_parameters: Their values before the step, the same on all ranks.

        Raises:
            ValueError: The number or the shapes of the tensors differ from the parameters'. Nothing is changed.
        """
        arguments = {"delta_weights": delta_weights, "parameters": parameters, "old_parameters": old_parameters}
        for name, tensors in arguments.items():
            shapes = [tensor.shape for tensor in tensors]
            if shapes != self._shapes:
                raise ValueError(
                    f"{name}: found tensors of shapes {[tuple(s) for s in shapes]}; give one tensor per parameter, "
                    f"of shapes {[tuple(s) for s in self._shapes]}."
                )
        combined = [delta.detach().clone() for delta in delta_weights]
        if self._groups is not None:
            for pack in self._packs:
                adasum_([combined[i] for i in pack], self._groups.across, self._groups.inside)
        with torch.no_grad():
            for param, old, delta in zip(parameters, old_parameters, combined, strict=True):
                param.copy_(old - delta)
        return combined


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
        TypeError: ``optimizer`` is not an optimizer, or ``pca_mat_local`` is not a matrix.
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
        check_optimizer(optimizer)
        weights = list(weight)
        local = _matrix(pca_mat_local, weights)
        group = _all_ranks(rank, rank_size)
        self.network = network
        self.optimizer = optimizer
        self.subspace = Subspace(
            weights,
            DimReduceBasis(local, group, n_components),
            alpha=alpha,
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
            old_grad: The gradients, averaged over the ranks. None for a parameter without a gradient.
            weight: The parameters that this object was built with.
            weight_clone: The weights at which the step starts. They are first written into the parameters.
            *inputs: The inputs of the network, for the trials.

        Raises:
            ValueError: The weights are others, or the number or the shapes of the gradients do not fit. Nothing is
                changed.
        """
        parameters = self.subspace.weights
        if [*map(id, weight)] != [*map(id, parameters)]:
            raise ValueError("weight: found other parameters than this object was built with; give the same, in order.")
        shapes = [parameter.shape for parameter in parameters]
        for name, tensors in {"old_grad": old_grad, "weight_clone": weight_clone}.items():
            found = [shape if one is None else one.shape for one, shape in zip(tensors, shapes, strict=False)]
            if len(tensors) != len(shapes) or found != shapes:
                raise ValueError(f"{name}: the number or the shapes do not fit; give one per weight, in order.")
        with torch.no_grad():
            for parameter, clone, gradient in zip(parameters, weight_clone, old_grad, strict=True):
                parameter.copy_(clone)
                parameter.grad = None if gradient is None else gradient.detach()
        replay = Replay(lambda: self.network(*inputs), parameters[0].device)
        replay.told(loss)
        self.subspace.step(replay)
        for parameter in parameters:
            parameter.grad = None
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


def _all_ranks(rank: int, rank_size: int) -> dist.ProcessGroup | None:
    here = Topology.current()
    if (here.rank, here.world_size) != (rank, rank_size):
        raise IncompatibleError(
            f"DimReduce: found rank={rank} of rank_size={rank_size}, this process is rank {here.rank} of "
            f"{here.world_size}; give the numbers of the running job."
        )
    return dist.group.WORLD if rank_size > 1 else None
