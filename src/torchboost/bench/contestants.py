"""The contestants of a benchmark: the ways to train a network, each as a loop that is ready to step.

The name of a contestant is a base and, after plus signs, the additions to it.

=========================  ==========================================================================
``stock``                  the plain eager loop
``hand``                   the best loop by hand, in plain PyTorch: channels-last, bfloat16 autocast
                           if the hardware is fast at it, fused optimizer, texts padded to the longest
                           of their batch if the factory says how
``hand+compile``           the same, and ``torch.compile``
``O0``, ``O1``, ``O2``     the plain loop, boosted at that level
``hand+less_bn``           the hand loop with one algorithm attached; likewise ``stock+...``
``O1+compile``             a level with one more algorithm
``boost.json``             what ``tune`` wrote to this file, for the number of steps that it names; also
                           ``boost.json+compile``
=========================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_accumulation import GradAccumulation
from torchboost.algorithms.loss_scale_group import LossScaleGroup
from torchboost.bench.factory import Factory, Parts, loop_body
from torchboost.bench.schedules import LEAST_STEPS, of_boosted
from torchboost.config import BoostConfig
from torchboost.core.algorithm import Target
from torchboost.core.forward import with_tensors
from torchboost.core.hardware import half_precision
from torchboost.core.torch_private import AnyConv
from torchboost.errors import IncompatibleError, nearest
from torchboost.front import Boosted, boost
from torchboost.measure.evidence import AlgorithmRow, DroppedRow
from torchboost.optim.fusing import obstacle
from torchboost.plan import Plan
from torchboost.registry import Facts

BASES = ("stock", "hand", "O0", "O1", "O2")
BY_HAND = "compile"
CONFIG = ".json"
RECIPE = "recipe"
"""Row of a configuration among the algorithms of a contestant."""

Kind = Literal["stock", "hand", "level", "algorithm", "config"]

Planner = Callable[[str, Sequence[str], nn.Module, Optimizer, int], Plan]
"""Maps a level, the algorithms added to it, model, optimizer and the steps of the run to a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parts of a contestant's name."""

    base: str
    added: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Recipe:
        """Parse a name.

        Raises:
            ValueError: The part before the first plus is not a base, an addition is empty or repeated, or there is no
                such file.
        """
        file, mark, rest = name.rpartition(f"{CONFIG}+")
        if name.endswith(CONFIG):
            base, added = name, []
        elif mark:
            base, added = file + CONFIG, rest.split("+")
        else:
            base, *added = name.split("+")
        if base.endswith(CONFIG):
            if not Path(base).is_file():
                raise ValueError(f"contestant '{name}': found no such file; give one that `torchboost tune` wrote.")
        elif base not in BASES:
            hint = nearest(base, BASES)
            allowed = f"{', '.join(BASES)}, and the name of a file that ends with {CONFIG}"
            raise ValueError(f"contestant '{name}': found '{base}'; allowed are {allowed}. {hint}".rstrip())
        if "" in added or len(set(added)) < len(added):
            raise ValueError(f"contestant '{name}': found {added} after the base; name each addition once.")
        return cls(base=base, added=tuple(added))

    @property
    def kind(self) -> Kind:
        """The kind of contestant."""
        if self.base.endswith(CONFIG):
            return "config"
        if self.base not in ("stock", "hand"):
            return "level"
        if self.planned:
            return "algorithm"
        return "hand" if self.base == "hand" else "stock"

    @property
    def planned(self) -> tuple[str, ...]:
        """The algorithms to attach in addition to the level's."""
        return tuple(name for name in self.added if self.base != "hand" or name != BY_HAND)

    @property
    def compiled_by_hand(self) -> bool:
        """Whether the loop itself calls ``compile``."""
        return self.base == "hand" and BY_HAND in self.added


