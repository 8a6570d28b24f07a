"""Calls of a model that skip positions, and the way back to all positions."""

from __future__ import annotations

import contextvars
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from torchboost.core.algorithm import Attachment
from torchboost.core.forward import cover_forward, with_tensors
from torchboost.core.hardware import Streams, accelerators, streams_kept
from torchboost.core.torch_private import (
    functions_of_subclasses_on,
    has_saved_tensor_hooks,
    inside_backward,
    inside_function_transform,
    is_tracing,
    version,
)
from torchboost.core.wrapping import unwrap
from torchboost.tokens.history import as_now, has_passed_autograd, in_the_graph
from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.reach import places_of_classes
from torchboost.tokens.rows import BATCH, FLAT, TOKEN, MissingRows, RowFunction, Rows, in_this_precision
from torchboost.tokens.scores import Scores
from torchboost.tokens.state import Key, State, is_written, whole_tensors_in

_LOG = logging.getLogger("torchboost")

NOTHING_READS: contextvars.ContextVar[bool] = contextvars.ContextVar("nothing_reads", default=False)
"""Whether outputs do not reach the loop, as in a trial."""
_DEEPEST = 6
_MOST_KINDS = 8
"""If calls of this number of kinds had to be repeated, no more are tried."""
_READ = "outputs are read at positions that it would leave out"
_LATE = (
    "{name}: an output was read after the weights or the inputs had changed, at positions that were not computed "
    "before; read outputs before optimizer.step(), or leave {name} out"
)
_WRITES = (
    "{name}: the model writes to a weight or to a gradient, to an argument that has a gradient, or to a buffer only in "
    "some of its calls, which cannot be undone, and needs positions that were left out ({reason}); leave {name} out"
)


class Part(TorchFunctionMode):
    """How a call skips positions. Inside of it, tensors with some rows are made instead of padded ones."""

    def used(self) -> bool:
        """Whether positions were skipped."""
        return True

    def layout(self, output: Tensor) -> Layout | None:
        """Return the layout of an output that has rows alone, or None for other outputs."""
        raise NotImplementedError

    def fewer(self) -> Part | None:
        """Return how to skip fewer positions after a function asked for some, or None if all are needed."""
        return None


