"""The output of the frozen part of a network, computed once per sample and kept within a budget."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from torchboost.core.algorithm import Attachment
from torchboost.core.forward import cover_forward, own_forward, tensors_in
from torchboost.core.torch_private import buffer_slots, is_traced_constant, module_hooks, versions
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.graph.copies import accelerators, generator_states, generators_kept
from torchboost.graph.trace import LAYERS, StandIn

__all__ = ["FastPrefix", "FastPrefixReport", "check_cacheable"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.1


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

    The ``forward`` of this one instance is replaced. If the samples of a batch are named, it is cut in training mode
    before the first operation that uses a trainable parameter, draws random numbers (dropout), changes a buffer
    (BatchNorm in training mode), or writes into an input or a constant. The operations before the cut run under
    ``no_grad``, and their results are cached under the id of the sample, in the memory of the CPU. If all samples of a
    batch are cached, this part is skipped. Both parts call the model's own modules. The cached rows are correct only if
    a sample is the same tensor in every epoch: no random augmentation.

    The forward runs unchanged in eval mode, with inputs that require gradients, with arguments that are not positional
    tensors, for another number of them than at first, for samples of another shape or type than the first ones, or if
    no frozen part comes first.

    A parameter with ``requires_grad=False`` counts as frozen. Before each forward the model is compared with its last
    state: flags, the attributes of all modules (parameters, buffers, submodules and hooks among them), and versions and
    addresses of the frozen tensors. After any change the forward is traced again and the rows are dropped.

    Limits: Python state that is not an attribute of a module (a global, a list in a list) keeps its value from the
    trace; an in-place write to a frozen weight through ``.data`` is not detected; call :meth:`update` after either.
    While ``torch.fx`` traces the forward, it patches ``nn.Module`` for the whole process: no other thread should run a
    model at that moment.

    Cost: about 2 microseconds per module for the comparison; at every change one trace and a few passes through the
    prefix; one copy per row in and out.

    Args:
        model: The bare model, in place. Wrap it in DDP afterwards.
        budget_bytes: Most bytes of cached rows; none is evicted.

    Raises:
        IncompatibleError: See :func:`check_cacheable`. The first training step raises it if the forward cannot be
            traced.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> with FastPrefix(model, 2**20) as fast:
        ...     for epoch in range(2):
        ...         with fast.samples([5, 3]):
        ...             _ = model(torch.ones(2, 4))
        ...     fast.report().rows, fast.report().hit_rate
        (2, 0.5)
    """

    def __init__(self, model: nn.Module, budget_bytes: int) -> None:
        check_cacheable(model)
        self._model, self._budget = model, budget_bytes
        self._ids: list[int] = []
        self._note = "no training step has run yet"
        self.update()
        # Inside autocast, which is then on while the halves run.
        super().__init__(cover_forward(model, self._forward, innermost=True), undo=self._end)

    def update(self) -> None:
        """Trace the model again before the next forward, and drop all rows."""
        self._watch: _Watch | None = None
        self._mode = _mode()
        self._halves: _Halves | None = None
        self._rows: dict[int, tuple[Tensor, ...]] = {}
        self._hits = self._misses = 0

    def _end(self) -> None:
        self.update()
        self._note = "removed"

    @contextmanager
    def samples(self, ids: Tensor | Sequence[int]) -> Iterator[None]:
        """Name the samples of the next forward.

        Args:
            ids: One integer per sample of the batch, shape ``(n,)``; the same for the same sample in every epoch.

        Raises:
            ValueError: Their number is wrong; raised from the forward.
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
            note=self._note if halves is None else "",
        )

    def _forward(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ids, self._ids = self._ids, []
        # A deep copy of the model calls this too, with itself as the module.
        if not ids or module is not self._model or not module.training or torch.compiler.is_compiling():
            return forward(module, *args, **kwargs)
        if kwargs or not all(isinstance(argument, Tensor) for argument in args):
            self._note = "an argument of the forward is not a positional tensor"
        elif any(tensor.requires_grad for tensor in args):
            self._note = "an input requires gradients"
        elif not any(tensor.ndim and len(tensor) == len(ids) for tensor in args):
            raise ValueError(
                f"samples: found {len(ids)} ids for inputs of shapes {[tuple(tensor.shape) for tensor in args]}."
            )
        else:
            halves = self._current(args, len(ids))
            if halves is not None and halves.accepts(args, len(ids)):
                return halves.suffix.forward(*args, *self._border(halves, args, ids))
        return forward(module, *args, **kwargs)

    def _current(self, tensors: tuple[Tensor, ...], count: int) -> _Halves | None:
        """Return the halves, if there are any; find out again if the model has changed."""
        if self._watch is None or _mode() != self._mode or self._watch.changed():
            self.update()
            halves = _halves_of(self._model, tensors, count)
            if isinstance(halves, str):
                self._note = halves
            else:
                self._halves = halves
            self._watch = _Watch(self._model, [] if self._halves is None else self._halves.frozen)
        return self._halves

    def _border(self, halves: _Halves, tensors: tuple[Tensor, ...], ids: list[int]) -> tuple[Tensor, ...]:
        """Return the border values of a batch, from the rows as far as there are some, and keep the others."""
        missing = [place for place, sample in enumerate(ids) if sample not in self._rows]
        self._hits += len(ids) - len(missing)
        self._misses += len(missing)
        whole = len(missing) == len(ids)
        values = halves.border(tensors if whole else halves.select(tensors, missing)) if missing else ()
        computed = dict(zip(missing, zip(*map(_unbound, values, halves.orders), strict=True), strict=True))
        rows = [computed[place] if place in computed else self._rows[sample] for place, sample in enumerate(ids)]
        for place, row in computed.items():
            size = sum(tensor.nbytes for tensor in row)
            if ids[place] not in self._rows and (len(self._rows) + 1) * size <= self._budget:
                self._rows[ids[place]] = tuple(tensor.clone() for tensor in row)
        return values if whole else tuple(map(_stacked, zip(*rows, strict=True), halves.orders, halves.devices))


def _memory_order(value: Tensor) -> list[int]:
    """Return the dimensions of a batch in memory order, the batch first; this preserves channels-last."""
    return [0, *sorted(range(1, value.ndim), key=lambda d: (-value.stride(d), d))]


def _unbound(value: Tensor, order: list[int]) -> Sequence[Tensor]:
    return value.detach().permute(order).cpu().unbind()


def _stacked(rows: tuple[Tensor, ...], order: list[int], device: torch.device) -> Tensor:
    return torch.stack(rows).permute([order.index(d) for d in range(len(order))]).to(device)


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


class _Halves:
    """One forward, cut in two. Both halves keep the order of the operations, and call the model's own modules.

    Args:
        prefix: Takes the tensors of the call, and returns the tuple of border values.
        suffix: Takes the tensors of the call and the border values.
        names: Names of the border values.
        inputs: Positions of the tensors that the prefix reads.
        tensors: Those of the first call.
    """

    def __init__(
        self,
        prefix: fx.GraphModule,
        suffix: fx.GraphModule,
        names: Sequence[str],
        inputs: Collection[int],
        tensors: tuple[Tensor, ...],
    ) -> None:
        self.prefix, self.suffix, self.names, self._inputs = prefix, suffix, names, inputs
        self._count, self._kinds = len(tensors), self._kinds_of(tensors)
        self.orders: list[list[int]] = []
        self.devices: list[torch.device] = []

    @property
    def frozen(self) -> list[Tensor]:
        """Every parameter and buffer of the prefix."""
        return [*self.prefix.parameters(), *self.prefix.buffers()]

    def accepts(self, tensors: tuple[Tensor, ...], count: int) -> bool:
        """Whether the call has as many tensors as the first one, and one row per sample of the kinds that are read."""
        if len(tensors) != self._count or any(tensors[at].shape[:1] != (count,) for at in self._inputs):
            return False
        return self._kinds_of(tensors) == self._kinds

    def _kinds_of(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        read = [tensors[at] for at in self._inputs]
        return [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in read]

    @torch.no_grad()
    def border(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the prefix."""
        # Autograd refuses in-place writes to a view made under no_grad.
        return tuple(value.detach() for value in self.prefix.forward(*tensors))

    def select(self, tensors: tuple[Tensor, ...], rows: list[int]) -> tuple[Tensor, ...]:
        """Take some samples out of the tensors that the prefix reads."""
        return tuple(t[rows] if at in self._inputs else t for at, t in enumerate(tensors))

    def obstacle(self, tensors: tuple[Tensor, ...], count: int) -> str:
        """Explain why the border values are not one independent row per sample; return an empty string if they are.

        The prefix runs on the batch, on every second sample from the last, and on the others, since only one of these
        has the largest entry of the batch. The first sample is among the others: an odd number of rows with the first
        and the last one is the same in a reversed batch. The rows must be equal.
        """
        values = self.border(tensors)
        outputs = {f"'{name}' at its border": value for name, value in zip(self.names, values, strict=True)}
        for name, value in ({f"input {at}": tensors[at] for at in self._inputs} | outputs).items():
            if value.ndim == 0 or len(value) != count:
                return f"{name}, of shape {tuple(value.shape)}, is not one row for each of {count} samples"
        memory, inputs = ([t.untyped_storage().data_ptr() for t in some] for some in (values, tensors))
        if len({*memory}.difference(inputs)) < len(values):
            return f"{' and '.join(outputs)} share memory with each other or with an input"
        second = list(range(count - 1, 0, -2)) or [0, 0]
        others = [row for row in range(count) if row not in second]
        for rows in filter(None, (second, others)):
            try:
                alone = self.border(self.select(tensors, rows))
            except Exception as error:  # whatever the user's forward raises
                return f"it does not run on part of a batch ({error})"
            for (name, value), part in zip(outputs.items(), alone, strict=True):
                if not _alike(value[rows], part):
                    return f"{name} depends on what else is in the batch"
        self.orders = list(map(_memory_order, values))
        self.devices = [value.device for value in values]
        return ""


