"""Optimizers that wrap another one, share its groups and state, and refuse steps that pass them by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from torchboost.core.arguments import check_optimizer
from torchboost.core.torch_private import without_hooks
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError

__all__ = ["DirectSteps", "WrappingOptimizer"]


class WrappingOptimizer(Optimizer):
    """An optimizer that wraps ``opt`` and shares its parameter groups and state.

    Schedulers and scalers may drive either optimizer. Groups can be added to either, checkpoints loaded into either.

    Args:
        opt: The optimizer that updates the weights.

    Raises:
        TypeError: ``opt`` is not an optimizer.
    """

    copyable: bool = False
    """Whether a copy or a pickle does what the original does. Hooks on ``opt`` are not copied."""

    def __init__(self, opt: Optimizer) -> None:
        check_optimizer(opt, "opt")
        self._placeholders: dict[str, Any] = {}  # groups and state while torch's constructor runs
        super().__init__(opt.param_groups, opt.defaults)
        self._placeholders.clear()
        self.opt = opt

    def __getattr__(self, name: str) -> Any:
        """Return what only ``opt`` has, such as ``eval`` and ``train`` of a schedule-free rule."""
        if name.startswith("_") or "opt" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.opt, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of ``opt``, the same list."""
        return self._read("param_groups")

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: list[dict[str, Any]]
    ) -> None:
        self._write("param_groups", value)

    @property
    def state(self) -> Any:
        """The state of ``opt``, the same mapping."""
        return self._read("state")

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._write("state", value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step ``opt``."""
        return self.opt.step(closure) if closure is not None else self.opt.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``opt``.

        Raises:
            TypeError, ValueError: As raised by ``opt``; nothing was added.
        """
        if "opt" in self.__dict__:
            self.opt.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``opt``, which ``opt`` can load, plus the state of this class under a separate key."""
        return {**self.opt.state_dict(), "front": self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of ``opt`` alone. The latter drops gradients that wait for an update."""
        rest = {key: value for key, value in state_dict.items() if key != "front"}
        if "front" in state_dict:
            self._load_own_state(state_dict["front"])
        else:
            self._restart()
        self.opt.load_state_dict(rest)

    def __getstate__(self) -> dict[str, Any]:
        if not self.copyable:
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled, because it works through hooks on the optimizer "
                "that it wraps. Copy that optimizer ('opt') and wrap the copy. For checkpoints use state_dict()."
            )
        # Hooks are not copied, as in torch; a learning-rate scheduler replaces 'step' on the instance.
        return {key: value for key, value in without_hooks(self.__dict__).items() if key != "step"}

    def _read(self, name: str) -> Any:
        return getattr(self.opt, name) if "opt" in self.__dict__ else self._placeholders[name]

    def _write(self, name: str, value: Any) -> None:
        if "opt" in self.__dict__:
            setattr(self.opt, name, value)
        else:
            self._placeholders[name] = value

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        pass

    def _restart(self) -> None:
        """Drop what belongs to the weights before a checkpoint of ``opt`` alone."""


class DirectSteps:
    """Refuse steps of a wrapped optimizer unless the wrapping optimizer makes them.

    The wrapped optimizer keeps this object alive, and with it the wrapping one.

    Args:
        behind: The wrapped optimizer. If it wraps another optimizer itself, the steps of that one are refused.
        front: The wrapping optimizer, which must be stepped instead.
        instead: The error message: what was found, and what to do.
    """

    def __init__(self, behind: Optimizer, front: Optimizer, instead: str) -> None:
        self._front, self._instead = front, instead
        self._allowed = False
        self._handle = hookable(behind).register_step_pre_hook(self._refuse)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow steps of the wrapped optimizer inside the context."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    def remove(self) -> None:
        """Allow direct steps of the wrapped optimizer again."""
        self._handle.remove()

    def _refuse(self, *_: Any) -> None:
        if not self._allowed:
            raise IncompatibleError(self._instead)
