"""What is installed here: versions, devices, compilers, backends and extras. Nothing is timed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from typing import Any

import torch
import torch.distributed as dist

from torchboost.core.torch_versions import compiler_follows_flags

__all__ = ["EXTRAS", "compile_advice", "cpp_compiler", "examine"]

EXTRAS = {
    "cli": ("typer", "rich"),
    "workloads": ("sklearn", "pyarrow", "PIL"),
    "transformers": ("transformers", "accelerate"),
}
"""Extra -> the modules that it installs."""

SHOWN = ("torchboost", "torch", "pydantic", "numpy", "safetensors")


def examine() -> dict[str, Any]:
    """Return versions, processor, devices, backends, the state of the compilers and the extras."""
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in SHOWN},
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpus": devices,
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "compile": compile_advice(),
        "cpp_compiler": cpp_compiler(),
        "extras": {extra: _missing(modules) for extra, modules in EXTRAS.items()},
    }


def compile_advice() -> str:
    """Say whether this torch has the compiler bug that affects freezing (pytorch issues 139476 and 162174)."""
    if compiler_follows_flags():
        return "good: recompiles when requires_grad changes"
    return (
        "careful: older than 2.12, may reuse an old graph after requires_grad changes, so layers that were frozen once "
        "never train again; what torchboost compiles recompiles"
    )


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that ``torch.compile`` calls on the CPU; None if it is not installed.

    It is the one that the environment variable ``CXX`` names, otherwise g++ (clang++ on macOS, cl on Windows).
    """
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    words = shlex.split(os.environ.get("CXX", usual), posix=sys.platform != "win32")
    return shutil.which(words[0]) if words else None


def _missing(modules: tuple[str, ...]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
