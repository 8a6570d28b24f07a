"""``OptimizerProcess`` and ``ParameterProcess``: param groups under the names of ``mindspore.boost``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.centralization import centralizable
from torchboost.core.algorithm import Attachment
from torchboost.errors import IncompatibleError
from torchboost.optim.front import FrontOptimizer
from torchboost.optim.groups import CENTRALIZE, ORDER, FusionIndex, ParamGroup, listed, rebuild_groups, split_group
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.rebuild import described_groups, rebuilt
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.transforms import Centralize, wish

__all__ = ["OptimizerProcess", "ParameterProcess"]


class OptimizerProcess:
    """Split the groups of an optimizer into centralised and not, and build the same optimizer over them.

    The new optimizer has another number of groups, so checkpoints of the old one do not load into it; the native
    ``centralize_gradients(optimizer)`` leaves groups and checkpoints alone.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> process = OptimizerProcess(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> process.add_grad_centralization(model)
        >>> optimizer = process.generate_new_optimizer()

    Args:
        opt: Any optimizer that can be rebuilt (see :func:`torchboost.optim.rebuild.rebuilt`).

    Raises:
        TypeError: ``opt`` is not a ``torch.optim.Optimizer``.
        IncompatibleError: ``opt`` stands in front of another one, as ``FreezeOpt`` does.
    """

    def __init__(self, opt: Optimizer) -> None:
        if not isinstance(opt, Optimizer):
            raise TypeError(f"opt: found {type(opt).__name__}; give a torch.optim.Optimizer.")
        if isinstance(opt, FrontOptimizer):
            raise IncompatibleError(
                f"opt: found {type(opt).__name__}, which stands in front of a {type(opt.opt).__name__}. Give that one "
                f"to OptimizerProcess first, and build the {type(opt).__name__} over the new optimizer."
            )
        self.opt = opt
        self.centralization: Attachment | None = None
        self._groups: list[ParamGroup] | None = None

    def build_params_dict(self, network: nn.Module) -> dict[int, nn.Module]:
        """Return the module that owns each parameter, by ``id(parameter)``; a shared one belongs to its first owner."""
        if not isinstance(network, nn.Module):
            raise TypeError(f"network: found {type(network).__name__}; give a torch.nn.Module.")
        owners: dict[int, nn.Module] = {}
        for module in network.modules():
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), module)
        return owners

    def build_gc_params_group(self, params_dict: Mapping[int, nn.Module], parameters: Sequence[Any]) -> list[Any]:
        """Split every group in two: the centralised part with ``grad_centralization: True`` first, then the rest.

        Biases, norm parameters, depthwise convolutions and the normalised head go to the rest, by structure. A group
        that says ``grad_centralization: False``, and an entry with ``order_params``, pass through. A plain list of
        parameters is returned as it is: it has no group that could hold the flag.

        Args:
            params_dict: From :meth:`build_params_dict`.
            parameters: Groups as dictionaries, or a plain list of parameters.

        Raises:
            ValueError: The list is empty.
            TypeError: An element is neither a parameter nor a group, or both kinds are mixed.
        """
        if not _check_parameters(parameters):
            return list(parameters)
        groups: list[ParamGroup] = []
        for group in parameters:
            if ORDER in group or group.get(CENTRALIZE) is False:
                groups.append(dict(group))
                continue
            chosen = {param for param in listed(group["params"]) if centralizable(param, params_dict.get(id(param)))}
            groups.extend(split_group(group, chosen, {CENTRALIZE: True}))
        return groups

    def add_grad_centralization(self, network: nn.Module) -> None:
        """Decide by the structure of ``network`` which parameters the new optimizer centralises."""
        self._groups = self.build_gc_params_group(self.build_params_dict(network), described_groups(self.opt))

    def generate_new_optimizer(self) -> Optimizer:
        """Build an optimizer of the same class and hyper-parameters over the new groups.

        What is no hyper-parameter of a group stays too: schedules of the learning rate, ``transforms``, ``nonfinite``,
        ``native``, ``chunk_mebibytes``.
        Groups with ``grad_centralization: True`` are centralised before each step, whatever the class; the effect is
        ``self.centralization``, with ``remove()``. The state goes along and is shared, so the old optimizer must not
        be stepped any more. Hooks and learning-rate schedulers of the old one do not go along: create them after.

        Raises:
            IncompatibleError: The class takes arguments that neither its ``defaults`` nor its attributes hold.
            TypeError: A group's ``grad_centralization`` is not a boolean.
        """
        groups = self._groups if self._groups is not None else described_groups(self.opt)
        wishes = [wish(group) for group in groups]
        optimizer = rebuilt(self.opt, groups)
        for param, state in self.opt.state.items():
            optimizer.state[param] = state
        if any(wishes):
            own = isinstance(optimizer, UpdateRule)  # obeys the key by itself
            pipeline = GradientPipeline(Centralize(flag=CENTRALIZE))
            self.centralization = (
                Attachment(undo=partial(_forget_keys, optimizer)) if own else pipeline.attach(optimizer)
            )
        return optimizer


class ParameterProcess:
    """Number parameters for communication, and rebuild param groups over a new list of parameters.

    Example:
        >>> parameters = list(torch.nn.Linear(4, 2).parameters())
        >>> process = ParameterProcess()
        >>> parameters = process.assign_parameter_group(parameters, split_point=[1])
        >>> process.fusion_index(parameters).indices
        (1, 2)
    """

    def __init__(self) -> None:
        self._index: dict[Tensor, int] = {}
        self._last = 1

    def assign_parameter_group(
        self, parameters: Sequence[Tensor], split_point: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Give every parameter a communication-fusion index, one higher from each split point on.

        The first call starts at 1; a later call on the same object goes on with the last index.

        Args:
            parameters: In the order in which they are communicated.
            split_point: Rising positions; by default one, at the middle. Positions past the last parameter are left
                out, as the points 50 and 100 of the default configuration are on a small network.

        Returns:
            The parameters. The indices are kept beside them: :meth:`fusion_index`.

        Raises:
            ValueError: The list is empty, or split points fall, repeat or are negative.
            TypeError: An element is not a parameter, or a split point not a whole number.
        """
        if _check_parameters(parameters):
            raise TypeError("parameters: found param groups; give the parameters themselves.")
        if split_point is not None and (isinstance(split_point, str) or not isinstance(split_point, Sequence)):
            raise TypeError(f"split_point: found {split_point!r}; give a list of positions, or None.")
        points = [len(parameters) // 2] if split_point is None else _inside(split_point, len(parameters))
        index = FusionIndex.split(len(parameters), points, first=self._last)
        self._index.update(zip(parameters, index.indices, strict=True))
        self._last = index.indices[-1]
        return list(parameters)

    def fusion_index(self, parameters: Sequence[Tensor]) -> FusionIndex:
        """Return the indices given so far, for code that packs gradients or deltas into collectives.

        Raises:
            ValueError: A parameter was never given to :meth:`assign_parameter_group`.
        """
        missing = sum(param not in self._index for param in parameters)
        if missing:
            raise ValueError(
                f"{missing} of {len(parameters)} parameters have no index; call assign_parameter_group first."
            )
        return FusionIndex(tuple(self._index[param] for param in parameters))

    def generate_group_params(
        self, parameters: Sequence[Tensor], origin_params: Sequence[Tensor | Mapping[str, Any]]
    ) -> list[ParamGroup]:
        """Rebuild param groups over a new parameter list, keeping each origin group's options.

        A group none of whose parameters are left stays, empty. Parameters that are in no origin group form a last one
        with the options of the group that has the most. ``order_params`` becomes the new list.

        Raises:
            ValueError: A list is empty.
            TypeError: An element has the wrong type.
        """
        if _check_parameters(parameters):
            raise TypeError("parameters: found param groups; give the parameters themselves.")
        _check_parameters(origin_params)
        return rebuild_groups(parameters, origin_params)


def _check_parameters(parameters: Sequence[Any]) -> bool:
    """Whether ``parameters`` is a list of groups; raises where it is neither that nor a list of parameters."""
    if isinstance(parameters, (str, Tensor)) or not isinstance(parameters, Sequence):
        raise TypeError(f"parameters: found {type(parameters).__name__}; give a list of parameters or of param groups.")
    if not parameters:
        raise ValueError("parameters: found an empty list; give at least one parameter or group.")
    if all(isinstance(entry, Tensor) for entry in parameters):
        return False
    for entry in parameters:
        if not isinstance(entry, Mapping):
            raise TypeError(f"parameters: found {type(entry).__name__}; give parameters only, or param groups only.")
        if "params" not in entry and ORDER not in entry:
            raise TypeError(f"parameters: found a group with keys {sorted(entry)}; a group has the key 'params'.")
        strangers = [type(p).__name__ for p in listed(entry.get("params", ())) if not isinstance(p, Tensor)]
        if strangers:
            raise TypeError(f"parameters: found {strangers[0]} in a group; give parameters.")
    return True


def _inside(points: Sequence[int], count: int) -> list[Any]:
    """Leave out positions past the end at the end of a rising list; :class:`FusionIndex` refuses the rest."""
    kept = list(points)
    rising = all(type(point) is int for point in kept) and kept == sorted(set(kept))
    return [point for point in kept if point < count] if rising else kept


def _forget_keys(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group.pop(CENTRALIZE, None)
