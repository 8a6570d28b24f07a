from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.optimizers import give_grads, parameters, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim import (
    SGD,
    Adam,
    AdamOffload,
    Centralize,
    ClipNorm,
    Coalesce,
    LazyAdam,
    MixedOptimizer,
    ScheduleFreeAdamW,
)
from torchboost.optim.rules.base import Batch, UpdateRule


class Signed(UpdateRule):
    """The smallest rule: go by the sign of the gradient, count the updates."""

    def __init__(self, params: Any, lr: Any = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0}, **options)

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("count",)

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"count": torch.zeros(())}

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        for param, grad, count in zip(batch.params, batch.grads, batch.state("count"), strict=True):
            param.sub_(grad.sign(), alpha=group["lr"])
            count.add_(1)


def test_arguments_of_the_base_are_checked():
    for bad in ["stop", None, True, 1]:
        with pytest.raises(ValueError, match="nonfinite: found"):
            Signed(parameters(), nonfinite=bad)
    for bad in [(3,), (Centralize,), (lambda gradients: None,)]:
        with pytest.raises(TypeError, match="found"):
            Signed(parameters(), transforms=bad)


def test_a_rule_is_two_methods():
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Signed([param], lr=[0.5, 0.25])
    param.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    optimizer.step()
    assert param.tolist() == [0.25, -1.25]
    assert optimizer.state[param]["count"] == 2
    assert optimizer.param_groups[0]["updates"] == 2


def test_nonfinite_with_empty_complex_mixed_and_sparse_gradients():
    for numel, nonfinite in itertools.product([0, 3], ["ignore", "skip", "raise"]):
        params = [*parameters([(numel,), (2,)]), *parameters([(2,)], dtype=torch.complex64)]
        params += parameters([(2,)], dtype=torch.float64)
        give_grads(params, 0)
        table = nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1, 1])).sum().backward()
        optimizer = SGD([*params, table.weight], lr=0.1, nonfinite=nonfinite)
        before = table.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, table.weight)
        table.weight.grad._values()[0, 0] = torch.nan
        before = values(optimizer)
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match="inf or nan"):
                optimizer.step()
        else:
            optimizer.step()
        assert (values(optimizer) == before) is (nonfinite != "ignore")


def test_sparse_gradients_need_a_transform_that_makes_them_dense():
    for transforms, works in (((), False), ((Centralize(),), False), ((Coalesce(dense=True), ClipNorm(1.0)), True)):
        table = nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1, 1])).sum().backward()
        optimizer = Adam(table.parameters(), transforms=transforms)
        if works:
            optimizer.step()
            continue
        with pytest.raises(IncompatibleError, match=r"Adam needs dense gradients.*shape \(4, 2\).*LazyAdam"):
            optimizer.step()
        assert not optimizer.state


def test_shapes_are_checked_on_loading_and_nothing_changes():
    params, others = parameters([(4, 3), (2,)]), parameters([(3, 4), (2,)])
    optimizer, other = Adam(params), Adam(others)
    train(optimizer, params, [0])
    train(other, others, [0])
    before = values(other)
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 has shape \(4, 3\).*\(3, 4\)"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"different number of parameter groups|doesn't match the size"):
        other.load_state_dict(Adam(others[:1]).state_dict())
    assert values(other) == before
    assert not other._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize("other", [torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_checkpoint_of_another_rule_is_refused_and_nothing_changes(other: Any):
    """Adam's steps count would be loaded with second moments of zero, and the first update would be immense."""
    params = parameters()
    written, optimizer = other(params, lr=0.1), Adam(params, lr=0.1)
    for one in (optimizer, written):
        give_grads(params, 0)
        one.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="written by another rule than Adam"):
        optimizer.load_state_dict(written.state_dict())
    assert repr(optimizer.state_dict()) == repr(before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("step", value) for value in ("3", None, float("nan"), -1.0, torch.ones(2))),
        *(("exp_avg", value) for value in (None, [0.0], torch.zeros(()), torch.zeros(4, 3, dtype=torch.int64))),
        ("exp_avg_sq", torch.zeros(4, 3, dtype=torch.complex64)),
    ],
)
def test_a_damaged_entry_is_refused_and_nothing_changes(key: str, value: Any):
    params = parameters([(4, 3), (2,)])
    optimizer = Adam(params)
    train(optimizer, params, [0])
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key] = value
    with pytest.raises(ValueError, match=rf"'{key}' of a parameter of shape \(4, 3\) is damaged"):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == repr(before)


