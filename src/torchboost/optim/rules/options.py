"""The options of rules: from a constructor to the param groups, their checks, and their names in MindSpore."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import TypedDict, get_type_hints

from torchboost.core.arguments import check_flag
from torchboost.core.torch_private import capturable_devices, fused_devices
from torchboost.errors import IncompatibleError
from torchboost.optim.pipeline import GradientTransform
from torchboost.optim.schedules import resolve_lr, whole
from torchboost.optim.tensors import is_dense

Schedule = Callable[[int], float]

Nonfinite = Literal["ignore", "skip", "raise"]

SCHEDULED = ("lr", "weight_decay")
"""Options that may be a list or a function of the update."""

LARGEST = 1e18
"""Larger numbers overflow the arguments of torch's kernels, or float32 in them."""

ENTRIES = 67
"""Weights on which a fused kernel is tried: several full vectors on every processor, and a remainder."""

NOT_NEGATIVE = ("lr", "weight_decay", "eps", "momentum", "max_ratio", "l1", "l2")
FLAGS = (
    *("adapt", "amsgrad", "bias_correction", "capturable", "centered", "decoupled_weight_decay", "eps_in_root"),
    *("eps_uncorrected", "master_weights", "maximize", "nesterov", "stacked", "training"),
)

HERE = {
    "learning_rate": "lr",
    "beta1": "betas=(beta1, beta2)",
    "beta2": "betas=(beta1, beta2)",
    "epsilon": "eps",
    "decay": "alpha",
    "initial_accum": "initial_accumulator_value",
    "use_nesterov": "nesterov",
    "use_amsgrad": "amsgrad",
    "use_clip": "clip",
    "lars_filter": "a group with adapt=False",
    "use_lazy": "the class LazyAdam",
    "use_offload": "the class AdamOffload",
    "order_params": "nothing: no update depends on the order; leave the entry out",
    "use_locking": "nothing: an update is one operation; leave it out",
    "loss_scale": "transforms=(Unscale(loss_scale),), or torch.amp.GradScaler",
}
"""MindSpore's name -> ours. The page ``compat.md`` shows this table."""


class Pipeline(TypedDict, total=False):
    """Keyword arguments of every rule. :class:`~torchboost.optim.UpdateRule` describes them."""

    transforms: Sequence[GradientTransform]
    nonfinite: Nonfinite


class Common(Pipeline, total=False):
    """Keyword arguments of every rule, with those that are options of its groups."""

    maximize: bool
    master_weights: bool


COMMON: dict[str, Any] = {"maximize": False, "master_weights": False, "transforms": (), "nonfinite": "ignore"}
"""The defaults of these arguments."""


