import os
import shutil
import subprocess
import sys

import pytest

from torchboost import IncompatibleError
from torchboost.optim import native

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path / "cache"))
    native.compiled.cache_clear()
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    yield path
    native.compiled.cache_clear()


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
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / ".cache" / "torchboost"


def test_processes_that_start_together_all_get_a_whole_file(source):
    code = (
        "from pathlib import Path; from torchboost.optim.native import compiled; "
        f"print(compiled(Path({str(source)!r})).answer())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["42\n"] * 3
    assert len(list(native.cache_folder().iterdir())) == 1
