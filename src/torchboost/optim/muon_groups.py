"""Optimizers from a model: which parameters Muon gets and which AdamW, and optimizers that are built by name."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchboost.core.arguments import check_module, check_number
from torchboost.core.torch_private import AnyConv
from torchboost.core.wrapping import unwrap
from torchboost.errors import NoEffectWarning, nearest
from torchboost.graph.matrix_uses import Place, Use, matrix_uses
from torchboost.optim.group_rules import GroupRule, param_groups
from torchboost.optim.groups import ParamGroup
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW, warn_of_training_weights

__all__ = ["MuonSplit", "muon_groups", "named_optimizer"]

_MATRICES = (nn.Linear, AnyConv, nn.RNNBase, nn.MultiheadAttention)
"""Holders of matrices in a model that cannot be run here."""

_WHY: Mapping[Place, str] = {
    "input": "reads the model's input",
    "hidden": "hidden matrix",
    "output": "head",
    "lookup": "table of rows",
    "other": "not multiplied as a matrix",
    "not reached": "not used by the pass",
}


class Row(NamedTuple):
    """The rule of one parameter, and the reason."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str


class MuonSplit(list[ParamGroup]):
    """Param groups for :class:`~torchboost.optim.MixedOptimizer`; ``print`` shows them as a table.

    Args:
        groups: The groups.
        rows: One per parameter, in the order of the model.
    """

    def __init__(self, groups: Iterable[ParamGroup], rows: Iterable[Row]) -> None:
        super().__init__(groups)
        self.rows = tuple(rows)

    def __str__(self) -> str:
        head = ("parameter", "shape", "rule", "why")
        lines = [head, *((row.name, " x ".join(map(str, row.shape)), row.rule, row.reason) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        shown = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]) for line in lines]
        totals: dict[str, int] = {}
        for group in self:
            count = sum(param.numel() for param in group["params"])
            totals[group["rule"]] = totals.get(group["rule"], 0) + count
        return "\n".join([*shown, ", ".join(f"{rule}: {count:,} weights" for rule, count in totals.items())])


def muon_groups(
    model: nn.Module,
    rules: Iterable[GroupRule] = (),
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    sample: Any = None,
    include_frozen: bool = False,
) -> MuonSplit:
    """Sort the parameters of a model into groups for Muon and AdamW, by how its forward pass uses them.

    Muon gets hidden matrices, filters and stacks of matrices. AdamW gets the rest: tables such as embeddings, the
    output layer, layers that read the model's input, norms, biases, matrices of one row or column, and weights that are
    shared with one of these. The uses are found in one forward pass
    (:func:`~torchboost.graph.matrix_uses.matrix_uses`). If the model cannot be run here, types of modules decide:
    matrices and filters of torch's layers go to Muon, those of the last of these layers, and without embeddings those
    of the first, to AdamW. Types also decide about parameters that the pass did not use, such as experts that were not
    chosen.

    Args:
        model: Wrapped or not. It is not changed.
        rules: Options by parameter, as in :func:`~torchboost.optim.param_groups`; they override this function, as
            ``GroupRule({"rule": "adamw"}, name="gate")`` does.
        muon: Options of the groups with Muon, such as ``{"lr": 0.02}``.
        adamw: Options of the groups with AdamW.
        sample: An input of the model: a tensor, a tuple of positional or a dict of keyword arguments. None guesses one.
        include_frozen: Whether parameters with ``requires_grad=False`` get a group too.

    Returns:
        Groups to pass to :class:`~torchboost.optim.MixedOptimizer`. No group is empty.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The model does not run on ``sample``, a rule matches nothing, or there is nothing to train.
        IncompatibleError: The model is sharded by FSDP1.

    Cost: two forward passes on ``sample``, of a copy of the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> groups = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        >>> for group in groups:
        ...     print(group["rule"], group["lr"], group["param_names"])
        muon 0.02 ['2.weight']
        adamw 0.003 ['0.weight', '0.bias', '2.bias', '4.weight', '4.bias']
    """
    groups = param_groups(model, rules, include_frozen=include_frozen)
    uses = _with_types(matrix_uses(model, sample), unwrap(model))
    presets = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    chosen = {p: (n, group) for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)}
    split: dict[frozenset[tuple[str, str]], ParamGroup] = {}
    rows = []
    for param, use in uses.items():
        if param not in chosen:
            continue
        name, group = chosen[param]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        reason = _reason(param, use)
        rule = options.get("rule", "muon" if reason is None else "adamw")
        why = reason or _kind(param, use)
        rows.append(Row(name, tuple(param.shape), rule, f"chosen; {why}" if "rule" in options else why))
        stacked = {"stacked": True} if rule == "muon" and param.ndim > 2 and not use.filter else {}
        options = {"rule": rule, **presets.get(rule, {}), **stacked, **options}
        described = frozenset((key, repr(value)) for key, value in options.items())
        members = split.setdefault(described, {"params": [], "param_names": [], **options})
        members["params"].append(param)
        members["param_names"].append(name)
    return MuonSplit(sorted(split.values(), key=lambda group: group["rule"] != "muon"), rows)


def _reason(parameter: nn.Parameter, use: Use) -> str | None:
    """Return why a parameter is not for Muon, or None."""
    if parameter.ndim < 2:
        return "vector"
    if parameter.is_complex():
        return "complex"
    if use.place != "hidden":
        return _WHY[use.place]
    if use.reshaped:
        return "multiplied in another shape"
    if min(_sides(parameter, use)) < 2 or (use.filter and parameter.shape[1] == 1):
        return "one row or column"
    return None


