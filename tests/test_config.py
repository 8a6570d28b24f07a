from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from torchboost import config as config_module
from torchboost.config import BoostConfig
from torchboost.errors import ConfigError

REFERENCE = """{
  "boost": {"mode": "auto", "less_bn": false, "grad_freeze": false, "adasum": false,
            "grad_accumulation": false, "dim_reduce": false, "loss_scale_group": false},
  "common": {"gradient_split_groups": [50, 100], "device_number": 8},
  "less_bn": {"fn_flag": true, "gc_flag": true},
  "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536},
  "grad_accumulation": {"grad_accumulation_step": 1},
  "dim_reduce": {"rho": 0.55, "gamma": 0.9, "alpha": 0.001, "sigma": 0.4, "n_components": 32,
                 "pca_mat_path": null, "weight_load_dir": null, "timeout": 1800}
}"""
DEFAULTS = json.loads(REFERENCE)


def fault(source: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        BoostConfig.load(source)
    return caught.value


def test_defaults_are_the_reference_key_for_key():
    neutral = {"optimizer": None, "lr": None, "rate": 1.0, "length": 1.0}
    assert BoostConfig().model_dump(mode="json") == DEFAULTS | {"extra": {}, "recipe": neutral, "about": {}}
    assert BoostConfig.load(REFERENCE) == BoostConfig()


def test_nothing_means_defaults():
    assert all(BoostConfig.load(nothing) == BoostConfig() for nothing in ("", None, "  \n", {}, "{}"))


def test_every_kind_of_source(tmp_path):
    data = {"boost": {"mode": "manual", "less_bn": True}, "extra": {"compile": {"mode": "default"}, "autocast": False}}
    file = tmp_path / "{boost}.json"
    file.write_text(json.dumps(data), encoding="utf-8-sig")
    want = BoostConfig.load(data)
    assert want.boost.less_bn
    assert want.extra == {"compile": {"mode": "default"}, "autocast": False}
    for source in (json.dumps(data), "\n " + json.dumps(data), file, str(file), MappingProxyType(data), want):
        assert BoostConfig.load(source) == want


def test_source_is_not_changed_and_not_shared():
    data: dict[str, Any] = {"extra": {"compile": {}}}
    loaded = BoostConfig.load(data)
    data["extra"]["autocast"] = True
    data["extra"]["compile"]["mode"] = "other"
    assert loaded.extra == {"compile": {}}


def test_values_are_frozen():
    with pytest.raises(ValidationError):
        BoostConfig().boost.mode = "manual"


def test_written_keys_are_remembered():
    loaded = BoostConfig.load({"less_bn": {"gc_flag": True}})
    assert loaded.less_bn.model_fields_set == {"gc_flag"}
    assert loaded.grad_freeze.model_fields_set == set()


def test_split_groups_are_one_or_several():
    for written, read in ((1, 1), ([50, 100], (50, 100)), ([3], (3,))):
        loaded = BoostConfig.load({"common": {"gradient_split_groups": written}})
        assert loaded.common.gradient_split_groups == read
        assert json.loads(loaded.model_dump_json())["common"]["gradient_split_groups"] == written
    for wrong in (0, True, 1.0, "50", None, [], [0], [2, 2], [3, 2], [1, True], [1, 2.0], {}):
        error = fault({"common": {"gradient_split_groups": wrong}})
        assert error.path == "common.gradient_split_groups"
        assert "each greater than the one before" in error.allowed


def test_unknown_names_are_shown_with_the_nearest():
    for data, path, hint in (
        ({"bost": {}}, "bost", "Did you mean 'boost'?"),
        ({"boost": {"les_bn": True}}, "boost.les_bn", "Did you mean 'less_bn'?"),
        ({"boost": {"mode": "manuel"}}, "boost.mode", "Did you mean 'manual'?"),
        ({"freeze_p": 0.5}, "freeze_p", "'freeze_p' belongs in the section 'grad_freeze'."),
        ({"boost": {"fn_flag": True}}, "boost.fn_flag", "'fn_flag' belongs in the section 'less_bn'."),
        ({"boost": {"zzzz": True}}, "boost.zzzz", ""),
    ):
        error = fault(data)
        assert (error.path, error.hint) == (path, hint)
        assert error.allowed
    with pytest.raises(ValueError, match=r"boost\.mode: found str 'all'; allowed: 'auto'"):
        BoostConfig.load({"boost": {"mode": "all"}})


WRONG: dict[tuple[str, Any], list[Any]] = {
    ("boost", "less_bn"): [1],
    ("boost", "adasum"): ["true"],
    ("boost", "mode"): [True, None],
    ("common", "device_number"): [0, True, 8.0, "8", 18446744073709551616],
    ("less_bn", "fn_flag"): [0],
    ("less_bn", "gc_flag"): [None],
    ("grad_freeze", "param_groups"): [0],
    ("grad_freeze", "freeze_type"): [3, -1, True],
    ("grad_freeze", "freeze_p"): [1.0, -0.1, float("nan"), False],
    ("grad_freeze", "total_steps"): [0, 10**400],
    ("grad_accumulation", "grad_accumulation_step"): [0],
    ("dim_reduce", "rho"): [0.0, 1],
    ("dim_reduce", "gamma"): [1.0],
    ("dim_reduce", "alpha"): [-1.0, float("inf"), 10**400],
    ("dim_reduce", "sigma"): [0],
    ("dim_reduce", "n_components"): [0],
    ("dim_reduce", "pca_mat_path"): [3],
    ("dim_reduce", "weight_load_dir"): [["a"]],
    ("dim_reduce", "timeout"): [0, 10000000000],
    ("extra", "compile"): [1, None],
    ("extra", 1): [True],
}


def test_wrong_types_and_ranges_name_the_place():
    for (section, key), value in ((place, value) for place, values in WRONG.items() for value in values):
        error = fault({section: {key: value}})
        assert error.path == f"{section}.{key}"
        assert type(value).__name__ in error.found or error.found == "null"
        assert error.allowed
        assert str(error).startswith(f"{section}.{key}: found ")
    for section, value in itertools.product(BoostConfig.model_fields, [None, 3, "x", [], True]):
        error = fault({section: value})
        assert error.path == section
        assert error.allowed.startswith("an object")


def test_edges_of_the_ranges_are_allowed():
    loaded = BoostConfig.load(
        {
            "grad_freeze": {"freeze_p": 0, "freeze_type": 2, "param_groups": 1, "total_steps": 1},
            "dim_reduce": {"alpha": 0, "gamma": 0.0, "n_components": 1, "timeout": 1, "pca_mat_path": "p.npy"},
        }
    )
    assert loaded.grad_freeze.freeze_p == 0.0
    assert loaded.dim_reduce.pca_mat_path == "p.npy"


def test_unreadable_json_says_line_and_column(tmp_path):
    text = '{"boost": {\n  "mode": }}'
    assert "line 2 column 11" in fault(text).found
    file = tmp_path / "boost.json"
    file.write_text(text)
    assert "line 2 column 11" in fault(file).found
    assert str(fault(file)).startswith(f"the configuration in '{file}': found JSON with a fault")


def test_a_key_given_twice_is_not_dropped_silently():
    error = fault('{"boost": {"mode": "auto", "mode": "manual"}}')
    assert error.path == "mode"
    assert "more than once" in error.found


def test_hostile_json():
    for text in ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 100_000, '{"a": "\\x"}', "{"):
        assert fault(text).allowed == "a JSON object"


