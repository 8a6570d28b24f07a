from __future__ import annotations

import pickle

import pytest

from torchboost.errors import ConfigError, nearest, shown


def test_config_error_carries_place_finding_and_remedy_and_travels_between_processes():
    given = {"found": "int 3", "allowed": "true or false", "hint": "Did you mean 'c'?"}
    error = ConfigError("a.b", **given)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, ValueError)
        assert (one.path, one.found, one.allowed, one.hint) == ("a.b", *given.values())
        assert str(one) == "a.b: found int 3; allowed: true or false. Did you mean 'c'?"
    whole = ConfigError("", found="null", allowed="an object")
    assert str(whole) == "the configuration: found null; allowed: an object."
    of_file = pickle.loads(pickle.dumps(ConfigError("a.b", **given, file="boost.json")))
    assert (of_file.path, of_file.file) == ("a.b", "boost.json")
    assert str(of_file) == "a.b in 'boost.json': found int 3; allowed: true or false. Did you mean 'c'?"


def test_nearest():
    names = ["less_bn", "adasum"]
    assert [nearest(name, names) for name in ("les_bn", "adasum")] == [f"Did you mean '{name}'?" for name in names]
    assert nearest("qqq", names) == nearest("", names) == nearest("a", []) == ""


@pytest.mark.parametrize("value", ["x" * 10_000, 10**4000, {str(key): key for key in range(10_000)}, list(range(999))])
def test_a_long_value_is_shortened(value):
    assert len(shown(value)) < 2000
    assert shown("abc") == "'abc'"
