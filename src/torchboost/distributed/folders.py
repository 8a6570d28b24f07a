"""A folder in which checkpoints appear and disappear whole: what ends a job in between leaves none by halves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["clear", "complete", "finish", "places"]

UNFINISHED = ".unfinished-"


def places(folder: Path, number: int) -> tuple[Path, Path]:
    """Return where a checkpoint will lie, and where it is written until it is complete."""
    return folder / f"{number:08d}", folder / f"{UNFINISHED}{number:08d}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, which need not be there, by their numbers."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))


def clear(folder: Path) -> None:
    """Make the folder, without what an interrupted job left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)


def finish(unfinished: Path, path: Path, keep: int) -> None:
    """Give a checkpoint that is complete its name, then remove all but those with the ``keep`` largest numbers."""
    _sync(unfinished)
    unfinished.rename(path)
    _sync(path.parent)
    for old in complete(path.parent)[:-keep]:
        _discard(old)


def _discard(path: Path) -> None:
    """Remove a checkpoint, so that it never lies there by halves under its name."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync(folder: Path) -> None:
    """Make a change of names last; DCP has synced the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
