"""The terms of the library, except the plan: algorithm, target, attachment, and all attachments together.

An algorithm is a frozen value with two methods. ``transform`` changes a model once, before it is wrapped, sharded or
compiled. ``attach`` hooks into a training loop and returns an attachment, which can be removed and checkpointed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from torchboost.core.arguments import check_apart, check_module, check_optimizer, check_scaler
from torchboost.core.wrapping import hookable, wrapper_of
from torchboost.distributed.topology import Topology
from torchboost.errors import IncompatibleError

LEVERS = "levers"
"""The key in the state of :class:`AttachedAlgorithms` that says which speed levers were on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the rest of the library must know about an algorithm.

    Args:
        order: Attach order, lower first. Hooks run in attach order.
        replaces_optimizer: Whether ``attach`` puts another optimizer into the target. It then excludes all others.
        brings_scaler: Whether ``attach`` puts a scaler into the target.
        each_optimizer: Whether the algorithm serves all optimizers of a target. Others refuse more than one.
        eager: Whether it does nothing in compiled code.
        withdrawn: Order in which a guard withdraws algorithms from a run that got worse, 1 first. 0 for algorithms that
            do not change the learned weights, or cannot be removed.
    """

    order: int = 50
    replaces_optimizer: bool = False
    brings_scaler: bool = False
    each_optimizer: bool = False
    eager: bool = False
    withdrawn: int = 0


class Stateful(Protocol):
    """A part of a training that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""


@contextmanager
def restored_on_error(*parts: Any) -> Iterator[None]:
    """Load the states from before the block into the parts again if the block raises. Each is :class:`Stateful`."""
    before = [part.state_dict() for part in parts]
    try:
        yield
    except BaseException:
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(state)
        raise


class Scaler(Stateful, Protocol):
    """The part of ``torch.amp.GradScaler`` that a training step uses.

    If the scale does not fall at each overflow, an attribute ``overflowed`` must say whether the last :meth:`update`
    followed an overflow. Without the attribute, a lower scale counts as an overflow.
    """

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the loss times the scale."""
        ...

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place, and look for overflow."""

    def step(self, optimizer: Optimizer, *args: Any) -> float | None:
        """Step the optimizer unless a gradient overflowed."""
        ...

    def update(self) -> None:
        """Choose the scale of the next step."""

    def get_scale(self) -> float:
        """Return the scale."""
        ...


