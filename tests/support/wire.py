"""Count what collectives are given, DDP's C++ reducer included, by the events that gloo leaves in the profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from math import prod

from torch.profiler import ProfilerActivity, profile

__all__ = ["sent"]

_BYTES = {"float": 4, "long int": 8, "int": 4, "double": 8}


def sent(call: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Return bytes handed to each gloo collective of this rank during ``call``, by its name and dtype."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        call()
        time.sleep(0.02)  # the end of a collective is recorded after those that wait for it have gone on
    counted: Counter[tuple[str, str]] = Counter()
    for event in recorded.profiler.kineto_results.events():  # the public events of torch before 2.13 have no dtypes
        if event.name().startswith("gloo:"):
            for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True):
                counted[event.name().removeprefix("gloo:"), dtype] += prod(shape) * _BYTES[dtype]
    return counted
