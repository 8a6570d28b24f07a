"""Record one forward pass, with stand-ins for its tensors or while it runs, on a copy of the model."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torchboost.core.covering import own_forward
from torchboost.core.torch_private import AnyBatchNorm, AnyConv, module_hooks
from torchboost.graph.flow import Dataflow, FlowBuilder
from torchboost.graph.normalized_linear import NormalizedLinear
from torchboost.graph.ranks import rank_of
from torchboost.graph.untouched import ReachesOriginal

__all__ = [
    "LAYERS",
    "METADATA",
    "Arguments",
    "StandIn",
    "call",
    "function_name",
    "is_leaf",
    "record_run",
    "record_symbols",
    "tensors_in",
]

LAYERS = (AnyConv, nn.Linear, NormalizedLinear, AnyBatchNorm)
METADATA = frozenset({"size", "dim", "ndimension", "numel", "stride", "_assert", "is_floating_point", "is_contiguous"})
"""Methods that yield sizes and the like instead of a tensor."""
_ADDITIONS = frozenset({"add", "add_", "iadd", "__add__", "__iadd__", "__radd__"})
_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
_WRITING = frozenset({*_OPERATORS, *(f"__{name}__" for name in _OPERATORS), "setitem", "__setitem__"})
_VIEWS = frozenset({"T", "mT", "data", "real"})
Forward = Callable[..., Any]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one node; all others are traced inside."""
    if isinstance(module, LAYERS):
        return True
    plain = type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, nn.Sequential)
    return plain and next(module.children(), None) is None


def function_name(target: Any) -> str:
    """Return the name of the function or method that a traced node calls."""
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A sample of positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(model: nn.Module, sample: Any) -> Any:
    """Call a model on a sample: a tensor, a tuple of positional or a dict of keyword arguments, or both."""
    args, kwargs = _arguments(sample)
    return model(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order. A container inside itself counts once."""
    found: list[Tensor] = []
    around: set[int] = set()
    waiting: list[tuple[bool, Any]] = [(True, value)]
    while waiting:
        enters, entry = waiting.pop()
        if issubclass(type(entry), Tensor):  # isinstance() asks a proxy for its class, which may raise
            found.append(entry)
        elif not enters:
            around.discard(id(entry))
        elif id(entry) not in around and (parts := _parts(entry)):
            around.add(id(entry))
            waiting.append((False, entry))
            waiting += [(True, part) for part in reversed(parts) if type(part) not in _PLAIN]
    return found


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""Entries of a long list that are passed over quickly, because each call of a model is looked at."""


def _parts(value: Any) -> list[Any]:
    try:
        if isinstance(value, Mapping):
            return list(value.values())
        if isinstance(value, (tuple, list)):
            return list(value)
        if is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, field.name) for field in fields(value)]
    except Exception:  # a container of the user may raise anything when it is read
        pass
    return []


def record_symbols(
    copied: nn.Module, model: nn.Module, sample: Any = None, *, decide: Callable[[], bool] | None = None
) -> Dataflow:
    """Run the Python code of ``forward`` on stand-ins for its tensors; nothing is computed.

    The graph holds for all tensors, unless ``decide`` was called; without ``decide``, a decision by a value or a shape
    raises. Limit: a stand-in is not an instance of ``Tensor``. Only the copy is changed, and torch is not patched, so
    other threads may run other models.

    Args:
        copied: A copy that cannot be used afterwards, because every forward in it is replaced.
        model: The original; the nodes hold its modules.
        sample: Determines which arguments are given. Without it, arguments with a default are omitted.
        decide: Returns the outcome of the next decision by a value or a shape.

    Raises:
        Exception: Of any class, if the forward cannot be recorded.
    """
    recorder = _Symbols(copied, decide)
    _cover_calls(copied, model, recorder)
    args, kwargs = recorder.arguments(sample)
    recorder.close(copied(*args, **kwargs))
    return _flow(recorder.graph, model)


def record_run(copied: nn.Module, model: nn.Module, sample: Any) -> Dataflow:
    """Run ``forward`` on a sample and record its tensors; ``copied`` and ``model`` as in :func:`record_symbols`."""
    recorder = _Run()
    _cover_calls(copied, model, recorder)
    return recorder.run(copied, sample)


