"""A saved plan is read back as the same algorithms, at every level, and says what it cannot hold."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from torchboost import AutoBoost, Boosted, ConfigError, Facts, Plan, boost, prepare
from torchboost.algorithms import (
    Autocast,
    ChannelsLast,
    Compile,
    FusedOptimizer,
    GradAccumulation,
    GradFreeze,
)
from torchboost.config import BoostConfig
from torchboost.core import Algorithm, Traits
from torchboost.registry import LEVELS, REGISTRY

FAST = Facts(half_precision=True, convolutions=53, total_steps=65536)

ONE_RANK = st.builds(
    Facts,
    device=st.sampled_from(["cpu", "cuda"]),
    half_precision=st.sampled_from([True, False, None]),
    convolutions=st.sampled_from([None, 0, 7, 53]),
    trained=st.sampled_from([None, False, True]),
    total_steps=st.none() | st.integers(1, 10**7),
    loop=st.sampled_from(["own", "transformers", "lightning", "accelerate"]),
)


def on_ranks(facts: Facts, world_size: int, per_node: int) -> Facts:
    per_node = min(per_node, world_size)
    return replace(facts, world_size=world_size, nodes=-(-world_size // per_node), devices_per_node=per_node)


FACTS = st.builds(on_ranks, ONE_RANK, st.sampled_from([1, 2, 6, 8]), st.sampled_from([1, 2, 4, 8]))

SHARE = st.floats(0, 1, exclude_max=True)
POSITIVE = st.floats(1e-3, 1e3)
SETTINGS: dict[str, dict[str, Any]] = {
    "less_bn": {
        "normalize_head": st.booleans(),
        "keep": st.sampled_from(["last", "narrowest"]),
        "blocks_per_norm": st.integers(1, 9),
        "head_multiplier": POSITIVE,
    },
    "gradient_centralization": {},
    "channels_last": {},
    "unpad": {"pairs": st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=2)},
    "sparse_head": {},
    "threads": {"count": st.none() | st.integers(1, 999)},
    "autocast": {"dtype": st.sampled_from(["bfloat16", "float16"])},
    "matmul_precision": {"precision": st.sampled_from(["high", "medium"])},
    "grad_freeze": {
        "groups": st.integers(2, 2**40),
        "full_share": SHARE,
        "total_steps": st.integers(1, 2**53),
        "prefixes": st.none() | st.integers(2, 9),
    },
    "token_drop": {
        "keep": st.floats(0.01, 0.99),
        "until": st.floats(0.01, 1),
        "stages": st.integers(1, 9),
        "total_steps": st.none() | st.integers(1, 2**53),
    },
    "fused_optimizer": {},
    "compile": {
        "backend": st.just("inductor"),
        "mode": st.sampled_from([None, "max-autotune"]),
        "dynamic": st.sampled_from([None, False, True]),
        "fullgraph": st.booleans(),
    },
    "grad_accumulation": {"steps": st.integers(1, 99)},
    "adasum": {
        "on": st.sampled_from(["delta", "gradient"]),
        "split_groups": st.none() | st.integers(1, 9) | st.just([2, 5]),
        "devices_per_node": st.none() | st.integers(1, 9),
    },
    "loss_scale_group": {
        "groups": st.integers(1, 9) | st.just(["0", ["1", "2.a"]]),
        "init_scale": st.sampled_from([1.0, 65536.0]) | st.just([2, 16.0]),
    },
    "dim_reduce": {"n_components": st.integers(1, 99), "alpha": POSITIVE, "weight_load_dir": st.none() | st.text()},
}


def shuffled(settings: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.permutations(list(settings)).map(lambda names: {name: settings[name] for name in names})


SWITCHES = ("less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce", "loss_scale_group")
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "boost": st.fixed_dictionaries(
            {"mode": st.sampled_from(["auto", "manual", "enable_all", "disable_all"])},
            optional={name: st.booleans() for name in SWITCHES},
        ),
        "common": st.fixed_dictionaries({}, optional={"device_number": st.integers(1, 9)}),
        "less_bn": st.fixed_dictionaries({}, optional={"fn_flag": st.booleans(), "gc_flag": st.booleans()}),
        "grad_freeze": st.fixed_dictionaries(
            {}, optional={"freeze_type": st.integers(0, 2), "freeze_p": SHARE, "total_steps": st.integers(1, 2**53)}
        ),
        "grad_accumulation": st.fixed_dictionaries({"grad_accumulation_step": st.integers(1, 99)}),
        "extra": st.fixed_dictionaries(
            {},
            optional={
                name: st.booleans() | st.fixed_dictionaries({}, optional=settings)
                for name, settings in SETTINGS.items()
            },
        ).flatmap(shuffled),
    },
)


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def by_hand(*algorithms: Algorithm) -> Plan:
    return Plan(level="O1", mode="auto", algorithms=algorithms)


def test_the_strategies_cover_the_registry():
    assert set(SETTINGS) == set(REGISTRY)


@given(st.sampled_from(list(LEVELS)), st.sampled_from(list(LEVELS)), CONFIGS, FACTS, FACTS)
def test_a_saved_plan_is_the_same_plan_elsewhere(tmp_path_factory, level, other_level, config, facts, elsewhere):
    file = tmp_path_factory.getbasetemp() / "boost.json"
    try:
        plan = Plan.of(level, config, facts)
    except ConfigError:  # two settings that exclude each other
        assume(False)
    plan.save(file)
    assert Plan.of(level, file, facts).algorithms == plan.algorithms
    assert Plan.of(other_level, file, facts).algorithms == plan.algorithms
    there = Plan.of(level, file, elsewhere)
    assert there.levers == ()
    reasons = dict(there.dropped)
    expected = [a for a in plan.algorithms if a.name not in reasons]
    assert list(there.algorithms) == expected
    assert all(reasons[a.name] for a in plan.algorithms if a not in expected)
    fast = replace(facts, half_precision=elsewhere.half_precision, total_steps=elsewhere.total_steps)
    assert Plan.of(level, file, fast).algorithms == plan.algorithms


def test_two_algorithms_of_one_order_keep_their_places(tmp_path):
    accumulation = {"boost": {"mode": "manual", "grad_accumulation": True}, "extra": {"grad_freeze": True}}
    freezing = {"boost": {"mode": "manual", "grad_freeze": True}, "extra": {"grad_accumulation": True}}
    for config in (accumulation, freezing):
        plan = Plan.of("O1", config, FAST)
        plan.save(tmp_path / "boost.json")
        assert [type(a) for a in plan.algorithms] == [GradFreeze, GradAccumulation]
        for level in LEVELS:
            assert Plan.of(level, tmp_path / "boost.json", FAST).algorithms == plan.algorithms


def test_the_launched_ranks_of_a_node_may_be_asked_for_under_extra(tmp_path):
    config = {"common": {"device_number": 1}, "extra": {"adasum": {"devices_per_node": None}}}
    for facts, on in ((on_ranks(FAST, 2, 2), False), (on_ranks(FAST, 4, 2), True)):
        plan = Plan.of("O0", config, facts)
        plan.save(tmp_path / "boost.json")
        assert [a.name for a in plan.algorithms] == ["adasum"] * on
        assert Plan.of("O0", tmp_path / "boost.json", facts).algorithms == plan.algorithms


def test_each_algorithm_is_written_with_all_settings_or_false(tmp_path):
    plan = Plan.of("O1", {"extra": {"channels_last": False}}, FAST)
    plan.save(tmp_path / "boost.json")
    written = json.loads((tmp_path / "boost.json").read_text(encoding="utf-8"))
    assert set(written) == {"about", "extra"}
    assert set(written["extra"]) == set(REGISTRY)
    on = {algorithm.name: algorithm for algorithm in plan.algorithms}
    for name, setting in written["extra"].items():
        if name in on:
            assert setting == json.loads(json.dumps(dataclasses.asdict(on[name])))
        else:
            assert setting is False
    assert written["extra"]["channels_last"] is False
    assert set(written["about"]) == {"level", "mode", "torchboost", "torch", "processor", "threads", "date"}
    assert written["about"]["level"] == "O1"


def test_the_note_is_not_read(tmp_path):
    Plan.of("O1", facts=FAST).save(tmp_path / "boost.json")
    written = json.loads((tmp_path / "boost.json").read_text(encoding="utf-8"))
    plan = Plan.of("O1", written, FAST)
    for note in ({}, {"level": "O2", "anything": "at all"}):
        assert Plan.of("O1", written | {"about": note}, FAST) == plan
    with pytest.raises(ConfigError, match=r"about\.date: found int 3; allowed: an object of free strings"):
        BoostConfig.load({"about": {"date": 3}})


def test_every_front_door_takes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = (ChannelsLast(), GradFreeze(groups=2, total_steps=7, pattern="progressive"), GradAccumulation(steps=2))
    by_hand(*wanted).save("boost.json")
    assert Plan.of("O2", "boost.json", FAST).algorithms == wanted
    model, optimizer = net()
    assert boost(model, optimizer, config="boost.json").plan.algorithms == wanted
    model, _ = net()
    assert prepare(model, config=tmp_path / "boost.json").algorithms == wanted
    model, optimizer = net()
    booster = AutoBoost("O0", "boost.json")
    booster.network_auto_process_train(model, optimizer)
    assert booster.plan.algorithms == wanted


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"extra": {"unpadd": True}}, r"extra\.unpadd in 'boost\.json': found an unknown algorithm.*'unpad'"),
        ({"extra": {"compile": {"speed": 1}}}, r"extra\.compile\.speed in 'boost\.json': found an unknown setting"),
        ({"recipe": {"rate": 0}}, r"recipe\.rate in 'boost\.json': found int 0"),
    ],
)
def test_errors_at_every_front_door_name_the_file(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "boost.json").write_text(json.dumps(content))
    model, optimizer = net()
    for door in (
        lambda: Plan.of("O2", "boost.json", FAST),
        lambda: boost(model, optimizer, config="boost.json"),
        lambda: prepare(model, config="boost.json"),
        lambda: AutoBoost("O0", "boost.json"),
    ):
        with pytest.raises(ConfigError, match=said):
            door()
    with pytest.raises(ConfigError, match=r"^level: found 'O9'"):
        Plan.of("O9", "boost.json" if "recipe" not in content else None, FAST)


def test_it_has_one_length_of_the_run(tmp_path):
    by_hand(GradFreeze(total_steps=9)).save(tmp_path / "boost.json")
    assert Plan.of("O1", tmp_path / "boost.json", FAST, total_steps=9).algorithms[0].total_steps == 9
    with pytest.raises(
        ConfigError,
        match=r"extra\.grad_freeze\.total_steps in '.*boost\.json': found 9, and total_steps=7 as an argument",
    ):
        Plan.of("O1", tmp_path / "boost.json", FAST, total_steps=7)


def test_what_was_asked_for_wins_unless_it_cannot_run(tmp_path):
    by_hand(ChannelsLast(), Autocast(), Compile()).save(tmp_path / "boost.json")
    slow = Facts(half_precision=False, convolutions=7, total_steps=1)
    assert Plan.of("O1", tmp_path / "boost.json", slow).algorithms == (ChannelsLast(), Autocast(), Compile())
    plan = Plan.of("O1", tmp_path / "boost.json", replace(slow, convolutions=0))
    assert plan.algorithms == (Autocast(), Compile())
    assert dict(plan.dropped)["channels_last"] == "the model has no convolution"


def test_what_a_trial_chose_is_not_measured_again(tmp_path):
    def train(boosted: Boosted) -> Boosted:
        boosted.model(torch.randn(2, 3, 8, 8)).sum().backward()
        boosted.optimizer.step()
        return boosted

    first = train(boost(*net(), total_steps=1000, calibrate=0.2))
    assert first.choice is not None
    assert {verdict.lever for verdict in first.choice.verdicts} >= {"autocast", "fused_optimizer"}
    first.plan.save(tmp_path / "boost.json")
    second = train(boost(*net(), config=tmp_path / "boost.json", total_steps=1000, calibrate=0.2))
    assert second.choice is None
    assert second.plan.algorithms == first.plan.algorithms


@dataclass(frozen=True, kw_only=True)
class Own(Algorithm):
    """An algorithm of the user's."""

    name: ClassVar[str] = "own"
    traits: ClassVar[Traits] = Traits()


