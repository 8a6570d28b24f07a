"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import torchboost.compat
import torchboost.optim


def test_the_examples_run():
    attempted = 0
    for package in (torchboost.optim, torchboost.compat):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            outcome = doctest.testmod(importlib.import_module(module.name))
            assert not outcome.failed, module.name
            attempted += outcome.attempted
    assert attempted > 100
