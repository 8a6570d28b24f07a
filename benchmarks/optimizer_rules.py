"""Claim: every rule and form takes at most 1.3 times as long as the best there is: torch, timm or pytorch_optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from inference import resnet50, small_resnet
from options import Options, as_contestant, parameters_of, parser, run, save_steps
from torch import nn

from torchboost import optim
from torchboost.measure.evidence import Contestant
from torchboost.measure.stopwatch import compare

Maker = Callable[[list[nn.Parameter]], Any]
"""Builds an optimizer over parameters."""

BAR = 1.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule in one form, and the same work done by others.

    Args:
        ours: The optimizer of this package.
        peers: Name -> the same rule elsewhere, or the nearest one there is.
        wants: Name -> the package a peer needs.
        sparse: Measured on a table of which a step names few rows.
    """

    ours: Maker
    peers: Mapping[str, Maker]
    wants: Mapping[str, str] = field(default_factory=dict)
    sparse: bool = False


def of(kind: Any, **options: Any) -> Maker:
    return lambda params: kind(params, **options)


def peer(module: str, name: str, **options: Any) -> Maker:
    """Look the class up when it is needed: the package may be missing."""
    return lambda params: getattr(part(module), name)(params, **options)


def part(module: str) -> ModuleType:
    """Import a module of timm without timm itself, which wants torchvision."""
    package, _, rest = module.partition(".")
    if package != "timm":
        return importlib.import_module(module)
    alias = "timm_optim"
    if alias not in sys.modules:
        spec = importlib.util.find_spec("timm")
        stub = ModuleType(alias)
        stub.__path__ = [str(Path(place, "optim")) for place in (spec.submodule_search_locations or ())] if spec else []
        sys.modules[alias] = stub
    return importlib.import_module(f"{alias}.{rest.removeprefix('optim.')}")


FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def formed(rule: str, ours: Any, torchs: Any, options: dict[str, Any]) -> dict[str, Case]:
    """Return the three forms of torch of a rule, each against torch's same form."""
    return {
        f"{rule}, {form}": Case(
            ours=of(ours, **options, **choice),
            peers={f"torch {torchs.__name__}, {form}": of(torchs, **options, **choice)},
        )
        for form, choice in FORMS.items()
    }


def torch_forms(kind: Any, forms: Iterable[str] = FORMS, **options: Any) -> dict[str, Maker]:
    return {f"torch {kind.__name__}, {form}": of(kind, **options, **FORMS[form]) for form in forms}


