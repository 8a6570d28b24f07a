"""Compute the vectors with MindSpore again and compare them with the stored ones.

Needs an environment of its own (``pip install mindspore==2.10.0 "numpy<2"``), no torch::

    python tests/parity/make_vectors.py            # compare
    python tests/parity/make_vectors.py --write    # compare, then store what MindSpore computed

Hyper-parameters come from ``vectors/cases.json``, initial values and gradients from the stored vectors. Cases
that train a network or only configure are not computed again; the script names them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Step by step in Python: the kernels that have no build for the CPU are replaced by their formulas below.
os.environ["MS_JIT"] = "0"

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.boost.base import _full_svd, _randomized_svd
from mindspore.boost.grad_accumulation import GradientAccumulation
from mindspore.boost.grad_freeze import GradientFreeze
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.nn.optim import lars as lars_module
from mindspore.nn.optim import optimizer as optimizer_module

VECTORS = Path(__file__).parent / "vectors"
Arrays = dict[str, np.ndarray]
STATES = {
    "m": ("moment1", "moments1"),
    "v": ("moment2", "moments2"),
    "vhat": ("vhat",),
    "moment": ("moments",),
    "accum": ("accum", "moments"),
    "stat": ("stat",),
    "ms": ("ms",),
    "mg": ("mg",),
    "mom": ("moment",),
    "linear": ("linear",),
}
"""The name of a state in the vectors, and what MindSpore's optimizers call it."""

INPUTS = {"init", "grad", "indices", "values", "step", "data"}
"""Arrays that a case starts from."""

POWERS = ("beta1_power", "beta2_power")
SETTINGS = {"use_lazy", "use_nesterov", "use_amsgrad", "use_offload", "beta1", "beta2", "eps", "momentum", "dampening"}
SETTINGS |= {"nesterov", "loss_scale", "accum", "decay", "epsilon", "centered", "initial_accum", "lr_power", "l1", "l2"}


def scalar(value: Tensor) -> np.ndarray:
    """Return a number as it is now: the array of a parameter changes with it."""
    return value.asnumpy().reshape(()).copy()


def schedule(hyper: dict[str, Any]) -> nn.Cell:
    """Build the schedule that a case names."""
    return getattr(nn, hyper["cls"])(**{key: value for key, value in hyper.items() if key != "cls"})


def grouped(hyper: dict[str, Any], params: list[Parameter]) -> list[Any]:
    """Return the parameters, in the groups of the case if it has any."""
    if "groups" not in hyper:
        return params
    groups: list[dict[str, Any]] = []
    for given in hyper["groups"]:
        group = {key: given[key] for key in ("lr", "weight_decay", "grad_centralization") if key in given}
        if "schedule" in given:
            group["lr"] = schedule(given["schedule"])
        groups.append({"params": [params[i] for i in given["idx"]], **group})
    return (
        [*groups, {"order_params": [params[i] for i in hyper["order_params"]]}] if "order_params" in hyper else groups
    )


def build(api: str, hyper: dict[str, Any], params: list[Parameter]) -> nn.Optimizer:
    """Build the optimizer of a case, such as ``nn.Adam`` or ``nn.LARS(nn.Momentum)``."""
    inner = api.removesuffix(")").split("(")[-1].removeprefix("nn.")
    wrapped = {"epsilon", "coefficient", "use_clip"} if "LARS" in api else set()
    options = {key: hyper[key] for key in SETTINGS & set(hyper) - wrapped}
    rate = hyper.get("learning_rate")
    options["learning_rate"] = rate if rate is not None else schedule(hyper["learning_rate_schedule"])
    if "weight_decay_schedule" in hyper:
        options["weight_decay"] = schedule(hyper["weight_decay_schedule"])
    elif "weight_decay" in hyper:
        options["weight_decay"] = hyper["weight_decay"]
    optimizer = getattr(nn, inner)(grouped(hyper, params), **options)
    if "target" in hyper:
        optimizer.target = hyper["target"]
    return nn.LARS(optimizer, **{key: hyper[key] for key in wrapped}) if wrapped else optimizer