def _alike(whole: Tensor, part: Tensor) -> bool:
    if whole.shape != part.shape or whole.dtype != part.dtype:
        return False
    if not whole.is_floating_point() or whole.numel() == 0:
        return torch.equal(whole, part)
    difference = float((whole.double() - part.double()).abs().max())
    return difference <= _TOLERANCE.get(whole.dtype, _HALF_TOLERANCE) * float(whole.abs().max())


def _halves_of(model: nn.Module, tensors: tuple[Tensor, ...], count: int) -> _Halves | str:
    """Cut the forward of a model before its first trained part, or say why its results cannot be kept per sample.

    The border consists of what is computed from the inputs. What depends on weights or on sizes alone is computed on
    both sides if both need it.

    Raises:
        IncompatibleError: The forward cannot be traced.
    """
    graph, targets = _traced(model, tensors)
    front = _Front(fx.GraphModule(targets, graph), [_trains(node, targets) for node in graph.nodes], tensors)
    behind = {node for node in graph.nodes if node not in front.nodes}
    border = set[fx.Node]()
    waiting = [source for node in behind for source in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in front.activations:
            border.add(node)
        elif node not in behind:
            behind.add(node)
            waiting += node.all_input_nodes
    before, waiting = set[fx.Node](), list(front.activations)
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += node.all_input_nodes
    results = [node for node in graph.nodes if node in border]
    # The dictionary preserves the identity of modules; only those used are taken.
    prefix = fx.GraphModule(targets, _part(graph, before, results=results))
    if not border or next(prefix.parameters(), None) is None:
        return "no frozen part comes first"
    suffix = fx.GraphModule(targets, _part(graph, behind, border=results))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    read = [at for at, node in enumerate(inputs) if node in before]
    halves = _Halves(prefix, suffix, [node.name for node in results], read, tensors)
    obstacle = halves.obstacle(tensors, count)
    return f"nothing is cached: {obstacle}" if obstacle else halves


class _Front(fx.Interpreter):
    """Runs a graph up to the first node that trains, draws random numbers, or writes to anything but activations.

    Attributes:
        nodes: The nodes before that one.
        activations: Those of them whose value is a tensor that is computed from the inputs.
    """

    def __init__(self, module: fx.GraphModule, trains: Sequence[bool], tensors: tuple[Tensor, ...]) -> None:
        super().__init__(module)
        self.nodes: dict[fx.Node, None] = {}
        self.activations: dict[fx.Node, None] = {}
        self._trains = dict(zip(module.graph.nodes, trains, strict=True))
        self._devices, self._ended = accelerators((*tensors, *module.parameters())), False
        self._derived: set[fx.Node] = set()
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        inputs = [tensor.clone() for tensor in tensors]
        # The interpreter drops values after their last use, and a view of them may be written to later.
        self._kept = [*(buffer for buffer, _ in buffers), *inputs]
        with torch.no_grad(), generators_kept(self._devices):
            self.run(*inputs)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    def run_node(self, n: fx.Node) -> Any:
        if self._ended or n.op == "output" or self._trains[n]:
            self._ended = True
            return None
        before = self._state()
        value = super().run_node(n)
        self._ended = self._state() != before
        if not self._ended:
            self.nodes[n] = None
            derived = any(source in self._derived or source.op == "placeholder" for source in n.all_input_nodes)
            if derived and tensors_in(value):  # a chunk and a recurrent layer return a tuple
                self._derived.add(n)
                if isinstance(value, Tensor):
                    self.activations[n] = None
        return value

    def _state(self) -> tuple[Any, ...]:
        values = {node: value for node, value in self.env.items() if isinstance(value, Tensor)}
        others = [value for node, value in values.items() if node not in self.activations]
        shapes = [value.shape for value in values.values()]
        return _random_state(self._devices), versions([*self._kept, *others]), shapes


def _trains(node: fx.Node, targets: dict[str, Any]) -> bool:
    """Whether a node brings in a trainable parameter, or a module of which more runs than the forward of its class."""
    target = targets[str(node.target)] if node.op in ("call_module", "get_attr") else None
    if isinstance(target, nn.Module):
        return any(p.requires_grad for p in target.parameters()) or any(map(_is_opaque, target.modules()))
    return target is not None and target.requires_grad


def _part(
    graph: fx.Graph, nodes: set[fx.Node], *, border: Iterable[fx.Node] = (), results: Sequence[fx.Node] | None = None
) -> fx.Graph:
    """Copy some nodes in order; ``border`` are added as inputs, and ``results`` replace the output of the graph."""
    part = fx.Graph()
    copies = {node: part.node_copy(node) for node in graph.nodes if node.op == "placeholder"}
    copies |= {node: part.placeholder(f"border_{node.name}") for node in border}
    for node in graph.nodes:
        if node in nodes and node not in copies and node.op != "output":
            copies[node] = part.node_copy(node, lambda source: copies[source])
    returned = next(iter(reversed(graph.nodes))).args[0] if results is None else tuple(results)
    part.output(fx.map_arg(returned, lambda source: copies[source]))
    return part


def _is_opaque(module: nn.Module) -> bool:
    """Whether calling a module runs more than its class's forward: hooks, or its own forward.

    Covers of this package, such as those that let a convolution compute in float32, keep what it computes.
    """
    return any(module_hooks(module)) or own_forward(module) is not None


def _random_state(devices: Sequence[torch.device]) -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return (
        random.getstate(),
        numpy[1].tobytes(),
        numpy[2],
        *(state.numpy().tobytes() for state in generator_states(devices)),
    )


def _mode() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    precision = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), *precision


