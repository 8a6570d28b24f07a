"""Choices on disk: private, whole, bounded, and never a reason for the training to fail."""

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

from torchboost.calibration.cache import ChoiceCache
from torchboost.calibration.choice import Choice, Machine, Verdict
from torchboost.core import files, kept
from torchboost.core.files import PARTIAL
from torchboost.measure.evidence import Interval

KEY = "0123456789abcdef" * 4
OTHER = KEY[::-1]
MACHINE = Machine(processor="a", threads=2, device="cpu", torch="2.13", torchboost="1")


def choice(reason: str = "1.2 times as fast", **other: Any) -> Choice:
    verdict = Verdict(lever="autocast", kept=True, reason=reason, ratio=Interval(low=1.1, mid=1.2, high=1.3), pairs=8)
    return Choice(**({"verdicts": (verdict,), "source": "trial", "seconds": 1.5, "machine": MACHINE} | other))


def loaded(choice: Choice) -> Choice:
    return choice.model_copy(update={"source": "cache"})


@pytest.fixture
def cache(tmp_path: Path) -> ChoiceCache:
    return ChoiceCache(tmp_path / "a" / "choices")


def entry(cache: ChoiceCache, key: str = KEY) -> Path:
    assert cache.folder is not None
    return cache.folder / f"{key}.json"


def test_what_is_stored_is_loaded_with_the_cache_as_its_source(cache):
    assert cache.load(KEY) is None
    for stored in (
        choice(),
        choice(ratio=Interval(low=float("-inf"), mid=1.0, high=float("inf")), step_seconds=1e-300, peak_bytes=1 << 60),
        choice(verdicts=(), machine=None),
        choice(reason='quotes " and \\ and \u2713 and \n'),
    ):
        cache.store(KEY, stored)
        assert ChoiceCache(cache.folder).load(KEY) == loaded(stored)
    assert cache.load(OTHER) is None


def test_a_choice_replaces_an_earlier_one(cache):
    cache.store(KEY, choice("first"))
    cache.store(KEY, choice("second"))
    assert cache.load(KEY) == loaded(choice("second"))
    assert [path.name for path in cache.folder.iterdir()] == [f"{KEY}.json"]


def test_folder_and_files_are_private_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        cache.store(KEY, choice())
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache.folder.parent, cache.folder, entry(cache))]
    assert modes == [0o700, 0o700, 0o600]


def whole() -> dict[str, Any]:
    return {"format": 1, "key": KEY, "choice": choice().model_dump(mode="json")}


DAMAGED: list[bytes] = [
    b"",
    b"\0" * 300,
    b"\xff\xfe",
    b"[" * 100_000,
    b"null",
    b"{}",
    json.dumps(whole()).encode()[:-9],
    json.dumps(whole() | {"format": 2}).encode(),
    json.dumps(whole() | {"key": OTHER}).encode(),
    json.dumps(whole() | {"more": 1}).encode(),
    json.dumps(whole() | {"choice": {"verdicts": "all"}}).encode(),
    json.dumps(whole()).encode() + b" " * (1 << 20),
]


def test_a_damaged_or_foreign_file_counts_as_absent_and_is_replaced(cache):
    cache.folder.mkdir(parents=True)
    entry(cache).write_bytes(json.dumps(whole()).encode())
    assert cache.load(KEY) == loaded(choice())
    for content in DAMAGED:
        entry(cache).write_bytes(content)
        assert cache.load(KEY) is None
    cache.store(KEY, choice())
    assert cache.load(KEY) == loaded(choice())


def test_links_pipes_and_files_that_others_may_write_are_not_read(cache, tmp_path, monkeypatch):
    cache.store(KEY, choice())
    elsewhere = tmp_path / "elsewhere.json"
    entry(cache).rename(elsewhere)
    entry(cache).symlink_to(elsewhere)
    assert cache.load(KEY) is None
    cache.store(KEY, choice("second"))
    assert not entry(cache).is_symlink()
    assert cache.load(KEY) == loaded(choice("second"))
    entry(cache).chmod(0o666)
    assert cache.load(KEY) is None
    entry(cache).unlink()
    os.mkfifo(entry(cache))
    assert cache.load(KEY) is None
    cache.store(KEY, choice())
    assert cache.load(KEY) == loaded(choice())
    user = os.geteuid()
    monkeypatch.setattr(files.os, "geteuid", lambda: user + 1)
    assert cache.load(KEY) is None


def test_reading_leaves_no_file_open(cache):
    cache.store(KEY, choice())
    entry(cache, OTHER).mkdir()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(20):
        cache.load(KEY)
        cache.load(OTHER)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert after == before


