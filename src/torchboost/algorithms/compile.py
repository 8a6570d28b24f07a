"""``torch.compile`` in place and reversible, with a count of the compiled graphs."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, AlreadyOn, Attachment, Form, Target, Traits
from torchboost.core.forward import tensors_in, with_tensors
from torchboost.core.hardware import unsafe_channels_last
from torchboost.core.torch_private import (
    call_uncompiled,
    compiled_call,
    compiled_graphs,
    following_flags,
    forget_compiled,
    inside_compiled,
    interceptor_of,
    is_view,
    load_compiler,
    marked_as_following,
    mode_options,
    set_compiled_call,
)
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, warn_no_effect

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs, in memory that the next replay overwrites."""


class Compiled(Attachment):
    """A compiled model. After ``remove()`` it runs eagerly again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(undo=self._release)
        self._model = model
        self._compiled_call = compiled_call(model)
        self._graphs_before = compiled_graphs()

    @property
    def graphs(self) -> int:
        """Graphs compiled in this process since the model was handed to the compiler. Grows with each recompilation."""
        return max(0, compiled_graphs() - self._graphs_before)

    def _release(self) -> None:
        if compiled_call(self._model) is not self._compiled_call:
            return
        waiting = interceptor_of(self._model)
        if waiting is None:
            set_compiled_call(self._model, None)
        else:
            waiting.compiled = None


@dataclass(frozen=True, kw_only=True)
class Compile(Algorithm):
    """Compile the model in place, inside DDP if it is wrapped: same object, same ``state_dict`` keys.

    Each new situation (shape, ``train()`` against ``eval()``, another set of ``requires_grad`` flags) compiles one more
    graph, in seconds to minutes. ``Compiled.graphs`` counts them. After 8 of the same code torch falls back to eager.

    Limit: torch cannot differentiate the gradients of compiled code again. So a call with an input that is a leaf and
    requires a gradient, as in a gradient penalty, runs eagerly. If a loop differentiates other gradients twice, torch
    raises in the first step that does so. The model then runs eagerly from the next call on, with a warning.
    ``backward(retain_graph=True)`` raises if the backward pass writes into tensors that forward has saved.

    CUDA graphs (``"reduce-overhead"``, ``"max-autotune"``) replay into the same memory at each call. Outputs are copied
    out of it, and so are gradients that the parameters still hold at the next call or at the removal. Outputs in
    objects that :func:`~torchboost.core.forward.with_tensors` does not search, and gradients that the loop keeps
    elsewhere, are overwritten. If shapes change, code compiled for changing shapes runs without CUDA graphs.

    Args:
        mode: Of ``torch.compile``. None is its default.
        dynamic: None specialises on shapes first and generalises on the second one. False always specialises.
        fullgraph: Raise if the model cannot be one graph, instead of splitting it.
        backend: ``"inductor"``. ``"eager"`` and ``"aot_eager"`` trace without generating code, for tests.
    """

    name: ClassVar[str] = "compile"
    traits: ClassVar[Traits] = Traits(order=90, each_optimizer=True)

    mode: Mode | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode={self.mode!r} with backend={self.backend!r}: only 'inductor' has modes; drop one.")

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model is already compiled, or that oneDNN would crash on one of its convolutions."""
        part = _compiled_part(model)
        return AlreadyOn(f"the model is already compiled ({part})") if part else self._unsafe(model)

    def check(self, target: Target) -> None:
        """Refuse a target that :meth:`attach` cannot work on.

        Raises:
            IncompatibleError: The model or a part of it is already compiled, inductor finds no C++ compiler for CPU
                code, oneDNN would crash on a convolution of the compiled model, or the model is
                a sharded ``nn.Sequential``.
        """
        model, inner = target.model, unwrap(target.model)
        if part := _compiled_part(model):
            raise IncompatibleError(
                f"compile: the model is already compiled ({part}); leave out one of the two compilations."
            )
        if unsafe := self._unsafe(model):
            raise IncompatibleError(f"compile: {unsafe}; leave compile out.")
        self._check_compiler(model)
        if _is_library_code(inner) and wrapper_of(inner) == "fully_shard":
            raise IncompatibleError(
                f"compile: the sharded root is torch's own {type(inner).__mro__[2].__name__}, in which the hooks of "
                "fully_shard leave no frame to compile; compile its blocks before sharding, or wrap it in a module "
                "with its own forward."
            )

    def forms(self, device: torch.device) -> tuple[Form, ...]:
        """Return CUDA graphs and the search for faster kernels, on CUDA devices."""
        if device.type != "cuda" or self.backend != "inductor":
            return ()
        if self.mode in (None, "default"):
            graphs = self._in_mode("reduce-overhead", 1.5, 1.3, of_host=True)
            return graphs, self._in_mode("max-autotune-no-cudagraphs", 8.0, 1.15)
        return (self._in_mode("max-autotune", 8.0, 1.15),) if self.mode == "reduce-overhead" else ()

    def _in_mode(self, mode: Mode, price: float, best_ratio: float, *, of_host: bool = False) -> Form:
        return Form(replace(self, mode=mode), price, best_ratio, of_host)

    def forget(self) -> None:
        """Free the memory of CUDA graphs, which the compiler keeps. Everything compiles once more."""
        if self.mode in _GRAPHS:
            forget_compiled()

    def load(self) -> None:
        """Import the compiler, which must not be interrupted: it registers operators while it is imported."""
        load_compiler()

    def attach(self, target: Target) -> Compiled:
        """Hand the model to the compiler, which compiles at the first call."""
        # The forward of DDP runs uncompiled in any case. Inside it the compiler splits graphs at gradient buckets.
        inner = unwrap(target.model)
        options: dict[str, Any] = {"dynamic": self.dynamic, "fullgraph": self.fullgraph, "backend": self.backend}
        graphs = self.mode in _GRAPHS and any(parameter.is_cuda for parameter in inner.parameters())
        if graphs and self.mode is not None:
            options["options"] = {**mode_options(self.mode), "triton.cudagraph_skip_dynamic_graphs": True}
        elif self.mode is not None:
            options["mode"] = self.mode
        waiting = interceptor_of(inner)
        if _is_library_code(inner):
            _compile_from_outside(inner, options)
        else:
            inner.compile(**options)
        compiled = _eager_if_twice(inner, compiled_call(inner))
        kept = _OutOfGraphs(inner, compiled) if graphs else None
        compiled = compiled if kept is None else kept.call
        if waiting is not None:
            waiting.compiled = compiled
        set_compiled_call(inner, compiled if waiting is None else waiting)
        made = Compiled(inner)
        return made if kept is None else made.with_undo(kept.copy_gradients)

    def _unsafe(self, model: nn.Module) -> str | None:
        """Inductor runs convolutions channels-last."""
        return unsafe_channels_last(model) if self.backend == "inductor" else None

    def _check_compiler(self, model: nn.Module) -> None:
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        compiler = os.environ.get("CXX", "cl" if os.name == "nt" else "g++")
        if self.backend == "inductor" and on_cpu and not (shutil.which(compiler) or shutil.which("clang++")):
            raise IncompatibleError(
                f"compile: inductor needs a C++ compiler on CPU and found no {compiler!r}; install one or set CXX."
            )


