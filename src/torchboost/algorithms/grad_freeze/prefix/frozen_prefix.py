"""Skip the frozen first part of a network for samples it has already computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.algorithms.grad_freeze.prefix.activation_cache import ActivationCache, sample_ids
from torchboost.algorithms.grad_freeze.prefix.build import Halves, build_halves
from torchboost.algorithms.grad_freeze.prefix.trace import Call, TracedForward, is_opaque, trace_forward
from torchboost.core.algorithm import Attachment
from torchboost.core.covering import cover_forward, own_forward
from torchboost.core.torch_private import versions
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError

__all__ = ["FastPrefix", "FastPrefixReport", "fast_prefix"]

_requires_grad = attrgetter("requires_grad")
_NOT_RUN = "no training step has run yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPrefixReport:
    """Status of the fast path of the frozen prefix.

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


def fast_prefix(model: nn.Module, *, cache: ActivationCache | None = None) -> FastPrefix:
    """Compute the frozen first part of a network once per sample, and skip it from then on.

    The ``forward`` of this one instance is replaced. In training mode it is cut at the first trainable operation:
    everything that no trainable parameter, random number (dropout) or changing buffer (BatchNorm in training mode) has
    reached runs under ``no_grad``, and its output for a sample is cached under the id of the sample. If all samples of
    a batch are cached, this part is skipped. Both parts call the model's own modules. In eval mode, with inputs that
    require gradients, or if no frozen part comes first, the forward runs unchanged. The cached rows are correct only if
    a sample is the same tensor in every epoch: no random augmentation.

    What is frozen is read from ``requires_grad``. Before each forward the model is compared with its last state: flags,
    the attributes of all modules (parameters, buffers, submodules and hooks among them), and versions and addresses of
    the frozen tensors. After any change the forward is traced again; if the change may affect what the prefix computes,
    the rows are dropped.

    Limits: Python state that is not an attribute of a module (a global, a list in a list) keeps its value from the
    trace; an in-place write to a frozen weight through ``.data`` is not detected; call :meth:`FastPrefix.update` after
    either. While ``torch.fx`` traces the forward, it patches ``nn.Module`` for the whole process: no other thread
    should run a model at that moment.

    Cost: about 2 microseconds per module for the comparison; at every change one trace and a few passes through the
    prefix.

    Args:
        model: The bare model, in place. Wrap it in DDP afterwards.
        cache: An empty cache that is not used elsewhere. None computes the prefix at every step.

    Returns:
        Its ``remove()`` restores the forward and empties the cache.

    Raises:
        IncompatibleError: The model is wrapped or compiled, has its own ``forward`` on the instance, or cannot be
            traced. If that depends on the arguments, the first training step raises it.
        ValueError: ``cache`` is not empty.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> with fast_prefix(model, cache=ActivationCache(2**20)) as fast:
        ...     for epoch in range(2):
        ...         with fast.samples([5, 3]):
        ...             _ = model(torch.ones(2, 4))
        ...     fast.report().rows, fast.report().hit_rate
        (2, 0.5)
    """
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise IncompatibleError(
            f"found a model wrapped by {wrapper}; the fast path of the frozen prefix replaces the forward of the bare, "
            "uncompiled model. Call fast_prefix on that before wrapping, or train without compiling."
        )
    if own_forward(model) is not None:
        raise IncompatibleError(
            f"the forward of this {type(model).__name__} was replaced on the instance, so the forward of its class "
            "does not run; attach the fast path of the frozen prefix first, or leave it out."
        )
    if cache is not None and cache.rows:
        raise ValueError(f"cache: found {cache.rows} rows already; clear() it, or pass a new one.")
    needed = [
        argument
        for argument in list(inspect.signature(type(model).forward).parameters.values())[1:]
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) == 1:
        trial = Call.of((torch.empty(0, device="cpu"),), {})
        assert trial is not None
        trace_forward(model, trial)
    return FastPrefix(model, cache)


