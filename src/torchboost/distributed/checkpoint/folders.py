"""A folder in which checkpoints appear and disappear whole: what ends a job in between leaves none by halves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["METADATA", "clear", "complete", "finish", "places"]

METADATA = ".metadata"
"""The file that DCP writes last."""

UNFINISHED = ".unfinished-"


def places(folder: Path, number: int) -> tuple[Path, Path]:
    """Return where a checkpoint will lie, and where it is written until it is complete."""
    return folder / f"{number:08d}", folder / f"{UNFINISHED}{number:08d}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, which need not be there, by their numbers.

    What has such a name and is no checkpoint (a file, a folder of somebody else) does not count; a link to one does.
    """
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _is_checkpoint(path)), key=lambda path: int(path.name))


def _is_checkpoint(path: Path) -> bool:
    digits = path.name.isascii() and path.name.isdecimal()
    return digits and path.name == f"{int(path.name):08d}" and (path / METADATA).is_file()


def clear(folder: Path) -> None:
    """Make the folder, without what an interrupted job left in it.

    Raises:
        OSError: It cannot be made, or something in it not removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}*"):
        _remove(left)


def finish(unfinished: Path, path: Path, keep: int) -> None:
    """Give a checkpoint that is complete its name, then remove all but those with the ``keep`` largest numbers."""
    _sync(unfinished)
    unfinished.rename(path)
    _sync(path.parent)
    for old in complete(path.parent)[:-keep]:
        if not old.is_symlink():  # where it leads was not written here
            _discard(old)


def _discard(path: Path) -> None:
    """Remove a checkpoint, so that it never lies there by halves under its name."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(folder: Path) -> None:
    """Make a change of names last; DCP has synced the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
