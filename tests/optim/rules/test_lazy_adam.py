from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchboost.errors import IncompatibleError
from torchboost.optim import Adam, Centralize, Coalesce, Decay, LazyAdam, Unscale

ROWS, WIDTH = 12, 3


def embedding(rows: int = ROWS, width: int = WIDTH, sparse: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    module = nn.Embedding(rows, width, sparse=sparse, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(3)))
    return module


def sparse_rows(param: Tensor, ids: list[int], seed: int = 0) -> Tensor:
    values = torch.randn(len(ids), *param.shape[1:], generator=torch.Generator().manual_seed(seed)).to(param.dtype)
    return torch.sparse_coo_tensor(torch.tensor([ids], dtype=torch.long), values, param.shape, check_invariants=True)


def batches(steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(ROWS * torch.rand(4, generator=generator) ** 3).long() for _ in range(steps)]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, ids: list[Tensor]) -> None:
    for each in ids:
        optimizer.zero_grad()
        (module(each).float() - 0.5).square().sum().backward()
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    params = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    return copy.deepcopy({"state": optimizer.state_dict(), "params": params})


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


# Classic mode


def test_named_rows_move_like_a_table_of_them_and_others_not_at_all():
    for options in [
        {},
        {"nesterov": True},
        {"amsgrad": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"bias_correction": False, "eps_uncorrected": True, "maximize": True},
        {"foreach": True},
        {"fused": True},
    ]:
        param = embedding().weight
        before = param.detach().clone()
        small = nn.Parameter(before[[1, 4, 7]].clone())
        lazy, dense = LazyAdam([param], lr=0.1, **options), Adam([small], lr=0.1, **options)
        for step in range(5):
            param.grad = sparse_rows(param, [7, 1, 7, 4, 1], step)
            small.grad = param.grad.to_dense()[[1, 4, 7]]
            lazy.step()
            dense.step()
        others = [row for row in range(ROWS) if row not in (1, 4, 7)]
        assert torch.equal(param[[1, 4, 7]], small)
        assert torch.equal(param[others], before[others])
        assert set(lazy.state[param]) == set(dense.state[small])
        for key, value in dense.state[small].items():
            found = lazy.state[param][key]
            assert torch.equal(found if key == "step" else found[[1, 4, 7]], value)
            assert key == "step" or not found[others].any()


def test_the_bias_correction_counts_steps_without_the_row():
    param = embedding().weight
    optimizer = LazyAdam([param], lr=0.1, betas=(0.0, 0.5), eps=0.0)
    for ids in ([1], [], [2]):
        param.grad = sparse_rows(param, ids)
        before = param.detach().clone()
        optimizer.step()
    moved = (before - param)[2].abs()
    torch.testing.assert_close(moved, torch.full((WIDTH,), 0.1 * (1 - 0.5**3) ** 0.5 / 0.5**0.5))


def test_it_is_torchs_sparse_adam_and_takes_over_its_checkpoint():
    theirs, ours = embedding(), embedding()
    stock = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    lazy = LazyAdam(ours.parameters(), lr=0.1, eps_uncorrected=True)
    for ids in batches(4):
        train(theirs, stock, [ids])
        train(ours, lazy, [ids])
    torch.testing.assert_close(ours.weight, theirs.weight)
    resumed = embedding()
    resumed.load_state_dict(theirs.state_dict())
    late = LazyAdam(resumed.parameters(), lr=0.5, eps_uncorrected=True)
    late.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert late.param_groups[0]["lr"] == 0.1
    for module, optimizer in ((theirs, stock), (resumed, late)):
        train(module, optimizer, batches(4, seed=1))
    torch.testing.assert_close(resumed.weight, theirs.weight)