@dataclass(slots=True, kw_only=True)
class Loop:
    """A training loop that is ready to step.

    ``steps`` is the number of updates of a run, ``predict`` maps inputs to outputs, ``by_hand`` says in words what the
    loop does by hand, and ``boosted`` is the boosted pair or the plan that was attached. A boosted pair decides about
    its levers at the first step.
    """

    parts: Parts
    step: Callable[[Any, Any], Tensor]
    steps: int
    predict: nn.Module
    by_hand: list[str] = field(default_factory=list)
    boosted: Boosted | Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The current attachments."""
        return self.boosted.plan if isinstance(self.boosted, Boosted) else self.boosted

    @property
    def algorithms(self) -> list[AlgorithmRow]:
        """The attached algorithms, and the recipe if there is one."""
        if self.plan is None:
            return []
        rows = [AlgorithmRow(name=a.name, settings=repr(a)) for a in self.plan.algorithms]
        recipe = self.plan.recipe
        return rows if recipe.is_neutral else [*rows, AlgorithmRow(name=RECIPE, settings=repr(recipe))]

    @property
    def dropped(self) -> list[DroppedRow]:
        """The requested algorithms that are off, with the reasons."""
        return [DroppedRow(name=d.name, reason=d.reason) for d in self.plan.dropped] if self.plan else []

    @property
    def notes(self) -> list[str]:
        """Notes for the report: work done by hand, the levers' distance from a plain step, parts without effect."""
        checks: dict[str, str] = {}
        if isinstance(self.boosted, Boosted):
            remarks = {name: f"not in effect: {text}" for name, text in self.boosted.levers.remarks.items()}
            checks = self.boosted.checks | remarks
        on = {algorithm.name for algorithm in self.algorithms}
        notes = [f"by hand: {', '.join(self.by_hand)}"] if self.by_hand else []
        notes += [f"recipe: {words}"] if self.plan and (words := self.plan.recipe.in_words()) else []
        return notes + [f"{name}: {check}" for name, check in checks.items() if name in on]


def plan_for(level: str, added: Sequence[str], model: nn.Module, optimizer: Optimizer, total_steps: int) -> Plan:
    """Return the plan of ``level`` and the algorithms ``added``, without those that would have no effect."""
    facts = Facts.measure(model, total_steps=total_steps, loop="own")
    return Plan.of(level, {"extra": dict.fromkeys(added, True)}, facts).fit(model, optimizer)


