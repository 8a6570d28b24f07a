"""Rebuild an optimizer over other param groups."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from torchboost.errors import IncompatibleError
from torchboost.optim.groups import ParamGroup
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.wrapping_optimizer import WrappingOptimizer

__all__ = ["described_groups", "rebuilt"]


def described_groups(optimizer: Optimizer) -> list[ParamGroup]:
    """Return complete copies of the param groups, with schedules in place of their last value."""
    if isinstance(optimizer, UpdateRule):
        return optimizer.described_groups()
    return [dict(group) for group in optimizer.param_groups]


def rebuilt(optimizer: Optimizer, groups: Sequence[ParamGroup], **changes: Any) -> Optimizer:
    """Construct an optimizer of the same class with the same arguments over other groups, without state.

    The constructor's arguments are read from ``defaults``, from attributes with the name of an argument, and for the
    rules of this package from :meth:`~torchboost.optim.rules.base.UpdateRule.constructor_options`. Class defaults
    are not used.

    Args:
        optimizer: Not changed.
        groups: From :func:`described_groups`, split, joined or reordered.
        **changes: Arguments that get another value.

    Raises:
        IncompatibleError: The optimizer wraps another one, or the value of an argument cannot be read.
    """
    kind: Any = type(optimizer)
    if isinstance(optimizer, WrappingOptimizer):
        raise IncompatibleError(
            f"{kind.__name__} wraps another optimizer ({type(optimizer.opt).__name__}) and has no groups of its own. "
            f"Rebuild the wrapped optimizer, then wrap the result in {kind.__name__}."
        )
    options = optimizer.constructor_options() if isinstance(optimizer, UpdateRule) else {}
    attributes = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
    values = {**attributes, **optimizer.defaults, **options, **changes}
    names = _arguments(kind)
    for name in changes:
        if name not in names:
            raise IncompatibleError(f"{kind.__name__} takes no {name!r}; it takes {', '.join(names)}.")
    hidden = [name for name in names if name not in values]
    if hidden:
        raise IncompatibleError(
            f"{kind.__name__} takes {', '.join(hidden)}, but neither its 'defaults' nor its attributes hold the value, "
            "so it cannot be rebuilt. Use centralize_gradients(optimizer), which keeps the optimizer."
        )
    try:
        copy = kind([dict(group) for group in groups], **{name: values[name] for name in names})
    except TypeError as error:
        raise IncompatibleError(
            f"{kind.__name__} cannot be rebuilt: its constructor rejects arguments of its own signature ({error}). "
            "Use centralize_gradients(optimizer), which keeps the optimizer."
        ) from error
    after = copy.constructor_options() if options else {}
    lost = [name for name, value in options.items() if name not in changes and value != after[name]]
    if lost:  # the constructor sets options that it does not take as arguments
        raise IncompatibleError(
            f"the constructor of {kind.__name__} does not take {', '.join(lost)}, so it cannot be rebuilt with "
            f"{lost[0]}={options[lost[0]]!r}. Add that argument to the constructor."
        )
    return copy


def _arguments(kind: type) -> list[str]:
    """Name the constructor's arguments except the parameters; with ``**options``, those of the base class too."""
    names: list[str] = []
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        arguments = list(inspect.signature(base).parameters.values())
        keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [a.name for a in arguments if a.kind in keyword]
        if arguments and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            del named[0]  # the parameters
        names += [name for name in named if name not in names]
        if all(a.kind is not a.VAR_KEYWORD for a in arguments):
            break
    return names
