from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from torchboost.optim.rules.checkpoints import in_order, paired


def group(*names: str, **options: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.zeros(2, 3)) for _ in names], "param_names": list(names), **options}


def written(*names: str, start: int = 0, **options: Any) -> dict[str, Any]:
    return {"params": list(range(start, start + len(names))), "param_names": list(names), **options}


def test_the_order_is_that_of_the_names():
    state = {"state": {0: "A", 1: "B", 2: "C"}, "param_groups": [written("a", "b", lr=1), written("c", start=2, lr=2)]}
    ordered = in_order(state, [group("c", "a"), group("b")])
    assert [entry["params"] for entry in ordered["param_groups"]] == [[2, 0], [1]]
    assert [entry["param_names"] for entry in ordered["param_groups"]] == [["c", "a"], ["b"]]
    assert [entry["lr"] for entry in ordered["param_groups"]] == [1, 2]
    assert state["param_groups"][0]["params"] == [0, 1]
    assert ordered["state"] is state["state"]


def test_other_names_or_groups_are_left_to_torch():
    for groups in [[group("a", "x")], [group("a")], [group("b"), group("a")], [{"params": group("a", "b")["params"]}]]:
        state = {"state": {}, "param_groups": [written("a", "b")]}
        assert in_order(state, groups) is state


def test_without_names_nothing_changes():
    state = {"state": {}, "param_groups": [{"params": [1, 0]}]}
    groups = [{"params": group("a", "b")["params"]}]
    assert in_order(state, groups)["param_groups"] == state["param_groups"]


def keys(options: Any) -> tuple[str, ...]:
    return ("mean", "rows")


def test_pairs_have_their_options_and_state():
    groups = [group("a"), group("b")]
    state = {"state": {1: {"mean": torch.ones(2, 3)}}, "param_groups": [{"params": [0], "lr": 1}, {"params": [1]}]}
    first, second = paired(state, groups, {"lr": 5, "decay": 6}, keys)
    assert first.param is groups[0]["params"][0]
    assert (first.group["lr"], first.group["decay"], first.saved) == (1, 6, {})
    assert (second.group["lr"], set(second.saved)) == (5, {"mean"})


def test_shapes_of_the_parameter_counts_and_other_entries_pass():
    for key, shape in [("mean", (2, 3)), ("by_row", (2,)), ("mean", ())]:
        state = {"state": {0: {key: torch.ones(shape), "memo": torch.ones(7)}}, "param_groups": [{"params": [0]}]}
        assert len(paired(state, [group("a")], {}, keys)) == 1


def test_other_shapes_are_refused():
    for key, shape in itertools.product(["mean", "rows", "master"], [(3, 2), (6,), (2,), (3,), (1,), (2, 3, 1)]):
        refuses(key, shape)


def refuses(key: str, shape: tuple[int, ...]) -> None:
    state = {"state": {0: {key: torch.ones(shape)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match=rf"'{key}' of parameter 0 has shape .*the parameter has \(2, 3\)"):
        paired(state, [group("a")], {}, keys)


def test_what_torch_refuses_is_left_to_torch():
    state = {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}
    assert paired(state, [group("a", "b")], {}, keys) == []
    assert paired(state, [group("a")], {}, keys) == []