@dataclass(frozen=True, slots=True)
class _Place:
    """A module in the copy, and what a call does in addition to its forward."""

    name: str
    module: nn.Module
    copied: nn.Module
    forward: Forward
    kind: str
    hooked_before: bool
    hooked_behind: bool


class _Recorder:
    """Common part of both recorders: the modules that are running, and the marks of hooks."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []

    def enter(self, place: _Place, *args: Any, **kwargs: Any) -> Any:
        if place.hooked_before:
            args, kwargs = _marked(args), _marked(kwargs)
        if place.kind == "look inside":
            self.running.append(place.module)
            try:
                outputs = place.forward(*args, **kwargs)
            finally:
                self.running.pop()
        else:
            outputs = self.take(place, args, kwargs)
        return _marked(outputs) if place.hooked_behind else outputs

    def take(self, place: _Place, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


def _cover_calls(copied: nn.Module, model: nn.Module, recorder: _Recorder) -> None:
    """Make every module of the copy report its calls. Hooks do not run; they become an operation of unknown effect."""
    originals = dict(model.named_modules())
    for name, module in copied.named_modules():
        own = own_forward(module)
        if own is not None and not (isinstance(own, types.MethodType) and own.__self__ is module):
            if module is copied:
                raise ReachesOriginal("the forward was replaced on the instance and may call anything.")
            kind = "opaque"  # it may call the model that was copied
        elif is_leaf(module):
            kind = "leaf" if own is None else "opaque"
        else:
            kind = "look inside"
        hooks = module_hooks(module)
        before, behind = bool(hooks[0]), bool(hooks[1])
        for registered in hooks:
            registered.clear()
        place = _Place(name, originals[name], module, module.forward, kind, before, behind)
        vars(module)["forward"] = functools.partial(recorder.enter, place)


def _marked(value: Any) -> Any:
    """Add an operation after every tensor of nested containers."""
    if isinstance(value, (Tensor, fx.Proxy)):
        return value.clone()
    if type(value) is dict:
        return {key: _marked(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_marked, value))
    return value


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Arguments):
        return sample.args, sample.kwargs
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample), {}) if isinstance(sample, (tuple, list)) else ((sample,), {})


class StandIn(fx.Proxy):
    """Record ``x += y`` as an in-place operation; torch's own stand-in records ``x = x + y``."""


def _in_place(operator: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator, (self, other), {})

    return record


