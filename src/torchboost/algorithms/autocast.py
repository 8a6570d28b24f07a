"""Mixed precision: the forward pass of a model under autocast, without changes to the loop."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.forward import ForwardWatch, cover_forward, is_cover, tensors_in, with_tensors
from torchboost.core.torch_private import (
    default_device,
    has_saved_tensor_hooks,
    inside_function_transform,
    is_tracing,
    precision_of_unit,
)
from torchboost.core.wrapping import sharded_units, unwrap
from torchboost.errors import IncompatibleError, NoEffectWarning, nearest
from torchboost.graph.heads import Heads, HeadSearch, find_heads, guessed_heads
from torchboost.graph.unsafe_convolutions import convolutions_unsafe_in_bfloat16, is_unsafe_in_bfloat16

__all__ = ["Autocast", "autocast_forward"]

_NAMES = {torch.bfloat16: ("BFloat16", "bfloat16"), torch.float16: ("Half", "float16")}
_HALF = tuple(_NAMES)


def autocast_forward(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    float32: Sequence[str] | None = None,
    float32_outputs: Sequence[str] = (),
) -> Attachment:
    """Run every forward of ``model`` under ``torch.autocast`` and return its outputs in float32.

    Outputs keep their containers (see :func:`~torchboost.core.forward.with_tensors`); tensors in an
    object of another kind stay in the precision that autocast gave them.

    Matrix products and convolutions read ``dtype``; reductions that need it stay in float32; parameters,
    gradients and optimizer state stay as they are. Each weight is cast once per forward (autocast's cache).
    The loss is computed by the caller on float32 outputs, outside autocast.

    The end of the model computes in float32, too: in bfloat16 a sigmoid is exactly 1 from a logit of 6.5 on, which has
    no gradient, probabilities do not sum to 1, and numbers near 500 come in steps of 2. So a head, a matrix product
    whose results reach an output without another product, computes in float32 if something is computed with its
    results, if they are large, if it has eight inputs or more for each output, or at most a tenth of all
    multiplications. Other heads, such as one over a large vocabulary whose
    results are returned as they are, or enter a loss inside the model, stay in ``dtype`` and return float32. The first
    eager pass with gradients shows which modules these are (:func:`~torchboost.graph.heads.find_heads`). Until then,
    and if a compiler traces the first pass, the last layer in the order of the modules counts as the head.

    On the CPU, a strided convolution whose outputs have one entry in the last dimension computes in float32, because
    oneDNN computes its gradient wrongly in bfloat16
    (:func:`~torchboost.graph.unsafe_convolutions.is_unsafe_in_bfloat16`).

    The ``forward`` of this one instance is replaced by a function that calls the original. Forward hooks do not work:
    in a model compiled by ``nn.Module.compile()`` the hooks of the root are compiled separately from ``forward``, so
    entering autocast in them has no effect and the model silently runs in float32. The replaced ``forward`` is traced
    into the same graph, compiled before or after, in place or not, without graph breaks.

    Args:
        model: The model as the loop calls it. If there is a wrapper (DDP, ``torch.compile``), pass the wrapper.
        dtype: ``torch.bfloat16``, or ``torch.float16``, which needs a ``GradScaler`` in the loop.
        float32: Names of modules that compute in float32, as in ``named_modules`` of the bare model; None finds them.
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

    def under_autocast(
        forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if watch is not None:
            watch.called = True
        try:
            with torch.autocast(device_type, dtype):
                outputs = ends.run(forward, module, args, kwargs)
        except (RuntimeError, TypeError) as error:  # torch raises these if precisions do not match
            _explain(error, dtype)
            raise
        return with_tensors(outputs, _to_float32)

    covers = [ends, cover_forward(model, under_autocast)]
    if dtype is torch.bfloat16:
        unsafe = convolutions_unsafe_in_bfloat16(model)
        covers += [cover_forward(conv, _in_float32_if_unsafe, innermost=True) for conv in unsafe]
    return Attachment(*covers)


class _Ends(Attachment):
    """The covers of the heads. If these are not known, they are guessed until a pass shows them.

    A checkpoint computes a part of a pass again in the backward pass, and must find the same precisions. So covers
    change in front of a pass, if the backward pass of each earlier one has begun or never will.

    Args:
        model: As the loop calls it.
        device_type: Of its parameters.
        heads: None if they are not known.
    """

    def __init__(self, model: nn.Module, device_type: str, heads: Heads | None) -> None:
        super().__init__(undo=self._uncover)
        self._model, self._device_type = model, device_type
        self._known = heads is not None or isinstance(model, DataParallel)  # replicas run in threads
        self._heads: Heads | None = None
        self._open: list[weakref.ref[_Open]] = []
        self._covers: list[Attachment] = []
        self._cover(guessed_heads(model) if heads is None else heads)

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``forward``. If the heads are not known and this is an eager pass with gradients, find them."""
        # A cover beneath, such as that of a frozen prefix, may look at the hooks that a search sets.
        if self._known or torch.compiler.is_compiling() or is_cover(forward) or not self._is_usual(module):
            return forward(module, *args, **kwargs)
        if self._heads is not None:
            self._use(self._heads)
        if self._known or not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        if self._heads is None:
            with HeadSearch(module) as search:
                outputs = forward(module, *args, **kwargs)
            self._heads = search.heads(outputs)
        else:
            outputs = forward(module, *args, **kwargs)
        self._open += [_Open.of(output) for output in tensors_in(outputs) if output.requires_grad]
        return outputs

    def _use(self, heads: Heads) -> None:
        """Cover these heads, unless an earlier pass has still to go backward or this one is inside a checkpoint."""
        self._open = [ref for ref in self._open if (one := ref()) is not None and not one.begun]
        if not self._open and not has_saved_tensor_hooks():
            self._known = True
            self._uncover()
            self._cover(heads)

    def _is_usual(self, module: nn.Module) -> bool:
        return module is self._model and not (is_tracing() or inside_function_transform())

    def _cover(self, heads: Heads) -> None:
        modules = dict(unwrap(self._model).named_modules())
        for names, around in ((heads.computed, self._in_float32), (heads.cast, _returns_float32)):
            covered = [modules[name] for name in names if name in modules and _is_in_float32(modules[name])]
            self._covers += [cover_forward(module, around, innermost=True) for module in covered]

    def _in_float32(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with torch.autocast(self._device_type, enabled=False):
            return forward(module, *with_tensors(args, _to_float32), **with_tensors(kwargs, _to_float32))

    def _uncover(self) -> None:
        while self._covers:
            self._covers.pop().remove()


class _Open:
    """A pass that may still go backward. Only its graph holds this, as a hook of an output."""

    begun = False

    def __call__(self, gradient: Tensor) -> None:
        self.begun = True

    @classmethod
    def of(cls, output: Tensor) -> weakref.ref[_Open]:
        """Watch the backward pass through an output."""
        made = cls()
        output.register_hook(made)
        return weakref.ref(made)


def _returns_float32(forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
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


def _in_float32_if_unsafe(forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    inputs = args[0] if args else kwargs["input"]
    if not is_unsafe_in_bfloat16(module, inputs):
        return forward(module, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return forward(module, inputs.float(), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autocast(Algorithm):
    """Settings of :func:`autocast_forward`.

    Args:
        dtype: ``"bfloat16"``, or ``"float16"``, which needs a scaler in the target.
        float32: Names of modules that compute in float32; None finds them, see :func:`autocast_forward`.
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
        """That of bfloat16, also for float16, whose smallest numbers are lost."""
        return 2.0**-8

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that no parameter is in float32, the only precision that autocast lowers, or that FSDP2 lowers it."""
        if (cast := _cast_by_fsdp2(model)) is not None:
            return cast
        if any(parameter.dtype is torch.float32 for parameter in model.parameters()):
            return None
        return "no parameter is in float32, so there is nothing to lower"

    def check(self, target: Target) -> None:
        """Refuse float16 without a scaler, as small gradients would vanish, and names that the model does not have.

        Raises:
            IncompatibleError: float16 without a scaler, or a module of an unknown name.
        """
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

        If no output has a gradient, the settings stay as they are.
        """
        found = None if self.float32 is not None else find_heads(model, args, kwargs)
        if found is None:
            return self
        return dataclasses.replace(self, float32=found.computed, float32_outputs=found.cast)

    @property
    def _heads(self) -> Heads | None:
        return None if self.float32 is None else Heads(self.float32, self.float32_outputs)

    def attach(self, target: Target) -> Attachment:
        """Replace the forward of the model.

        Warns:
            NoEffectWarning: FSDP2 casts the parameters itself; nothing is attached. Or, after the first update: the
                forward of the model was not called.
        """
        if (cast := _cast_by_fsdp2(target.model)) is not None:
            warnings.warn(f"autocast changes nothing: {cast}.", NoEffectWarning, stacklevel=2)
            return Attachment()
        watch = ForwardWatch(self.name, target.model, target.optimizer)
        return _cover(target.model, getattr(torch, self.dtype), self._heads, watch).with_undo(watch.remove)


def _cast_by_fsdp2(model: nn.Module) -> str | None:
    """Return how FSDP2 lowers the precision of a model. Autocast would hand float32 to layers that it has cast."""
    found = next((d for unit in sharded_units(model) if (d := precision_of_unit(unit)) in _HALF), None)
    return None if found is None else f"FSDP2 computes in {_NAMES[found][1]} itself, by its MixedPrecisionPolicy"


def _explain(error: Exception, dtype: torch.dtype) -> None:
    """Add a note to an error about a half precision: torch has no class for these, but its messages name the type."""
    said, add_note = str(error), getattr(error, "add_note", None)  # Python 3.10 has no notes
    if add_note and not isinstance(error, IncompatibleError) and any(name in said for name in _NAMES[dtype]):
        add_note(
            f"torchboost runs this forward under torch.autocast to {dtype}. If the model mixes precisions itself, turn "
            "it off: set extra.autocast = false in the configuration, or leave out Autocast. Or compute the part that "
            "fails under torch.autocast(device_type, enabled=False)."
        )


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
