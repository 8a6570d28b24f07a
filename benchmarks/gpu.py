"""Half an hour on a GPU, in calls of at most ten minutes: what is worth most comes first, all of it is saved at once.

It needs no package but torch, those of torchboost and ``transformers``, no installation and no git. Packages that are
missing are taken from the wheels in the folder ``wheels``. What is in the results is not measured again. ``--tiny
--no-compile --pretend`` runs all of it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from processes import outcome, run_within

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WHEELS = ROOT / "wheels"
NEEDED = ("torch", "numpy", "pydantic", "lazy_loader", "safetensors")
REFUSED = 3
"""The status of a part that cannot measure here at all."""
MOST_CRASHES = 5
LEAST_SECONDS = 15.0
"""A part is not started if it has less."""
PRETEND = "TORCHBOOST_PRETEND_DEVICE"


class Part(NamedTuple):
    """What one process measures.

    Args:
        kind: A key of ``gpu_part.KINDS``.
        seconds: Its share of the call, if no part before it ended early.
        subject: A network, for kinds that measure one.
        only: Contestants; empty for all.
        cold: Whether the compiler has nothing in its cache.
    """

    kind: str
    seconds: float
    subject: str = ""
    only: tuple[str, ...] = ()
    cold: bool = False


class Call(NamedTuple):
    """Parts that run one after another within so many seconds."""

    seconds: float
    parts: tuple[Part, ...]


def lengths(network: str) -> tuple[Part, ...]:
    return tuple(Part("levels", 145, network, (f"O1, {steps:,} steps",), cold=True) for steps in (10_000, 450_000))


USUAL = "autocast+fused_optimizer+tf32"
TEXTS = (USUAL, f"{USUAL}+compile", "O1")
IMAGES = tuple(f"channels_last+{name}" if name != "O1" else name for name in TEXTS)
EAGER = (f"channels_last+{USUAL}", USUAL, "O1", "O2")
PLAN: Mapping[str, Call] = {
    "1": Call(420, (Part("machine", 60), Part("tests", 190), Part("rules", 170))),
    "2": Call(
        590,
        (
            Part("padding", 240, "bert-classifier"),
            Part("levels", 160, "gpt2", TEXTS[1:]),
            Part("padding", 190, "llama-instructions"),
        ),
    ),
    "3": Call(590, (Part("levels", 295, "bert"), Part("levels", 295, "vit"))),
    "4": Call(100, (Part("levels", 100, "mobilenet", EAGER),)),
    # The second half hour.
    "5": Call(590, (*lengths("resnet50"), *lengths("gpt2"))),
    "6": Call(590, (Part("freezing", 200, "resnet50"), Part("freezing", 200, "gpt2"), Part("offload", 190, "gpt-1b"))),
    "7": Call(590, (Part("levels", 295, "llama"), Part("levels", 295, "convnext"))),
    "8": Call(
        590,
        (Part("levels", 200, "resnet50", (*IMAGES[1:], "O2")), *(Part("levels", 195, n) for n in ("resnet50", "gpt2"))),
    ),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--call", nargs="+", choices=list(PLAN), default=list(PLAN), help="default: all, in this order")
    made.add_argument("--deadline", type=float, help="seconds for each call; default: as planned, at most 590")
    made.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results, default: %(default)s")
    made.add_argument("--pairs", type=int, default=12, help="rounds of every comparison (default: %(default)s)")
    made.add_argument("--tiny", action="store_true", help="small networks: checks the scripts, proves nothing")
    made.add_argument("--no-compile", dest="compiled", action="store_false", help="leave out torch.compile")
    made.add_argument("--again", action="store_true", help="measure again what failed or did not end")
    made.add_argument("--pretend", action="store_true", help="on the pretend device of the tests; needs a C++ compiler")
    found = made.parse_args(argv)
    if found.pairs < 1:
        made.error(f"--pairs: found {found.pairs}; it must be at least 1.")
    if found.pretend and (found.compiled or not found.tiny):
        made.error("found --pretend alone; the pretend device needs --tiny and --no-compile.")
    return found


def unpacked(wheels: Path, folder: Path) -> Path:
    """Unpack the wheels of packages that this interpreter does not have. Return the folder to import them from."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            distribution(wheel.name.partition("-")[0])
        except PackageNotFoundError:
            print(f"{wheel.name} is used", flush=True)
            ZipFile(wheel).extractall(folder)
    return folder


def missing(packages: Path) -> list[str]:
    """Return the packages that every part needs and that can be imported from nowhere."""
    return [name for name in NEEDED if find_spec(name) is None and not (packages / name).exists()]


def environment(variables: Mapping[str, str], packages: Path) -> dict[str, str]:
    """Return the variables for a part: the package is found without an installation, and every level measures."""
    paths = [str(ROOT / "src"), str(ROOT), str(packages), *filter(None, [variables.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "TORCHBOOST_CALIBRATE": "1"}
    return {**variables, **own}


def run_part(part: Part, seconds: float, asked: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """Run a part, and again after a crash, without what crashed. Return the status of the last process."""
    ends, ended, status = time.monotonic() + seconds, "", 0
    for _ in range(MOST_CRASHES):
        left = ends - time.monotonic()
        if left < LEAST_SECONDS:
            break
        task = {
            **part._asdict(),
            "seconds": left,
            "out": str(asked.out),
            "pairs": asked.pairs,
            "tiny": asked.tiny,
            "compiled": asked.compiled,
            "again": asked.again,
            "ended": ended,
        }
        device = ["-m", "tests.support.pretend_device"] if PRETEND in variables else []
        with ExitStack() as stack:
            cache = {"TORCHINDUCTOR_CACHE_DIR": stack.enter_context(tempfile.TemporaryDirectory())} if part.cold else {}
            command = [sys.executable, *device, str(HERE / "gpu_part.py"), json.dumps(task)]
            status = run_within(left, command, {**variables, **cache})
        if status in (0, REFUSED):
            return status
        ended, status = outcome(status, left), status or 1
        print(f"  {part.kind} {part.subject}: {ended}", file=sys.stderr, flush=True)
    return status


def run_call(name: str, asked: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """Run the parts of a call. Return ``REFUSED``, the status of a part that did not end well, or 0."""
    call, worst = PLAN[name], 0
    seconds = call.seconds if asked.deadline is None else asked.deadline
    began = time.monotonic()
    for at, part in enumerate(call.parts):
        left = seconds - (time.monotonic() - began)
        share = left * part.seconds / sum(later.seconds for later in call.parts[at:])
        print(f"call {name}: {part.kind} {part.subject}, {share:.0f} s".replace(" ,", ","), flush=True)
        status = run_part(part, share, asked, variables)
        if status == REFUSED:
            return status
        worst = worst or status
    print(f"call {name}: {time.monotonic() - began:.0f} s", flush=True)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    asked = arguments(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        packages = unpacked(WHEELS, Path(folder, "packages"))
        absent = missing(packages)
        if absent:
            print(f"gpu: {', '.join(absent)} is missing; install it, or see `make bench-gpu-files`.", file=sys.stderr)
            return REFUSED
        variables = environment(os.environ, packages)
        if asked.pretend and PRETEND not in variables:
            sys.path.insert(0, str(ROOT))
            from tests.support.pretend_device.build import built

            variables[PRETEND] = str(built(Path(folder)))
        worst = 0
        for name in asked.call:
            status = run_call(name, asked, variables)
            if status == REFUSED:
                return status
            worst = worst or status
        return worst


if __name__ == "__main__":
    sys.exit(main())
