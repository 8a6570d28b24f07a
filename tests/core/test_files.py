"""A file is there as a whole or not at all, and belongs to this user or does not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchboost.core import files
from torchboost.core.files import PARTIAL, only_mine, write_whole


def test_it_writes_and_replaces(tmp_path):
    file = tmp_path / "a"
    for data in (b"one", b"", b"three\r\n\0"):
        write_whole(file, data)
        assert file.read_bytes() == data
    assert list(tmp_path.iterdir()) == [file]


def test_modes_are_those_asked_for_less_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "a", b"")
        write_whole(tmp_path / "b", b"", mode=0o600)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o644, 0o600]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, error, call):
    file = tmp_path / "a"
    write_whole(file, b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(type(error)):
        write_whole(file, b"new")
    monkeypatch.undo()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path):
    write_whole(tmp_path / "a", b"old")
    code = (
        "import os, signal; from pathlib import Path; from torchboost.core import files; "
        "files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
        f"files.write_whole(Path({str(tmp_path / 'a')!r}), b'new')"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (tmp_path / "a").read_bytes() == b"old"
    (left,) = set(tmp_path.iterdir()) - {tmp_path / "a"}
    assert left.name.startswith(PARTIAL)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "absent" / "a", b"")


def test_only_mine(tmp_path, monkeypatch):
    file: Path = tmp_path / "a"
    write_whole(file, b"", mode=0o600)
    assert only_mine(file.stat())
    for mode, mine in ((0o644, True), (0o664, False), (0o602, False)):
        file.chmod(mode)
        assert only_mine(file.stat()) is mine
    file.chmod(0o600)
    user = os.geteuid()
    monkeypatch.setattr(files.os, "geteuid", lambda: user + 1)
    assert not only_mine(file.stat())
    monkeypatch.delattr(files.os, "geteuid")
    assert only_mine(file.stat())
