"""What is decided about the speed levers, as values that are saved as JSON, and a cache of them on disk."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm
from torchboost.core.files import Record, load_record, record_folder, store_record
from torchboost.core.forward import tensors_in
from torchboost.core.hardware import kernel_switches
from torchboost.core.torch_private import buffer_slots, compiled_call, parameter_slots
from torchboost.core.wrapping import hookable
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import device_name, package_version, processor_name

__all__ = ["Choice", "Machine", "Source", "Verdict", "in_a_line", "key_of", "load_choice", "store_choice"]

Source = Literal["trial", "cache", "checkpoint", "prior"]
"""Where a choice comes from."""

_Device: TypeAlias = torch.device | str  # inside of Machine, torch is the name of a field
_ADDRESSES = 1 << 40
"""Integers from here on are addresses and hashes, which differ in each process."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Machine(_Record):
    """What a measured choice depends on besides the model and its inputs."""

    processor: str
    threads: int
    device: str
    torch: str
    torchboost: str

    @classmethod
    def of(cls, device: _Device) -> Self:
        """Describe this machine and process, with the device that trains."""
        return cls(
            processor=processor_name(),
            threads=torch.get_num_threads(),
            device=device_name(device),
            torch=torch.__version__,
            torchboost=package_version(),
        )

    def differences(self, here: Machine) -> str:
        """Return each field that differs, as it was found and as it is ``here``. Empty if the machines are equal."""
        before, now = self.model_dump(), here.model_dump()
        return "; ".join(f"{name}: found {before[name]}, here {now[name]}" for name in now if before[name] != now[name])


class Verdict(_Record):
    """What is decided about one lever, and why.

    Attributes:
        lever: Name of the algorithm in the registry.
        kept: Whether it is on.
        reason: One sentence without its full stop.
        ratio: How many times as fast a step is with the lever as without it, both with the levers kept before it. None
            if it was not measured.
        pairs: Number of paired steps behind the ratio.
        price: Seconds that it costs once, such as those of a compilation. 0 if it is not tried or costs nothing.
        interrupted: Whether its first steps took longer than the trial had left. The compiler keeps parts of its work
            on disk, so a later start may come to a decision.
        form: The settings of the lever that the trial preferred, as code. Empty for those of the level.
        check: How far its step was found to be from the plain one, in words. Empty if it is off.
    """

    lever: str
    kept: bool
    reason: str
    ratio: Interval | None = None
    pairs: int = 0
    price: float = 0.0
    interrupted: bool = False
    form: str = ""
    check: str = ""

    def but(self, **changes: Any) -> Self:
        """Return the same with other entries."""
        return self.model_copy(update=changes)


class Choice(_Record):
    """The decision about all levers of a level.

    Attributes:
        verdicts: One for each lever, in the order of the trial.
        source: Where the choice comes from.
        seconds: Time that the trial took.
        budget: Time that the trial was allowed to take. 0 if there was no trial. Unit: seconds.
        peak_bytes: Memory that the trial needed in addition to that of training. 0 if there was no trial.
        step_seconds: Median time of a plain step. None if it was not measured.
        ratio: How many times as fast a step of the chosen combination is as a step without levers. None if it was not
            measured.
        machine: Where it was measured. None for a prior.
    """

    verdicts: tuple[Verdict, ...]
    source: Source
    seconds: float = 0.0
    budget: float = 0.0
    peak_bytes: int = 0
    step_seconds: float | None = None
    ratio: Interval | None = None
    machine: Machine | None = None

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> Self | None:
        """Return what a checkpoint says about the levers, measured or as they were. None if it says nothing.

        Raises:
            ValueError: It is damaged.
        """
        key = next((key for key in ("choice", "levers") if key in state), None)
        if key is None:
            return None
        try:
            if key == "choice":
                return cls.model_validate_json(state[key]).model_copy(update={"source": "checkpoint"})
            verdicts = tuple(_as_it_was(name, on) for name, on in state[key].items())
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{key}: the checkpoint holds {str(state[key])[:60]!r}, which says nothing about levers; load another "
                f"checkpoint, or this state without its key {key!r}, and the first training call measures again."
            ) from error
        return cls(verdicts=verdicts, source="checkpoint")

    def only(self, levers: Iterable[Algorithm]) -> Self:
        """Return the same without the verdicts about other levers."""
        names = {lever.name for lever in levers}
        return self.model_copy(update={"verdicts": tuple(v for v in self.verdicts if v.lever in names)})

    def figures(self) -> dict[str, float]:
        """Return each lever as 1 or 0, how many times as fast a step is, if known, and the seconds of the trial."""
        figures = {f"boost/{verdict.lever}": float(verdict.kept) for verdict in self.verdicts}
        if self.ratio is not None:
            figures["boost/times_as_fast"] = self.ratio.mid
        return {**figures, "boost/trial_seconds": self.seconds if self.source == "trial" else 0.0}

    @property
    def levers(self) -> dict[str, bool | str]:
        """Lever -> whether it is on, or its form. What :meth:`saved` reads under ``"levers"``."""
        return {verdict.lever: verdict.kept and (verdict.form or True) for verdict in self.verdicts}

    @property
    def kept(self) -> frozenset[str]:
        """Names of the levers that are on."""
        return frozenset(verdict.lever for verdict in self.verdicts if verdict.kept)

    @property
    def gain(self) -> str:
        """The ratio as a clause. Empty if it was not measured."""
        if self.ratio is None:
            return ""
        low, high = f"{self.ratio.low:.2f}", f"{self.ratio.high:.2f}"
        return f"together a step is {self.ratio.mid:.2f} times as fast as without them ({low} to {high})"

    def describe(self) -> str:
        """Return the choice in one line."""
        parts = [f"{v.lever} {'on' if v.kept else 'off'} ({v.reason})" for v in self.verdicts]
        where = {"trial": f"measured in {self.seconds:.1f} s", "cache": "measured earlier on this machine"}
        return f"{'; '.join([*parts, *filter(None, [self.gain])])}. Source: {where.get(self.source, self.source)}."

    def explain(self) -> str:
        """Return the choice in one line per lever."""
        headings = {
            "trial": f"measured at the first training call, {self.seconds:.1f} s:",
            "cache": "measured at an earlier start, from the cache:",
            "checkpoint": "from the checkpoint:",
        }
        lines = [headings.get(self.source, "not measured:")]
        for verdict in self.verdicts:
            interval = verdict.ratio
            figure = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f}, {verdict.pairs} pairs)"
            lines.append(f"  {verdict.lever}  {'on' if verdict.kept else 'off'}: {verdict.reason}{figure}")
        return "\n".join([*lines, *([f"  {self.gain}"] if self.gain else [])])

    def measured_elsewhere(self, device: torch.device) -> str:
        """Return how the machine of a checkpoint's choice differs from this one, and what to do. Empty if it is not."""
        differences = "" if self.machine is None else self.machine.differences(Machine.of(device))
        if not differences:
            return ""
        return (
            f"the levers of the checkpoint were measured elsewhere ({differences}). They are used without a new trial. "
            'To measure here, boost again and load the state without its key "choice"; to choose, name the levers in '
            'boost(..., config={"extra": {...}}).'
        )