class MicroSteps(Stateful, Protocol):
    """Several backward passes per update. ``ready`` says whether the window is complete."""

    ready: bool

    def micro_step(self) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass."""
        ...

    def share(self, loss: Tensor, count: float | None = None) -> Tensor:
        """Return the part of a mean loss over ``count`` samples that enters the update. Call it once per micro-step."""
        ...

    def flush(self) -> bool:
        """Complete a partial window. Return whether it holds any gradients."""
        ...


@dataclass(slots=True)
class Target:
    """The handles of one training loop. Algorithms may replace them, and the loop reads them.

    Args:
        model: The module that the loop calls, wrapped or not.
        optimizer: The optimizer whose ``step`` the loop calls. If it wraps another one and does not call hooks itself,
            like ``AcceleratedOptimizer``, algorithms attach to the inner one.
        scaler: A ``GradScaler`` or an object with its methods. None means no loss scaling.
        accumulator: Several backward passes per update. None updates after each backward pass.
        topology: The ranks of the job.
        seed: Seed of all random decisions of algorithms. Must be the same on every rank.
        others: More optimizers of the model, each over parameters of its own. The loop steps them, too.
        scaler_follows: Whether an algorithm that is being attached will add a scaler. Set by :func:`attach_all`.

    Raises:
        TypeError: An argument is not a module, an optimizer or a scaler.
        ValueError: Two optimizers hold the same parameter.
        IncompatibleError: The optimizer does not call hooks and does not wrap another optimizer.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: Scaler | None = None
    accumulator: MicroSteps | None = None
    topology: Topology = field(default_factory=Topology.current)
    seed: int = 0
    others: tuple[Optimizer, ...] = ()
    scaler_follows: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_module(self.model)
        for optimizer in (self.optimizer, *self.others):
            check_optimizer(optimizer)
            hookable(optimizer)
        check_apart((self.optimizer, *self.others))
        check_scaler(self.scaler)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers, in each case the one that calls hooks (:func:`~torchboost.core.wrapping.hookable`)."""
        return tuple(map(hookable, (self.optimizer, *self.others)))


class Removable(Protocol):
    """The result of a registration, such as ``torch.utils.hooks.RemovableHandle`` or an attachment."""

    def remove(self) -> None:
        """Undo the registration."""


class Attachment:
    """An active effect on a target. As a context manager, it is removed at the end.

    Args:
        *handles: Removed by :meth:`remove`, in reverse order.
        undo: Called after the handles are removed.

    Attributes:
        state_is_optional: Whether a checkpoint may lack its state, which is then unchanged.
    """

    state_is_optional: bool = False

    def __init__(self, *handles: Removable, undo: Callable[[], None] | None = None) -> None:
        self._handles = list(handles)
        self._undo = undo

    def with_undo(self, undo: Callable[[], None]) -> Self:
        """Let :meth:`remove` call ``undo`` too, before everything else."""
        self._handles.append(Attachment(undo=undo))
        return self

    @property
    def remark(self) -> str:
        """Notable facts about the present state. Empty if there are none."""
        return ""

    @property
    def course(self) -> str:
        """What it does later in the run, in words. Empty if it does the same in every update."""
        return ""

    @property
    def idle_until(self) -> int:
        """The update of the run from which it is in effect. 0 if it is in effect already, or will never be."""
        return 0

    def figures(self) -> dict[str, float]:
        """Return the present state as numbers for a log, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Empty if the settings and the step number are enough."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state, found keys {sorted(state)}; "
                "load the checkpoint with the algorithms it was written with."
            )

    def remove(self) -> None:
        """Remove the effect. A second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def attach_each(optimizers: Iterable[Optimizer], attach: Callable[[Optimizer], Attachment]) -> Attachment:
    """Attach to every optimizer, or to none if one of them raises. The attachment of a single one is returned as is."""
    with ExitStack() as undo:
        attachments = [undo.enter_context(attach(optimizer)) for optimizer in optimizers]
        undo.pop_all()
    return attachments[0] if len(attachments) == 1 else Attachment(*attachments)


class Form(NamedTuple):
    """Other settings of a lever, which a trial may prefer to the kept ones."""

    algorithm: Algorithm
    price: float
    """Expected one-time cost, as a multiple of the lever's."""
    best_ratio: float
    """The largest gain to hope for over the kept settings."""
    of_host: bool = False
    """Whether it saves only time of the host."""


class AlreadyOn(str):
    """Why an algorithm would change nothing: the model, the optimizer or the loop had the same before."""

    __slots__ = ()


