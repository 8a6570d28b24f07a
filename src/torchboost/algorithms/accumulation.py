"""Several backward passes per update, weighted so that the update is that of one large batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError

__all__ = ["Accumulation", "Accumulator"]

Reduction: TypeAlias = Literal["mean", "sum"]


class Accumulator:
    """Collects the gradients of ``steps`` backward passes; together they are the gradient of one large batch.

    In a loop of your own::

        with accumulator.micro_step():
            accumulator.share(loss_fn(model(x), y)).backward()
        if accumulator.ready:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    :meth:`share` divides the loss by the length of the window. Give it the number of samples or tokens behind a mean
    loss, and each micro-batch contributes by that number, on one rank or many: exact for any ragged split. The
    gradients are complete when the context of the last micro-step ends; ranks synchronise nothing before.

    Where an epoch ends inside a window, say so with ``micro_step(last=True)``, or call :meth:`flush`: the update is
    then averaged over what the window holds.

    BatchNorm sees one micro-batch at a time, here as everywhere: its statistics are those of the micro-batches.

    Args:
        steps: Micro-steps per update, 1 or more.
        model: What is trained, wrapped or not.

    Raises:
        ValueError: ``steps`` is no integer of 1 or more.
        IncompatibleError: DDP was built with ``static_graph=True``, which cannot leave out a synchronisation.

    Cost: nothing per micro-step but the gradients' memory between updates. With counts, one small collective per
    window on several ranks, and one pass over the gradients when the window was ragged.
    """

    def __init__(self, steps: int, model: nn.Module) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps: found {steps!r}; an integer of 1 or more says how many batches make an update.")
        if isinstance(model, DistributedDataParallel) and model.static_graph and steps > 1:
            raise IncompatibleError(
                "DistributedDataParallel was built with static_graph=True, under which torch fails when a backward "
                "pass does not synchronise; build it without, or use steps=1."
            )
        self.steps = steps
        self.ready = False
        self._model = model
        self._index = 0
        self._weight = 0.0
        self._counted = False
        self._nominal: float | None = None
        self._synchronised = False

    @contextmanager
    def micro_step(self, *, last: bool = False) -> Iterator[None]:
        """Return the context of one forward and backward pass.

        Args:
            last: End the window with this pass although it is not full; all ranks must agree.
        """
        if self.ready:
            self._begin()
        closing = last or self._index + 1 == self.steps
        before = self._weight
        try:
            with self._synchronising(closing):
                yield
        except BaseException:
            self._weight = before
            raise
        if self._weight == before and not self._counted:
            self._weight += 1.0  # the loop divided the loss itself
        self._index += 1
        if closing:
            self._synchronised = True
            self._complete()

    def share(self, loss: Tensor, count: float | None = None, *, reduction: Reduction = "mean") -> Tensor:
        """Return the part of the loss that this micro-batch contributes; call it once inside a micro-step.

        Args:
            loss: Of shape ``()``.
            count: Number of samples or tokens behind the loss; without it all micro-batches weigh the same.
            reduction: Whether the loss is their mean or their sum. Only a sum may have a count of 0.

        Raises:
            ValueError: A count that is negative or missing where one is needed, or counts for some micro-batches of a
                window and not for others.
        """
        self._check_count(count, reduction)
        if count is None:
            self._weight += 1.0
            return loss if self.steps == 1 else loss / self.steps
        if self._nominal is None:
            self._nominal = self._agreed(max(float(count), 1.0), dist.ReduceOp.MAX)
        self._counted = True
        self._weight += count / self._nominal
        if reduction == "sum":
            return loss / (self._nominal * self.steps)
        # The nominal count takes the path of a plain mean, so that equal batches give the same bits as without counts.
        part = loss if count == self._nominal else loss * (count / self._nominal)
        return part if self.steps == 1 else part / self.steps

    def _check_count(self, count: float | None, reduction: Reduction) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction: found {reduction!r}; allowed are 'mean' and 'sum'.")
        if (count is not None) != self._counted and (self._counted or self._index):
            found, began = ("one", "without") if count is not None else ("none", "with counts")
            raise ValueError(
                f"count: found {found}, but the window began {began}; give one for each micro-batch or none."
            )
        if count is None and reduction == "sum":
            raise ValueError("count: found none; the number of samples or tokens is needed to average a sum.")
        if count is not None and not (count > 0 or (count == 0 and reduction == "sum")):
            raise ValueError(f"count: found {count}; allowed are positive numbers, and 0 with reduction='sum'.")

    def flush(self) -> bool:
        """End a window that is not full, on all ranks alike; update if this returns True, as then it held something.

        Raises:
            IncompatibleError: The model is sharded by FSDP2, whose gradients are reduced by backward passes only.
        """
        if self.ready or not self._agreed(float(self._index), dist.ReduceOp.SUM):
            return False
        if not self._synchronised and self._ranks() > 1:
            self._synchronise()
        self._complete()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, in mid-window with the gradients so far (of this rank)."""
        state: dict[str, Any] = {"index": 0, "nominal": self._nominal}
        if self._index and not self.ready:
            gradients = [None if p.grad is None else p.grad.detach().clone() for p in self._model.parameters()]
            state |= {"index": self._index, "weight": self._weight, "counted": self._counted, "gradients": gradients}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned, with the model's weights loaded already.

        Raises:
            ValueError: The checkpoint is of a longer window, or of another model; nothing was loaded.
        """
        index, gradients = int(state_dict["index"]), state_dict.get("gradients", [])
        parameters = list(self._model.parameters())
        if index >= self.steps and index:
            raise ValueError(f"the checkpoint holds {index} micro-steps; a window of {self.steps} cannot continue it.")
        if index and [g is None or g.shape for g in gradients] != [
            g is None or p.shape for g, p in zip(gradients, parameters, strict=False)
        ]:
            raise ValueError("the checkpoint's gradients do not fit the parameters of this model.")
        self._begin()
        self._nominal = state_dict["nominal"]
        if index:
            self._index, self._weight, self._counted = index, state_dict["weight"], state_dict["counted"]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _begin(self) -> None:
        self.ready, self._index, self._weight, self._counted, self._synchronised = False, 0, 0.0, False, False

    def _complete(self) -> None:
        """Scale the gradients so that they are averaged over what the window holds, on all ranks."""
        held = self._weight
        if self._counted or self._index < self.steps:
            held = self._agreed(self._weight, dist.ReduceOp.SUM) / self._ranks()
        if held == 0:
            raise ValueError("the window holds no samples at all: every count was 0; leave such batches out.")
        if held != self.steps:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.steps / held)
        self.ready = True

    def _synchronising(self, wanted: bool) -> AbstractContextManager[object]:
        """Return a context in which backward passes reduce gradients over the ranks, or leave them alone."""
        if isinstance(self._model, DistributedDataParallel):
            return nullcontext() if wanted else self._model.no_sync()
        if wrapper_of(self._model) == "fully_shard":
            # The reduction adds what earlier passes of the window left unreduced.
            self._model.set_requires_gradient_sync(wanted)  # pyright: ignore[reportCallIssue]
        return nullcontext()

    def _synchronise(self) -> None:
        """Average the gradients that DDP did not, in one collective per parameter that any rank has a gradient of."""
        if not isinstance(self._model, DistributedDataParallel):
            raise IncompatibleError(
                "FSDP2 reduces gradients in backward passes only, so a window cannot be ended after its last one; "
                "mark that pass: accumulator.micro_step(last=True)."
            )
        group = self._model.process_group
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        held = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
        for parameter, somewhere in zip(parameters, held.tolist(), strict=True):
            if somewhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad.div_(self._ranks())

    def _ranks(self) -> int:
        """Return over how many ranks the gradients are averaged."""
        if isinstance(self._model, DistributedDataParallel):
            return dist.get_world_size(self._model.process_group)
        return dist.get_world_size() if wrapper_of(self._model) == "fully_shard" else 1

    def _agreed(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self._ranks() == 1:
            return value
        device = next(self._model.parameters()).device
        group = self._model.process_group if isinstance(self._model, DistributedDataParallel) else None
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(shared, operation, group=group)
        return float(shared)


@dataclass(frozen=True, kw_only=True)
class Accumulation(Algorithm):
    """Settings of :class:`Accumulator`.

    Args:
        steps: Micro-steps per update.
    """

    name: ClassVar[str] = "grad_accumulation"
    traits: ClassVar[Traits] = Traits(order=60)
    steps: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps: found {self.steps!r}; an integer of 1 or more.")

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Say that a window of one batch is no window."""
        return "an update after every batch is what a loop does anyway (steps=1)" if self.steps == 1 else None

    def attach(self, target: Target) -> Attachment:
        """Give the target its accumulator.

        Raises:
            IncompatibleError: The target has one already.
        """
        if target.accumulator is not None:
            raise IncompatibleError("the target has an accumulator already; remove that one first.")
        target.accumulator = Accumulator(self.steps, target.model)

        def undo() -> None:
            target.accumulator = None

        return Attachment(undo=undo)
