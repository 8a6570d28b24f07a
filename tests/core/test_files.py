"""Files are there as a whole or not at all; records are private, bounded, and never a reason for a training to fail."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torchboost.core import files
from torchboost.core.files import PARTIAL, Record, load_record, only_mine, store_record, write_whole

KEY = "0123456789abcdef" * 4
OTHER = KEY[::-1]


class Note(Record):
    """A record."""

    key: str = KEY
    text: str
    number: float = 1.5


FIRST, SECOND = Note(text="first"), Note(text='quotes " and \\ and \u2713 and \n', number=float("-inf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "notes"


def load(folder: Path, key: str = KEY) -> Note | None:
    return load_record(folder, key, Note)


def test_a_file_is_written_and_replaced_with_the_mode_less_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        for data in (b"one", b"", b"three\r\n\0"):
            write_whole(tmp_path / "a", data)
            assert (tmp_path / "a").read_bytes() == data
        write_whole(tmp_path / "b", b"", mode=0o600)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o644, 0o600]
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "absent" / "a", b"")


def failing(error: BaseException) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


def test_a_failure_or_a_kill_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "a"
    write_whole(file, b"old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        for call in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(files.os, call, failing(error))
                with pytest.raises(type(error)):
                    write_whole(file, b"new")
            assert file.read_bytes() == b"old"
            assert list(tmp_path.iterdir()) == [file]
    code = (
        "import os, signal; from pathlib import Path; from torchboost.core import files; "
        "files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
        f"files.write_whole(Path({str(file)!r}), b'new')"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert file.read_bytes() == b"old"
    (left,) = set(tmp_path.iterdir()) - {file}
    assert left.name.startswith(PARTIAL)


def test_only_mine(tmp_path, monkeypatch):
    file: Path = tmp_path / "a"
    write_whole(file, b"", mode=0o600)
    assert only_mine(file.stat())
    for mode, mine in ((0o644, True), (0o664, False), (0o602, False), (0o600, True)):
        file.chmod(mode)
        assert only_mine(file.stat()) is mine
    user = os.geteuid()
    monkeypatch.setattr(files.os, "geteuid", lambda: user + 1)
    assert not only_mine(file.stat())
    monkeypatch.delattr(files.os, "geteuid")
    assert only_mine(file.stat())


def test_records_come_back_and_are_private_whatever_the_umask(folder):
    assert load(folder) is None
    before = os.umask(0)
    try:
        for note in (FIRST, SECOND):
            store_record(folder, note)
            assert load(folder) == note
    finally:
        os.umask(before)
    assert load(folder, OTHER) is None
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / f"{KEY}.json")]
    assert modes == [0o700, 0o700, 0o600]
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_or_foreign_record_counts_as_absent_and_is_replaced(folder):
    store_record(folder, FIRST)
    file = folder / f"{KEY}.json"
    whole = json.loads(file.read_bytes())
    changes = [{"format": 2}, {"key": OTHER}, {"more": 1}, {"text": 3}]
    damaged = [b"", b"\0" * 300, b"\xff\xfe", b"[" * 100_000, b"null", b"{}", json.dumps(whole).encode()[:-9]]
    damaged += [json.dumps(whole | change).encode() for change in changes]
    damaged += [json.dumps(whole).encode() + b" " * (1 << 20)]
    for content in damaged:
        file.write_bytes(content)
        assert load(folder) is None
    file.write_bytes(json.dumps(whole).encode())
    assert load(folder) == FIRST


def test_links_pipes_folders_and_files_that_others_may_write_are_not_read(folder, tmp_path, monkeypatch):
    file = folder / f"{KEY}.json"
    store_record(folder, SECOND)
    file.rename(tmp_path / "elsewhere.json")
    for spoil in (lambda: file.symlink_to(tmp_path / "elsewhere.json"), lambda: os.mkfifo(file)):
        spoil()
        assert load(folder) is None
        store_record(folder, FIRST)
        assert not file.is_symlink()
        assert load(folder) == FIRST
        file.chmod(0o666)
        assert load(folder) is None
        file.unlink()
    file.mkdir()
    count = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert load(folder) is None
    assert (len(os.listdir("/proc/self/fd")) if count else 0) == count
    file.rmdir()
    store_record(folder, FIRST)
    user = os.geteuid()
    monkeypatch.setattr(files.os, "geteuid", lambda: user + 1)
    assert load(folder) is None


def quiet(folder: Path | None, caplog: pytest.LogCaptureFixture) -> str:
    """Store and load without effect, and without a word above DEBUG."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        store_record(folder, FIRST)
        assert folder is None or load(folder) is None
    assert {record.levelno for record in caplog.records} <= {logging.DEBUG}
    return caplog.text


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    assert "is not kept in" in quiet(tmp_path / "file" / "notes", caplog)
    quiet(tmp_path / "file", caplog)
    quiet(Path("/proc/notes"), caplog)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "other users may write to it" in quiet(shared, caplog)
    assert list(shared.iterdir()) == []
    full = tmp_path / "full"
    store_record(full, SECOND)
    monkeypatch.setattr(files.os, "fsync", failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with caplog.at_level(logging.DEBUG):
        store_record(full, FIRST)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert load(full) == SECOND
    assert len(list(full.iterdir())) == 1


def test_the_folder_is_the_one_that_the_environment_names(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for setting, expected in (("own", tmp_path / "own" / "notes"), ("", None), ("off", None)):
        monkeypatch.setenv("TORCHBOOST_CACHE", setting)
        assert files.record_folder("notes") == expected
    quiet(None, caplog)
    monkeypatch.delenv("TORCHBOOST_CACHE")
    assert files.record_folder("notes") == tmp_path / "xdg" / "torchboost" / "notes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.record_folder("notes") == tmp_path / "home" / ".cache" / "torchboost" / "notes"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Path, "home", failing(RuntimeError("Could not determine home directory.")))
    assert files.record_folder("notes") is None


def test_the_newest_files_are_kept_and_others_left_alone(folder, monkeypatch):
    monkeypatch.setattr(files, "_MOST_FILES", 3)
    store_record(folder, FIRST)
    now = time.time()
    ages = {f"{1:064x}.json": 20, f"{2:064x}.json": -9999, f"{PARTIAL}old": 3700, "notes.json": 9999}
    for name, age in ages.items():
        (folder / name).write_bytes(b"{}")
        os.utime(folder / name, (now - age, now - age))
    store_record(folder, Note(key=OTHER, text="other"))
    kept = {f"{OTHER}.json", f"{KEY}.json", f"{2:064x}.json", "notes.json"}
    assert {path.name for path in folder.iterdir()} == kept


def test_the_folder_may_be_deleted_at_any_time(folder, monkeypatch):
    def delete(path: Path, *_: Any, **__: Any) -> None:
        for file in path.parent.iterdir():
            file.unlink()
        path.parent.rmdir()
        return write(path, *_, **__)

    store_record(folder, FIRST)
    write = files.write_whole
    monkeypatch.setattr(files, "write_whole", delete)
    store_record(folder, FIRST)
    assert load(folder) is None