def test_files_that_cannot_be_used(tmp_path):
    assert "there is no such file" in fault(tmp_path / "absent.json").found
    assert "there is no such file" in fault("absent.json").found
    assert "cannot be read" in fault(tmp_path).found
    assert "cannot be read" in fault("a\0b").found
    assert "cannot be read" in fault("x" * 5000).found
    assert len(fault("x" * 5000).found) < 300
    for content, finding in [
        (b"\xff\xfe\x00", "can't decode byte"),
        (b"[1]", "list [1]"),
        (b"null", "null"),
        (b"", "line 1"),
    ]:
        file = tmp_path / "file.json"
        file.write_bytes(content)
        assert finding in fault(file).found


def test_other_sources():
    for source in (3, True, 1.5, [1], ("boost",), b"{}", object()):
        assert type(source).__name__ in fault(source).found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = sorted({key for section in DEFAULTS.values() for key in section} | {"extra", "compile"})
SECTIONS = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), JSON, max_size=4)
DOCUMENTS = st.dictionaries(
    st.sampled_from([*DEFAULTS, "extra", "about"]) | st.text(max_size=4), SECTIONS | JSON, max_size=4
)


@given(DOCUMENTS)
def test_any_document_loads_or_is_a_config_error(document):
    for source in (document, json.dumps(document)):
        with contextlib.suppress(ConfigError):
            assert isinstance(BoostConfig.load(source), BoostConfig)