def _kind(parameter: nn.Parameter, use: Use) -> str:
    if use.filter:
        return "filter, {} x {}".format(*_sides(parameter, use))
    return "hidden matrix" if parameter.ndim == 2 else "stack of {} x {}".format(*_sides(parameter, use))


def _sides(parameter: nn.Parameter, use: Use) -> tuple[int, int]:
    if use.filter:
        return parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])
    return parameter.shape[-2], parameter.shape[-1]


def _with_types(uses: Mapping[nn.Parameter, Use] | None, model: nn.Module) -> dict[nn.Parameter, Use]:
    """Return the uses, guessed from the types of modules for parameters that the pass did not reach.

    A mixture of experts does not reach all of its experts, and they must not follow different rules.
    """
    types = _by_type(model)
    if uses is None:
        return types
    reached = {parameter: use for parameter, use in uses.items() if use.place != "not reached"}
    inside = {p: Use("hidden", use.filter) for p, use in types.items() if use.place in ("input", "output")}
    return {parameter: reached.get(parameter, inside.get(parameter, types[parameter])) for parameter in uses}


def _by_type(model: nn.Module) -> dict[nn.Parameter, Use]:
    """Guess the uses from the types of modules, in the order in which they were registered."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    holders = [module for module in model.modules() if isinstance(module, _MATRICES)]
    uses = {parameter: Use("other") for parameter in model.parameters()}
    for position, module in enumerate(holders):
        last = position + 1 == len(holders)
        place: Place = "output" if last else "input" if position == 0 and not tables else "hidden"
        for parameter in module.parameters(recurse=False):
            uses[parameter] = Use(place, isinstance(module, AnyConv))
            if isinstance(module, nn.RNNBase):  # only the first matrix of each direction can read the model's input
                first = any(parameter is each[0] for each in module.all_weights[: 1 + module.bidirectional])
                uses[parameter] = Use("input" if place == "input" and first else "hidden")
    for table in tables:
        uses |= dict.fromkeys(table.parameters(recurse=False), Use("lookup"))  # also if a head shares it
    return uses


def _muon(model: nn.Module, lr: float) -> MixedOptimizer:
    """Muon with the scale that takes AdamW's rate, and AdamW, for which a rate of 0.001 means the same."""
    groups = muon_groups(model, muon={"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01})
    if all(group["rule"] != "muon" for group in groups):
        warnings.warn(
            f"Muon found no hidden matrix or filter in this {type(model).__name__}, so AdamW trains all of it. "
            "print(torchboost.optim.muon_groups(model)) shows the reason for each parameter.",
            NoEffectWarning,
            stacklevel=4,
        )
    return MixedOptimizer(groups, lr=lr)


def _schedule_free(model: nn.Module, lr: float) -> ScheduleFreeAdamW:
    optimizer = ScheduleFreeAdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.register_forward_pre_hook(_Evaluated(optimizer))
    return optimizer


class _Evaluated:
    """Warns once if a trained model is evaluated on the weights of training. A copy of the model does not warn."""

    def __init__(self, optimizer: ScheduleFreeAdamW) -> None:
        self._optimizer: weakref.ref[ScheduleFreeAdamW] | None = weakref.ref(optimizer)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module.training or torch.is_grad_enabled() or self._optimizer is None:
            return
        optimizer = self._optimizer()
        if optimizer is not None and warn_of_training_weights(optimizer, "the model is evaluated on", stacklevel=6):
            self._optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": None}


_NAMED: dict[str, Callable[[nn.Module, float], UpdateRule]] = {"muon": _muon, "schedule_free_adamw": _schedule_free}


def named_optimizer(name: str, model: nn.Module, lr: float | None = None) -> UpdateRule:
    """Build an optimizer over all trainable parameters of a model.

    ``"muon"`` is a :class:`~torchboost.optim.MixedOptimizer` over :func:`~torchboost.optim.muon_groups`, with the
    scale ``"match_rms_adamw"``, so that one rate, that of AdamW, fits all groups. ``"schedule_free_adamw"`` is
    :class:`~torchboost.optim.ScheduleFreeAdamW`. Both decay weights by 0.01, as torch's AdamW does.

    Args:
        name: See above.
        model: Not changed; with ``"schedule_free_adamw"`` it gets a hook that warns once if the model is evaluated (in
            eval mode, without gradients) while it holds the weights of training.
        lr: Learning rate; None takes 0.001, torch's default for AdamW.

    Raises:
        TypeError: ``model`` is not a module, or ``lr`` is not a number.
        ValueError: ``name`` is unknown, ``lr`` is out of range, or the model has nothing to train.

    Warns:
        NoEffectWarning: ``"muon"`` has no parameter to train, so that AdamW trains all of them.

    Cost: for ``"muon"`` two forward passes of a copy of the model on a small input.
    """
    check_module(model)
    if name not in _NAMED:
        raise ValueError(
            f"optimizer: found the name {name!r}; there are {', '.join(_NAMED)}. Give one of these, or an optimizer. "
            f"{nearest(name, list(_NAMED))}".rstrip()
        )
    rate: Any = 1e-3 if lr is None else lr
    check_number("lr", rate, above=True)
    return _NAMED[name](model, float(rate))
