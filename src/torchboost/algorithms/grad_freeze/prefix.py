"""Skip the frozen first part of a network for samples it has already computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchboost.algorithms.grad_freeze.activation_cache import ActivationCache, sample_ids
from torchboost.algorithms.grad_freeze.cut import Cut, cut_forward
from torchboost.algorithms.grad_freeze.trace import Call, random_state, trace_forward
from torchboost.core.algorithm import Attachment
from torchboost.core.covering import cover_forward, own_forward
from torchboost.core.torch_private import memory_stamp, versions
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.graph.copies import accelerators, generators_kept

__all__ = ["FastPrefix", "FastPrefixReport", "check_cacheable"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.1
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPrefixReport:
    """Status of the cache of the frozen prefix.

    Args:
        parameters: Number of weights in the prefix; 0 if the forward runs unchanged.
        rows: Number of samples whose prefix outputs are cached.
        bytes: Size of the cached outputs.
        hit_rate: Share of named samples found in the cache since the prefix last changed; 0.0 before the first.
        note: Why the forward runs unchanged, or why nothing is cached; empty otherwise.
    """

    parameters: int = 0
    rows: int = 0
    bytes: int = 0
    hit_rate: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        text = (
            f"frozen prefix: {self.parameters:,} parameters; {self.rows:,} samples held "
            f"({self.bytes / 2**20:.1f} MiB), {self.hit_rate:.0%} of look-ups found"
        )
        return f"{text}; {self.note}" if self.note else text


def check_cacheable(model: nn.Module) -> None:
    """Refuse a model whose forward cannot be replaced.

    Raises:
        IncompatibleError: The model is wrapped or compiled, or has its own ``forward`` on the instance.
    """
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise IncompatibleError(
            f"grad_freeze: found a model wrapped by {wrapper}, whose forward the cache cannot replace; attach to the "
            "bare, uncompiled model and wrap it in DDP afterwards, or set cache_mebibytes=0."
        )
    if own_forward(model) is not None:
        raise IncompatibleError(
            f"grad_freeze: the forward of this {type(model).__name__} was replaced on the instance, so the cache does "
            "not know what runs; attach before that, or set cache_mebibytes=0."
        )


class FastPrefix(Attachment):
    """Computes the frozen first part of a network once per sample, and skips it from then on.

    The ``forward`` of this one instance is replaced. If the samples of a batch are named, it is cut in training mode at
    the first trainable operation: everything that no trainable parameter, random number (dropout) or changing buffer
    (BatchNorm in training mode) has reached runs under ``no_grad``, and its output for a sample is cached under the id
    of the sample. If all samples of a batch are cached, this part is skipped. Both parts call the model's own modules.
    In eval mode, with inputs that require gradients, or if no frozen part comes first, the forward runs unchanged. The
    cached rows are correct only if a sample is the same tensor in every epoch: no random augmentation.

    What is frozen is read from ``requires_grad``. Before each forward the model is compared with its last state: flags,
    the attributes of all modules (parameters, buffers, submodules and hooks among them), and versions and addresses of
    the frozen tensors. After any change the forward is traced again; if the change may affect what the prefix computes,
    the rows are dropped.

    Limits: Python state that is not an attribute of a module (a global, a list in a list) keeps its value from the
    trace; an in-place write to a frozen weight through ``.data`` is not detected; call :meth:`update` after either.
    While ``torch.fx`` traces the forward, it patches ``nn.Module`` for the whole process: no other thread should run a
    model at that moment.

    Cost: about 2 microseconds per module for the comparison; at every change one trace and a few passes through the
    prefix.

    Args:
        model: The bare model, in place. Wrap it in DDP afterwards.
        cache: An empty cache that is not used elsewhere; emptied by :meth:`remove`.

    Raises:
        IncompatibleError: See :func:`check_cacheable`; or the forward cannot be traced. If that depends on the
            arguments, the first training step raises it.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> with FastPrefix(model, ActivationCache(2**20)) as fast:
        ...     for epoch in range(2):
        ...         with fast.samples([5, 3]):
        ...             _ = model(torch.ones(2, 4))
        ...     fast.report().rows, fast.report().hit_rate
        (2, 0.5)
    """

    def __init__(self, model: nn.Module, cache: ActivationCache) -> None:
        check_cacheable(model)
        needed = [
            argument
            for argument in list(inspect.signature(type(model).forward).parameters.values())[1:]
            if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
        ]
        trial = Call.of((torch.empty(0, device="cpu"),), {})
        if len(needed) == 1 and trial is not None:
            trace_forward(model, trial)
        self._model = model
        self._cache = cache
        self._named: Tensor | None = None
        self._note = "no training step has run yet"
        self._forget()
        # Inside autocast, which is then on while the halves run.
        super().__init__(cover_forward(model, self._forward, innermost=True), undo=self._end)

    def _forget(self) -> None:
        self._watch: _Watch | None = None
        self._key: Hashable = None
        self._halves: _Halves | None = None
        self._rows_of: tuple[Any, ...] | None = None
        self._cache.clear()

    def _end(self) -> None:
        self._forget()
        self._note = "removed"

    @contextmanager
    def samples(self, ids: Tensor | Sequence[int]) -> Iterator[None]:
        """Name the samples of the next forward.

        Args:
            ids: One integer per sample of the batch, at least 0, shape ``(n,)``; the same for the same sample in
                every epoch.

        Raises:
            TypeError: ``ids`` are not integers.
            ValueError: They are not one-dimensional, or one is negative; or, raised from the forward, their number is
                wrong.
        """
        self._named = sample_ids(ids)
        try:
            yield
        finally:
            self._named = None

    def update(self) -> None:
        """Trace the model again before the next forward, and drop all rows."""
        self._forget()

    def report(self) -> FastPrefixReport:
        """Return the current sizes and hit rate."""
        halves, cache = self._halves, self._cache
        obstacle = "" if halves is None or not halves.obstacle else f"nothing is cached: {halves.obstacle}"
        return FastPrefixReport(
            parameters=0 if halves is None else halves.parameters,
            rows=cache.rows,
            bytes=cache.bytes,
            hit_rate=cache.hits / max(1, cache.hits + cache.misses),
            note=self._note if halves is None else obstacle,
        )

    def __str__(self) -> str:
        return str(self.report())

    def _forward(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ids, self._named = self._named, None
        # A deep copy of the model calls this too, with itself as the module.
        if ids is None or module is not self._model or not module.training or torch.compiler.is_compiling():
            return forward(module, *args, **kwargs)
        call = Call.of(args, kwargs)
        if call is None:
            self._note = "an argument of the forward is neither a tensor nor a plain value"
        elif any(tensor.requires_grad for tensor in call.tensors):
            self._note = "an input requires gradients"
        elif (halves := self._current(call)) is not None:
            return halves.suffix.forward(*call.tensors, *self._border(halves, call.tensors, ids))
        return forward(module, *args, **kwargs)

    def _current(self, call: Call) -> _Halves | None:
        """Return the halves for this kind of call; rebuild them if the model has changed."""
        if self._watch is not None and call.key == self._key and not self._watch.changed():
            return self._halves
        known = None if self._watch is None or self._watch.rebuilt() else self._halves
        halves = _halves_of(self._model, call)
        if halves is not None and known is not None and halves.signature == known.signature:
            halves.obstacle = known.obstacle
        else:
            self._forget()
        if halves is None:
            self._note = "no frozen part comes first"
        self._key, self._halves = call.key, halves
        self._watch = _Watch(self._model, () if halves is None else halves.frozen)
        return halves

    def _border(self, halves: _Halves, tensors: tuple[Tensor, ...], ids: Tensor) -> tuple[Any, ...]:
        cache, read = self._cache, [tensors[place] for place in halves.cut.inputs]
        if not any(tensor.ndim and len(tensor) == len(ids) for tensor in read):
            raise ValueError(f"samples: found {len(ids)} ids for inputs of shapes {[tuple(t.shape) for t in read]}.")
        kind = next((p.device.type for p in halves.frozen), "cpu")
        mode = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        rows_of = (mode, [(t.shape[1:], t.dtype, t.device) for t in read])
        if self._rows_of is not None and self._rows_of[0] != mode:
            cache.clear()
            self._rows_of = None
        if halves.obstacle is None:
            values = halves.border(tensors)
            halves.obstacle = halves.obstacle_to_rows(tensors, values, len(ids))
            if halves.obstacle:
                return values
        if halves.obstacle or any(len(tensor) != len(ids) for tensor in read) or self._rows_of not in (None, rows_of):
            return halves.border(tensors)
        self._rows_of = rows_of
        slots = cache.find(ids)
        missing = (slots < 0).nonzero().flatten()
        if not missing.numel():
            return cache.read(slots)
        everything = missing.numel() == ids.numel()
        values = halves.border(tensors if everything else halves.select(tensors, missing))
        if not cache.fits(values):
            return values if everything else halves.border(tensors)
        border = values if everything else cache.read(slots, values)
        cache.store(ids[missing], values)
        return border


@dataclass(slots=True)
class _Halves:
    """One forward, split in two.

    Args:
        cut: The cut.
        prefix: Returns the tuple of border values. Calls the model's own modules, as the suffix does.
        suffix: Takes the tensors of the call and the border values.
        frozen: Every parameter and buffer of the prefix.
        signature: Equal for two prefixes that compute the same, bit for bit.
        obstacle: Why border values cannot be kept per sample; empty if they can, None if that is not known yet.
    """

    cut: Cut
    prefix: fx.GraphModule
    suffix: fx.GraphModule
    frozen: tuple[Tensor, ...]
    signature: Hashable
    obstacle: str | None = None

    @property
    def parameters(self) -> int:
        """Number of weights in the prefix."""
        return sum(p.numel() for p in self.frozen if isinstance(p, nn.Parameter))

    @torch.no_grad()
    def border(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Run the prefix."""
        values = self.prefix.forward(*tensors)
        # Autograd refuses in-place writes to a view made under no_grad.
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in values)

    def select(self, tensors: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
        """Take some samples out of the tensors that the prefix reads."""
        return tuple(t[rows.to(t.device)] if at in self.cut.inputs else t for at, t in enumerate(tensors))

    def obstacle_to_rows(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], count: int) -> str:
        """Explain why ``values`` are not one independent row per sample; return an empty string if they are.

        The prefix runs once more, on every second sample from the last; the rows must equal those of the whole batch.
        """
        inputs = {f"input {place}": tensors[place] for place in self.cut.inputs}
        outputs = {f"'{name}' at its border": v for name, v in zip(self.cut.border, values, strict=True)}
        for name, value in (inputs | outputs).items():
            if not isinstance(value, Tensor):
                return f"{name} is not a tensor but {type(value).__name__}"
            if value.ndim == 0 or len(value) != count:
                return f"{name}, of shape {tuple(value.shape)}, is not one row for each of {count} samples"
        rows = torch.tensor(list(range(count - 1, -1, -2)) if count > 1 else [0, 0], device="cpu")
        try:
            alone = self.border(self.select(tensors, rows))
        except Exception as error:  # whatever the user's forward raises
            return f"it does not run on part of a batch ({error})"
        for (name, value), part in zip(outputs.items(), alone, strict=True):
            if not _alike(value[rows.to(value.device)], part):
                return f"{name} depends on what else is in the batch"
        return ""


