"""``OptimizerProcess`` and ``ParameterProcess``: param groups under the names of ``mindspore.boost``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.gradient_centralization import centralizable
from torchboost.core.algorithm import Attachment
from torchboost.core.arguments import check_module, check_optimizer, is_integer
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.transforms import CENTRALIZE, Centralize, wish
from torchboost.optim.wrapping_optimizer import described_groups, regrouped

ParamGroup = dict[str, Any]

ORDER = "order_params"
"""Key of an entry that gives only the order of the parameters."""


class OptimizerProcess:
    """Split the groups of an optimizer into a centralised part and the rest, and rebuild the optimizer over them.

    The new optimizer has another number of groups, so checkpoints of the old one cannot be loaded into it.
    :func:`torchboost.centralize_gradients` changes neither groups nor checkpoints.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> process = OptimizerProcess(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> process.add_grad_centralization(model)
        >>> optimizer = process.generate_new_optimizer()

    Args:
        opt: Any optimizer that keeps its parameters in its groups.

    Raises:
        TypeError: ``opt`` is not a ``torch.optim.Optimizer``.
    """

    def __init__(self, opt: Optimizer) -> None:
        check_optimizer(opt, "opt")
        self.opt = opt
        self.centralization: Attachment | None = None
        self._groups: list[ParamGroup] | None = None

    def build_params_dict(self, network: nn.Module) -> dict[int, nn.Module]:
        """Return the owner of each parameter, by ``id(parameter)``. A shared parameter belongs to its first owner."""
        check_module(network, "network")
        owners: dict[int, nn.Module] = {}
        for module in network.modules():
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), module)
        return owners

    def build_gc_params_group(self, params_dict: Mapping[int, nn.Module], parameters: Sequence[Any]) -> list[Any]:
        """Split every group in two: the centralised part with ``grad_centralization: True`` first, then the rest.

        Biases, norm parameters, depthwise convolutions and the normalised head belong to the rest. They are recognised
        by structure. A group with ``grad_centralization: False`` and an entry with ``order_params`` are passed through.
        A plain list of parameters is returned unchanged, because it has no group that could hold the flag.

        Args:
            params_dict: From :meth:`build_params_dict`.
            parameters: Groups as dictionaries, or a plain list of parameters.

        Raises:
            ValueError: The list is empty.
            TypeError: An element is neither a parameter nor a group, or parameters and groups are mixed.
        """
        if not _check_parameters(parameters):
            return list(parameters)
        groups: list[ParamGroup] = []
        for group in parameters:
            if ORDER in group or group.get(CENTRALIZE) is False:
                groups.append(dict(group))
                continue
            chosen = {param for param in _listed(group["params"]) if centralizable(param, params_dict.get(id(param)))}
            groups.extend(_split(group, chosen))
        return groups

    def add_grad_centralization(self, network: nn.Module) -> None:
        """Choose the parameters that the new optimizer centralises, by the structure of ``network``."""
        self._groups = self.build_gc_params_group(self.build_params_dict(network), described_groups(self.opt))

    def generate_new_optimizer(self) -> Optimizer:
        """Copy the optimizer, with all of its settings, over the new groups.

        Groups with ``grad_centralization: True`` are centralised before each step, for any class of optimizer.
        Optimizers of ``torchboost.optim`` read the key. Others get the attachment ``self.centralization``, with
        ``remove()``. The state is shared with the old optimizer, so do not step the old one any more. Hooks and
        learning-rate schedulers of the old one are not taken over: create them afterwards.

        Raises:
            IncompatibleError: The optimizer keeps parameters outside of its groups, as LBFGS does, or wraps another
                one, as ``FreezeOpt`` does.
            TypeError: A group's ``grad_centralization`` is not a boolean.
        """
        groups = self._groups if self._groups is not None else described_groups(self.opt)
        wishes = [wish(group) for group in groups]
        optimizer = regrouped(self.opt, groups)
        if any(wishes) and not isinstance(optimizer, UpdateRule):
            self.centralization = GradientPipeline(Centralize(flag=CENTRALIZE)).attach(optimizer)
        return optimizer


class ParameterProcess:
    """Number parameters for communication, and rebuild param groups over a new list of parameters.

    Example:
        >>> import torch
        >>> parameters = list(torch.nn.Linear(4, 2).parameters())
        >>> process = ParameterProcess()
        >>> parameters = process.assign_parameter_group(parameters, split_point=[1])
        >>> process.fusion_index(parameters)
        (1, 2)
    """

    def __init__(self) -> None:
        self._index: dict[Tensor, int] = {}
        self._last = 1

    def assign_parameter_group(
        self, parameters: Sequence[Tensor], split_point: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Give every parameter a communication-fusion index, which rises by one at each split point.

        The first call starts at 1. A later call on the same object continues with the last index.

        Args:
            parameters: In the order in which they are communicated.
            split_point: Rising positions. By default one, in the middle. Positions after the last parameter are
                ignored, such as 50 and 100 of the default configuration on a small network.

        Returns:
            The parameters. :meth:`fusion_index` returns the indices.

        Raises:
            ValueError: The list is empty, or the split points do not rise or are negative.
            TypeError: An element is not a parameter, or a split point is not an integer.
        """
        _check_parameters(parameters, groups=False)
        points = [len(parameters) // 2] if split_point is None else split_point
        if isinstance(points, str) or not isinstance(points, Sequence) or not all(map(is_integer, points)):
            raise TypeError(f"split_point: found {points!r}; give a list of whole numbers, or None.")
        if list(points) != sorted(set(points)) or any(point < 0 for point in points):
            raise ValueError(f"split_point: found {list(points)}; give increasing positions, 0 or more.")
        first = self._last
        for position, param in enumerate(parameters):
            self._index[param] = self._last = first + sum(point <= position for point in points)
        return list(parameters)

    def fusion_index(self, parameters: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the index of each parameter. Parameters that share one may be sent in one collective.

        The indices are not stored on the parameters. :class:`~torchboost.AdaSum` reads them from this object.

        Raises:
            ValueError: A parameter was never passed to :meth:`assign_parameter_group`.
        """
        missing = sum(param not in self._index for param in parameters)
        if missing:
            raise ValueError(
                f"{missing} of {len(parameters)} parameters have no index; call assign_parameter_group first."
            )
        return tuple(self._index[param] for param in parameters)

    def generate_group_params(
        self, parameters: Sequence[Tensor], origin_params: Sequence[Tensor | Mapping[str, Any]]
    ) -> list[ParamGroup]:
        """Rebuild param groups over a new list of parameters, with the options of the original groups.

        A group without remaining parameters is kept empty. Parameters that are in none of the original groups form a
        last group, with the options of the group that has the most options. ``order_params`` becomes the new list.

        Raises:
            ValueError: A list is empty.
            TypeError: An element has the wrong type.
        """
        _check_parameters(parameters, groups=False)
        if not _check_parameters(origin_params):
            return [{"params": list(parameters)}]
        groups: Any = origin_params
        rest = dict.fromkeys(parameters)
        rebuilt_groups: list[ParamGroup] = []
        for group in groups:
            if ORDER in group:
                rebuilt_groups.append({**group, ORDER: list(parameters)})
                continue
            members = [param for param in _listed(group["params"]) if param in rest]
            rebuilt_groups.append(_over(group, members))
            for param in members:
                rest.pop(param, None)
        if rest:
            largest = max((group for group in groups if ORDER not in group), key=len, default={})
            rebuilt_groups.append({**largest, "params": list(rest)})
            for group in rebuilt_groups:
                group.pop("param_names", None)  # torch requires names in all groups or in none
        return rebuilt_groups


def _check_parameters(parameters: Sequence[Any], *, groups: bool = True) -> bool:
    """Whether ``parameters`` is a list of groups. Raise if it is neither that nor a list of parameters."""
    if isinstance(parameters, (str, Tensor)) or not isinstance(parameters, Sequence):
        raise TypeError(f"parameters: found {type(parameters).__name__}; give a list of parameters or of param groups.")
    if not parameters:
        raise ValueError("parameters: found an empty list; give at least one parameter or group.")
    if all(isinstance(entry, Tensor) for entry in parameters):
        return False
    for entry in parameters:
        if not groups or not isinstance(entry, Mapping) or not {"params", ORDER} & entry.keys():
            kind = f"a group of {sorted(entry)}" if isinstance(entry, Mapping) else type(entry).__name__
            other = ", or param groups only, each with the key 'params'" if groups else ""
            raise TypeError(f"parameters: found {kind}; give parameters only{other}.")
        strangers = [type(p).__name__ for p in _listed(entry.get("params", ())) if not isinstance(p, Tensor)]
        if strangers:
            raise TypeError(f"parameters: found {strangers[0]} in a group; give parameters.")
    return True


def _split(group: ParamGroup, chosen: Collection[Tensor]) -> list[ParamGroup]:
    """Split a group in two, the chosen parameters first. Both parts keep its options. An empty part is omitted."""
    params = _listed(group["params"])
    inside, outside = [p for p in params if p in chosen], [p for p in params if p not in chosen]
    plain = {key: value for key, value in group.items() if key != CENTRALIZE}
    parts = ({**plain, CENTRALIZE: True}, inside), (plain, outside)
    return [_over(part, members) for part, members in parts if members]


def _over(group: Mapping[str, Any], members: list[Tensor]) -> ParamGroup:
    """Copy the group over some of its members, with their names if it has names."""
    names = dict(zip(_listed(group["params"]), group.get("param_names", ()), strict=False))
    return {**group, "params": members, **({"param_names": [names[param] for param in members]} if names else {})}


def _listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a group as a list. Torch allows a single tensor and any iterable."""
    return [params] if isinstance(params, Tensor) else list(params)
