"""Schedule-free AdamW and SGD: an average of the weights replaces a learning-rate schedule."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import Unpack

from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.masters import IN_CACHE, pieces
from torchboost.optim.rules.options import Common, rule_arguments
from torchboost.optim.schedules import whole
from torchboost.optim.tensors import places_by


class _ScheduleFree(UpdateRule):
    """The weights ``y`` of training, the fast weights ``z`` and their average ``x``, of which ``y`` and ``z`` are kept.

    A step is ``z -= lr * d``, ``x += c * (z - x)``, ``y = beta x + (1 - beta) z`` for the direction ``d`` of a rule.
    """

    numbers = ("weight_sum", "largest_lr")
    real_only = keeps_weights = True

    @property
    def title(self) -> str:
        """The rule whose weights are averaged, as in ``"schedule-free AdamW"``."""
        return f"schedule-free {type(self).__name__.removeprefix('ScheduleFree')}"

    def train(self) -> None:
        """Put the weights at which gradients are computed into the parameters, before training continues.

        Does nothing in training mode, which is the mode after construction.
        """
        self._switch(training=True)

    def eval(self) -> None:
        """Put the average into the parameters, before evaluation and before the model is saved.

        BatchNorm's running statistics belong to the other weights. Estimate them again with
        ``torch.optim.swa_utils.update_bn(loader, model)``. Cost: one read and write of the weights.
        """
        self._switch(training=False)

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] == training:
                continue
            beta = self.averaging(group)
            known = [param for param in group["params"] if "z" in self.state.get(param, {})]
            for param in known:
                if "master" in self.state[param]:
                    self.state[param]["master"] = self._stamps.current(param, self.state[param]["master"])
            if known:
                fast = [self.state[param]["z"] for param in known]
                slow = [self.state[param].get("master", param) for param in known]
                foreach.lerp_(slow, fast, 1 - beta if training else 1 - 1 / beta)
                for param, master in zip(known, slow, strict=True):
                    if master is not param:
                        param.copy_(master)
                        self._stamps.note(param)
            group["training"] = training

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rates = {}  # the groups are new objects, and a checkpoint may hold other rates

    def _note_rate(self, group: Mapping[str, Any]) -> None:
        """Warn once if a rate has changed since earlier updates. A rate of 0 moves nothing and does not count."""
        if torch.compiler.is_compiling() or not (rate := float(group["lr"])):
            return
        rates: dict[int, float] = self.__dict__.setdefault("_rates", {})
        if (before := rates.setdefault(id(group), rate)) == rate:
            return
        rates[id(group)] = rate
        if not self.__dict__.setdefault("_told", False):
            self._told = True
            warnings.warn(
                f"{type(self).__name__}: the rate of a group was changed by hand, from {before:g} to {rate:g}. The "
                "average takes the place of a schedule; it weights each update by the square of the largest rate so "
                "far. Leave the rate as it is, and set warmup_steps for a warm-up.",
                UserWarning,
                stacklevel=2,
            )

    def averaging(self, group: Mapping[str, Any]) -> float:
        """Return ``beta`` of a group: the share of the average in the weights of training."""
        raise NotImplementedError

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse invalid options, and steps in evaluation mode or under a scheduler."""
        if "scheduled_lr" in group:
            raise ValueError(
                f"lr: found a schedule; {type(self).__name__} takes a number, because its average takes the place of a "
                "schedule. For a warm-up, set warmup_steps."
            )
        whole("warmup_steps", group["warmup_steps"], least=0)
        if not 0 < self.averaging(group) < 1:
            raise ValueError(
                f"found {self.averaging(group)!r} as the share of the average; give a number above 0 and below 1."
            )
        if "initial_lr" in group:
            raise IncompatibleError(
                f"a learning-rate scheduler is attached to {type(self).__name__}, whose average takes the place of "
                "a schedule; leave the scheduler out. For a warm-up, set warmup_steps."
            )
        if not group["training"]:
            raise RuntimeError(
                f"{type(self).__name__} is in evaluation mode, so the parameters hold the average; call "
                "optimizer.train() before training continues."
            )

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("step", "z", "weight_sum", "largest_lr")

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return fast weights equal to the parameter, and an average of none so far."""
        numbers = {key: torch.zeros((), dtype=torch.float32, device="cpu") for key in self.numbers}
        return {**super().init_state(param, group), "z": param.detach().clone(), **numbers}

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        self._note_rate(group)
        for number, part in _alike(batch):
            lr = float(group["lr"]) * min(1.0, (number + 1) / max(1, group["warmup_steps"]))
            foreach.add_(part.state("step"), 1)
            share = _share(part, lr)
            for piece in pieces(part, IN_CACHE):
                self._step(group, piece, lr, share)

    def directions(self, group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
        """Return the directions of the rule, and update its state."""
        raise NotImplementedError

    def _step(self, group: Mapping[str, Any], batch: Batch, lr: float, share: float) -> None:
        if group["maximize"]:
            batch.grads[:] = foreach.neg(batch.grads)
        directions, beta = self.directions(group, batch), self.averaging(group)
        if group["weight_decay"]:
            directions = foreach.add(directions, batch.params, alpha=float(group["weight_decay"]))
        fast = batch.state("z")
        foreach.lerp_(batch.params, fast, share)
        foreach.add_(batch.params, directions, alpha=lr * (beta * (1 - share) - 1))
        foreach.add_(fast, directions, alpha=-lr)


class ScheduleFreeAdamW(_ScheduleFree):
    """AdamW without a schedule: gradients at ``y``, Adam's steps on ``z``, and the average ``x`` for evaluation.

    ``z -= lr * (g / (sqrt(v^) + eps) + weight_decay * y)``, ``x += c * (z - x)``, ``y = beta1 * x + (1 - beta1) * z``
    with ``c = lr^2 / sum of lr^2``. The result after any number of steps needs no decay of the rate, so the length of
    the run need not be known. Call :meth:`eval` before evaluation and before the model is saved, and :meth:`train`
    before training continues.

    State: ``z``, ``exp_avg_sq``, 8 bytes per float32 weight.

    Source: A. Defazio et al., "The Road Less Scheduled", arXiv 2405.15682.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        lr: Learning rate after the warm-up: a float, or a tensor with one element. A group's may be changed by hand,
            with a warning. The paper takes 1 to 10 times the rate of AdamW with a schedule. On small networks it was
            less here, so tune it.
        betas: The share of ``x`` in ``y``, and the decay rate of the second moment.
        eps: Added to the root of the second moment, at least 0.
        warmup_steps: Updates in which the rate rises linearly.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = ScheduleFreeAdamW(model.parameters(), lr=0.01, warmup_steps=10)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()  # the model now holds the average
        >>> optimizer.train()
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 0.0,
        *,
        warmup_steps: int = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals(), training=True))

    def averaging(self, group: Mapping[str, Any]) -> float:
        """Return the share of the average in the weights of training."""
        return float(group["betas"][0])

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return (*super().state_keys(group), "exp_avg_sq")

    def directions(self, group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
        """Return ``g / (sqrt(v^) + eps)``."""
        beta2 = float(group["betas"][1])
        square = batch.state("exp_avg_sq")
        foreach.mul_(square, beta2)
        foreach.addcmul_(square, batch.grads, batch.grads, 1 - beta2)
        root = foreach.div(square, 1 - beta2 ** float(batch.states[0]["step"]))
        foreach.sqrt_(root)
        foreach.add_(root, float(group["eps"]))
        return foreach.div(batch.grads, root)


class ScheduleFreeSGD(_ScheduleFree):
    """SGD without a schedule: gradients at ``y``, steps on ``z``, and the average ``x`` for evaluation.

    ``z -= lr * (g + weight_decay * y)``, ``x += c * (z - x)``, ``y = momentum * x + (1 - momentum) * z`` with
    ``c = lr^2 / sum of lr^2``. See :class:`ScheduleFreeAdamW` for its use. State: ``z``, 4 bytes per float32 weight.

    Source: A. Defazio et al., "The Road Less Scheduled", arXiv 2405.15682.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        lr: Learning rate after the warm-up. In the paper 10 to 50 times the rate of SGD with momentum and a schedule.
        momentum: The share of ``x`` in ``y``, above 0 and below 1.
        warmup_steps: Updates in which the rate rises linearly.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: Any = 0.0,
        *,
        warmup_steps: int = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals(), training=True))

    def averaging(self, group: Mapping[str, Any]) -> float:
        """Return the share of the average in the weights of training."""
        return float(group["momentum"])

    def directions(self, group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
        """Return the gradients."""
        return list(batch.grads)


def warn_of_training_weights(optimizer: Optimizer, what: str, *, stacklevel: int) -> bool:
    """Warn if the parameters of a schedule-free optimizer are not their average, and return whether they are not.

    ``what`` begins the sentence that ends with the weights of training.
    """
    trained = isinstance(optimizer, _ScheduleFree) and bool(optimizer.state)
    if not trained or not any(group["training"] for group in optimizer.param_groups):
        return False
    warnings.warn(
        f"{type(optimizer).__name__}: {what} the weights of training instead of their average; call optimizer.eval() "
        "before evaluation and before the model is saved, and optimizer.train() before training continues.",
        UserWarning,
        stacklevel=stacklevel,
    )
    return True


def warn_if_evaluated(model: nn.Module, optimizer: Optimizer) -> RemovableHandle:
    """Let a model warn once if it is evaluated on the weights of training. A copy of the model does not warn."""
    return model.register_forward_pre_hook(_Evaluated(optimizer))


class _Evaluated:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = weakref.ref(optimizer)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module.training or torch.is_grad_enabled() or self._optimizer is None:
            return
        optimizer = self._optimizer()
        if optimizer is not None and warn_of_training_weights(optimizer, "the model is evaluated on", stacklevel=6):
            self._optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": None}


def _alike(batch: Batch) -> Iterator[tuple[float, Batch]]:
    """Yield a number of updates with the parameters that had as many, at the same rates. Some may have rested."""
    numbers = ("step", *_ScheduleFree.numbers)
    places_by_past = places_by(tuple(float(state[key]) for key in numbers) for state in batch.states)
    for (count, *_), places in sorted(places_by_past.items()):
        yield count, batch.select(places)


def _share(batch: Batch, lr: float) -> float:
    """Return the share of the new ``z`` in the average, which weights each ``z`` by the square of its rate."""
    largest = max(lr, float(batch.states[0]["largest_lr"]))
    total = float(batch.states[0]["weight_sum"]) + largest**2
    for state in batch.states:
        state["largest_lr"].fill_(largest)
        state["weight_sum"].fill_(total)
    return largest**2 / total if total else 0.0
