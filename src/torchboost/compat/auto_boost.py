"""``AutoBoost``: MindSpore's way in, over a plan."""

from __future__ import annotations

import copy
import functools
import statistics
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.accumulation.algorithm import Accumulation, Accumulator
from torchboost.algorithms.accumulation.optimizer import AccumulatingOptimizer
from torchboost.algorithms.adasum.algorithm import AdaptiveSum, AdaptiveSumming
from torchboost.algorithms.loss_scale.algorithm import GroupGradScaler
from torchboost.algorithms.subspace.algorithm import SubspaceRun
from torchboost.config import BoostConfig, ConfigSource
from torchboost.core.algorithm import Attached, Scaler, Target
from torchboost.core.arguments import check_module, check_pair, check_scaler
from torchboost.core.covering import uncover_copy
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.distributed.buckets import bucket_options
from torchboost.errors import IncompatibleError
from torchboost.graph.recording import call
from torchboost.inference import fast_copy
from torchboost.measure.stopwatch import Clock, Warmup, compare
from torchboost.plan import Plan
from torchboost.registry import Facts, Loop

__all__ = ["AutoBoost", "front_of", "observers_of", "scaler_of", "summing_of"]

# MindSpore's API hands only network and optimizer from AutoBoost to the training cell. An observer must not hold
# the optimizer, so that the entry goes when the optimizer goes.
_OBSERVERS: weakref.WeakKeyDictionary[Optimizer, list[Callable[[Tensor], None]]] = weakref.WeakKeyDictionary()
_SCALERS: weakref.WeakKeyDictionary[Optimizer, Scaler] = weakref.WeakKeyDictionary()
_SUMMING: weakref.WeakKeyDictionary[Optimizer, AdaptiveSumming] = weakref.WeakKeyDictionary()
# Only while the booster is there: a network must not keep the state of its optimizer alive.
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attached]] = weakref.WeakKeyDictionary()
# A scaler outlives its booster, as the optimizer keeps it for the training cell.
_SCALED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GroupGradScaler]] = weakref.WeakKeyDictionary()
# What stands in front is kept alive by the optimizer behind it (DirectSteps), also if the caller threw it away.
_FRONTS: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()


def observers_of(optimizer: Optimizer) -> list[Callable[[Tensor], None]]:
    """Return what wants to be told the losses of this optimizer's updates."""
    return _OBSERVERS.get(optimizer, [])


def scaler_of(optimizer: Optimizer) -> Scaler | None:
    """Return the scaler that an algorithm brought for this optimizer."""
    return _SCALERS.get(optimizer)


def summing_of(optimizer: Optimizer) -> AdaptiveSumming | None:
    """Return the AdaSum that acts on the updates of this optimizer."""
    return _SUMMING.get(optimizer)


def front_of(optimizer: Optimizer) -> Optimizer:
    """Return what :class:`AutoBoost` put in front of an optimizer; itself if there is nothing."""
    front = _FRONTS.get(optimizer, lambda: None)()
    return optimizer if front is None else front


def _take_away(module: nn.Module) -> None:
    """Take away what is left on a module of boosters that got it, whether they are still there or not."""
    for found in (_ATTACHED, _SCALED):
        effect = found.get(module, lambda: None)()
        if effect is not None:
            effect.remove()


