"""The compilation of a small model: in its own process, with an empty cache, and every failure told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchboost.cli.small_compile import SmallCompile, small_compile


def test_it_runs_in_a_separate_process_with_an_empty_cache():
    seen = {}

    def run(words, *, env, **more):
        folder = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        seen.update(words=words, folder=folder, **more)
        assert list(folder.iterdir()) == []
        return subprocess.CompletedProcess(words, 0, "a line of the compiler\n2.5\n", "")

    assert small_compile(7.0, run=run) == SmallCompile(seconds=2.5)
    assert seen["words"][0] == sys.executable
    assert seen["timeout"] == 7.0
    assert not seen["folder"].exists()


@pytest.mark.parametrize(
    ("stderr", "code", "said"),
    [
        (
            "Traceback\ntorch.InductorError: InvalidCxxCompiler: No working C++ compiler\n\nSet TORCHDYNAMO_VERBOSE\n",
            1,
            "No working C++",
        ),
        ("killed\n", 137, "killed"),
        ("", -9, "the process ended with code -9"),
    ],
)
def test_a_failure_is_told(stderr, code, said):
    found = small_compile(run=lambda words, **more: subprocess.CompletedProcess(words, code, "", stderr))
    assert found.seconds is None
    assert said in found.fault


def test_a_process_that_does_not_end_is_stopped_and_told():
    def run(words, *, timeout, **more):
        raise subprocess.TimeoutExpired(words, timeout)

    assert small_compile(30.0, run=run) == SmallCompile(fault="not finished after 30 s")


def test_a_process_that_cannot_start_is_told():
    def run(words, **more):
        raise OSError("no room")

    assert small_compile(run=run) == SmallCompile(fault="no room")


@pytest.mark.slow
def test_without_a_compiler_the_error_names_it(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = small_compile()
    assert found.seconds is None
    assert "ompiler" in found.fault


@pytest.mark.slow
def test_a_real_compilation():
    found = small_compile()
    assert found.fault == ""
    assert found.seconds is not None
    assert found.seconds > 0
