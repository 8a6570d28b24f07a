"""The four nouns of the library, but for the plan: algorithm, target, attachment, and all attachments together.

An algorithm is a frozen value with two verbs. ``transform`` changes a model once, before it is wrapped,
sharded or compiled; ``attach`` hooks into a loop that is about to run and returns something that can be
removed and checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.arguments import check_module, check_optimizer, check_scaler
from torchboost.core.wrapping import hookable, wrapper_of
from torchboost.distributed.topology import Topology
from torchboost.errors import IncompatibleError

__all__ = [
    "Algorithm",
    "Attached",
    "Attachment",
    "MicroSteps",
    "Removable",
    "Scaler",
    "Target",
    "Traits",
    "attach_all",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the rest of the library must know about an algorithm without knowing the algorithm.

    Args:
        order: Attach order, lower first; hooks fire in attach order.
        replaces_optimizer: Whether ``attach`` puts another optimizer into the target.
        brings_scaler: Whether ``attach`` puts a scaler into the target.
        alone: Whether no other algorithm can work together with this one.
    """

    order: int = 50
    replaces_optimizer: bool = False
    brings_scaler: bool = False
    alone: bool = False


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that a training step uses.

    A scaler whose scale does not fall at each overflow says in an attribute ``overflowed`` whether the last
    :meth:`update` followed one; of others a step takes a lower scale for an overflow.
    """

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the loss times the scale."""
        ...

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place, and look for overflow."""
        ...

    def step(self, optimizer: Optimizer, *args: Any) -> float | None:
        """Step the optimizer unless a gradient overflowed."""
        ...

    def update(self) -> None:
        """Choose the scale of the next step."""
        ...

    def get_scale(self) -> float:
        """Return the scale."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        ...


class MicroSteps(Protocol):
    """Several backward passes per update; ``ready`` says that the window is complete."""

    ready: bool

    def micro_step(self) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass."""
        ...

    def share(self, loss: Tensor, count: float | None = None) -> Tensor:
        """Return the part of a mean loss over ``count`` samples that goes into the update; once per micro-step."""
        ...

    def flush(self) -> bool:
        """Complete a window that is not full; return whether there is anything to update with."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        ...


@dataclass(slots=True)
class Target:
    """The handles of one training loop. Algorithms may exchange them; the loop reads them.

    Args:
        model: The module that is called in the loop, wrapped or not.
        optimizer: The optimizer whose ``step`` the loop calls. If it wraps another one and calls no hooks itself, as
            ``AcceleratedOptimizer`` does, algorithms attach to the one inside.
        scaler: A ``GradScaler`` or anything with its protocol; None trains without loss scaling.
        accumulator: Several backward passes per update; None updates after every one.
        topology: Ranks of the job.
        seed: Source of every random decision of an algorithm; must be the same on every rank.
        scaler_follows: Whether an algorithm that is being attached will bring a scaler; :func:`attach_all` sets it.

    Raises:
        TypeError: Not a module, not an optimizer, or not a scaler.
        IncompatibleError: The optimizer calls no hooks and wraps no other one.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: Scaler | None = None
    accumulator: MicroSteps | None = None
    topology: Topology = field(default_factory=Topology.current)
    seed: int = 0
    scaler_follows: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_module(self.model)
        check_optimizer(self.optimizer)
        hookable(self.optimizer)
        check_scaler(self.scaler)


class Removable(Protocol):
    """Whatever a registration returns: ``torch.utils.hooks.RemovableHandle``, an attachment."""

    def remove(self) -> None:
        """Undo the registration."""
        ...


class Attachment:
    """A live effect on a target; usable as a context manager that removes it at the end.

    Args:
        *handles: Removed, last first, by :meth:`remove`.
        undo: Called after the handles are removed.
    """

    def __init__(self, *handles: Removable, undo: Callable[[], None] | None = None) -> None:
        self._handles = list(handles)
        self._undo = undo

    def with_undo(self, undo: Callable[[], None]) -> Self:
        """Let :meth:`remove` call ``undo`` too, before what it does already."""
        self._handles.append(Attachment(undo=undo))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue; empty where settings and step say it all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state, found keys {sorted(state)}; "
                "load the checkpoint with the algorithms it was written with."
            )

    def remove(self) -> None:
        """Take the effect away. A second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class Algorithm:
    """One method, as a value. Subclasses are frozen dataclasses and override one verb or both."""

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Say why this algorithm would change nothing for this model and optimizer; None where it has work to do."""
        return None

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether :meth:`transform` would change ``model``; false once it has been transformed."""
        return False

    def applied(self, model: nn.Module) -> bool:
        """Whether ``model`` shows that :meth:`transform` has changed it; a plan then lists the algorithm as on."""
        return False

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None) -> Attachment | None:
        """Change the modules, once, before the model is wrapped, sharded or compiled.

        Args:
            model: Changed in place.
            optimizer: Rebound to parameters that were replaced; None where it does not exist yet.

        Returns:
            Its ``remove()`` gives back what was there before; None if that is impossible.
        """

    def check(self, target: Target) -> None:
        """Raise :class:`IncompatibleError` where :meth:`attach` would; called before anything is changed."""

    def attach(self, target: Target) -> Attachment:
        """Hook into a loop that is about to run."""
        return Attachment()


