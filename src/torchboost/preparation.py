"""What a model needs before it is sharded: its modules are changed, and the plan is attached later."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from torchboost.config import ConfigSource
from torchboost.core.algorithm import Algorithm
from torchboost.core.arguments import check_module, check_optimizer
from torchboost.plan import Plan
from torchboost.registry import Facts

__all__ = ["prepare"]


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    level: str = "O1",
    total_steps: int | None = None,
    config: ConfigSource | None = None,
) -> Plan:
    """Change the modules of a bare model before it is sharded or wrapped, and return the plan to attach later.

    FSDP2 replaces the parameters, so the optimizer is built after sharding. Prepare the bare model, shard it, build the
    optimizer, then call ``plan.attach(torchboost.Target(model, optimizer))``. Nothing is measured or checked; rules
    choose the levers.

    Args:
        model: Changed in place. It must be on the device that it will train on.
        optimizer: If it exists already, it follows the parameters that are replaced.
        level: As are ``total_steps`` and ``config``: see :func:`torchboost.boost`, also for the errors.
        total_steps: Updates of the whole run.
        config: Settings that override the level.

    Raises:
        IncompatibleError: The model is already wrapped, or the configuration has a recipe, which only
            :func:`torchboost.boost` applies. Nothing is changed.
    """
    check_module(model)
    if optimizer is not None:
        check_optimizer(optimizer)
    plan = Plan.of(level, config, Facts.measure(model, loop="own"), total_steps=total_steps)
    plan.check_recipe()
    changing = [a for a in plan.algorithms if type(a).applied is not Algorithm.applied]
    idle = [a.name for a in changing if not (a.needs_transform(model) or a.applied(model))]
    plan = replace(plan.without(dict.fromkeys(idle, "it finds nothing to change in this model")), levers=())
    plan.transform(model, optimizer)
    return plan
