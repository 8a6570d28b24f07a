"""Boost in a loop that uses Accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import OPTIMIZER_NAME
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer

from torchboost.calibration.calibration import Calibrate
from torchboost.config import ConfigSource
from torchboost.core.arguments import check_module, check_optimizer
from torchboost.core.torch_private import place_of_optimizer
from torchboost.core.wrapping import hookable, parameters_of
from torchboost.distributed.checkpoint import load_optimizer
from torchboost.errors import IncompatibleError
from torchboost.front import attach, warn_of_missing_length
from torchboost.plan import Plan
from torchboost.registry import REGISTRY, Host

__all__ = ["prepare"]

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of training in which each process has the whole model."""


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    level: str = "O1",
    total_steps: int | None = None,
    config: ConfigSource | None = None,
    calibrate: Calibrate = "auto",
    verify: bool = True,
) -> tuple[Any, ...]:
    """Boost a pair of model and optimizer and let an ``Accelerator`` prepare it. Use it instead of its ``prepare``.

    ``save_state`` and ``load_state`` then carry the state of the boosted training as well, so a resumed run continues
    exactly. Weights are saved for the original architecture. Gradient accumulation, clipping, loss scaling and mixed
    precision remain the accelerator's. If the accelerator shards the model with FSDP2, its modules are changed before
    and algorithms are attached after.

    Args:
        accelerator: Of one process, or of several with ``DistributedDataParallel`` or FSDP2
            (``FullyShardedDataParallelPlugin(fsdp_version=2)`` with the state dict type ``SHARDED_STATE_DICT``).
        model: The bare model, changed in place. It is moved to the device of the accelerator first.
        optimizer: Its optimizer.
        *others: Further objects that the accelerator prepares: data loaders, schedulers.
        level: See :func:`torchboost.boost`.
        total_steps: Number of updates in the whole run, not of batches.
        config: If it has a recipe, build the schedule afterwards, on ``boosted.optimizer``, for ``boosted.steps``
            updates, and prepare it then.
        calibrate: See :func:`torchboost.boost`.
        verify: See :func:`torchboost.boost`.

    Returns:
        The prepared model, the prepared optimizer, the prepared ``others`` in their order, and the
        :class:`torchboost.Boosted`. Call its ``remove()`` after the training.

    Raises:
        TypeError: An argument is not an accelerator, a module or an optimizer.
        IncompatibleError: The pair is prepared or wrapped already, or the accelerator uses DeepSpeed,
            Megatron-LM, FSDP1, or FSDP2 with full state dicts or a recipe that builds an optimizer. Nothing is changed.
        ValueError, ConfigError: See :func:`torchboost.boost`.

    Example:
        >>> from torchboost.integrations.accelerate import prepare
        >>> model, optimizer, loader, boosted = prepare(  # doctest: +SKIP
        ...     accelerator, model, optimizer, loader, level="O1", total_steps=10_000
        ... )
    """
    _check(accelerator, model, optimizer)
    if accelerator.device_placement:
        model.to(accelerator.device)
    mixed = accelerator.mixed_precision
    host = Host(loop="accelerate", precision="" if mixed == "no" else mixed, forward=lambda: accelerator.autocast())
    prepared: tuple[Any, ...] = (model, optimizer)
    if accelerator.is_fsdp2:
        plan = Plan.of(level, config, host.facts(model), total_steps=total_steps)
        if plan.recipe.optimizer is not None:
            raise IncompatibleError(
                f"found recipe.optimizer={plan.recipe.optimizer!r} and FSDP2, which takes the optimizer before the "
                "recipe is applied. Build it yourself, as with torchboost.optim.muon_from, and leave it out."
            )
        plan.without({name: "" for name, entry in REGISTRY.items() if entry.lever}).transform(model, optimizer)
        prepared = accelerator.prepare(model, optimizer, *others)
    boosted = attach(
        prepared[0],
        hookable(prepared[1]),
        level=level,
        total_steps=total_steps,
        config=config,
        scaler=accelerator.scaler,
        host=host,
        calibrate=calibrate,
        verify=verify,
        caller="torchboost.integrations.accelerate.prepare",
        transformed=accelerator.is_fsdp2,
    )
    warn_of_missing_length(boosted, config, total_steps, "accelerate")
    if accelerator.is_fsdp2:
        load_moments = _loading_frozen_moments(accelerator, *prepared[:2])
        boosted.attached.with_undo(accelerator.register_load_state_pre_hook(load_moments).remove)
    else:
        prepared = accelerator.prepare(model, boosted.optimizer, *others)
    accelerator.register_for_checkpointing(boosted)
    return *prepared, boosted


def _loading_frozen_moments(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Callable[..., None]:
    """Return a hook of ``load_state`` that loads the optimizer again: torch drops the moments of frozen parameters."""

    def load(_: Any, folder: str | os.PathLike[str]) -> None:
        if not all(p.requires_grad for p in parameters_of(optimizer)):
            path = Path(folder) / f"{OPTIMIZER_NAME}_{place_of_optimizer(accelerator, optimizer)}"
            load_optimizer(path, "optimizer", model, optimizer.optimizer)

    return load


def _check(accelerator: Any, model: Any, optimizer: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator: found {type(accelerator).__name__}; pass an accelerate.Accelerator.")
    check_module(model)
    check_optimizer(optimizer)
    kind = accelerator.distributed_type
    if accelerator.is_fsdp2:
        plugin: Any = accelerator.state.fsdp_plugin
        form = plugin.state_dict_type
        if form != StateDictType.SHARDED_STATE_DICT:
            raise IncompatibleError(
                f"found FSDP2 with {form.name}, which loses the moments of frozen parameters; use "
                "FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type='SHARDED_STATE_DICT')."
            )
    elif kind not in _WHOLE:
        raise IncompatibleError(
            f"found an accelerator of the kind {kind.value}, which replaces model or optimizer by shards of its own. "
            "Use one process, DistributedDataParallel or FullyShardedDataParallelPlugin(fsdp_version=2). For DeepSpeed "
            "see docs/distributed.md."
        )
    if isinstance(optimizer, AcceleratedOptimizer) or hasattr(model, "_original_forward"):
        raise IncompatibleError(
            "found a model or an optimizer that accelerator.prepare was called with already; pass the bare ones, and "
            "leave accelerator.prepare to this function."
        )
