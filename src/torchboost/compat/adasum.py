"""``AdaSum``: MindSpore's class that combines weight deltas across nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.algorithms.adaptive_sum.rule import hierarchical_adasum_
from torchboost.compat.process import ParameterProcess
from torchboost.core.arguments import is_integer
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError

__all__ = ["AdaSum"]


class AdaSum:
    """Combine the deltas of local steps: the mean inside a node, the adaptive sum across nodes.

    Every rank must create the object at the same point, because it creates process groups.
    :class:`~torchboost.algorithms.AdaptiveSum` does the same for a whole training loop and computes the deltas itself.

    Args:
        rank: Rank of this process.
        device_number: Number of ranks on a node.
        group_number: Number of nodes.
        parameter_tuple: The parameters, in the same order on all ranks.
        fusion: The :class:`~torchboost.ParameterProcess` that numbered the parameters; those with one number share a
            set of collectives. With None all do.

    Raises:
        TypeError: There are no parameters, or a number is not an integer.
        ValueError: The numbers differ from the process group's, or the index does not fit the parameters.
        IncompatibleError: A process group is missing.

    Cost: see :func:`~torchboost.algorithms.adaptive_sum.rule.hierarchical_adasum_`.

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
        numbers = {"rank": (rank, 0), "device_number": (device_number, 1), "group_number": (group_number, 1)}
        for name, (value, least) in numbers.items():
            if not is_integer(value) or value < least:
                kind = ValueError if is_integer(value) else TypeError
                raise kind(f"{name}: found {value!r}; give an integer of {least} or more.")
        parameters = list(parameter_tuple)
        if not parameters or not all(isinstance(param, Tensor) for param in parameters):
            raise TypeError(f"parameter_tuple: found {parameter_tuple!r}; give at least one parameter.")
        self._shapes = [param.shape for param in parameters]
        if not isinstance(fusion, ParameterProcess | None):
            raise TypeError(f"fusion: found {type(fusion).__name__}; give a ParameterProcess.")
        index = (0,) * len(parameters) if fusion is None else fusion.fusion_index(parameters)
        self._packs = [[i for i, other in enumerate(index) if other == number] for number in dict.fromkeys(index)]
        self._groups = _groups(rank, device_number, group_number)

    def __call__(
        self, delta_weights: Sequence[Tensor], parameters: Sequence[Tensor], old_parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Set each parameter to ``old - combined delta``, equal on all ranks, and return the combined deltas.

        Args:
            delta_weights: The changes of the step, ``old - new``, with the shapes of the parameters. Not changed.
            parameters: Set in place.
            old_parameters: Their values before the step, the same on all ranks.

        Raises:
            ValueError: The number or the shapes of the tensors are not those of the parameters. Nothing is changed.
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
                hierarchical_adasum_([combined[i] for i in pack], self._groups)
        with torch.no_grad():
            for param, old, delta in zip(parameters, old_parameters, combined, strict=True):
                param.copy_(old - delta)
        return combined


def _groups(rank: int, device_number: int, group_number: int) -> NodeGroups | None:
    if not (dist.is_available() and dist.is_initialized()):
        if device_number * group_number == 1:
            return None
        raise IncompatibleError(
            f"AdaSum for {group_number} nodes of {device_number} ranks needs a process group; call "
            "torch.distributed.init_process_group first, under torchrun."
        )
    ranks = dist.get_world_size()
    if device_number * group_number != ranks:
        raise ValueError(
            f"device_number, group_number: found {device_number} and {group_number}, but the process group has {ranks} "
            "ranks; give the number of ranks on a node and the number of nodes, whose product must be that."
        )
    if rank != dist.get_rank():
        raise ValueError(f"rank: found {rank}, but this is rank {dist.get_rank()}; give torch.distributed.get_rank().")
    return NodeGroups.of(Topology.current(device_number))
