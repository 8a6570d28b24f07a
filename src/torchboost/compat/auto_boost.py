"""``AutoBoost``: MindSpore's way in, over a plan."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost import front
from torchboost.config import BoostConfig, ConfigSource
from torchboost.core.algorithm import Attached, Scaler
from torchboost.core.arguments import check_module
from torchboost.core.covering import uncover_copy
from torchboost.core.wrapping import unwrap
from torchboost.distributed.buckets import bucket_options
from torchboost.inference import fast_copy
from torchboost.plan import Plan
from torchboost.registry import Loop

__all__ = ["AutoBoost"]


class AutoBoost:
    """Make training faster within the accuracy a level promises. Objects are independent of one another.

    Args:
        level: ``"O0"`` changes nothing; ``"O1"`` is at least 20 % faster with the accuracy unchanged (within 0.5
            points); ``"O2"`` at least 30 % faster with the accuracy at most 3 points lower. What each turns on,
            and the measurements behind it, is in ``docs/levels.md``.
        boost_config_dict: A dict, a path to a JSON file, JSON text, or empty.
        total_steps: Number of updates of the whole run. Gradient freezing and compilation need it.
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

    def __init__(
        self,
        level: str = "O0",
        boost_config_dict: ConfigSource = "",
        *,
        total_steps: int | None = None,
        loop: Loop = "own",
    ) -> None:
        self._config = BoostConfig.load(boost_config_dict)
        self.level = level
        self.total_steps = total_steps
        self.loop: Loop = loop
        self.plan = Plan.of(level, self._config, loop=loop, total_steps=total_steps)
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
        :class:`~torchboost.algorithms.accumulation.optimizer.AccumulatingOptimizer`, which applies every k-th ``step``;
        and with dimension-reduced training, whose ``step`` needs a function that returns the loss
        (:class:`~torchboost.algorithms.subspace.algorithm.SubspaceRun`; the training cells give it). The training cells
        take the one given, too; in a loop of your own its ``step`` raises ``IncompatibleError``.

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
        made = front.attach(
            network,
            optimizer,
            level=self.level,
            total_steps=self.total_steps,
            config=self._config,
            scaler=scaler,
            loop=self.loop,
            name="network",
            caller="network_auto_process_train",
        )
        self.plan, self.attached, self.scaler = made.plan, made.attached, made.scaler
        return made.model, made.optimizer

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
        return fast_copy(network, sample=sample, pick=front.fastest)

    def explain(self) -> str:
        """Return what is on and what was left out, with the reasons."""
        return self.plan.explain()


def _eval_view(network: nn.Module) -> nn.Module:
    """Return the modules once more, in eval mode, over the same tensors."""
    memo: dict[int, Any] = {}
    for module in unwrap(network).modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        memo |= {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    view = copy.deepcopy(unwrap(network), memo)
    uncover_copy(view)
    return view.eval()
