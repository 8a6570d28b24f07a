from __future__ import annotations

import shutil

import pytest
import torch

from torchboost.cli import environment
from torchboost.cli.environment import EXTRAS, compile_advice, cpp_compiler, examine


@pytest.mark.parametrize(("follows", "verdict"), [(True, "good"), (False, "careful")])
def test_known_compiler_fault(follows, verdict, monkeypatch):
    monkeypatch.setattr(environment, "compiler_follows_flags", lambda: follows)
    assert compile_advice().startswith(verdict)


def test_examine(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else name)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    found = examine()
    assert found["versions"]["torch"] == torch.__version__ or found["versions"]["torch"] in torch.__version__
    assert found["threads"] == 1
    assert set(found["extras"]) == set(EXTRAS)
    assert found["extras"]["workloads"] == ["pyarrow"]
    assert found["extras"]["cli"] == []
    assert (found["gloo"], found["nccl"]) == (False, True)


def test_without_torch_distributed_there_are_no_backends(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    found = examine()
    assert (found["distributed"], found["gloo"], found["nccl"]) == (False, False, False)


@pytest.mark.parametrize(
    ("cxx", "asked"), [(None, "g++"), ("clang++-18", "clang++-18"), ("ccache g++ -O2", "ccache"), ("", None)]
)
def test_the_cpp_compiler_is_that_of_cxx(cxx, asked, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    assert cpp_compiler() == (None if asked is None else f"/bin/{asked}")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cpp_compiler() is None