for _name in _OPERATORS:
    setattr(StandIn, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Symbols(_Recorder, fx.Tracer):
    """Record operations on stand-ins. ``fx.Tracer.trace`` is not used: it patches ``nn.Module`` for all threads."""

    def __init__(self, copied: nn.Module, decide: Callable[[], bool] | None) -> None:
        _Recorder.__init__(self)
        fx.Tracer.__init__(self)
        self._decide = decide
        self.root = copied
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}

    def arguments(self, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if sample is not None:
            args, kwargs = _arguments(sample)
            return self._symbols(args), self._symbols(kwargs)
        arguments = list(inspect.signature(type(self.root).forward).parameters.values())[1:]
        needed = [a for a in arguments if a.default is a.empty and a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)]
        symbols = [(argument, self._symbol(argument.name)) for argument in needed]
        args = tuple(symbol for argument, symbol in symbols if argument.kind is not argument.KEYWORD_ONLY)
        return args, {argument.name: symbol for argument, symbol in symbols if argument.kind is argument.KEYWORD_ONLY}

    def _symbol(self, name: str) -> Any:
        return self.create_proxy("placeholder", name, (), {})

    def _symbols(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._symbol("input")
        if isinstance(value, Mapping):
            return {key: self._symbols(entry) for key, entry in value.items()}
        return type(value)(map(self._symbols, value)) if type(value) in (list, tuple) else value

    def close(self, outputs: Any) -> None:
        self.create_node("output", "output", (self.create_arg(outputs),), {})

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        node.meta["running"] = tuple(self.running)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return StandIn(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return super().to_bool(obj) if self._decide is None else self._decide()

    def take(self, place: _Place, args: Any, kwargs: Any) -> Any:
        if place.kind == "leaf":
            return self.create_proxy("call_module", place.name, args, kwargs)
        return self.create_proxy("call_function", _opaque, args, kwargs)


def _opaque(*args: Any, **kwargs: Any) -> Any:
    """Represent a call in a graph that was not traced inside."""


def _flow(graph: fx.Graph, model: nn.Module) -> Dataflow:
    builder = FlowBuilder()
    known: dict[fx.Node, int] = {}
    ranks: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        inputs = [known[i] for i in node.all_input_nodes if i in known]
        running = node.meta["running"]
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        ranks[node] = rank = rank_of(node, module, ranks)
        if node.op == "placeholder":
            known[node] = builder.add("input", str(node.target))
        elif module is not None and inputs:
            known[node] = builder.add("module", str(node.target), inputs, module, running=running, rank=rank)
        elif node.op == "output":
            builder.add("output", "output", inputs)
        elif inputs and not _is_metadata(node):
            writes = _writes(node.target, node.args, node.kwargs)
            known[node] = builder.operation(function_name(node.target), inputs, _ADDITIONS, writes=writes)
            if writes and isinstance(node.args[0], fx.Node):
                known[node.args[0]] = known[node]  # in place: later reads of the tensor get the new value
    return builder.build("fx")


def _is_metadata(node: fx.Node) -> bool:
    """Whether a traced call yields sizes and the like instead of a tensor."""
    name = function_name(node.target)
    return name in METADATA or (name == "getattr" and node.args[1] not in _VIEWS)


def _writes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a traced call writes to its first argument: by its name, as an operator, or by an argument."""
    name = function_name(target)
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITING or kwargs.get("out") is not None:
        return True
    if kwargs.get("inplace") or isinstance(target, str):
        return bool(kwargs.get("inplace"))
    try:
        return bool(inspect.signature(target).bind_partial(*args).arguments.get("inplace"))
    except (TypeError, ValueError):  # a function in C has no signature, and no such argument
        return False


class _Run(_Recorder, TorchFunctionMode):
    """Map every tensor to the node that made it, by identity. Calls inside a leaf module belong to that module."""

    def __init__(self) -> None:
        _Recorder.__init__(self)
        TorchFunctionMode.__init__(self)
        self._builder = FlowBuilder()
        self._maker: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is only unique while its object lives
        self._inside = 0

    def run(self, copied: nn.Module, sample: Any) -> Dataflow:
        for tensor in tensors_in(sample):
            self._book(self._builder.add("input", "input"), [tensor])
        with self:
            outputs = call(copied, sample)
        self._builder.add("output", "output", self._makers(outputs))
        return self._builder.build("run")

    def take(self, place: _Place, args: Any, kwargs: Any) -> Any:
        inputs = self._makers((args, kwargs))
        with self._within():
            outputs = place.forward(*args, **kwargs)
        if inputs and not self._inside:
            found = tensors_in(outputs)
            leaf = place.kind == "leaf"
            rank = found[0].ndim if found else None
            running = tuple(self.running)
            self._book(
                self._builder.add("module", place.name, inputs, place.module, running=running, rank=rank)
                if leaf
                else self._builder.add("other", "forward", inputs),
                found,
            )
        return outputs

    @contextmanager
    def _within(self) -> Any:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            name = function_name(func)
            changed = args[:1] if name == "__setitem__" else result
            inputs, outputs = self._makers((args, kwargs)), tensors_in(changed)
            if inputs and outputs:
                writes = _writes(func, args, kwargs or {})
                self._book(self._builder.operation(name, inputs, _ADDITIONS, writes=writes), outputs)
        return result

    def _makers(self, value: Any) -> list[int]:
        found = [self._maker[id(tensor)] for tensor in tensors_in(value) if id(tensor) in self._maker]
        return list(dict.fromkeys(found))

    def _book(self, node: int, tensors: list[Tensor]) -> None:
        self._alive += tensors
        self._maker |= {id(tensor): node for tensor in tensors}
