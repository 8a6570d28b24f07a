"""The data flow of a model, recorded with stand-ins for its tensors or while it runs, on a copy."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torchboost.core.arguments import check_shapes
from torchboost.core.forward import own_forward, tensors_in, with_tensors
from torchboost.core.hardware import device_of
from torchboost.core.torch_private import AnyBatchNorm, AnyConv, module_hooks
from torchboost.graph.copies import ReachesOriginal, copies_of, full_precision, is_large, undisturbed
from torchboost.graph.flow import Dataflow, Kind, Traced
from torchboost.graph.norms import NormalizedLinear

LAYERS = (AnyConv, nn.Linear, NormalizedLinear, AnyBatchNorm)
METADATA = frozenset({"size", "dim", "ndimension", "numel", "stride", "_assert", "is_floating_point", "is_contiguous"})
"""Methods that yield sizes and the like instead of a tensor."""
_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
_WRITING = frozenset({*_OPERATORS, *(f"__{name}__" for name in _OPERATORS), "setitem", "__setitem__"})
_VIEWS = frozenset({"T", "mT", "data", "real"})
_SIDES = {1: (256, 1024), 2: (64, 32, 224, 28), 3: (16, 32)}
_PATHS, _DECISIONS = 16, 12
_T = TypeVar("_T")


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one node. All others are traced inside."""
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

    @classmethod
    def of(cls, sample: Any) -> Arguments:
        """Read a tensor, a tuple of positional or a dict of keyword arguments, or both."""
        if isinstance(sample, Arguments):
            return sample
        if isinstance(sample, Mapping):
            return cls((), dict(sample))
        return cls(tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {})


def call(model: nn.Module, sample: Any) -> Any:
    """Call a model on a sample, see :meth:`Arguments.of`."""
    arguments = Arguments.of(sample)
    return model(*arguments.args, **arguments.kwargs)


@dataclass(frozen=True, slots=True)
class _Place:
    """A module in the copy, and the work of a call in addition to its forward."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    kind: Literal["leaf", "opaque", "look inside"]
    hooked_before: bool
    hooked_behind: bool


class _Recorder:
    """Common part of both recorders: makes every module of a copy report its calls.

    Hooks do not run. They become an operation of unknown effect. Only the copy is changed, and torch is not patched, so
    other threads may run other models. The copy cannot be used afterwards.
    """

    def __init__(self, copied: nn.Module, model: nn.Module, traced: Traced) -> None:
        self.flow = Dataflow(traced)
        self.running: list[nn.Module] = []
        originals = dict(model.named_modules())
        for name, module in copied.named_modules():
            replaced = own_forward(module)
            kind = "look inside"
            if replaced is not None and getattr(replaced, "__self__", None) is not module:
                if module is copied:
                    raise ReachesOriginal("the forward was replaced on the instance and may call anything.")
                kind = "opaque"  # it may call the model that was copied
            elif _is_leaf(module):
                kind = "leaf" if replaced is None else "opaque"
            hooks = module_hooks(module)
            place = _Place(name, originals[name], module.forward, kind, bool(hooks[0]), bool(hooks[1]))
            for registry in hooks:
                registry.clear()
            vars(module)["forward"] = functools.partial(self._enter, place)

    def _enter(self, place: _Place, *args: Any, **kwargs: Any) -> Any:
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


def _marked(value: Any) -> Any:
    """Add an operation after every tensor of nested containers."""
    if isinstance(value, (Tensor, fx.Proxy)):
        return value.clone()
    if type(value) is dict:
        return {key: _marked(entry) for key, entry in value.items()}
    return type(value)(map(_marked, value)) if type(value) in (list, tuple) else value


class StandIn(fx.Proxy):
    """Record ``x += y`` as an in-place operation. torch's own stand-in records ``x = x + y``."""


def _in_place(operator: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator, (self, other), {})

    return record