class Attached:
    """Everything attached together: one checkpoint, one removal in reverse order."""

    def __init__(self, algorithms: Iterable[Algorithm] = (), attachments: Iterable[Attachment] = ()) -> None:
        self._entries = {a.name: (a, live) for a, live in zip(algorithms, attachments, strict=True)}

    def __getitem__(self, name: str) -> Attachment:
        return self._entries[name][1]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def describe(self) -> str:
        """Return one line per algorithm, in the order in which the hooks fire."""
        if not self._entries:
            return "nothing attached"
        return "\n".join(f"{i}. {a!r}" for i, (a, _) in enumerate(self._entries.values(), start=1))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every attachment under its algorithm's name."""
        return {name: live.state_dict() for name, (_, live) in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what :meth:`state_dict` returned.

        Algorithms without a state may differ: which of them are attached depends on what is left to do (a transformed
        model, an optimizer that was loaded with ``fused=True``).

        Raises:
            ValueError: The checkpoint holds the state of an algorithm that is not attached, or one that is attached
                and has a state is not in it; nothing was loaded.
        """
        own = self.state_dict()
        extra = sorted(name for name in state if state[name] and name not in own)
        missing = sorted(name for name in own if own[name] and name not in state)
        if extra or missing:
            found = f"the state of {', '.join(extra)}, not attached here" if extra else ""
            found += " and " if extra and missing else ""
            found += f"no state of {', '.join(missing)}, attached here" if missing else ""
            raise ValueError(f"the checkpoint holds {found}; attach the algorithms it was written with before loading.")
        loaded: list[str] = []
        try:
            for name in self._entries:
                if name in state:
                    self[name].load_state_dict(state[name])
                    loaded.append(name)
        except BaseException:
            for name in loaded:
                self[name].load_state_dict(own[name])
            raise

    def remove(self) -> None:
        """Remove every attachment, last attached first. A second call does nothing."""
        for _, live in reversed(self._entries.values()):
            live.remove()
        self._entries = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def attach_all(target: Target, algorithms: Iterable[Algorithm]) -> Attached:
    """Sort by ``traits.order``, check conflicts and the wrapping of the model, transform where needed, attach.

    Either everything is attached or nothing is: every algorithm may refuse before the first one changes anything
    (:meth:`Algorithm.check`), and if one fails later, those before it are removed. A transform that cannot be undone
    stays. What is transformed here, and not before by ``plan.transform``, is undone by
    ``remove()``.

    Raises:
        TypeError: ``target`` is not a :class:`Target`.
        IncompatibleError: Two algorithms exclude each other, one appears twice, one cannot work on this target, a
            model that is already wrapped still needs a transformation, or one puts its own optimizer in the place of
            one that is inside another.
    """
    if not isinstance(target, Target):
        raise TypeError(
            f"target must be a torchboost.Target, found {type(target).__name__}; attach to Target(model, optimizer)."
        )
    chosen = sorted(algorithms, key=lambda algorithm: algorithm.traits.order)
    _check_conflicts(chosen)
    _check_wrapping(target.model, chosen)
    target.scaler_follows = any(algorithm.traits.brings_scaler for algorithm in chosen)
    given, inner = target.optimizer, hookable(target.optimizer)
    _check_replacing(given, inner, chosen)
    target.optimizer = inner
    try:
        for algorithm in chosen:
            algorithm.check(target)
        with ExitStack() as undo:
            changes: dict[str, Attachment] = {}
            for algorithm in chosen:
                change = None
                if algorithm.needs_transform(target.model):
                    change = algorithm.transform(target.model, target.optimizer)
                changes[algorithm.name] = undo.enter_context(change or Attachment())
            live = [undo.enter_context(algorithm.attach(target)) for algorithm in chosen]
            for algorithm, attachment in zip(chosen, live, strict=True):
                attachment.with_undo(changes[algorithm.name].remove)
            undo.pop_all()
    finally:
        if target.optimizer is inner:
            target.optimizer = given
    return Attached(chosen, live)


def _check_replacing(given: Optimizer, inner: Optimizer, chosen: list[Algorithm]) -> None:
    replacing = [algorithm.name for algorithm in chosen if algorithm.traits.replaces_optimizer]
    if replacing and inner is not given:
        raise IncompatibleError(
            f"'{replacing[0]}' puts an optimizer of its own in the place of yours, but yours is {type(given).__name__} "
            f"around {type(inner).__name__}; attach to the inner one, then wrap target.optimizer."
        )


def _check_conflicts(chosen: list[Algorithm]) -> None:
    names = [algorithm.name for algorithm in chosen]
    for algorithm in chosen:
        if names.count(algorithm.name) > 1:
            raise IncompatibleError(f"'{algorithm.name}' was given {names.count(algorithm.name)} times; give it once.")
        others = set(names) - {algorithm.name}
        clash = sorted(others) if algorithm.traits.alone else []
        if clash:
            raise IncompatibleError(
                f"'{algorithm.name}' cannot work together with {', '.join(clash)}; leave one of them out."
            )


def _check_wrapping(model: nn.Module, chosen: list[Algorithm]) -> None:
    wrapper = wrapper_of(model)
    if wrapper is None:
        return
    for algorithm in chosen:
        if algorithm.needs_transform(model):
            raise IncompatibleError(
                f"'{algorithm.name}' changes the modules of the model, but the model is already wrapped by {wrapper}. "
                "Call boost on the bare model and wrap or compile it afterwards; with a plan: plan.transform(model) on "
                "the bare model, then wrap it, then attach."
            )
