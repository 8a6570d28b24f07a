"""Which module's output reaches which: a small graph of one forward pass, found without looking at names."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchboost.core.flow import Dataflow, FlowBuilder
from torchboost.core.normalized_linear import NormalizedLinear
from torchboost.core.structure import assume

__all__ = ["METADATA", "evaluate", "function_name", "is_leaf", "runnable", "trace", "undisturbed"]

LAYERS = (_ConvNd, nn.Linear, NormalizedLinear, _BatchNorm)
_ADDITIONS = frozenset({"add", "add_", "iadd", "__add__", "__iadd__", "__radd__"})
_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
_WRITING = frozenset({*_OPERATORS, *(f"__{name}__" for name in _OPERATORS), "setitem", "__setitem__"})
METADATA = frozenset({"size", "dim", "ndimension", "numel", "stride", "_assert", "is_floating_point", "is_contiguous"})
"""Methods that yield sizes and the like instead of a tensor."""
_VIEWS = frozenset({"T", "mT", "data", "real"})
_SIDES = {1: (256, 1024), 2: (64, 32, 224, 28), 3: (16, 32)}


def trace(model: nn.Module, *, sample: Any = None) -> Dataflow:
    """Find how the outputs of layers reach other layers.

    Three attempts, the first that works counts: a symbolic trace by ``torch.fx``; one forward pass on ``sample``
    (or on noise of a guessed shape) that is watched, with everything it might disturb restored; an assumption
    from the module tree. ``Dataflow.traced`` says which it was: ``"fx"``, ``"run"`` or ``"structure"``.

    Args:
        model: Any module; a network wrapped in its loss is looked into.
        sample: Input of one forward pass: a tensor, a tuple of positional or a dict of keyword arguments.

    Raises:
        ValueError: ``sample`` was needed and the model does not run on it, or a lazy module was never run.
    """
    lazy = next((n for n, t in [*model.named_parameters(), *model.named_buffers()] if is_lazy(t)), None)
    if lazy is not None:
        raise ValueError(
            f"found '{lazy}' of a lazy module without a shape; run model.eval() on one batch first, then model.train()."
        )
    networks = list(_networks(model))
    for network in networks:
        try:
            return _trace_symbolically(network)
        except Exception:  # data-dependent Python: torch.fx has no common error class
            continue
    for network, candidate in _candidates(model, sample):
        try:
            return _trace_run(network, candidate)
        except Exception as error:
            if sample is not None:
                raise ValueError(f"the model does not run on the sample: {error}") from error
    return assume(model, is_leaf)


def runnable(model: nn.Module, sample: Any = None) -> tuple[nn.Module, Any] | None:
    """Return a network and an input it runs on: the model on ``sample``, or its core on a guessed input.

    Raises:
        ValueError: ``sample`` was given and the model does not run on it.
    """
    for network, candidate in _candidates(model, sample):
        try:
            evaluate(network, candidate)
        except Exception as error:
            if sample is not None:
                raise ValueError(f"the model does not run on the sample: {error}") from error
        else:
            return network, candidate
    return None


def evaluate(network: nn.Module, sample: Any) -> list[Tensor]:
    """Return all output tensors of one undisturbed forward pass in eval mode, in the full precision of its types."""
    with undisturbed(network), _full_precision(network):
        return [tensor.detach().clone() for tensor in _tensors(_call(network, sample))]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode without gradients; training flags, buffers and random state come back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad(), _uncompiled(model):
        try:
            for module, _ in flags:
                module.training = False
            yield
        finally:
            for module, training in flags:
                module.training = training
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """No autocast, and no TF32 or bfloat16 inside float32 products: two passes differ by what the networks differ."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    backends: list[Any] = [cudnn.conv, torch.backends.cuda.matmul, mkldnn.conv, mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    kind = next((p.device.type for p in model.parameters()), "cpu")
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext():
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Modules compiled in place run eagerly; others need no ``torch._dynamo``, which is slow to import."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _networks(model: nn.Module) -> Iterator[nn.Module]:
    """The model, then the one child that holds all of its layers, and so on inwards: past losses and wrappers."""
    layers = {module for module in model.modules() if isinstance(module, LAYERS)}
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        inner = next((child for child in inner.children() if layers and layers <= set(child.modules())), None)


def _candidates(model: nn.Module, sample: Any) -> Iterator[tuple[nn.Module, Any]]:
    if sample is not None:
        yield model, sample
        return
    for network in _networks(model):
        for guess in _guesses(network):
            yield network, guess


