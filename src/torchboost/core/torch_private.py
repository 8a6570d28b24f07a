"""Every private name of torch that this package reads, each under a public name, and the differences between versions.

No other module of the package reads a private name of torch or asks for torch's version, from 2.9 on. If an update of
torch moves or changes a name, ``tests/core/test_torch_private.py`` names it: change it here. The module imports nothing
of this package, and nothing of torch that ``import torch`` does not import.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, cached_property
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _remove_worker_pids
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.nn.modules import batchnorm, conv, padding, pooling
from torch.nn.modules import module as _module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _get_capturable_supported_devices,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _foreach_utils, _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import Self

_torch: Any = torch
"""Type checkers count some names of torch as not exported."""
_aten: Any = torch.ops.aten
not_traced: Any = torch.compiler.disable
"""For hooks in a step or a forward that is compiled. Its own annotation promises another type."""
_BEFORE_2_11, _BEFORE_2_12, _BEFORE_2_13 = ((2, minor) > _torch.__version__ for minor in (11, 12, 13))

# Modules

AnyBatchNorm = batchnorm._BatchNorm
AnyNorm = batchnorm._NormBase
AnyConv = conv._ConvNd
AnyTransposedConv = conv._ConvTransposeNd
POOLING = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
PADDING = (padding._ConstantPadNd, padding._ReflectionPadNd, padding._ReplicationPadNd)
MAKES_REPLICAS = "_replicate_for_data_parallel"
"""The method of a module that ``DataParallel`` calls for a replica."""


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module by name, None for absent ones, to read and to write."""
    return module._parameters


buffer_slots: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
child_slots: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the buffers or children of a module by name, None for absent ones, to read and to write."""

module_hooks: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
"""Returns the hooks of a module: before and after forward, before and after backward, to read and to write."""

hooks_of_all_modules: tuple[dict[int, Any], ...] = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
"""Hooks before and after the forward of every module."""

state_dict_hooks: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_state_dict_hooks", "_load_state_dict_pre_hooks"
)
"""Returns the hooks that run after a state dict is made, and before it is loaded: the latter as ``hook`` of objects."""


# The compiler of torch traces functions, but no ``attrgetter``.


def conv_padding(layer: Any) -> Sequence[int]:
    """Return how far a convolution pads each side, also for "same"."""
    return layer._reversed_padding_repeated_twice


def share_attributes(
    module: nn.Module, source: nn.Module, *, buffers: dict[str, Any], children: dict[str, Any]
) -> None:
    """Give a module made by ``__new__`` all attributes of ``source``, with other ``_buffers`` and ``_modules``."""
    vars(module).update(vars(source) | {"_buffers": buffers, "_modules": children})


def state_without_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> Any:
    """Return the state in a copy or a pickle of a module, without the hooks for which ``is_ours`` is true.

    The names of the registries of hooks end in ``_hooks``, unless they say how the hooks of another one are called.
    """
    state = getattr(type(module), "__getstate__", vars)(module)  # every class has one from Python 3.11 on
    if not isinstance(state, dict):  # the user's own
        return state
    state = dict(state)
    gone: set[int] = set()
    for name, hooks in state.items():
        if name.startswith("_") and name.endswith("_hooks") and isinstance(hooks, dict):
            ours = {key for key, hook in hooks.items() if is_ours(getattr(hook, "hook", hook))}
            gone |= ours
            state[name] = _without(hooks, ours)
    for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        if name in state:
            state[name] = _without(state[name], gone)
    return state


def _without(entries: dict[int, Any], gone: set[int]) -> dict[int, Any]:
    return type(entries)((key, value) for key, value in entries.items() if key not in gone) if gone else entries


def conv_forward(layer: nn.Module | type[nn.Module]) -> Any:
    """Return the function that computes a convolution, or None for other layers: ``Conv2d._conv_forward``."""
    found = getattr(layer, "_conv_forward", None)
    return getattr(found, "__func__", found)


def make_replica(module: nn.Module) -> nn.Module:
    """Return the replica of ``DataParallel`` on a device, by the class: ``Module._replicate_for_data_parallel``."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    return replica


# Tensors