def cases() -> dict[str, Case]:
    decay: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
    moving: dict[str, Any] = {**decay, "momentum": 0.9}
    adam, adamw, sgd = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
    two = ("loop", "foreach")
    made: dict[str, Case] = {}
    made |= formed("Adam", optim.Adam, adam, decay)
    made |= formed("Adam, amsgrad", optim.Adam, adam, {**decay, "amsgrad": True})
    made |= formed("AdamW", optim.AdamW, adamw, decay)
    made |= formed("AdamWeightDecay", optim.AdamWeightDecay, adamw, decay)
    made |= formed("LazyAdam, dense", optim.LazyAdam, adam, decay)
    made |= formed("SGD", optim.SGD, sgd, moving)
    made |= formed("Momentum, nesterov", optim.Momentum, sgd, {**moving, "nesterov": True})
    made["Adam, nesterov"] = Case(
        ours=of(optim.Adam, **decay, nesterov=True), peers=torch_forms(torch.optim.NAdam, two, **decay)
    )
    made["Adam, nesterov and amsgrad"] = Case(
        ours=of(optim.Adam, **decay, nesterov=True, amsgrad=True), peers=torch_forms(torch.optim.NAdam, two, **decay)
    )
    made["Adam, eps_uncorrected"] = Case(
        ours=of(optim.Adam, **decay, eps_uncorrected=True), peers=torch_forms(adam, two, **decay)
    )
    made["AdamOffload, on the CPU"] = Case(
        ours=of(optim.AdamOffload, **decay), peers=torch_forms(adam, ("fused",), **decay)
    )
    made["LazyAdam, sparse rows"] = Case(
        ours=of(optim.LazyAdam, lr=1e-3, eps_uncorrected=True),
        peers={"torch SparseAdam": of(torch.optim.SparseAdam)},
        sparse=True,
    )
    tensorflow = {"timm RMSpropTF": peer("timm.optim.rmsprop_tf", "RMSpropTF", **moving)}
    for name, options in {"": {}, ", momentum": {"momentum": 0.9}, ", centered": {"centered": True}}.items():
        peers = torch_forms(torch.optim.RMSprop, two, **decay, **options)
        timms = tensorflow if options.get("momentum") else {}
        wants = dict.fromkeys(timms, "timm")
        made[f"RMSProp{name}"] = Case(ours=of(optim.RMSProp, **decay, **options), peers=peers | timms, wants=wants)
    lars = {"trust_coeff": 0.001, "eps": 1e-8, "always_adapt": True}
    for form in FORMS:
        made[f"LARS, matrices only, {form}"] = Case(
            ours=of(optim.LARS, **decay, **FORMS[form]),
            peers={"pytorch_optimizer LARS": peer("pytorch_optimizer", "LARS", **moving)},
            wants={"pytorch_optimizer LARS": "pytorch_optimizer"},
        )
    made["LARS, vectors too"] = Case(
        ours=of(optim.LARS, **decay, vectors=True),
        peers={"timm Lars": peer("timm.optim.lars", "Lars", **moving, **lars)},
        wants={"timm Lars": "timm"},
    )
    for name, options in {"": {}, ", eps_in_root": {"eps_in_root": True}}.items():
        made[f"Lamb{name}"] = Case(
            ours=of(optim.Lamb, **decay, **options),
            peers={
                "timm Lamb": peer("timm.optim.lamb", "Lamb", **decay, max_grad_norm=None),
                "pytorch_optimizer Lamb": peer("pytorch_optimizer", "Lamb", **decay, max_grad_norm=0.0),
            },
            wants={"timm Lamb": "timm", "pytorch_optimizer Lamb": "pytorch_optimizer"},
        )
    made["FTRL"] = Case(
        ours=of(optim.FTRL, lr=1e-3, l1=1e-3, l2=1e-3),
        peers={"pytorch_optimizer FTRL": peer("pytorch_optimizer", "FTRL", lr=1e-3, lambda_1=1e-3, lambda_2=1e-3)},
        wants={"pytorch_optimizer FTRL": "pytorch_optimizer"},
    )
    return made


def tiny() -> nn.Module:
    """2,000 tensors of 8 entries, which show the cost of a step without its arithmetic."""
    return nn.ParameterList(torch.zeros(8) for _ in range(2000))


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "resnet50": ("ResNet-50", resnet50),
    "small": ("a small ResNet", small_resnet),
    "tiny": ("2,000 tensors of 8 entries", tiny),
}


def weights(make: Callable[[], nn.Module]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(p.shape) * 0.02) for p in make().parameters()]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def table() -> list[nn.Parameter]:
    """An embedding of 100,000 rows of which a step names 1,000."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(100_000, 64))
    rows = torch.randint(0, len(param), (1000,))
    param.grad = torch.sparse_coo_tensor(rows[None], torch.randn(len(rows), 64), tuple(param.shape))
    return [param]


def missing(found: Mapping[str, Case]) -> set[str]:
    wanted = {package for case in found.values() for package in case.wants.values()}
    return {package for package in wanted if importlib.util.find_spec(package) is None}


def measure(options: Options) -> list[Path]:
    return [measure_model(name, options) for name in (["tiny"] if options.smoke else MODELS)]


def measure_model(name: str, options: Options) -> Path:
    title, make = MODELS[name]
    found, absent = cases(), missing(cases())
    made: list[Contestant] = []
    for number, (rule, case) in enumerate(found.items()):
        options.progress(f"rules on {title}", number, len(found), rule)
        peers = {way: build for way, build in case.peers.items() if case.wants.get(way) not in absent}
        builders = {"torchboost": case.ours, **peers}
        compared = compare(
            {way: build(table() if case.sparse else weights(make)).step for way, build in builders.items()},
            baselines=list(peers),
            pairs=2 if options.smoke else 30,
        )
        made.append(as_contestant(compared, "torchboost", case=rule))
        made += [as_contestant(compared, way, "stock", case=rule) for way in peers]
    absences = [f"{package} is not installed: rules are measured without it" for package in sorted(absent)]
    return save_steps(
        options.file("optimizer_rules", name),
        made,
        title=f"Every rule and form: {title}",
        model=title,
        parameters=parameters_of(make()),
        notes=[f"the bar is {BAR} times the best of the others; a form of torch is compared with itself", *absences],
    )


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
