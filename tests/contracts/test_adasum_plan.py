"""AdaSum in the rule book: in no level, nodes from the launcher, packs from MindSpore's section."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchboost import ConfigError, Facts, Plan
from torchboost.algorithms import AdaptiveSum
from torchboost.registry import LEVELS

FAST = Facts(half_precision=True, convolutions=53, total_steps=65536)
NODES = replace(FAST, world_size=8, nodes=2, devices_per_node=4)


def reasons(plan: Plan) -> dict[str, str]:
    return dict(plan.dropped)


def adasum(config: dict, facts: Facts) -> AdaptiveSum:
    (found,) = Plan.of("O0", config, facts).algorithms
    assert isinstance(found, AdaptiveSum)
    return found


def test_adasum_is_in_no_level_and_says_why():
    assert not any("adasum" in row for row in LEVELS.values())
    reason = reasons(Plan.of("O2", {"boost": {"adasum": True}}, NODES))["adasum"]
    assert reason == "mode auto follows the level and reads no switches; use mode manual, or extra"


def test_adasum_takes_nodes_from_the_launcher_and_packs_from_the_section():
    manual = {"boost": {"mode": "manual", "adasum": True}}
    assert adasum(manual, NODES) == AdaptiveSum(split_groups=(50, 100), devices_per_node=4)
    assert adasum({"extra": {"adasum": True}}, NODES) == AdaptiveSum(devices_per_node=4)
    written = {"common": {"gradient_split_groups": 7}, "extra": {"adasum": True}}
    assert adasum(written, NODES) == AdaptiveSum(split_groups=7, devices_per_node=4)
    assert adasum({"extra": {"adasum": {"split_groups": [3, 9]}}}, NODES).split_groups == (3, 9)


def test_a_written_device_number_makes_the_nodes():
    for config in [
        {"boost": {"mode": "manual", "adasum": True}, "common": {"device_number": 2}},
        {"extra": {"adasum": True}, "common": {"device_number": 2}},
        {"extra": {"adasum": {"devices_per_node": 2}}},
    ]:
        one = replace(FAST, world_size=8, devices_per_node=8)
        assert adasum(config, one).devices_per_node == 2


def test_adasum_without_whole_nodes_is_dropped():
    for facts, number, reason in [
        (
            {"world_size": 8, "devices_per_node": 4, "nodes": 2},
            8,
            "one node of 8 ranks has no other node to combine with",
        ),
        ({"world_size": 8, "devices_per_node": 4, "nodes": 2}, 99, "one node of 8 ranks"),
        (
            {"world_size": 8, "devices_per_node": 4, "nodes": 2},
            3,
            "8 ranks in nodes of 3 leave the last node incomplete",
        ),
        ({}, None, "there is one rank, and no other"),
    ]:
        common = {} if number is None else {"common": {"device_number": number}}
        plan = Plan.of("O0", {"boost": {"mode": "manual", "adasum": True}} | common, replace(FAST, **facts))
        assert plan.algorithms == ()
        assert reason in reasons(plan)["adasum"]


def test_wrong_settings_of_adasum_are_placed():
    for extra in ({"devices_per_node": "2"}, {"split_groups": "x"}, {"on": "gradient"}, {"split_groups": [0]}):
        with pytest.raises(ConfigError) as caught:
            Plan.of("O0", {"extra": {"adasum": extra}}, NODES)
        assert caught.value.path.startswith("extra.adasum")