class Algorithm:
    """A training method, as a value. Subclasses are frozen dataclasses that override ``transform`` or ``attach``."""

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    without_effect = ""

    @property
    def rounding(self) -> float:
        """Relative rounding of a precision below float32 in which this lets float32 products compute, or 0."""
        return 0.0

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Return why this algorithm would change nothing for this model and optimizer, or None if it would."""
        return None

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether :meth:`transform` would change ``model``. False after it was transformed."""
        return False

    def applied(self, model: nn.Module) -> bool:
        """Whether :meth:`transform` has changed ``model``. If so, a plan lists the algorithm as on."""
        return False

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Optimizer) -> Attachment | None:
        """Change the modules, once, before the model is wrapped, sharded or compiled.

        Args:
            model: Changed in place.
            optimizer: Its groups follow parameters that are replaced. None if it does not exist yet.
            *others: More optimizers that follow. Only an algorithm with ``traits.each_optimizer`` is given any.

        Returns:
            An attachment whose ``remove()`` restores the model, or None if the change cannot be undone.
        """

    def check(self, target: Target) -> None:
        """Refuse a target that :meth:`attach` cannot work on. Called once, before anything is changed.

        Raises:
            IncompatibleError: The target, or its model or optimizer, rules the algorithm out.
        """

    def fitted(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """Return these settings, completed by the facts that one eager pass of a real call shows.

        Args:
            model: As the loop calls it. An override may run one pass of it, which moves buffers and random generators.
            args: Of a training call.
            kwargs: Of a training call.
        """
        return self

    def noting(self, without_effect: str) -> Self:
        """Return these settings with a note why they have no effect on the call that :meth:`fitted` was shown."""
        noted = copy.copy(self)
        object.__setattr__(noted, "without_effect", without_effect)  # no setting, so no field
        return noted

    def positions(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return masks of shape (batch, length) of the positions that a call computes, or none if it computes all."""
        return []

    def forms(self, device: torch.device) -> tuple[Form, ...]:
        """Return the forms that a trial which kept these settings tries instead on a device, the dearest last."""
        return ()

    def forget(self) -> None:
        """Free the memory that remains in use after the removal. A trial calls this for algorithms that it dropped."""

    def graphs(self) -> int:
        """Return the most graphs that a compiled model needs to train with this algorithm over a run."""
        return 1

    def load(self) -> None:
        """Import the modules of :meth:`attach` and later steps. A trial calls this before it limits their time."""

    def attach(self, target: Target) -> Attachment:
        """Hook into the training loop of ``target``, which :meth:`check` has accepted.

        :func:`attach_all` calls both. If you call this directly, call :meth:`check` first.
        """
        return Attachment()


class AttachedAlgorithms:
    """All attachments of one call, with one checkpoint and one removal."""

    def __init__(self, algorithms: Iterable[Algorithm] = (), attachments: Iterable[Attachment] = ()) -> None:
        self._entries = {a.name: (a, live) for a, live in zip(algorithms, attachments, strict=True)}
        self._undo: list[Callable[[], None]] = []
        self._levers: tuple[Callable[[], Mapping[str, bool | str]], Callable[[Any], None]] | None = None
        self._check: Callable[[Mapping[str, Any]], None] | None = None
        self._awaited: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Attachment:
        return self._entries[name][1]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def algorithms(self) -> list[Algorithm]:
        """The attached algorithms, in the order in which the hooks run."""
        return [algorithm for algorithm, _ in self._entries.values()]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every attachment under its algorithm's name, and which levers were chosen, if any."""
        states = {name: live.state_dict() for name, (_, live) in self._entries.items()}
        levers = dict(self._levers[0]()) if self._levers is not None else {}
        return states | ({LEVERS: levers} if levers else {})

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]], awaited: Collection[str] = ()) -> None:
        """Load the result of :meth:`state_dict`.

        The states of ``awaited`` algorithms, which may be attached later, are loaded then. Algorithms without a state
        may differ, because some attach only if they have work to do.

        Raises:
            ValueError: The checkpoint holds the state of an algorithm that is not attached, lacks the state of an
                attached algorithm, is refused by the check of :meth:`with_levers`, or is damaged. Nothing is loaded.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"the state of the algorithms is {state!r:.60}, not a dictionary; load another one.")
        before, levers = self.state_dict(), state.get(LEVERS)
        chosen = [name for name, on in levers.items() if on] if isinstance(levers, Mapping) else []
        awaited = {*awaited, *chosen} - {*self}
        unknown = sorted(name for name in state if state[name] and name not in (*self, *awaited, LEVERS))
        missing = sorted(n for n in self if before[n] and n not in state and not self[n].state_is_optional)
        if unknown or missing:
            faults = [f"the state of {', '.join(unknown)}, not attached here"] if unknown else []
            faults += [f"no state of {', '.join(missing)}, attached here"] if missing else []
            found = " and ".join(faults)
            raise ValueError(f"the checkpoint holds {found}; attach the algorithms it was written with before loading.")
        if self._check is not None:
            self._check(state)
        loaded: list[str] = []
        earlier, self._awaited = self._awaited, {name: state[name] for name in awaited if state.get(name)}
        try:
            for name in self:
                if name in state:
                    loaded.append(name)
                    _load(name, self[name], state[name])
            if self._levers is not None and levers is not None:
                self._levers[1](levers)
        except BaseException:
            self._awaited = earlier
            for name in [name for name in loaded if name in self]:
                self[name].load_state_dict(before[name])
            raise

    def with_undo(self, undo: Callable[[], None]) -> Self:
        """Let :meth:`remove` call ``undo`` too, before everything else."""
        self._undo.append(undo)
        return self

    def with_levers(
        self,
        read: Callable[[], Mapping[str, bool | str]],
        load: Callable[[Any], None],
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Self:
        """Let the state say which speed levers are on, so that a resumed run has the same.

        ``read`` returns the decisions by the name of the lever, none while nothing is decided. ``load`` is called with
        them, and ``check`` with a state before it is loaded. If either raises, nothing is loaded.
        """
        self._levers, self._check = (read, load), check
        return self

    def detach(self, name: str) -> None:
        """Remove one attachment, whose optional state waits for its return. Does nothing without one of this name."""
        if name in self._entries:
            live = self._entries.pop(name)[1]
            if live.state_is_optional:
                self._awaited[name] = live.state_dict()
            live.remove()

    def adopt(self, others: AttachedAlgorithms) -> None:
        """Take over the attachments of ``others``, whose names must be new, in the order of ``traits.order``."""
        for name in [name for name in others if name in self._awaited]:
            _load(name, others[name], self._awaited.pop(name))
        both = [*self._entries.items(), *others._entries.items()]
        self._entries = dict(sorted(both, key=lambda entry: entry[1][0].traits.order))
        self._undo += others._undo
        others._entries, others._undo = {}, []

    def remove(self) -> None:
        """Remove all attachments in reverse order. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        for _, live in reversed(self._entries.values()):
            live.remove()
        self._entries = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _load(name: str, live: Attachment, state: Any) -> None:
    """Load one state, which comes from a file. For any defect of it, the caller gets one kind of error."""
    try:
        if not isinstance(state, Mapping):
            raise TypeError(f"found {state!r:.60} in place of a dictionary")
        live.load_state_dict(state)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(
            f"the state of {name} is damaged ({type(error).__name__}: {error}); load another checkpoint."
        ) from error


