"""Every private name of torch that this package reads, each under a public name.

No other module of the package reads a private name of torch; ``tests/contracts/test_private_names.py`` scans for them.
If an update of torch moves or changes a name, it is mended here, and ``tests/core/test_torch_private.py`` says which
one it was. All names were last seen in torch 2.9.1 to 2.14.1; one is read in two ways (:func:`all_reduce_hooks`). The
module imports nothing of this package, and nothing of torch that ``import torch`` does not import.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensor_hooks
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.nn.modules import padding, pooling
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.batchnorm import _NormBase as AnyNorm
from torch.nn.modules.conv import _ConvNd as AnyConv
from torch.nn.modules.conv import _ConvTransposeNd as AnyTransposedConv
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _get_capturable_supported_devices as capturable_devices
from torch.optim.optimizer import _global_optimizer_post_hooks as global_step_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_pre_hooks
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices as fused_devices
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import Self

__all__ = [
    "MAKES_REPLICAS",
    "PADDING",
    "POOLING",
    "AnyBatchNorm",
    "AnyConv",
    "AnyNorm",
    "AnyTransposedConv",
    "DispatchMode",
    "Interceptor",
    "active_ddp",
    "all_reduce_hooks",
    "beneath_compiled",
    "buffer_slots",
    "build_again",
    "built_in_comm_hook",
    "call_uncompiled",
    "calls_hooks",
    "capturable_devices",
    "check_and_unscale_",
    "child_slots",
    "comm_hooks",
    "compiled_call",
    "compiled_graphs",
    "conv_forward",
    "conv_padding",
    "end_pass",
    "exchange_of_a_pass",
    "foreach",
    "forget_fused_mark",
    "fused_devices",
    "global_step_post_hooks",
    "global_step_pre_hooks",
    "gradient_hooks",
    "guards_every_flag",
    "guards_of_every_flag",
    "has_fused_mark",
    "has_gradient_hooks",
    "has_saved_tensor_hooks",
    "holds_back_gradients",
    "hooks_of_optimizer",
    "in_forward_of_fsdp2",
    "inside_compiled",
    "inside_function_transform",
    "inside_mode",
    "interceptor_of",
    "is_functorch_wrapped_tensor",
    "is_of_interceptor",
    "is_reentrant_checkpoint",
    "is_traced_constant",
    "is_tracing",
    "is_view",
    "lazy_gloo",
    "local_shard",
    "make_replica",
    "memory_stamp",
    "module_hooks",
    "node_number",
    "older_cpu_flags",
    "overrides_dispatch",
    "parameter_slots",
    "place_of_optimizer",
    "precision_of_unit",
    "recompile_limit",
    "sequence_number",
    "set_compiled_call",
    "share_attributes",
    "sparse_rows",
    "sparse_values",
    "state_dict_hooks",
    "state_without_hooks",
    "step_post_hooks",
    "step_pre_hooks",
    "tree_flatten",
    "tree_unflatten",
    "version",
    "versions",
    "without_hooks",
    "writes_to",
]

POOLING = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
"""The base classes of the pooling layers."""

PADDING = (padding._ConstantPadNd, padding._ReflectionPadNd, padding._ReplicationPadNd)
"""The base classes of the padding layers."""

MAKES_REPLICAS = "_replicate_for_data_parallel"
"""The method of a module that ``DataParallel`` calls for a replica."""

_torch: Any = torch  # type checkers count the names below as not exported
foreach: Any = SimpleNamespace(
    add=_torch._foreach_add,
    add_=_torch._foreach_add_,
    addcdiv_=_torch._foreach_addcdiv_,
    addcmul=_torch._foreach_addcmul,
    addcmul_=_torch._foreach_addcmul_,
    clamp_max_=_torch._foreach_clamp_max_,
    clamp_min_=_torch._foreach_clamp_min_,
    copy_=_torch._foreach_copy_,
    div=_torch._foreach_div,
    div_=_torch._foreach_div_,
    lerp=_torch._foreach_lerp,
    lerp_=_torch._foreach_lerp_,
    maximum_=_torch._foreach_maximum_,
    mul_=_torch._foreach_mul_,
    neg=_torch._foreach_neg,
    neg_=_torch._foreach_neg_,
    norm=_torch._foreach_norm,
    pow=_torch._foreach_pow,
    sqrt=_torch._foreach_sqrt,
    sqrt_=_torch._foreach_sqrt_,
    sub_=_torch._foreach_sub_,
)
"""Operations on lists of tensors: ``foreach.add_(params, updates)`` is ``torch._foreach_add_``.