def test_dense_gradients_get_adam_bit_for_bit():
    for exact, options in itertools.product(
        [False, True], [{}, {"nesterov": True}, {"fused": True}, {"amsgrad": True}]
    ):
        ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
        theirs.load_state_dict(ours.state_dict())
        lazy, plain = LazyAdam(ours.parameters(), exact=exact, **options), Adam(theirs.parameters(), **options)
        for _ in range(4):
            train(ours, lazy, [x := torch.randn(5, 4)])
            train(theirs, plain, [x])
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        assert same(lazy.state_dict()["state"], plain.state_dict()["state"])


def test_dense_and_sparse_parameters_share_a_group():
    table, head = embedding(), nn.Linear(WIDTH, 2)
    model = nn.Sequential(table, head)
    twin = nn.Sequential(embedding(), nn.Linear(WIDTH, 2))
    twin.load_state_dict(model.state_dict())
    ids = torch.arange(ROWS)
    together = LazyAdam(model.parameters(), lr=0.1)
    apart = Adam([*twin.parameters()], lr=0.1, transforms=(Coalesce(dense=True),))
    train(model, together, [ids] * 3)
    train(twin, apart, [ids] * 3)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_step_makes_nothing_as_large_as_the_table():
    rows = 100_000
    for options in ({}, {"master_weights": True}, {"exact": True}, {"exact": True, "weight_decay": 0.1}):
        module = embedding(rows, 8, dtype=torch.bfloat16 if "master_weights" in options else torch.float32)
        optimizer = LazyAdam(module.parameters(), **options)
        with optimizer.attach(module):
            train(module, optimizer, [torch.tensor([1, 2])] * 2)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True
            ) as profile:
                train(module, optimizer, [torch.tensor([2, 5, 5, 99_999])])
        assert max(event.cpu_memory_usage for event in profile.events()) < rows
        written = {"aten::copy_", "aten::_foreach_copy_", "aten::add_", "aten::mul_", "aten::zero_"}
        sizes = [shape for e in profile.events() if e.name in written for shape in e.input_shapes if shape]
        assert all(rows not in shape for shape in sizes if isinstance(shape[0], int))


def test_transforms_see_merged_rows():
    for transforms in [(Coalesce(),), (Centralize(),), (Unscale(4.0),), (Unscale(4.0), Centralize(), Coalesce())]:
        param = embedding().weight
        merged = nn.Parameter(param.detach().clone())
        optimizer, other = LazyAdam([param], transforms=transforms), LazyAdam([merged], transforms=transforms)
        param.grad = sparse_rows(param, [3, 1, 3])
        merged.grad = param.grad.clone().coalesce()
        optimizer.step()
        other.step()
        assert torch.equal(param, merged)


def test_overflow_in_a_row_leaves_everything_as_it_was():
    for nonfinite in ["skip", "raise"]:
        module = embedding()
        optimizer = LazyAdam(module.parameters(), nonfinite=nonfinite, exact=True)
        train(module, optimizer, batches(3))
        before = snapshot(optimizer)
        module.weight.grad = sparse_rows(module.weight, [1, 1]) * torch.inf
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError):
                optimizer.step()
        else:
            optimizer.step()
        assert same(snapshot(optimizer), before)


def test_a_batch_without_ids_only_counts():
    for nonfinite, exact in itertools.product(["ignore", "skip", "raise"], [False, True]):
        module = embedding()
        before = module.weight.detach().clone()
        optimizer = LazyAdam(module.parameters(), nonfinite=nonfinite, exact=exact)
        train(module, optimizer, [torch.tensor([], dtype=torch.long)] * 2)
        assert torch.equal(module.weight, before)
        assert optimizer.state[module.weight]["step"] == 2


# Precision


