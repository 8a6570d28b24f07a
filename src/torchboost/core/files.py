"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

PARTIAL = ".torchboost-partial-"
"""How the names of unfinished files begin. One is left if the process is killed while it writes."""


def write_whole(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a file completely or not at all, also if another process writes the same file, or the power fails.

    The bytes go to a file of another name in the same folder, which is then renamed. An existing file is replaced. If
    it is a link, the link is replaced.

    Args:
        path: In a folder that exists.
        data: The whole content.
        mode: The permission bits of the file, to which the process's umask is applied.

    Raises:
        OSError: The file cannot be written. An existing file is unchanged.
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
