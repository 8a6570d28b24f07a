"""The rule book: levels, modes, precedence, settings, reasons."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.boosted import in_one_line
from tests.support.conv_nets import vgg
from torchboost import ConfigError, Facts, IncompatibleError, Plan, Target
from torchboost.algorithms import Compile, GradAccumulation
from torchboost.config import BoostConfig
from torchboost.plan import own_settings
from torchboost.registry import LEVELS, REGISTRY
from torchboost.workloads.models import Bottleneck, ResNet

FAST = Facts(half_precision=True, convolutions=53, total_steps=65536)
DOCUMENTED: dict[str, Any] = json.loads(BoostConfig().model_dump_json(exclude={"extra", "about"}))
NODES = replace(FAST, world_size=8, nodes=2, devices_per_node=4)


def names(plan: Plan) -> set[str]:
    return {a.name for a in plan.algorithms}


def reasons(plan: Plan) -> dict[str, str]:
    return dict(plan.dropped)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def test_o0_is_empty():
    plan = Plan.of("O0", facts=FAST)
    assert plan.algorithms == ()
    assert plan.dropped == ()
    assert "nothing is on: the optimizer and the model are as you built them" in plan.explain()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_auto_takes_the_level_row(level):
    plan = Plan.of(level, facts=FAST)
    assert names(plan) | set(reasons(plan)) == set(LEVELS[level])
    built = {a.name: a for a in plan.algorithms}
    for name, settings in LEVELS[level].items():
        for key, value in settings.items():
            assert getattr(built[name], key) == value


def test_auto_ignores_the_switches():
    plan = Plan.of("O0", {"boost": {"less_bn": True}}, FAST)
    assert names(plan) == set()
    assert "reads no switches; use mode manual" in reasons(plan)["less_bn"]
    assert "reads no switches" in reasons(Plan.of("O1", {"boost": {"less_bn": True}}, FAST))["less_bn"]
    assert reasons(Plan.of("O2", {"boost": {"less_bn": True}}, FAST)).get("less_bn") is None


def test_manual_says_that_the_level_adds_nothing():
    plan = Plan.of("O1", {"boost": {"mode": "manual", "less_bn": True}}, FAST)
    assert plan.explain().startswith("mode manual (level O1 adds nothing; no speed is measured), ")


def test_auto_lists_a_switch_that_is_off_in_vain():
    off = {"boost": {"less_bn": False, "adasum": False}}
    plan = Plan.of("O2", off, FAST)
    assert "less_bn" in names(plan)
    assert reasons(plan)["boost.less_bn"] == "false is not read: mode auto follows the level; use extra.less_bn = false"
    assert "boost.less_bn" in plan.explain()
    assert not any(name.startswith("boost.") for name in reasons(Plan.of("O2", {"boost": {"mode": "auto"}}, FAST)))
    for level, config in (("O0", off), ("O1", off), ("O2", {**off, "extra": {"less_bn": False}})):
        plan = Plan.of(level, config, FAST)
        assert "less_bn" not in names(plan)
        assert not any(name.startswith("boost.") for name in reasons(plan))


def test_levels_leave_less_bn_out_of_trained_networks():
    trained = replace(FAST, trained=True)
    plan = Plan.of("O2", facts=trained)
    assert "measured from scratch only; ask for it with extra.less_bn" in reasons(plan)["less_bn"]
    assert "gradient_centralization" in names(plan)
    for config in ({"extra": {"less_bn": True}}, {"boost": {"mode": "manual", "less_bn": True}}):
        assert "less_bn" in names(Plan.of("O2", config, trained))
    assert "less_bn" in names(Plan.of("O2", facts=replace(FAST, trained=False)))


def test_auto_lists_what_it_was_asked_for_in_vain():
    asked = {"boost": {"dim_reduce": True}}
    assert "use mode manual, or extra" in reasons(Plan.of("O1", asked, FAST))["dim_reduce"]
    assert "grad_freeze" not in reasons(Plan.of("O1", {"grad_freeze": {"total_steps": 9_000}}, FAST))


def test_settings_of_an_algorithm_that_the_level_leaves_out_are_listed():
    section = {"grad_freeze": {"freeze_p": 0.5, "param_groups": 4, "freeze_type": 1, "total_steps": 400}}
    plan = Plan.of("O2", section, FAST)
    assert "this one has 400" in reasons(plan)["grad_freeze"]
    rows = {row.name: row for row in plan.explanation().rows if row.state == "not read"}
    assert set(rows) == {"grad_freeze.freeze_p", "grad_freeze.param_groups"}  # a default says nothing
    assert rows["grad_freeze.freeze_p"].did == "grad_freeze is off, for the reason that its row gives"
    longer = Plan.of("O2", {"grad_freeze": {**section["grad_freeze"], "total_steps": 9_000}}, FAST)
    assert reasons(longer).keys().isdisjoint(rows)


def test_accumulation_is_for_those_who_ask_for_it():
    section = {"grad_accumulation": {"grad_accumulation_step": 4}}
    assert "use mode manual, or extra" in reasons(Plan.of("O2", section, FAST))["grad_accumulation"]
    manual = Plan.of("O0", {"boost": {"mode": "manual", "grad_accumulation": True}} | section, FAST)
    assert manual.algorithms == (GradAccumulation(steps=4),)
    assert Plan.of("O0", {"extra": {"grad_accumulation": True}} | section, FAST).algorithms == manual.algorithms
    assert Plan.of("O0", {"extra": {"grad_accumulation": {"steps": 4}}}, FAST).algorithms == manual.algorithms
    assert not any("grad_accumulation" in row for row in LEVELS.values())


def test_a_window_of_one_batch_is_left_out():
    model = small_net()
    plan = Plan.of("O0", {"boost": {"mode": "manual", "grad_accumulation": True}}, FAST)
    fitted = plan.fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "steps=1" in reasons(fitted)["grad_accumulation"]


def test_flags_bring_along_what_extra_did_not_decide():
    on = {"less_bn": {"gc_flag": True}, "extra": {"less_bn": True}}
    assert names(Plan.of("O0", on, FAST)) == {"less_bn", "gradient_centralization"}
    off = {"less_bn": {"gc_flag": True}, "extra": {"less_bn": True, "gradient_centralization": False}}
    assert names(Plan.of("O0", off, FAST)) == {"less_bn"}


def test_settings_are_allowed_in_the_words_of_json():
    for name, key, value, allowed in (
        ("less_bn", "keep_every", "2", "an integer"),
        ("less_bn", "keep", 3, "'last', 'narrowest'"),
        ("less_bn", "keep_shortcut", "yes", "true or false"),
        ("compile", "dynamic", 1, "true or false or null"),
        ("autocast", "float32", [1], "null or a list, each entry a string"),
    ):
        with pytest.raises(ConfigError) as caught:
            Plan.of("O0", {"extra": {name: {key: value}}}, FAST)
        assert (caught.value.path, caught.value.allowed) == (f"extra.{name}.{key}", allowed)


def test_manual_takes_the_switches_with_the_reference_defaults():
    plan = Plan.of("O2", {"boost": {"mode": "manual", "less_bn": True}}, FAST)
    assert names(plan) == {"less_bn", "gradient_centralization"}
    less_bn = next(a for a in plan.algorithms if a.name == "less_bn")
    assert less_bn.normalize_head is True


def test_manual_flags_are_honoured():
    config = {"boost": {"mode": "manual", "less_bn": True}, "less_bn": {"fn_flag": False, "gc_flag": False}}
    plan = Plan.of("O1", config, FAST)
    assert names(plan) == {"less_bn"}
    assert plan.algorithms[0].normalize_head is False


def test_auto_keys_the_user_wrote_override_the_level_and_explain_says_so():
    config = {"less_bn": {"gc_flag": False}, "grad_freeze": {"freeze_type": 0, "freeze_p": 0.5}}
    config["extra"] = {"less_bn": {"normalize_head": True}, "channels_last": False, "loss_scale_group": True}
    plan = Plan.of("O2", config, FAST)
    assert "gradient_centralization" not in names(plan)
    built = {a.name: a for a in plan.algorithms}
    assert built["less_bn"].normalize_head is True
    assert (built["grad_freeze"].pattern, built["grad_freeze"].full_share) == ("continuous", 0.5)
    assert set(plan.unmeasured) == {
        "without gradient_centralization",
        "without channels_last",
        "less_bn(normalize_head=True, keep_every=1, blocks_per_norm=8)",
        f"grad_freeze({own_settings(built['grad_freeze'])})",
        "loss_scale_group()",
    }
    assert "pattern='continuous'" in own_settings(built["grad_freeze"])
    text = in_one_line(plan.explain())
    did = {row.name: (row.did, row.exact) for row in plan.explanation().rows}["less_bn"]
    assert did[0].endswith(": normalize_head=True, keep_every=1, blocks_per_norm=8")
    assert did[1] == "changes the training"
    assert "your settings, with which the promise of O2 was not measured:" in text
    assert all(entry in text for entry in plan.unmeasured)


def test_a_configuration_that_names_every_algorithm_takes_nothing_from_the_level():
    extra = {**dict.fromkeys(REGISTRY, False), "channels_last": True}
    plan = Plan.of("O1", {"extra": extra}, FAST)
    assert names(plan) == {"channels_last"}
    assert plan.unmeasured == ()
    assert "promise" not in plan.explain()


def test_a_plan_with_levers_names_the_way_to_repeat_it():
    assert "plan.save(path)" in Plan.of("O1", facts=FAST).explain()
    assert "plan.save(path)" not in Plan.of("O0", facts=FAST).explain()
    written = {"extra": {lever.name: False for lever in Plan.of("O1", facts=FAST).levers}}
    assert "plan.save(path)" not in Plan.of("O1", written, facts=FAST).explain()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_documented_dict_pasted_does_not_weaken_a_level(level):
    plan = Plan.of(level, DOCUMENTED, FAST)
    assert plan.algorithms == Plan.of(level, facts=FAST).algorithms
    assert plan.unmeasured == ()
    left_out = reasons(plan)
    said = (
        '1 is the default of mode manual; O2 was measured with pattern = "progressive"; to have yours, use '
        'extra.grad_freeze.pattern = "interval"'
    )
    assert left_out.get("grad_freeze.freeze_type") == (said if level == "O2" else None)
    assert "grad_freeze.freeze_p" not in left_out
    assert ("extra.less_bn.normalize_head = true" in left_out.get("less_bn.fn_flag", "")) == (level == "O2")
    assert not {"dim_reduce", "adasum", "common.device_number", "grad_freeze.param_groups"} & set(left_out)
    manual = {**DOCUMENTED, "boost": {**DOCUMENTED["boost"], "mode": "manual", "less_bn": True, "grad_freeze": True}}
    built = {a.name: a for a in Plan.of(level, manual, FAST).algorithms}
    assert built["less_bn"].normalize_head is True
    assert (built["grad_freeze"].pattern, built["grad_freeze"].full_share) == ("interval", 0.7)


def test_a_default_that_is_repeated_under_extra_counts():
    pasted = {**DOCUMENTED, "extra": {"grad_freeze": {"pattern": "interval"}}}
    plan = Plan.of("O2", pasted, FAST)
    assert next(a for a in plan.algorithms if a.name == "grad_freeze").pattern == "interval"
    (difference,) = plan.unmeasured
    assert difference.startswith("grad_freeze(pattern='interval'")
    assert "grad_freeze.freeze_type" not in reasons(plan)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "less_bn": st.fixed_dictionaries({}, optional={"fn_flag": st.booleans(), "gc_flag": st.booleans()}),
            "grad_freeze": st.fixed_dictionaries(
                {}, optional={"param_groups": st.integers(9, 11), "freeze_p": st.sampled_from([0.3, 0.7])}
            ),
            "extra": st.dictionaries(st.sampled_from(["less_bn", "autocast", "compile"]), st.booleans()),
        },
    ),
    st.sampled_from(["O1", "O2"]),
)
def test_a_plan_differs_from_its_level_only_by_what_it_says(config, level):
    plan = Plan.of(level, config, FAST)
    assert (plan.algorithms == Plan.of(level, facts=FAST).algorithms) == (plan.unmeasured == ())


def test_common_keys_that_nothing_reads_are_listed():
    config = {"common": {"gradient_split_groups": [3], "device_number": 4}}
    for mode in ("auto", "manual"):
        left_out = reasons(Plan.of("O1", {**config, "boost": {"mode": mode}}, FAST))
        assert "DistributedDataParallel has bucket_cap_mb" in left_out["common.gradient_split_groups"]
        assert "nothing else uses the number of ranks on a node" in left_out["common.device_number"]
    for other in ({"boost": {"mode": "disable_all"}}, {"extra": {"adasum": True}}):
        assert not any(name.startswith("common.") for name in reasons(Plan.of("O1", {**config, **other}, FAST)))


def test_lists_are_allowed_for_settings_that_are_tuples():
    for written in (["head"], ("head",)):
        plan = Plan.of("O1", {"extra": {"autocast": {"float32": written}}}, FAST)
        assert next(a for a in plan.algorithms if a.name == "autocast").float32 == ("head",)
        hash(plan)


def test_every_setting_says_in_words_what_it_allows():
    for entry in REGISTRY.values():
        for setting in dataclasses.fields(entry.algorithm):
            if not setting.init:
                continue
            with pytest.raises(ConfigError) as caught:
                Plan.of("O0", {"extra": {entry.name: {setting.name: object()}}}, NODES)
            assert not any(word in caught.value.allowed for word in ("Ellipsis", "typing.", "<", "collections"))


def test_an_integer_that_no_machine_holds():
    for config in (
        {"grad_freeze": {"total_steps": 10**400}},
        {"extra": {"grad_freeze": {"total_steps": 10**400}}},
        {"extra": {"loss_scale_group": {"init_scale": [10**400]}}},
        {"extra": {"dim_reduce": {"timeout": 10**18}}},
    ):
        with pytest.raises(ConfigError):
            Plan.of("O1", config, FAST)


def test_faults_of_settings_name_the_key_that_was_written():
    with pytest.raises(ConfigError) as caught:
        Plan.of(
            "O0", {"boost": {"mode": "manual", "dim_reduce": True}, "extra": {"dim_reduce": {"snapshots": 3}}}, FAST
        )
    assert (caught.value.path, caught.value.found) == ("extra.dim_reduce.snapshots", "3")


def test_disable_all_beats_everything():
    plan = Plan.of("O2", {"boost": {"mode": "disable_all"}, "extra": {"compile": True}}, FAST)
    assert plan.algorithms == ()


def test_enable_all_leaves_what_stands_alone():
    plan = Plan.of("O0", {"boost": {"mode": "enable_all"}}, FAST)
    assert names(plan) == {"dim_reduce"}
    assert set(reasons(plan)) == set(REGISTRY) - {"dim_reduce"}
    assert "dim_reduce is on, and it cannot be combined" in reasons(plan)["less_bn"]


def test_enable_all_takes_the_rest_of_the_registry_without_it():
    everything = {"boost": {"mode": "enable_all"}, "extra": {"dim_reduce": False}}
    plan = Plan.of("O0", everything, FAST)
    whole = {"unpad", "sparse_head"}  # which do nothing next to compile
    assert names(plan) == set(REGISTRY) - {"adasum", "dim_reduce"} - whole
    assert "there is one rank, and no other node to combine with" in reasons(plan)["adasum"]
    assert names(Plan.of("O0", everything, NODES)) == set(REGISTRY) - {"dim_reduce"} - whole


def test_what_stands_alone_and_cannot_run_drops_nothing_else():
    asked = {"boost": {"mode": "manual", "dim_reduce": True, "less_bn": True}}
    plan = Plan.of("O1", asked, replace(FAST, loop="lightning"))
    assert "less_bn" in names(plan)
    assert "without the loss" in reasons(plan)["dim_reduce"]


def test_extra_turns_levers_off_on_and_sets_them():
    plan = Plan.of("O1", {"extra": {"channels_last": False, "compile": {"backend": "eager"}}}, FAST)
    assert "channels_last" not in names(plan)
    assert next(a for a in plan.algorithms if a.name == "compile").backend == "eager"


def test_facts_rule_out_with_a_reason():
    plan = Plan.of("O2", facts=Facts(half_precision=False, convolutions=0))
    left_out = reasons(plan)
    assert "bfloat16" in left_out["autocast"]
    assert "no convolution" in left_out["channels_last"]
    assert "networks of two-dimensional convolutions with BatchNorm only" in left_out["gradient_centralization"]
    assert "extra.compile" in left_out["compile"]


@pytest.mark.parametrize(
    ("layers", "on"),
    [
        ([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)], True),
        ([nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)], False),
        ([nn.Linear(3, 8), nn.BatchNorm1d(8)], False),
    ],
)
def test_gradients_are_centralised_only_in_networks_of_the_measured_kind(layers, on):
    plan = Plan.of("O2", facts=Facts.measure(nn.Sequential(*layers)))
    assert ("gradient_centralization" in names(plan)) == on


@pytest.mark.parametrize(
    "config",
    [
        {"grad_freeze": {"total_steps": 900}},
        {"extra": {"grad_freeze": {"total_steps": 900}}},
        {"extra": {"token_drop": {"total_steps": 900}, "grad_freeze": True}},
    ],
)
def test_the_length_in_the_configuration_is_that_of_the_plan(config):
    assert Plan.of("O1", config, Facts(convolutions=3)).total_steps == 900
    assert Plan.of("O1", facts=Facts(convolutions=3)).total_steps is None
    lengths = {a.total_steps for a in Plan.of("O0", config, FAST).algorithms if hasattr(a, "total_steps")}
    assert lengths <= {900}


def test_two_algorithms_have_one_length():
    dropping = {"token_drop": {"total_steps": 900}}
    for config in (
        {"extra": {**dropping, "grad_freeze": {"total_steps": 800}}},
        {"extra": dropping, "grad_freeze": {"total_steps": 800}},
    ):
        with pytest.raises(ConfigError, match=r"found (800, and 900|900, and 800) for another algorithm"):
            Plan.of("O0", config, FAST)
    with pytest.raises(
        ConfigError, match=r"extra\.token_drop\.total_steps: found 900, and total_steps=7 as an argument"
    ):
        Plan.of("O0", {"extra": dropping}, FAST, total_steps=7)


@pytest.mark.parametrize(
    ("facts", "config", "reason"),
    [
        (Facts(convolutions=53), {}, "pass total_steps, the length of the run"),
        (Facts(convolutions=53, total_steps=100), {}, "100 steps do not repay"),
        (Facts(convolutions=53), {"grad_freeze": {"total_steps": 100}}, "100 steps do not repay"),
        (Facts(convolutions=53, total_steps=100), {"grad_freeze": {"total_steps": 9000}}, None),
        (Facts(convolutions=53, total_steps=9000), {}, None),
        (Facts(convolutions=53), {"extra": {"compile": True}}, None),
        (Facts(convolutions=0, total_steps=9000), {}, "50 convolutions or more"),
        (Facts(convolutions=20, total_steps=9000), {}, "50 convolutions or more"),
        (Facts(convolutions=53, total_steps=9000, device="cuda"), {}, "not measured on cuda"),
    ],
)
def test_compile_must_be_repaid_by_the_planned_steps(facts, config, reason):
    plan = Plan.of("O1", config, facts)
    if reason is None:
        assert "compile" in names(plan)
    else:
        assert reason in reasons(plan)["compile"]


@pytest.mark.parametrize(
    ("level", "config", "path", "hint"),
    [
        ("O9", None, "level", "O0"),
        ("o1", None, "level", "O1"),
        ("O1", {"extra": {"chanels_last": True}}, "extra.chanels_last", "channels_last"),
        ("O1", {"extra": {"compile": {"bakend": "eager"}}}, "extra.compile.bakend", "backend"),
        ("O1", {"extra": {"less_bn": {"keep_every": "two"}}}, "extra.less_bn.keep_every", "integer"),
        ("O1", {"extra": {"less_bn": {"keep_every": 0}}}, "extra.less_bn.keep_every", "found 0"),
    ],
)
def test_bad_input_names_the_path(level, config, path, hint):
    with pytest.raises(ConfigError) as caught:
        Plan.of(level, config, FAST)
    assert caught.value.path == path
    assert hint in str(caught.value)


def test_transform_refuses_a_wrapped_model_unchanged():
    model = small_net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.compile(backend="eager")
    plan = Plan.of("O1", facts=FAST)
    with pytest.raises(IncompatibleError, match="bare model"):
        plan.transform(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_fit_after_transform_keeps_what_was_transformed():
    model = ResNet(Bottleneck, [1, 1], width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = Plan.of("O2", {"extra": {"compile": False}}, facts=FAST)
    before = whole.fit(model, optimizer)
    before.transform(model, optimizer)
    assert "less_bn" in names(before)
    assert whole.fit(model, optimizer) == before
    attached = before.attach(Target(model, optimizer))
    saved = copy.deepcopy((attached.state_dict(), optimizer.state_dict()))
    attached.remove()
    saved[1]["param_groups"][0]["fused"] = True  # as older checkpoints have it
    optimizer.load_state_dict(saved[1])
    assert optimizer.param_groups[0]["fused"] is True
    whole.fit(model, optimizer).attach(Target(model, optimizer)).load_state_dict(saved[0])


def test_fit_asks_each_algorithm_once(monkeypatch):
    asked: list[str] = []
    for kind in {entry.algorithm for entry in REGISTRY.values()}:
        idle = kind.idle
        monkeypatch.setattr(kind, "idle", lambda self, *pair, idle=idle: asked.append(self.name) or idle(self, *pair))
    model = small_net()
    plan = Plan.of("O1", facts=FAST)
    waiting = plan.chosen({"channels_last": (False, "to be measured")})
    for each in (plan, waiting):
        asked.clear()
        fitted = each.fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert sorted(asked) == sorted({a.name for a in (*each.algorithms, *each.levers)})
        assert "channels_last" in {lever.name for lever in fitted.levers}


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # on which some switches are not measured
def test_fit_lists_what_would_change_nothing(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    plan = Plan.of("O2", facts=replace(FAST, device=device)).fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "BatchNorm" in reasons(plan)["less_bn"]
    assert reasons(plan)["unpad"] == "no argument of its forward masks padding"
    assert "no output head" in reasons(plan)["sparse_head"]


def test_a_refused_plan_leaves_the_model_as_it_was():
    config = {"extra": {"less_bn": True, "autocast": {"dtype": "float16"}}}
    model = vgg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = Target(model, optimizer)
    keys, held = len(list(model.parameters())), len(optimizer.param_groups[0]["params"])
    with pytest.raises(IncompatibleError, match="float16 without a scaler"):
        Plan.of("O0", config, FAST).attach(target)
    assert len(list(model.parameters())) == keys
    assert len(optimizer.param_groups[0]["params"]) == held
    target.scaler = torch.amp.GradScaler("cpu")
    Plan.of("O0", config, FAST).attach(target).remove()
    assert len(list(model.parameters())) < keys


def test_a_wrapped_model_without_anything_to_remove_attaches():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    plan = Plan.of("O0", {"extra": {"less_bn": True}}, FAST)
    plan.transform(model)
    wrapped = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(plan.attach(Target(wrapped, optimizer))) == ["less_bn"]


SCALED = {"boost": {"mode": "manual", "loss_scale_group": True}}


@pytest.mark.parametrize(
    ("loop", "accumulates", "scales"),
    [
        ("transformers", "gradient_accumulation_steps", "TrainingArguments(fp16=True)"),
        ("lightning", "accumulate_grad_batches", 'Trainer(precision="16-mixed")'),
        ("accelerate", "gradient_accumulation_steps", 'Accelerator(mixed_precision="fp16")'),
    ],
)
def test_trainers_do_themselves_what_they_own(loop, accumulates, scales):
    asked = {"boost": {"mode": "manual", "loss_scale_group": True, "grad_accumulation": True}}
    for plan in (Plan.of("O0", asked, replace(FAST, loop=loop)), Plan.of("O0", asked, FAST, loop=loop)):
        left_out = reasons(plan)
        assert plan.algorithms == ()
        assert left_out["loss_scale_group"] == f"{loop} owns the loop and scales the loss itself; use {scales}"
        assert accumulates in left_out["grad_accumulation"]
    assert names(Plan.of("O0", asked, FAST, loop="own")) == {"loss_scale_group", "grad_accumulation"}


def test_a_run_has_one_length():
    assert Plan.of("O2", facts=replace(FAST, total_steps=None), total_steps=7000).algorithms[-1].total_steps == 7000
    asked = {"grad_freeze": {"total_steps": 7000}}
    assert Plan.of("O2", asked, FAST, total_steps=7000).algorithms[-1].total_steps == 7000
    with pytest.raises(ConfigError, match=r"grad_freeze.total_steps: found 9, and total_steps=7 as an argument"):
        Plan.of("O1", {"grad_freeze": {"total_steps": 9}}, FAST, total_steps=7)


def test_short_runs_keep_what_costs_accuracy_in_them_out():
    costly = {"less_bn", "gradient_centralization", "grad_freeze"}
    short, long = (Plan.of("O2", facts=FAST, total_steps=steps) for steps in (999, 1000))
    assert costly <= {one.name for one in long.algorithms}
    assert not costly & {one.name for one in short.algorithms}
    for name in costly:
        said = reasons(short)[name]
        assert said.startswith("in runs of fewer than 1,000 steps it was not shown to keep the accuracy")
        assert said.endswith(f"this one has 999; ask for it with extra.{name}")
        assert said in in_one_line(short.explain())
    asked = Plan.of("O2", {"extra": dict.fromkeys(costly, True)}, FAST, total_steps=999)
    assert costly <= {one.name for one in asked.algorithms}
    for wrong, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match=r"total_steps: found .*give an integer, 1 or more"):
            Plan.of("O1", facts=FAST, total_steps=wrong)


def test_an_unknown_loop():
    with pytest.raises(ValueError, match=r"loop: found 'lightnig'; allowed are .*'lightning'"):
        Plan.of("O1", loop="lightnig")


def test_group_loss_scaling_takes_its_settings_from_extra():
    config = {**SCALED, "extra": {"loss_scale_group": {"groups": [["0", "1"], "2"], "init_scale": [8, 16.0]}}}
    (scale,) = Plan.of("O0", config, FAST).algorithms
    assert (scale.groups, scale.init_scale) == ((("0", "1"), "2"), (8, 16.0))
    for wrong in ({"groups": "0"}, {"groups": [0]}, {"init_scale": "8"}, {"floor": 0.0}, {"grow": 2.0}):
        with pytest.raises(ConfigError, match=r"extra\.loss_scale_group"):
            Plan.of("O0", {**SCALED, "extra": {"loss_scale_group": wrong}}, FAST)


def test_levers_are_what_a_level_may_switch_and_the_user_did_not():
    facts = Facts(half_precision=False, convolutions=20, total_steps=10)
    plan = Plan.of("O1", facts=facts)
    names = {lever.name for lever in plan.levers}
    assert names == {name for name in LEVELS["O1"] if REGISTRY[name].lever}
    asked = Plan.of("O1", {"extra": {"autocast": True}}, facts)
    assert {lever.name for lever in asked.levers} == names - {"autocast"}
    assert Plan.of("O0", facts=facts).levers == ()
    assert Plan.of("O1", {"boost": {"mode": "manual"}}, facts).levers == ()


def test_a_choice_may_give_a_lever_other_settings():
    plan = Plan.of("O1", facts=Facts(half_precision=False, convolutions=20, total_steps=10))
    form = Compile(mode="reduce-overhead")
    chosen = replace(plan, levers=(form,)).chosen({"compile": (True, "")})
    assert "torch.compile: mode='reduce-overhead'" in chosen.explain()


def test_a_choice_switches_levers_and_keeps_the_rest():
    facts = Facts(half_precision=False, convolutions=20, total_steps=10)
    plan = Plan.of("O1", facts=facts)
    made = plan.chosen({"autocast": (True, ""), "channels_last": (False, "slower here")})
    names = [algorithm.name for algorithm in made.algorithms]
    assert "autocast" in names
    assert "channels_last" not in names
    assert names == sorted(names, key=lambda name: REGISTRY[name].algorithm.traits.order)
    assert ("channels_last", "slower here") in made.dropped
    assert not any(dropped.name == "autocast" for dropped in made.dropped)
    with pytest.raises(ValueError, match="the levers of this plan are"):
        plan.chosen({"less_bn": (False, "")})


def test_a_removed_setting_loads_at_its_default_and_is_refused_at_any_other_value():
    scales = {"growth": 1.0006933874625807, "shrink": 0.7071067811865476, "window": 1, "hysteresis": 1}
    at_default = {"loss_scale_group": scales, "adasum": {"on": "delta"}, "dim_reduce": {"patience": 100}}
    for name, settings in at_default.items():
        assert Plan.of("O0", {"extra": {name: settings}}, FAST)
    for name, entry in REGISTRY.items():
        for setting in entry.removed:
            with pytest.raises(ConfigError, match=rf"{name}\.{setting}: found a removed setting"):
                Plan.of("O0", {"extra": {name: {setting: 0.123}}}, FAST)
