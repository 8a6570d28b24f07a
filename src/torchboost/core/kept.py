"""Small files of measured results in the user's cache folder: private, whole or not at all, bounded in number."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torchboost.core.files import PARTIAL, only_mine, write_whole

__all__ = ["default_folder", "keep", "read_kept"]

_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_MOST = 256
"""Number of entries that are kept in a folder."""
_LONGEST = 1 << 20
"""Largest size of an entry in bytes. A choice has about a thousand."""
_ABANDONED = 3600.0
"""Age in seconds after which an unfinished file is that of a process that was killed."""


def default_folder(kind: str) -> Path | None:
    """Return the folder for one kind of results: in ``TORCHBOOST_CACHE``, or in ``torchboost`` in the user's caches.

    Args:
        kind: Name of the folder.

    Returns:
        None if nothing is kept: ``TORCHBOOST_CACHE`` is empty or ``off``, or there is no home folder.
    """
    setting = os.environ.get("TORCHBOOST_CACHE")
    if setting in ("", "off"):
        return None
    if setting is not None:
        return Path(setting).absolute() / kind
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():  # the XDG rules: an empty or relative path is ignored
        return caches / "torchboost" / kind
    try:
        return Path.home() / ".cache" / "torchboost" / kind
    except RuntimeError:
        return None


def keep(file: Path, data: bytes) -> None:
    """Write an entry into a folder of this user, and remove the oldest ones above the limit.

    Args:
        file: Its name is 64 hexadecimal digits and ``.json``. The folder is created.
        data: The whole content.

    Raises:
        OSError: The file cannot be written, or other users could write into the folder.
    """
    _own_folder(file.parent)
    write_whole(file, data, mode=0o600)
    _trim(file)


def _own_folder(folder: Path) -> None:
    """Create the folder, and those above it, for this user only. Raise if others could put files into it."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)
    if not only_mine(folder.stat()):
        raise PermissionError(f"{folder} belongs to another user, or other users may write to it")


def read_kept(file: Path) -> bytes:
    """Read a file of this user. A link is not followed, and a pipe, which would wait for a writer, not opened.

    Raises:
        OSError: There is no such file, or other users can have written it.
        ValueError: It is too large to be an entry.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(file, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not only_mine(found):
            raise PermissionError("it is not a regular file of this user that others cannot write")
        if found.st_size > _LONGEST:
            raise ValueError(f"it has {found.st_size} bytes")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(_LONGEST)
    finally:
        os.close(descriptor)


def _trim(newest: Path) -> None:
    """Remove the oldest entries above the limit, never the newest, and what killed processes left."""
    entries, now = [], time.time()
    for name, changed in _times(newest.parent):
        if name.startswith(PARTIAL) and changed < now - _ABANDONED:
            _remove(newest.with_name(name))
        elif _ENTRY.fullmatch(name) and name != newest.name:
            entries.append((changed, name))
    for _, name in sorted(entries, reverse=True)[_MOST - 1 :]:
        _remove(newest.with_name(name))


def _times(folder: Path) -> Iterator[tuple[str, float]]:
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                yield entry.name, entry.stat(follow_symlinks=False).st_mtime


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
