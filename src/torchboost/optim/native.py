"""Compile a C source of this package at first use, keep the library on disk, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torchboost.errors import IncompatibleError

__all__ = ["cache_folder", "compiled"]

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")


def cache_folder() -> Path:
    """Return where compiled libraries are kept: ``TORCHBOOST_CACHE``, or ``torchboost`` in the user's cache folder."""
    given = os.environ.get("TORCHBOOST_CACHE")
    if given:
        return Path(given)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: an empty or relative path counts for nothing.
    return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "torchboost"


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """Compile ``source`` for this processor, unless that was done before, and load it.

    Takes under a second once per machine and version. The compiler is that of the environment variable ``CC``, else
    the first found of cc, gcc and clang; OpenMP is the one that torch has loaded.

    Raises:
        IncompatibleError: There is no compiler, or it refuses; its message is quoted.
    """
    compiler = _compiler()
    code = source.read_bytes()
    key = hashlib.sha256(b"\0".join([code, " ".join([*compiler, *FLAGS]).encode(), _processor()])).hexdigest()[:20]
    built = cache_folder() / f"{source.stem}-{key}.so"
    if not built.exists():
        _compile(compiler, source, built)
    return ctypes.CDLL(str(built))


def _compiler() -> list[str]:
    given = os.environ.get("CC")
    candidates = [shlex.split(given)] if given else [[name] for name in COMPILERS]
    found = next((c for c in candidates if c and shutil.which(c[0])), None)
    if found is None:
        looked = given or ", ".join(COMPILERS)
        raise IncompatibleError(
            f"native=True needs a C compiler with OpenMP, looked for {looked}. "
            "Install gcc or set CC; or leave native out."
        )
    return found


def _compile(compiler: list[str], source: Path, built: Path) -> None:
    """Compile beside the goal and move: processes that start together never load half a file."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [*compiler, *FLAGS, str(source), "-o", str(fresh), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise IncompatibleError(
                f"native=True: the compiler failed ({shlex.join(command)}):\n{done.stderr.strip()}\n"
                "Set CC to another compiler, or leave native out."
            )
        fresh.replace(built)


def _processor() -> bytes:
    """Identify what ``-march=native`` depends on: a cache on a shared disk serves several kinds of machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})).encode()