def rates(optimizer: nn.Optimizer, params: list[Parameter]) -> np.ndarray:
    """Return the learning rate of the next step: one, or one for each parameter."""
    read = optimizer.get_lr()
    if not isinstance(read, tuple):
        return np.float32(read.asnumpy())
    by_name = {param.name: rate.asnumpy() for param, rate in zip(optimizer.parameters, read, strict=True)}
    return np.array([by_name[param.name] for param in params], np.float32)


def states(optimizer: nn.Optimizer, wanted: set[str]) -> dict[str, dict[str, np.ndarray]]:
    """Return the states that the vectors name, each by parameter name."""
    found = {}
    for theirs in wanted:
        name = next(name for name in STATES[theirs] if hasattr(optimizer, name))
        pairs = zip(optimizer.parameters, getattr(optimizer, name), strict=True)
        found[theirs] = {param.name: state.asnumpy().copy() for param, state in pairs}
    return found


def optimizer_case(case: dict[str, Any], stored: Arrays) -> Arrays:
    """Run an optimizer for the steps of a case on the stored gradients."""
    params = [Parameter(Tensor(stored[f"p{i}.init"]), name=p["name"]) for i, p in enumerate(case["params"])]
    whole = build(case["api"], case["hyper"], params)
    inner = whole.opt if "LARS" in case["api"] else whole
    wanted = {key.split(".")[1] for key in stored if key.startswith("p0.")} & set(STATES)
    made: dict[str, list[np.ndarray]] = {}
    for step in range(case["steps"]):
        rate = rates(inner, params)
        grads = {p.name: Tensor(stored[f"p{i}.grad"][step]) for i, p in enumerate(params)}
        whole(tuple(grads[param.name] for param in inner.parameters))
        record = {"lr": rate, "global_step": scalar(inner.global_step)}
        record |= {f"p{i}.param": param.asnumpy().copy() for i, param in enumerate(params)}
        for theirs, values in states(inner, wanted).items():
            record |= {f"p{i}.{theirs}": values[param.name] for i, param in enumerate(params)}
        record |= {k: scalar(getattr(inner, k)) for k in POWERS if k in stored}
        for key, value in record.items():
            made.setdefault(key, []).append(value)
    return {key: np.stack(values) for key, values in made.items() if key in stored}


