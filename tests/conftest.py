"""What every test gets: fixed seeds, one thread, and the vectors that MindSpore computed."""

from __future__ import annotations

import gc
import importlib.util
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchboost.core import hardware
from torchboost.core.hardware import matmul_backends
from torchboost.distributed.topology import shutdown
from torchboost.measure.machine import Products

ROOT = Path(__file__).parents[1]
VECTORS = ROOT / "tests" / "parity" / "vectors"

if importlib.util.find_spec("hypothesis") is not None:  # the tests on a GPU do without
    from hypothesis import settings

    # The same examples on every run and machine; nothing written into the checkout.
    settings.register_profile("torchboost", derandomize=True, database=None, deadline=None)
    settings.load_profile("torchboost")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while modules are imported, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files marked ``long``, then those of many tests. A worker that is given one late runs alone."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, -counts[item.path]))


class Case(NamedTuple):
    """One case of the oracle: its entry in cases.json and its arrays (empty where it has none)."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Oracle:
    """The vectors that MindSpore computed, by case name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cases = {case["name"]: case for case in json.loads((folder / "cases.json").read_text())["cases"]}

    def names(self, family: str | None = None) -> list[str]:
        """Return the names of all cases, or of one family."""
        return [name for name, case in self._cases.items() if family in (None, case["family"])]

    def __getitem__(self, name: str) -> Case:
        meta = self._cases[name]
        if not meta.get("file"):
            return Case(meta, {})
        with np.load(self._folder / meta["file"]) as arrays:
            return Case(meta, dict(arrays))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Seed torch and NumPy, use one thread and float32 in full precision, so that results repeat."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    if any(backend.fp32_precision != "none" for backend in matmul_backends().values()):
        torch.set_float32_matmul_precision("highest")
        for backend in matmul_backends().values():
            backend.fp32_precision = "none"


@pytest.fixture(autouse=True, scope="session")
def ctrl_c() -> None:
    """Let Ctrl-C interrupt, as in a terminal. Programs that a shell starts in the background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Let no search of the heap visit what is alive at the start of a file, mostly imported modules.

    There is one in every full collection, and one for averages of the weights whenever BatchNorms go.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose levers without a trial, here and in child processes. Tests of the trial pass ``calibrate=``."""
    monkeypatch.setenv("TORCHBOOST_CALIBRATE", "0")


@pytest.fixture
def bfloat16() -> Iterator[Callable[..., None]]:
    """Plant how many times as fast as float32 bfloat16 is, in matrix products and in convolutions."""
    with pytest.MonkeyPatch.context() as patch:

        def plant(products: float | None, convolutions: float | None, fault: str = "") -> None:
            ratios = {"matrix product": products, "convolution": convolutions}
            hardware._decision.cache_clear()
            patch.setattr(
                "torchboost.core.hardware.half_speed",
                lambda kind, device: Products(kind=kind, ratio=ratios[kind], pairs=9, fault=fault),
            )

        yield plant
    hardware._decision.cache_clear()


@pytest.fixture(autouse=True)
def fast_bfloat16(bfloat16: Callable[..., None]) -> None:
    """Let bfloat16 count as fast, so that the same algorithms are on whatever machine runs the tests."""
    bfloat16(2.0, 2.0)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Be the only rank of a gloo group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    shutdown()


@pytest.fixture
def one_accelerator() -> Iterator[None]:
    """Forget the settings of an ``Accelerator``, which all of a process share."""
    if importlib.util.find_spec("accelerate") is None:
        yield
        return
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Arrays computed by MindSpore; ``tests/parity/README.md`` describes them."""
    return Oracle(VECTORS)
