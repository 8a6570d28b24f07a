"""What a GPU is, and whether the package computes the right numbers on it: tests, each file in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import torch
from gpu import PRETEND, ROOT
from gpu_record import DEVICE, Results, Row, Task, Turn

from torchboost.measure.machine import half_speed
from torchboost.measure.stopwatch import Clock

PACKAGES = ("torch", "numpy", "triton", "transformers", "accelerate", "timm", "peft", "lightning", "pytest", "pydantic")
NVIDIA = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")
WORKERS = 16
FILE_SECONDS = 180.0
MARK = "@pytest.mark.gpu"
ON_DEVICE = "tests/device/on_device"
DEFAULT_DEVICE = (
    "tests/contracts/test_optimizers.py",
    "tests/contracts/test_optimizer_checkpoints.py",
    "tests/contracts/test_optimizer_precision.py",
    "tests/algorithms/test_fused_optimizer.py",
    "tests/algorithms/grad_freeze",
    "tests/algorithms/loss_scale_group",
    "tests/test_front.py",
)
"""Tests that run once more with every tensor that is made without a device on the GPU. Some of them make tensors before
they run, or ask for the CPU, so they fail with an error that names two devices; these are counted apart."""
TWO_DEVICES = re.compile("same device|device type|on the CPU|on cpu|CPU tensor|'cpu'|Expected a 'cuda' device")
SHORT = ("tests/device/on_device/scaling", "tests/algorithms/test_fused_optimizer")
"""The files of a run with tiny sizes."""


def machine(task: Task, results: Results) -> Mapping[str, Turn]:
    return {
        "device": Turn(device),
        "speed": Turn(speed),
        "clocks": Turn(lambda: {"nvidia": nvidia()}),  # after it has worked
        "doctor": Turn(partial(program, [sys.executable, *pretended(), "-m", "torchboost", "doctor"])),
    }


def device() -> Row:
    found = {name: version for name in PACKAGES if (version := installed(name))}
    return {
        "nvidia": nvidia(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "capability": torch.cuda.get_device_capability(DEVICE),
        "memory_bytes": torch.cuda.mem_get_info(DEVICE)[1],
        "packages": found,
        "missing": [name for name in PACKAGES if name not in found],
    }


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def nvidia() -> dict[str, str]:
    """Return what the driver says; empty without its program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    asked = [program, f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return dict(zip(NVIDIA, done.stdout.partition("\n")[0].split(", "), strict=False))


def copied_bytes_per_second() -> float:
    """Return the read and written bytes of the fastest of seven copies of 1 GiB within the memory of the GPU."""
    source = torch.ones(2**28, device=DEVICE)
    copied, clock, seconds = torch.zeros_like(source), Clock.of(DEVICE), []
    for _ in range(8):
        start = clock()
        copied.copy_(source)
        seconds.append(clock() - start)
    return 2 * 2**30 / min(seconds)


def speed() -> Row:
    kinds = [half_speed(kind, DEVICE) for kind in ("matrix product", "convolution")]
    return {"said": "; ".join(map(str, kinds)), "copied_bytes_per_second": copied_bytes_per_second()}


def program(command: Sequence[str]) -> Row:
    done = subprocess.run(command, capture_output=True, text=True, timeout=FILE_SECONDS, cwd=ROOT, check=False)
    return {"status": done.returncode, "output": (done.stdout + done.stderr)[-12_000:]}


def pretended() -> list[str]:
    return ["-m", "tests.support.pretend_device"] if PRETEND in os.environ else []


class Files:
    """Files of tests that run several at a time. The first one that is asked for starts all of them."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands
        self._running: dict[str, Future[Row]] = {}

    def result(self, name: str) -> Row:
        if not self._running:
            pool = ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1))
            self._running = {name: pool.submit(run_tests, words) for name, words in self._commands.items()}
            pool.shutdown(wait=False)
        return self._running[name].result()


def tests(task: Task, results: Results) -> Mapping[str, Turn]:
    """Return the files of tests that need a device, those marked so, and some that run with all tensors on it."""
    folder = ROOT / ON_DEVICE
    own = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")]
    marked = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text("utf-8")
    ]
    commands: dict[str, list[str]] = {named(path): [] for path in own}
    commands |= {f"{named(path)}, marked gpu": ["-m", "gpu"] for path in marked if PRETEND not in os.environ}
    for place in map(ROOT.joinpath, DEFAULT_DEVICE):
        for path in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
            commands[f"{named(path)}, all tensors on the device"] = ["-p", "tests.support.default_device"]
    if task.tiny:
        commands = {name: words for name, words in commands.items() if name.startswith(SHORT)}
    words = {name: [*own, name.partition(",")[0]] for name, own in commands.items()}
    files = Files({name: found for name, found in words.items() if results.wanted(name, again=task.again)})
    return {name: Turn(partial(files.result, name)) for name in words}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_tests(words: Sequence[str]) -> Row:
    """Return how many tests passed, failed and were skipped, and what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={report}"]
        row = program([sys.executable, *pretended(), "-m", "pytest", *options, *words])
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report: {row['output'][-400:]}")
        return {**row, **counted(ElementTree.parse(report).getroot())}


def counted(report: ElementTree.Element) -> Row:
    cases = list(report.iter("testcase"))
    bad = {
        f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "")[:300]
        for case in cases
        for found in (*case.findall("failure"), *case.findall("error"))
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(bad)
    mixed = {name: text for name, text in bad.items() if TWO_DEVICES.search(text)}
    failed = {name: text for name, text in bad.items() if name not in mixed}
    said = f"{passed} passed, {len(failed)} failed, {len(mixed)} name two devices, {skipped} skipped"
    return {"passed": passed, "failed": failed, "two_devices": mixed, "skipped": skipped, "said": said}