def test_a_sum_of_rates_that_is_no_number_is_refused():
    params = parameters()
    optimizer = ScheduleFreeAdamW(params)
    train(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["weight_sum"] = torch.tensor(float("nan"))
    with pytest.raises(ValueError, match=r"'weight_sum' of a parameter .* is damaged"):
        optimizer.load_state_dict(saved)


def test_rows_with_steps_to_make_load_only_where_they_are_made():
    table = nn.Embedding(4, 2, sparse=True)
    written = LazyAdam(table.parameters(), exact=True)
    for row in range(3):
        written.zero_grad()
        table(torch.tensor([row])).sum().backward()
        written.step()
    late = written.state_dict()
    for optimizer in (Adam(table.parameters()), AdamOffload(table.parameters()), MixedOptimizer(table.parameters())):
        with pytest.raises(ValueError, match=r"catch_up\(\)"):
            optimizer.load_state_dict(late)
        assert not optimizer.state
    LazyAdam(table.parameters()).load_state_dict(late)
    written.catch_up()
    Adam(table.parameters()).load_state_dict(written.state_dict())


def test_an_option_that_was_set_since_the_last_update_is_loaded():
    params = parameters()
    optimizer = Adam(params, lr=0.1)
    give_grads(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert "max_exp_avg_sq" in optimizer.state[params[0]]


def test_a_torch_checkpoint_tells_adam_how_far_the_schedule_is():
    params = parameters()
    theirs = torch.optim.Adam(params, lr=0.1)
    train(theirs, params, range(4))
    ours = Adam(params, lr=lambda update: 0.1 / (1 + update))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["updates"] == 4
    train(ours, params, [4])
    assert ours.param_groups[0]["lr"] == pytest.approx(0.02)


def test_a_checkpoint_from_before_tensors_counted_steps():
    params = parameters()
    optimizer = Adam(params)
    train(optimizer, params, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = 2
    weights = [nn.Parameter(param.detach().clone()) for param in params]
    other = Adam(weights)
    other.load_state_dict(state)
    train(optimizer, params, [2])
    train(other, weights, [2])
    assert values(other) == values(optimizer)


def test_options_that_an_older_file_lacks_are_the_defaults():
    params = parameters()
    optimizer = Adam(params, lr=0.1, master_weights=True)
    state = copy.deepcopy(optimizer.state_dict())
    for key in ("master_weights", "nesterov", "eps_uncorrected"):
        del state["param_groups"][0][key]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["master_weights"] is True
    train(optimizer, params, [0])


def test_an_added_group_follows_the_updates_of_the_others():
    params = parameters()
    optimizer = SGD(params[:1], lr=[0.0, 0.3, 0.2, 0.1])
    train(optimizer, params[:1], range(2))
    optimizer.add_param_group({"params": params[1:2]})
    optimizer.add_param_group({"params": params[2:3], "updates": 0})
    optimizer.add_param_group({"params": params[3:], "lr": 0.5})
    train(optimizer, params, [2])
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 0.0, 0.5]
    assert [group.get("updates") for group in optimizer.param_groups] == [3, 3, 1, None]


def test_an_added_schedule_follows_the_steps_where_no_group_counts():
    params = parameters()
    optimizer = Adam(params[:1], lr=0.1)
    train(optimizer, params[:1], range(3))
    optimizer.add_param_group({"params": params[1:], "lr": [0.0, 0.1, 0.2, 0.3]})
    assert optimizer.param_groups[1]["updates"] == 3


def test_a_value_written_by_hand_is_honoured_until_that_of_the_schedule_is_back():
    for key in ["lr", "weight_decay"]:
        params = parameters()
        optimizer = SGD(params, **{"lr": 0.1, key: [0.5, 0.4, 0.3, 0.2, 0.1]})
        group = optimizer.param_groups[0]
        for written, used in ((0.0, 0.0), (None, 0.0), (0.5, 0.3), (None, 0.2)):
            if written is not None:
                group[key] = written
            train(optimizer, params, [0])
            assert group[key] == used
        resumed = SGD(params, **{"lr": 0.1, key: [0.5, 0.4, 0.3, 0.2, 0.1]})
        group[key] = 0.7
        resumed.load_state_dict(optimizer.state_dict())
        train(resumed, params, [0])
        assert resumed.param_groups[0][key] == 0.7, "the checkpoint says that it was written by hand"


def test_a_value_of_any_type_written_by_hand_is_no_longer_the_schedules():
    params = parameters()
    optimizer = SGD(params, lr=[0.5, 0.4, 0.3])
    optimizer.param_groups[0]["lr"] = np.float32(0.25)
    train(optimizer, params, [0])
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = lambda update: 0.125
    with pytest.raises(TypeError, match="lr: found <function"):
        train(optimizer, params, [0])


def test_another_schedule_takes_over_from_a_checkpoint():
    params = parameters()
    optimizer = SGD(params, lr=[0.5, 0.4, 0.3])
    train(optimizer, params, [0])
    state = optimizer.state_dict()
    for old in (False, True):
        if old:  # a file from before the value of the schedule was kept
            for group in state["param_groups"]:
                del group["scheduled_lr"]
        other = SGD(params, lr=[0.9, 0.8, 0.7])
        other.load_state_dict(state)
        train(other, params, [0])
        assert other.param_groups[0]["lr"] == 0.8


def test_mindspores_order_of_parameters_has_no_effect():
    params = parameters()
    optimizer = SGD([{"params": params[:2]}, {"params": params[2:]}, {"order_params": params[::-1]}], lr=0.1)
    assert [group["params"] for group in optimizer.param_groups] == [params[:2], params[2:]]
    with pytest.raises(ValueError, match="order_params: found a parameter that is in no group before it"):
        SGD([{"params": params[1:]}, {"order_params": params}], lr=0.1)
    with pytest.raises(TypeError, match=r"order_params.*no update depends on the order; leave the entry out"):
        SGD([{"params": params, "order_params": params}], lr=0.1)


def test_a_bare_parameter_and_a_generator_are_groups():
    params = parameters()
    optimizer = SGD(iter(params[:2]), lr=0.1)
    given = {"params": params[2]}
    optimizer.add_param_group(given)
    assert given == {"params": params[2]}
    optimizer.add_param_group({"params": (param for param in params[3:])})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 2]


def test_turning_an_option_on_mid_run_completes_the_state():
    params = parameters()
    optimizer = Adam(params)
    train(optimizer, params, range(2))
    kept = optimizer.state[params[0]]["exp_avg"].clone()
    optimizer.param_groups[0]["amsgrad"] = True
    give_grads(params, 2)
    optimizer.step()
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], 0.9 * kept + 0.1 * params[0].grad)
