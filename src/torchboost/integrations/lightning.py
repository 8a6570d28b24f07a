"""Boost inside Lightning's ``Trainer``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from torchboost.calibration.calibration import Calibrate, resolved
from torchboost.config import ConfigSource, RecipeSection
from torchboost.errors import IncompatibleError
from torchboost.front import Boosted, attach, warn_of_missing_state
from torchboost.plan import Plan
from torchboost.registry import REGISTRY, Host

__all__ = ["Boost"]

_LOG = logging.getLogger("lightning.pytorch.torchboost")
_FULL = ("32-true", "64-true")


class Boost(Callback):
    """Boosts the network of a ``LightningModule`` in ``fit``.

    The network is changed in ``setup``, before Lightning restores a checkpoint and wraps it, and the algorithms are
    attached in ``on_fit_start``. The number of updates comes from the trainer. The attachments are removed when ``fit``
    ends, also by an error. Checkpoints hold the weights of the original architecture, which ``load_from_checkpoint``
    loads without this callback, and its state, from which a resumed run continues exactly. Gradient accumulation,
    clipping, loss scaling and mixed precision remain the trainer's.

    Args:
        level: As for :func:`torchboost.boost`, also ``config``, ``calibrate`` and ``verify``.
        module: Name of the network in the ``LightningModule``, such as ``"net"`` if ``training_step`` calls
            ``self.net(x)``. If it is None, the only child that has parameters.

    Attributes:
        boosted: The boosted pair of the last ``fit``. None before.

    Raises:
        ValueError, ConfigError: An argument is not valid.
        IncompatibleError: ``config`` has a recipe that builds an optimizer or shortens the run: Lightning owns both.
            Raised in ``fit`` if a recipe scales rates and ``configure_optimizers`` returned a schedule, if there are
            several networks or optimizers, or if the strategy is not one device, DDP or FSDP2. Nothing is changed.

    Example:
        >>> from torchboost.integrations.lightning import Boost
        >>> trainer = Trainer(max_epochs=10, callbacks=[Boost("O1", module="net")])  # doctest: +SKIP
        >>> trainer.fit(module, loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        level: str = "O1",
        *,
        module: str | None = None,
        config: ConfigSource | None = None,
        calibrate: Calibrate = "auto",
        verify: bool = True,
    ) -> None:
        recipe = Plan.of(level, config, loop="lightning").recipe
        _check_recipe(recipe)
        self._rate = recipe.rate
        self.level, self.module, self.config = level, module, config
        self.calibrate: Calibrate = resolved(calibrate)
        self.verify = verify
        self.boosted: Boosted | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._logged = False

    @property
    def plan(self) -> Plan | None:
        """The active algorithms, and the omitted ones with the reason. None before ``fit``."""
        return None if self.boosted is None else self.boosted.plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change the modules of the network, before its weights are restored and it is wrapped."""
        if stage != "fit":
            return
        self._check_strategy(trainer)
        network = self._network(pl_module)
        self._logged, self._loaded = False, None
        length = _length_before_data(trainer)
        plan = Plan.of(self.level, self.config, _host(trainer).facts(network), total_steps=length)
        levers = {lever.name: "" for lever in plan.levers}  # on one device the first call tries them
        if _sharded(trainer):  # FSDP2 takes contiguous kernels only
            levers = {name: "" for name, entry in REGISTRY.items() if entry.lever}
        (plan if isinstance(trainer.strategy, DDPStrategy) else plan.without(levers)).transform(network)
        self._refresh_averages(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the algorithms to the network and its optimizer."""
        network = self._network(pl_module)
        if trainer.lr_scheduler_configs and self._rate != 1:
            raise IncompatibleError(
                f"found recipe.rate={self._rate:g} and a schedule, which was made before; multiply the rates by it in "
                "configure_optimizers, and leave it out of the recipe."
            )
        self.boosted = attach(
            network,
            self._optimizer(trainer, network),
            level=self.level,
            total_steps=_length(trainer),
            config=self.config,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            host=_host(trainer),
            calibrate=self.calibrate,
            verify=self.verify,
            name="network",
            caller="Boost",
            transformed=_sharded(trainer),
        )
        _LOG.info("%s\n%s", self.level, self.boosted.explain())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the state of the checkpoint, after the optimizer's."""
        if self._loaded is not None and self.boosted is not None:
            self.boosted.load_state_dict(self._loaded)
        elif trainer.ckpt_path is not None and self.boosted is not None:
            warn_of_missing_state(self.boosted, _LOG)
        self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the choice and the gain of the trial once, with the trainer's loggers."""
        choice = None if self.boosted is None else self.boosted.choice
        if self._logged or choice is None:
            return
        self._logged = True
        for logger in trainer.loggers:
            logger.log_metrics(choice.figures(), step=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the attachments."""
        if self.boosted is not None:
            self.boosted.levers.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the attachments."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {} if self.boosted is None else self.boosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the algorithms are attached."""
        self._loaded = state_dict or None

    def _network(self, pl_module: LightningModule) -> nn.Module:
        children = {name: child for name, child in pl_module.named_children() if any(True for _ in child.parameters())}
        name = self.module if self.module is not None else next(iter(children), "")
        if self.module is None and len(children) != 1:
            raise IncompatibleError(
                f"found {len(children)} networks in {type(pl_module).__name__}: {', '.join(children) or 'none'}. Name "
                "the one that training_step calls: Boost(module=...). A network must be made in __init__."
            )
        try:
            return pl_module.get_submodule(name)
        except AttributeError:
            raise IncompatibleError(
                f"module: found {name!r}; {type(pl_module).__name__} has {', '.join(children) or 'no networks'}. A "
                "network must be made in __init__, not in configure_model."
            ) from None

    def _optimizer(self, trainer: Trainer, network: nn.Module) -> Optimizer:
        weights = set(network.parameters())
        optimizers = [o for o in trainer.optimizers if any(p in weights for g in o.param_groups for p in g["params"])]
        if len(optimizers) != 1:
            raise IncompatibleError(
                f"found {len(optimizers)} optimizers for the network {self.module or ''!r}; Boost needs exactly one."
            )
        return optimizers[0]

    def _check_strategy(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
            raise IncompatibleError(
                f"found {type(strategy).__name__}, which replaces model or optimizer by shards of its own. Use one "
                "device, DDPStrategy, or ModelParallelStrategy with fully_shard in configure_model. For DeepSpeed see "
                "docs/distributed.md."
            )
        if isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["tensor_parallel"].size() > 1:
            raise IncompatibleError(
                "found ModelParallelStrategy with tensor parallelism, which divides layers; use "
                "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1)."
            )

    def _refresh_averages(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let averages of the weights that were listed before this callback copy the changed network."""
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if callback is self:
                return
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
                callback.setup(trainer, pl_module, "fit")


def _check_recipe(recipe: RecipeSection) -> None:
    """Refuse settings that Lightning decides before a callback can."""
    if recipe.optimizer is not None:
        raise IncompatibleError(
            f"found recipe.optimizer={recipe.optimizer!r}, but Lightning makes the optimizer; return it from "
            "configure_optimizers, as with torchboost.optim.muon_from, and leave it out of the recipe."
        )
    if recipe.length < 1:
        raise IncompatibleError(
            f"found recipe.length={recipe.length:g}, but Lightning sets the length; give Trainer(max_steps=...) this "
            "share of the updates, fit the schedule to them, and leave it out of the recipe."
        )


def _sharded(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy, ModelParallelStrategy)


def _length(trainer: Trainer) -> int | None:
    """Return the number of updates of the run, or None if it has no known end."""
    total = trainer.estimated_stepping_batches
    return int(total) if total not in (-1, float("inf")) else None


def _length_before_data(trainer: Trainer) -> int | None:
    """Return the same before the LightningModule is set up, which may make its data. None if there are none yet."""
    try:
        return _length(trainer)
    except Exception:
        return None  # if the data raise later too, Lightning says so


def _host(trainer: Trainer) -> Host:
    precision = str(trainer.precision)
    return Host(loop="lightning", precision="" if precision in _FULL else precision)
