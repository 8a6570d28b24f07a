"""``AutoBoost``: MindSpore's entry point, built on a plan."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost import front
from torchboost.calibration.calibration import Calibrate, resolved
from torchboost.config import BoostConfig, ConfigSource
from torchboost.core.algorithm import AttachedAlgorithms, Scaler
from torchboost.core.arguments import check_module
from torchboost.core.wrapping import unwrap
from torchboost.inference import fast_copy
from torchboost.plan import Plan
from torchboost.registry import Host, Loop


class AutoBoost:
    """Make training faster within the accuracy that a level promises. Objects are independent of each other.

    Args:
        level: ``"O0"``, ``"O1"`` or ``"O2"``. See :func:`torchboost.boost`, also for the arguments by name.
        boost_config_dict: A dict, a path to a JSON file, JSON text, or empty.
        total_steps: Number of updates in the whole run.
        loop: The owner of the training loop. ``"own"`` includes the training cells.
        calibrate: Whether the first training call measures which speed levers pay.
        verify: Whether it compares the speed levers with a plain step.

    Raises:
        ConfigError: A level, mode, section or key is unknown, or a value has the wrong type or is out of range. A
            ``ConfigError`` is a ``ValueError``.
        ValueError: ``loop`` is unknown.

    Example:
        >>> import torch, torchboost
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> booster = torchboost.AutoBoost("O1")
        >>> network, optimizer = booster.network_auto_process_train(network, optimizer)
    """

    def __init__(
        self,
        level: str = "O0",
        boost_config_dict: ConfigSource = "",
        *,
        total_steps: int | None = None,
        loop: Loop = "own",
        calibrate: Calibrate = "auto",
        verify: bool = True,
    ) -> None:
        self._config = BoostConfig.load(boost_config_dict)
        self.level = level
        self._attach = partial(
            front.attach,
            level=level,
            total_steps=total_steps,
            config=self._config,
            host=Host(loop=loop),
            calibrate=resolved(calibrate),
            verify=verify,
            name="network",
            caller="network_auto_process_train",
        )
        self._plan = Plan.of(level, boost_config_dict, loop=loop, total_steps=total_steps)
        self._boosted: front.Boosted | None = None
        self.attached = AttachedAlgorithms()
        self.scaler: Scaler | None = None

    @property
    def plan(self) -> Plan:
        """The active and the omitted algorithms, with the reasons. The trial at the first training call changes it."""
        return self._plan if self._boosted is None else self._boosted.plan

    def network_auto_process_train(
        self, network: nn.Module, optimizer: Optimizer, *, scaler: Scaler | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """Boost a pair in place and return it. The training loop does not change.

        It does what :func:`torchboost.boost` does, with its arguments and errors. Afterwards ``.plan``, ``.attached``
        and ``.scaler`` are as of :class:`torchboost.Boosted`. A second call for the same network, on this object or
        another one that still exists, first removes its attachments, so that a second phase of training begins like the
        first.

        The returned optimizer is the given one, with two exceptions. With gradient accumulation it is an
        :class:`~torchboost.algorithms.grad_accumulation.optimizer.AccumulatingOptimizer` around the given one, which
        applies every k-th ``step``. With dimension-reduced training it is one whose ``step`` needs a function that
        returns the loss (:class:`~torchboost.algorithms.dim_reduce.algorithm.DimReduceRun`). The training cells pass
        this function. In these two cases the training cells accept the given optimizer too, but in your own loop its
        ``step`` raises ``IncompatibleError``.
        """
        boosted = self._attach(network, optimizer, scaler=scaler)
        self._boosted, self.attached, self.scaler = boosted, boosted.attached, boosted.scaler
        return boosted.model, boosted.optimizer

    def network_auto_process_eval(self, network: nn.Module, *, sample: Any = None) -> nn.Module:
        """Return a fast copy for inference. ``network`` itself is not changed and can continue to train.

        See :func:`~torchboost.inference.fast_copy`, also for the arguments and errors. If the configuration turns
        nothing on (level O0, mode disable_all), the copy is in eval mode and shares all tensors with ``network``, so it
        follows the training.
        """
        check_module(network, "network")
        if not self.plan.algorithms and (self.level == "O0" or self._config.boost.mode != "auto"):
            return _eval_view(network)
        return fast_copy(network, sample=sample)

    def explain(self) -> str:
        """Return which algorithms are on and which were omitted, with the reasons, as ``Boosted.explain`` does."""
        return self.plan.explain() if self._boosted is None else self._boosted.explain()

    def _repr_html_(self) -> str:
        return (self.plan if self._boosted is None else self._boosted)._repr_html_()


def _eval_view(network: nn.Module) -> nn.Module:
    """Return a copy of the modules in eval mode that shares all tensors."""
    memo: dict[int, Any] = {}
    for module in unwrap(network).modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        memo |= {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    return copy.deepcopy(unwrap(network), memo).eval()
