"""Several backward passes per update, weighted so that the update is that of one large batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.accumulation.synchronisation import GradientSync
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import is_integer
from torchboost.errors import IncompatibleError

__all__ = ["Accumulating", "Accumulation", "Accumulator"]

Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(slots=True)
class _Window:
    """What one window holds: ``index`` micro-steps of ``length``, and ``weight``, which is ``length`` when full."""

    length: int = 1
    index: int = 0
    weight: float = 0.0
    counted: bool | None = None
    phase: Literal["between", "open", "shared", "broken"] = "between"


class Accumulator:
    """Collects the gradients of ``steps`` backward passes; together they are the gradient of one large batch.

    With micro-batches ``i`` on all ranks, ``n_i`` the count of each and ``L_i`` its mean loss, the gradients are

        sum(n_i * grad(L_i)) / sum(n_i)

    :meth:`share` multiplies the loss by what it contributes. Count samples or, where losses are means over tokens,
    tokens: any ragged split is then exact. Without counts all micro-batches weigh the same. The gradients are complete
    when the last micro-step ends; ranks exchange no gradients before. Where an epoch ends inside a window, say so with
    ``micro_step(last=True)``, or call :meth:`flush`: the average is then over what the window holds.

    Cost: the gradients' memory between micro-steps (under FSDP2 that of whole gradients, not of shards). With counts, a
    pass over the gradients per ragged window, and on several ranks one collective of a single number.

    Limits: gradients of parameters outside ``model`` are not averaged over ragged or short windows; those of parameters
    outside of a DDP that is inside ``model`` stay on their rank, as without accumulation. BatchNorm
    normalises each micro-batch by itself, so a network with it does not see one large batch. An exception after
    :meth:`share` may leave half a backward pass in the gradients: call :meth:`reset`. CUDA graphs overwrite gradients
    that are kept; a model compiled with them is refused, but not one that is compiled after it was given here.

    Args:
        steps: Micro-steps per update, 1 or more. Setting the attribute changes windows that begin later.
        model: What is trained, as the loop calls it. Set the attribute anew where the model is wrapped later.

    Attributes:
        ready: Whether the window is complete: step the optimizer, zero the gradients, step the scheduler.

    Raises:
        ValueError: ``steps`` is no integer of 1 or more.
        IncompatibleError: The model is in DDP with ``static_graph=True``, holds several DDPs, is in FSDP1, or compiled
            with CUDA graphs.

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
        self.steps = _checked(steps)
        self.ready = False
        self._window = _Window()
        self._nominal: float | None = None
        self.model = model

    @property
    def model(self) -> nn.Module:
        """What is trained, as the loop calls it."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        _check_graphs(model)
        self._sync = GradientSync(model)
        self._model = model

    @contextmanager
    def micro_step(self, *, last: bool = False) -> Iterator[None]:
        """Return the context of one forward and backward pass, in which the loss goes through :meth:`share`.

        Args:
            last: End the window with this pass although it is not full; all ranks must agree.

        Raises:
            RuntimeError: The pass before failed half-way, or this one shared no loss.
        """
        if self.ready:
            self.ready, self._window = False, _Window()
        window = self._in_phase("between")
        if not window.index:
            window.length = _checked(self.steps)
        closing = last or window.index + 1 >= window.length
        window.phase = "open"
        try:
            with nullcontext() if closing else self._sync.suspended():
                yield
        except BaseException:
            # Before the loss was shared nothing was added to the gradients; after it, who knows how much.
            window.phase = "between" if window.phase == "open" else "broken"
            raise
        if window.phase == "open":
            window.phase = "broken"
            raise RuntimeError(
                "the micro-step shared no loss, so it has no weight; call accumulator.share(loss).backward() in it."
            )
        window.phase = "between"
        window.index += 1
        if closing:
            self._complete()

    def share(self, loss: Tensor, count: float | Tensor | None = None, *, reduction: Reduction = "mean") -> Tensor:
        """Return the part of the loss that this micro-batch contributes; once per micro-step.

        Args:
            loss: Of shape ``()``.
            count: Number of samples or tokens behind the loss, 0 or more; without it all micro-batches weigh the same.
            reduction: Whether the loss is their mean or their sum.

        Raises:
            ValueError: A count that is negative, not finite, or missing where one is needed; counts for some
                micro-batches of a window and not for others; the mean over no samples, where that is not a number.
            RuntimeError: Outside a micro-step, or a second loss in one.
        """
        window = self._in_phase("open")
        number = self._checked_count(count, reduction, loss)
        if number is None:
            window.weight += 1.0
            part = loss
        else:
            if self._nominal is None:
                # A typical count, so that losses keep their size; any number would do, but the same on all ranks.
                self._nominal = self._sync.largest(max(number, 1.0))
            window.weight += number / self._nominal
            # The nominal count takes the path of a plain mean: equal batches give the same bits as without counts.
            factor = (1.0 if reduction == "sum" else number) / self._nominal
            part = loss if factor == 1.0 else loss * factor
        window.counted, window.phase = number is not None, "shared"
        return part if window.length == 1 else part / window.length

    def flush(self) -> bool:
        """End a window that is not full; update if this returns True: a rank held something.

        All ranks must call this after windows that ended on all of them; their last windows may hold more or less, or
        nothing.

        Raises:
            IncompatibleError: FSDP2, which reduces gradients in backward passes only; or the windows of the ranks have
                different lengths.
            RuntimeError: The last micro-step failed half-way.
        """
        window = _Window() if self.ready else self._in_phase("between")
        self._sync.catch_up()
        length = self._longest(window)
        if not length:
            return False
        self._refuse_shards("completed by flush()", "mark its last pass with micro_step(last=True)")
        self.ready, self._window, window.length = False, window, length
        self._sync.average()
        self._complete()
        return True

    def reset(self) -> None:
        """Drop the window and its gradients; on several ranks all must.

        Raises:
            IncompatibleError: FSDP2 in mid-window, which keeps the gradients to itself.
        """
        self._refuse_shards("dropped", "go back to the last checkpoint")
        self.ready, self._window = False, _Window()
        for parameter in self._model.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, in mid-window with this rank's gradients; after an update is cheapest.

        Raises:
            IncompatibleError: FSDP2 in mid-window, which keeps the gradients to itself.
        """
        self._in_phase("between")
        if self.ready or not self._window.index:
            return {"nominal": self._nominal, "window": None}
        self._refuse_shards("saved", "save when a window has ended")
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self._model.parameters()]
        return {"nominal": self._nominal, "window": asdict(self._window), "gradients": gradients}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; gradients held before are dropped.

        A window that was begun ends with the length it was begun with.

        Raises:
            ValueError: The gradients are those of another model; nothing was loaded.
        """
        parameters = list(self._model.parameters())
        gradients = state_dict.get("gradients", [None] * len(parameters))
        fit = [g is None or g.shape == p.shape for g, p in zip(gradients, parameters, strict=False)]
        if len(gradients) != len(parameters) or not all(fit):
            raise ValueError(
                f"the checkpoint's {len(gradients)} gradients do not fit the {len(parameters)} parameters of this "
                "model; load it with the model it was written with."
            )
        self.ready, self._nominal = False, state_dict["nominal"]
        self._window = _Window(**(state_dict.get("window") or {}))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _in_phase(self, wanted: str) -> _Window:
        phase = self._window.phase
        if phase == wanted:
            return self._window
        if wanted == "between" and phase == "shared":
            phase = "open"
        raise RuntimeError(
            {
                "between": "a loss was shared outside a micro-step; do so inside `with accumulator.micro_step():`.",
                "open": "a micro-step is under way; end it first.",
                "shared": "this micro-step has shared its loss already; add losses up and share their sum once.",
                "broken": "a micro-step failed half-way, so the gradients may hold a part of it; call reset(), which "
                "drops the window, or load a checkpoint.",
            }[phase]
        )

    def _checked_count(self, count: float | Tensor | None, reduction: Reduction, loss: Tensor) -> float | None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction: found {reduction!r}; allowed are 'mean' and 'sum'.")
        if self._window.counted not in (None, count is not None):
            found, began = ("none", "with counts") if count is None else ("one", "without")
            raise ValueError(
                f"count: found {found}, but the window began {began}; give one for each micro-batch or for none."
            )
        if count is None:
            if reduction == "sum":
                raise ValueError("count: found none; give the number of samples or tokens, to average a sum by.")
            return None
        number = float(count)
        if not 0 <= number < math.inf:
            raise ValueError(f"count: found {number}; allowed are finite numbers, 0 or more.")
        if number == 0 and not bool(torch.isfinite(loss)):
            raise ValueError(
                f"count: found 0 for a loss of {loss.item()}; a mean over nothing is no number: give the sum "
                "(reduction='sum'), or divide by at least 1."
            )
        return number

    def _complete(self) -> None:
        """Scale the gradients so that they are averaged over what the window holds, on all ranks."""
        window = self._window
        held = window.weight
        if window.counted or window.index < window.length:
            held = self._sync.mean(window.weight)
        if held == 0:
            self._window = _Window()
            raise ValueError("count: found 0 for every micro-batch of the window; leave such batches out.")
        if held != window.length:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(window.length / held)
        self.ready = True

    def _longest(self, window: _Window) -> int:
        """Return the length of the windows that hold something, on all ranks the same; 0 where none does."""
        held = window.index > 0
        # A rank that has shared a count for the first time asks for the largest, of 1 or more; join it.
        while (shortest := -self._sync.largest(-window.length if held else -math.inf)) < 0:
            self._nominal = -shortest
        if shortest == math.inf:
            return 0
        longest = self._sync.largest(window.length if held else 0.0)
        if longest != shortest:
            raise IncompatibleError(
                f"flush() found windows of {shortest:g} micro-steps on one rank and of {longest:g} on another; set the "
                "same steps on all ranks, and go back to the last checkpoint or call reset() on all."
            )
        return int(longest)

    def _refuse_shards(self, what: str, instead: str) -> None:
        if self._sync.sharded and self._window.index and not self.ready:
            raise IncompatibleError(
                f"FSDP2 keeps the gradients of a window that is not full to itself, so it cannot be {what}; {instead}."
            )


def _checked(steps: int) -> int:
    if not is_integer(steps) or steps < 1:
        raise ValueError(f"steps: found {steps!r}; an integer of 1 or more says how many batches make an update.")
    return steps


def _check_graphs(model: nn.Module) -> None:
    """Refuse CUDA graphs, under which gradients that are kept go wrong, with an error or without."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return
    for module in model.modules():
        for compiled in (module, module._compiled_call_impl):
            # Only what torch.compile returns has this method.
            config = getattr(compiled, "get_compiler_config", dict)() or {}
            if config.get("triton.cudagraphs"):
                raise IncompatibleError(
                    "grad_accumulation: the model is compiled with CUDA graphs, each run of which overwrites the "
                    "gradients of the run before; compile it without mode 'reduce-overhead' or 'max-autotune' "
                    "('max-autotune-no-cudagraphs' works)."
                )