foreach: Any = SimpleNamespace(
    **{
        name: getattr(torch, f"_foreach_{name}")
        for name in (
            *("add", "add_", "addcdiv_", "addcmul", "addcmul_", "clamp_max_", "clamp_min_", "copy_", "div", "div_"),
            *("lerp", "lerp_", "maximum_", "mul_", "neg", "neg_", "norm", "pow", "sqrt", "sqrt_", "sub_"),
        )
    }
)
"""Operations on lists of tensors: ``foreach.add_(params, updates)`` is ``torch._foreach_add_``.

Those of ``torch.ops.aten`` try the overload for a list of numbers first, which took 6 to 80 times as long.
"""
UNSUPPORTED_SHARDS = (RuntimeError, AssertionError)
"""Errors of operators that cannot compute with a DTensor: in 2.9 not always a ``RuntimeError``."""


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor was made as a view of another one."""
    return tensor._is_view()


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the numbers of a sparse COO tensor, coalesced or not."""
    return tensor._values()


local_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Returns the memory of this rank's part of a DTensor, the same object each time."""

check_and_unscale_: Callable[[list[Tensor], Tensor, Tensor], None] = _aten._amp_foreach_non_finite_check_and_unscale_
"""Multiplies gradients in place and sets the second tensor to 1 if one is not finite, without waiting for the device.

The gradients are of one device and one precision, the second tensor of shape ``(1,)`` and the factor of shape ``()``,
both float32.
"""

sequence_number: Callable[[], int] = _torch._C._autograd._get_sequence_nr
"""Returns the number that the next node of the autograd graph gets."""

node_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns the place of a node of the autograd graph in the order in which its thread recorded nodes."""

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Returns whether ``torch.jit.trace`` runs."""

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
is_functorch_wrapped = is_functorch_wrapped_tensor


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the :data:`version` of each tensor."""
    return list(map(version, tensors))


def memory_stamp(tensor: Tensor) -> tuple[int, int]:
    """Return how often a tensor was written to, and its address, or of a DTensor the address of its shard."""
    return tensor._version, getattr(tensor, "_local_tensor", tensor).data_ptr()


def sparse_rows(tensor: Tensor) -> Tensor:
    """Return the rows that a sparse COO tensor names, coalesced or not: ``Tensor._indices``."""
    return tensor._indices()[0]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of a tensor: ``Tensor._backward_hooks``."""
    return bool(tensor._backward_hooks)


def gradient_hooks(tensor: Tensor) -> list[dict[int, Any]]:
    """Return the registries of hooks on the gradient of a leaf, to read and to write."""
    return [hooks for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if hooks]


def overrides_dispatch(tensor: Tensor) -> bool:
    """Whether a tensor is of a class with a ``__torch_dispatch__``, such as DTensor, and has no memory of its own."""
    kinds: Any = type(tensor), Tensor
    return kinds[0].__torch_dispatch__ != kinds[1].__torch_dispatch__


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether a node of the autograd graph is a checkpoint with ``use_reentrant=True``: ``Node._forward_cls``."""
    return getattr(node, "_forward_cls", None) is CheckpointFunction


def has_saved_tensor_hooks() -> bool:
    """Whether hooks receive all tensors that autograd saves, as in a checkpoint that is not reentrant."""
    return _top_saved_tensors_default_hooks(True) is not None


def inside_backward() -> bool:
    """Whether a backward pass runs, in this thread: ``torch._C._current_graph_task_id``."""
    return torch._C._current_graph_task_id() != -1


class Untraced:
    """A function that the compiler, if it was imported, does not trace: ``torch.compiler.disable``."""

    def __init__(self, function: Any) -> None:
        self._function, self._disabled = function, None

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        if self._disabled is None:
            if "torch._dynamo" not in sys.modules:
                return self._function(*args)
            self._disabled = torch.compiler.disable(self._function)
        return self._disabled(*args)


def tensor_without_memory(kind: type[Tensor], shape: Sequence[int], like: Tensor) -> Any:
    """Return a tensor of a class with a ``__torch_dispatch__``: ``Tensor._make_wrapper_subclass``."""
    options = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}
    return Tensor._make_wrapper_subclass(kind, tuple(shape), **options)


def functions_of_subclasses_off() -> AbstractContextManager[Any]:
    """Return a context in which ``__torch_function__`` of classes is not called: ``DisableTorchFunctionSubclass``."""
    return torch._C.DisableTorchFunctionSubclass()


def functions_of_subclasses_on() -> AbstractContextManager[Any]:
    """Return a context in which ``__torch_function__`` is called again: ``torch._C._EnableTorchFunction``."""
    return torch._C._EnableTorchFunction()


def inside_function_transform() -> bool:
    """Whether ``torch.func.grad``, ``vmap`` or another one runs: ``torch._C.peek_interpreter_stack``."""
    return peek_interpreter_stack() is not None


def inside_mode() -> bool:
    """Whether a mode of Python other than ``torch.device`` sees all functions or operators of torch."""
    device: Any = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", ())
    functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, device)]
    return bool(functions) or _get_current_dispatch_mode() is not None


def is_traced_constant(name: str) -> bool:
    """Whether ``torch.fx`` has set an attribute of this name on the root, for a tensor made in ``forward``."""
    return name.startswith("_tensor_constant")


def default_device() -> torch.device:
    """Return the device of new tensors. In 2.9 ``get_default_device`` raises after ``set_default_device(None)``."""
    return torch.empty(0).device


def foreach_lerp(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Return ``start + weight * (end - start)`` of each pair, which before 2.13 works one by one for a DTensor only."""
    if _BEFORE_2_13 and any(map(overrides_dispatch, starts)):
        return [torch.lerp(start, end, weight) for start, end in zip(starts, ends, strict=True)]
    return list(foreach.lerp(starts, ends, weight))


