"""Recognising wrapped models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.ranks import run_ranks
from torchboost.core.torch_private import compiled_call
from torchboost.core.wrapping import (
    already_wrapped,
    compiled_parts,
    hookable,
    is_compiled,
    sharded_units,
    unwrap,
    wrapper_of,
)
from torchboost.errors import IncompatibleError


class Around(torch.optim.Optimizer):
    """An optimizer by class only, as those of Accelerate and timm."""

    def __init__(self, *inside: torch.optim.Optimizer, registries: bool = False) -> None:
        for place, one in enumerate(inside):
            setattr(self, f"part_{place}", one)
        if registries:
            vars(self).update({name: {} for name in vars(SGD([nn.Parameter(torch.ones(1))])) if "hooks" in name})

    def step(self, closure=None):
        return self.part_0.step(closure)


SGD = torch.optim.SGD


def test_the_optimizer_whose_hooks_are_called():
    inner = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert hookable(inner) is inner
    assert hookable(Around(inner)) is inner
    assert hookable(Around(Around(inner))) is inner
    assert hookable(Around(inner, registries=True)) is inner  # registries alone do not make hooks run
    torch.optim.lr_scheduler.ConstantLR(inner)
    assert hookable(inner) is inner
    for count in (0, 2):
        parts = [SGD([nn.Parameter(torch.ones(1))]) for _ in range(count)]
        with pytest.raises(IncompatibleError, match=f"Around does not call the hooks .* and holds {count} optimizers"):
            hookable(Around(*parts))


def test_a_wrapper_is_named_and_taken_off():
    model, inside = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    inside[0].compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    for outer, name, bare in (
        (model, None, model),
        (compiled, "torch.compile", model),
        (inside, "nn.Module.compile", inside),
        (nn.DataParallel(compiled), "DataParallel", model),
    ):
        assert wrapper_of(outer) == name
        assert unwrap(outer) is bare


def _sharded_the_old_way() -> str | None:
    return wrapper_of(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))))


@pytest.mark.dist
def test_fsdp1_inside():
    assert run_ranks(_sharded_the_old_way, 2) == ["FullyShardedDataParallel"] * 2


def test_compiled_parts_are_found_wherever_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_compiled(model)
    model[1].compile(backend="eager")
    assert is_compiled(model)
    assert compiled_parts(model) == [compiled_call(model[1])]
    inner = nn.Linear(2, 2)
    assert is_compiled(torch.compile(inner, backend="eager"))
    assert compiled_parts(torch.compile(inner, backend="eager")) == [inner]


def test_the_error_says_how_the_lines_must_follow_each_other():
    assert str(already_wrapped("net", "fully_shard", "boost")) == (
        "the net is already wrapped by fully_shard; call plan = torchboost.prepare(net, ...) before that, build the "
        "optimizer after it, then call plan.attach(torchboost.Target(net, optimizer))."
    )
    assert "pass the bare net, and wrap what is returned" in str(already_wrapped("net", "torch.compile", "boost"))


def test_the_units_that_fsdp2_shards_are_found(one_rank):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert sharded_units(model) == []
    fully_shard(model[1])
    assert sharded_units(model) == [model[1]]