def _guesses(model: nn.Module) -> Iterator[Tensor]:
    """Noise that fits the first layer: images of a few sizes, or rows for a linear layer."""
    first = next((m for m in model.modules() if isinstance(m, (_ConvNd, nn.Linear))), None)
    weight = None if first is None else next(first.parameters(), None)
    if first is None or weight is None:
        return
    if isinstance(first, nn.Linear):
        shapes = [(2, first.in_features)]
    else:
        sides = len(first.kernel_size)
        shapes = [(2, first.in_channels, *[side] * sides) for side in _SIDES[sides]]
    for shape in shapes:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        yield noise.to(weight.device, weight.dtype)


def is_leaf(module: nn.Module) -> bool:
    """Modules that become one node. Everything else is looked into."""
    if isinstance(module, LAYERS):
        return True
    plain = type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, nn.Sequential)
    return plain and next(module.children(), None) is None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


class _Proxy(fx.Proxy):
    """Records ``x += y`` as what it is; torch's own stand-in takes it for ``x = x + y``."""


def _in_place(operator: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator, (self, other), {})

    return record


for _name in _OPERATORS:
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


def _trace_symbolically(model: nn.Module) -> Dataflow:
    arguments = inspect.signature(model.forward).parameters.values()
    # An optional argument left out is its default, not a tensor: "is None" would be false for a stand-in.
    defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
    with undisturbed(model):  # a symbolic trace runs the Python of forward, which may touch buffers
        graph = _Tracer().trace(model, concrete_args=defaults)
    builder = FlowBuilder()
    known: dict[fx.Node, int] = {}
    for node in graph.nodes:
        inputs = [known[i] for i in node.all_input_nodes if i in known]
        if node.op == "placeholder":
            known[node] = builder.add("input", str(node.target))
        elif node.op == "call_module" and inputs:
            known[node] = builder.add("module", str(node.target), inputs, model.get_submodule(str(node.target)))
        elif node.op == "output":
            builder.add("output", "output", inputs)
        elif inputs and not _is_metadata(node):
            writes = _writes(node.target, node.args, node.kwargs)
            known[node] = builder.operation(function_name(node.target), inputs, _ADDITIONS, writes=writes)
            if writes and isinstance(node.args[0], fx.Node):
                known[node.args[0]] = known[node]  # in place: whoever reads the tensor later reads the new value
    return builder.build("fx")


def _is_metadata(node: fx.Node) -> bool:
    """Whether a traced call yields sizes and the like instead of a tensor."""
    name = function_name(node.target)
    return name in METADATA or (name == "getattr" and node.args[1] not in _VIEWS)


def _writes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a traced call writes to its first argument: by name, as an operator, or as it is asked to."""
    name = function_name(target)
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITING or kwargs.get("out") is not None:
        return True
    if kwargs.get("inplace") or isinstance(target, str):
        return bool(kwargs.get("inplace"))
    try:
        return bool(inspect.signature(target).bind_partial(*args).arguments.get("inplace"))
    except (TypeError, ValueError):  # a function in C has no signature, and no such argument
        return False


def function_name(target: Any) -> str:
    """Return the name of what a traced node or a torch function calls."""
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def _trace_run(model: nn.Module, sample: Any) -> Dataflow:
    recorder = _Recorder()
    handles = []
    for name, module in model.named_modules():
        if is_leaf(module):
            handles += recorder.watch(name, module)
    try:
        with undisturbed(model):
            recorder.start(_tensors(sample))
            with recorder:
                output = _call(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.finish(_tensors(output))


class _Recorder(TorchFunctionMode):
    """Books every tensor to the node that made it, by identity. Calls inside a leaf module are that module's."""

    def __init__(self) -> None:
        super().__init__()
        self._builder = FlowBuilder()
        self._maker: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is only unique while its object lives
        self._inside = 0

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside += 1

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._inside -= 1
            inputs = self._makers((args, kwargs))
            if inputs and not self._inside:
                self._book(self._builder.add("module", name, inputs, module), _tensors(output))

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True, prepend=True),
        ]

    def start(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            self._book(self._builder.add("input", "input"), [tensor])

    def finish(self, outputs: list[Tensor]) -> Dataflow:
        self._builder.add("output", "output", self._makers(outputs))
        return self._builder.build("run")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            name = function_name(func)
            changed = args[:1] if name == "__setitem__" else result
            inputs, outputs = self._makers((args, kwargs)), _tensors(changed)
            if inputs and outputs:
                writes = _writes(func, args, kwargs or {})
                self._book(self._builder.operation(name, inputs, _ADDITIONS, writes=writes), outputs)
        return result

    def _makers(self, value: Any) -> list[int]:
        found = [self._maker[id(tensor)] for tensor in _tensors(value) if id(tensor) in self._maker]
        return list(dict.fromkeys(found))

    def _book(self, node: int, tensors: list[Tensor]) -> None:
        self._alive += tensors
        self._maker |= {id(tensor): node for tensor in tensors}


def _call(model: nn.Module, sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for entry in value.values() for tensor in _tensors(entry)]
    if isinstance(value, (tuple, list)):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return []
