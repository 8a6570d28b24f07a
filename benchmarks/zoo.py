"""Claim: a level is not slower than the plain loop on any network, and near the best choice of system levers.

Each network runs in a process of its own. The cells run first, so a level finds compiled graphs as in a second start;
with ``--cold`` the levels do. The grid is that of channels-last, autocast to bfloat16, fused optimizer and compilation,
in plain torch; ``zoo_networks.py`` has the networks, ``zoo_verdict.py`` what is required.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from options import Options, options_of, parser
from processes import outcome, run_within
from zoo_cells import Grid, Task
from zoo_networks import TINY, ZOO
from zoo_verdict import STOCK, conclusion

from torchboost.errors import nearest
from torchboost.measure.evidence import BenchReport
from torchboost.measure.stopwatch import environment

PROGRAM = """
import time, torch
from torch import nn
model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
inputs = torch.ones(16, 64)
start = time.perf_counter()
model(inputs).sum().backward()
print(time.perf_counter() - start)
"""
"""A small compilation, which fills the caches of the compiler."""
PAIRS = 20
MOST_CRASHES = 5
LIMIT_SECONDS = 2 * 3600
"""A network that takes longer hangs."""

SAME = ("torch", "torchboost", "processor", "cores", "threads", "device")
"""What must be equal for a result to be kept."""

SIMULATED: dict[str, dict[str, str]] = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
"""Machine -> the environment that makes torch compute as on it, compiled code too."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to measure.

    Args:
        networks: Names; empty for all.
        pairs: Rounds.
        grid: Which cells are compiled.
        simulate: A machine of ``SIMULATED``; empty for this one.
        cold: Whether the levels run before the cells, so that the compiler has nothing of the network in its cache.
        compiler: Folder for the cache of the compiler; empty for a new one that is removed at the end.
    """

    networks: tuple[str, ...] = ()
    pairs: int = PAIRS
    grid: Grid = "some"
    simulate: str = ""
    cold: bool = False
    compiler: str = ""

    @property
    def claim(self) -> str:
        return f"zoo-{self.simulate}" if self.simulate else "zoo"


def measure(options: Options) -> list[Path]:
    asked = Asked(grid="some" if options.compiled else "eager")
    paths, lost = measure_zoo(options, asked)
    print(conclusion([BenchReport.load(path) for path in paths], lost), file=sys.stderr)
    return paths


def measure_zoo(options: Options, asked: Asked) -> tuple[list[Path], list[str]]:
    """Return the files of the results, and the names of the networks that gave none."""
    with tempfile.TemporaryDirectory() as scratch:
        compiler = asked.compiler or scratch
        if not options.smoke:
            options.progress("compiler", 0, 1)
            compile_once({**os.environ, **SIMULATED.get(asked.simulate, {}), **cache_in(compiler)})
        return measure_networks(options, replace(asked, compiler=compiler))


def compile_once(variables: Mapping[str, str]) -> None:
    """Compile a small model into a cache, so that it holds what the compiler makes once for a machine."""
    subprocess.run([sys.executable, "-c", PROGRAM], env=dict(variables), stdout=subprocess.DEVNULL, check=True)


def cache_in(folder: str) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": folder} if folder else {}


def measure_networks(options: Options, asked: Asked) -> tuple[list[Path], list[str]]:
    names = asked.networks or tuple(TINY if options.smoke else ZOO)
    paths, lost = [], []
    for done, name in enumerate(names):
        options.progress("networks", done, len(names), name)
        out = options.file(asked.claim, name)
        if options.resume and out.exists() and is_current(out, asked.pairs):
            paths.append(out)
        elif {**ZOO, **TINY}[name].missing():
            print(f"  {name}: left out, it needs the package {ZOO[name].needs}", file=sys.stderr)
        elif measure_network(name, out, options, asked):
            paths.append(out)
        else:
            lost.append(name)
    options.progress("networks", len(names), len(names))
    return paths, lost


def is_current(out: Path, pairs: int) -> bool:
    """Whether a saved result is of this machine and these versions, with as many rounds."""
    saved, now = BenchReport.load(out), environment()
    same = all(getattr(saved.environment, key) == getattr(now, key) for key in SAME)
    return same and max(len(found.samples) for found in saved.contestants) >= pairs


def measure_network(name: str, out: Path, options: Options, asked: Asked) -> bool:
    """Measure a network, without the contestants that crash. Return whether there is a result."""
    left_out: dict[str, str] = {}
    while len(left_out) <= MOST_CRASHES:
        at, ended = run_once(name, out, options, asked, left_out)
        if not ended:
            return True
        print(f"  {name}: {at or 'before the first step'}: {ended}", file=sys.stderr)
        if at in ("", STOCK) or at in left_out:
            return False
        left_out[at] = ended
    return False


def run_once(name: str, out: Path, options: Options, asked: Asked, left_out: dict[str, str]) -> tuple[str, str]:
    """Return the contestant at which the process ended, and how; both empty if it saved its result."""
    simulated = SIMULATED.get(asked.simulate, {})
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch) / "state"
        state.touch()
        task = Task(
            network=name,
            out=str(out),
            state=str(state),
            pairs=min(asked.pairs, 2) if options.smoke else asked.pairs,
            grid="eager" if options.smoke else asked.grid,
            cold=asked.cold,
            left_out=left_out,
            notes=(f"simulated: {' '.join(f'{k}={v}' for k, v in simulated.items())}",) if simulated else (),
        )
        command = [sys.executable, str(Path(__file__).with_name("zoo_cells.py")), json.dumps(asdict(task))]
        # Without a cache, both levels measure in each run.
        own = {"TORCHBOOST_CALIBRATE": "1", **cache_in(asked.compiler)}
        ended = outcome(run_within(LIMIT_SECONDS, command, {**os.environ, **simulated, **own}), LIMIT_SECONDS)
        return (state.read_text(encoding="utf-8").strip() if ended else ""), ended


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--pairs", type=int, default=PAIRS, help="rounds, more if steps are short (default: %(default)s)")
    made.add_argument("--networks", nargs="+", default=[], metavar="NAME", help=f"of {', '.join({**ZOO, **TINY})}")
    made.add_argument("--compile", action="store_true", help="compile every cell, not only those with fused optimizer")
    made.add_argument("--cold", action="store_true", help="run the levels before the compiler knows the network")
    made.add_argument("--simulate", default="", choices=list(SIMULATED), help="compute as on another machine")
    made.add_argument("--compiler-cache", default="", metavar="FOLDER", help="keep compiled graphs for the next run")
    arguments = made.parse_args(argv)
    for name in arguments.networks:
        if name not in {**ZOO, **TINY}:
            made.error(f"--networks: found {name!r}. {nearest(name, list(ZOO))}".rstrip())
    if arguments.pairs < 1:
        made.error(f"--pairs: found {arguments.pairs}; it must be at least 1.")
    if arguments.cold and arguments.compiler_cache:
        made.error("found --cold and --compiler-cache; give one of them.")
    if arguments.compile and not arguments.compiled:
        made.error("found --compile and --no-compile; give one of them.")
    options = options_of(arguments)
    asked = Asked(
        networks=tuple(arguments.networks),
        pairs=arguments.pairs,
        grid="all" if arguments.compile else "some" if arguments.compiled else "eager",
        simulate=arguments.simulate,
        cold=arguments.cold,
        compiler=arguments.compiler_cache,
    )
    paths, lost = measure_zoo(options, asked)
    reports = {path.name: BenchReport.load(path) for path in paths}
    if arguments.json:
        print(json.dumps({name: report.model_dump(mode="json") for name, report in reports.items()}))
        return
    print(conclusion(list(reports.values()), lost))


if __name__ == "__main__":
    main()
