"""The forward of a network, cut in two before the first part that trains."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchboost.core.forward import own_forward, tensors_in
from torchboost.core.hardware import Streams, accelerators, streams_kept
from torchboost.core.torch_private import buffer_slots, is_traced_constant, module_hooks, versions
from torchboost.errors import IncompatibleError
from torchboost.graph.trace import LAYERS, StandIn

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.1


class Halves:
    """One forward, cut in two. Both halves keep the order of the operations, and call the model's own modules.

    The prefix takes the tensors of a call, of which it reads those at ``inputs``, and returns the border values, called
    ``names``. The suffix takes the tensors and the border values. ``tensors`` are those of the first call. ``end`` says
    why the prefix ends, empty if a trained parameter comes next.
    """

    def __init__(
        self,
        prefix: fx.GraphModule,
        suffix: fx.GraphModule,
        names: Sequence[str],
        inputs: Collection[int],
        tensors: tuple[Tensor, ...],
        end: str,
    ) -> None:
        self.end = end
        self.prefix, self.suffix, self.names, self.inputs = prefix, suffix, names, inputs
        self._count, self._kinds = len(tensors), self._kinds_of(tensors)
        self.orders: list[list[int]] = []
        self.likes: list[Tensor] = []

    @property
    def frozen(self) -> list[Tensor]:
        """Every parameter and buffer of the prefix."""
        return [*self.prefix.parameters(), *self.prefix.buffers()]

    def left_over(self, model: nn.Module) -> str:
        """Say which frozen weights are not in the prefix, if it ends before a trained one."""
        inside = {id(parameter) for parameter in self.prefix.parameters()}
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        behind = sum(parameter.numel() for parameter in frozen if id(parameter) not in inside)
        return f"{self.end}, so {behind:,} frozen weights behind it run in every step" if self.end and behind else ""

    def accepts(self, tensors: tuple[Tensor, ...], count: int) -> bool:
        """Whether the call has as many tensors as the first one, and one row per sample of the kinds that are read."""
        if len(tensors) != self._count or any(tensors[at].shape[:1] != (count,) for at in self.inputs):
            return False
        return self._kinds_of(tensors) == self._kinds

    def _kinds_of(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        read = [tensors[at] for at in self.inputs]
        return [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in read]

    @torch.no_grad()
    def border(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the prefix."""
        # Autograd refuses in-place writes to a view made under no_grad.
        return tuple(value.detach() for value in self.prefix.forward(*tensors))

    def select(self, tensors: tuple[Tensor, ...], rows: list[int]) -> tuple[Tensor, ...]:
        """Take some samples out of the tensors that the prefix reads."""
        return tuple(t[rows] if at in self.inputs else t for at, t in enumerate(tensors))

    def obstacle(self, tensors: tuple[Tensor, ...], count: int) -> str:
        """Explain why the border values are not one independent row per sample. Return an empty string if they are.

        The prefix runs on the batch, on every second sample from the last, and on the others, since only one of these
        has the largest entry of the batch. The first sample is among the others: an odd number of rows with the first
        and the last one is the same in a reversed batch. The rows must be equal.
        """
        values = self.border(tensors)
        outputs = {f"'{name}' at its border": value for name, value in zip(self.names, values, strict=True)}
        for name, value in ({f"input {at}": tensors[at] for at in self.inputs} | outputs).items():
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
        self.likes = [value.new_empty(0) for value in values]
        return ""


def _memory_order(value: Tensor) -> list[int]:
    """Return the dimensions of a batch in memory order, the batch first. This preserves channels-last."""
    return [0, *sorted(range(1, value.ndim), key=lambda d: (-value.stride(d), d))]


def _alike(whole: Tensor, part: Tensor) -> bool:
    if whole.shape != part.shape or whole.dtype != part.dtype:
        return False
    if not whole.is_floating_point() or whole.numel() == 0:
        return torch.equal(whole, part)
    difference = float((whole.double() - part.double()).abs().max())
    return difference <= _TOLERANCE.get(whole.dtype, _HALF_TOLERANCE) * float(whole.abs().max())


def halves_of(model: nn.Module, tensors: tuple[Tensor, ...], count: int) -> Halves | str:
    """Cut the forward of a model before its first trained part, or say why its results cannot be kept per sample.

    The border consists of values that are computed from the inputs. Values that depend on weights or on sizes alone are
    computed on both sides if both need them.
    """
    graph, targets = _traced(model, tensors)
    front = _Front(fx.GraphModule(targets, graph), [_trains(node, targets) for node in graph.nodes], tensors)
    behind = _ancestors((node for node in graph.nodes if node not in front.nodes), stop=front.activations)
    border = behind.intersection(front.activations)
    before = _ancestors(front.activations)
    results = [node for node in graph.nodes if node in border]
    # The dictionary preserves the identity of modules. Only used ones are taken.
    prefix = fx.GraphModule(targets, _part(graph, before, results=results))
    if not border or next(prefix.parameters(), None) is None:
        return f"no frozen part comes first{front.end and ': '}{front.end}"
    suffix = fx.GraphModule(targets, _part(graph, behind - border, border=results))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    read = [at for at, node in enumerate(inputs) if node in before]
    halves = Halves(prefix, suffix, [node.name for node in results], read, tensors, front.end)
    obstacle = halves.obstacle(tensors, count)
    return f"nothing is cached: {obstacle}" if obstacle else halves