def test_master_weights_of_half_precision_rows():
    for dtype, exact in itertools.product([torch.bfloat16, torch.float16], [False, True]):
        narrow, wide = embedding(dtype=dtype), embedding()
        wide.weight.data.copy_(narrow.weight.data)
        ours = LazyAdam(narrow.parameters(), lr=0.01, master_weights=True, exact=exact)
        theirs = LazyAdam(wide.parameters(), lr=0.01, exact=exact)
        for step, ids in enumerate(batches(20)):
            narrow.weight.grad = sparse_rows(narrow.weight, ids.tolist(), step)
            wide.weight.grad = narrow.weight.grad.float()
            ours.step()
            theirs.step()
        ours.catch_up()
        theirs.catch_up()
        assert torch.equal(ours.state[narrow.weight]["master"], wide.weight)
        assert torch.equal(narrow.weight, wide.weight.to(dtype))


def test_rows_move_if_their_table_was_written_since_the_last_step():
    weight = embedding(dtype=torch.bfloat16).weight
    optimizer = LazyAdam([weight], lr=0.1, master_weights=True, exact=True)
    for step, ids in enumerate(([1, 2], [2], [1])):
        if step == 2:
            with torch.no_grad():
                weight.fill_(3.0)
        weight.grad = sparse_rows(weight, ids, step)
        optimizer.step()
    master = optimizer.state[weight]["master"]
    assert (master[1] != 3.0).all()
    assert torch.equal(weight, master.bfloat16())


def test_a_grad_scaler_unscales_rows_and_leaves_overflows_out():
    for exact, options in itertools.product([False, True], [{}, {"fused": True}]):
        scaled, plain = embedding(), embedding()
        ours = LazyAdam(scaled.parameters(), lr=0.1, exact=exact, **options)
        theirs = LazyAdam(plain.parameters(), lr=0.1, exact=exact, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        with ours.attach(scaled), theirs.attach(plain):
            for step, ids in enumerate(batches(12)):
                ours.zero_grad()
                loss = (scaled(ids) - 0.5).square().sum()
                scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
                scaler.step(ours)
                scaler.update()
                if step != 5:
                    train(plain, theirs, [ids])
        if exact:  # the step that was left out had caught rows up, whose moves are summed in other parts
            torch.testing.assert_close(scaled.weight, plain.weight)
        else:
            assert torch.equal(scaled.weight, plain.weight)
        assert scaler.get_scale() == 2.0**9


# Bad input


def entries(param: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1], [2]]), torch.ones(1), param.shape, check_invariants=True)


def test_gradients_it_cannot_use_are_refused_before_anything_moves():
    for options, gradient, says in [
        ({}, entries, "sparse rows"),
        ({"capturable": True}, lambda param: sparse_rows(param, [1]), "capturable"),
        ({"transforms": (Decay(0.1),)}, lambda param: sparse_rows(param, [1]), "Decay"),
        ({"exact": True, "half": True}, lambda param: sparse_rows(param, [1]), "master_weights=True"),
    ]:
        dense = nn.Parameter(torch.ones(2))
        table = embedding(dtype=torch.bfloat16 if options.pop("half", False) else torch.float32).weight
        optimizer = LazyAdam([dense, table], **options)
        dense.grad, table.grad = torch.ones(2), gradient(table)
        before = snapshot(optimizer)["params"]
        with pytest.raises(IncompatibleError, match=says):
            optimizer.step()
        assert same(snapshot(optimizer)["params"], before)
        assert not any(state.get("step") for state in optimizer.state.values())


def test_any_sparse_gradient_is_taken_before_it_is_made_dense():
    param, twin = embedding().weight, embedding().weight
    param.grad = entries(param)
    twin.grad = param.grad.to_dense()
    LazyAdam([param], transforms=(Coalesce(dense=True),), exact=True).step()
    Adam([twin]).step()
    assert torch.equal(param, twin)


def test_senseless_options_are_refused():
    table = embedding().weight
    with pytest.raises(TypeError, match="exact: found 'yes'"):
        LazyAdam([table], exact="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exact"):
        LazyAdam([table], exact=True, capturable=True)
    optimizer = LazyAdam([table])
    optimizer.param_groups[0]["exact"] = 1
    with pytest.raises(TypeError, match="exact: found 1"):
        optimizer.step()
    with pytest.raises(TypeError, match="exact"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "exact": None})


