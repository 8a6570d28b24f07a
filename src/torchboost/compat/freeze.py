"""MindSpore's names for gradient freezing, built on :mod:`torchboost.algorithms.grad_freeze.algorithm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze, Pattern, freeze_blocks
from torchboost.algorithms.grad_freeze.freezer import Freezing, Prefix
from torchboost.algorithms.grad_freeze.schedule import length_of, period_of, repeated
from torchboost.core.arguments import check_optimizer, check_pair, check_sens
from torchboost.core.wrapping import parameters_of
from torchboost.errors import warn_no_effect
from torchboost.optim.wrapping_optimizer import WrappingOptimizer

_PATTERNS = get_args(Pattern)[:3]
"""MindSpore's types 0 and 1, and type 2, which MindSpore does not have."""
_DEFAULT_GROUPS = 10
_LEAST = 3
"""As in MindSpore, a unit with so many parameters ends when another matrix or kernel follows."""


class GradientFreeze:
    """Freeze the first groups of a network's parameters in random or periodic updates.

    Args:
        param_groups: Number of groups, or the groups themselves: lists of parameters. The k-th list holds the
            parameters that train at index k. The first list holds all.
        freeze_type: 0 continuous, 1 interval, 2 progressive. See :class:`torchboost.algorithms.GradFreeze`.
        freeze_p: The share of updates that train *everything*, at least 0 and below 1. MindSpore's documentation calls
            it the probability of freezing, but its code does the same as here.
        total_steps: Number of updates in the whole run.
        seed: Seed of type 1. The sequence equals MindSpore's under ``numpy.random.seed(seed)``.

    Attributes:
        freezing: The attachment, after :meth:`freeze_generate`. Its ``state_dict()`` belongs in the checkpoint.

    Raises:
        TypeError: ``param_groups`` is neither a number nor a list of lists of parameters.
        ValueError: A number is out of range.

    Example:
        >>> import torch, torchboost
        >>> network = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> freeze = torchboost.GradientFreeze(3, freeze_type=1, freeze_p=0.7, total_steps=1000)
        >>> network, optimizer = freeze.freeze_generate(network, optimizer)
    """

    def __init__(
        self,
        param_groups: int | Sequence[Sequence[nn.Parameter]],
        freeze_type: int,
        freeze_p: float,
        total_steps: int,
        *,
        seed: int = 0,
    ) -> None:
        self._groups = None if isinstance(param_groups, int) else _explicit(param_groups)
        number = param_groups if isinstance(param_groups, int) else len(param_groups)
        self._settings, self._seed = _settings_of(number, freeze_type, freeze_p, total_steps), seed
        self.freezing: Freezing | None = None

    def freeze_generate(self, network: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Attach the freezing to a pair and return the same two objects. The loop does not change.

        There is one optimizer with one set of moments, whereas MindSpore builds one optimizer per group. A second call
        removes the attachment of the first.

        Raises:
            TypeError: An argument is not a module, or not an optimizer.
            ValueError: None of the optimizer's parameters belongs to the network.
            IncompatibleError: See :func:`torchboost.freeze_blocks`.
        """
        check_pair(network, optimizer, name="network")
        if self.freezing is not None:
            self.freezing.remove()
        settings = self._settings
        if settings.pattern == "progressive" and self._groups is None:
            self.freezing = freeze_blocks(network, optimizer, settings, seed=self._seed)
            return network, optimizer
        groups = self._groups or self.split_parameters_groups(network, settings.groups)
        schedule = settings.schedule([1 / len(groups)] * len(groups), seed=self._seed)
        self.freezing = Freezing(network, optimizer, _prefixes(groups), schedule, total_steps=settings.total_steps)
        return network, optimizer

    def generate_freeze_index_sequence(
        self, parameter_groups_number: int, freeze_strategy: int, freeze_p: float, total_steps: int
    ) -> list[int]:
        """Return the index of each update. Index k trains group k, that is, everything except the first k groups.

        Args:
            parameter_groups_number: Number of groups. With one group all entries are 0.
            freeze_strategy: 0, 1 or 2.
            freeze_p: The share of updates that train everything.
            total_steps: The list has ``int(1.01 * total_steps)`` entries. For type 0 this is rounded up to whole
                periods.

        Raises:
            ValueError: A number is out of range.
        """
        settings = _settings_of(parameter_groups_number, freeze_strategy, freeze_p, total_steps)
        schedule = settings.schedule([1 / settings.groups] * settings.groups, seed=self._seed)
        length = length_of(total_steps)
        if freeze_strategy == 0:
            period = period_of(parameter_groups_number, freeze_p)
            length = period * -(-length // period)
        return [schedule(step) for step in range(length)]

    def split_parameters_groups(self, net: nn.Module, freeze_para_groups_number: int) -> list[list[nn.Parameter]]:
        """Return the parameters that train at each index, in order of registration. The first list holds all of them.

        A new unit begins at a matrix or kernel if the current unit holds at least three parameters. Vectors join the
        current unit, by their shape: MindSpore looks for "bn" and "bias" in names. There are at most as many groups as
        units: MindSpore then silently freezes nothing. :class:`torchboost.algorithms.GradFreeze` splits by modules in
        execution order instead, which saves more.
        """
        return _split(list(net.parameters()), freeze_para_groups_number)


class FreezeOpt(WrappingOptimizer):
    """An optimizer whose updates follow a freezing strategy: ``opt`` itself, with one set of moments.

    It shares the parameter groups and the state of ``opt``, so schedulers and scalers may use either. The learning rate
    follows all updates, not the updates of one group.

    Args:
        opt: Any ``torch.optim.Optimizer``.
        train_parameter_groups: Lists of parameters. The k-th list holds the parameters that train at index k. The first
            list holds all. By default ten nested groups of the optimizer's parameters.
        train_strategy: Index of each update, repeated at the end: a list, a tuple or a 1-D tensor of integers. By
            default the groups in turn.

    Attributes:
        freezing: The attachment.

    Raises:
        TypeError: ``opt`` is not an optimizer, or the groups or the strategy have the wrong type.
        ValueError: A strategy is given without groups, an index has no group, or ``opt`` does not hold a parameter.

    Example:
        >>> import torch, torchboost
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> groups = [list(net.parameters()), list(net[1].parameters())]
        >>> optimizer = torchboost.FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), groups, [0, 1])
    """

    def __init__(
        self,
        opt: Optimizer,
        train_parameter_groups: Sequence[Sequence[nn.Parameter]] | None = None,
        train_strategy: Sequence[int] | Tensor | None = None,
    ) -> None:
        check_optimizer(opt, "opt")
        if train_strategy is not None and train_parameter_groups is None:
            raise ValueError("train_strategy: found one without train_parameter_groups; its indices need groups.")
        parameters: list[Any] = parameters_of(opt)
        lists = train_parameter_groups
        groups = _split(parameters, None) if lists is None else _explicit(lists)
        strangers = len({p for group in groups for p in group}.difference(parameters))
        if strangers:
            raise ValueError(
                f"train_parameter_groups: found {strangers} parameters that opt does not update; remove them."
            )
        strategy = _strategy(train_strategy, len(groups))
        super().__init__(opt)
        self.groups = groups
        self.freezing = Freezing(None, opt, _prefixes(groups), repeated(strategy))

    def _own_state(self) -> dict[str, Any]:
        return self.freezing.state_dict()

    def _loading(self, state: dict[str, Any]) -> Callable[[], None]:
        return self.freezing.loading(state)


def freeze_cell(
    reducer_flag: bool,
    network: nn.Module,
    optimizer: FreezeOpt,
    sens: float,
    grad: Any = None,
    use_grad_accumulation: bool = False,
    mean: bool | None = None,
    degree: int | None = None,
    max_accumulation_step: int = 1,
) -> tuple[Callable[..., Tensor], ...]:
    """Return one training step per group of a :class:`FreezeOpt`. Step k trains group k and returns the loss.

    Args:
        reducer_flag: Sum the gradients over all ranks, for a network that is not wrapped.
        network: Returns the loss, a tensor of shape ``()``.
        optimizer: The choice of the step overrides its strategy.
        sens: Multiplies the gradients. They are not divided again.
        grad: Not used: autograd replaces MindSpore's gradient operator.
        use_grad_accumulation: Update only after every ``max_accumulation_step`` calls of one step.
        mean: Divide the sum by ``degree``.
        degree: Number of ranks. By default the size of the process group.
        max_accumulation_step: Calls per update, whose gradients are averaged.

    Raises:
        TypeError: ``optimizer`` is not a :class:`FreezeOpt`, or ``sens`` is not a number.
    """
    check_sens(sens)
    if not isinstance(optimizer, FreezeOpt):
        found = type(optimizer).__name__
        raise TypeError(f"optimizer: found {found}; wrap it: FreezeOpt(optimizer, groups, strategy).")
    window = max_accumulation_step if use_grad_accumulation else 1
    divisor = (degree or dist.get_world_size()) if reducer_flag and mean else 1
    scale = sens / window

    def step_of(index: int, group: Sequence[nn.Parameter]) -> Callable[..., Tensor]:
        gradients: dict[nn.Parameter, Tensor] = {}  # of a window that is not full
        calls = count(1)

        def step(*inputs: Any) -> Tensor:
            optimizer.freezing.freeze(index)
            for parameter in group:
                parameter.grad = gradients.pop(parameter, None)
            loss = network(*inputs)
            (loss * scale).backward()
            reached = {parameter: parameter.grad for parameter in group if parameter.grad is not None}
            if next(calls) % window:
                gradients.update(reached)
                for parameter in group:
                    parameter.grad = None
                return loss.detach()
            for gradient in reached.values() if reducer_flag else ():
                dist.all_reduce(gradient)
                gradient.div_(divisor)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return tuple(step_of(index, group) for index, group in enumerate(optimizer.groups))


def _prefixes(groups: Sequence[Sequence[nn.Parameter]]) -> tuple[Prefix, ...]:
    every = dict.fromkeys(p for group in groups for p in group)
    return tuple(Prefix(parameters=tuple(p for p in every if p not in set(group))) for group in groups)


def _split(parameters: list[nn.Parameter], wanted: int | None) -> list[list[nn.Parameter]]:
    """Return the groups. If no number is wanted, there are ten, or fewer for few units."""
    groups = _DEFAULT_GROUPS if wanted is None else wanted
    units: list[list[nn.Parameter]] = []
    for parameter in parameters:
        if units and (parameter.ndim < 2 or len(units[-1]) < _LEAST):
            units[-1].append(parameter)
        else:
            units.append([parameter])
    if wanted is not None and wanted > len(units):
        warn_no_effect(
            f"split_parameters_groups: {groups} groups were requested, but the parameters form {len(units)} units; "
            f"there are {len(units)} groups.",
            above=2,
        )
    number = max(1, min(groups, len(units)))
    starts = [index * (len(units) // number) for index in range(number)]
    return [[p for unit in units[start:] for p in unit] for start in starts]


def _explicit(groups: Any) -> list[list[nn.Parameter]]:
    lists = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    if not lists or not all(isinstance(p, Tensor) for group in groups for p in group):
        raise TypeError(
            "the groups must be a list of lists of parameters, one list for each index, such as "
            f"[list(network.parameters()), list(network.head.parameters())]; found {groups!s:.60}."
        )
    if not groups or not all(groups):
        raise ValueError("the groups: found an empty one; each index must train at least one parameter.")
    return [list(group) for group in groups]


def _strategy(strategy: Any, groups: int) -> tuple[int, ...]:
    if strategy is None:
        return tuple(range(groups))
    indices = strategy.tolist() if isinstance(strategy, Tensor) else strategy
    if not isinstance(indices, (list, tuple)) or any(type(index) is not int for index in indices):
        raise TypeError(
            f"train_strategy: found {strategy!r}; give a list, a tuple or a 1-D tensor of integers, or None."
        )
    if not indices or not all(0 <= index < groups for index in indices):
        raise ValueError(f"train_strategy: each entry must be at least 0 and below the number of groups, {groups}.")
    return tuple(indices)


def _settings_of(groups: int, freeze_type: int, freeze_p: float, total_steps: int) -> GradFreeze:
    if freeze_type not in range(len(_PATTERNS)):
        raise ValueError(f"freeze_type: found {freeze_type!r}; give 0 (continuous), 1 (interval) or 2 (progressive).")
    return GradFreeze(groups=groups, pattern=_PATTERNS[freeze_type], full_share=freeze_p, total_steps=total_steps)