def _halves_of(model: nn.Module, call: Call) -> _Halves | None:
    """Cut the forward of a model and check the prefix on one call; return None if no frozen part comes first.

    The prefix must neither draw random numbers nor change buffers. Nodes that do, found by running it, are left to the
    suffix; random state and buffers are restored.

    Cost: one trace and one or a few passes through the prefix.
    """
    traced = trace_forward(model, call)
    blocked: set[str] = set()
    while True:
        cut = cut_forward(traced, blocked=blocked)
        if not cut.border:
            return None
        # The dictionary preserves the identity of modules; only those used are taken.
        prefix = fx.GraphModule(traced.targets, cut.prefix)
        restless = _restless(prefix, call.tensors) - blocked
        if not restless:
            break
        blocked |= restless
    frozen = (*prefix.parameters(), *prefix.buffers())
    names = tuple(node.name for node in cut.prefix.nodes)
    signature = (call.key, names, cut.border, tuple((id(t), *memory_stamp(t)) for t in frozen))
    return _Halves(cut, prefix, fx.GraphModule(traced.targets, cut.suffix), frozen, signature)


@torch.no_grad()
def _restless(prefix: fx.GraphModule, tensors: tuple[Tensor, ...]) -> set[str]:
    """Names of the nodes that draw random numbers or change buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in prefix.buffers()]
    devices = accelerators((*tensors, *prefix.parameters()))
    watcher = _Watcher(prefix, functools.partial(random_state, devices), [buffer for buffer, _ in buffers])
    with generators_kept(devices):
        watcher.run(*tensors)
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
    return watcher.restless


class _Watcher(fx.Interpreter):
    """Runs a graph node by node and records the nodes that change the random state or a buffer."""

    def __init__(self, module: fx.GraphModule, random: Callable[[], Any], buffers: list[Tensor]) -> None:
        super().__init__(module)
        self.restless: set[str] = set()
        self._state = lambda: (random(), versions(buffers))

    def run_node(self, n: fx.Node) -> Any:
        before = self._state()
        result = super().run_node(n)
        if self._state() != before:
            self.restless.add(n.name)
        return result


def _alike(whole: Tensor, part: Tensor) -> bool:
    if whole.shape != part.shape or whole.dtype != part.dtype:
        return False
    if not whole.is_floating_point() or whole.numel() == 0:
        return torch.equal(whole, part)
    difference = float((whole.double() - part.double()).abs().max())
    return difference <= _TOLERANCE.get(whole.dtype, _HALF_TOLERANCE) * float(whole.abs().max())


class _Watch:
    """Detects changes of a model since the halves of its forward were built."""

    def __init__(self, model: nn.Module, frozen: Iterable[Tensor]) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._frozen = [t for t in frozen if t.ndim or t.is_floating_point()]  # skips batch counters
        self._attributes = self._look()
        self._before = self._state()

    def _look(self) -> list[Any]:
        """Return all attributes of the modules, to be compared by identity; holding them keeps their addresses."""
        attributes: list[Any] = []
        for module in self._modules:
            attributes += (type(module), type(module).forward, *vars(module).values())
            for value in vars(module).values():
                if isinstance(value, dict):
                    attributes += value.keys()
                    attributes += value.values()
                elif type(value) in (list, set):
                    attributes += value
        return attributes

    def _state(self) -> tuple[list[Any], ...]:
        addresses = [t.data_ptr() for t in self._frozen]
        return list(map(_requires_grad, self._parameters)), versions(self._frozen), addresses

    def rebuilt(self) -> bool:
        """Whether anything but flags and values changed; if so, the rows may belong to another network."""
        now = self._look()
        return len(now) != len(self._attributes) or not all(map(is_, now, self._attributes))

    def changed(self) -> bool:
        """Whether anything changed."""
        return self.rebuilt() or self._state() != self._before