class FastPrefix(Attachment):
    """The live effect of :func:`fast_prefix`."""

    def __init__(self, model: nn.Module, cache: ActivationCache | None) -> None:
        self._model = model
        self._cache = cache
        self._named: Tensor | None = None
        self._note = _NOT_RUN
        self._reset()
        # Inside autocast, which is then on while the halves run.
        super().__init__(cover_forward(model, self._forward, innermost=True), undo=self._end)

    def _reset(self) -> None:
        self._watch: _Watch | None = None
        self._halves: dict[Any, Halves | None] = {}
        self._traces: dict[Any, tuple[TracedForward, set[str]]] = {}
        self._last: Halves | None = None
        self._rows_of: tuple[Any, ...] | None = None

    def _end(self) -> None:
        self._reset()
        self._note = "removed"
        if self._cache is not None:
            self._cache.clear()

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
        self._watch = None
        self._traces.clear()

    def report(self) -> FastPrefixReport:
        """Return the current sizes and hit rate."""
        halves, cache = self._last, self._cache
        looked = 0 if cache is None else cache.hits + cache.misses
        note = halves.rows or "" if halves is not None and cache is not None else ""
        return FastPrefixReport(
            parameters=0 if halves is None else halves.parameters,
            rows=0 if cache is None else cache.rows,
            bytes=0 if cache is None else cache.bytes,
            hit_rate=0.0 if cache is None or not looked else cache.hits / looked,
            note=self._note if halves is None else note and f"nothing is cached: {note}",
        )

    def __str__(self) -> str:
        return str(self.report())

    def _forward(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A deep copy of the model calls this too, with itself as the module.
        if module is not self._model or not module.training or torch.compiler.is_compiling():
            return forward(module, *args, **kwargs)
        named, self._named = self._named, None
        call = Call.of(args, kwargs)
        halves = None
        if call is None:
            self._note = "an argument of the forward is neither a tensor nor a plain value"
        elif any(tensor.requires_grad for tensor in call.tensors):
            self._note = "an input requires gradients"
        else:
            halves = self._current(call)
        self._last = halves
        if halves is None or call is None:
            return forward(module, *args, **kwargs)
        if named is None or self._cache is None:
            border = halves.border(call.tensors)
        else:
            border = self._cached(self._cache, halves, call, named)
        return halves.suffix.forward(*call.tensors, *border)

    def _current(self, call: Call) -> Halves | None:
        """Return the halves for this kind of call; rebuild them if the model has changed."""
        if self._watch is None or self._watch.changed():
            self._rebuild(call)
        elif call.key not in self._halves:
            self._halves[call.key] = self._build(call)
            self._watch = _Watch(self._model, self._halves.values())
        return self._halves[call.key]

    def _rebuild(self, call: Call) -> None:
        known = {halves.signature: halves for halves in self._halves.values() if halves is not None}
        if self._watch is None or self._watch.rebuilt():
            known = {}
            self._traces.clear()
        halves = self._build(call)
        if halves is not None and halves.signature in known:
            halves.rows = known[halves.signature].rows
        elif self._cache is not None:
            self._cache.clear()
            self._rows_of = None
        self._halves = {call.key: halves}
        self._watch = _Watch(self._model, self._halves.values())

    def _build(self, call: Call) -> Halves | None:
        containers = tuple(module.training for module in self._model.modules())
        key = (call.key, containers, tuple(map(is_opaque, self._model.modules())))
        if key not in self._traces:
            self._traces = {key: (trace_forward(self._model, call), set())}
        halves = build_halves(self._traces[key][0], call, self._traces[key][1])
        if halves is None:
            self._note = "no frozen part comes first"
        return halves

    def _cached(self, cache: ActivationCache, halves: Halves, call: Call, ids: Tensor) -> tuple[Any, ...]:
        tensors = call.tensors
        read = [tensors[place] for place in halves.cut.inputs]
        count = ids.numel()
        if not any(tensor.ndim and len(tensor) == count for tensor in read):
            raise ValueError(f"samples: found {count} ids for inputs of shapes {[tuple(t.shape) for t in read]}.")
        kind = next((p.device.type for p in halves.frozen), "cpu")
        mode = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        rows_of = (halves.signature, mode, tuple((t.shape[1:], t.dtype, t.device) for t in read))
        if self._rows_of is not None and self._rows_of[:2] != rows_of[:2]:
            cache.clear()
            self._rows_of = None
        if halves.rows is None:
            values = halves.border(tensors)
            if not halves.check_rows(tensors, values, count):
                self._rows_of = rows_of
                cache.find(ids)  # count the misses
                cache.store(ids, values)
            return values
        if halves.rows or any(len(tensor) != count for tensor in read) or self._rows_of not in (None, rows_of):
            return halves.border(tensors)
        self._rows_of = rows_of
        return self._looked_up(cache, halves, tensors, ids)

    def _looked_up(
        self, cache: ActivationCache, halves: Halves, tensors: tuple[Tensor, ...], ids: Tensor
    ) -> tuple[Any, ...]:
        slots = cache.find(ids)
        missing = (slots < 0).nonzero().flatten()
        if not missing.numel():
            return cache.read(slots)
        if missing.numel() == ids.numel():
            values = halves.border(tensors)
            if cache.fits(values):
                cache.store(ids, values)
            return values
        values = halves.border(halves.select(tensors, missing))
        if not cache.fits(values):
            return halves.border(tensors)
        merged = cache.read(slots, values)
        cache.store(ids[missing], values)
        return merged


class _Watch:
    """Detects changes of a model since the halves of its forward were built."""

    def __init__(self, model: nn.Module, halves: Iterable[Halves | None]) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        frozen = {id(t): t for half in halves if half is not None for t in half.frozen}
        self._frozen = [t for t in frozen.values() if t.ndim or t.is_floating_point()]  # skips batch counters
        self._attributes = self._look()
        self._before = self._state()

    def _look(self) -> list[Any]:
        """Return all attributes of the modules, to be compared by identity; holding them keeps their addresses."""
        found: list[Any] = []
        for module in self._modules:
            found += (type(module), type(module).forward, *vars(module).values())
            for value in vars(module).values():
                if isinstance(value, dict):
                    found += value.keys()
                    found += value.values()
                elif type(value) in (list, set):
                    found += value
        return found

    def _state(self) -> tuple[list[Any], ...]:
        return (
            list(map(_requires_grad, self._parameters)),
            versions(self._frozen),
            [t.data_ptr() for t in self._frozen],
        )

    def rebuilt(self) -> bool:
        """Whether anything but flags and values changed; if so, the rows may belong to another network."""
        now = self._look()
        return len(now) != len(self._attributes) or not all(map(is_, now, self._attributes))

    def changed(self) -> bool:
        """Whether anything changed."""
        return self.rebuilt() or self._state() != self._before
