"""Forward and backward passes of the user's own model on one real call, each from the same start."""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchboost.calibration.snapshot import Damage, Snapshot, plain
from torchboost.calibration.watch import Call, uninterrupted
from torchboost.core.algorithm import Target
from torchboost.core.forward import tensors_in, with_tensors
from torchboost.core.hardware import Streams, accelerators
from torchboost.core.torch_private import end_pass, is_reentrant_checkpoint, version
from torchboost.core.wrapping import parameters_of, sharded_units
from torchboost.distributed.agreement import ranks_of_shards
from torchboost.errors import IncompatibleError
from torchboost.tokens.call import NOTHING_READS
from torchboost.tokens.rows import Rows

_LOG = logging.getLogger("torchboost")

Change = Callable[[Tensor], None]
"""Changes a tensor in place."""

_EQUAL = 1e-3
_MOVES = "the model keeps something that cannot be restored, such as an iterator or a file"
_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout),
)
_POSITIONS: Mapping[Any, int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
    torch.lstm: 5,
    torch.gru: 5,
    torch.rnn_tanh: 5,
    torch.rnn_relu: 5,
}
"""Function -> position of its probability."""
_LIKE = (torch.rand_like, torch.randn_like, torch.bernoulli)


@dataclass(slots=True, eq=False)
class Pass:
    """The results of one pass.

    Attributes:
        outputs: The tensors of floating point among the outputs, without history, then the inputs that the model has
            written to.
        gradients: For each parameter, then for each input that requires one. None if it does not exist.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]


class Passes:
    """Runs passes of a model on copies of the tensors of one call, with the same random numbers each time.

    The loss of the loop is not known here. If the model returns a loss, it is used. Otherwise a fixed random gradient
    enters at the outputs. Nothing is written to ``.grad``, and no hook that waits for a gradient to be accumulated is
    called, so that the buckets of DDP and optimizers inside the backward pass are not touched. If FSDP2 shards the
    model, which gathers gradients in a real backward pass only, ``.grad`` is written and set back.

    Args:
        snapshot: Of the model and the call. Changes by a pass are restored from it.
        others: Trained parameters that the model uses but does not hold.
        forward: Makes the context of each forward pass, such as the mixed precision of a trainer.

    Attributes:
        parameters: The trained ones, in the order of the gradients of a pass.
        streams: The random generators as each pass finds them.
        without_dropout: Whether passes compute with dropout at zero, to be compared.
        draws: Whether one of the passes so far has drawn random numbers.
        unread: Masks of shape (batch, length), zero at positions of outputs that count as read by no loss.
        unequal: By how much two equal passes were seen to differ, relative to an output. 0 if they do not.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        snapshot: Snapshot,
        *,
        others: Iterable[Tensor] = (),
        forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.snapshot, self._call, self._forward = model, snapshot, call, forward
        trained = {id(p): p for p in [*model.parameters(), *others] if p.requires_grad}
        self.parameters: list[Tensor] = list(trained.values())
        self.device = next((p.device for p in self.parameters), torch.device("cpu"))
        self.streams = Streams(accelerators(model.parameters()))
        self._sharded = bool(ranks_of_shards(self.parameters))
        self._seeds: list[Tensor] | None = None
        self._inputs: Call = call
        self._leaves: list[Tensor] = []
        self._copies: list[tuple[Tensor, int]] = []
        self._written: list[int] | None = None
        self._complete = self.without_dropout = self.draws = False
        self.unequal = 0.0
        self.unread: Sequence[Tensor] = ()

    @contextmanager
    def prepared(self, change: Change | None = None) -> Iterator[None]:
        """Set up a pass on changed inputs, which the block runs, and undo its effects at the end, also if it raised."""
        self._leaves, self._complete = [], False
        copies: dict[int, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:  # a tensor that occurs twice does so in the copy: compiled graphs depend on it
                copies[id(tensor)] = self._copied(tensor, change)
            return copies[id(tensor)]

        self._inputs = with_tensors(self._call, copied)
        self._copies = [(copy, version(copy)) for copy in copies.values()]
        self.streams.restore()
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        try:
            for parameter in self.parameters:  # a forward that calls backward would add to them
                parameter.grad = None
            _clear_casts()
            yield
        finally:
            self.draws = self.draws or self.is_random
            for unit in sharded_units(self.model):
                end_pass(unit)
            reshard(self.model)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            _clear_casts()
            self.snapshot.after_a_pass(complete=self._complete)
            self._inputs, self._copies = ((), {}), []

    def run(self, between: Callable[[], None] | None = None) -> Pass:
        """Run forward and backward of the prepared pass, with a call between them. This part of a step is timed.

        Raises:
            IncompatibleError: No output of the model depends on its parameters, or a part of the model runs inside a
                checkpoint with ``use_reentrant=True``, whose backward pass would add to ``.grad`` and call its hooks.
        """
        context = contextvars.copy_context()
        context.run(NOTHING_READS.set, True)
        return context.run(self._pass, between)

    def _pass(self, between: Callable[[], None] | None) -> Pass:
        args, kwargs = self._inputs
        with self._forward(), _WithoutDropout() if self.without_dropout else nullcontext():
            outputs = self.model(*args, **kwargs)
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point() or tensor.is_complex()]
        ends = [tensor for tensor in tensors if tensor.requires_grad]
        ends = [tensor for tensor in ends if tensor.numel() == 1][:1] or ends  # the loss, if the model returns one
        if not ends:
            raise IncompatibleError("no output of the model depends on its parameters, so there is no backward pass")
        if self._seeds is None or [s.shape for s in self._seeds] != [e.shape for e in ends]:
            self._seeds = [self._gradient_for(end) for end in ends]
            if any(_has_reentrant_checkpoint(_computed(end)) for end in ends):
                raise IncompatibleError(
                    "torch.utils.checkpoint with use_reentrant=True allows no pass that leaves .grad alone; use "
                    "use_reentrant=False"
                )
        if self._written is None:
            moved = [copy.is_floating_point() and version(copy) != before for copy, before in self._copies]
            self._written = [index for index, changed in enumerate(moved) if changed]
        tensors += [self._copies[index][0] for index in self._written]
        if between is not None:
            between()
        seeds = [_computed(seed.to(end.dtype), end) for seed, end in zip(self._seeds, ends, strict=True)]
        result = Pass([tensor.detach() for tensor in tensors], self._backward([*map(_computed, ends)], seeds))
        self._complete = True
        return result

    def compare(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
        """Compare the outputs of two equal passes.

        Raises:
            IncompatibleError: They differ, because something moves from pass to pass that the snapshot does not reach.
        """
        same_number = len(first) == len(second)
        difference = max(map(relative, first, second), default=0.0) if same_number else math.inf
        if difference > _EQUAL:
            self.unequal = difference
            raise IncompatibleError(f"two equal passes differ by {difference:.1e}: {_MOVES}")

    def shown_to(self, look: Callable[..., Any]) -> Any:
        """Return the result of ``look(model, args, kwargs)``, which may run a forward pass."""
        context = contextvars.copy_context()
        context.run(NOTHING_READS.set, True)
        ran: list[bool] = []
        with self.prepared(), self._forward():
            handle = self.model.register_forward_pre_hook(lambda *_: ran.append(True))
            try:
                answer = context.run(look, self.model, *self._inputs)
            finally:
                handle.remove()
            self._complete = bool(ran)  # without a pass it does not show what a pass changes
        return answer

    @property
    def is_random(self) -> bool:
        """Whether the pass that was run has drawn random numbers, before it is restored."""
        return self.streams.drawn()

    def _gradient_for(self, output: Tensor) -> Tensor:
        """Return a fixed gradient of norm 1, zero at positions that no loss reads. It uses no default generator."""
        generator = torch.Generator("cpu").manual_seed(0)
        gradient = torch.randn(output.shape, generator=generator, device="cpu") / max(1.0, output.numel() ** 0.5)
        gradient = gradient.to(output.device, output.dtype)
        if output.numel() == 1:
            gradient = torch.ones_like(output, requires_grad=False)
        for mask in self.unread if output.ndim > 1 else ():
            if mask.shape == output.shape[:2]:
                gradient = gradient * mask.view(*mask.shape, *[1] * (output.ndim - 2))
        return gradient

    def _copied(self, tensor: Tensor, change: Change | None) -> Tensor:
        copy = tensor.detach().clone(memory_format=torch.preserve_format)
        if change is not None and copy.is_floating_point():
            change(copy)
        if not tensor.requires_grad:
            return copy
        self._leaves.append(copy.requires_grad_())
        return copy.clone()  # a forward may write into its inputs, but not into leaves

    def _backward(self, ends: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
        leaves = [*self.parameters, *self._leaves]
        retained = True if self.snapshot.has_history else None
        if self._sharded:
            torch.autograd.backward(ends, seeds, retained)
            return [tensor.grad for tensor in leaves]
        return list(torch.autograd.grad(ends, leaves, seeds, retained, allow_unused=True))


def reshard(model: nn.Module) -> None:
    """Let FSDP2 free the whole parameters that it keeps after a forward pass without a backward pass."""
    for unit in sharded_units(model):
        unit.reshard()


def relative(first: Tensor, second: Tensor) -> float:
    """Return the :func:`distance` of two tensors, as a share of the norm of the first one."""
    size, difference = distance(first), distance(first, second)
    return difference / size if size else math.inf if difference else 0.0


def distance(plain: Tensor, other: Tensor | None = None) -> float:
    """Return the norm of a difference in float64, or of ``plain`` itself, over the entries that are finite.

    It is infinite if the forms differ, or if other entries are finite.
    """
    base = _numbers_of(plain if not isinstance(other, Rows) else other.operand(plain))
    finite, difference = torch.isfinite(base), base
    if other is not None:
        numbers = _numbers_of(other.rows if isinstance(other, Rows) else other)
        if numbers.shape != base.shape or not torch.equal(finite, torch.isfinite(numbers)):
            return math.inf
        difference = numbers - base
    if not bool(finite.all()):
        difference = difference.masked_fill(~finite, 0.0)
    return float(torch.linalg.vector_norm(difference))


def _numbers_of(tensor: Tensor) -> Tensor:
    """Return the entries as dense float64, complex ones as two."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _clear_casts() -> None:
    """Forget the casts of weights that an autocast context of the loop keeps, from before a pass or from within it."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        torch.clear_autocast_cache()


def noise(size: float, seed: int) -> Change:
    """Return a change that multiplies numbers by 1 plus or minus ``size``, by chance but the same for a seed.

    Whole numbers do not change, because the number of a row or of a step would become another one.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def change(tensor: Tensor) -> None:
        if tensor.element_size() < 2:  # torch computes nothing in 8 bits
            return
        factors = torch.empty(tensor.shape, device="cpu").bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        factors = factors.mul_(size).add_(1).to(tensor.device)
        tensor.copy_(torch.where(tensor == tensor.round(), tensor, tensor * factors))

    return change


@contextmanager
def on_real_inputs(
    target: Target, call: Call, forward: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[Passes]:
    """Yield passes of the plain model of a pair on a call. At the end everything is restored."""
    model = target.model
    inside = set(model.parameters())
    outside = [parameter for parameter in parameters_of(*target.optimizers) if parameter not in inside]
    modules = [v for optimizer in target.optimizers for v in vars(optimizer).values() if isinstance(v, nn.Module)]
    with plain(model):
        snapshot = Snapshot(model, (call, modules), outside)
        passes = Passes(model, call, snapshot, others=outside, forward=forward)
        try:
            yield passes
        finally:
            if passes.unequal:
                _LOG.warning(
                    "Something that the model uses moves on in each call and could not be restored after those of the "
                    "trial, such as an iterator or a file: two equal calls differed by %.1e of an output. If the run "
                    "must repeat another one, use boost(..., calibrate=False, verify=False).",
                    passes.unequal,
                )
            with uninterrupted():
                damage = snapshot.restore()
                passes.streams.restore()
            if damage is Damage.LASTING:
                _LOG.warning(
                    "A pass of the trial changed a large array or tensor that the model holds as an attribute, and it "
                    "was not restored. Register it as a buffer, or use boost(..., calibrate=False, verify=False)."
                )


class _WithoutDropout(TorchFunctionMode):
    """Inside of it the probability of every dropout is 0, in modules, in functions and inside attention.

    Compiled and eager code draw the masks of dropout differently, and so do tensors in different memory formats. The
    compiler traces through this mode, into a graph of its own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _LIKE and args:  # the order in which numbers are drawn follows the memory
            args = (args[0].contiguous(), *args[1:])
        place = _POSITIONS.get(func)
        if place is not None:
            if len(args) > place and isinstance(args[place], float):
                args = (*args[:place], 0.0, *args[place + 1 :])
            if "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def _computed(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of a tensor that is computed: its rows if it has rows alone, or the rows of ``like``."""
    rows = tensor if like is None else like
    if not isinstance(rows, Rows):
        return tensor
    return rows.rows if like is None else rows.operand(tensor)


def _has_reentrant_checkpoint(end: Tensor) -> bool:
    """Whether ``torch.utils.checkpoint`` with ``use_reentrant=True`` is in the graph.

    ``autograd.grad`` refuses it, or does not enter it, since its parameters are not in the graph.
    """
    waiting, seen = [end.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if is_reentrant_checkpoint(node):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