Not those of ``torch.ops.aten``. For a list of tensors, these try the overload for a list of numbers first and read the
tensors one by one before they give up, which took 6 to 80 times as long as the operation itself. The bits are the same.
"""


# Modules


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module by name, None for absent ones, to read and to write: ``Module._parameters``."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module by name, None for absent ones, to read and to write: ``Module._buffers``."""
    return module._buffers


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the children of a module by name, None for absent ones, to read and to write: ``Module._modules``."""
    return module._modules


def share_attributes(
    module: nn.Module, source: nn.Module, *, buffers: dict[str, Any], children: dict[str, Any]
) -> None:
    """Give a module made by ``__new__`` all attributes of ``source``, with other ``_buffers`` and ``_modules``."""
    vars(module).update(vars(source) | {"_buffers": buffers, "_modules": children})


def module_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]:
    """Return the hooks of a module: before and after forward, before and after backward, to read and to write.

    Reads ``Module._forward_pre_hooks``, ``_forward_hooks``, ``_backward_pre_hooks`` and ``_backward_hooks``.
    """
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that change the state dicts of a module, those after it is made and those before it is loaded.

    Reads ``Module._state_dict_hooks`` and ``_load_state_dict_pre_hooks``, to read and to write. A hook of the second
    kind is inside an object that holds it as ``hook``.
    """
    return module._state_dict_hooks, module._load_state_dict_pre_hooks


def state_without_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> Any:
    """Return what a copy or a pickle of a module holds, without the hooks for which ``is_ours`` is true.

    Calls ``Module.__getstate__`` of the class, and reads the names of the registries of hooks: all end in ``_hooks``,
    but for those which say how a hook of another one is called.
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


def conv_padding(layer: AnyConv) -> Sequence[int]:
    """Return how far a convolution pads each side, also for "same": ``_ConvNd._reversed_padding_repeated_twice``."""
    return layer._reversed_padding_repeated_twice


def make_replica(module: nn.Module) -> nn.Module:
    """Return what ``DataParallel`` computes with on a device, by the class: ``Module._replicate_for_data_parallel``."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    return replica


# Tensors


