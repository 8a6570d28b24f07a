"""The registry and the level table are consistent, read-only data."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

from torchboost.config import BoostConfig
from torchboost.registry import LEVELS, REGISTRY, Facts


@pytest.mark.parametrize("name", REGISTRY)
def test_entry_is_consistent(name):
    entry = REGISTRY[name]
    assert entry.name == name == entry.algorithm.name
    assert dataclasses.is_dataclass(entry.algorithm)
    assert entry.algorithm.__dataclass_params__.frozen
    assert entry.summary
    if entry.section:
        section = BoostConfig.model_fields[entry.section].default
        settings = {f.name for f in dataclasses.fields(entry.algorithm)}
        assert {*entry.words, *entry.brings} <= set(type(section).model_fields)
        assert set(entry.words.values()) <= settings
    assert set(entry.brings.values()) <= set(REGISTRY)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_name_registered_algorithms_and_valid_settings(level):
    for name, settings in LEVELS[level].items():
        REGISTRY[name].algorithm(**settings)
        json.dumps(dict(settings))


def test_tables_are_read_only():
    for table in (REGISTRY, LEVELS, LEVELS["O1"]):
        with pytest.raises(TypeError):
            table["O1"] = {}


def test_measure_looks_at_the_model():
    assert Facts.measure(nn.Linear(2, 2)).convolutions == 0
    assert Facts.measure(nn.Linear(2, 2)).trained is None
    assert Facts.measure(nn.BatchNorm1d(2)).trained is False
    assert Facts.measure(nn.Sequential(nn.Conv1d(2, 2, 1))).convolutions == 1
    bare = Facts.measure()
    assert (bare.convolutions, bare.device, bare.world_size, bare.nodes) == (None, "cpu", 1, 1)