for _name in _OPERATORS:
    setattr(StandIn, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Symbols(_Recorder, fx.Tracer):
    """Run the Python code of ``forward`` on stand-ins for its tensors. Nothing is computed.

    The flow holds for all tensors, unless ``decide`` was called, which returns the outcome of the next decision by a
    value or a shape. Nodes have the names and modules of the original. Limit: a stand-in is not an instance of
    ``Tensor``. ``fx.Tracer.trace`` is not used: it patches ``nn.Module`` for all threads.
    """

    def __init__(self, copied: nn.Module, model: nn.Module, decide: Callable[[], bool]) -> None:
        fx.Tracer.__init__(self)
        _Recorder.__init__(self, copied, model, "fx")
        self._decide, self._model = decide, model
        self.root = copied
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}
        self._numbers: dict[fx.Node, int] = {}

    def run(self, sample: Any) -> Dataflow:
        """Record ``forward``. The sample says which arguments are given: without it, those without a default."""
        args, kwargs = (), {}
        if sample is not None:
            given = Arguments.of(sample)
            args, kwargs = (with_tensors(part, lambda _: self._input("input")) for part in (given.args, given.kwargs))
        else:
            for one in list(inspect.signature(type(self.root).forward).parameters.values())[1:]:
                if one.default is one.empty and one.kind is one.KEYWORD_ONLY:
                    kwargs[one.name] = self._input(one.name)
                elif one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                    args = (*args, self._input(one.name))
        outputs = self.root(*args, **kwargs)
        self.create_node("output", "output", (self.create_arg(outputs),), {})
        return self.flow

    def _input(self, name: str) -> Any:
        return self.create_proxy("placeholder", name, (), {})

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        name = function_name(node.target)
        inputs = [self._numbers[source] for source in node.all_input_nodes if source in self._numbers]
        module = self._model.get_submodule(name) if kind == "call_module" else None
        if kind == "placeholder":
            self._numbers[node] = self.flow.add("input", name)
        elif kind == "output":
            self.flow.add("output", name, inputs)
        elif module is not None and inputs:
            self._numbers[node] = self.flow.add("module", name, inputs, module=module, running=tuple(self.running))
        elif inputs and name not in METADATA and not (name == "getattr" and node.args[1] not in _VIEWS):
            writes = _writes(node.target, node.args, node.kwargs)
            self._numbers[node] = self.flow.add("other", name, inputs, writes=writes)
            if writes and isinstance(node.args[0], fx.Node):
                self._numbers[node.args[0]] = self._numbers[node]  # later reads of the tensor get the new value
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return StandIn(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self._decide()

    def take(self, place: _Place, args: Any, kwargs: Any) -> Any:
        if place.kind == "leaf":
            return self.create_proxy("call_module", place.name, args, kwargs)
        return self.create_proxy("call_function", _opaque, args, kwargs)


def _opaque(*args: Any, **kwargs: Any) -> Any:
    """Represent a call in a graph that was not traced inside."""


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

    def __init__(self, copied: nn.Module, model: nn.Module) -> None:
        TorchFunctionMode.__init__(self)
        _Recorder.__init__(self, copied, model, "run")
        self._copied = copied
        self._maker: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is only unique while its object lives
        self._inside = 0

    def run(self, sample: Any) -> Dataflow:
        for tensor in tensors_in(Arguments.of(sample)):
            self._book([tensor], "input", "input")
        with self:
            outputs = call(self._copied, sample)
        self.flow.add("output", "output", self._makers(outputs))
        return self.flow

    def take(self, place: _Place, args: Any, kwargs: Any) -> Any:
        inputs = self._makers((args, kwargs))
        self._inside += 1
        try:
            outputs = place.forward(*args, **kwargs)
        finally:
            self._inside -= 1
        if inputs and not self._inside:
            tensors = tensors_in(outputs)
            if place.kind == "leaf":
                flat = bool(tensors) and tensors[0].ndim == 2
                facts = {"module": place.module, "running": tuple(self.running), "flat": flat}
                self._book(tensors, "module", place.name, inputs, **facts)
            else:
                self._book(tensors, "other", "forward", inputs)
        return outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            name = function_name(func)
            inputs, outputs = self._makers((args, kwargs)), tensors_in(args[:1] if name == "__setitem__" else result)
            if inputs and outputs:
                self._book(outputs, "other", name, inputs, writes=_writes(func, args, kwargs or {}))
        return result

    def _makers(self, value: Any) -> list[int]:
        return [self._maker[id(tensor)] for tensor in tensors_in(value) if id(tensor) in self._maker]

    def _book(self, tensors: list[Tensor], kind: Kind, label: str, inputs: Iterable[int] = (), **facts: Any) -> None:
        node = self.flow.add(kind, label, inputs, **facts)
        self._alive += tensors
        self._maker |= {id(tensor): node for tensor in tensors}


def record_run(model: nn.Module, sample: Any) -> Dataflow:
    """Run a copy of a model on a sample, and record the operations that its tensors reach."""
    with undisturbed(model) as copied:
        return _Run(copied, model).run(sample)


_Traces = dict[tuple[Any, ...], tuple[Dataflow, list[nn.Module]]]
_TRACES: ContextVar[_Traces | None] = ContextVar("traces", default=None)
"""In :func:`shared_traces`: module tree -> its data flow, and the modules, whose ids are taken as long as it holds."""


@contextmanager
def shared_traces() -> Iterator[None]:
    """Trace a model only once in this block, as long as its module tree does not change.

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

    There are two attempts, and the first that works is used: a symbolic trace, and one recorded forward pass on
    ``sample`` (or on noise of a guessed shape). ``Dataflow.traced`` says which one it was, ``"fx"`` or ``"run"``. If
    none worked, it is ``"structure"``, and there are no nodes.

    The trace uses a deep copy in eval mode without hooks, so the model does not change, including its Python
    attributes. A model that cannot be copied is not traced. Nothing of torch is patched, so other threads may run other
    models meanwhile.

    Args:
        model: Any module. If it wraps a network and its loss, the network is traced.
        sample: Input of one forward pass: a tensor, a tuple of positional or a dict of keyword arguments.

    Raises:
        ValueError: ``sample`` was needed and the model does not run on it, or a lazy module has no shape yet.
    """
    traces = _TRACES.get()
    if traces is None or sample is not None:
        return _traced(model, sample)
    named = list(model.named_modules(remove_duplicate=False))
    tree = tuple((name, id(module)) for name, module in named)
    if tree not in traces:
        traces[tree] = _traced(model, None), [module for _, module in named]
    return traces[tree][0]


def _traced(model: nn.Module, sample: Any) -> Dataflow:
    check_shapes(model)
    with copies_of(model):
        for network in _networks(model):
            flows = trace_paths(network, sample if network is model else None, most=1)
            if flows is not None:
                return flows[0]
        return first_run(model, sample, record_run) or Dataflow("structure")


def trace_paths(model: nn.Module, sample: Any = None, *, most: int = _PATHS) -> list[Dataflow] | None:
    """Return the data flow of every path that ``forward`` may take by values and shapes, for given arguments.

    At every decision both outcomes are followed. Paths that end in an error of the forward (``ValueError``, a failed
    assertion) do not count. Returns None if a path cannot be traced, or if there are more than ``most``.

    Cost: one symbolic trace for each path, on copies without the values of the parameters.
    """
    waiting: list[list[bool]] = [[]]
    flows: list[Dataflow] = []
    for _ in range(most):
        script = waiting.pop()
        taken: list[bool] = []

        def decide(script: list[bool] = script, taken: list[bool] = taken) -> bool:
            if len(taken) == len(script):
                if most == 1 or len(script) == _DECISIONS:
                    raise RecursionError("too many decisions, as in a loop")
                waiting.append([*script, False])
                script.append(True)
            taken.append(script[len(taken)])
            return taken[-1]

        try:
            with undisturbed(model, numbers=False) as copied:
                flows.append(_Symbols(copied, model, decide).run(sample))
        except Exception as error:  # data-dependent Python has no common error class
            if type(error) not in (ValueError, AssertionError):
                return None
        if not waiting:
            return flows or None
    return None


def first_run(
    model: nn.Module, sample: Any, run: Callable[[nn.Module, Any], _T], *, failures: list[Exception] | None = None
) -> _T | None:
    """Return the result of ``run`` for the model and ``sample``, or for the first guessed input on which it runs.

    Returns None if it runs on no guess, or if a copy computes with tensors of the model itself. ``run`` gets the
    network that a guess is for, which may be a part of the model. The errors of ``run`` are added to ``failures``.

    Raises:
        ValueError: The model does not run on ``sample``.
    """
    for network, candidate in _candidates(model, sample):
        try:
            with copies_of(model):
                return run(network, candidate)
        except ReachesOriginal:
            return None
        except Exception as error:
            if failures is not None:
                failures.append(error)
            if sample is not None:
                raise ValueError(f"the model does not run on the sample: {error}") from error
    return None


def evaluate(network: nn.Module, sample: Any) -> list[Tensor]:
    """Return all output tensors of one forward pass of a copy in eval mode, in the full precision of its types.

    The inputs are copied. Inputs that autocast would cast are cast to the precision of the parameters.
    """
    kinds = [p.dtype for p in network.parameters() if p.is_floating_point()]
    device = device_of(network).type
    cast = kinds[0] if kinds and device != "meta" and torch.is_autocast_enabled(device) else None
    inputs = with_tensors(
        Arguments.of(sample), lambda x: x.detach().to(cast if x.is_floating_point() else None, copy=True)
    )
    with undisturbed(network) as copied, full_precision(network):
        return [tensor.detach().clone() for tensor in tensors_in(call(copied, inputs))]


def _networks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then the child that holds all of its layers, and so on: skips losses and wrappers."""
    layers = {module for module in model.modules() if isinstance(module, LAYERS)}
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        inner = next((child for child in inner.children() if layers and layers <= set(child.modules())), None)


def _candidates(model: nn.Module, sample: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the model and its sample, or its networks with noise that fits the first layer: images, or rows."""
    if sample is not None:
        yield model, sample
        return
    if is_large(model):
        return
    for network in _networks(model):
        first = next((m for m in network.modules() if isinstance(m, (AnyConv, nn.Linear))), None)
        weight = None if first is None else next(first.parameters(), None)
        if first is None or weight is None:
            return
        shapes = [(2, first.in_features)] if isinstance(first, nn.Linear) else []
        if isinstance(first, AnyConv):
            sides = len(first.kernel_size)
            shapes = [(2, first.in_channels, *[side] * sides) for side in _SIDES[sides]]
        for shape in shapes:
            noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
            yield network, noise.to(weight.device, weight.dtype)
