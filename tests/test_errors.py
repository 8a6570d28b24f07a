from __future__ import annotations

import pickle
import warnings

import pytest

from torchboost.errors import ConfigError, IncompatibleError, NoEffectWarning, nearest, shown


def test_config_error_carries_place_finding_and_remedy():
    error = ConfigError("a.b", found="int 3", allowed="true or false", hint="Did you mean 'c'?")
    assert isinstance(error, ValueError)
    assert (error.path, error.found, error.allowed, error.hint) == (
        "a.b",
        "int 3",
        "true or false",
        "Did you mean 'c'?",
    )
    assert str(error) == "a.b: found int 3; allowed: true or false. Did you mean 'c'?"


def test_config_error_of_a_whole_document():
    assert (
        str(ConfigError("", found="null", allowed="an object")) == "the configuration: found null; allowed: an object."
    )


def test_config_error_travels_between_processes():
    error = ConfigError("a", found="b", allowed="c", hint="d")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.path == "a"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("les_bn", "Did you mean 'less_bn'?"), ("adasum", "Did you mean 'adasum'?"), ("qqq", ""), ("", "")],
)
def test_nearest(name, hint):
    assert nearest(name, ["less_bn", "adasum"]) == hint


def test_nearest_of_nothing():
    assert nearest("a", []) == ""


def test_kinds():
    assert issubclass(IncompatibleError, RuntimeError)
    with pytest.warns(NoEffectWarning, match="nothing to do"):
        warnings.warn("nothing to do", NoEffectWarning, stacklevel=1)


@pytest.mark.parametrize("value", ["x" * 10_000, 10**4000, {str(key): key for key in range(10_000)}, list(range(999))])
def test_a_long_value_is_shortened(value):
    assert len(shown(value)) < 2000
    assert shown("abc") == "'abc'"
