"""Trace which module outputs reach which modules: a small graph of one forward pass, found without names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.arguments import check_shapes
from torchboost.core.torch_private import AnyConv
from torchboost.graph.drawing import accelerators, generators_kept
from torchboost.graph.flow import Dataflow
from torchboost.graph.recording import LAYERS, Arguments, call, is_leaf, record_run, record_symbols, tensors_in
from torchboost.graph.structure import assume
from torchboost.graph.twin import large_plain_tensors, parameter_bytes, twin
from torchboost.graph.untouched import ReachesOriginal, copies_of, untouched

__all__ = [
    "evaluate",
    "runnable",
    "shared_traces",
    "trace",
    "trace_all_paths",
    "trace_run",
    "trace_symbolically",
    "undisturbed",
]

_SIDES = {1: (256, 1024), 2: (64, 32, 224, 28), 3: (16, 32)}
_PATHS, _DECISIONS = 16, 12
_TOO_LARGE = 2**30
"""A model with more bytes of parameters is not copied for a pass on a guessed input."""

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
    ``sample`` (or on noise of a guessed shape); an assumption from the module tree. ``Dataflow.traced`` says which one
    it was: ``"fx"``, ``"run"`` or ``"structure"``.

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
        return trace_run(model, sample=sample) or assume(model, is_leaf)


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
    for numbers in (False, True):  # a copy without numbers costs no memory, and is enough for most models
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
    return _all_paths(model, sample, numbers=False) or _all_paths(model, sample, numbers=True)


def _all_paths(model: nn.Module, sample: Any, *, numbers: bool) -> list[Dataflow] | None:
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
            with undisturbed(model, numbers=numbers) as copied:
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


@contextmanager
def undisturbed(model: nn.Module, *, numbers: bool = True) -> Iterator[nn.Module]:
    """Yield a copy of a model in eval mode to run without gradients; see :func:`~torchboost.graph.twin.twin`.

    Default generators that it draws from are restored (:func:`~torchboost.graph.drawing.generators_kept`). The copy
    reads large plain attributes in place. An operation on a tensor of the original is refused
    (:func:`~torchboost.graph.untouched.untouched`).
    """
    copied = twin(model, numbers=numbers, lend=True)
    devices = accelerators(model.parameters())
    with torch.no_grad(), generators_kept(devices), untouched(model, lent=large_plain_tensors(model)):
        yield copied


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Disable autocast, and TF32 and bfloat16 inside float32 products, so that two passes can be compared."""
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
