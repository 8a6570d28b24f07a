"""One part of the plan of ``gpu.py``, which starts this in a process of its own and ends it when its time is over."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping

import gpu_checks
import gpu_loops
import gpu_rules
from gpu import REFUSED
from gpu_record import DEVICE, OtherResultsError, Results, Task, Turn, take_turns

from torchboost.core.hardware import device_fault
from torchboost.measure.stopwatch import environment

CLOSING_SECONDS = 5.0
"""Kept for the end of the process."""

TINY_TURN_SECONDS = 10.0
"""The most that must be left for a contestant at tiny sizes."""

Kind = Callable[[Task, Results], Mapping[str, Turn]]
"""Returns the contestants of a part."""
KINDS: Mapping[str, Kind] = {
    "machine": gpu_checks.machine,
    "tests": gpu_checks.tests,
    "rules": gpu_rules.rules,
    "levels": gpu_loops.levels,
    "padding": gpu_loops.padding,
    "freezing": gpu_loops.freezing,
    "offload": gpu_loops.offload,
}


def main(text: str) -> int:
    began, task = time.monotonic(), Task(**json.loads(text))
    fault = device_fault(DEVICE)
    if fault is not None:
        print(f"gpu: found no CUDA device ({fault}); run this on a machine with one.", file=sys.stderr)
        return REFUSED
    here = environment(DEVICE)
    head = {"kind": task.kind, "subject": task.subject, "environment": here.model_dump(), "pairs": task.pairs}
    try:
        results = Results.at(task.file, head)
    except OtherResultsError as error:
        print(error, file=sys.stderr)
        return REFUSED
    results.close_interrupted(task.ended)
    turns = KINDS[task.kind](task, results)
    most = TINY_TURN_SECONDS if task.tiny else math.inf
    chosen = {n: Turn(t.measure, min(t.seconds, most)) for n, t in turns.items() if not task.only or n in task.only}
    left = take_turns(chosen, results, ends=began + task.seconds - CLOSING_SECONDS, again=task.again)
    if left:
        needed = ", ".join(f"{name} ({chosen[name].seconds:.0f} s)" for name in left)
        print(f"  not measured, since less time was left than each needs: {needed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