@dataclass(frozen=True, kw_only=True)
class Disguised(Autocast):
    """A class that a configuration cannot name, under a name that it can."""


def test_what_no_configuration_gives_back_is_refused_and_nothing_is_written(tmp_path):
    for algorithms, said in (
        ((Own(),), r"found the algorithms Own\(\), which no configuration gives back: 'own'. Save a plan"),
        ((Disguised(),), r"found the algorithms Disguised\(.*would be read back as \[Autocast"),
        ((Compile(backend=print),), r"gives back: .*function.* is not JSON serializable\. Save a plan"),
        ((GradFreeze(total_steps=9, agree_within=float("inf")),), "agree_within=inf.* not JSON compliant"),
        ((GradFreeze(total_steps=9, agree_within=float("nan")),), "agree_within=nan.* not JSON compliant"),
        ((Compile(), Autocast()), "would be read back"),
        ((Autocast(), Autocast()), "would be read back"),
        ((Compile(dynamic="yes"),), r"gives back: extra\.compile\.dynamic: found 'yes'"),
    ):
        with pytest.raises(ValueError, match=said):
            by_hand(*algorithms).save(tmp_path / "boost.json")
        assert list(tmp_path.iterdir()) == []


def test_paths_that_cannot_be_written(tmp_path):
    plan = by_hand()
    with pytest.raises(FileNotFoundError, match=r"found no folder '.*absent'; create it first, or give another path"):
        plan.save(tmp_path / "absent" / "boost.json")
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        plan.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_as_a_whole_and_a_link_is_followed(tmp_path, monkeypatch):
    file, link = tmp_path / "boost.json", tmp_path / "link.json"
    by_hand().save(file)
    link.symlink_to(file)
    by_hand(FusedOptimizer()).save(link)
    assert link.is_symlink()
    assert Plan.of("O0", file, FAST).algorithms == (FusedOptimizer(),)
    before = file.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        by_hand().save(file)
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"boost.json", "link.json"}


def test_the_file_has_the_permissions_of_an_ordinary_one(tmp_path):
    before = os.umask(0o027)
    try:
        by_hand().save(tmp_path / "boost.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "boost.json").stat().st_mode) == 0o640


def test_settings_of_what_is_left_out_are_checked_too():
    facts = Facts.measure(nn.Sequential(nn.Linear(2, 2)))
    for mode in ("auto", "disable_all"):
        for name, key, value in (("adasum", "foo", 1), ("less_bn", "keep", "zzz"), ("grad_freeze", "groups", 0)):
            config = {"boost": {"mode": mode}, "extra": {name: {key: value}}}
            with pytest.raises(ConfigError, match=rf"extra\.{name}\.{key}"):
                Plan.of("O0", config, facts)


def test_the_error_of_a_setting_of_any_length_is_short(tmp_path):
    with pytest.raises(ValueError, match="which no configuration gives back") as caught:
        by_hand(Compile(dynamic="x" * 100_000)).save(tmp_path / "boost.json")
    assert len(str(caught.value)) < 1_000
