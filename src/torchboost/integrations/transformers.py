"""Boost inside ``transformers.Trainer`` and the trainers built on it."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.optim import Optimizer
from transformers import Trainer

from torchboost.calibration.calibration import Calibrate, resolved
from torchboost.config import ConfigSource
from torchboost.core.files import write_whole
from torchboost.errors import IncompatibleError
from torchboost.front import Boosted, attach, warn_of_missing_state
from torchboost.plan import Plan
from torchboost.registry import Host

__all__ = ["BoostMixin", "BoostTrainer", "boost"]

_LOG = logging.getLogger("transformers.torchboost")

SIDE_FILE = "torchboost.pt"
"""File of a checkpoint that holds the state of the boosted training."""

_Base = Trainer if TYPE_CHECKING else object
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class BoostMixin(_Base):
    """Boosts the training of a ``Trainer`` class that it is put in front of, as in ``class Mine(BoostMixin, Trainer)``.

    The pair of model and optimizer is boosted in each call of ``train``, after the trainer has made the optimizer and
    before it wraps the model. The number of updates comes from the trainer. If ``boost_config`` has a recipe, the
    optimizer is built from the trainer's, its rates are scaled, and ``recipe.length`` of the updates are trained, with
    the trainer's schedule fitted to them. The attachments are removed when ``train`` ends, also by an error. Weights
    are saved for the original architecture, so ``from_pretrained`` loads them without this package. Each checkpoint has
    an additional file ``torchboost.pt``, from which a resumed run continues exactly.

    Gradient accumulation, clipping, loss scaling and mixed precision remain as in ``TrainingArguments``. If it sets
    ``bf16`` or ``fp16``, the level leaves autocast to it.

    Args:
        boost: The ``level`` of :func:`torchboost.boost`. ``calibrate`` and ``verify`` are as there.
        boost_config: Its ``config``.
        **kwargs: The trainer's.

    Attributes:
        boosted: The boosted pair of the last call of ``train``. None before the first one.

    Raises:
        ValueError, ConfigError: An argument is not valid.
        IncompatibleError: In ``train``, if the trainer shards the model, as DeepSpeed and FSDP do, or if a recipe
            meets a schedule that was given to the trainer, or a second call of ``train``. Nothing is changed.
    """

    boosted: Boosted | None
    _stage: Literal["outside", "plain", "boosted"]
    """Outside ``train``, in ``train`` with a plain pair, or in ``train`` with a boosted pair."""

    def __init__(
        self,
        *args: Any,
        boost: str = "O1",
        boost_config: ConfigSource | None = None,
        calibrate: Calibrate = "auto",
        verify: bool = True,
        **kwargs: Any,
    ) -> None:
        self._set_boost(boost, boost_config, calibrate, verify)
        super().__init__(*args, **kwargs)

    def _set_boost(self, level: str, config: ConfigSource | None, calibrate: Calibrate, verify: bool) -> None:
        self._calibrate: Calibrate = resolved(calibrate)
        self._recipe, self._full_steps = Plan.of(level, config, loop="transformers").recipe, None
        self._level, self._config, self._verify = level, config, verify
        self.boosted, self._stage, self._awaited, self._logged = None, "outside", None, False

    @property
    def plan(self) -> Plan | None:
        """The active algorithms, and the omitted ones with the reason. None before ``train``."""
        return None if self.boosted is None else self.boosted.plan

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does. See its documentation for arguments and result."""
        self._check_unsharded()
        self._stage, self._logged = "plain", False
        try:
            return super().train(*args, **kwargs)
        finally:
            self._stage, self._awaited = "outside", None
            if self.boosted is not None:
                self.boosted.levers.end()

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Count samples and updates as the trainer does, and shorten the run as the recipe says."""
        values = super().set_initial_training_values(*args, **kwargs)
        epochs, of_epoch, examples, samples, *others, steps = values
        self._full_steps, left = steps, self._recipe.steps_of(steps)
        return values if left == steps else (epochs, of_epoch, examples, round(samples * left / steps), *others, left)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Make the optimizer as the trainer does. During ``train`` the pair is then boosted."""
        super().create_optimizer(*args, **kwargs)
        if self._stage != "outside":
            self._boost()
        return cast(Optimizer, self.optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one forward and backward pass as the trainer does."""
        loss = super().training_step(*args, **kwargs)
        if not self._logged and self.boosted is not None and self.boosted.choice is not None:
            self._logged = True
            # An entry of this step. The log of a subclass may also end its averages, as in trl.
            Trainer.log(self, self.boosted.choice.figures())
        return loss

    def _boost(self) -> None:
        accelerator = self.accelerator
        mixed = accelerator.mixed_precision
        self.boosted = attach(
            cast(torch.nn.Module, self.model),
            cast(Optimizer, self.optimizer),
            level=self._level,
            total_steps=self._full_steps or self.state.max_steps,
            config=self._config,
            scaler=accelerator.scaler,
            host=Host(
                loop="transformers",
                precision="" if mixed in (None, "no") else mixed,
                forward=lambda: accelerator.autocast(),
            ),
            calibrate=self._calibrate if self.args.n_gpu < 2 else False,  # DataParallel calls replicas
            verify=self._verify and self.args.n_gpu < 2,
            caller="trainer.train",
        )
        self.optimizer, self._stage = self.boosted.optimizer, "boosted"
        _LOG.info("%s\n%s", self._level, self.boosted.explain())
        if self._awaited is not None:
            checkpoint, self._awaited = self._awaited, None
            self._load_from_checkpoint(checkpoint)

    def _check_unsharded(self) -> None:
        sharded = {
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled or self.is_fsdp_xla_enabled,
            "a distributed_config": getattr(self, "is_distributed_loading_by_transformers", False),
        }
        for name, used in sharded.items():
            if used:
                raise IncompatibleError(
                    f"found {name}, which replaces model or optimizer by shards of its own. Train with one process or "
                    "DistributedDataParallel, or use torchboost.prepare with fully_shard in a loop of your own."
                )

    # The state that the trainer saves and loads

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint. If the pair is not boosted yet, remember to.

        A level looks at the weights that a run starts from. The weights of the checkpoint come after that.
        """
        if self._stage == "plain":
            self._awaited = resume_from_checkpoint
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and self.boosted is not None:
            data = io.BytesIO()
            torch.save(self.boosted.state_dict(), data)
            write_whole(Path(output_dir) / SIDE_FILE, data.getvalue())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.boosted is None:
            return
        file = Path(checkpoint) / SIDE_FILE
        if file.exists():
            self.boosted.load_state_dict(torch.load(file, weights_only=True))
        else:
            warn_of_missing_state(self.boosted, _LOG)


class BoostTrainer(BoostMixin, Trainer):
    """``transformers.Trainer`` that boosts its training. See :class:`BoostMixin`.

    Example:
        >>> from torchboost.integrations.transformers import BoostTrainer
        >>> trainer = BoostTrainer(model, args, train_dataset=data, boost="O1")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> print(trainer.boosted.explain())  # doctest: +SKIP
    """


def boost(
    trainer: AnyTrainer,
    level: str = "O1",
    *,
    config: ConfigSource | None = None,
    calibrate: Calibrate = "auto",
    verify: bool = True,
) -> AnyTrainer:
    """Return a trainer that does the same as the given one, and boosts its training. Use it instead of the given one.

    ``trainer`` is any ``transformers.Trainer``, such as an ``SFTTrainer``, before ``train``. It is not changed. Both
    share model, arguments, data and callbacks. The other arguments are those of :class:`BoostMixin`.

    Returns:
        An object of a class made of :class:`BoostMixin` and the class of ``trainer``.

    Raises:
        TypeError: ``trainer`` is not a ``transformers.Trainer``.
        ValueError, ConfigError: See :class:`BoostMixin`.

    Example:
        >>> from torchboost.integrations.transformers import boost
        >>> trainer = boost(SFTTrainer(model, args, train_dataset=data), "O1")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer: found {type(trainer).__name__}; pass a transformers.Trainer, or a pair to torchboost.boost."
        )
    kind = type(trainer)
    if not isinstance(trainer, BoostMixin):
        kind = type(f"Boost{kind.__name__}", (BoostMixin, kind), {})
    twin = object.__new__(kind)
    vars(twin).update(vars(trainer))
    twin._set_boost(level, config, calibrate, verify)  # pyright: ignore[reportAttributeAccessIssue]
    return cast(AnyTrainer, twin)
