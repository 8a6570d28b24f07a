"""The shape of the source tree: files stay small, importing it stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SOURCE = ROOT / "src" / "torchboost"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name not in {"__init__.py", "__main__.py"})
MAX_FILE_LINES = 600
LONG = {"src/torchboost/core/torch_private.py"}
"""Every private name of torch stands there, and nowhere else."""
MAX_IMPORT_SHARE = 0.20
OPTIONAL = (
    "accelerate",
    "lightning",
    "matplotlib",
    "PIL",
    "pyarrow",
    "rich",
    "sklearn",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "transformers",
    "typer",
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_files_stay_small():
    folders = [folder for name in ("src", "tests", "benchmarks", "examples") if (folder := ROOT / name).is_dir()]
    lengths = {named(p): len(p.read_text(encoding="utf-8").splitlines()) for f in folders for p in f.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES and name not in LONG} == {}


def test_house_style():
    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        assert text.isascii(), module
        assert "from __future__ import annotations\n" in text, module
        assert module.stem not in {"utils", "helpers", "misc", "common"}, module


def test_an_import_loads_no_optional_package_and_measures_nothing():
    code = (
        "import sys, torch; before = set(sys.modules); import torchboost.core.torch_private; "
        "print(*sorted(set(sys.modules) - before)); torchboost.algorithms.Compile(); "
        "print(*sorted(set(sys.modules) - before)); import torchboost.registry, torchboost.core.hardware as here; "
        "print(here._decision.cache_info().currsize)"
    )
    private, loaded, measured = (line.split() for line in python(code).splitlines())
    assert [name for name in private if name.startswith("torch.")] == []
    ours = [name for name in private if name.startswith("torchboost.")]
    assert ours == ["torchboost.core", "torchboost.core.torch_private"]
    assert {"torchboost", "torchboost.algorithms.compile"} <= set(loaded)
    assert [name for name in loaded if any(name == o or name.startswith(f"{o}.") for o in OPTIONAL)] == []
    assert measured == ["0"]


def test_importing_adds_little_to_importing_torch():
    code = (
        "from time import perf_counter as now; start = now(); import torch; middle = now(); import torchboost; "
        "print((now() - middle) / (middle - start))"
    )
    assert any(float(python(code)) < MAX_IMPORT_SHARE for _ in range(4))  # the first one may write the byte code