def quiet(cache: ChoiceCache, caplog: pytest.LogCaptureFixture) -> None:
    """Store and load without effect, and without a word above DEBUG."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        cache.store(KEY, choice())
        assert cache.load(KEY) is None
    assert {record.levelno for record in caplog.records} <= {logging.DEBUG}


def test_a_folder_that_cannot_be_written_is_a_no_op_without_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    quiet(ChoiceCache(tmp_path / "file" / "choices"), caplog)
    assert "is not kept in" in caplog.text
    quiet(ChoiceCache(tmp_path / "file"), caplog)
    quiet(ChoiceCache("/proc/choices"), caplog)
    shared = ChoiceCache(tmp_path / "shared")
    shared.folder.mkdir()
    shared.folder.chmod(0o777)
    quiet(shared, caplog)
    assert "other users may write to it" in caplog.text
    assert list(shared.folder.iterdir()) == []
    monkeypatch.delenv("TORCHBOOST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    quiet(ChoiceCache(), caplog)


def test_a_disk_that_is_full_is_a_no_op_and_keeps_the_earlier_choice(cache, monkeypatch, caplog):
    cache.store(KEY, choice("first"))
    number = errno.ENOSPC

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    with caplog.at_level(logging.DEBUG):
        cache.store(KEY, choice("second"))
    assert os.strerror(number) in caplog.text
    assert cache.load(KEY) == loaded(choice("first"))
    assert [path.name for path in cache.folder.iterdir()] == [f"{KEY}.json"]


def test_the_folder_is_the_one_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("TORCHBOOST_CACHE", "own")
    assert ChoiceCache().folder == tmp_path / "own" / "choices"
    assert ChoiceCache("given").folder == tmp_path / "given"
    for off in ("", "off"):
        monkeypatch.setenv("TORCHBOOST_CACHE", off)
        assert ChoiceCache().folder is None
        assert ChoiceCache(tmp_path).folder == tmp_path
    monkeypatch.delenv("TORCHBOOST_CACHE")
    assert ChoiceCache().folder == tmp_path / "xdg" / "torchboost" / "choices"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ChoiceCache().folder == tmp_path / "home" / ".cache" / "torchboost" / "choices"
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_nothing_is_kept(monkeypatch, caplog):
    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCHBOOST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    quiet(ChoiceCache(), caplog)


def test_switched_off_nothing_is_loaded_or_stored(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path))
    ChoiceCache().store(KEY, choice())
    assert ChoiceCache().load(KEY) is not None
    for off in ("", "off"):
        monkeypatch.setenv("TORCHBOOST_CACHE", off)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        quiet(ChoiceCache(), caplog)
        assert not (tmp_path / "home").exists()


def keys(count: int) -> list[str]:
    return [f"{number:064x}" for number in range(count)]


def test_the_newest_256_entries_are_kept(cache):
    cache.store(KEY, choice())
    now = time.time()
    many = keys(300)
    for age, key in enumerate(many):
        entry(cache, key).write_bytes(b"{}")
        os.utime(entry(cache, key), (now - age - 10, now - age - 10))
    (cache.folder / "notes.json").write_text("mine")
    os.utime(cache.folder / "notes.json", (0, 0))
    cache.store(OTHER, choice())
    left = {path.name for path in cache.folder.iterdir()}
    assert len(left) == 257
    assert left == {f"{key}.json" for key in (KEY, OTHER, *many[:254])} | {"notes.json"}


def test_the_entry_that_was_just_stored_stays_even_if_the_others_are_from_the_future(cache, monkeypatch):
    monkeypatch.setattr(kept, "_MOST", 2)
    cache.store(KEY, choice())
    for key in keys(4):
        entry(cache, key).write_bytes(b"{}")
        os.utime(entry(cache, key), (time.time() + 9999, time.time() + 9999))
    cache.store(KEY, choice())
    assert entry(cache).exists()
    assert len(list(cache.folder.iterdir())) == 2


def test_what_killed_processes_left_is_removed_after_an_hour(cache):
    cache.store(KEY, choice())
    old, new = (cache.folder / f"{PARTIAL}{name}" for name in ("old", "new"))
    for file, age in ((old, 3700), (new, 3500)):
        file.write_bytes(b"{")
        os.utime(file, (time.time() - age, time.time() - age))
    cache.store(OTHER, choice())
    assert not old.exists()
    assert new.exists()


def test_the_folder_may_be_deleted_at_any_time(cache, monkeypatch):
    cache.store(KEY, choice())
    entry(cache).unlink()
    assert cache.load(KEY) is None
    cache.folder.rmdir()
    assert cache.load(KEY) is None
    cache.store(KEY, choice())
    assert cache.load(KEY) == loaded(choice())

    def delete(path: Path, *_: Any, **__: Any) -> None:
        for file in path.parent.iterdir():
            file.unlink()
        path.parent.rmdir()
        return write(path, *_, **__)

    write = kept.write_whole
    monkeypatch.setattr(kept, "write_whole", delete)
    cache.store(KEY, choice())
    assert cache.load(KEY) is None


HAMMER = """
import sys
from pathlib import Path
from tests.calibration.test_cache import KEY, choice, keys
from torchboost.calibration.cache import ChoiceCache

me, folder, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
cache = ChoiceCache(folder)
print("ready", flush=True)
for line in sys.stdin:
    for count in range(rounds):
        cache.store(KEY, choice(me * 4000))
        found = cache.load(KEY)
        assert found is not None, "absent"
        assert found.verdicts[0].reason in ("a" * 4000, "b" * 4000), "mixed"
    print("done", flush=True)
"""


def test_two_processes_that_hammer_one_key_always_find_a_whole_entry(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, name, str(tmp_path / "choices"), "15"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    try:
        said = [process.stdout.readline() for process in processes]
        assert said == ["ready\n", "ready\n"]
        for _ in range(4):
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            assert [process.stdout.readline() for process in processes] == ["done\n", "done\n"]
    finally:
        ends = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert [path.name for path in (tmp_path / "choices").iterdir()] == [f"{KEY}.json"]


DELETER = """
import shutil, sys
print("ready", flush=True)
while True:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def test_a_process_that_deletes_the_folder_all_the_time(tmp_path):
    folder = tmp_path / "choices"
    with subprocess.Popen([sys.executable, "-c", DELETER, str(folder)], stdout=subprocess.PIPE, text=True) as deleter:
        assert deleter.stdout.readline() == "ready\n"
        cache = ChoiceCache(folder)
        for _ in range(30):
            cache.store(KEY, choice())
            assert cache.load(KEY) in (None, loaded(choice()))
        deleter.kill()
    cache.store(KEY, choice())
    assert cache.load(KEY) == loaded(choice())