def attach_all(target: Target, algorithms: Iterable[Algorithm]) -> AttachedAlgorithms:
    """Check the algorithms against each other and the target, transform the model if needed, and attach all of them.

    They are attached in the order of ``traits.order``, all or none. Each one is checked before the first one changes
    anything (:meth:`Algorithm.check`). A transform that cannot be undone remains. ``remove()`` undoes the transforms
    that were done here, not the transforms of ``plan.transform``.

    Raises:
        TypeError: ``target`` is not a :class:`Target`.
        IncompatibleError: Two algorithms exclude each other, an algorithm appears twice or cannot work on this target,
            a model that is already wrapped still needs a transformation, an algorithm would replace an optimizer that
            is inside another one, or the target has several optimizers and an algorithm serves only one.
    """
    if not isinstance(target, Target):
        raise TypeError(
            f"target must be a torchboost.Target, found {type(target).__name__}; attach to Target(model, optimizer)."
        )
    chosen = sorted(algorithms, key=lambda algorithm: algorithm.traits.order)
    outer, inner = target.optimizer, hookable(target.optimizer)
    _check_together(chosen)
    for algorithm in chosen:
        _check_place(algorithm, target, inner)
    target.scaler_follows = any(algorithm.traits.brings_scaler for algorithm in chosen)
    target.optimizer = inner
    try:
        for algorithm in chosen:
            algorithm.check(target)
        with ExitStack() as undo:
            transforms: list[Attachment] = []
            for algorithm in chosen:
                needed = algorithm.needs_transform(target.model)
                transform = algorithm.transform(target.model, *target.optimizers) if needed else None
                transforms.append(undo.enter_context(transform or Attachment()))
            live = [undo.enter_context(algorithm.attach(target)) for algorithm in chosen]
            for attachment, transform in zip(live, transforms, strict=True):
                attachment.with_undo(transform.remove)
            undo.pop_all()
    finally:
        if target.optimizer is inner:
            target.optimizer = outer
    return AttachedAlgorithms(chosen, live)


def _check_together(chosen: list[Algorithm]) -> None:
    names = [algorithm.name for algorithm in chosen]
    for algorithm in chosen:
        if names.count(algorithm.name) > 1:
            raise IncompatibleError(f"'{algorithm.name}' was given {names.count(algorithm.name)} times; give it once.")
        if algorithm.traits.replaces_optimizer and len(names) > 1:
            others = ", ".join(sorted(set(names) - {algorithm.name}))
            raise IncompatibleError(f"'{algorithm.name}' cannot work together with {others}; leave one of them out.")


def _check_place(algorithm: Algorithm, target: Target, inner: Optimizer) -> None:
    wrapper = wrapper_of(target.model)
    if wrapper is not None and algorithm.needs_transform(target.model):
        raise IncompatibleError(
            f"'{algorithm.name}' changes the modules of the model, but the model is already wrapped by {wrapper}. Call "
            "boost on the bare model, then wrap it; with a plan, call plan.transform(model) first, attach last."
        )
    if target.others and not algorithm.traits.each_optimizer:
        raise IncompatibleError(
            f"'{algorithm.name}' works with one optimizer, but the target has {len(target.optimizers)}; "
            "leave it out, or train all parameters with one optimizer."
        )
    if algorithm.traits.replaces_optimizer and inner is not target.optimizer:
        raise IncompatibleError(
            f"'{algorithm.name}' replaces the optimizer, but the optimizer is a {type(target.optimizer).__name__} "
            f"around a {type(inner).__name__}. Attach to the inner one, then wrap target.optimizer."
        )
