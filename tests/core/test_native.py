import os
import shutil
import stat
import subprocess
import sys

import pytest

from torchboost import IncompatibleError
from torchboost.core import native

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path / "cache"))
    native.compiled.cache_clear()
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    yield path
    native.compiled.cache_clear()


def built_path(source):
    """Where the library of the source belongs; the folder is made."""
    native.compiled(source)
    native.compiled.cache_clear()
    return next(native.cache_folder().iterdir())


def test_compiles_once_and_loads_what_lies_on_disk(source, monkeypatch):
    assert native.compiled(source).answer() == 42
    built = list(native.cache_folder().iterdir())
    assert [path.suffix for path in built] == [".so"]
    stamp = built[0].stat().st_mtime_ns
    native.compiled.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.compiled(source).answer() == 42
    assert built[0].stat().st_mtime_ns == stamp


def test_another_source_or_another_processor_is_compiled_anew(source, monkeypatch):
    native.compiled(source)
    source.write_text(SOURCE.replace("42", "43"))
    native.compiled.cache_clear()
    assert native.compiled(source).answer() == 43
    monkeypatch.setattr(native, "_processor", lambda: b"another")
    native.compiled.cache_clear()
    assert native.compiled(source).answer() == 43
    assert len(list(native.cache_folder().iterdir())) == 3


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_file_that_is_not_whole_is_compiled_again(source, kept):
    built = built_path(source)
    whole = built.read_bytes()
    built.unlink()  # it is loaded: what is written into it would change the running code
    built.write_bytes(whole[: int(kept * len(whole))])
    again = native.compiled(source)
    assert built.read_bytes() == whole
    assert again.answer() == 42


def test_a_link_and_a_file_that_others_may_write_are_replaced(source, tmp_path):
    built = built_path(source)
    other = tmp_path / "other.so"
    built.rename(other)
    built.symlink_to(other)
    native.compiled(source)
    assert not built.is_symlink()
    built.chmod(0o777)
    native.compiled.cache_clear()
    native.compiled(source)
    assert stat.S_IMODE(built.stat().st_mode) == 0o700


def test_a_file_or_folder_of_another_user_is_never_loaded(source, monkeypatch):
    built = built_path(source)
    seen = os.geteuid()
    monkeypatch.setattr(native.os, "geteuid", lambda: seen + 1)
    assert not native._whole(built)
    with pytest.raises(IncompatibleError, match=rf"belongs to user {seen} and has mode 0700"):
        native.compiled(source)


def test_a_folder_that_others_may_write_is_refused_and_a_new_one_is_private(source):
    folder = native.cache_folder()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(IncompatibleError, match="mode 0777: other users could put code there"):
        native.compiled(source)
    folder.rmdir()
    before = os.umask(0)
    try:
        native.compiled(source)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()] == [0o700]


def test_folders_that_cannot_be_used_are_said(source, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHBOOST_CACHE", str(source))  # a file
    with pytest.raises(
        IncompatibleError, match=r"cannot keep its compiled kernel in .*answer.c(.|\n)*TORCHBOOST_CACHE"
    ):
        native.compiled(source)
    monkeypatch.delenv("TORCHBOOST_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(IncompatibleError, match=r"/dev/null/.cache(.|\n)*leave native out"):
        native.compiled(source)

    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", homeless)
    with pytest.raises(IncompatibleError, match="found no home folder"):
        native.cache_folder()


def test_a_compiler_that_cannot_be_understood_hangs_or_writes_nothing_is_said(source, monkeypatch):
    monkeypatch.setenv("CC", "gcc 'x")
    with pytest.raises(IncompatibleError, match=r"CC is \"gcc 'x\", which is not a valid command line"):
        native.compiled(source)
    monkeypatch.setenv("CC", "true")
    with pytest.raises(IncompatibleError, match="it wrote no library"):
        native.compiled(source)
    monkeypatch.setattr(native, "LONGEST", 0.01)
    monkeypatch.setenv("CC", "sh -c 'sleep 1' x")
    with pytest.raises(IncompatibleError, match=r"still running after 0\.01 seconds"):
        native.compiled(source)
    assert list(native.cache_folder().iterdir()) == []


def test_no_compiler_is_said(source, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(IncompatibleError, match="needs a C compiler with OpenMP, looked for cc, gcc, clang"):
        native.compiled(source)
    monkeypatch.setenv("CC", "nosuchcc -m64")
    with pytest.raises(IncompatibleError, match="looked for nosuchcc -m64"):
        native.compiled(source)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(source):
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(IncompatibleError, match=r"the compiler failed(.|\n)*nothing(.|\n)*leave native out"):
        native.compiled(source)
    assert list(native.cache_folder().iterdir()) == []


def test_the_folder_is_the_users_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHBOOST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "torchboost"
    for off in ("", "off"):  # choices are not kept then; a library must lie somewhere
        monkeypatch.setenv("TORCHBOOST_CACHE", off)
        assert native.cache_folder() == tmp_path / "torchboost"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / ".cache" / "torchboost"


def test_processes_that_start_together_all_get_a_whole_file(source):
    code = (
        "from pathlib import Path; from torchboost.core.native import compiled; "
        f"print(compiled(Path({str(source)!r})).answer())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["42\n"] * 3
    assert len(list(native.cache_folder().iterdir())) == 1
