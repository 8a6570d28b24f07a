"""``AutoBoost``: the reference's way in, over a plan."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.accumulation import Accumulator
from torchboost.algorithms.adasum import AdaptiveSum, AdaptiveSumming
from torchboost.algorithms.dim_reduce import SubspaceRun
from torchboost.algorithms.memory_format import ChannelsLast, channels_last
from torchboost.compat.accumulating import AccumulatingOptimizer
from torchboost.config import BoostConfig, ConfigSource
from torchboost.core.algorithm import Attached, Scaler, Target
from torchboost.core.arguments import check_module, check_pair, check_scaler
from torchboost.core.covering import uncover_copy
from torchboost.core.folding import fold_batch_norms
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.plan import Plan
from torchboost.registry import Facts

__all__ = ["AutoBoost", "observers_of", "scaler_of", "summing_of"]

# The reference's API hands only network and optimizer from AutoBoost to the training cell. An observer must not hold
# the optimizer, so that the entry goes when the optimizer goes.
_OBSERVERS: weakref.WeakKeyDictionary[Optimizer, list[Callable[[Tensor], None]]] = weakref.WeakKeyDictionary()
_SCALERS: weakref.WeakKeyDictionary[Optimizer, Scaler] = weakref.WeakKeyDictionary()
_SUMMING: weakref.WeakKeyDictionary[Optimizer, AdaptiveSumming] = weakref.WeakKeyDictionary()


def observers_of(optimizer: Optimizer) -> list[Callable[[Tensor], None]]:
    """Return what wants to be told the losses of this optimizer's updates."""
    return _OBSERVERS.get(optimizer, [])


def scaler_of(optimizer: Optimizer) -> Scaler | None:
    """Return the scaler that an algorithm brought for this optimizer."""
    return _SCALERS.get(optimizer)


def summing_of(optimizer: Optimizer) -> AdaptiveSumming | None:
    """Return the AdaSum that acts on the updates of this optimizer."""
    return _SUMMING.get(optimizer)


class AutoBoost:
    """Make training faster within the accuracy a level promises. Objects are independent of one another.

    Args:
        level: ``"O0"`` changes nothing; ``"O1"`` is at least 20 % faster with the accuracy unchanged (within 0.5
            points); ``"O2"`` at least 30 % faster with the accuracy at most 3 points lower. What each turns on,
            and the measurements behind it, is in ``docs/levels.md``.
        boost_config_dict: A dict, a path to a JSON file, JSON text, or empty.

    Raises:
        ConfigError: Unknown level, mode, section or key, wrong type or value out of range (a ``ValueError``).

    Example:
        >>> import torch, torchboost
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> booster = torchboost.AutoBoost("O1")
        >>> network, optimizer = booster.network_auto_process_train(network, optimizer)
    """

    def __init__(self, level: str = "O0", boost_config_dict: ConfigSource = "") -> None:
        self._config = BoostConfig.load(boost_config_dict)
        self.level = level
        self.plan = Plan.of(level, self._config)
        self.attached = Attached()
        self.scaler: Scaler | None = None
        self._boosted: nn.Module | None = None

    def network_auto_process_train(
        self, network: nn.Module, optimizer: Optimizer, *, scaler: Scaler | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """Boost a pair in place and return it; the loop that trains it stays as it was.

        ``.plan`` then says what was chosen for this pair, ``.attached`` is what was attached: its ``remove()``
        takes it away (BatchNorms that went stay away), its ``state_dict()`` belongs into the checkpoint. A second call
        for the same network takes away what the first one attached. ``.scaler`` is the scaler of the loop: the one
        given, or that of group loss scaling, which a loop of your own must use as it would a ``GradScaler``.

        The optimizer returned is the one given, except with gradient accumulation: then it is one in front of it,
        :class:`~torchboost.compat.accumulating.AccumulatingOptimizer`, which applies every k-th ``step``; and with
        dimension-reduced training, whose ``step`` needs a function that returns the loss
        (:class:`~torchboost.algorithms.dim_reduce.SubspaceRun`; the training cells give it).

        Args:
            network: A bare module, on the device it will train on; DDP and compile come after this call. For FSDP2,
                which replaces the parameters, use :meth:`Plan.transform` and :meth:`Plan.attach`.
            optimizer: Any ``torch.optim.Optimizer`` over the network's parameters.
            scaler: The ``GradScaler`` of the loop, which scales and steps as before; float16 needs one.

        Raises:
            TypeError: Not a module, not an optimizer, or not a scaler.
            ValueError: None of the parameters of the optimizer belongs to the network.
            IncompatibleError: The network is already wrapped and the plan is not empty, or an algorithm cannot work
                on this pair; nothing was changed.
        """
        check_pair(network, optimizer, name="network")
        check_scaler(scaler)
        wrapper = wrapper_of(network)
        if wrapper is not None and self.plan.algorithms:
            raise IncompatibleError(
                f"the network is already wrapped by {wrapper}; call network_auto_process_train on the bare network, "
                "then wrap what it returns."
            )
        if network is self._boosted:
            self.attached.remove()
        if isinstance(optimizer, (AccumulatingOptimizer, SubspaceRun)):
            optimizer = optimizer.opt  # from an earlier call
        self.plan = Plan.of(self.level, self._config, Facts.measure(network, loop="own")).fit(network, optimizer)
        target = Target(network, optimizer, scaler)
        self.attached = self.plan.attach(target)
        self._boosted = network
        returned = target.optimizer
        if isinstance(target.accumulator, Accumulator):
            returned = AccumulatingOptimizer(optimizer, target.accumulator)
        _OBSERVERS[returned] = target.observers
        self.scaler = target.scaler
        _SCALERS.pop(returned, None)
        if target.scaler is not None and target.scaler is not scaler:
            _SCALERS[returned] = target.scaler
        _SUMMING.pop(returned, None)
        if AdaptiveSum.name in self.attached:
            summing = self.attached[AdaptiveSum.name]
            assert isinstance(summing, AdaptiveSumming)
            _SUMMING[returned] = summing
        return network, returned

    def network_auto_process_eval(self, network: nn.Module) -> nn.Module:
        """Return a fast copy for inference; ``network`` itself is left alone and can go on training.

        Every BatchNorm that directly follows a convolution or a linear layer is folded into it, exactly, and
        convolutional networks are stored channels-last. The copy is in eval mode and computes in the precision
        of its parameters; its outputs equal those of ``network.eval()`` within 1e-4 relative in float32.
        Cost: one copy of the parameters. Where the configuration asks for nothing (level O0, mode disable_all) the
        network is returned as it is.

        Raises:
            TypeError: Not a module.
            ValueError: The network computes NaN or infinities, as one that diverged.
        """
        check_module(network, "network")
        if not self.plan.algorithms and (self.level == "O0" or self._config.boost.mode != "auto"):
            return network
        fast = copy.deepcopy(unwrap(network)).eval()
        uncover_copy(fast)
        fold_batch_norms(fast)
        if ChannelsLast().needs_transform(fast):
            channels_last(fast)
        return fast

    def explain(self) -> str:
        """Return what is on and what was left out, with the reasons."""
        return self.plan.explain()
