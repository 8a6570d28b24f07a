"""The output of the frozen part of a network, computed once per sample and kept within a budget."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.algorithms.grad_freeze.cut import Halves, halves_of, mode_of_torch
from torchboost.core.algorithm import Attachment
from torchboost.core.forward import Forward, cover_forward, own_forward
from torchboost.core.torch_private import inside_function_transform, inside_mode, is_tracing, versions
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.sheet import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPrefixReport:
    """Status of the cache of the frozen prefix."""

    parameters: int = 0  # weights in the prefix, 0 if the forward runs unchanged
    rows: int = 0  # samples whose outputs are cached
    bytes: int = 0
    hit_rate: float = 0.0  # share of the samples that were found, since the prefix last changed
    note: str = ""  # why the forward runs unchanged, or why nothing is cached

    def __str__(self) -> str:
        text = (
            f"frozen prefix: {self.parameters:,} parameters; {self.rows:,} samples held "
            f"({self.bytes / 2**20:.1f} MiB), {percent(self.hit_rate)} of look-ups found"
        )
        return f"{text}; {self.note}" if self.note else text


def check_cacheable(model: nn.Module) -> None:
    """Refuse a model that is wrapped or compiled, or has its own ``forward`` on the instance."""
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

    The ``forward`` of this one instance is replaced. In training mode it is cut before the first operation that uses a
    trainable parameter, draws random numbers (dropout), changes a buffer (BatchNorm in training mode), or writes into
    an input or a constant. The operations before the cut run under ``no_grad``, and their results are cached under the
    id of the sample, in the memory of the CPU. If all samples of a batch are cached, this part is skipped.

    If the loop names the samples of a batch, a sample must be the same tensor in every epoch: no random augmentation.
    With ``by_content`` a sample is known by a hash of all its entries in the inputs that the prefix reads, so that a
    changed one is computed. If nothing or only a part is cached, a warning says why. If hardly a sample comes twice,
    the cache ends, with a warning.

    The forward runs unchanged in eval mode, with inputs that require gradients, with arguments that are not positional
    tensors, for another number of them than at first, for samples of another shape or type than the first ones, or if
    no frozen part comes first.

    A parameter with ``requires_grad=False`` counts as frozen. Before each forward the model is compared with its last
    state: flags, the attributes of all modules, and versions and addresses of the frozen tensors. After any change the
    forward is traced again and the rows are dropped.

    Limits: Python state that is not an attribute of a module (a global, a list in a list) keeps its value from the
    trace. An in-place write to a frozen weight through ``.data`` is not detected. Call :meth:`update` after either.
    While ``torch.fx`` traces the forward, it patches ``nn.Module`` for the whole process: no other thread should run a
    model at that moment.

    Cost: about 2 microseconds per module for the comparison, at every change one trace and a few passes through the
    prefix, and one copy per row in and out. By content also a hash, about 1 ms per MiB of input on the CPU, and on
    another device a copy of the inputs to the CPU.

    Args:
        model: The bare model, in place. Wrap it in DDP afterwards.
        budget_bytes: Most bytes of cached rows. None is evicted.
        by_content: Whether samples that are not named are known by their content.
        dtype: Type to which floating-point border values are rounded, cached or not. None keeps theirs.

    Raises:
        IncompatibleError: The forward cannot be replaced, or, in the first training step, not traced.
    """

    def __init__(
        self, model: nn.Module, budget_bytes: int, *, by_content: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        check_cacheable(model)
        self._model, self._budget, self._dtype, self._by_content = model, budget_bytes, dtype, by_content
        self._ids: list[int] = []
        self._note = "no training step has run yet"
        self.update()
        # Inside autocast, which is then on while the halves run.
        super().__init__(cover_forward(model, self._forward, innermost=True), undo=self._end)

    def update(self) -> None:
        """Trace the model again before the next forward, and drop all rows."""
        self._watch: _Watch | None = None
        self._mode = mode_of_torch()
        self._halves: Halves | None = None
        self._rows: dict[Hashable, tuple[Tensor, ...]] = {}
        self._hits = self._misses = 0

    def _end(self) -> None:
        self.update()
        self._note = "removed"

    @contextmanager
    def samples(self, ids: Tensor | Sequence[int]) -> Iterator[None]:
        """Name the samples of the next forward, which raises ``ValueError`` if their number is wrong.

        Args:
            ids: One integer per sample of the batch, shape ``(n,)``, the same for the same sample in every epoch.
        """
        self._ids = torch.as_tensor(ids, device="cpu").tolist()
        try:
            yield
        finally:
            self._ids = []

    def report(self) -> FastPrefixReport:
        """Return the current sizes and hit rate."""
        halves = self._halves
        return FastPrefixReport(
            parameters=0 if halves is None else sum(p.numel() for p in halves.prefix.parameters()),
            rows=len(self._rows),
            bytes=sum(tensor.nbytes for tensor in next(iter(self._rows.values()), ())) * len(self._rows),
            hit_rate=self._hits / max(1, self._hits + self._misses),
            note=self._note,
        )

    def _forward(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids, self._ids = self._ids, []
        # A deep copy of the model calls this too, with itself as the module.
        ours = module is self._model and module.training and not torch.compiler.is_compiling()
        # The compiler cannot trace the look at the arguments.
        known = ours and (bool(ids) or (self._by_content and _is_readable(args)))
        halves = self._usable(ids, args, kwargs) if known else None
        if halves is None:
            return forward(module, *args, **kwargs)
        names = ids or _contents([args[at] for at in halves.inputs])
        values = self._border(halves, args, names)
        if self._misses > 2 * len(self._rows):  # by content more than twice as many as there is room for
            self.judge()
        return halves.suffix.forward(*args, *values)

    def _usable(self, ids: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Halves | None:
        """Return the halves if a training call can be cut, or tell why not."""
        if not ids and inside_mode():
            self._tell("the forward runs inside a mode of torch, such as that of the switch unpad")
        elif kwargs or not args or not all(isinstance(argument, Tensor) for argument in args):
            self._tell("an argument of the forward is not a positional tensor")
        elif any(tensor.requires_grad for tensor in args):
            self._tell("an input requires gradients")
        elif ids and not any(tensor.ndim and len(tensor) == len(ids) for tensor in args):
            raise ValueError(
                f"samples: found {len(ids)} ids for inputs of shapes {[tuple(tensor.shape) for tensor in args]}."
            )
        else:
            count = len(ids) or len(args[0])
            halves = self._current(args, count, named=bool(ids))
            if halves is None or halves.accepts(args, count):
                return halves
            if self._by_content:
                self._tell("inputs of another shape or type than the first ones are computed in every step")
        return None

    def _current(self, tensors: tuple[Tensor, ...], count: int, *, named: bool) -> Halves | None:
        """Return the halves, if there are any. Build them again if the model has changed."""
        if self._watch is None or mode_of_torch() != self._mode or self._watch.changed():
            self.update()
            self._note = ""
            try:
                halves = halves_of(self._model, tensors, count)
            except IncompatibleError as error:
                if named:
                    raise
                halves = str(error)
            if isinstance(halves, str):
                self._tell(halves)
            else:
                self._halves = halves
                self._tell(halves.left_over(self._model))
            self._watch = _Watch(self._model, [] if self._halves is None else self._halves.frozen)
        return self._halves

    def _tell(self, note: str) -> None:
        """Keep a note for the report. If the loop names no samples, warn too: it does not ask for the report."""
        if self._by_content and note and note != self._note:
            warn_no_effect(f"grad_freeze: the frozen part is not fully cached: {note}")
        self._note = note

    def judge(self) -> None:
        """End a cache by content if it has found less than a tenth of the samples, and warn.

        The cache calls this itself when more than twice as many samples as it has room for have come.
        """
        few = 10 * self._hits < self._hits + self._misses  # a trial of levers repeats a batch
        if self._by_content and few and self._misses:
            self._by_content, rows, self._rows = False, len(self._rows), {}
            self._note = "off, because hardly a sample came twice"
            warn_no_effect(
                f"grad_freeze: the cache of the frozen part is off from now on: of {self._misses:,} different samples "
                f"{rows:,} were held, and hardly one came again. Leave random augmentation out, or raise "
                "cache_mebibytes if it is too small for the data. In a single epoch nothing can be cached."
            )

    def _border(self, halves: Halves, tensors: tuple[Tensor, ...], names: Sequence[Hashable]) -> tuple[Tensor, ...]:
        """Return the border values of a batch, from the rows as far as there are some, and keep the others."""
        missing = [place for place, name in enumerate(names) if name not in self._rows]
        self._hits += len(names) - len(missing)
        self._misses += len(missing)
        whole = len(missing) == len(names)
        exact = halves.border(tensors if whole else halves.select(tensors, missing)) if missing else ()
        values = tuple(map(self._rounded, exact))
        computed = dict(zip(missing, zip(*map(_unbound, values, halves.orders), strict=True), strict=True))
        rows = [computed[place] if place in computed else self._rows[name] for place, name in enumerate(names)]
        for place, row in computed.items():
            size = sum(tensor.nbytes for tensor in row)
            if names[place] not in self._rows and (len(self._rows) + 1) * size <= self._budget:
                self._rows[names[place]] = tuple(tensor.clone() for tensor in row)
        if whole:
            return tuple(value.to(like.dtype) for value, like in zip(values, exact, strict=True))
        return tuple(map(_stacked, zip(*rows, strict=True), halves.orders, halves.likes))

    def _rounded(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value


def _is_readable(args: Sequence[Any]) -> bool:
    """Whether the content of a training call can be read: not under a tracer or a transform."""
    if not torch.is_grad_enabled() or is_tracing() or inside_function_transform():
        return False
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    plain = all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested for t in tensors)
    return plain and (not tensors or tensors[0].ndim > 0 < len(tensors[0]))


def _contents(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return a hash of each sample: of its entries in all tensors, shape (n, ...)."""
    digests = [blake2b(digest_size=16) for _ in tensors[0]]
    for tensor in tensors:
        plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        rows = plain.detach().resolve_neg().cpu().reshape(len(tensor), -1).contiguous().view(torch.uint8).numpy()
        for digest, row in zip(digests, rows, strict=True):
            digest.update(row)
    return [digest.digest() for digest in digests]


def _unbound(value: Tensor, order: list[int]) -> Sequence[Tensor]:
    return value.detach().permute(order).cpu().unbind()


def _stacked(rows: tuple[Tensor, ...], order: list[int], like: Tensor) -> Tensor:
    return torch.stack(rows).permute([order.index(d) for d in range(len(order))]).to(like)


class _Watch:
    """Detects changes of a model since the halves of its forward were built."""

    def __init__(self, model: nn.Module, frozen: Iterable[Tensor]) -> None:
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._frozen = [t for t in frozen if t.ndim or t.is_floating_point()]  # skips batch counters
        self._before = self._look()

    def changed(self) -> bool:
        """Whether anything changed."""
        attributes, numbers = self._look()
        same = numbers == self._before[1] and len(attributes) == len(self._before[0])
        return not (same and all(map(is_, attributes, self._before[0])))

    def _look(self) -> tuple[list[Any], list[Any]]:
        """Return all attributes of the modules, which are compared by identity, and flags, versions and addresses."""
        attributes: list[Any] = []  # holding them keeps their addresses
        for module in self._modules:
            attributes += (type(module), type(module).forward, *vars(module).values())
            for value in vars(module).values():
                if isinstance(value, dict):
                    attributes += value.keys()
                    attributes += value.values()
                elif type(value) in (list, set):
                    attributes += value
        numbers = [p.requires_grad for p in self._parameters]
        return attributes, [*numbers, *versions(self._frozen), *(t.data_ptr() for t in self._frozen)]
