"""A folder in which checkpoints are added and removed atomically, so that a killed job leaves only complete ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["METADATA", "clear", "complete", "finish", "places"]

METADATA = ".metadata"
"""The file that DCP writes last."""

UNFINISHED = ".unfinished-"


def places(folder: Path, number: int) -> tuple[Path, Path]:
    """Return the path of a checkpoint, and the temporary path under which it is written."""
    return folder / f"{number:08d}", folder / f"{UNFINISHED}{number:08d}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, ordered by number; the folder need not exist.

    Other files and folders with such a name do not count; a link to a checkpoint does.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in entries if _is_checkpoint(path)), key=lambda path: int(path.name))


def _is_checkpoint(path: Path) -> bool:
    digits = path.name.isascii() and path.name.isdecimal()
    return digits and path.name == f"{int(path.name):08d}" and (path / METADATA).is_file()


def clear(folder: Path) -> None:
    """Create the folder, and remove what an interrupted job left in it.

    Raises:
        OSError: The folder cannot be created, or an entry cannot be removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}*"):
        _remove(left)


def finish(unfinished: Path, path: Path, keep: int) -> None:
    """Rename a complete checkpoint to its final name, then remove all but the ``keep`` largest numbers."""
    _sync(unfinished)
    unfinished.rename(path)
    _sync(path.parent)
    for old in complete(path.parent)[:-keep]:
        if not old.is_symlink():  # its target was not written here
            _discard(old)


def _discard(path: Path) -> None:
    """Rename a checkpoint and remove it, so that an incomplete one never has the final name."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(folder: Path) -> None:
    """Sync a folder after a rename; DCP has synced the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
