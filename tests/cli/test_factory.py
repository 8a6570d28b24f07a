from __future__ import annotations

import pytest

from torchboost.cli.factory import is_factory


def test_a_path_with_a_function_is_a_factory():
    assert is_factory("folder/train.py:make", model=None)
    assert not is_factory("digits", model="resnet")


def test_a_path_without_a_function_is_refused():
    with pytest.raises(ValueError, match=r"without a function; needed: train\.py:make"):
        is_factory("train.py")


def test_what_a_factory_makes_itself_is_not_given():
    with pytest.raises(ValueError, match="--train-limit: found '5'; leave it out"):
        is_factory("train.py:make", model=None, train_limit=5)