def foreach_norm(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor. Before 2.11 a sum of norms of shards is wrong if they are not reduced first."""
    norms: Sequence[Tensor] = foreach.norm(tensors)
    return list(map(_reduced, norms)) if _BEFORE_2_11 else norms


def _reduced(norm: Tensor) -> Tensor:
    if not overrides_dispatch(norm):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim) if isinstance(norm, DTensor) else norm


@cache
def casts_keep_gradients() -> bool:
    """Whether a weight that autocast has cast under ``no_grad`` has a gradient in later products of the same block.

    In older versions of torch it has none (pytorch#112583), unless the casts are not kept.
    """
    weight = nn.Parameter(torch.ones(1, 1, device="cpu"))
    with torch.inference_mode(False), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


# Optimizers

fused_devices = _foreach_utils._get_fused_kernels_supported_devices
capturable_devices = _get_capturable_supported_devices
global_step_pre_hooks = _global_optimizer_pre_hooks
global_step_post_hooks = _global_optimizer_post_hooks

step_pre_hooks: Callable[[Optimizer], dict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
step_post_hooks: Callable[[Optimizer], dict[int, Any]] = attrgetter("_optimizer_step_post_hooks")
"""Return the hooks that run before and after each step of an optimizer, in order."""


def calls_hooks(optimizer: Optimizer) -> bool:
    """Whether ``Optimizer.__init__`` ran: it makes the registries of hooks, and a ``step`` that calls them."""
    marked = getattr(type(optimizer).step, "hooked", False)
    return bool(marked) and all(name in vars(optimizer) for name in _REGISTRIES)


_REGISTRIES = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def hooks_of_optimizer(optimizer: Optimizer) -> list[dict[int, Any]]:
    """Return the registries of an optimizer's hooks, to read and to write: ``_optimizer_step_pre_hooks`` and others."""
    return [vars(optimizer)[name] for name in _REGISTRIES if name in vars(optimizer)]


def drives_schedule(optimizer: Optimizer) -> bool:
    """Whether a learning-rate schedule was built on an optimizer. ``ReduceLROnPlateau`` leaves no mark."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def without_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer but for its hooks, all of which begin with ``_optimizer_``."""
    return {key: value for key, value in attributes.items() if key[:11] != "_optimizer_"}


def has_fused_mark(optimizer: Optimizer) -> bool:
    """Whether a fused step has checked its parameters, or will: ``Optimizer._need_device_dtype_check_for_fused``."""
    return "_need_device_dtype_check_for_fused" in vars(optimizer)


def forget_fused_mark(optimizer: Optimizer) -> None:
    """Remove the mark of a fused step: ``Optimizer._need_device_dtype_check_for_fused``."""
    vars(optimizer).pop("_need_device_dtype_check_for_fused", None)


# torch.compile

_Call = TypeVar("_Call", bound=Callable[..., Any])


class _Eager:
    """Lets compiled functions run as Python while any thread needs that: the stance belongs to the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed = 0
        self._stance: Any = None

    def begin(self) -> bool:
        """Return whether :meth:`end` must follow: not without the compiler, nor inside a function that it runs."""
        if "torch._dynamo" not in sys.modules:
            return False
        with self._lock:
            if not self._needed:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError:
                    return False
            self._needed += 1
        return True

    def end(self) -> None:
        with self._lock:
            self._needed -= 1
            if not self._needed:
                self._stance.__exit__(None, None, None)


_EAGER = _Eager()


class DispatchMode(TorchDispatchMode):
    """A mode that sees the operations of compiled functions too, because they run as Python.

    Otherwise the compiler would see a mode, and would never again compile the code inside of it.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        self._eager = _EAGER.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            if self._eager:
                _EAGER.end()


class Interceptor:
    """An object that :func:`set_compiled_call` puts instead of a compiled call, and that compiles nothing."""

    compiled: Any = None
    """The compiled call behind it."""

    @cached_property
    def function(self) -> Any:
        """The function that stands for it, because ``torch.jit`` refuses other objects there."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        vars(answer)["interceptor"] = self
        return answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        raise NotImplementedError

    def pass_on(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Answer a call as if there were no interceptor."""
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return call_uncompiled(module, *args, **kwargs)


def compiled_call(module: nn.Module) -> Any:
    """Return the call that ``module.compile()`` made, also behind an interceptor: ``Module._compiled_call_impl``."""
    interceptor = interceptor_of(module)
    return module._compiled_call_impl if interceptor is None else interceptor.compiled


def interceptor_of(module: nn.Module) -> Interceptor | None:
    """Return the interceptor of the calls of a module, or None: ``Module._compiled_call_impl``."""
    return getattr(module._compiled_call_impl, "interceptor", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a call of the module run ``call``, or for None its former call: ``Module._compiled_call_impl``."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call.function if isinstance(call, Interceptor) else call


def is_of_interceptor(value: Any) -> bool:
    """Whether this is the function of an interceptor."""
    return isinstance(getattr(value, "interceptor", None), Interceptor)


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, past the call that ``module.compile()`` made: ``Module._call_impl``."""
    return module._call_impl(*args, **kwargs)


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` wraps, or None. Without an imported compiler there is none."""
    dynamo = sys.modules.get("torch._dynamo")
    found = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return module.get_submodule("_orig_mod") if found else None


def beneath_compiled(function: Any) -> Any:
    """Return the function that ``torch.compile`` compiles, or None. Around one of torch it puts another one."""
    beneath: Any = getattr(function, "_torchdynamo_orig_callable", None)
    file = getattr(getattr(beneath, "__code__", None), "co_filename", None)
    between = sys.modules.get("torch._dynamo.external_utils")
    return beneath.__wrapped__ if between is not None and file == between.__file__ else beneath


def compiled_graphs() -> int:
    """Return the number of graphs compiled by this process: ``torch._dynamo.utils.counters``. Imports no compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def forget_compiled() -> None:
    """Let everything compile again that this process compiled: ``torch.compiler.reset``. Imports no compiler."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def mode_options(mode: str) -> dict[str, Any]:
    """Return the options of a mode of ``torch.compile``: ``torch._inductor.list_mode_options``."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def load_compiler() -> None:
    """Import ``torch._dynamo`` and ``torch._inductor``, which takes seconds."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")


def guards_of_every_flag() -> AbstractContextManager[Any]:
    """Within it new graphs check all of every parameter, also if its dict was not written to. Imports the compiler."""
    from torch._dynamo import config

    patch: Any = config.patch
    return patch(skip_tensor_guards_with_matching_dict_tags=False)


def guards_of_hooks() -> AbstractContextManager[Any]:
    """Within it new graphs check the hooks of modules. Otherwise one that was made without hooks is used with them."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return nullcontext() if dynamo is None else dynamo.config.patch(skip_nnmodule_hook_guards=False)


def recompile_limit() -> int:
    """Return how many graphs of one code torch compiles before it falls back to eager: ``torch._dynamo.config``."""
    from torch._dynamo import config

    return config.recompile_limit


def following_flags(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function whose graphs check ``requires_grad`` of every parameter, as all do from 2.12 on."""
    if not _BEFORE_2_12:
        return compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        with guards_of_every_flag():
            return compiled(*args, **kwargs)

    return call


def marked_as_following(call: _Call) -> _Call:
    """Mark and return a function of this package that calls compiled code only through :func:`following_flags`."""
    vars(call)["follows_flags"] = True
    return call


def follows_flags(call: Any) -> bool:
    """Whether a call of a module was marked by :func:`marked_as_following`."""
    return inspect.isroutine(call) and getattr(call, "follows_flags", False)


def compiler_follows_flags() -> bool:
    """Whether graphs of functions other than :func:`following_flags` do so, before 2.12 if a setting of torch is off.

    Otherwise a graph that was made while a layer is frozen never trains it again (pytorch#139476).
    """
    if not _BEFORE_2_12:
        return True
    from torch._dynamo import config

    return not config.skip_tensor_guards_with_matching_dict_tags


def store_in_order(module: nn.Module) -> None:
    """Store the hooks of a module in the order in which they are called. Call it after ``prepend=True``.

    That argument moves an entry of an ``OrderedDict``. The compiler of torch 2.9 to 2.11 uses the order of insertion,
    and fails with "Guard check failed" if the two differ.
    """
    for hooks in module_hooks(module):
        if list(hooks) != list(dict.keys(hooks)):
            entries = list(hooks.items())
            hooks.clear()
            hooks.update(entries)


# Processors


def cpu_capabilities() -> dict[str, Any]:
    """Return the processor's features: ``torch.cpu.get_capabilities``, before 2.11 only the features for bfloat16."""
    if hasattr(torch.cpu, "get_capabilities"):
        return _torch.cpu.get_capabilities()
    return {"avx512_bf16": _torch.cpu._is_avx512_bf16_supported(), "amx_bf16": _torch.cpu._is_amx_tile_supported()}


# Several ranks

comm_hooks: Callable[[DistributedDataParallel], list[tuple[Callable[..., Any], Any]]] = attrgetter("_comm_hooks")
"""Returns the communication hooks of DDP and their states, to read and to write."""

active_ddp: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module
"""Returns the DDP whose forward is running. torch keeps it for the compiler."""


def built_in_comm_hook(ddp: DistributedDataParallel) -> str | None:
    """Return the name of the hook that the reducer has, Python or built in: ``DDP._get_ddp_logging_data``."""
    return ddp._get_ddp_logging_data().get("comm_hook") or None


def lazy_gloo(store: Any, at: int, ranks: int, timeout: float) -> Any:
    """Return a ``ProcessGroupGloo`` whose ranks connect when they first talk. By default gloo connects all with all.

    Args:
        store: Of these ranks alone.
        at: Place of this rank among them.
        ranks: Number of ranks.
        timeout: Seconds.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo  # torch's stubs omit most of the class
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [gloo.create_default_device(lazy_init=True)]
    return gloo(store, at, ranks, options)


def place_of_optimizer(accelerator: Any, optimizer: Any) -> int:
    """Return the number under which ``Accelerator.save_state`` saves an optimizer: ``Accelerator._optimizers``."""
    return accelerator._optimizers.index(optimizer)


def build_again(ddp: DistributedDataParallel) -> None:
    """Let DDP make the reducer for the parameters that require a gradient now, without communication hooks."""
    ddp.__setstate__(vars(ddp) | {"_comm_hooks": []})


def exchange_of_a_pass(ddp: DistributedDataParallel) -> None:
    """Do a forward pass of DDP without a call of the model: ``DDP._pre_forward`` and ``DDP._post_forward``."""
    ddp._post_forward(ddp._pre_forward(torch.zeros((), device="cpu")))


def all_reduce_hooks(unit: nn.Module) -> list[Any]:
    """Return the all-reduce hook of each group of parameters of an FSDP2 module, None without one."""
    return [group._all_reduce_hook for group in _parameter_groups(unit)]


def holds_back_gradients(unit: nn.Module) -> bool:
    """Whether an FSDP2 module does not average the gradients of a pass, or has such gradients of earlier passes."""
    groups = _parameter_groups(unit)
    held = [param for group in groups for param in group.fsdp_params]
    whole = [param._unsharded_param for param in held if hasattr(param, "_unsharded_param")]
    waiting = any(p.unsharded_accumulated_grad is not None for p in held) or any(p.grad is not None for p in whole)
    return waiting or not all(group.reduce_grads and group.all_reduce_grads for group in groups)


def precision_of_unit(unit: Any) -> torch.dtype | None:
    """Return the type to which FSDP2 casts the parameters of a module, or None: ``FSDPState._mp_policy``."""
    return unit._get_fsdp_state()._mp_policy.param_dtype


def in_forward_of_fsdp2(unit: Any) -> bool:
    """Whether the outermost FSDP2 module, around a module or itself, is in its forward: ``iter_forward_root``."""
    return unit._get_fsdp_state()._state_ctx.iter_forward_root is not None


def end_pass(unit: Any) -> None:
    """Let FSDP2 end a pass in which a module raised, as ``FSDPModule.reset_iter_state`` does, which torch 2.12 lacks.

    After a whole pass, and for a module that was not the outermost, nothing changes.
    """
    state: Any = unit._get_fsdp_state()
    if state._is_root or state._state_ctx.iter_forward_root is state:
        state._root_post_backward_final_callback()
        state._state_ctx.iter_forward_root = None


def _parameter_groups(unit: Any) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # as in torch 2.11


# Attention


class Packed(NamedTuple):
    """The places of sequences whose rows lie one after the other.

    Args:
        starts: The first row of each sequence, and the number of all rows. int32. Shape (sequences + 1,).
        longest: The most rows of a sequence.
    """

    starts: Tensor
    longest: int


def attention_of_packed_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Packed,
    keys: Packed,
    *,
    causal: bool,
    dropout_p: float,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the attention of each sequence by one kernel: FlashAttention, or if it cannot, memory-efficient attention.

    ``torch.nn.attention.varlen`` has no dropout, and no kernel for float32. Nested tensors call the same operators.
    The rows of all sequences lie one after the other, in ``query`` and the result of shape (rows, heads, width), in
    ``key`` and ``value`` of shape (rows of keys, heads, width). If ``causal``, the sequences of queries and keys are
    the same, and a query sees the keys up to its own place. None if no such kernel takes these tensors.
    """
    if not query.is_cuda or query.ndim != 3 or value.shape != key.shape or not key.numel():
        return None
    if torch.is_autocast_enabled("cuda"):  # as it casts the arguments of scaled_dot_product_attention
        dtype, parts = torch.get_autocast_dtype("cuda"), (query, key, value)
        query, key, value = (part if part.dtype is torch.float64 else part.to(dtype) for part in parts)
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, dropout_p, causal, enable_gqa)
    places = queries.starts, keys.starts, queries.longest, keys.longest, dropout_p
    if torch.backends.cuda.can_use_flash_attention(asked) and query.shape[-1] % 8 == 0:
        return torch.ops.aten._flash_attention_forward(query, key, value, *places, causal, False, scale=scale)[0]
    if torch.backends.cuda.can_use_efficient_attention(asked) and query.shape[1] == key.shape[1]:
        parts = query[None], key[None], value[None], None
        return torch.ops.aten._efficient_attention_forward(*parts, *places, int(causal), True, scale=scale)[0][0]
    return None


# Data loaders


def loads_in_this_process(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads batches in this process, in torch's own way: without workers, and nothing overridden."""
    kinds = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    ways = {"__iter__", "_get_iterator", "_index_sampler"}
    return loader.num_workers == 0 and all(ways.isdisjoint(vars(kind)) for kind in kinds)


iterator_of_indices: Callable[[Any], Any] = attrgetter("_sampler_iter")
"""Returns the iterator from which the iterator of a loader without workers takes its indices."""

next_index: Callable[[Any], Any] = methodcaller("_next_index")
"""Takes the next index, or list of indices, from the iterator of a loader without workers, and loads nothing."""


def load_index(batches: Any, index: Any) -> Any:
    """Load the data of an index as the iterator of a loader without workers does."""
    batch = batches._dataset_fetcher.fetch(index)
    return pin_memory(batch, batches._pin_memory_device) if batches._pin_memory else batch


def stop_workers(batches: Any) -> None:
    """Stop the workers of the iterator of a loader at once, since one of them may never answer."""
    for worker in getattr(batches, "_workers", ()):
        worker.kill()


def forgive_lost_workers(batches: Any) -> None:
    """Let the iterator of a loader raise in ``next()`` alone if a worker dies, and not in the middle of the loop."""
    if getattr(batches, "_worker_pids_set", False):
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