class AutoBoost:
    """Make training faster within the accuracy a level promises. Objects are independent of one another.

    Args:
        level: ``"O0"`` changes nothing; ``"O1"`` is at least 20 % faster with the accuracy unchanged (within 0.5
            points); ``"O2"`` at least 30 % faster with the accuracy at most 3 points lower. What each turns on,
            and the measurements behind it, is in ``docs/levels.md``.
        boost_config_dict: A dict, a path to a JSON file, JSON text, or empty.
        loop: Who owns the training loop: ``"own"``, which includes the training cells, or a trainer,
            ``"transformers"``, ``"lightning"`` or ``"accelerate"``. Trainers accumulate and scale by themselves, so
            what asks for it here is left out, with the name of their own setting.

    Raises:
        ConfigError: Unknown level, mode, section or key, wrong type or value out of range (a ``ValueError``).
        ValueError: Unknown ``loop``.

    Example:
        >>> import torch, torchboost
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> booster = torchboost.AutoBoost("O1")
        >>> network, optimizer = booster.network_auto_process_train(network, optimizer)
    """

    def __init__(self, level: str = "O0", boost_config_dict: ConfigSource = "", *, loop: Loop = "own") -> None:
        self._config = BoostConfig.load(boost_config_dict)
        self.level = level
        self.loop: Loop = loop
        self.plan = Plan.of(level, self._config, loop=loop)
        self.attached = Attached()
        self.scaler: Scaler | None = None

    def network_auto_process_train(
        self, network: nn.Module, optimizer: Optimizer, *, scaler: Scaler | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """Boost a pair in place and return it; the loop that trains it stays as it was.

        ``.plan`` then says what was chosen for this pair, ``.attached`` is what was attached: its ``remove()``
        takes it away (BatchNorms that went stay away), its ``state_dict()`` belongs into the checkpoint. A second call
        for the same network, of this object or another one that is still there, first takes away what is attached to
        it, so that a second phase of training begins as the first did. ``.scaler`` is the scaler of the loop: the one
        given, or that of group loss scaling, which a loop of your own must use as it would a ``GradScaler``.

        The optimizer returned is the one given, except with gradient accumulation: then it is one in front of it,
        :class:`~torchboost.algorithms.accumulation.optimizer.AccumulatingOptimizer`, which applies every k-th ``step``; and with
        dimension-reduced training, whose ``step`` needs a function that returns the loss
        (:class:`~torchboost.algorithms.subspace.algorithm.SubspaceRun`; the training cells give it). The training cells take
        the one given, too; in a loop of your own its ``step`` raises ``IncompatibleError``.

        Args:
            network: A bare module, on the device it will train on; DDP and compile come after this call. For FSDP2,
                which replaces the parameters, use :meth:`Plan.transform` and :meth:`Plan.attach`.
            optimizer: Any ``torch.optim.Optimizer`` over the network's parameters.
            scaler: The ``GradScaler`` of the loop, which scales and steps as before; float16 needs one.

        Raises:
            TypeError: Not a module, not an optimizer, or not a scaler.
            ValueError: None of the parameters of the optimizer belongs to the network.
            IncompatibleError: The network is already wrapped and the plan is not empty, or an algorithm cannot work
                on this pair; nothing was changed, but that an earlier boost of this network is gone.
        """
        check_pair(network, optimizer, name="network")
        check_scaler(scaler)
        wrapper = wrapper_of(network)
        if wrapper is not None and self.plan.algorithms:
            raise IncompatibleError(
                f"the network is already wrapped by {wrapper}; call network_auto_process_train on the bare network, "
                "then wrap what it returns."
            )
        if isinstance(optimizer, (AccumulatingOptimizer, SubspaceRun)):
            optimizer = optimizer.opt  # from an earlier call
        facts = Facts.measure(network, loop=self.loop)
        target = Target(network, optimizer, scaler)
        for module in network.modules():
            _take_away(module)
        front = front_of(optimizer)
        if isinstance(front, (AccumulatingOptimizer, SubspaceRun)):
            front.direct.remove()  # of a booster that is not there any more
        plan = Plan.of(self.level, self._config, facts).fit(network, optimizer)
        self.attached = plan.attach(target)
        self.plan = plan
        _ATTACHED[network] = weakref.ref(self.attached)
        returned = self._in_front(target, optimizer)
        _OBSERVERS[returned] = target.observers
        self.scaler = target.scaler
        _SCALERS.pop(returned, None)
        if target.scaler is not None and target.scaler is not scaler:
            _SCALERS[returned] = target.scaler
            if isinstance(target.scaler, GroupGradScaler):
                _SCALED[network] = weakref.ref(target.scaler)
        _SUMMING.pop(returned, None)
        if AdaptiveSum.name in self.attached:
            summing = self.attached[AdaptiveSum.name]
            assert isinstance(summing, AdaptiveSumming)
            _SUMMING[returned] = summing
        return network, returned

    def _in_front(self, target: Target, optimizer: Optimizer) -> Optimizer:
        """Return what the loop steps in the place of ``optimizer``, and let the cells find it from there."""
        front = target.optimizer
        if isinstance(target.accumulator, Accumulator):
            front = AccumulatingOptimizer(optimizer, target.accumulator)
            self.attached[Accumulation.name].with_undo(front.direct.remove)
        _FRONTS.pop(optimizer, None)
        if front is not optimizer:
            _FRONTS[optimizer] = weakref.ref(front)
        return front

    def ddp_options(self, network: nn.Module) -> dict[str, Any]:
        """Return the arguments that give ``DistributedDataParallel`` the configured ``common.gradient_split_groups``.

        ``DistributedDataParallel(network, **booster.ddp_options(network))`` then begins a new bucket at each of these
        positions in the list of the trained parameters; without the key there are no arguments. See
        :func:`torchboost.distributed.buckets.bucket_options`.

        Raises:
            TypeError: Not a module.
            IncompatibleError: Parameters of several types or devices, or a torch without such an argument.
        """
        check_module(network, "network")
        common = self._config.common
        if "gradient_split_groups" not in common.model_fields_set:
            return {}
        points = common.gradient_split_groups
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return bucket_options(trained, [points] if isinstance(points, int) else points)

    def network_auto_process_eval(self, network: nn.Module, *, sample: Any = None) -> nn.Module:
        """Return a fast copy for inference; ``network`` itself is left alone and can go on training.

        Every BatchNorm that certainly follows a convolution or a linear layer in every call is folded into it, and
        kernels are stored channels-last; see :func:`~torchboost.inference.fast_copy`. The copy is in eval
        mode, consists of torch's modules and the network's own, and computes in the precision of its parameters. Its
        outputs equal those of ``network.eval()`` within 1e-4 of the largest output in float32, which is checked: on
        ``sample``, or in the first call of the copy with the inputs that arrive there. If the check fails, the copy
        computes as the network does, with a warning.

        With ``sample``, the plain, the folded and the channels-last form are timed against each other and the fastest
        is returned; it also allows more to be folded, as it says which arguments are given.

        Cost: one copy of the parameters, two until the check. If the configuration asks for nothing (level O0, mode
        disable_all) it is a copy of the modules that shares all tensors with ``network``, in eval mode: it follows the
        training.

        Args:
            network: Wrapped or not.
            sample: Input of the kind the copy will be called with: a tensor, a tuple of positional or a dict of keyword
                arguments.

        Raises:
            TypeError: Not a module, or one that cannot be copied.
            ValueError: The network does not run on ``sample``, or computes NaN or infinities, as one that diverged.

        Warns:
            NoEffectWarning: Folding changed the outputs; from the first call of the copy without ``sample``.
        """
        check_module(network, "network")
        if not self.plan.algorithms and (self.level == "O0" or self._config.boost.mode != "auto"):
            return _eval_view(network)
        return fast_copy(network, sample=sample, pick=_fastest)

    def explain(self) -> str:
        """Return what is on and what was left out, with the reasons."""
        return self.plan.explain()


def _fastest(forms: Mapping[str, nn.Module], sample: Any) -> str:
    """Name the form with the shortest call on a sample, measured side by side."""
    device = next((p.device for form in forms.values() for p in form.parameters()), torch.device("cpu"))
    calls = {name: torch.inference_mode()(functools.partial(call, form, sample)) for name, form in forms.items()}
    warmup = Warmup(least=2, window=1, limit=4, seconds=10)
    times = compare(calls, baselines=[], pairs=8, warmup=warmup, clock=Clock.of(device)).samples
    return min(times, key=lambda name: statistics.median(times[name]))


def _eval_view(network: nn.Module) -> nn.Module:
    """Return the modules once more, in eval mode, over the same tensors."""
    memo: dict[int, Any] = {}
    for module in unwrap(network).modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        memo |= {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    view = copy.deepcopy(unwrap(network), memo)
    uncover_copy(view)
    return view.eval()
