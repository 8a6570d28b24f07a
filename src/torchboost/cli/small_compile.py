"""How long ``torch.compile`` takes for a small model on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SmallCompile", "small_compile"]

PROGRAM = """
import time, torch
from torch import nn
model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
inputs = torch.ones(16, 64)
start = time.perf_counter()
model(inputs).sum().backward()
print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True)
class SmallCompile:
    """The result of :func:`small_compile`.

    Attributes:
        seconds: Time of the first forward and backward pass, the loading of the compiler included; None if it failed.
        fault: The last line of the error; empty if there was none.
    """

    seconds: float | None = None
    fault: str = ""


def small_compile(
    timeout: float = 600.0, *, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> SmallCompile:
    """Compile a model of two layers in a separate process, with an empty cache, and time its first step on the CPU.

    The cache is a temporary folder, so that an earlier compilation does not shorten the time and none of this remains.

    Args:
        timeout: Seconds after which the process is stopped.
        run: Starts the process; replaced in tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = run(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return SmallCompile(fault=f"not finished after {timeout:.0f} s")
        except OSError as error:
            return SmallCompile(fault=str(error))
    if done.returncode == 0:
        return SmallCompile(seconds=float(done.stdout.split()[-1]))
    errors = [line for line in done.stderr.splitlines() if "Error: " in line] or done.stderr.splitlines()[-1:]
    return SmallCompile(fault=errors[-1].strip() if errors else f"the process ended with code {done.returncode}")
