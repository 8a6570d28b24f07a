"""The results of a part of the plan, saved after every contestant, and what is measured of a step besides its time."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from torchboost.core.files import write_whole
from torchboost.measure.stopwatch import Clock, Comparison

DEVICE = torch.device("cuda")
SAME = ("torch", "torchboost", "device", "commit")
"""What must be equal for a result to be kept."""
INTERRUPTED = "the process was interrupted"
Row = dict[str, Any]


class OtherResultsError(Exception):
    """The file holds results of another machine or version."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A part of the plan, and the options of the command line. ``ended`` is how an earlier process of it ended."""

    kind: str
    subject: str
    only: Sequence[str]
    cold: bool
    seconds: float
    out: str
    pairs: int
    tiny: bool
    compiled: bool
    again: bool
    ended: str

    @property
    def file(self) -> Path:
        parts = ("gpu", self.kind, self.subject, "tiny" if self.tiny else "")
        return Path(self.out, "-".join(filter(None, parts)) + ".json")


class Turn(NamedTuple):
    """A contestant.

    Args:
        measure: Returns its row.
        seconds: It does not begin if less is left.
    """

    measure: Callable[[], Row]
    seconds: float = 10.0


@dataclass
class Results:
    """Rows by the name of the contestant, in a file that is complete at any time.

    Args:
        path: The file.
        head: Title, environment and settings; ``head["environment"]`` decides whether rows of an earlier call count.
        rows: Name -> what was measured.
    """

    path: Path
    head: Row
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)

    @classmethod
    def at(cls, path: Path, head: Row) -> Results:
        """Continue the results at ``path``.

        Raises:
            OtherResultsError: They are of another machine or version.
        """
        if not path.exists():
            return cls(path, head)
        saved = json.loads(path.read_text(encoding="utf-8"))
        found, here = saved["environment"], head["environment"]
        differs = [f"{key} {found[key]!r}, here {here[key]!r}" for key in SAME if found[key] != here[key]]
        if differs:
            raise OtherResultsError(
                f"{path}: found results with {'; '.join(differs)}. Move the file away, or give another folder: --out."
            )
        return cls(path, {**head, "environment": found}, saved["rows"])

    def put(self, name: str, row: Row) -> None:
        self.rows[name] = row
        text = json.dumps({**self.head, "rows": self.rows}, indent=1, allow_nan=True) + "\n"
        write_whole(self.path, text.encode())

    def close_interrupted(self, reason: str) -> None:
        """Say of a contestant whose process ended before it was measured why that was."""
        for name, row in self.rows.items():
            if row.get("error") == INTERRUPTED and reason:
                self.put(name, {**row, "error": reason})

    def wanted(self, name: str, *, again: bool) -> bool:
        """Whether a contestant is to be measured: it was not yet, or failed and is wanted again."""
        return name not in self.rows or (again and "error" in self.rows[name])


def take_turns(turns: Mapping[str, Turn], results: Results, *, ends: float, again: bool = False) -> list[str]:
    """Measure every contestant whose result is missing, while there is time. Return the names of those that are left.

    The file names a contestant as interrupted while it runs, so that what crashes or hangs is not run a second time.
    """
    left = []
    for name, turn in turns.items():
        if not results.wanted(name, again=again):
            continue
        if ends - time.monotonic() < turn.seconds:
            left.append(name)
            continue
        results.put(name, {"error": INTERRUPTED})
        began = time.monotonic()
        row: Row
        try:
            row = turn.measure()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-3000:]}
        gc.collect()
        torch.cuda.empty_cache()
        row["turn_seconds"] = time.monotonic() - began
        results.put(name, row)
        print(f"  {row['turn_seconds']:6.1f} s  {name}: {summary(row)}", flush=True)
    return left


def summary(row: Row) -> str:
    """Return the row in a few words."""
    if "error" in row:
        return row["error"].partition("\n")[0][:160]
    said = [f"{1e3 * row['seconds']['mid']:.2f} ms"] if "seconds" in row else []
    said += [f"{r['interval']['mid']:.3f} x {base}" for base, r in row.get("ratios", {}).items()]
    return ", ".join([*said, row.get("said", "")]).removesuffix(", ")


def figures(found: Comparison, name: str) -> Row:
    """Return the times of a contestant and its ratios to the baselines, with all samples of both."""
    bases = [base for base in found.baselines if base != name]
    return {
        "seconds": found.step_seconds(name).model_dump(),
        "ratios": {base: found.ratio(name, base).model_dump() for base in bases},
        "samples": found.samples[name],
        "baselines": {base: found.samples[base] for base in bases},
        "warmup_seconds": found.warmup_seconds[name],
        "settled": name not in found.unsettled,
    }


def host(step: Callable[[], object], clock: Clock, times: int = 5) -> Row:
    """Return how long a step keeps the host busy if the device was idle before, and how often it waits in it."""
    seconds = []
    for _ in range(times):
        begin = clock()
        step()
        seconds.append(clock.read() - begin)
    clock()
    return {"host_seconds": median(seconds), "waits": waits(step)}


def waits(step: Callable[[], object]) -> int:
    """Return how often the host waits for the device in a step, as CUDA tells."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def apart(own: Sequence[float], stock: Sequence[float]) -> float:
    """Return the largest relative difference of the losses of equal steps."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(own, stock, strict=True))
