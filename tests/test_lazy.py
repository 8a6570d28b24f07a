import doctest

import pytest

from torchboost import lazy


def test_names_load_from_their_home():
    find, names = lazy.exports("shapes", {"math": ("pi",), "fractions": ("Fraction",)})
    assert find("Fraction")(1, 2).denominator == 2
    assert names() == ["Fraction", "pi"]


def test_unknown_names_are_said_as_python_does():
    find, _ = lazy.exports("shapes", {"math": ("pi",)})
    with pytest.raises(AttributeError, match="module 'shapes' has no attribute 'circle'"):
        find("circle")


def test_doctest():
    assert doctest.testmod(lazy).failed == 0
