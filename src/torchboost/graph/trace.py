"""The data flow of a model, recorded with stand-ins for its tensors or while it runs, on a copy."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torchboost.core.arguments import check_shapes
from torchboost.core.containers import tensors_in
from torchboost.core.covering import own_forward
from torchboost.core.torch_private import AnyBatchNorm, AnyConv, module_hooks
from torchboost.graph.copies import (
    ReachesOriginal,
    copies_of,
    full_precision,
    parameter_bytes,
    undisturbed,
)
from torchboost.graph.flow import Dataflow, FlowBuilder, registered
from torchboost.graph.normalized_linear import NormalizedLinear
from torchboost.graph.ranks import rank_of

__all__ = [
    "LAYERS",
    "METADATA",
    "Arguments",
    "StandIn",
    "call",
    "evaluate",
    "function_name",
    "is_leaf",
    "record_graph",
    "record_run",
    "record_symbols",
    "runnable",
    "shared_traces",
    "trace",
    "trace_all_paths",
    "trace_run",
    "trace_symbolically",
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


def record_symbols(
    copied: nn.Module, model: nn.Module, sample: Any = None, *, decide: Callable[[], bool] | None = None
) -> Dataflow:
    """Return the data flow of :func:`record_graph`; the nodes hold the modules of ``model``."""
    return _flow(record_graph(copied, model, sample, decide=decide), model)


def record_graph(
    copied: nn.Module, model: nn.Module, sample: Any = None, *, decide: Callable[[], bool] | None = None
) -> fx.Graph:
    """Run the Python code of ``forward`` on stand-ins for its tensors; nothing is computed.

    The graph holds for all tensors, unless ``decide`` was called; without ``decide``, a decision by a value or a shape
    raises. Limit: a stand-in is not an instance of ``Tensor``. Only the copy is changed, and torch is not patched, so
    other threads may run other models.

    Args:
        copied: A copy that cannot be used afterwards, because every forward in it is replaced.
        model: The original, whose names the nodes have.
        sample: Determines which arguments are given. Without it, arguments with a default are omitted.
        decide: Returns the outcome of the next decision by a value or a shape.

    Returns:
        The graph. ``node.meta["running"]`` has the modules of ``model`` whose forward was running, outermost first.

    Raises:
        Exception: Of any class, if the forward cannot be recorded.
    """
    recorder = _Symbols(copied, decide)
    _cover_calls(copied, model, recorder)
    args, kwargs = recorder.arguments(sample)
    recorder.close(copied(*args, **kwargs))
    return recorder.graph


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
        for registry in hooks:
            registry.clear()
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


_SIDES = {1: (256, 1024), 2: (64, 32, 224, 28), 3: (16, 32)}
_PATHS, _DECISIONS = 16, 12
_TOO_LARGE = 2**30
"""A model with more bytes of parameters is not copied with their values, but for a pass on a given input."""

_Traces = dict[tuple[Any, ...], tuple[Dataflow, list[nn.Module]]]
_TRACES: ContextVar[_Traces | None] = ContextVar("traces", default=None)
"""In :func:`shared_traces`: module tree -> its data flow, and the modules, whose ids stay taken as long as it holds."""


@contextmanager
def shared_traces() -> Iterator[None]:
    """Trace a model only once in this block, as long as its module tree stays the same.

    For blocks that run no code of the user but forward passes on copies. :func:`trace` without a sample then looks the
    data flow up by the names and identities of the modules. Nothing is kept after the block. Blocks may be nested.
    """
    token = _TRACES.set({}) if _TRACES.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _TRACES.reset(token)


def trace(model: nn.Module, *, sample: Any = None) -> Dataflow:
    """Find how the outputs of layers reach other layers.

    There are three attempts, and the first that works is used: a symbolic trace; one recorded forward pass on
    ``sample`` (or on noise of a guessed shape); the order in which the modules are registered. ``Dataflow.traced`` says
    which one it was: ``"fx"``, ``"run"`` or ``"structure"``.

    The trace uses a deep copy in eval mode without hooks, so the model does not change, including its Python
    attributes; a model that cannot be copied is not traced. Nothing of torch is patched, so other threads may run
    other models meanwhile. The default generators are restored only if the forward draws from them.

    Args:
        model: Any module; if it wraps a network and its loss, the network is traced.
        sample: Input of one forward pass: a tensor, a tuple of positional or a dict of keyword arguments.

    Raises:
        ValueError: ``sample`` was needed and the model does not run on it, or a lazy module has no shape yet.
    """
    known = _TRACES.get()
    if known is None or sample is not None:
        return _traced(model, sample)
    named = list(model.named_modules(remove_duplicate=False))
    tree = tuple((name, id(module)) for name, module in named)
    if tree not in known:
        known[tree] = _traced(model, None), [module for _, module in named]
    return known[tree][0]


def _traced(model: nn.Module, sample: Any) -> Dataflow:
    check_shapes(model)
    with copies_of(model):
        for network in _networks(model):
            flow = trace_symbolically(network, sample if network is model else None)
            if flow is not None:
                return flow
        return trace_run(model, sample=sample) or registered(model, is_leaf)


def trace_run(model: nn.Module, *, sample: Any = None) -> Dataflow | None:
    """Return the data flow of one pass on ``sample`` or a guessed input; None if the model does not run on a guess.

    None too if a copy of it computes with tensors of the model itself.

    Raises:
        ValueError: The model does not run on ``sample``.
    """
    for network, candidate in _candidates(model, sample):
        try:
            with copies_of(model), undisturbed(network) as copied:
                return record_run(copied, network, candidate)
        except ReachesOriginal:
            continue
        except Exception as error:
            if sample is not None:
                raise ValueError(f"the model does not run on the sample: {error}") from error
    return None


def trace_symbolically(model: nn.Module, sample: Any = None) -> Dataflow | None:
    """Return the data flow for all tensors, given the arguments of ``sample``; None if it may depend on the tensors."""
    for numbers in (False, True):  # a forward may decide by the values of a parameter
        if numbers and parameter_bytes(model) > _TOO_LARGE:
            break
        try:
            with undisturbed(model, numbers=numbers) as copied:
                return record_symbols(copied, model, sample)
        except Exception:  # data-dependent Python has no common error class
            continue
    return None


def trace_all_paths(model: nn.Module, sample: Any = None) -> list[Dataflow] | None:
    """Return the data flow of every path that ``forward`` may take by values and shapes, for given arguments.

    At every decision both outcomes are followed. Paths that end in an error of the forward (``ValueError``, a failed
    assertion) do not count. Returns None if a path cannot be traced, or if there are more than 16.

    Cost: one symbolic trace for each path.
    """
    flows: list[Dataflow] = []
    waiting: list[list[bool]] = [[]]
    paths = 0
    while waiting:
        script = waiting.pop()
        paths += 1
        if paths > _PATHS:
            return None
        taken: list[bool] = []

        def decide(script: list[bool] = script, taken: list[bool] = taken) -> bool:
            if len(taken) == len(script):
                if len(script) == _DECISIONS:
                    raise RecursionError("too many decisions, as in a loop")
                waiting.append([*script, False])
                script.append(True)
            taken.append(script[len(taken)])
            return taken[-1]

        try:
            with undisturbed(model, numbers=parameter_bytes(model) <= _TOO_LARGE) as copied:
                flows.append(record_symbols(copied, model, sample, decide=decide))
        except Exception as error:
            if type(error) not in (ValueError, AssertionError):
                return None
    return flows or None


def runnable(model: nn.Module, sample: Any = None) -> tuple[nn.Module, Any] | None:
    """Return a network and an input that it accepts: the model and ``sample``, or its core and a guessed input.

    Raises:
        ValueError: ``sample`` was given and the model does not run on it.
        ReachesOriginal: A copy computes with tensors of the model itself, so it cannot be run for what it would show.
    """
    for network, candidate in _candidates(model, sample):
        try:
            with copies_of(model):
                evaluate(network, candidate)
        except ReachesOriginal:
            raise
        except Exception as error:
            if sample is not None:
                raise ValueError(f"the model does not run on the sample: {error}") from error
        else:
            return network, candidate
    return None


def evaluate(network: nn.Module, sample: Any) -> list[Tensor]:
    """Return all output tensors of one forward pass of a copy in eval mode, in the full precision of its types.

    The inputs are copied. Inputs that autocast would cast are cast to the precision of the parameters.
    """
    kinds = [p.dtype for p in network.parameters() if p.is_floating_point()]
    device = next((p.device.type for p in network.parameters()), "cpu")
    cast = kinds[0] if kinds and device != "meta" and torch.is_autocast_enabled(device) else None
    inputs = _copied(sample, cast)
    with undisturbed(network) as copied, full_precision(network):
        return [tensor.detach().clone() for tensor in tensors_in(call(copied, inputs))]


def _copied(value: Any, cast: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(cast if value.is_floating_point() else None, copy=True)
    if isinstance(value, Arguments):
        return Arguments(_copied(value.args, cast), _copied(value.kwargs, cast))
    if type(value) is dict:
        return {key: _copied(entry, cast) for key, entry in value.items()}
    return type(value)(_copied(entry, cast) for entry in value) if type(value) in (list, tuple) else value


def _networks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then the child that holds all of its layers, and so on: skips losses and wrappers."""
    layers = {module for module in model.modules() if isinstance(module, LAYERS)}
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        inner = next((child for child in inner.children() if layers and layers <= set(child.modules())), None)


def _candidates(model: nn.Module, sample: Any) -> Iterator[tuple[nn.Module, Any]]:
    if sample is not None:
        yield model, sample
        return
    if parameter_bytes(model) > _TOO_LARGE:
        return
    for network in _networks(model):
        for guess in _guesses(network):
            yield network, guess


def _guesses(model: nn.Module) -> Iterator[Tensor]:
    """Yield noise that fits the first layer: images of a few sizes, or rows for a linear layer."""
    first = next((m for m in model.modules() if isinstance(m, (AnyConv, nn.Linear))), None)
    weight = None if first is None else next(first.parameters(), None)
    if first is None or weight is None:
        return
    if isinstance(first, nn.Linear):
        shapes = [(2, first.in_features)]
    else:
        sides = len(first.kernel_size)
        shapes = [(2, first.in_channels, *[side] * sides) for side in _SIDES[sides]]
    for shape in shapes:
        noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        yield noise.to(weight.device, weight.dtype)