def _traced(model: nn.Module, tensors: tuple[Tensor, ...]) -> tuple[fx.Graph, dict[str, Any]]:
    """Trace the forward of the model's class in its current state, including training flags.

    Nothing is computed, and random state and the attributes of the model do not change. Submodules of ``torch.nn``,
    layers and modules with hooks become one node each.

    Returns:
        The graph, whose placeholders are the tensors of the call, and what its names refer to.

    Raises:
        IncompatibleError: The forward cannot be traced correctly; the message says why.
    """
    devices = accelerators(model.parameters())
    attributes = [(module, dict(vars(module)), dict(buffer_slots(module))) for module in model.modules()]
    names, constants, changed = set(vars(model)), dict[str, Any](), list[str]()
    before, drawn, why = _random_state(devices), False, ""
    try:
        with generators_kept(devices):
            graph = _Tracer(len(tensors)).trace(model)
            drawn = _random_state(devices) != before
    except Exception as error:  # data-dependent Python: torch.fx has no common error class
        raise _refusal(model, f"torch.fx cannot trace it ({type(error).__name__}: {error})") from error
    finally:
        constants = {name: vars(model).pop(name) for name in set(vars(model)) - names}
        changed += [name for module, *slots in attributes for name in _put_back(module, *slots)]
    changed += [name for name in constants if not is_traced_constant(name)]
    if drawn:
        why = "it draws random numbers that do not depend on its inputs"
    elif changed:
        why = f"it sets attributes of its modules ({', '.join(changed)})"
    if why:
        raise _refusal(model, why)
    used = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    objects = {name: functools.reduce(getattr, name.split("."), model) for name in used - constants.keys()}
    return graph, objects | constants


