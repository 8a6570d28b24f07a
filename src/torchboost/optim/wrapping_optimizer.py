"""Optimizers around another one, that refuse steps which pass them by, and copies of optimizers over other groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.arguments import check_optimizer
from torchboost.core.torch_private import without_hooks
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.base import UpdateRule


class WrappingOptimizer(Optimizer):
    """An optimizer that wraps ``opt``, which updates the weights, and shares its parameter groups and state.

    Schedulers and scalers may drive either optimizer. Groups can be added to either, checkpoints loaded into either.
    """

    copyable: bool = False
    """Whether a copy or a pickle behaves like the original. Hooks on ``opt`` are not copied."""

    def __init__(self, opt: Optimizer) -> None:
        check_optimizer(opt, "opt")
        super().__init__([{"params": []}], opt.defaults)  # for its hooks, with groups and state of opt
        self.opt = opt

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only ``opt`` has, such as ``eval`` and ``train`` of a schedule-free rule."""
        if name.startswith("_") or "opt" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.opt, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of ``opt``, the same list."""
        return self.opt.param_groups

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: list[dict[str, Any]]
    ) -> None:
        if "opt" in self.__dict__:
            self.opt.param_groups = value

    @property
    def state(self) -> Any:
        """The state of ``opt``, the same mapping."""
        return self.opt.state

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "opt" in self.__dict__:
            self.opt.state = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step ``opt``."""
        return self.opt.step(closure) if closure is not None else self.opt.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``opt``."""
        if "opt" in self.__dict__:
            self.opt.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``opt``, which ``opt`` can load, plus the state of this class under a separate key."""
        return {**self.opt.state_dict(), "front": self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of ``opt`` alone. The latter drops gradients that wait for an update.

        Raises:
            ValueError: As raised by ``opt``, or the state of this class does not fit. Nothing was changed.
        """
        rest = {key: value for key, value in state_dict.items() if key != "front"}
        load = self._loading(state_dict["front"]) if "front" in state_dict else self._restart
        self.opt.load_state_dict(rest)
        load()

    def __getstate__(self) -> dict[str, Any]:
        if not self.copyable:
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled, because it works through hooks on the optimizer "
                "that it wraps. Copy that optimizer ('opt') and wrap the copy. For checkpoints use state_dict()."
            )
        # Hooks are not copied, as in torch. A learning-rate scheduler replaces 'step' on the instance.
        return {key: value for key, value in without_hooks(self.__dict__).items() if key != "step"}

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Check the result of :meth:`_own_state`, and return the function that loads it."""
        return lambda: None

    def _restart(self) -> None:
        """Drop state that belongs to the weights before a checkpoint of ``opt`` alone."""


class DirectSteps:
    """Refuse steps of ``behind``, with the message ``instead``, unless ``front``, which wraps it, makes them.

    If ``behind`` wraps another optimizer itself, the inner one's steps are refused. The optimizer whose steps are
    refused keeps this object alive, and with it ``front``.
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


def described_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return complete copies of the param groups, with schedules instead of their last value."""
    if isinstance(optimizer, UpdateRule):
        return optimizer.described_groups()
    return [dict(group) for group in optimizer.param_groups]


def regrouped(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return a copy of an optimizer over other groups, with its settings and its state, and without its hooks.

    Both share the state, so do not step both. ``groups`` are those of :func:`described_groups`, split, joined or
    reordered. Refuse an optimizer that wraps another one, or keeps parameters outside of its groups.
    """
    kind: Any = type(optimizer)
    own = ("step", "__getstate__")  # set on the instance by a scheduler, and by what fuses it
    kept = {name: value for name, value in without_hooks(vars(optimizer)).items() if name not in own}
    for name, value in () if isinstance(optimizer, UpdateRule) else kept.items():
        several = value if isinstance(value, (list, tuple, set)) and name != "param_groups" else (value,)
        if any(isinstance(one, Optimizer) or (isinstance(one, Tensor) and one.requires_grad) for one in several):
            raise IncompatibleError(
                f"{kind.__name__} keeps parameters or another optimizer in '{name}', outside of its groups, so "
                "it cannot get other groups. Use centralize_gradients(optimizer), which keeps the optimizer."
            )
    kept |= {"defaults": dict(optimizer.defaults), "param_groups": [], "state": defaultdict(dict, optimizer.state)}
    copy = kind.__new__(kind)
    copy.__setstate__(kept | ({"_schedules": []} if isinstance(optimizer, UpdateRule) else {}))
    copy.defaults = dict(optimizer.defaults)  # __setstate__ adds "differentiable", which torch's Muon does not have
    for group in groups:
        copy.add_param_group(dict(group))
    return copy


def change_entries(optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Tensor, str, Any], Any]) -> None:
    """Replace state entries of parameters in a state dict that torch has just made. The optimizer keeps its own.

    ``change`` gets a parameter, the name of an entry and the entry, and returns the new entry.
    """
    states = state_dict["state"]
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, index in zip(group["params"], saved["params"], strict=True):
            if index in states:
                states[index] = {key: change(param, key, value) for key, value in states[index].items()}