def _eager_if_twice(model: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of the model that runs eagerly if gradients of it are, or may be, differentiated again."""
    twice: list[bool] = []
    run = following_flags(compiled)

    @marked_as_following
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if twice or any(map(_is_asked_for, tensors_in([args, kwargs]))):
            return call_uncompiled(model, *args, **kwargs)
        outputs = run(*args, **kwargs)
        for output in tensors_in(outputs):
            if output.requires_grad:
                output.register_hook(look)
        return outputs

    def look(gradient: Tensor) -> None:
        if torch.is_grad_enabled() and not twice:
            twice.append(True)
            warn_no_effect(
                "compile: a backward pass ran with create_graph=True, which torch.compile does not support. The model "
                "runs eagerly from its next call on. If torch raises in this step, leave compile out (extra.compile = "
                "false)."
            )

    config: Any = getattr(compiled, "get_compiler_config", None)
    if config is not None:  # others ask it for CUDA graphs
        vars(call)["get_compiler_config"] = config
    return call


class _OutOfGraphs:
    """Copies tensors that the loop can see out of the memory of CUDA graphs, which the next call overwrites.

    A gradient is copied in front of the next call, since most loops have dropped it by then. A copy that the backward
    pass adds to is not copied again.
    """

    def __init__(self, model: nn.Module, compiled: Callable[..., Any]) -> None:
        self._model, self._compiled = model, compiled
        self._copies: dict[int, weakref.ref[Tensor]] = {}

    @marked_as_following
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model."""
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        self.copy_gradients()
        given = {id(tensor) for tensor in tensors_in([args, kwargs])}

        def copied(tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in given or isinstance(tensor, nn.Parameter) else tensor.clone()

        return with_tensors(self._compiled(*args, **kwargs), copied)

    def copy_gradients(self) -> None:
        """Copy the gradients that the parameters hold. Views, such as those into the buckets of DDP, are elsewhere."""
        for parameter in self._model.parameters():
            gradient = parameter.grad
            known = self._copies.get(id(parameter))
            if gradient is None or is_view(gradient) or (known is not None and known() is gradient):
                continue
            parameter.grad = gradient.clone()
            self._copies[id(parameter)] = weakref.ref(parameter.grad)


def _is_asked_for(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _compiled_part(model: nn.Module) -> str | None:
    """Name the part of ``model`` that is compiled already, or return None."""
    for name, module in model.named_modules():
        where = f"at '{name}'" if name else "as a whole"
        if compiled_call(module) is not None:
            return f"nn.Module.compile {where}"
        if inside_compiled(module) is not None:
            return f"torch.compile {where}"
    return None


def _is_library_code(model: nn.Module) -> bool:
    """Whether ``forward`` is torch's own (``nn.Sequential``): the compiler skips such a frame when it comes first."""
    return getattr(model.forward, "__func__", type(model).forward).__module__.split(".")[:2] == ["torch", "nn"]


def _compile_from_outside(model: nn.Module, options: dict[str, Any]) -> None:
    """``nn.Module.compile`` for a root whose own frame the compiler would skip, so that the model ran uncompiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_uncompiled(model, *args, **kwargs)

    set_compiled_call(model, torch.compile(call, **options))