class Accumulating(Attachment):
    """The accumulator of a target. After ``remove()`` it closes a window with every batch.

    Its state is the accumulator's own, which :class:`~torchboost.core.step.TrainStep` saves with the rest.
    """

    def __init__(self, accumulator: Accumulator, target: Target) -> None:
        super().__init__(undo=self._release)
        self.accumulator = accumulator
        self._target = target

    def _release(self) -> None:
        self._target.accumulator = None
        self.accumulator.steps = 1


@dataclass(frozen=True, kw_only=True)
class Accumulation(Algorithm):
    """One update after several batches, through ``target.accumulator``, which the loop must use.

    :class:`~torchboost.core.step.TrainStep` and the training cell do; a loop of your own takes three more lines, see
    :class:`Accumulator`.

    Args:
        steps: Micro-steps per update.
    """

    name: ClassVar[str] = "grad_accumulation"
    # After compilation, so that CUDA graphs are seen.
    traits: ClassVar[Traits] = Traits(order=95)
    steps: int = 1

    def __post_init__(self) -> None:
        _checked(self.steps)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Say that a window of one batch is no window."""
        return "an update after every batch is what a loop does anyway (steps=1)" if self.steps == 1 else None

    def check(self, target: Target) -> None:
        """Refuse what :meth:`attach` lists."""
        if target.accumulator is not None:
            raise IncompatibleError("grad_accumulation: the target has an accumulator already; remove that one first.")
        Accumulator(self.steps, target.model)

    def attach(self, target: Target) -> Accumulating:
        """Give the target its accumulator.

        Raises:
            IncompatibleError: The target has one already, or the model cannot leave out a synchronisation.
        """
        self.check(target)
        accumulator = Accumulator(self.steps, target.model)
        target.accumulator = accumulator
        return Accumulating(accumulator, target)