def _put_back(module: nn.Module, before: dict[str, Any], buffers: dict[str, Any]) -> list[str]:
    """Undo the attribute changes of a forward on a module; return their names."""
    changed = []
    for slots, values in ((vars(module), before), (buffer_slots(module), buffers)):
        changed += [name for name in slots | values if slots.get(name, changed) is not values.get(name, changed)]
        slots.clear()
        slots.update(values)
    return changed


def _refusal(model: nn.Module, why: str) -> IncompatibleError:
    return IncompatibleError(
        f"the forward of {type(model).__name__} cannot be split into a frozen and a trained part: {why}. Train without "
        "the cache (cache_mebibytes=0); freezing itself does not need it."
    )


class _Tracer(fx.Tracer):
    """The first arguments become placeholders; the others have their defaults.

    The recorder of :mod:`torchboost.graph.trace` takes what a forward computes from its weights alone for a constant,
    and calls no hooks; here the graph is run.
    """

    proxy_buffer_attributes = True

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._inputs, self._mode = inputs, _mode()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LAYERS) or _is_opaque(m) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return StandIn(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def forward(module: nn.Module, *tensors: Any) -> Any:
            return root_fn(module, *tensors)

        inputs = [self.create_proxy("placeholder", f"input_{at}", (), {}) for at in range(self._inputs)]
        return forward, [self.root, *inputs]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _mode() != self._mode:
            raise RuntimeError("it switches gradients or autocast on or off, which a trace does not record")
        return super().create_node(kind, *args, **kwargs)
