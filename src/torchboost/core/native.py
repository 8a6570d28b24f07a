"""Compile a C source of this package at first use, cache the library on disk, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torchboost.core.files import only_mine
from torchboost.errors import IncompatibleError

__all__ = ["NO_FOLDER", "cache_folder", "compiled"]

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")

DIGEST = 32
"""Length in bytes of the checksum at the end of a cached library. The system's loader ignores trailing bytes."""

NO_FOLDER = ("", "off")
"""Values of ``TORCHBOOST_CACHE`` that name no folder."""

LONGEST = 120.0
"""Time limit of the compiler in seconds."""

ELSEWHERE = "Set TORCHBOOST_CACHE to a folder of your own, or leave native out."


def cache_folder() -> Path:
    """Return the folder of what is kept on disk: ``TORCHBOOST_CACHE``, or ``torchboost`` in the user's cache folder.

    ``TORCHBOOST_CACHE`` does not name a folder if it is empty or ``off``: then measured choices are not kept. Compiled
    libraries are, because a process can only load them from a file.

    Raises:
        IncompatibleError: There is no home folder.
    """
    given = os.environ.get("TORCHBOOST_CACHE", "")
    if given not in NO_FOLDER:
        return Path(given).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: an empty or relative path is ignored.
    if Path(shared).is_absolute():
        return Path(shared) / "torchboost"
    try:
        return Path.home() / ".cache" / "torchboost"
    except RuntimeError as error:
        message = f"native=True: found no home folder to keep the compiled kernel in. {ELSEWHERE}"
        raise IncompatibleError(message) from error


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """Compile ``source`` for this processor if it is not cached, and load it.

    Compilation takes less than a second, once per machine and version. The compiler is that of the environment variable
    ``CC``, otherwise the first of cc, gcc and clang that is found. OpenMP is the library that torch has loaded. An
    incomplete file, or a file of another user, is never loaded: it is compiled again and replaced.

    Raises:
        IncompatibleError: There is no compiler, or it fails, in which case its message is quoted. Or the folder cannot
            be written, or other users may write to it.
    """
    compiler = _compiler()
    code = source.read_bytes()
    key = hashlib.sha256(b"\0".join([code, " ".join([*compiler, *FLAGS]).encode(), _processor()])).hexdigest()[:20]
    built = cache_folder() / f"{source.stem}-{key}.so"
    try:
        _own_folder(built.parent)
        if not _whole(built):
            _compile(compiler, source, built)
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise IncompatibleError(
            f"native=True cannot keep its compiled kernel in {built.parent}: {error}. {ELSEWHERE}"
        ) from error


def _own_folder(folder: Path) -> None:
    """Create the folder. Raise if other users could put a library there, which this process would run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if not only_mine(found):
        raise IncompatibleError(
            f"native=True keeps its compiled kernel in {folder}, which belongs to user {found.st_uid} and has mode "
            f"{stat.S_IMODE(found.st_mode):04o}: other users could put code there. Remove their write permission "
            "(chmod go-w), set TORCHBOOST_CACHE to a folder of your own, or leave native out."
        )


def _whole(built: Path) -> bool:
    """Whether there is a complete library that belongs to this user."""
    try:
        found = built.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or not only_mine(found):
        return False
    data = built.read_bytes()
    return len(data) > DIGEST and hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]


def _compiler() -> list[str]:
    given = os.environ.get("CC")
    try:
        candidates = [shlex.split(given)] if given else [[name] for name in COMPILERS]
    except ValueError as error:
        raise IncompatibleError(
            f"native=True: CC is {given!r}, which is not a valid command line ({error}). "
            "Set CC to a compiler, or leave native out."
        ) from error
    found = next((c for c in candidates if c and shutil.which(c[0])), None)
    if found is None:
        looked = given or ", ".join(COMPILERS)
        raise IncompatibleError(
            f"native=True needs a C compiler with OpenMP, looked for {looked}. "
            "Install gcc, set CC, or leave native out."
        )
    return found


def _compile(compiler: list[str], source: Path, built: Path) -> None:
    """Compile to a temporary file, add the checksum and rename, so that other processes never load a partial file."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [*compiler, *FLAGS, str(source), "-o", str(fresh), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
            said = done.stderr.strip()
        except subprocess.TimeoutExpired:
            done, said = None, f"it was still running after {LONGEST:g} seconds."
        if done is None or done.returncode or not fresh.is_file():
            raise IncompatibleError(
                f"native=True: the compiler failed ({shlex.join(command)}):\n{said or 'it wrote no library.'}\n"
                "Set CC to another compiler, or leave native out."
            )
        data = fresh.read_bytes()
        fresh.write_bytes(data + hashlib.sha256(data).digest())
        fresh.chmod(0o700)
        fresh.replace(built)


def _processor() -> bytes:
    """Return what ``-march=native`` depends on. A cache on a shared disk may serve different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})).encode()
