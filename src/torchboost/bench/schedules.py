"""The effect of a factory's schedule on a recipe: it may write rates of its own, or not drive another optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchboost.bench.factory import Parts, check_step, made_by, schedule_of
from torchboost.config import RecipeSection
from torchboost.errors import IncompatibleError, in_a_line
from torchboost.front import Boosted, boost

LEAST_STEPS = 2
"""The first step of a run is its set-up, so the time of a step is known from the second on."""

ABSOLUTE = (
    "the schedule writes rates of its own, so that those of the optimizer have no effect; let it take them from the "
    "optimizer, such as max_lr=[group['lr'] for group in optimizer.param_groups] for OneCycleLR"
)


def schedule_sets_rates(make: Callable[[int], object], steps: int) -> bool:
    """Return whether the factory's schedule writes rates of its own, regardless of the optimizer's.

    Such as ``OneCycleLR`` with ``max_lr=0.1``. A multiple of the optimizer's rate would change nothing.

    Raises:
        FactoryError: The optimizer or the schedule cannot be stepped without a closure or a metric.
    """
    found: list[list[float]] = []
    for factor in (1.0, 0.5):
        parts = made_by(make, 0)
        check_step(parts.optimizer)
        for group in parts.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        schedule, rates = schedule_of(parts, parts.optimizer, steps), list[float]()
        for _ in range(0 if schedule is None else min(steps, 4)):
            rates += [float(group["lr"]) for group in parts.optimizer.param_groups]
            parts.optimizer.step()
            schedule.step()  # pyright: ignore[reportOptionalMemberAccess]
        found.append(rates)
    return any(one == other != 0 for one, other in zip(*found, strict=True))


def check_schedule(parts: Parts, boosted: Boosted) -> None:
    """Raise ``IncompatibleError`` if the factory's schedule cannot drive groups of several rules and rates."""
    if parts.schedule is None:
        return
    groups = boosted.optimizer.param_groups
    before = {float(group["lr"]) for group in groups}
    try:
        parts.schedule(boosted.optimizer, max(LEAST_STEPS, boosted.steps or 0))
    except Exception as error:  # the user's function may raise anything
        hint = "; let the schedule pass cycle_momentum=False" if "cycle_momentum" in str(error) else ""
        raise IncompatibleError(f"the schedule raises {in_a_line(error)}{hint}") from error
    after = {float(group["lr"]) for group in groups}
    if len(after) < len(before) and after != {0.0}:
        raise IncompatibleError(
            "the schedule gives all groups one rate, and matrices need another one than the rest; let it take one per "
            "group, such as max_lr=[group['lr'] for group in optimizer.param_groups] for OneCycleLR"
        )


def without_effect(make: Callable[[int], object], recipe: RecipeSection, steps: int) -> str:
    """Return the parts of a recipe without effect under the factory's schedule, and why, or an empty text.

    ``steps`` are the updates of a run without the recipe. If the recipe has Muon or a rate, and the factory a schedule,
    the factory is called up to four times.

    Raises:
        IncompatibleError: The schedule cannot drive the optimizer that the recipe builds, or sets its rates.
    """
    muon = recipe.optimizer == "muon"
    if not (muon or (recipe.rate != 1 and recipe.optimizer is None)) or (parts := made_by(make, 0)).schedule is None:
        return ""
    if schedule_sets_rates(make, max(LEAST_STEPS, recipe.steps_of(steps))):
        if muon:
            raise IncompatibleError(f"recipe.optimizer='muon': {ABSOLUTE}")
        return f"recipe.rate={recipe.rate:g} has no effect: {ABSOLUTE}"
    if muon:
        boosted = boosted_as(parts, {"recipe": recipe.model_dump()}, steps)
        check_schedule(parts, boosted)
        boosted.remove()
    return ""


def boosted_as(parts: Parts, config: dict[str, Any], steps: int) -> Boosted:
    """Boost model and optimizer with a configuration and nothing else, for a run of so many steps of stock."""
    pair = parts.model, parts.optimizer
    return boost(*pair, level="O0", config=config, total_steps=steps, calibrate=False, verify=False)


def of_boosted(parts: Parts, boosted: Boosted) -> Parts:
    """Return a factory's parts with the optimizer of a boosted pair, and the schedule that it is trained with.

    Schedule-free AdamW that a recipe has built has none: its average takes the place of one.
    """
    free = boosted.plan.recipe.optimizer == "schedule_free_adamw"
    return parts._replace(optimizer=boosted.optimizer, schedule=None if free else parts.schedule)