class SparseStep(nn.Cell):
    """One update from rows; RowTensors exist in graphs only."""

    def __init__(self, optimizer: nn.Optimizer, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.optimizer, self.shape = optimizer, shape

    def construct(self, indices: Tensor, values: Tensor) -> Any:
        return self.optimizer((RowTensorInner(indices, values, self.shape),))


def sparse_case(case: dict[str, Any], stored: Arrays) -> Arrays:
    """Run an optimizer on gradients that name the rows of an embedding."""
    table = Parameter(Tensor(stored["init"]), name=case["params"][0]["name"])
    os.environ["MS_JIT"] = "1"
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        optimizer = build(case["api"], case["hyper"], ParameterTuple([table]))
        step = SparseStep(optimizer, table.shape)
        made: dict[str, list[np.ndarray]] = {"param": [], "m": [], "v": []}
        for indices, values in zip(stored["indices"], stored["values"], strict=True):
            step(Tensor(indices), Tensor(values))
            for key, value in (("param", table), ("m", optimizer.moment1[0]), ("v", optimizer.moment2[0])):
                made[key].append(value.asnumpy().copy())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        os.environ["MS_JIT"] = "0"
    return {key: np.stack(values) for key, values in made.items()}


def schedule_class(case: dict[str, Any], stored: Arrays) -> Arrays:
    """Ask a schedule for its rate at each step."""
    made = schedule({"cls": case["api"].removeprefix("nn."), **case["hyper"]})
    return {"lr": np.array([scalar(made(Tensor(step, ms.int32))) for step in stored["step"].tolist()])}


def schedule_function(case: dict[str, Any], _: Arrays) -> Arrays:
    """Ask a list function for all its rates."""
    return {"lr": np.array(getattr(nn, case["api"].removeprefix("nn."))(**case["hyper"]))}


def accumulation_case(case: dict[str, Any], stored: Arrays) -> Arrays:
    """Give the stored gradients to an accumulator, one micro-step each."""
    hyper = case["hyper"]
    params = [Parameter(Tensor(stored[f"p{i}.init"]), name=p["name"]) for i, p in enumerate(case["params"])]
    optimizer = build(f"nn.{hyper['optimizer']}", hyper, params)
    accumulator = GradientAccumulation(hyper["max_accumulation_step"], optimizer)
    made: dict[str, list[np.ndarray]] = {}
    for step in range(case["steps"]):
        accumulator(Tensor(0.0), tuple(Tensor(stored[f"p{i}.grad"][step]) for i in range(len(params))))
        record = {f"p{i}.param": param.asnumpy().copy() for i, param in enumerate(params)}
        record |= {f"p{i}.accum": a.asnumpy().copy() for i, a in enumerate(accumulator._grad_accumulation)}
        record["accumulation_step"] = scalar(accumulator._accumulation_step)
        record["global_step"] = scalar(optimizer.global_step)
        for key, value in record.items():
            made.setdefault(key, []).append(value)
    return {key: np.stack(values) for key, values in made.items()}


def pca_case(case: dict[str, Any], stored: Arrays) -> Arrays:
    """Compute the principal components of the stored samples."""
    count = case["hyper"]["n_component"]
    full = _full_svd(stored["data"].copy(), count)
    np.random.seed(case["hyper"]["numpy_seed"])
    return {"full": full, "randomized": _randomized_svd(stored["data"].copy(), count)}


def freeze_sequences(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Draw the order in which groups are trained."""
    made = []
    for given in case["expected"]:
        names = ("parameter_groups_number", "freeze_strategy", "freeze_p", "total_steps")
        np.random.seed(given["numpy_seed"])
        groups, strategy, share, steps = (given[name] for name in names)
        freezer = GradientFreeze(groups, strategy, share, steps)
        drawn = freezer.generate_freeze_index_sequence(groups, strategy, share, steps)
        made.append({**given, "sequence": [int(index) for index in drawn]})
    return made


class Named:
    """What stands for a parameter when only its name counts."""

    def __init__(self, name: str) -> None:
        self.name = name


class NamedNet:
    """A network that consists of names."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def trainable_params(self) -> list[Named]:
        return [Named(name) for name in self._names]


def freeze_groups(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Split named parameters into groups."""
    made = []
    for given in case["expected"]:
        freezer = GradientFreeze(given["groups_number"], 1, 0.5, 10)
        groups = freezer.split_parameters_groups(NamedNet(given["names"]), given["groups_number"])
        made.append({**given, "groups": [[param.name for param in group] for group in groups]})
    return made


def scale_updates(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Update loss scales by a list of overflows, by the cell and by the manager on the host."""
    made = []
    for given in case["expected"]:
        settings = (given["loss_scale_value"], given["scale_factor"], given["scale_window"])
        cell, manager = nn.DynamicLossScaleUpdateCell(*settings), ms.amp.DynamicLossScaleManager(*settings)
        scale = Parameter(Tensor(settings[0], ms.float32), name="scale")
        by_cell, by_manager = [], []
        for overflow in given["overflow"]:
            cell(scale, Tensor(overflow))
            manager.update_loss_scale(overflow)
            by_cell.append(float(scale.asnumpy()))
            by_manager.append(float(manager.get_loss_scale()))
        made.append({**given, "scale_cell": by_cell, "scale_manager": by_manager})
    return made


RUNS: dict[str, Callable[[dict[str, Any], Arrays], Arrays]] = {
    "optimizer": optimizer_case,
    "groups": optimizer_case,
    "grad_centralization": optimizer_case,
    "lars": optimizer_case,
    "optimizer_sparse": sparse_case,
    "schedule_class": schedule_class,
    "schedule_function": schedule_function,
    "pca": pca_case,
}
"""What computes the arrays of a family."""

NAMED: dict[str, Callable[..., Any]] = {
    "grad_accumulation_momentum": accumulation_case,
    "grad_accumulation_adam": accumulation_case,
}
LISTS: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "freeze_index_sequence": freeze_sequences,
    "freeze_split_groups": freeze_groups,
    "loss_scale_update": scale_updates,
}
"""What computes the lists of a case without arrays."""


def _centralize(gradient: Tensor, axes: list[int]) -> Tensor:
    return gradient - gradient.mean(tuple(axes), keep_dims=True)


class _SquareSums:
    def __call__(self, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return ops.square(weight).sum(), ops.square(gradient).sum()


class _LarsUpdate:
    def __init__(self, epsilon: float, coefficient: float, clip: bool) -> None:
        self._settings = epsilon, coefficient, clip

    def __call__(self, weight: Tensor, gradient: Tensor, weights: Tensor, grads: Tensor, decay: Any, lr: Any) -> Tensor:
        epsilon, coefficient, clip = self._settings
        norm = ops.sqrt(weights)
        factor = coefficient * norm / (ops.sqrt(grads) + decay * norm + epsilon)
        if clip:
            factor = ops.clip_by_value(factor / lr, 0.0, 1.0)
        return factor * (gradient + decay * weight)


def substitute_kernels() -> None:
    """Put formulas for the kernels that MindSpore has not, or has wrong, on the CPU."""
    optimizer_module.op_gc = _centralize
    lars_module.P.SquareSumAll = _SquareSums
    lars_module.P.LARSUpdate = _LarsUpdate


def compute(case: dict[str, Any], stored: Arrays) -> Arrays | list[dict[str, Any]] | None:
    """Return what MindSpore computes for a case; None if this script cannot."""
    if case["origin"] == "derived":
        return None
    if case["name"] in LISTS:
        return LISTS[case["name"]](case)
    run = NAMED.get(case["name"], RUNS.get(case["family"]))
    return None if run is None else run(case, stored)


def deviation(case: dict[str, Any], stored: Arrays, made: Arrays | list[dict[str, Any]]) -> float:
    """Return the largest difference, in units of the tolerance of the case; infinity if lists differ."""
    if isinstance(made, list):
        return 0.0 if made == case["expected"] else float("inf")
    missing = {key for key in stored if key.split(".")[-1] not in INPUTS} - set(made)
    if missing:
        raise RuntimeError(f"{case['name']} stores {sorted(missing)}, which were not computed; extend its run.")
    rtol, atol = case["tolerance"]["rtol"], case["tolerance"]["atol"]
    worst = 0.0
    for key, value in made.items():
        wanted = stored[key].astype(np.float64)
        worst = max(worst, float(np.max(np.abs(value - wanted) / (atol + rtol * np.abs(wanted)), initial=0.0)))
    return worst


def main() -> int:
    """Compare every case that can be computed again; return how many differ by more than their tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store what MindSpore computed")
    parser.add_argument("names", nargs="*", help="cases; all if none is named")
    options = parser.parse_args()
    file = VECTORS / "cases.json"
    table = json.loads(file.read_text())
    if ms.__version__ != table["mindspore"]:
        print(f"this is MindSpore {ms.__version__}; the vectors come from {table['mindspore']}")
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    substitute_kernels()
    differ = same = 0
    for case in table["cases"]:
        if options.names and case["name"] not in options.names:
            continue
        stored = dict(np.load(VECTORS / case["file"])) if case.get("file") else {}
        made = compute(case, stored)
        if made is None:
            print(f"{case['name']:34} not computed: {case['origin']}, {case['family']}")
            continue
        units = deviation(case, stored, made)
        differ, same = differ + (units > 1.0), same + (units <= 1.0)
        print(f"{case['name']:34} {units:.3f} of the tolerance")
        if options.write and isinstance(made, list):
            case["expected"] = made
        elif options.write:
            np.savez_compressed(VECTORS / case["file"], **{**stored, **made})
    if options.write:
        file.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{same} cases agree, {differ} differ")
    return differ


if __name__ == "__main__":
    sys.exit(min(main(), 1))
