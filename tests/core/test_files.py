"""Files are there as a whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import server_of_forks
from torchboost.core import files
from torchboost.core.files import PARTIAL, write_whole


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


def write_until_killed(file: Path) -> None:
    files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    write_whole(file, b"new")


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
    process = server_of_forks().Process(target=write_until_killed, args=(file,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert file.read_bytes() == b"old"
    (left,) = set(tmp_path.iterdir()) - {file}
    assert left.name.startswith(PARTIAL)