def build_loop(
    recipe: Recipe,
    factory: Factory,
    *,
    seed: int,
    steps: int,
    total_steps: int | None = None,
    device: torch.device | str = "cpu",
    planner: Planner | None = None,
) -> Loop:
    """Build model, optimizer and schedule of a training, and the loop body of a contestant around them.

    The model is put into training mode, as a factory may return it in evaluation mode.

    Args:
        recipe: The contestant.
        factory: The training.
        seed: Of the weights.
        steps: Length of the schedule. A configuration may shorten it.
        total_steps: Number of steps that must repay the start-up cost of an algorithm, by default ``steps``.
        device: Of the model.
        planner: Chooses the algorithms of levels and additions, which are then attached without a trial. None applies
            a level by :func:`torchboost.boost`.

    Raises:
        IncompatibleError: The plan has scales of the loss, which these loops do not use.
        ValueError: The plan has gradient accumulation, which these loops do not support.
    """
    parts = factory.build(seed)
    model = parts.model.to(device).train()
    total = total_steps or steps
    if recipe.kind == "config":
        return _configured(recipe, parts, model, steps, total)
    if recipe.kind == "level" and planner is None:
        added = dict.fromkeys(recipe.planned, True)
        boosted = boost(model, parts.optimizer, level=recipe.base, total_steps=total, config={"extra": added})
        return _boosted(parts, boosted, steps)
    by_hand = recipe.base == "hand"
    done = ["fused optimizer"] if by_hand and _fuse(parts.optimizer) else []
    target, plan = Target(model, parts.optimizer, seed=seed), None
    if recipe.kind in ("level", "algorithm"):
        level = "O0" if recipe.kind == "algorithm" else recipe.base
        plan = (planner or plan_for)(level, recipe.planned, model, parts.optimizer, total)
        plan.transform(model, parts.optimizer)
    channels_last = by_hand and any(isinstance(module, nn.Conv2d) for module in model.modules())
    convolutions = sum(isinstance(module, AnyConv) for module in model.modules())
    half = by_hand and half_precision(device, convolutions).fast
    if channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if recipe.compiled_by_hand:
        model.compile()
    if plan is not None:
        _check_updates(plan)
        plan.attach(target)
    autocast = functools.partial(torch.autocast, torch.device(device).type, torch.bfloat16)
    body = loop_body(parts, target.model, target.optimizer, steps, autocast if half else contextlib.nullcontext)
    shorten = factory.shorten if by_hand else None

    def by_hand_body(inputs: Any, targets: Any) -> Tensor:
        inputs = inputs if shorten is None else shorten(inputs)
        return body(with_tensors(inputs, _channels_last) if channels_last else inputs, targets)

    options = {
        "batches padded to their longest sequence": shorten is not None,
        "channels-last": channels_last,
        "bfloat16 autocast": half,
        "torch.compile": recipe.compiled_by_hand,
    }
    done += [name for name, on in options.items() if on]
    step = by_hand_body if channels_last or shorten is not None else body
    return Loop(parts=parts, step=step, steps=steps, predict=target.model, by_hand=done, boosted=plan)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def version_of(name: str) -> str:
    """Return a text that tells apart the versions of a configuration, or an empty one for another contestant."""
    recipe = Recipe.parse(name)
    if recipe.kind != "config":
        return ""
    return hashlib.sha256(BoostConfig.load(recipe.base).model_dump_json(exclude={"about"}).encode()).hexdigest()[:16]


@contextlib.contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Give the weights their average while a model is evaluated, if a schedule-free optimizer has one."""
    before, after = (getattr(optimizer, name, None) for name in ("eval", "train"))
    if not (callable(before) and callable(after)):
        yield
        return
    before()
    try:
        yield
    finally:
        after()


def _configured(recipe: Recipe, parts: Parts, model: nn.Module, steps: int, total: int) -> Loop:
    config = BoostConfig.load(recipe.base)
    added = {name: config.extra.get(name) or True for name in recipe.planned}
    if added:
        config = config.model_copy(update={"extra": {**config.extra, **added}})
    boosted = boost(model, parts.optimizer, config=config if added else recipe.base, total_steps=total)
    return _boosted(of_boosted(parts, boosted), boosted, max(LEAST_STEPS, boosted.plan.recipe.steps_of(steps)))


def _boosted(parts: Parts, boosted: Boosted, steps: int) -> Loop:
    _check_updates(boosted.plan)
    body = loop_body(parts, boosted.model, boosted.optimizer, steps)
    return Loop(parts=parts, step=body, steps=steps, predict=boosted.model, boosted=boosted)


def check_scale(plan: Plan) -> None:
    """Raise ``IncompatibleError`` if a plan has scales of the loss, which the loops here do not use."""
    if any(isinstance(algorithm, LossScaleGroup) for algorithm in plan.algorithms):
        raise IncompatibleError(
            "loss_scale_group has no effect here, because the loops of a benchmark and of a tuning do not scale the "
            "loss; leave it out."
        )


def _check_updates(plan: Plan) -> None:
    check_scale(plan)
    if any(isinstance(algorithm, GradAccumulation) for algorithm in plan.algorithms):
        raise ValueError("the plan accumulates gradients; the loops of a benchmark update after every batch.")


def _fuse(optimizer: Optimizer) -> bool:
    """Fuse the groups that torch can fuse, and return whether there are some."""
    fusible = [group for group in optimizer.param_groups if obstacle(optimizer, group) is None]
    for group in fusible:
        group |= {"fused": True, "foreach": None}
    return bool(fusible)