def rule_arguments(scope: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the arguments of ``UpdateRule``'s constructor from the ``locals()`` of a rule's constructor.

    The entry ``common`` of these names holds arguments of :class:`Common`, of which an unknown one raises
    ``TypeError``. ``more`` are further options of the groups.
    """
    kind, common = type(scope["self"]), scope.get("common", {})
    for name in common.keys() - COMMON.keys():
        raise TypeError(f"{kind.__name__} takes no {name!r}{hint_for(name, list(inspect.signature(kind).parameters))}")
    options = {name: value for name, value in scope.items() if name not in ("self", "__class__", "common")}
    options = {**COMMON, **options, **common, **more}
    apart = {name: options.pop(name) for name in ("params", "transforms", "nonfinite")}
    return {**apart, "defaults": options}


def full_signature(kind: type) -> inspect.Signature:
    """Return the signature of a rule with the keyword arguments written out that its ``**options`` are typed as."""
    signature = inspect.signature(vars(kind)["__init__"])
    parameters = list(signature.parameters.values())[1:]
    last = parameters[-1]
    if last.kind is last.VAR_KEYWORD and str(last.annotation).startswith("Unpack["):
        typed = get_type_hints(vars(kind)["__init__"])[last.name].__args__[0]
        known = inspect.signature(kind.__mro__[1]).parameters
        parameters[-1:] = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=known[name].default if name in known else COMMON[name],
                annotation=annotation.__forward_arg__,
            )
            for name, annotation in typed.__annotations__.items()
        ]
    return signature.replace(parameters=parameters)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that are never valid. Tensors on a device are not read, which would synchronise."""
    for name in NOT_NEGATIVE:
        if name in options:
            _check_number(name, options[name])
    if "betas" in options:
        _check_betas(options["betas"])
    if "dampening" in options and not _is_number(options["dampening"]):
        raise ValueError(f"dampening: found {options['dampening']!r}; give a finite number, at most {LARGEST:g}.")
    if not isinstance(options.get("updates", 0), (int, np.integer)):
        raise TypeError(f"updates: found {options['updates']!r}; give a whole number, at least 0.")
    whole("updates", options.get("updates", 0), least=0)
    for name in FLAGS:
        if name in options:
            check_flag(name, options[name])
    for name in ("foreach", "fused"):
        if not isinstance(options.get(name), (bool, NoneType)):
            raise TypeError(f"{name}: found {options[name]!r}; give True, False or None.")
    if options.get("foreach") and options.get("fused"):
        raise ValueError("foreach and fused exclude each other; set one of them.")
    if options.get("differentiable"):
        raise ValueError("differentiable: found True; autograd does not record the updates here. Leave it False.")
    if options.get("foreach") and not options.get("capturable", True):
        for name, value in (("lr", options.get("lr")), ("betas", options.get("betas", (0.0,))[0])):
            if isinstance(value, Tensor):
                raise ValueError(f"{name}: found a tensor; foreach supports it with capturable=True only.")
    if options.get("nesterov") and "dampening" in options and (not options["momentum"] or options["dampening"]):
        raise ValueError("nesterov: needs a momentum above 0 and dampening=0.")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and name != "lr":
        raise TypeError(f"{name}: found a tensor; give a number from 0 to {LARGEST:g}.")
    number = _read(name, value)
    if isinstance(number, bool) or not isinstance(number, (float, int, np.floating, np.integer)):
        raise TypeError(f"{name}: found {number!r}; give a float from 0 to {LARGEST:g}.")
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{name}: found {number!r}; give a float from 0 to {LARGEST:g}.")


def _check_betas(betas: Any) -> None:
    allowed = "give two numbers, at least 0 and below 1"
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas: found {betas!r}; {allowed}.")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError(f"betas: found a number and a tensor; {allowed}, or two tensors with one element.")
    for number in (_read("betas", beta) for beta in betas):
        if not _is_number(number) or not 0 <= number < 1:
            raise ValueError(f"betas: found {betas!r}; {allowed}.")


def _read(name: str, value: Any) -> Any:
    """Return a number, also from a tensor, or 0 for a tensor on a device, which would be waited for."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name}: found a tensor of shape {tuple(value.shape)}; give one with one element.")
    return value.item() if value.device.type == "cpu" else 0.0


def _is_number(value: Any) -> bool:
    number = isinstance(value, (float, int, np.floating, np.integer)) and not isinstance(value, bool)
    return number and bool(abs(value) <= LARGEST)


def check_fused(param: Tensor, group: Mapping[str, Any], kind: type[Optimizer]) -> None:
    """Refuse a parameter of a fused group that the kernel of ``kind`` does not support, or updates wrongly."""
    if not group["fused"]:
        return
    devices = tuple(fused_devices())
    if not (param.is_floating_point() and param.device.type in devices):
        raise IncompatibleError(
            f"fused=True needs floating-point parameters on one of {devices}, found {param.dtype} on {param.device}; "
            "leave fused out."
        )
    if not is_dense(param):  # the kernel would write into the gaps
        raise IncompatibleError(
            f"fused=True needs parameters without gaps in memory, found one of shape {tuple(param.shape)} with strides "
            f"{param.stride()}; leave fused out."
        )
    if not torch.compiler.is_compiling() and miscomputes(kind, param.dtype, param.device):
        raise IncompatibleError(
            f"fused=True: torch's fused {kind.__name__} computes wrong steps in {param.dtype} on {param.device}; leave "
            "fused out, or set master_weights=True."
        )


def check_capturable(param: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse a parameter of a capturable group whose update torch does not capture in a graph."""
    if not group["capturable"] or torch.compiler.is_compiling():
        return
    devices = capturable_devices()
    if param.device.type not in devices:
        raise IncompatibleError(
            f"capturable=True needs parameters on one of {devices}, found one on {param.device}; leave it False."
        )


def take_schedules(options: dict[str, Any]) -> dict[str, Schedule]:
    """Replace lists and functions in the options by their first value, and return them."""
    schedules: dict[str, Schedule] = {}
    for key in SCHEDULED:
        value = options.get(key)
        if isinstance(value, Tensor) and value.numel() == 1:
            # A tensor with one element is a rate on a device, as in torch, not a list.
            options[key] = value if key == "lr" else value.item()
        elif key in options and (schedule := resolve_lr(value, name=key)) is not None:
            schedules[key] = schedule
            options[key] = schedule(0)
    return schedules


def check_group_names(group: Iterable[str], taken: Collection[str]) -> None:
    """Refuse MindSpore's names as keys of a param group, which torch would keep and ignore, unless they are taken."""
    for name in group:
        if name in HERE and name not in taken:
            raise TypeError(f"param_group: found the key {name!r}{hint_for(name, sorted(taken))}")


def hint_for(name: str, names: Collection[str], here: Mapping[str, str] = HERE) -> str:
    """Return the end of a message, after a name that something does not take. It takes ``names``."""
    if name in here:
        return f", which is MindSpore's name; here it is {here[name]}."
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(names)}."


def miscomputes(kind: type[Optimizer], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two fused steps give other weights than two ordinary steps.

    torch 2.13's fused SGD does so in bfloat16 and float16 on the CPU: half of each vector gets the update of other
    weights. So each kernel is tried once per precision and device. If it cannot be tried, torch raises when it is used.
    """
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            return _differs(kind, dtype, device)
    except RuntimeError:
        return False


@cache
def _differs(kind: Any, dtype: torch.dtype, device: torch.device) -> bool:
    results = []
    for fused in (True, False):  # two steps of about 1 each
        weights = torch.linspace(-2, 2, ENTRIES, device=device).to(dtype).requires_grad_()
        optimizer = kind([weights], lr=1.0, fused=fused)
        for _ in range(2):
            weights.grad = torch.linspace(1.5, 0.5, ENTRIES, device=device).to(dtype)
            optimizer.step()
        results.append(weights.detach().float())
    return not torch.allclose(*results, rtol=0.1, atol=0.1)