def _ancestors(nodes: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return these nodes and all that they depend on, but nothing before those in ``stop``."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in stop else node.all_input_nodes
    return found


class _Front(fx.Interpreter):
    """Runs a graph up to the first node that trains, draws random numbers, or writes to anything but activations."""

    def __init__(self, module: fx.GraphModule, trains: Sequence[bool], tensors: tuple[Tensor, ...]) -> None:
        super().__init__(module)
        self.nodes: dict[fx.Node, None] = {}  # before that one
        self.activations: dict[fx.Node, None] = {}  # those of which the value is a tensor computed from the inputs
        self.end = ""  # why the first node that is not among them ends the front, empty if it trains
        self._trains = dict(zip(module.graph.nodes, trains, strict=True))
        self._devices, self._ended = accelerators((*tensors, *module.parameters())), False
        self._derived: set[fx.Node] = set()
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        inputs = [tensor.clone() for tensor in tensors]
        # The interpreter drops values after their last use, and a view of them may be written to later.
        self._kept = [*(buffer for buffer, _ in buffers), *inputs]
        with torch.no_grad(), streams_kept(self._devices):
            self.run(*inputs)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    def run_node(self, n: fx.Node) -> Any:
        if self._ended or n.op == "output" or self._trains[n]:
            self._ended = True
            return None
        streams, before = Streams(self._devices), self._state()
        value = super().run_node(n)
        drawn = streams.used()
        self._ended = drawn or self._state() != before
        if self._ended:
            what = "draws random numbers, as dropout does" if drawn else "writes into a buffer, an input or a constant"
            self.end = f"{str(n.target) if n.op == 'call_module' else n.name!r} {what}"
        else:
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
        return versions([*self._kept, *others]), shapes


def _trains(node: fx.Node, targets: dict[str, Any]) -> bool:
    """Whether a node brings in a trainable parameter, or a module of which more runs than the forward of its class."""
    target = targets[str(node.target)] if node.op in ("call_module", "get_attr") else None
    if isinstance(target, nn.Module):
        return any(p.requires_grad for p in target.parameters()) or any(map(_is_opaque, target.modules()))
    return target is not None and target.requires_grad


def _part(
    graph: fx.Graph, nodes: set[fx.Node], *, border: Iterable[fx.Node] = (), results: Sequence[fx.Node] | None = None
) -> fx.Graph:
    """Copy some nodes in order. ``border`` are added as inputs, and ``results`` replace the output of the graph."""
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

    Covers of this package, such as the ones that let a convolution compute in float32, keep its function.
    """
    return any(module_hooks(module)) or own_forward(module) is not None


def mode_of_torch() -> tuple[Any, ...]:
    """Return the settings of gradients and autocast, on which a traced forward depends."""
    kinds = ("cpu", "cuda")
    precision = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), *precision


def _traced(model: nn.Module, tensors: tuple[Tensor, ...]) -> tuple[fx.Graph, dict[str, Any]]:
    """Trace the forward of the model's class in its current state, including training flags, or refuse it.

    Nothing is computed, and random state and the attributes of the model do not change. Submodules of ``torch.nn``,
    layers and modules with hooks become one node each. Return the graph, whose placeholders are the tensors of the
    call, and the objects that its names refer to.
    """
    devices = accelerators(model.parameters())
    attributes = [(module, dict(vars(module)), dict(buffer_slots(module))) for module in model.modules()]
    names, constants, changed = set(vars(model)), dict[str, Any](), list[str]()
    streams, drawn, why = Streams(devices), False, ""
    try:
        graph = _Tracer(len(tensors)).trace(model)
        drawn = streams.used()
    except Exception as error:  # data-dependent Python: torch.fx has no common error class
        raise _refusal(model, f"torch.fx cannot trace it ({type(error).__name__}: {error})") from error
    finally:
        streams.restore()
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
    """Undo the attribute changes of a forward on a module, and return their names."""
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
    """The first arguments become placeholders. The others have their defaults.

    The recorder of :mod:`torchboost.graph.trace` takes a value that a forward computes from its weights alone for a
    constant, and calls no hooks. Here the graph is run.
    """

    proxy_buffer_attributes = True

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._inputs, self._mode = inputs, mode_of_torch()

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
        if mode_of_torch() != self._mode:
            raise RuntimeError("it switches gradients or autocast on or off, which a trace does not record")
        return super().create_node(kind, *args, **kwargs)
