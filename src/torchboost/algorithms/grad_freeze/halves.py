"""Cut a forward pass into the part before its first trained operation, and the rest."""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchboost.core.forward import own_forward
from torchboost.core.torch_private import (
    buffer_slots,
    is_traced_constant,
    module_hooks,
    tree_flatten,
    tree_unflatten,
    versions,
)
from torchboost.errors import IncompatibleError
from torchboost.graph.copies import accelerators, generator_states, generators_kept
from torchboost.graph.trace import LAYERS, METADATA, StandIn, function_name

__all__ = ["Call", "Halves", "halves_of"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.1
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, slice)
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "layout"})
_SIZED = frozenset(
    {"new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like"}
)
"""Operations that read the size of a tensor, not its values."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one forward: its tensors, and everything else as a key.

    Args:
        tensors: The tensors, in the order of the flattened arguments.
        key: Equal for calls that can share a trace; it includes the state of autocast.
        arguments: Returns positional and keyword arguments with other tensors in place of these.
    """

    tensors: tuple[Tensor, ...]
    key: Hashable
    arguments: Callable[[Iterable[Any]], tuple[Sequence[Any], Mapping[str, Any]]]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """Split arguments; return None if one is neither a tensor nor a plain value."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            return None

        def arguments(tensors: Iterable[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
            rest = iter(tensors)
            return tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

        others = tuple(None if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        return cls(tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)), (spec, others, _mode()), arguments)


@dataclass(frozen=True, slots=True)
class Halves:
    """One forward, split in two.

    Args:
        prefix: Returns the tuple of border values. Calls the model's own modules, as the suffix does.
        suffix: Takes the tensors of the call and the border values.
        names: Names of the border values.
        inputs: Positions of the tensors that the prefix reads.
        kinds: Shape per sample, type and device of each of them.
    """

    prefix: fx.GraphModule
    suffix: fx.GraphModule
    names: tuple[str, ...]
    inputs: tuple[int, ...]
    kinds: list[Any]

    @property
    def frozen(self) -> list[Tensor]:
        """Every parameter and buffer of the prefix."""
        return [*self.prefix.parameters(), *self.prefix.buffers()]

    def accepts(self, tensors: tuple[Tensor, ...], count: int) -> bool:
        """Whether the prefix reads one row per sample, of the kind that it was built for."""
        read = [tensors[place] for place in self.inputs]
        return all(len(tensor) == count for tensor in read) and list(map(_kind, read)) == self.kinds

    @torch.no_grad()
    def border(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Run the prefix."""
        values = self.prefix.forward(*tensors)
        # Autograd refuses in-place writes to a view made under no_grad.
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in values)

    def select(self, tensors: tuple[Tensor, ...], rows: list[int]) -> tuple[Tensor, ...]:
        """Take some samples out of the tensors that the prefix reads."""
        return tuple(t[rows] if at in self.inputs else t for at, t in enumerate(tensors))

    def obstacle(self, tensors: tuple[Tensor, ...], count: int) -> str:
        """Explain why the border values are not one independent row per sample; return an empty string if they are.

        The prefix runs on the batch, on every second sample from the last, and on the others, since only one of these
        has the largest entry of the batch. The first sample is among the others: an odd number of rows with the first
        and the last one is the same in a reversed batch. The rows must be equal.
        """
        values = self.border(tensors)
        outputs = {f"'{name}' at its border": value for name, value in zip(self.names, values, strict=True)}
        for name, value in ({f"input {place}": tensors[place] for place in self.inputs} | outputs).items():
            if not isinstance(value, Tensor):
                return f"{name} is not a tensor but {type(value).__name__}"
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
        return ""


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape[1:], tensor.dtype, tensor.device


def _alike(whole: Tensor, part: Tensor) -> bool:
    if whole.shape != part.shape or whole.dtype != part.dtype:
        return False
    if not whole.is_floating_point() or whole.numel() == 0:
        return torch.equal(whole, part)
    difference = float((whole.double() - part.double()).abs().max())
    return difference <= _TOLERANCE.get(whole.dtype, _HALF_TOLERANCE) * float(whole.abs().max())


