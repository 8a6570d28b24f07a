"""Small files of measured results: private, bounded, and never those of others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torchboost.core import kept
from torchboost.core.kept import default_folder, keep, read_kept

NAME = "0" * 64 + ".json"


def test_an_entry_is_private_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / NAME
    keep(file, b"first")
    keep(file, b"second")
    assert read_kept(file) == b"second"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (file.parent, file.parent.parent)] == [0o700, 0o700]


def test_what_others_can_have_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a" / NAME
    keep(file, b"mine")
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="not a regular file of this user"):
        read_kept(file)
    file.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write to it"):
        keep(file, b"mine")


def test_links_pipes_and_large_files_are_not_read(tmp_path: Path) -> None:
    keep(tmp_path / "a" / NAME, b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "a" / NAME)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "large").touch(0o600)
    os.truncate(tmp_path / "large", (1 << 20) + 1)
    for name in ("link", "pipe", "absent", "a"):
        with pytest.raises(OSError):  # noqa: PT011 the system chooses the message
            read_kept(tmp_path / name)
    with pytest.raises(ValueError, match="it has 1048577 bytes"):
        read_kept(tmp_path / "large")


def test_the_oldest_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 2)
    for number in range(3):
        file = tmp_path / f"{number:064x}.json"
        keep(file, b"")
        os.utime(file, (number, number))
    assert sorted(file.name[63] for file in tmp_path.iterdir()) == ["1", "2"]


def test_the_folder_is_the_users_unless_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path))
    assert default_folder("choices") == tmp_path / "choices"
    for off in ("", "off"):
        monkeypatch.setenv("TORCHBOOST_CACHE", off)
        assert default_folder("choices") is None
    monkeypatch.delenv("TORCHBOOST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder("choices") == tmp_path / "torchboost" / "choices"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder("choices") == tmp_path / ".cache" / "torchboost" / "choices"

    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_folder("choices") is None
