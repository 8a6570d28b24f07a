"""Gradient accumulation: several passes per update, weighted to give the update of one large batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import is_integer, is_number
from torchboost.core.torch_private import compiled_call, exchange_of_a_pass
from torchboost.core.wrapping import data_parallel, unwrap
from torchboost.errors import IncompatibleError, shown


def checked_steps(steps: int) -> int:
    """Return a number of micro-steps per update, or refuse it."""
    if not is_integer(steps) or steps < 1:
        raise ValueError(f"steps: found {steps!r}; pass the number of batches per update, an integer of 1 or more.")
    return steps


@dataclass(slots=True)
class Window:
    """One window: ``index`` of ``length`` micro-steps are done. ``weight`` is their sum, ``length`` when full."""

    length: int = 1
    index: int = 0
    weight: float = 0.0
    counted: bool | None = None
    phase: Literal["between", "open", "shared", "broken"] = "between"

    @classmethod
    def saved(cls, entries: Any) -> Window:
        """Return the window of a checkpoint. Raise ``ValueError`` if it is damaged."""
        try:
            window = cls(**entries)
            counts = is_integer(window.length) and is_integer(window.index) and 0 <= window.index < window.length
            sound = counts and is_number(window.weight) and 0 <= window.weight < math.inf
        except TypeError:
            sound, window = False, cls()
        if not sound or window.counted not in (None, True, False) or window.phase != "between":
            raise ValueError(f"the checkpoint's window is damaged: found {shown(entries)}; load another checkpoint.")
        return window

    def checked(self, count: float | Tensor | None) -> float | None:
        """Return a count as a number, if it fits to those before."""
        if self.counted not in (None, count is not None):
            number, start = ("none", "with counts") if count is None else ("one", "without")
            raise ValueError(
                f"count: found {number}, but the window began {start}; pass one for each micro-batch or for none."
            )
        number = None if count is None else float(count)
        if number is not None and not 0 <= number < math.inf:
            raise ValueError(f"count: found {number}; allowed are finite numbers, 0 or more.")
        return number

    def add(self, weight: float, *, counted: bool) -> None:
        """Add a micro-batch."""
        self.weight += weight
        self.counted = counted

    def correction(self, weight: float) -> float:
        """Return the factor that turns sums over ``length`` into the mean over a weight."""
        if weight == 0:
            raise ValueError("count: found 0 for every micro-batch of the window; leave such batches out.")
        return self.length / weight


class _Ranks:
    """The ranks that average the gradients of one model: by DDP, by FSDP2, or a single one.

    The model is as the loop calls it: wrapped by DDP, containing one as in ``WithLoss(DDP(model))``, or compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._ddp = model, data_parallel(model, replicas=True)
        if self._ddp is not None and self._ddp.static_graph:
            raise IncompatibleError(
                "DistributedDataParallel was built with static_graph=True, under which a backward pass without "
                "synchronisation fails in torch; build it without static_graph."
            )
        self._units: list[Any] = [
            unit for unit in unwrap(model).modules() if hasattr(unit, "set_requires_gradient_sync")
        ]
        self._group = None if self._ddp is None else self._ddp.process_group
        self.sharded = bool(self._units)  # gradients that are not yet reduced cannot be read
        self._count = dist.get_world_size(self._group) if self._ddp is not None or self.sharded else 1

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which gradients are not exchanged. The next pass outside it synchronises them."""
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            for unit in self._units:
                unit.set_requires_gradient_sync(False, recurse=False)
            try:
                yield
            finally:
                for unit in self._units:
                    unit.set_requires_gradient_sync(True, recurse=False)

    def catch_up(self) -> None:
        """Take part in the exchange of DDP at the start of a pass, if other ranks ran a pass and this one did not.

        It does nothing on ranks that ran the pass. All ranks must call it.
        """
        if self._ddp is not None:
            # The order of the buckets and the buffers, which torch exchanges in suspended passes too.
            with torch.enable_grad(), self._ddp.no_sync():
                exchange_of_a_pass(self._ddp)

    def average(self) -> None:
        """Average every gradient that any rank holds, after suspended passes. Not for FSDP2.

        Parameters outside of DDP are skipped, as by DDP.
        """
        parameters = [p for p in (self._ddp or self._model).parameters() if p.requires_grad]
        if self._count == 1 or not parameters:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._group)
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if somewhere:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient, group=self._group)
                parameter.grad = gradient.div_(self._count)

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        """Return the mean value of all ranks."""
        return self._reduced(value, dist.ReduceOp.SUM) / self._count

    def _reduced(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self._count == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=next(self._model.parameters()).device)
        dist.all_reduce(shared, operation, group=self._group)
        return float(shared)


class Accumulator:
    """Accumulates the gradients of ``steps`` backward passes into the gradient of one large batch.

    For micro-batches ``i`` on all ranks, with counts ``n_i`` and mean losses ``L_i``, the gradients are

        sum(n_i * grad(L_i)) / sum(n_i)

    :meth:`share` multiplies the loss by its weight. Count samples or, if the losses are means over tokens, tokens: any
    ragged split is then exact. Without counts, all micro-batches weigh the same. The gradients are complete when the
    last micro-step ends. Ranks exchange no gradients before that. If an epoch ends inside a window, pass
    ``micro_step(last=True)`` or call :meth:`flush`: the average is then taken over the micro-batches in the window.

    Cost: the gradients are kept in memory between micro-steps (whole gradients under FSDP2, not shards). Counts cost
    one pass over the gradients per ragged window and, on several ranks, one collective of a single number.

    Limits: gradients of parameters outside ``model`` are not averaged over ragged or short windows. If ``model``
    contains a DDP, gradients of parameters outside that DDP are not exchanged, as without accumulation. BatchNorm
    normalises each micro-batch separately. CUDA graphs overwrite accumulated gradients: a model that is already
    compiled with them is refused. Compiling it later is not detected.

    Args:
        steps: Micro-steps per update, 1 or more. Setting the attribute applies from the next window on.
        model: The model as the loop calls it. If you wrap the model later, set the attribute again.

    Attributes:
        ready: Whether the window is complete. If so, step the optimizer, zero the gradients and step the scheduler.

    Raises:
        ValueError: ``steps`` is not an integer of 1 or more.
        IncompatibleError: The model is wrapped by DDP with ``static_graph=True``, contains several DDPs, is wrapped by
            FSDP1, or is compiled with CUDA graphs.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulator = torchboost.Accumulator(3, model)
        >>> for size in (8, 8, 5):
        ...     with accumulator.micro_step():
        ...         loss = model(torch.randn(size, 4)).square().mean()
        ...         accumulator.share(loss, size).backward()
        ...     if accumulator.ready:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    def __init__(self, steps: int, model: nn.Module) -> None:
        self.steps = checked_steps(steps)
        self.ready = False
        self._window = Window()
        self._nominal: float | None = None
        self.model = model

    @property
    def model(self) -> nn.Module:
        """The model as the loop calls it."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        _check_graphs(model)
        self._ranks = _Ranks(model)
        self._model = model

    @property
    def begun(self) -> bool:
        """Whether the window holds gradients and is not complete."""
        return self._window.index > 0 and not self.ready

    @contextmanager
    def micro_step(self, *, last: bool = False) -> Iterator[None]:
        """Return the context of one forward and backward pass. Pass the loss through :meth:`share` inside it.

        Args:
            last: End the window with this pass even if it is not full. All ranks must agree.

        Raises:
            RuntimeError: The previous pass failed half-way, or this one never called :meth:`share`.
        """
        if self.ready:
            self.ready, self._window = False, Window()
        window = self._in_phase("between")
        if not window.index:
            window.length = checked_steps(self.steps)
        closing = last or window.index + 1 >= window.length
        window.phase = "open"
        try:
            with nullcontext() if closing else self._ranks.suspended():
                yield
        except BaseException:
            # A failure before share() does not touch the gradients. After it, they may hold part of a pass.
            window.phase = "between" if window.phase == "open" else "broken"
            raise
        if window.phase == "open":
            window.phase = "broken"
            raise RuntimeError(
                "the micro-step ended without a call of share(); call accumulator.share(loss).backward() inside it."
            )
        window.phase = "between"
        window.index += 1
        if closing:
            self._complete()

    def share(self, loss: Tensor, count: float | Tensor | None = None) -> Tensor:
        """Return the loss times the weight of this micro-batch. Call it once per micro-step.

        Args:
            loss: The mean over the samples or tokens, of shape ``()``.
            count: Number of samples or tokens in the loss, 0 or more. Without it, all micro-batches weigh the same.

        Raises:
            ValueError: A count is negative, not finite or missing, only some micro-batches of a window have counts, or
                the count is 0 and the mean loss is NaN.
            RuntimeError: Called outside a micro-step, or twice in one.
        """
        window = self._in_phase("open")
        number = window.checked(count)
        if number == 0 and not bool(torch.isfinite(loss)):
            raise ValueError(
                f"count: found 0 for a loss of {loss.item()}; the mean over nothing: divide the sum by at least 1."
            )
        if number is not None and self._nominal is None:
            # A typical count keeps losses at their usual size. Any number works if it is the same on all ranks.
            self._nominal = self._ranks.largest(max(number, 1.0))
        factor = 1.0 if number is None or self._nominal is None else number / self._nominal
        window.add(factor, counted=number is not None)
        # The nominal count takes the path of a plain mean, so equal batches give the same bits as without counts.
        part = loss if factor == 1.0 else loss * factor
        window.phase = "shared"
        return part if window.length == 1 else part / window.length

    def flush(self) -> bool:
        """End a window that is not full. Return whether any rank held gradients. If so, update.

        All ranks must call this, after the same number of full windows. Their last windows may differ in length or be
        empty.

        Raises:
            IncompatibleError: The model is sharded by FSDP2, which reduces gradients in backward passes only, or
                ``steps`` differs between the ranks.
            RuntimeError: The last micro-step failed half-way.
        """
        window = Window() if self.ready else self._in_phase("between")
        self._ranks.catch_up()
        length = self._longest(window)
        if not length:
            return False
        self._refuse_shards("completed by flush()", "mark its last pass with micro_step(last=True)")
        self.ready, self._window, window.length = False, window, length
        self._ranks.average()
        self._complete()
        return True

    def reset(self) -> None:
        """Drop the window and its gradients. All ranks must call it.

        Raises:
            IncompatibleError: FSDP2 is in the middle of a window. Unreduced gradients cannot be read.
        """
        self._refuse_shards("dropped", "load the last checkpoint")
        self.ready, self._window = False, Window()
        for parameter in self._model.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the window, with this rank's gradients if it is not empty. Cheapest after an update.

        Raises:
            IncompatibleError: FSDP2 is in the middle of a window. Unreduced gradients cannot be read.
        """
        self._in_phase("between")
        if self.ready or not self._window.index:
            return {"nominal": self._nominal, "window": None}
        self._refuse_shards("saved", "save after a window has ended")
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self._model.parameters()]
        return {"nominal": self._nominal, "window": asdict(self._window), "gradients": gradients}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`. Gradients held before are dropped.

        A window that has begun keeps its length.

        Raises:
            ValueError: The gradients belong to another model, or the window is damaged. Nothing was loaded.
        """
        parameters = list(self._model.parameters())
        gradients = state_dict.get("gradients", [None] * len(parameters))
        fit = [g is None or g.shape == p.shape for g, p in zip(gradients, parameters, strict=False)]
        if len(gradients) != len(parameters) or not all(fit):
            raise ValueError(
                f"the checkpoint's {len(gradients)} gradients do not fit the {len(parameters)} parameters of this "
                "model; load it with the model that it was saved from."
            )
        nominal, window = state_dict.get("nominal"), Window.saved(state_dict.get("window") or {})
        if nominal is not None and not (is_number(nominal) and 0 < nominal < math.inf):
            raise ValueError(f"the checkpoint of the accumulator is damaged: found {nominal!r} as nominal count.")
        self.ready, self._nominal, self._window = False, nominal, window
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _in_phase(self, expected: str) -> Window:
        phase = self._window.phase
        if phase == expected:
            return self._window
        if expected == "between" and phase == "shared":
            phase = "open"
        raise RuntimeError(
            {
                "between": "share() was called outside a micro-step; call it inside `with accumulator.micro_step():`.",
                "open": "a micro-step is still open; end it first.",
                "shared": "share() was already called in this micro-step; add the losses and share their sum once.",
                "broken": "a micro-step failed half-way, so the gradients may hold a part of it; call reset(), which "
                "drops the window, or load a checkpoint.",
            }[phase]
        )

    def _complete(self) -> None:
        """Scale the gradients to the average over the window, on all ranks."""
        window = self._window
        weight = window.weight
        if window.counted or window.index < window.length:
            weight = self._ranks.mean(weight)
        if weight == 0:
            self._window = Window()
        correction = window.correction(weight)
        if correction != 1.0:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)
        self.ready = True

    def _longest(self, window: Window) -> int:
        """Return the length of the windows that are not empty, the same on all ranks. It is 0 if all are empty."""
        begun = window.index > 0
        # A rank that has just shared its first count asks for the largest count, 1 or more. Take part in that.
        while (shortest := -self._ranks.largest(-window.length if begun else -math.inf)) < 0:
            self._nominal = -shortest
        if shortest == math.inf:
            return 0
        longest = self._ranks.largest(window.length if begun else 0.0)
        if longest != shortest:
            raise IncompatibleError(
                f"flush() found windows of {shortest:g} micro-steps on one rank and of {longest:g} on another; set the "
                "same steps on all ranks, then load the last checkpoint or call reset() on all of them."
            )
        return int(longest)

    def _refuse_shards(self, what: str, instead: str) -> None:
        if self._ranks.sharded and self._window.index and not self.ready:
            raise IncompatibleError(
                f"the unreduced gradients of FSDP2 cannot be read, so a window that is not full cannot be {what}; "
                f"{instead}."
            )


def _check_graphs(model: nn.Module) -> None:
    """Refuse CUDA graphs, which overwrite accumulated gradients, with or without an error."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return
    for module in model.modules():
        for compiled in (module, compiled_call(module)):
            # Only the result of torch.compile has this method.
            config = getattr(compiled, "get_compiler_config", dict)() or {}
            if config.get("triton.cudagraphs"):
                raise IncompatibleError(
                    "grad_accumulation: the model is compiled with CUDA graphs, and each run overwrites the gradients "
                    "of the run before; compile it without mode 'reduce-overhead' or 'max-autotune' "
                    "('max-autotune-no-cudagraphs' works)."
                )


@dataclass(frozen=True, kw_only=True)
class GradAccumulation(Algorithm):
    """One update after several batches. The loop must use ``target.accumulator``.

    :class:`~torchboost.core.step.TrainStep` and the training cell do so. Your own loop needs three more lines, see
    :class:`Accumulator`.

    Args:
        steps: Micro-steps per update.
    """

    name: ClassVar[str] = "grad_accumulation"
    # After compilation, so that CUDA graphs are detected.
    traits: ClassVar[Traits] = Traits(order=95)
    steps: int = 1

    def __post_init__(self) -> None:
        checked_steps(self.steps)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that a window of one batch changes nothing."""
        return "the loop already updates after every batch (steps=1)" if self.steps == 1 else None

    def check(self, target: Target) -> None:
        """Refuse a target that already has an accumulator, and a model that cannot skip a synchronisation."""
        if target.accumulator is not None:
            raise IncompatibleError("grad_accumulation: the target already has an accumulator; remove that one first.")
        Accumulator(self.steps, target.model)

    def attach(self, target: Target) -> Attachment:
        """Give the target its accumulator, whose state :class:`~torchboost.core.step.TrainStep` saves.

        After ``remove()`` a window that has begun is completed. Every batch after it is a full window.
        """
        accumulator = target.accumulator = Accumulator(self.steps, target.model)

        def release() -> None:
            accumulator.steps = 1
            if not accumulator.begun:  # else it stays, so that a training step completes the mean
                target.accumulator = None

        return Attachment(undo=release)
