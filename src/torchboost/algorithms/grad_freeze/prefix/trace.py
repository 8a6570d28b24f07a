"""Trace a forward pass in training mode into a graph that can be cut in two."""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchboost.core.covering import own_forward
from torchboost.core.torch_private import (
    TreeSpec,
    buffer_slots,
    is_traced_constant,
    module_hooks,
    tree_flatten,
    tree_unflatten,
)
from torchboost.errors import IncompatibleError
from torchboost.graph.copies import accelerators, generator_states, generators_kept
from torchboost.graph.trace import LAYERS, StandIn

__all__ = ["Call", "TracedForward", "is_opaque", "random_state", "trace_forward"]

_VALUES = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, slice)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one forward: its tensors, and everything else as a key.

    Args:
        tensors: The tensors, in the order of the flattened arguments.
        key: Equal for calls that can share a trace.
        rebuild: Builds the positional and keyword arguments, with other tensors in place of these.
    """

    tensors: tuple[Tensor, ...]
    key: Hashable
    spec: TreeSpec
    others: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """Split arguments; return None if one is neither a tensor nor a plain value."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        if not all(isinstance(leaf, (Tensor, *_VALUES)) for leaf in leaves):
            return None
        others = tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, (spec, tuple(map(repr, others))), spec, others)

    def arguments(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``tensors`` in place of the tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if other is None else other[0] for other in self.others]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return tuple(args), kwargs


@dataclass(frozen=True, slots=True)
class TracedForward:
    """The graph of one forward and the objects its names refer to.

    Args:
        graph: Placeholders are the tensors of the call, in order.
        targets: Name in the graph -> module, parameter, buffer or constant.
    """

    graph: fx.Graph
    targets: dict[str, nn.Module | Tensor] = field(default_factory=dict)


def is_opaque(module: nn.Module) -> bool:
    """Whether calling a module runs more than its class's forward: hooks, or its own forward.

    Covers of this package, such as those that let a convolution compute in float32, keep what it computes.
    """
    return any(module_hooks(module)) or own_forward(module) is not None


def trace_forward(model: nn.Module, call: Call) -> TracedForward:
    """Trace the forward of the model's class in its current state, including training flags.

    Nothing is computed; random state and the attributes of the model do not change.

    Args:
        model: Its submodules of ``torch.nn``, convolutional, linear and normalisation layers, and those with hooks
            become one node each; all others are traced into.
        call: The call to trace: which arguments are given, and the values of those that are not tensors.

    Raises:
        IncompatibleError: The forward cannot be traced correctly; the message says why.
    """
    tracer = _Tracer(call)
    attributes = [(module, dict(vars(module)), dict(buffer_slots(module))) for module in model.modules()]
    devices = accelerators(model.parameters())
    before = random_state(devices)
    python = random.getstate()
    try:
        with generators_kept(devices):
            graph = tracer.trace(model)
            drawn = random.getstate() != python or random_state(devices) != before
    except Exception as error:  # data-dependent Python: torch.fx has no common error class
        raise IncompatibleError(
            _refusal(model, f"torch.fx cannot trace it ({type(error).__name__}: {error})")
        ) from error
    finally:
        random.setstate(python)
        constants = {name: vars(model).pop(name) for name in set(vars(model)) - set(attributes[0][1])}
        changed = [name for module, before, buffers in attributes for name in _put_back(module, before, buffers)]
    if drawn:
        raise IncompatibleError(_refusal(model, "it draws random numbers that do not depend on its inputs"))
    changed += [name for name in constants if not is_traced_constant(name)]
    if changed:
        raise IncompatibleError(_refusal(model, f"it sets attributes of its modules ({', '.join(changed)})"))
    names = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    targets = {name: constants[name] if name in constants else _find(model, name) for name in names}
    return TracedForward(graph, targets)


def _put_back(module: nn.Module, before: dict[str, Any], buffers: dict[str, Any]) -> list[str]:
    """Undo the attribute changes of a forward on a module; return their names."""
    changed = [name for name, value in before.items() if vars(module).get(name) is not value]
    changed += [name for name in vars(module) if name not in before]
    vars(module).clear()
    vars(module).update(before)
    changed += [name for name, value in buffers.items() if buffer_slots(module).get(name) is not value]
    buffer_slots(module).clear()
    buffer_slots(module).update(buffers)
    return changed


def _find(model: nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), model)


def _refusal(model: nn.Module, why: str) -> str:
    return (
        f"the forward of {type(model).__name__} cannot be split into a frozen and a trained part: {why}. Train without "
        "the fast path of the frozen prefix; freezing itself does not need it."
    )


def random_state(devices: Sequence[torch.device]) -> tuple[bytes, ...]:
    """Return the state of the random number generators of torch on the CPU and on the given devices."""
    return tuple(state.numpy().tobytes() for state in generator_states(devices))


class _Tracer(fx.Tracer):
    """Tensors of the call become placeholders; its other arguments stay as they are."""

    proxy_buffer_attributes = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._mode = _mode()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LAYERS) or is_opaque(m) or super().is_leaf_module(m, module_qualified_name)

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


def _mode() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        *(torch.is_autocast_enabled(k) for k in kinds),
        *(torch.get_autocast_dtype(k) for k in kinds),
    )
