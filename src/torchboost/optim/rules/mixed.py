"""One optimizer whose param groups follow different rules."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.arguments import is_number
from torchboost.errors import nearest
from torchboost.optim.rules.adam import Adam, AdamW, AdamWeightDecay
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.ftrl import FTRL
from torchboost.optim.rules.muon import Muon
from torchboost.optim.rules.options import Common, rule_arguments
from torchboost.optim.rules.rmsprop import RMSProp
from torchboost.optim.rules.sgd import SGD, Momentum
from torchboost.optim.rules.trust_ratio import Lamb

GROUP_RULES: dict[str, type[UpdateRule]] = {
    "adam": Adam,
    "adamw": AdamW,
    "adam_weight_decay": AdamWeightDecay,
    "ftrl": FTRL,
    "lamb": Lamb,
    "momentum": Momentum,
    "muon": Muon,
    "ms_rmsprop": RMSProp,
    "sgd": SGD,
}
"""Rules that a group may name. Their update depends on the group and its tensors only."""

_OVERWRITTEN = (
    "all param groups have the learning rate {:g} now, and they began with different ones. The rate of one rule is not "
    "that of another. Keep the first ones, rates = [group['lr'] for group in optimizer.param_groups]: OneCycleLR takes "
    "max_lr=rates, cycle_momentum=False, and a loop that writes group['lr'] gives each rate * share of the schedule."
)


class MixedOptimizer(UpdateRule):
    """One optimizer in which every param group names its rule: ``{"params": ..., "rule": "muon", "lr": 0.02}``.

    It has one state dict, one schedule and one gradient pipeline over all groups. Clipping sees all gradients. A group
    takes the options of its rule, and the rule's defaults for options that it does not set. A group is updated as by
    the rule's own class, bit for bit.

    ``GradScaler`` unscales the gradients before the step, in groups with ``fused=True`` too.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        rule: Rule of the groups that name none.
        lr: Learning rate of the groups that set none. None takes the default of each rule.
        weight_decay: The same for the weight decay.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> groups = [{"params": [model.weight], "rule": "muon", "lr": 0.02}, {"params": [model.bias], "lr": 3e-3}]
        >>> optimizer = MixedOptimizer(groups, weight_decay=0.01)
        >>> [group["rule"] for group in optimizer.param_groups]
        ['muon', 'adamw']
    """

    kept = (*UpdateRule.kept, "_rules", "_apart")
    _apart = False

    def __init__(
        self, params: Any, rule: str = "adamw", *, lr: Any = None, weight_decay: Any = None, **common: Unpack[Common]
    ) -> None:
        self._rules: dict[str, UpdateRule] = {}
        self._named(rule)
        arguments = rule_arguments(locals())
        options = arguments["defaults"]
        arguments["defaults"] = {k: v for k, v in options.items() if v is not None or k not in ("lr", "weight_decay")}
        super().__init__(**arguments)
        self._apart = len(self._rates()) > 1

    @property
    def title(self) -> str:
        """The rules of the groups with their learning rates, as in ``"Muon at 0.02 and AdamW at 0.001"``."""
        rates: dict[str, list[str]] = {}
        for group in self.param_groups:
            rate = group.get("initial_lr", group["lr"])
            shown = f"{float(rate):.3g}" if is_number(rate) or isinstance(rate, Tensor) else "a schedule"
            rates.setdefault(self.rule_for(group).title, []).append(shown)
        return " and ".join(f"{title} at {' and '.join(dict.fromkeys(of))}" for title, of in rates.items())

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return the rule that a param group names."""
        return self._named(group.get("rule", self.defaults["rule"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of one rule with the same groups.

        Groups in the file that name no rule, as from other optimizers, keep the rule that they have here.

        Raises:
            ValueError: A group of the file follows another rule, or the groups or states differ. Nothing was changed.
        """
        saved = [dict(group) for group in state_dict["param_groups"]]
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(saved)} param groups, this optimizer {len(self.param_groups)}; build it with "
                "the groups of the checkpoint. Those of a version that did not split fused matrices are made by "
                "torchboost.optim.muon_groups(model, split=False)."
            )
        for number, (theirs, own) in enumerate(zip(saved, self.param_groups, strict=False)):
            if theirs.setdefault("rule", own["rule"]) != own["rule"]:
                raise ValueError(
                    f"group {number}: the checkpoint was written with rule={theirs['rule']!r}, but the group has "
                    f"rule={own['rule']!r}; build the optimizer with the groups of the checkpoint."
                )
        super().load_state_dict({**state_dict, "param_groups": saved})

    def _check_whole(self) -> None:
        super()._check_whole()
        if self._apart and not torch.compiler.is_compiling() and len(rates := self._rates()) == 1 and max(rates) > 0:
            self._apart = False
            warnings.warn(_OVERWRITTEN.format(max(rates)), stacklevel=6)

    def _rates(self) -> set[float]:
        """Return the learning rates, if groups follow several rules and all of their rates are numbers."""
        rates = [group["lr"] for group in self.param_groups]
        several = len({group["rule"] for group in self.param_groups}) > 1
        return {float(rate) for rate in rates} if several and all(map(is_number, rates)) else set()

    def _named(self, name: Any) -> UpdateRule:
        if name not in GROUP_RULES:
            raise ValueError(
                f"rule: found {name!r}; a group may name {', '.join(GROUP_RULES)}. "
                f"{nearest(str(name), list(GROUP_RULES))}".rstrip()
            )
        if name not in self._rules:
            build: Any = GROUP_RULES[name]
            self._rules[name] = build([{"params": []}])
        return self._rules[name]