class PartialForward(Attachment):
    """Lets training calls of a model skip positions.

    If a function in the model needs such positions, the call is repeated with all positions, from the same state of the
    random generators, and calls of this kind are no longer tried. If the loop reads such positions of an output, the
    call is repeated at that moment. The first call computes everything and watches for such reads. If there is one, no
    positions are skipped from then on.

    ``part`` is called with the owner of the layouts and the arguments of a call. It returns None if that needs all
    positions.

    Attributes:
        reason: Why positions are no longer skipped. Empty while they are.
        fewer: Whether a call skipped fewer positions than it could, because a function asked for the others.
        calls: Number of calls that skipped positions.
        moving: Kind of call -> tensors that it writes to.
        places: Where classes and Python modules have what a call may write to.
        searched: Kinds of calls after which it was looked at what is kept.
        doubtful: Which outputs were read whole that have a number for each token, or as many features of a sequence. A
            call that skips positions tells.
    """

    state_is_optional = True

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        part: Callable[[PartialCall, tuple[Any, ...], dict[str, Any]], Part | None],
    ) -> None:
        self.name, self._part, self.reason, self.updates = name, part, "", 0
        self._watched, self.fewer, self.calls = False, False, 0
        self._refused: dict[str, str] = {}
        self.moving: dict[str, frozenset[Key]] = {}
        self.searched: set[str] = set()
        self.doubtful: set[int] = set()
        self.places = places_of_classes(unwrap(model).modules())
        steps = [optimizer.register_step_post_hook(self._count) for optimizer in optimizers]
        super().__init__(*steps, cover_forward(model, self._around))

    def _count(self, *_: Any) -> None:
        self.updates += 1

    def _around(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.reason or torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return forward(module, *args, **kwargs)
        kind = _kind(args, kwargs)
        if kind in self._refused or is_tracing() or inside_function_transform() or _computed_twice():
            return forward(module, *args, **kwargs)
        call = PartialCall(self, kind, lambda: forward(module, *args, **kwargs), module, (args, kwargs))
        part = self._part(call, args, kwargs)
        if part is None:
            return forward(module, *args, **kwargs)
        if not (self._watched or NOTHING_READS.get()):
            self._watched = True
            return call.watched(part)
        return call.run(part)

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far: dropout draws other numbers in calls that skip positions."""
        seen = self._watched or self.reason or self._refused
        doubts = {"doubtful": sorted(self.doubtful)} if self.doubtful else {}
        now = {"watched": self._watched, "reason": self.reason, "refused": dict(self._refused), **doubts}
        return now if seen else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._watched, self.reason = bool(state.get("watched")), str(state.get("reason", ""))
        self._refused, self.doubtful = dict(state.get("refused", {})), set(state.get("doubtful", ()))

    def refuse(self, kind: str, reason: str) -> None:
        """Compute all positions of calls of this kind from now on."""
        self._refused[kind] = reason
        _LOG.info("%s: all positions are computed: %s", self.name, reason)
        if len(self._refused) >= _MOST_KINDS:
            self.reason = reason

    def leave(self) -> None:
        """Compute all positions from now on, because they are read."""
        if not self.reason:
            self.reason = _READ
            _LOG.info("%s: off from now on: %s.", self.name, _READ)

    @property
    def remark(self) -> str:
        """Why positions are computed that could be skipped. Empty if there are none."""
        return self.reason or next(iter(self._refused.values()), "")

    def late(self) -> RuntimeError:
        """Return the error for an output that cannot be computed any more."""
        return RuntimeError(_LATE.format(name=self.name))


def _computed_twice() -> bool:
    """Whether this call belongs to a checkpoint, which computes it once more in the backward pass, in the same way."""
    return inside_backward() or has_saved_tensor_hooks()


def _kind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return which arguments a call has, and its switches."""
    values = [*enumerate(args), *sorted(kwargs.items())]
    return " ".join(
        f"{name}={v!r}" if isinstance(v, (bool, str)) else f"{name}:{type(v).__name__}" for name, v in values
    )


class PartialCall:
    """One call of ``forward``, which owns the layouts of its tensors. It is ``over`` once it has returned outputs."""

    def __init__(
        self, forward: PartialForward, kind: str, compute: Callable[[], Any], model: nn.Module, inputs: Any
    ) -> None:
        self.forward, self._kind, self._compute, self._model, self._inputs = forward, kind, compute, model, inputs
        weights = [*model.parameters()]
        self._devices = accelerators(weights)
        self._streams = Streams(self._devices)
        self._weights = [(weight, version(weight)) for weight in weights]
        self._updates = forward.updates
        self._outputs: Any = None
        self.over, self.asked = False, ""
        self.made: list[weakref.ref[Rows]] | None = None
        self._compute_again = as_now(compute, weights[0].device.type)

    def run(self, part: Part) -> Any:
        """Compute some positions, or all of them if a function asks for the others."""
        moving = self.forward.moving
        self.made = None if self._kind in self.forward.searched else []
        self.forward.searched.add(self._kind)
        before = State(self._model, self._inputs, moving.get(self._kind), self.forward.places)
        outputs: Any = None
        self.asked = ""
        try:
            with part:
                outputs = self._compute()
            if not self.asked:
                self._lead_out(outputs)
        except MissingRows as reason:
            if self not in reason.owners:
                raise
        except Exception:
            if not self.asked:
                raise
        if self.asked:  # not in a handler, which keeps frames alive, and with them the hooks of a checkpoint
            return self._with_more(part, before)
        self.over, self.made = True, None
        self.forward.calls += part.used()
        moving[self._kind] = moving.get(self._kind, frozenset()) | before.moved()
        before.leave_attributes()  # they may be tensors of the call before
        self._before, self._given = before, [(one, version(one)) for one in whole_tensors_in(self._inputs)]
        return outputs

    def _lead_out(self, outputs: Any) -> None:
        """Give the rows among outputs their way to the whole tensor."""
        for path, rows in _rows_in(outputs, (), set()):
            if has_passed_autograd(rows):
                raise MissingRows("a function of autograd has made an output", (self,))
            rows.source = lambda path=path: self._whole(path)
            in_the_graph(rows)
        if self._is_kept(outputs):
            raise MissingRows("a tensor from inside of the model is kept by it, or by a hook", (self,))
        doubtful, places = self.forward.doubtful, itertools.count()
        if doubtful:
            self.forward.doubtful = set()
            with_tensors(outputs, lambda tensor: self._settle(tensor, next(places) in doubtful))

    def _settle(self, tensor: Tensor, doubtful: bool) -> Tensor:
        if doubtful and isinstance(tensor, Rows):
            self.forward.leave()
            raise MissingRows(_READ, (self,))
        return tensor

    def ask(self, reason: str) -> None:
        """Hear that a function needs positions that were left out."""
        self.asked = self.asked or reason

    def note(self, tensor: Rows) -> None:
        """Keep account of a tensor without padding, unless a checkpoint keeps some to compute with them once more."""
        if self.made is not None:
            self.made.append(weakref.ref(tensor))
            self.made = None if has_saved_tensor_hooks() else self.made

    def _is_kept(self, outputs: Any) -> bool:
        """Whether anything besides the outputs keeps hidden states. Looked at in the first call of a kind.

        Weights of attention do not count: many models keep them to be shown, and the loop seldom reads them.
        """

        def kept() -> bool:
            alive = [one for made in self.made or () if (one := made()) is not None]
            known = {id(rows) for _, rows in _rows_in(outputs, (), set())}
            for scores in alive:
                if isinstance(scores, Scores):
                    known |= {id(scores), *map(id, scores.steps or ())}
            return any(id(one) not in known and not one.positions.complete for one in alive)

        if not kept():
            return False
        gc.collect()  # what holds itself is not kept
        return kept()

    def _with_more(self, part: Part, before: State) -> Any:
        """Compute once more, with the positions for which a function asked."""
        self._streams.restore()
        if not before.restore():
            raise RuntimeError(_WRITES.format(name=self.forward.name, reason=self.asked))
        if self.forward.reason:
            return self._compute()
        fewer = part.fewer()
        if fewer is not None:
            self.forward.fewer = True
            return self.run(fewer)
        self.forward.refuse(self._kind, self.asked)
        return self._compute()

    def watched(self, part: Part) -> Any:
        """Compute everything, and watch which positions of the outputs the loop reads."""
        before = State(self._model, self._inputs, places=self.forward.places)
        outputs = self._compute()
        self.forward.moving[self._kind] = before.moved()
        places = itertools.count()
        return with_tensors(outputs, lambda tensor: self._watching(tensor, part, next(places)))

    def _watching(self, tensor: Tensor, part: Part, place: int) -> Tensor:
        layout = part.layout(tensor) if tensor.ndim > 1 and tensor.is_floating_point() else None
        if layout is None:
            return tensor
        later = (lambda rows: rows,) if layout.complete else ()
        flat = layout.mask.shape != tensor.shape[:2]

        def read() -> None:
            if tensor.ndim == 2 and not flat:
                self.forward.doubtful.add(place)
            else:
                self.forward.leave()

        if isinstance(tensor, Rows):  # another algorithm watches too
            before = tensor.source or tensor.whole
            tensor.later, tensor.positions.forced = later, layout.forced
            tensor.source = lambda: (read(), before())[1]
            return tensor
        rows = tensor if flat else tensor.flatten(0, 1)
        dims = (FLAT if flat else BATCH, *([] if flat else [TOKEN]), *range(rows.ndim - 1))
        rows = PaddedRows(rows.index_select(0, layout.index), layout, dims, later)

        rows.source, rows.known = lambda: (read(), tensor)[1], tensor
        in_the_graph(rows)
        return rows

    def later(self, function: RowFunction, source: Tensor) -> RowFunction:
        """Return a function of rows for later, with the present weights and precision, or an error if they are gone.

        The rows are taken from ``source``, which must not be written to before.
        """
        kind = next(self._model.parameters()).device.type
        whole = None if isinstance(source, Rows) else source  # rows are replaced, not written to
        compute, then = in_this_precision(kind, function), 0 if whole is None else version(whole)

        def compute_in_time(rows: Tensor) -> Tensor:
            if self._is_late:
                raise self.forward.late() if self.over else MissingRows("a weight is written to", (self,))
            if whole is not None and version(whole) != then:
                raise MissingRows("its argument was written to", (self,))
            return compute(rows)

        return compute_in_time

    @property
    def _is_late(self) -> bool:
        """Whether the weights have changed since the call."""
        changed = any(is_written(weight, before) for weight, before in self._weights)
        return changed or self._updates != self.forward.updates

    def _whole(self, path: tuple[Any, ...]) -> Tensor:
        """Return an output of the same call with all positions."""
        if self._outputs is None:
            self._outputs = self._again()
        value = self._outputs
        for step in path:
            value = vars(value)[step[1:]] if isinstance(step, str) and step.startswith(".") else value[step]
        while isinstance(value, Rows):
            value = value.whole() if value.source is None else value.source()
        return value

    def _again(self) -> Any:
        if self._is_late or any(version(tensor) != then for tensor, then in self._given):
            raise self.forward.late()
        self.forward.leave()
        now = State(self._model, self._inputs, places=self.forward.places)
        with streams_kept(self._devices):
            self._streams.restore()
            complete = self._before.restore()
            now.set_gradients_aside()
            try:
                if not complete:
                    raise RuntimeError(_WRITES.format(name=self.forward.name, reason=_READ))
                with functions_of_subclasses_on():
                    return self._compute_again()
            finally:
                now.restore()


def _rows_in(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Rows]]:
    """Yield the rows in outputs and in the objects among them, with the way to each."""
    if isinstance(value, Rows):
        yield path, value
        return
    ends = isinstance(value, (Tensor, str, bytes, int, float, type(None), nn.Module)) or len(path) > _DEEPEST
    if ends or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        entries: Any = value.items()
    elif isinstance(value, (tuple, list)):
        entries = enumerate(value)
    else:
        entries = ((f".{name}", entry) for name, entry in getattr(value, "__dict__", {}).items())
    for step, entry in list(entries):
        yield from _rows_in(entry, (*path, step), seen)