# Checkpoints


@pytest.mark.parametrize("way", ["file", "deepcopy", "pickle"])
def test_resuming_at_any_step_is_bit_identical(way):
    ids = batches(9)
    lr = [0.1 / (1 + step) for step in range(9)]
    for exact, stop in itertools.product([False, True], [1, 5, 8]):
        module = embedding()
        optimizer = LazyAdam(module.parameters(), lr=lr, exact=exact, amsgrad=True)
        with optimizer.attach(module):
            train(module, optimizer, ids[:stop])
            if way == "deepcopy":
                other, resumed = copy.deepcopy((module, optimizer))
            elif way == "pickle":
                weight, resumed = pickle.loads(pickle.dumps((module.weight, optimizer)))
                other = embedding()
                other.weight = weight
            else:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
                other = embedding()
                other.load_state_dict(module.state_dict())
                resumed = LazyAdam(other.parameters(), lr=lr, exact=exact, amsgrad=True)
                resumed.load_state_dict(state)
            with resumed.attach(other):
                train(module, optimizer, ids[stop:])
                train(other, resumed, ids[stop:])
                assert same(snapshot(resumed), snapshot(optimizer))


DAMAGES = {
    "last_step": [None, torch.zeros(ROWS - 1, dtype=torch.int32), 3, ...],
    "past": [None, {}, {"form": (True,), "options": [(1, 0.1, 0.0, 0.9, 0.999, 1e-8)]}, ...],
    "past options": [[], [(1, 0.1)], [None], [(1, 0.1, 0.0, 0.9, 0.999, "1e-8")]],
    "exp_avg": [None, torch.zeros(()), [0.0]],
    "step": [None, "3"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in DAMAGES.items() for value in values])
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(key: str, value: Any):
    module, other = embedding(), embedding()
    written, optimizer = (LazyAdam(one.parameters(), lr=0.1, exact=True) for one in (module, other))
    train(module, written, batches(4))
    train(other, optimizer, batches(2))
    saved = copy.deepcopy(written.state_dict())
    state, (name, *inner) = saved["state"][0], key.split()
    if value is ...:
        del state[name]
    elif inner:
        state[name][inner[0]] = value
    else:
        state[name] = value
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"'{name}' of a parameter of shape \(12, 3\) is damaged"):
        optimizer.load_state_dict(saved)
    assert same(snapshot(optimizer), before)


def test_missed_steps_with_amsgrad_need_its_moments():
    module = embedding()
    optimizer = LazyAdam(module.parameters(), lr=0.1, exact=True)
    train(module, optimizer, batches(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["past"]["form"] = (False, True, False, True, False)
    with pytest.raises(ValueError, match=r"'max_exp_avg_sq' of a parameter of shape \(12, 3\) is damaged"):
        optimizer.load_state_dict(saved)


def test_a_checkpoint_of_torchs_adam_goes_on_row_by_row():
    theirs, ours = embedding(sparse=False), embedding()
    stock = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    train(theirs, stock, batches(5))
    ours.load_state_dict(theirs.state_dict())
    lazy = LazyAdam(ours.parameters(), exact=True)
    lazy.load_state_dict(copy.deepcopy(stock.state_dict()))
    with lazy.attach(ours):
        train(ours, lazy, batches(30, seed=1))
    train(theirs, stock, batches(30, seed=1))
    torch.testing.assert_close(ours.weight, theirs.weight)
    back = torch.optim.AdamW(ours.parameters())
    back.load_state_dict(copy.deepcopy(lazy.state_dict()))
    dense = embedding(sparse=False)
    dense.weight = ours.weight
    train(dense, back, batches(5))
    train(theirs, stock, batches(5))
    torch.testing.assert_close(dense.weight, theirs.weight)
