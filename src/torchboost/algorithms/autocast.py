"""Mixed precision: the forward pass of a model under autocast, without changes to the loop."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm, AlreadyOn, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.forward import Forward, ForwardWatch, cover_forward, tensors_in, with_tensors
from torchboost.core.hardware import is_on_cpu
from torchboost.core.torch_private import (
    AnyConv,
    call_uncompiled,
    casts_keep_gradients,
    conv_padding,
    default_device,
    has_saved_tensor_hooks,
    inside_function_transform,
    is_reentrant_checkpoint,
    is_tracing,
    module_hooks,
    node_number,
    parameter_slots,
    precision_of_unit,
    sequence_number,
    tree_flatten,
    tree_unflatten,
)
from torchboost.core.wrapping import is_compiled, sharded_units, unwrap
from torchboost.errors import IncompatibleError, nearest, warn_no_effect
from torchboost.graph.copies import is_large, undisturbed
from torchboost.graph.norms import NormalizedLinear
from torchboost.tokens.reach import places_of_classes
from torchboost.tokens.state import State

_NAMES = {torch.bfloat16: ("BFloat16", "bfloat16"), torch.float16: ("Half", "float16")}
_HALF = tuple(_NAMES)
_PLAIN = (bool, int, float, str, type(None))
_CHEAP = 0.1
"""A head of at most this share of all multiplications costs little in float32."""
_FEW = 8
"""A head with this many inputs for each output, or more, costs less than the layers that compute its inputs."""
_LARGE = 128.0
"""Numbers of this size come in steps of 1 in bfloat16."""
_LAYERS = (nn.Linear, NormalizedLinear, AnyConv, nn.Bilinear)
_PRODUCTS = frozenset(
    {
        *("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Linear", "MkldnnLinear", "GroupedMm", "ScaledMm"),
        *("Convolution", "ConvolutionOverrideable", "MkldnnConvolution", "CudnnConvolution", "SlowConv3D"),
        *("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "CompiledFunction"),
    }
)
"""Nodes of the autograd graph. A compiled part counts as one product."""
_ATTENTION = "ScaledDotProduct"
_MOVING = frozenset(
    {
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "T", "Transpose", "Permute", "Squeeze"),
        *("Unsqueeze", "Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Unfold", "Expand", "Clone", "ToCopy"),
        *("Cat", "Stack", "Index", "Gather", "CopySlices", "Copy"),
    }
)
"""Nodes that move numbers and compute none."""
_MANY = object()


def autocast_forward(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    float32: Sequence[str] | None = None,
    float32_outputs: Sequence[str] = (),
) -> Attachment:
    """Run every forward of ``model`` under ``torch.autocast`` and return its outputs in float32.

    Outputs keep their containers (see :func:`~torchboost.core.forward.with_tensors`). Tensors in an object of another
    kind keep the precision that autocast gave them. Parameters, gradients and optimizer state do not change. The loss
    is computed by the caller on float32 outputs, outside autocast.

    The end of the model computes in float32, too: a head, a matrix product whose results reach an output without
    another product, if something is computed with its results, if they are large, if it has eight inputs or more for
    each output, or at most a tenth of all multiplications. Other heads compute in ``dtype`` and return float32. Before
    the first eager pass with gradients, a pass of a copy shows which modules these are. Until then, and if this pass is
    traced by a compiler, is inside a checkpoint or has arguments other than tensors and plain values, or the model is
    sharded, cannot be copied or has more than 1 GiB of parameters, the last layer in the order of the modules counts as
    the head.

    On the CPU, convolutions that oneDNN computes wrongly in bfloat16 compute in float32.

    The ``forward`` of this one instance is replaced by a function that calls the original. Forward hooks do not work:
    in a model compiled by ``nn.Module.compile()`` the hooks of the root are compiled separately from ``forward``, so
    entering autocast in them has no effect and the model silently runs in float32. The replaced ``forward`` is traced
    into the same graph, compiled before or after, in place or not, without graph breaks.

    Args:
        model: The model as the loop calls it. If there is a wrapper (DDP, ``torch.compile``), pass the wrapper.
        dtype: ``torch.bfloat16``, or ``torch.float16``, which needs a ``GradScaler`` in the loop.
        float32: Names of modules that compute in float32, as in ``named_modules`` of the bare model. None finds them.
        float32_outputs: Names of modules that compute in ``dtype`` and return float32. Read if ``float32`` is given.

    Returns:
        Its ``remove()`` restores the original ``forward``.

    Raises:
        TypeError: Not a module.
        ValueError: ``dtype`` is neither bfloat16 nor float16, or the model has no module of a given name.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> with autocast_forward(model):
        ...     model(torch.randn(3, 4)).dtype
        torch.float32
    """
    check_module(model)
    if dtype not in _HALF:
        raise ValueError(f"autocast to {dtype}: allowed are torch.bfloat16 and torch.float16; pass one of them.")
    heads = None if float32 is None else Heads(tuple(float32), tuple(float32_outputs))
    unknown = None if heads is None else _unknown_name(model, heads)
    if unknown is not None:
        raise ValueError(f"autocast: {unknown}")
    return _cover(model, dtype, heads, None)


def _cover(model: nn.Module, dtype: torch.dtype, heads: Heads | None, watch: ForwardWatch | None) -> Attachment:
    device_type = next((p.device.type for p in model.parameters()), default_device().type)
    ends = _Ends(model, device_type, heads)
    keeps = None if casts_keep_gradients() else False

    def under_autocast(forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if watch is not None:
            watch.called = True
        try:
            with torch.autocast(device_type, dtype, cache_enabled=keeps):
                outputs = ends.run(forward, module, args, kwargs)
        except (RuntimeError, TypeError) as error:  # torch raises these if precisions do not match
            _explain(error, dtype)
            raise
        return with_tensors(outputs, _to_float32)

    covers = [ends, cover_forward(model, under_autocast)]
    if dtype is torch.bfloat16:
        unsafe = _convolutions_unsafe_in_bfloat16(model)
        covers += [cover_forward(conv, _in_float32_if_unsafe, innermost=True) for conv in unsafe]
    return Attachment(*covers)


class _Ends(Attachment):
    """The covers of the heads. If these are not known, they are guessed until the first eager pass with gradients.

    From then on they do not change: a checkpoint computes a part of a pass again in the backward pass, and must find
    the same precisions.
    """

    def __init__(self, model: nn.Module, device_type: str, heads: Heads | None) -> None:
        super().__init__(undo=self._uncover)
        self._model, self._device_type = model, device_type
        self._known = heads is not None or isinstance(model, DataParallel)  # replicas run in threads
        self._covers = Attachment()
        self._cover(guessed_heads(model) if heads is None else heads)

    def run(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``forward``. If the heads are not known and this is an eager pass with gradients, find them first."""
        if not self._known and torch.is_grad_enabled() and module is self._model and not _is_traced():
            self._known = True
            heads = None if has_saved_tensor_hooks() else _heads_of_copy(unwrap(module), args, kwargs)
            if heads is not None:
                self._uncover()
                self._cover(heads)
        return forward(module, *args, **kwargs)

    def _uncover(self) -> None:
        self._covers.remove()

    def _cover(self, heads: Heads) -> None:
        modules = dict(unwrap(self._model).named_modules())
        arounds = dict.fromkeys(heads.cast, _returns_float32) | dict.fromkeys(heads.computed, self._in_float32)
        covered = [(modules[name], around) for name, around in arounds.items() if name in modules]
        self._covers = Attachment(
            *(cover_forward(module, around, innermost=True) for module, around in covered if _is_in_float32(module))
        )

    def _in_float32(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(self._device_type, enabled=False):
            return forward(module, *with_tensors(args, _to_float32), **with_tensors(kwargs, _to_float32))


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or is_tracing() or inside_function_transform()


def _heads_of_copy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Heads | None:
    """Return the heads that a pass of a copy shows, or None if the model cannot be copied or the copy cannot be run."""
    leaves, spec = tree_flatten((args, kwargs))
    plain = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
    if not plain or sharded_units(model) or is_large(model):
        return None  # an iterator among the arguments would lose a batch
    inputs = tree_unflatten([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    outside = State(model, inputs, places=places_of_classes(model.modules()))
    try:
        with undisturbed(model) as copied:
            for hooks in (hooks for module in copied.modules() for hooks in module_hooks(module)):
                hooks.clear()
            return find_heads(copied.train(model.training), *inputs)
    except Exception:  # of the user's forward, which raises it in the pass itself too
        return None
    finally:
        outside.restore()


def _returns_float32(forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
    return with_tensors(forward(module, *args, **kwargs), _to_float32)


def _is_in_float32(module: nn.Module) -> bool:
    """Whether autocast lowers all of a module, whose parameters may have been given another precision by the user."""
    return all(p.dtype is torch.float32 for p in module.parameters() if p.is_floating_point())


def _unknown_name(model: nn.Module, heads: Heads) -> str | None:
    known = dict(unwrap(model).named_modules())
    missing = next((name for name in (*heads.computed, *heads.cast) if name not in known), None)
    if missing is None:
        return None
    return f"the model has no module {missing!r}; give names of named_modules(). {nearest(missing, known)}".rstrip()


def _in_float32_if_unsafe(forward: Forward, module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    inputs = args[0] if args else kwargs["input"]
    if not _is_unsafe_in_bfloat16(module, inputs):
        return forward(module, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return forward(module, inputs.float(), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autocast(Algorithm):
    """Settings of :func:`autocast_forward`.

    Args:
        dtype: ``"bfloat16"``, or ``"float16"``, which needs a scaler in the target.
        float32: Names of modules that compute in float32. None finds them, see :func:`autocast_forward`.
        float32_outputs: Names of modules that return float32. Read if ``float32`` is given.
    """

    name: ClassVar[str] = "autocast"
    traits: ClassVar[Traits] = Traits(order=30, withdrawn=2, each_optimizer=True)

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    float32: tuple[str, ...] | None = None
    float32_outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r}: allowed are 'bfloat16' and 'float16'; choose one of them.")
        for name in ("float32", "float32_outputs"):
            names = getattr(self, name)
            if isinstance(names, str):
                raise ValueError(f"{name}={names!r}: allowed is a tuple of names; write ({names!r},).")
            if names is not None:
                object.__setattr__(self, name, tuple(names))  # JSON has lists only

    @property
    def rounding(self) -> float:
        """The rounding of bfloat16, also for float16, whose smallest numbers are lost."""
        return 2.0**-8

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that no parameter is in float32, the only precision that autocast lowers, or that FSDP2 lowers it."""
        if cast := _cast_by_fsdp2(model):
            return cast
        if any(parameter.dtype is torch.float32 for parameter in model.parameters()):
            return None
        return "no parameter is in float32, so there is nothing to lower"

    def check(self, target: Target) -> None:
        """Refuse float16 without a scaler, as small gradients would vanish, and names that the model does not have."""
        unknown = _unknown_name(target.model, self._heads or Heads())
        if unknown is not None:
            raise IncompatibleError(f"autocast: {unknown}")
        if self.dtype == "float16" and target.scaler is None and not target.scaler_follows:
            raise IncompatibleError(
                "autocast to float16 without a scaler: small gradients would become zero; pass "
                "scaler=torch.amp.GradScaler() to boost(...), network_auto_process_train(...) or Target(...), or "
                "choose dtype='bfloat16'."
            )

    def fitted(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """Find the modules that compute in float32 in one pass, unless they are given.

        If no output has a gradient, the settings do not change. A loop that computes under autocast to this
        precision already has nothing to gain.
        """
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        known = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if known and torch.get_autocast_dtype(device) is getattr(torch, self.dtype):
            return self.noting(AlreadyOn(f"the loop computes under torch.autocast to {self.dtype}"))
        heads = None if self.float32 is not None else find_heads(model, args, kwargs)
        if heads is None:
            return self
        return dataclasses.replace(self, float32=heads.computed, float32_outputs=heads.cast)

    @property
    def _heads(self) -> Heads | None:
        return None if self.float32 is None else Heads(self.float32, self.float32_outputs)

    def attach(self, target: Target) -> Attachment:
        """Replace the forward of the model.

        Warns:
            NoEffectWarning: FSDP2 casts the parameters itself, so nothing is attached. Or, after the first update: the
                forward of the model was not called.
        """
        if cast := _cast_by_fsdp2(target.model):
            warn_no_effect(f"autocast changes nothing: {cast}.")
            return Attachment()
        watch = ForwardWatch(self.name, target.model, target.optimizer)
        return _cover(target.model, getattr(torch, self.dtype), self._heads, watch).with_undo(watch.remove)


def _cast_by_fsdp2(model: nn.Module) -> str | None:
    """Return how FSDP2 lowers the precision of a model. Autocast would hand float32 to layers that it has cast."""
    dtype = next((d for unit in sharded_units(model) if (d := precision_of_unit(unit)) in _HALF), None)
    if dtype is None:
        return None
    return AlreadyOn(f"FSDP2 computes in {_NAMES[dtype][1]} itself, by its MixedPrecisionPolicy")


def _explain(error: Exception, dtype: torch.dtype) -> None:
    """Add a note to an error about a half precision: torch has no class for these, but its messages name the type."""
    message, add_note = str(error), getattr(error, "add_note", None)  # Python 3.10 has no notes
    if add_note and not isinstance(error, IncompatibleError) and any(name in message for name in _NAMES[dtype]):
        add_note(
            f"torchboost runs this forward under torch.autocast to {dtype}. If the model mixes precisions itself, turn "
            "it off: set extra.autocast = false in the configuration, or leave out Autocast. Or compute the part that "
            "fails under torch.autocast(device_type, enabled=False)."
        )


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


class Heads(NamedTuple):
    """The modules, by name, that must be in float32 for the outputs of a model to be exact.

    Those in ``computed`` compute in it: heads that cost little, have few outputs, or have results that are large or
    computed with. The empty name is the whole model, if it computes the product itself. Results of those in ``cast``,
    which are too expensive for that, are only cast.
    """

    computed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


def find_heads(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Heads | None:
    """Run one pass of the bare model with gradients, and return its heads, or None if no output has a gradient.

    Buffers and random generators move as in any pass.
    """
    bare = unwrap(model)
    with _HeadSearch(bare) as search, torch.enable_grad():
        outputs = call_uncompiled(bare, *args, **kwargs)
    return search.heads(outputs)


def guessed_heads(model: nn.Module) -> Heads:
    """Return the last layer in the order of the modules as the head, without a pass."""
    bare = unwrap(model)
    sizes = {name: _entries(module) for name, module in bare.named_modules() if isinstance(module, _LAYERS)}
    if not sizes:
        return Heads()
    name, size = list(sizes.items())[-1]
    cheap = size <= _CHEAP * sum(sizes.values()) or _has_few_outputs(bare.get_submodule(name))
    return Heads((name,)) if cheap else Heads(cast=(name,))


class _HeadSearch(ExitStack):
    """Watches one pass of a bare model inside the ``with`` block. Compiled parts run eagerly in it.

    Mechanism: temporary hooks note which operations of the autograd graph were recorded in which module. Then the graph
    is followed from the outputs to the first products. Tied weights, several heads and products outside of any layer
    (``x @ w``) are found, too.

    Limit: operations inside a checkpoint with ``use_reentrant=True`` are not in the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._stack = [""]
        self._starts, self._names = [0], [""]
        self._work: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        if is_compiled(self._model):
            self.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in self._model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):  # pyright: ignore[reportPrivateImportUsage]
                self.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                self.enter_context(module.register_forward_hook(partial(self._leave, name), always_call=True))
        return self

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)
        self._mark()

    def _leave(self, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._stack[-1] != name:  # a hook before this one raised an exception
            return
        self._stack.pop()
        self._mark()
        self._work[name] += _multiplications(module, outputs)

    def _mark(self) -> None:
        self._starts.append(sequence_number())
        self._names.append(self._stack[-1])

    def heads(self, outputs: Any) -> Heads | None:
        """Return the heads, from the outputs of the pass."""
        ends, products = self._reached([tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None])
        if not ends:
            return None
        total = sum(self._work[name] for name in products)
        modules = dict(self._model.named_modules())
        computed, cast = [], []
        for name, behind in ends.items():
            share = sum(self._work[other] for other in products if _is_inside(other, name)) / total if total else 1.0
            cheap = share <= _CHEAP or _has_few_outputs(modules[name])
            (computed if behind or (name and cheap) else cast).append(name)
        return Heads(tuple(sorted(computed)), tuple(sorted(name for name in cast if name)))

    def _reached(self, outputs: list[Tensor]) -> tuple[dict[str, bool], set[str]]:
        """Return each head and whether its results are large or computed with, and the owners of all products.

        A computation that leads to a loss, an output without dimensions, does not count: there a cast is enough.
        """
        ends: dict[str, bool] = {}
        nodes: dict[Any, None] = dict.fromkeys(tensor.grad_fn for tensor in outputs)
        unread = list(nodes)
        while unread:
            after = [node for node, _ in unread.pop().next_functions if node is not None and node not in nodes]
            nodes |= dict.fromkeys(after)
            unread += after
        products = {self._owner(node) for node in nodes if _is_product(node)}
        seen: set[Any] = set()
        waiting: list[tuple[Any, Any, bool]] = [
            (tensor.grad_fn, _MANY if _is_large(tensor) else None, tensor.ndim == 0) for tensor in outputs
        ]
        while waiting:
            entry = waiting.pop()
            node, by, loss = entry
            if entry in seen or is_reentrant_checkpoint(node):
                continue
            seen.add(entry)
            if _is_product(node):
                owner = self._owner(node)
                alone = by is owner and not any(_is_inside(other, owner) for other in products - {owner})
                ends[owner] = ends.get(owner, False) or not (loss or by is None or (alone and owner))
                continue
            if _kind(node) not in _MOVING:
                owner = self._owner(node)
                by = owner if by is None or by is owner else _MANY
            waiting += [(after, by, loss) for after, _ in node.next_functions if after is not None]
        return ends, products

    def _owner(self, node: Any) -> str:
        """Return the innermost module that was running when an operation was recorded."""
        return self._names[bisect_right(self._starts, node_number(node)) - 1]


def _kind(node: Any) -> str:
    return node.name().rpartition("Backward")[0]


def _is_product(node: Any) -> bool:
    kind = _kind(node)
    return kind in _PRODUCTS or kind.startswith(_ATTENTION)


def _is_inside(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def _has_few_outputs(module: nn.Module) -> bool:
    if isinstance(module, AnyConv):
        return module.in_channels >= _FEW * module.out_channels
    return isinstance(module, nn.Linear) and module.in_features >= _FEW * module.out_features


def _is_large(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.numel() > 0 and bool(tensor.detach().abs().max() >= _LARGE)


def _entries(module: nn.Module) -> int:
    """Return the size of the matrices of a module itself."""
    parameters = [p for p in parameter_slots(module).values() if p is not None]
    return sum(p.numel() for p in parameters if not isinstance(p, nn.parameter.UninitializedParameter) and p.ndim > 1)


def _multiplications(module: nn.Module, outputs: Any) -> float:
    entries = 0 if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else _entries(module)
    tensors = tensors_in(outputs)
    if not entries or not tensors or not tensors[0].ndim:
        return 0.0
    channels = tensors[0].shape[1 if isinstance(module, AnyConv) and tensors[0].ndim > 1 else -1]
    return entries * tensors[0].numel() / max(1, channels)


def _convolutions_unsafe_in_bfloat16(model: nn.Module) -> Iterator[AnyConv]:
    """Yield the convolutions on the CPU that oneDNN computes wrongly in bfloat16 for some inputs."""
    for module in model.modules():
        if not isinstance(module, AnyConv) or max(module.kernel_size) == 1 or not is_on_cpu(module):
            continue
        if any(conv_padding(module)) or _has_stride(module):
            yield module


def _is_unsafe_in_bfloat16(module: AnyConv, inputs: Tensor) -> bool:
    """Whether oneDNN computes a convolution of these inputs wrongly in bfloat16.

    It does in two situations. For a transposed convolution, read outputs for inputs, and the other way round:

    - In some dimension the kernel is wider than the inputs before padding, such as a kernel of 3 on a depth of 2.
    - The stride is above 1 and the last dimension of the outputs has one entry.

    The gradient of the kernel then reads memory that was never written, and so does the forward pass in three
    dimensions. The results are of any size, infinity included, and differ from run to run. Processors with AVX512-BF16
    or AMX have such kernels. Source: https://github.com/pytorch/pytorch/issues/169688, found in the oneDNN of torch
    2.13.
    """
    kernels, strides = module.kernel_size, module.stride
    reaches = [dilation * (kernel - 1) for dilation, kernel in zip(module.dilation, kernels, strict=True)]
    padding = [sum(conv_padding(module)[at : at + 2]) for at in range(2 * len(kernels) - 2, -1, -2)]
    given = list(inputs.shape[-len(kernels) :])
    if module.transposed:
        few, more = given[-1], module.output_padding
        sizes = zip(given, strides, padding, reaches, more, strict=True)
        given = [(size - 1) * stride - pad + reach + 1 + extra for size, stride, pad, reach, extra in sizes]
    else:
        few = (given[-1] + padding[-1] - reaches[-1] - 1) // strides[-1] + 1
    wider = any(reach >= size for reach, size in zip(reaches, given, strict=True))
    return wider or (_has_stride(module) and few == 1)


def _has_stride(module: AnyConv) -> bool:
    return module.stride[-1] > 1 and module.kernel_size[-1] > 1
