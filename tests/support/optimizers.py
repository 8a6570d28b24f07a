"""The update rules under test, a small problem for them, and what they hold as plain values."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchboost.optim
from torchboost.optim.rules.adam import Adam, AdamW, AdamWeightDecay
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.ftrl import FTRL
from torchboost.optim.rules.lazy_adam import LazyAdam
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.muon import Muon
from torchboost.optim.rules.offload import AdamOffload
from torchboost.optim.rules.rmsprop import RMSProp
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from torchboost.optim.rules.sgd import SGD, Momentum
from torchboost.optim.rules.trust_ratio import LARS, Lamb

SHAPES = ((4, 3), (4,), (), (2, 3, 2, 2), (0, 3))
MATRICES = ((4, 3), (3, 4), (4, 3), (2, 3, 2, 2), (0, 3))
FORMS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}


def mixed(params: Any, **options: Any) -> MixedOptimizer:
    """Matrices follow Muon, everything else AdamW; neighbours that follow the same rule share a group."""
    given = list(params.items() if hasattr(params, "items") else params)
    groups: list[dict[str, Any]] = []
    for entry in given:
        if isinstance(entry, dict):
            groups += mixed_groups(entry["params"], {key: value for key, value in entry.items() if key != "params"})
    groups = groups or mixed_groups(given, {})
    return MixedOptimizer(groups, **options)


def mixed_groups(params: Iterable[Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for entry in params:
        param = entry[1] if isinstance(entry, tuple) else entry
        rule = "muon" if param.ndim > 1 else "adamw"
        if not groups or groups[-1]["rule"] != rule:
            own = {"ns_dtype": torch.float32} if rule == "muon" else {}
            groups.append({"params": [], "rule": rule, **own, **options})
        groups[-1]["params"].append(entry)
    return groups


def shapes_of(name: str) -> tuple[tuple[int, ...], ...]:
    """Shapes that the rule of a case accepts."""
    return MATRICES if name.startswith("Muon") else SHAPES


def _cases() -> dict[str, Callable[..., UpdateRule]]:
    cases: dict[str, Callable[..., UpdateRule]] = {}
    for name, form in FORMS.items():
        cases[f"Adam-{name}"] = partial(Adam, lr=0.01, weight_decay=0.1, **form)
        cases[f"SGD-{name}"] = partial(SGD, lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.1, **form)
    for name in ("fused", "default"):  # the kernels are those of Adam and SGD
        form = FORMS[name]
        cases[f"Adam-amsgrad-{name}"] = partial(Adam, lr=0.01, amsgrad=True, **form)
        cases[f"AdamW-{name}"] = partial(AdamW, lr=0.01, weight_decay=0.1, **form)
        cases[f"AdamWeightDecay-{name}"] = partial(AdamWeightDecay, lr=0.01, weight_decay=0.1, **form)
        cases[f"Momentum-{name}"] = partial(Momentum, lr=0.01, nesterov=True, **form)
        cases[f"LARS-{name}"] = partial(LARS, lr=0.1, weight_decay=0.1, coefficient=0.1, **form)
    cases["SGD-plain"] = partial(SGD, lr=0.01)
    cases["Adam-nesterov"] = partial(Adam, lr=0.01, weight_decay=0.1, nesterov=True, amsgrad=True)
    cases["Adam-eps_uncorrected"] = partial(Adam, lr=0.01, weight_decay=0.1, eps_uncorrected=True)
    cases["LazyAdam"] = partial(LazyAdam, lr=0.01, weight_decay=0.1)
    cases["LazyAdam-exact"] = partial(LazyAdam, lr=0.01, weight_decay=0.1, exact=True)
    cases["AdamOffload"] = partial(AdamOffload, lr=0.01, weight_decay=0.1)
    cases["Lamb"] = partial(Lamb, lr=0.01, weight_decay=0.1)
    cases["Lamb-eps_in_root"] = partial(Lamb, lr=0.01, weight_decay=0.1, eps_in_root=True)
    cases["RMSProp"] = partial(RMSProp, lr=0.01, weight_decay=0.1)
    cases["RMSProp-centered"] = partial(RMSProp, lr=0.01, momentum=0.9, centered=True)
    cases["Muon"] = partial(Muon, lr=0.01, weight_decay=0.1, ns_dtype=torch.float32)
    cases["Muon-match_rms_adamw"] = partial(
        Muon, lr=0.01, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32
    )
    cases["MixedOptimizer"] = mixed
    cases["ScheduleFreeAdamW"] = partial(ScheduleFreeAdamW, lr=0.01, weight_decay=0.1, warmup_steps=3)
    cases["ScheduleFreeSGD"] = partial(ScheduleFreeSGD, lr=0.1, weight_decay=0.1)
    cases["FTRL"] = partial(FTRL, lr=0.1, l1=0.001, l2=0.01)
    return cases


CASES = _cases()
"""Every rule, and every form of a rule with a state or a code path of its own."""

DISTINCT = [
    *("Adam-default", "SGD-default"),
    *(name for name in CASES if name.split("-")[-1] not in ("loop", "foreach", "default")),
]
"""Cases that differ in more than the kernel that torch calls."""
RULES: dict[str, Callable[..., UpdateRule]] = {
    rule.__name__: rule
    for rule in (
        *(Adam, AdamW, AdamWeightDecay, LazyAdam, AdamOffload, SGD, Momentum, LARS, Lamb, RMSProp, FTRL),
        *(Muon, ScheduleFreeAdamW, ScheduleFreeSGD),
    )
}
RULES["MixedOptimizer"] = mixed
SCHEDULED = [name for name in RULES if not name.startswith("ScheduleFree")]
"""Rules whose learning rate may follow a schedule."""


def rate_for(name: str, schedule: Any) -> Any:
    """Return the schedule, or its first rate for rules that take a number only."""
    if name.split("-")[0] in SCHEDULED:
        return schedule
    return schedule(0) if callable(schedule) else schedule[0]


def all_rules() -> set[type[UpdateRule]]:
    """Return every rule in the package, listed here or not."""
    for module in pkgutil.iter_modules(torchboost.optim.__path__):
        importlib.import_module(f"torchboost.optim.{module.name}")
    found: set[type[UpdateRule]] = set()
    todo = [UpdateRule]
    while todo:
        new = [rule for rule in todo.pop().__subclasses__() if rule.__module__.startswith("torchboost.")]
        found.update(rule for rule in new if not rule.__name__.startswith("_"))
        todo += new
    return found


def parameters(
    shapes: Iterable[Sequence[int]] = SHAPES, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(tuple(shape), generator=generator).to(dtype)) for shape in shapes]


def give_grads(params: Sequence[Tensor], step: int, *, scale: float = 1.0) -> None:
    """Gradients that depend on the step and the position only."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = grad.to(param.dtype)


def train(optimizer: Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> list[Tensor]:
    """Take the steps and return copies of the parameters."""
    for step in steps:
        give_grads(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def values(optimizer: Optimizer) -> Any:
    """Everything an optimizer holds, as values that can be compared: groups, state, weights."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    groups = [{k: frozen(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = [{k: frozen(v) for k, v in optimizer.state[p].items()} if p in optimizer.state else None for p in params]
    return groups, states, [frozen(param) for param in params]


def frozen(value: Any) -> Any:
    """Bytes and layout of a tensor, the value itself otherwise (nan equal to nan)."""
    if isinstance(value, Tensor):
        plain = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return repr(value)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(frozen(a) == frozen(b) for a, b in zip(ours, theirs, strict=True))
