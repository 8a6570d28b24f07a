"""Files that are written completely or not at all, and small records of measurements in the user's cache folder."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = [
    "PARTIAL",
    "Record",
    "load_record",
    "only_mine",
    "record_folder",
    "store_record",
    "write_whole",
]

_LOG = logging.getLogger("torchboost")
PARTIAL = ".torchboost-partial-"
"""How the names of unfinished files begin. One is left if the process is killed while it writes."""
_OURS = re.compile(r"[0-9a-f]{64}\.json|\.torchboost-partial-.*")
_MOST_FILES = 256
_LARGEST = 1 << 20
"""Bytes of a record. A choice has about a thousand."""


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


def only_mine(status: os.stat_result) -> bool:
    """Whether only this user can have written a file. On systems without file owners, always true.

    Args:
        status: What ``os.stat``, ``os.lstat`` or ``os.fstat`` returned.
    """
    owner = getattr(os, "geteuid", None)
    return owner is None or (status.st_uid == owner() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def record_folder(kind: str) -> Path | None:
    """Return the folder for one kind of record: in ``TORCHBOOST_CACHE``, or in ``torchboost`` in the user's caches.

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


class Record(BaseModel):
    """A small result that is kept on disk.

    Args:
        format: Version of the file.
        key: What it holds for: 64 hexadecimal digits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    format: Literal[1] = 1
    key: str


R = TypeVar("R", bound=Record)


def load_record(folder: Path | None, key: str, kind: type[R]) -> R | None:
    """Return the record that was stored; None if there is none, it is damaged, or others can have written it.

    A link is not followed, and a pipe, which would wait for a writer, not opened.

    Args:
        folder: None finds nothing.
        key: Of the record.
        kind: The class of the record.
    """
    if folder is None:
        return None
    file = folder / f"{key}.json"
    try:
        record = kind.model_validate_json(_read(file))
        if record.key != key:
            raise ValueError(f"it is the record of {record.key}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _LOG.debug("The record %s is not used: %s", file, error)
        return None
    return record


def store_record(folder: Path | None, record: Record) -> None:
    """Keep a record in a private folder, instead of an earlier one of its key. If this is not possible, do nothing.

    Several processes may use one folder, and it may be deleted at any time. The 256 newest records are kept.
    """
    if folder is None:
        return
    file = folder / f"{record.key}.json"
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.is_dir():
                part.mkdir(mode=0o700, exist_ok=True)
        if not only_mine(folder.stat()):
            raise PermissionError(f"{folder} belongs to another user, or other users may write to it")
        write_whole(file, record.model_dump_json().encode() + b"\n", mode=0o600)
        _trim(folder)
    except OSError as error:
        _LOG.debug("The record is not kept in %s: %s", file, error)


def _read(file: Path) -> bytes:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(file, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not only_mine(status):
            raise PermissionError("it is not a regular file of this user that others cannot write")
        if status.st_size > _LARGEST:
            raise ValueError(f"it has {status.st_size} bytes")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(_LARGEST)
    finally:
        os.close(descriptor)


def _trim(folder: Path) -> None:
    """Keep the newest files: records, and those that killed processes left. Other processes may remove some first."""
    ages = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            if _OURS.fullmatch(file.name):
                ages.append((file.lstat().st_mtime_ns, file))
    for _, file in sorted(ages, reverse=True)[_MOST_FILES:]:
        with contextlib.suppress(OSError):
            file.unlink()
