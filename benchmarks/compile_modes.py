"""Claim: on the CPU, max-autotune costs a multiple of the compilation of the default mode. What does it gain?

Both steps compile the same network in one process, each with an empty cache on disk, and are then timed in turns.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from options import Options, parser, run, save_steps, timed_contestants
from zoo_networks import TINY, ZOO, Network

from torchboost.algorithms.compile import Compile, Mode
from torchboost.core.algorithm import Target
from torchboost.measure.evidence import Contestant
from torchboost.measure.stopwatch import compare

NETWORKS = ("mlp", "vit", "gpt2")
MODES: tuple[Mode, ...] = ("default", "max-autotune-no-cudagraphs")


def step_of(network: Network, mode: Mode) -> Callable[[], None]:
    model, optimizer, batches, loss = network.training(fused=True)
    Compile(mode=mode).attach(Target(model, optimizer))
    waiting = cycle(batches)

    def step() -> None:
        batch = next(waiting)
        loss(model(*batch.args, **batch.kwargs), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(options: Options) -> list[Path]:
    made: list[Contestant] = []
    zoo = TINY if options.smoke else ZOO
    for name in NETWORKS:
        torch.compiler.reset()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            ways = {f"{zoo[name].title}, {mode}": step_of(zoo[name], mode) for mode in MODES}
            base = next(iter(ways))
            found = compare(ways, baselines=[base], pairs=3 if options.smoke else 40, progress=options.progress)
        made += timed_contestants(found, ways, base)
    file, title = options.file("compile_modes", "cpu"), "Modes of torch.compile on the CPU"
    return [save_steps(file, made, title=title, model="networks of the zoo", parameters=0)]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
