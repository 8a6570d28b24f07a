"""Compile the pretend device for the torch that is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["built", "compiler", "folder_of_torch"]

_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-O1", "-w", "-shared", "-fPIC", "-std=c++20")


def compiler() -> str | None:
    """Return the C++ compiler of this machine; None without one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def folder_of_torch() -> Path:
    """Return the folder of the package, without an import of it."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def built(folder: Path) -> Path:
    """Return the library of the device. If ``folder`` has none yet, compile it there.

    Several processes may call this together. Each then writes a file of its own, and the last one stays.

    Raises:
        AssertionError: The compiler refused the source.
    """
    library, torch = folder / "libpretend_device.so", folder_of_torch()
    if library.exists():
        return library
    program = compiler()
    assert program is not None
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as made:
        libraries = (f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu")
        command = [program, *_FLAGS, str(_SOURCE), "-o", made.name, f"-I{torch / 'include'}", *libraries]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    Path(made.name).replace(library)
    return library
