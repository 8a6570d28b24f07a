"""Write files completely or not at all, and tell the user's own files from those of others."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

__all__ = ["PARTIAL", "only_mine", "write_whole"]

PARTIAL = ".torchboost-partial-"
"""How the names of unfinished files begin. One stays behind if the process is killed while it writes."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file completely or not at all, also if another process writes the same one, or the power fails.

    The bytes go to a file of another name in the same folder, which is then renamed. A file that is there already is
    replaced; if it is a link, the link is replaced.

    Args:
        path: In a folder that exists.
        data: The whole content.
        mode: The permission bits of the file, less those that the process's umask takes away.

    Raises:
        OSError: The file cannot be written. A file that was there is unchanged.
    """
    partial = path.with_name(PARTIAL + secrets.token_hex(8))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(partial, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def only_mine(found: os.stat_result) -> bool:
    """Whether only this user can have written a file. On systems without file owners, always true.

    Args:
        found: What ``os.stat``, ``os.lstat`` or ``os.fstat`` returned.
    """
    owner = getattr(os, "geteuid", None)
    return owner is None or (found.st_uid == owner() and not found.st_mode & _OTHERS_WRITE)