@given(st.text(max_size=40) | st.text(max_size=40).map(lambda text: "{" + text))
def test_any_text_loads_or_is_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert BoostConfig.load(text) == BoostConfig()


SHARE = st.floats(0, 1, exclude_max=True)
OPEN = st.floats(0, 1, exclude_min=True, exclude_max=True)
COUNT = st.integers(1, 10**9)
PATHS = st.none() | st.text(max_size=9)
VALID = st.fixed_dictionaries(
    {},
    optional={
        "boost": st.fixed_dictionaries(
            {"mode": st.sampled_from(["auto", "manual", "enable_all", "disable_all"])},
            optional={name: st.booleans() for name in DEFAULTS["boost"] if name != "mode"},
        ),
        "common": st.fixed_dictionaries(
            {
                "gradient_split_groups": COUNT | st.lists(COUNT, min_size=1, max_size=5, unique=True).map(sorted),
                "device_number": COUNT,
            }
        ),
        "grad_freeze": st.fixed_dictionaries({"freeze_type": st.integers(0, 2), "freeze_p": SHARE}),
        "dim_reduce": st.fixed_dictionaries({"rho": OPEN, "sigma": OPEN, "gamma": SHARE, "pca_mat_path": PATHS}),
        "extra": st.dictionaries(
            st.text(max_size=6), st.booleans() | st.dictionaries(st.text(max_size=6), st.integers())
        ),
    },
)


@given(VALID)
def test_round_trip(document):
    loaded = BoostConfig.load(document)
    written = loaded.model_dump(mode="json", exclude_unset=True)
    assert written == document
    assert BoostConfig.load(loaded.model_dump_json()) == loaded


def test_schema_lists_every_key_with_what_it_allows():
    schema = BoostConfig.model_json_schema()
    assert set(schema["properties"]) == {*DEFAULTS, "extra", "recipe", "about"}
    assert schema["additionalProperties"] is False
    for section in BoostConfig.model_fields.values():
        kind = section.annotation
        if isinstance(kind, type):
            keys = schema["$defs"][kind.__name__]["properties"]
            assert all(key["description"] for key in keys.values())
    assert "null" in json.dumps(schema["$defs"]["DimReduceSection"]["properties"]["pca_mat_path"])


def test_needs_no_torch():
    # The package itself imports torch, so the module is loaded under a bare package of the same name.
    folder = Path(config_module.__file__).parent
    code = (
        "import sys, types; package = types.ModuleType('torchboost'); "
        f"package.__path__ = [{str(folder)!r}]; sys.modules['torchboost'] = package; "
        "import torchboost.config; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_recipe():
    assert BoostConfig().recipe.is_neutral
    written = {"optimizer": "muon", "lr": 0.02, "rate": 2, "length": 1}
    recipe = BoostConfig.load({"recipe": written}).recipe
    assert recipe.model_dump() == written
    assert not recipe.is_neutral
    assert BoostConfig.load(json.dumps({"recipe": written})).recipe == recipe
    assert [BoostConfig.load({"recipe": {"length": 0.55}}).recipe.steps_of(n) for n in (600, 601, 1)] == [330, 331, 1]


@pytest.mark.parametrize(
    ("section", "path", "found"),
    [
        ({"optimizer": "moun"}, "recipe.optimizer", "Did you mean 'muon'"),
        ({"optimizer": "adamw"}, "recipe.optimizer", "'muon', 'schedule_free_adamw' or null"),
        ({"lr": 0.02}, "recipe.lr", "a number above 0 if 'optimizer' is given"),
        ({"optimizer": "muon", "lr": 0.0}, "recipe.lr", "a number above 0"),
        ({"optimizer": "muon", "lr": "0.02"}, "recipe.lr", "a number above 0"),
        ({"rate": 0}, "recipe.rate", "a number above 0"),
        ({"rate": True}, "recipe.rate", "a number above 0"),
        ({"rate": None}, "recipe.rate", "a number above 0"),
        ({"length": 0.0}, "recipe.length", "above 0 and at most 1"),
        ({"length": 1.1}, "recipe.length", "above 0 and at most 1"),
        ({"steps": 3}, "recipe.steps", "optimizer, lr, rate, length"),
        (3, "recipe", "an object with the keys optimizer, lr, rate, length"),
    ],
)
def test_faults_of_a_recipe(section: Any, path: str, found: str):
    error = fault({"recipe": section})
    assert error.path == path
    assert found in str(error)