def _as_it_was(lever: str, on: Any) -> Verdict:
    form = on if isinstance(on, str) and on.startswith(f"{lever}(") else ""
    kept: Any = True if form else on
    return Verdict(lever=lever, kept=kept, form=form, reason="as in the checkpoint")


def in_a_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text, as a reason."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300].removesuffix(": ")


class _Entry(Record):
    choice: Choice


def load_choice(key: str) -> Choice | None:
    """Return the choice that was stored on disk under a key of :func:`key_of`. None without one."""
    entry = load_record(record_folder("choices"), key, _Entry)
    return None if entry is None else entry.choice.model_copy(update={"source": "cache"})


def store_choice(key: str, choice: Choice) -> None:
    """Keep a measured choice on disk. No fault of the disk reaches the training."""
    store_record(record_folder("choices"), _Entry(key=key, choice=choice))


def key_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    inputs: Any,
    *,
    candidates: Iterable[Algorithm],
    machine: Machine,
    conditions: Mapping[str, Any] | None = None,
) -> str:
    """Return a key that two runs share if a choice of levers that was measured in one is right for the other.

    It is a checksum of the names, types and plain attributes of the modules and the instructions of their ``forward``,
    of the forms of parameters, buffers and tensors of the inputs, of the optimizers and their groups, of the
    candidates, the conditions and the machine. Values of tensors and learning rates do not count, and of other numbers
    that are not integers only whether they are 0. What two models differ in beyond that, they are checked for.

    Args:
        model: Before any lever of the trial changes it.
        optimizers: Over its parameters.
        inputs: What the model is called with, such as ``(args, kwargs)``.
        candidates: The levers of the trial with their settings, in its order.
        machine: Where the trial takes place.
        conditions: What else the choice depends on, by name, such as the length of the run.

    Returns:
        64 hexadecimal digits.
    """
    numbers: dict[int, int] = {}  # shared tensors and modules count

    def form(tensor: Tensor | None) -> str:
        if tensor is None or is_lazy(tensor) or tensor.is_nested:
            return str(type(tensor))
        memory = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        number = numbers.setdefault(id(tensor), len(numbers))
        return f"{number} {tensor.shape} {tensor.dtype} {memory} {tensor.device} {tensor.requires_grad}"

    modules = [
        [
            [name, str(type(module)), _instructions(module), compiled_call(module) is not None],
            [[key, _plain(value)] for key, value in sorted(vars(module).items()) if key[0] != "_"],
            [[key, form(tensor)] for slots in (parameter_slots, buffer_slots) for key, tensor in slots(module).items()],
        ]
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    groups = [
        [str(type(optimizer)), isinstance(group.get("lr"), Tensor), options, list(map(form, group["params"]))]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for known in [hookable(optimizer).defaults.keys() - {"lr"}]  # a schedule adds numbers of its own to a group
        for options in [[[key, _plain(v)] for key, v in group.items() if key in known or v is True]]
    ]
    kinds = {p.device.type for p in model.parameters() if torch.amp.is_autocast_available(p.device.type)}
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]
    description = [modules, groups, list(map(form, tensors_in(inputs))), list(map(repr, candidates))]
    circumstances = [sorted(machine.model_dump().items()), sorted((conditions or {}).items()), kernel_switches()]
    return hashlib.sha256(repr([description, circumstances, autocast]).encode()).hexdigest()


def _instructions(module: nn.Module) -> str:
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return "" if code is None else f"{code.co_code.hex()} {code.co_names}"


def _plain(value: Any) -> str:
    """Describe an attribute or an option: words and whole numbers by their value, others by whether they are 0."""
    if isinstance(value, float):
        return "0" if value == 0 else "not 0"
    if isinstance(value, tuple):
        return ",".join(map(_plain, value)) if len(value) < 10 else "tuple"
    if isinstance(value, (bool, torch.dtype)) or value is None or (isinstance(value, str) and str.isidentifier(value)):
        return str(value)
    return str(value) if type(value) is int and abs(value) < _ADDRESSES else type(value).__name__
