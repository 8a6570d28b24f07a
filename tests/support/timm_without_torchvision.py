"""Import timm without torchvision, which has no build for torch on the CPU, and run something with it.

timm's models need nothing of torchvision but names. Run as a program, so that no other test sees these modules:
``models`` prints what boosting does to some models as JSON; the name of an example, what one epoch of it returns.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

MODELS = ("mobilenetv3_small_050", "efficientnet_b0", "regnety_002", "densenet121", "resnetv2_50", "mobilevit_xxs")
EXAMPLES = Path(__file__).parents[2] / "examples"


class Named(type):
    """A class each of whose attributes is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Names(types.ModuleType):
    """A module that has any name."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Torchvision(MetaPathFinder, Loader):
    """Finds torchvision and everything in it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def boosted(name: str) -> dict[str, float]:
    """Train a model two steps at O1 and with LessBN; return removed BatchNorms, and how far the exported forms are."""
    import timm

    import torchboost
    from torchboost.graph.removed_norm import RemovedNorm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4)
    images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    asked = {"extra": {"less_bn": {"keep_every": 2}}}
    made = torchboost.boost(model, optimizer, level="O1", total_steps=1000, calibrate=False, config=asked)
    for _ in range(2):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    copy, plain = made.eval_model(), timm.create_model(name, num_classes=4)
    made.remove()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model.eval()(images)
        far = {"plain": plain.eval()(images), "copy": copy(images)}
    removed = sum(isinstance(module, RemovedNorm) for module in model.modules())
    return {"removed": removed, **{key: float((out - expected).abs().max()) for key, out in far.items()}}


def in_a_process(what: str) -> Any:
    """Run this program and return what its last line says."""
    program = [sys.executable, "-m", __name__, what]
    quiet = {**os.environ, "TORCHBOOST_CALIBRATE": "0", "PYTHONWARNINGS": "ignore"}
    root = Path(__file__).parents[2]
    done = subprocess.run(program, cwd=root, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(what: str) -> None:
    sys.meta_path.insert(0, Torchvision())
    torch.set_num_threads(1)
    if what == "models":
        found = {name: boosted(name) for name in MODELS}
    else:
        found = runpy.run_path(str(EXAMPLES / f"{what}.py"))["main"](1)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