def halves_of(model: nn.Module, call: Call, count: int) -> Halves | str:
    """Cut the forward of a model before its first trained part, or say why its results cannot be kept per sample.

    Both halves keep the order of the operations. What depends only on the inputs, only on weights or only on sizes is
    computed on both sides if both need it; the border consists of other values.

    Cost: one trace and three passes through the prefix.

    Raises:
        IncompatibleError: The forward cannot be traced.
    """
    graph, targets = _traced(model, call)
    front = _front(graph, targets, call.tensors)
    mixed = _mixed(front, targets)
    behind, border = set[fx.Node](), set[fx.Node]()
    waiting = [source for node in graph.nodes if node not in front for source in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in mixed:
            border.add(node)
        elif node in front and node not in behind:
            behind.add(node)
            waiting += node.all_input_nodes
    if not border:
        return "no frozen part comes first"
    before, waiting = set[fx.Node](), list(mixed)
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += node.all_input_nodes
    results = [node for node in front if node in border]
    behind |= {node for node in graph.nodes if node not in front}
    read = [at for at, node in enumerate(n for n in front if n.op == "placeholder") if node in before]
    halves = Halves(
        # The dictionary preserves the identity of modules; only those used are taken.
        prefix=fx.GraphModule(targets, _part(graph, before, results=results)),
        suffix=fx.GraphModule(targets, _part(graph, behind, border=results)),
        names=tuple(node.name for node in results),
        inputs=tuple(read),
        kinds=[_kind(call.tensors[at]) for at in read],
    )
    obstacle = halves.obstacle(call.tensors, count)
    return f"nothing is cached: {obstacle}" if obstacle else halves


def _front(graph: fx.Graph, targets: dict[str, Any], tensors: tuple[Tensor, ...]) -> dict[fx.Node, None]:
    """Return the operations before the first one that trains, draws random numbers, or writes to other tensors."""
    front: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "output" or _trains(node, targets):
            break
        front[node] = None
    mixed = _mixed(front, targets)
    # What is needed later or compared is kept to the end; other activations are freed after their last use.
    results = [node for node in front if node not in mixed or any(user not in front for user in node.users)]
    module = fx.GraphModule(targets, _part(graph, set(front), results=results))
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = accelerators((*tensors, *module.parameters()))
    names = {node.name for node in mixed}
    trial = _Trial(module, lambda: _random_state(devices), [buffer for buffer, _ in buffers], names)
    with torch.no_grad(), generators_kept(devices):
        trial.run(*(tensor.clone() for tensor in tensors))
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
    return dict.fromkeys(node for node in front if node.name in trial.quiet)


class _Trial(fx.Interpreter):
    """Runs a graph up to the first node that draws random numbers, or changes any value but the mixed ones.

    Attributes:
        quiet: Names of the nodes before that one.
    """

    def __init__(
        self, module: fx.GraphModule, random: Callable[[], Any], buffers: list[Tensor], mixed: set[str]
    ) -> None:
        super().__init__(module)
        self.quiet: set[str] = set()
        self._random, self._buffers, self._mixed, self._over = random, buffers, mixed, False

    def run_node(self, n: fx.Node) -> Any:
        if self._over or n.op == "output":
            return None
        before = self._state()
        result = super().run_node(n)
        self._over = self._state() != before
        if not self._over:
            self.quiet.add(n.name)
        return result

    def _state(self) -> tuple[Any, ...]:
        values = {node.name: value for node, value in self.env.items() if isinstance(value, Tensor)}
        cheap = [value for name, value in values.items() if name not in self._mixed]
        return self._random(), versions([*self._buffers, *cheap]), [value.shape for value in values.values()]


def _mixed(front: Iterable[fx.Node], targets: dict[str, Any]) -> dict[fx.Node, None]:
    """Return the operations that depend on weights and on the values of inputs, in order."""
    data, weighted = set[fx.Node](), set[fx.Node]()
    for node in front:
        name, target = function_name(node.target), _target(node, targets)
        if target is None and (name in METADATA | _SIZED or (name == "getattr" and node.args[1] in _ATTRIBUTES)):
            continue
        if node.op == "placeholder" or any(source in data for source in node.all_input_nodes):
            data.add(node)
        owned = target.parameters() if isinstance(target, nn.Module) else filter(_is_parameter, [target])
        if any(True for _ in owned) or any(source in weighted for source in node.all_input_nodes):
            weighted.add(node)
    return {node: None for node in front if node in data and node in weighted}


def _trains(node: fx.Node, targets: dict[str, Any]) -> bool:
    """Whether a node brings in a trainable parameter, or a module of which more runs than the forward of its class."""
    target = _target(node, targets)
    if isinstance(target, nn.Module):
        return any(p.requires_grad for p in target.parameters()) or any(map(_is_opaque, target.modules()))
    return target is not None and target.requires_grad


def _is_parameter(value: Any) -> bool:
    return isinstance(value, nn.Parameter)


def _target(node: fx.Node, targets: dict[str, Any]) -> nn.Module | Tensor | None:
    return targets[str(node.target)] if node.op in ("call_module", "get_attr") else None


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
    return random.getstate(), *(state.numpy().tobytes() for state in generator_states(devices))


def _mode() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    precision = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), *precision


def _traced(model: nn.Module, call: Call) -> tuple[fx.Graph, dict[str, Any]]:
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
            graph = _Tracer(call).trace(model)
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
    """Tensors of the call become placeholders; its other arguments stay as they are.

    The recorder of :mod:`torchboost.graph.trace` takes what a forward computes from its weights alone for a constant,
    and calls no hooks; here the graph is run.
    """

    proxy_buffer_attributes = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._mode = _mode()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LAYERS) or _is_opaque(m) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return StandIn(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def forward(module: nn.Module, *tensors: Any) -> Any:
            args, kwargs = self._call.arguments(tensors)
            return root_fn(module, *args, **kwargs)

        places = range(len(self._call.tensors))
        return forward, [self.root, *(self.create_proxy("placeholder", f"input_{i}", (), {}) for i in places)]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _mode() != self._mode:
            raise RuntimeError("it switches gradients or autocast on or off, which a trace does not record")
        return super().create_node(kind, *args, **kwargs)
