"""Look at the next training call of a model, and limit the time of a block."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.forward import intercept, tensors_in
from torchboost.core.torch_private import (
    Interceptor,
    compiled_call,
    has_saved_tensor_hooks,
    inside_function_transform,
    inside_mode,
    interceptor_of,
    is_tracing,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a training call."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Gate(Interceptor):
    """Stands in front of a model and shows each call to ``meet``, until that returns True. The call then runs.

    While ``meet`` runs, calls from other threads wait, and calls from its own thread pass. If it raises, the gate
    remains. Copies, pickles and the replicas of ``DataParallel`` do not have it, and it goes with the object of
    ``meet``.

    Args:
        model: The bare model. An interceptor that answered its calls is replaced. If it is compiled in place, it
            remains compiled.
        meet: A method, called with the arguments of a call before it runs. Its object is not kept alive.
        keep: An object that lives as long as the gate.

    Cost: one call of a Python function per call until then, and ``meet``.
    """

    def __init__(self, model: nn.Module, meet: Callable[[Call], bool], *, keep: object = None) -> None:
        self._model, self._meet, self._keep = model, weakref.WeakMethod(meet), keep
        self._lock, self._meets = threading.RLock(), False
        self.compiled = compiled_call(model)
        self._handle = intercept(model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model."""
        if torch.compiler.is_compiling():
            return self.pass_on(self._model, *args, **kwargs)
        with self._lock:
            if self._stands and not self._meets:
                self._meets = True
                try:
                    meet = self._meet()
                    if meet is None or meet((args, kwargs)):
                        self.remove()
                finally:
                    self._meets = False
        if self._stands:
            return self.pass_on(self._model, *args, **kwargs)
        return self._model(*args, **kwargs)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the block runs, calls from its thread pass unseen."""
        with self._lock:
            before, self._meets = self._meets, True
            try:
                yield
            finally:
                self._meets = before

    def remove(self) -> None:
        """Restore the previous state. A second call does nothing."""
        self._handle.remove()

    @property
    def _stands(self) -> bool:
        return interceptor_of(self._model) is self


def is_training_call(model: nn.Module, call: Call) -> bool:
    """Whether a call computes gradients in training mode, on plain tensors, outside compilers and tracers.

    A call inside ``torch.utils.checkpoint``, whose hooks would count the tensors that a trial saves, is not one.
    Neither is a call inside a transform of ``torch.func`` or a mode such as ``FlopCounterMode``, which would count the
    passes of a trial, or with other tensors in place of the parameters.
    """
    if torch.compiler.is_compiling() or is_tracing() or not torch.is_grad_enabled() or not model.training:
        return False
    if has_saved_tensor_hooks() or inside_function_transform() or inside_mode():
        return False
    if not all(isinstance(parameter, nn.Parameter) for parameter in model.parameters()):
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors_in(list(call)))


def shapes_of(call: Call) -> list[tuple[torch.Size | int, torch.dtype]]:
    """Return shape and precision of each tensor of a call."""
    return [(t.shape if not t.is_nested else t.numel(), t.dtype) for t in tensors_in(list(call))]


class TimeUp(BaseException):
    """The time of a block is over. Not an ``Exception``, so that no handler inside the block catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after ``seconds``, as Ctrl-C would: between two instructions of Python.

    The switches of torch for this thread, gradients and autocast, are then as before. A kernel or a compiler that runs
    at that moment is completed first. The limit needs the signal ``SIGALRM``. It has no effect outside the main thread,
    on Windows, or if the program uses this signal itself.

    Raises:
        TimeUp: The time is over.
    """
    on_main = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    is_default = on_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    if not is_default or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    running, filters = True, list[Any]()

    def interrupt(*_: Any) -> None:
        if running:
            # A backward pass that a compiler traces is not at fault. Not earlier: whenever filters are added, Python
            # shows all warnings again.
            warnings.filterwarnings("ignore", "Error detected in")
            filters.append(warnings.filters[0])
            raise TimeUp

    outside = sys.exc_info()[1]
    restore, before = _modes(), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        try:
            yield
        finally:
            running = False
    except TimeUp as error:
        restore()
        passed = error.__context__  # Ctrl-C on its way out of the block is not lost if the time is over meanwhile
        while passed not in (None, outside):
            if isinstance(passed, (KeyboardInterrupt, SystemExit)):
                raise passed from None
            passed = passed.__context__
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        present: Any = warnings.filters
        for each in filters:
            if each in present:  # unless it came within a block that restores them
                present.remove(each)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block, which puts something back. It has an effect in the main thread only.

    Raises:
        KeyboardInterrupt: At the end of the block, or whatever the program does at Ctrl-C.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *details: came.append(details))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def _modes() -> Callable[[], None]:
    """Return a function that restores the present switches of ``no_grad`` and ``autocast`` for this thread.

    They switch in Python, so an interrupt can come after the switch and before the block that switches back.
    """
    torch.autocast_increment_nesting()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    grad, nesting = torch.is_grad_enabled(), torch.autocast_decrement_nesting()

    def restore() -> None:
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > nesting:  # at the last one, torch drops its casts of the weights
            pass
        torch.clear_autocast_cache()

    return restore