version: Callable[[Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was written to in place: ``Tensor._version``."""


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the :data:`version` of each tensor."""
    return list(map(version, tensors))


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor was made as a view of another one. Reads ``Tensor._is_view``."""
    return tensor._is_view()


def memory_stamp(tensor: Tensor) -> tuple[int, int]:
    """Return how often a tensor was written to, and its address; of a DTensor, that of its shard.

    Reads ``Tensor._version`` and ``DTensor._local_tensor``, without the autograd of ``to_local()``.
    """
    return tensor._version, getattr(tensor, "_local_tensor", tensor).data_ptr()


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the numbers of a sparse COO tensor, coalesced or not: ``Tensor._values``."""
    return tensor._values()


def sparse_rows(tensor: Tensor) -> Tensor:
    """Return the rows that a sparse COO tensor names, coalesced or not: ``Tensor._indices``."""
    return tensor._indices()[0]


def writes_to(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, by its schema: ``OpOverload._schema``."""
    arguments = [argument for argument in operator._schema.arguments if argument.alias_info is not None]
    names = {argument.name for argument in arguments if argument.alias_info.is_write}
    by_place = zip(operator._schema.arguments, args, strict=False)
    return [value for argument, value in by_place if argument.name in names] + [
        value for name, value in kwargs.items() if name in names
    ]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of a tensor: ``Tensor._backward_hooks``."""
    return bool(tensor._backward_hooks)


def gradient_hooks(tensor: Tensor) -> list[dict[int, Any]]:
    """Return the registries of hooks on the gradient of a leaf, to read and to write.

    Reads ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``.
    """
    return [hooks for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if hooks]


def local_shard(tensor: Any) -> Tensor:
    """Return the memory of this rank's part of a DTensor: ``DTensor._local_tensor``, the same object each time."""
    return tensor._local_tensor


def overrides_dispatch(tensor: Tensor) -> bool:
    """Whether a tensor is of a class with a ``__torch_dispatch__``, such as DTensor, and has no memory of its own."""
    kinds: Any = type(tensor), Tensor
    return kinds[0].__torch_dispatch__ != kinds[1].__torch_dispatch__


def check_and_unscale_(grads: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply gradients in place and set ``found`` to 1 if one is not finite: what ``GradScaler`` calls.

    One read and one write of each gradient, without waiting for the device:
    ``aten._amp_foreach_non_finite_check_and_unscale_``.

    Args:
        grads: Of one device and one precision.
        found: Shape ``(1,)``, float32.
        inverse: Shape ``()``, float32.
    """
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)


def sequence_number() -> int:
    """Return the number that the next node of the autograd graph gets: ``torch._C._autograd._get_sequence_nr``."""
    return _torch._C._autograd._get_sequence_nr()


def node_number(node: Any) -> int:
    """Return the place of a node in the order in which its thread recorded nodes: ``Node._sequence_nr``."""
    return node._sequence_nr()


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether a node of the autograd graph is a checkpoint with ``use_reentrant=True``: ``Node._forward_cls``."""
    return getattr(node, "_forward_cls", None) is CheckpointFunction


def has_saved_tensor_hooks() -> bool:
    """Whether hooks receive all tensors that autograd saves: ``torch._C._autograd._top_saved_tensors_default_hooks``.

    This is so inside ``torch.utils.checkpoint`` with ``use_reentrant=False``, and inside ``save_on_cpu``.
    """
    return top_saved_tensor_hooks(True) is not None


def inside_function_transform() -> bool:
    """Whether ``torch.func.grad``, ``vmap`` or another one runs: ``torch._C._functorch.peek_interpreter_stack``."""
    return peek_interpreter_stack() is not None


def inside_mode() -> bool:
    """Whether a mode of Python sees all functions or operators of torch, other than that of ``torch.device``.

    Reads ``torch.overrides._get_current_function_mode_stack``, ``torch.utils._device.DeviceContext`` and
    ``torch.utils._python_dispatch._get_current_dispatch_mode``.
    """
    device: Any = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", ())
    functions = [mode for mode in function_modes() if not isinstance(mode, device)]
    return bool(functions) or dispatch_mode() is not None


def is_traced_constant(name: str) -> bool:
    """Whether ``torch.fx`` has set an attribute of this name on the root, for a tensor made in ``forward``."""
    return name.startswith("_tensor_constant")


# Optimizers


def step_pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before each step of an optimizer, in order: ``Optimizer._optimizer_step_pre_hooks``."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def step_post_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run after each step of an optimizer: ``Optimizer._optimizer_step_post_hooks``."""
    return list(optimizer._optimizer_step_post_hooks.values())


def calls_hooks(optimizer: Optimizer) -> bool:
    """Whether ``Optimizer.__init__`` ran: it makes the registries of hooks, and a ``step`` that calls them.

    Reads ``step.hooked`` and the names of ``Optimizer._optimizer_step_pre_hooks`` and its four neighbours.
    """
    marked = getattr(type(optimizer).step, "hooked", False)
    return bool(marked) and all(name in vars(optimizer) for name in _REGISTRIES)


_REGISTRIES = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def hooks_of_optimizer(optimizer: Optimizer) -> list[dict[int, Any]]:
    """Return the registries of an optimizer's hooks, to read and to write: ``_optimizer_step_pre_hooks`` and others."""
    return [vars(optimizer)[name] for name in _REGISTRIES if name in vars(optimizer)]


def without_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer but for its hooks, all of which begin with ``_optimizer_``."""
    return {key: value for key, value in attributes.items() if key[:11] != "_optimizer_"}


def has_fused_mark(optimizer: Optimizer) -> bool:
    """Whether a fused step has looked at its parameters, or will: ``Optimizer._need_device_dtype_check_for_fused``."""
    return "_need_device_dtype_check_for_fused" in vars(optimizer)


def forget_fused_mark(optimizer: Optimizer) -> None:
    """Take away what a fused step has set: ``Optimizer._need_device_dtype_check_for_fused``."""
    vars(optimizer).pop("_need_device_dtype_check_for_fused", None)


# torch.compile


class _Eager:
    """Lets compiled functions run as Python while something needs that, in any thread.

    The stance of the compiler belongs to the process, so the threads that need it are counted.
    """

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
    """A mode that sees the operations of compiled functions too: they run as Python.

    Otherwise the compiler would see a mode, and would never again compile the code that it meets there.
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
    """Something that :func:`set_compiled_call` puts instead of a compiled call, and that compiles nothing."""

    compiled: Any = None
    """The compiled call that it stands in front of."""
    function: Any = None
    """What :func:`set_compiled_call` puts, because ``torch.jit`` refuses other objects than functions there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        raise NotImplementedError

    def pass_on(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Answer a call as if there were no interceptor."""
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return call_uncompiled(module, *args, **kwargs)


def compiled_call(module: nn.Module) -> Any:
    """Return what ``module.compile()`` made of the call, also behind an interceptor: ``Module._compiled_call_impl``."""
    interceptor = interceptor_of(module)
    return module._compiled_call_impl if interceptor is None else interceptor.compiled


def interceptor_of(module: nn.Module) -> Interceptor | None:
    """Return the interceptor of the calls of a module, or None: ``Module._compiled_call_impl``."""
    return getattr(module._compiled_call_impl, "interceptor", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a call of the module run ``call``, or what it ran before for None: ``Module._compiled_call_impl``."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = _as_function(call) if isinstance(call, Interceptor) else call


def _as_function(interceptor: Interceptor) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return interceptor(*args, **kwargs)

    if interceptor.function is None:
        vars(answer)["interceptor"] = interceptor
        interceptor.function = answer
    return interceptor.function


def is_of_interceptor(value: Any) -> bool:
    """Whether this is the function of an interceptor."""
    return isinstance(getattr(value, "interceptor", None), Interceptor)


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, past what ``module.compile()`` made of the call: ``Module._call_impl``."""
    return module._call_impl(*args, **kwargs)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` runs: ``torch._C._is_tracing``."""
    return bool(torch._C._is_tracing())


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` wraps, or None: ``torch._dynamo.OptimizedModule._orig_mod``.

    The compiler is not imported for this (0.4 s): without it there are no such modules.
    """
    dynamo = sys.modules.get("torch._dynamo")
    found = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return module.get_submodule("_orig_mod") if found else None


def beneath_compiled(function: Any) -> Any:
    """Return what ``torch.compile(function)`` compiles, or None: its attribute ``_torchdynamo_orig_callable``.

    Around functions of torch itself the compiler puts another one, of ``torch._dynamo.external_utils``.
    """
    beneath: Any = getattr(function, "_torchdynamo_orig_callable", None)
    file = getattr(getattr(beneath, "__code__", None), "co_filename", None)
    between = sys.modules.get("torch._dynamo.external_utils")
    return beneath.__wrapped__ if between is not None and file == between.__file__ else beneath


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled: ``torch._dynamo.utils.counters``; imports no compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def forget_compiled() -> None:
    """Let everything compile again that this process compiled: ``torch.compiler.reset``; imports no compiler."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def mode_options(mode: str) -> dict[str, Any]:
    """Return what a mode of ``torch.compile`` stands for: ``torch._inductor.list_mode_options``."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def load_compiler() -> None:
    """Import ``torch._dynamo`` and ``torch._inductor``, which takes seconds."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")


def guards_of_every_flag() -> AbstractContextManager[Any]:
    """Within it new graphs check all of every parameter: ``torch._dynamo.config``; imports the compiler.

    Otherwise they check a parameter only if the dict that holds it was written to, which a flag is not.
    """
    from torch._dynamo import config

    patch: Any = config.patch
    return patch(skip_tensor_guards_with_matching_dict_tags=False)


def guards_every_flag() -> bool:
    """Whether :func:`guards_of_every_flag` holds for the whole program."""
    from torch._dynamo import config

    return not config.skip_tensor_guards_with_matching_dict_tags


def recompile_limit() -> int:
    """Return how many graphs of one code torch compiles before it falls back to eager: ``torch._dynamo.config``."""
    from torch._dynamo import config

    return config.recompile_limit


# Processors


def older_cpu_flags() -> dict[str, Any]:
    """Return whether the processor computes in bfloat16: ``torch.cpu._is_avx512_bf16_supported`` and its like."""
    return {"avx512_bf16": _torch.cpu._is_avx512_bf16_supported(), "amx_bf16": _torch.cpu._is_amx_tile_supported()}


# Several ranks


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks of DDP and their states, to read and to write: ``DDP._comm_hooks``."""
    return ddp._comm_hooks


def built_in_comm_hook(ddp: DistributedDataParallel) -> str | None:
    """Return the name of the hook that the reducer has, Python or built in: ``DDP._get_ddp_logging_data``."""
    return ddp._get_ddp_logging_data().get("comm_hook") or None


def lazy_gloo(store: Any, at: int, ranks: int, timeout: float) -> Any:
    """Return a ``ProcessGroupGloo`` whose ranks connect when they first talk; by default gloo connects all with all.

    Sets ``_timeout`` and ``_devices`` of ``ProcessGroupGloo._Options``; torch's stubs leave most of the class out.

    Args:
        store: Of these ranks alone.
        at: Place of this rank among them.
        ranks: How many they are.
        timeout: Seconds.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [gloo.create_default_device(lazy_init=True)]
    return gloo(store, at, ranks, options)


def place_of_optimizer(accelerator: Any, optimizer: Any) -> int:
    """Return the number under which ``Accelerator.save_state`` saves an optimizer: ``Accelerator._optimizers``."""
    return accelerator._optimizers.index(optimizer)


def build_again(ddp: DistributedDataParallel) -> None:
    """Let DDP make the reducer for the parameters that require a gradient now, without communication hooks.

    Calls ``DDP.__setstate__`` with the attributes that DDP has, the process group included, which ``__getstate__``
    leaves out, and no ``_comm_hooks``.
    """
    ddp.__setstate__(vars(ddp) | {"_comm_hooks": []})


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP in whose forward this is: ``DDP._get_active_ddp_module``, which is there for the compiler."""
    return DistributedDataParallel._get_active_ddp_module()


def exchange_of_a_pass(ddp: DistributedDataParallel) -> None:
    """Do all of a forward pass of DDP but calling the model: ``DDP._pre_forward`` and ``DDP._post_forward``."""
    ddp._post_forward(ddp._pre_forward(torch.zeros((), device="cpu")))


def all_reduce_hooks(unit: nn.Module) -> list[Any]:
    """Return the all-reduce hook of each group of parameters of an FSDP2 module, None without one.

    Reads ``FSDPModule._get_fsdp_state()._fsdp_param_groups`` (in torch 2.11 ``_fsdp_param_group``, one or None) and
    ``FSDPParamGroup._all_reduce_hook``. torch has no public way to ask for the hook; setting one silently replaces it.
    """
    return [group._all_reduce_hook for group in _parameter_groups(unit)]


def holds_back_gradients(unit: nn.Module) -> bool:
    """Whether an FSDP2 module does not average the gradients of a pass, or has such gradients of earlier passes.

    Reads ``FSDPParamGroup.reduce_grads`` and ``fsdp_params``, and the gradients in either of their places.
    """
    groups = _parameter_groups(unit)
    held = [param for group in groups for param in group.fsdp_params]
    whole = [param._unsharded_param for param in held if hasattr(param, "_unsharded_param")]
    waiting = any(p.unsharded_accumulated_grad is not None for p in held) or any(p.grad is not None for p in whole)
    return waiting or not all(group.reduce_grads and group.all_reduce_grads for group in groups)


def precision_of_unit(unit: Any) -> torch.dtype | None:
    """Return the type to which FSDP2 casts the parameters of a module; None without one: ``FSDPState._mp_policy``."""
    return unit._get_fsdp_state()._mp_policy.param_dtype


def in_forward_of_fsdp2(unit: Any) -> bool:
    """Whether the outermost FSDP2 module around a module, or itself, is in its forward: ``iter_forward_root``."""
    return unit._get_fsdp_state()._state_ctx.iter_forward_root is not None


def end_pass(unit: Any) -> None:
    """Let FSDP2 end a pass in which a forward or backward of a module raised, as if its backward pass had ended.

    Calls ``FSDPState._root_post_backward_final_callback`` and clears ``iter_forward_root``. torch before 2.13 has no
    ``FSDPModule.reset_iter_state``. After a whole pass, and for a module that was not the outermost, nothing changes.
    """
    state: Any = unit._get_fsdp_state()
    if state._is_root or state._state_ctx.iter_forward_root is state:
        state._root_post_backward_final_callback()
        state._state_ctx.iter_forward_root = None


def _parameter_groups(unit: Any) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
