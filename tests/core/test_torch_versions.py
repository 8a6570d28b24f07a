"""What differs between versions of torch is the same for the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.versions import flags_are_followed
from torchboost.core import torch_private as versions
from torchboost.core.torch_private import guards_of_every_flag


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).sin()


def trained(model: nn.Module, call: Callable[..., torch.Tensor], flag: bool) -> bool:
    """Whether a backward pass reaches the weights if their flag is ``flag``."""
    model.requires_grad_(flag)
    model.zero_grad()
    call(torch.ones(2, 3, requires_grad=True)).sum().backward()
    return all(parameter.grad is not None for parameter in model.parameters())


def test_the_processor_is_described_as_torch_computes():
    found = versions.cpu_capabilities()
    assert {"avx512_bf16", "amx_bf16"} <= set(found)
    assert found["avx512_bf16"] is torch.cpu._is_avx512_bf16_supported()


def test_the_default_device_is_known_also_after_it_was_taken_back():
    def seen() -> list[str]:
        found = []
        for device in ("meta", None):
            torch.set_default_device(device)
            found.append(versions.default_device().type)
        with torch.device("meta"):
            return [*found, versions.default_device().type]

    with ThreadPoolExecutor(1) as thread:  # in 2.9 the rest of a thread that did so cannot compile
        assert thread.submit(seen).result() == ["meta", "cpu", "meta"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", [False, True])
def test_lists_are_interpolated_also_if_they_are_sharded(sharded):
    starts, ends = [torch.randn(4, 2), torch.randn(3)], [torch.randn(4, 2), torch.randn(3)]
    expected = [torch.lerp(start, end, 0.3) for start, end in zip(starts, ends, strict=True)]
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        starts, ends = ([distribute_tensor(one, mesh, [Shard(0)]) for one in part] for part in (starts, ends))
    found = versions.foreach_lerp(starts, ends, 0.3)
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))
    assert all(isinstance(one, DTensor) is sharded for one in found)


@pytest.mark.usefixtures("one_rank")
def test_what_an_operator_raises_that_cannot_compute_with_shards_is_known():
    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(versions.UNSUPPORTED_SHARDS, match="_foreach_copy_"):
        torch._foreach_copy_([shard], [shard])


def test_a_compiled_function_follows_the_flags():
    torch.compiler.reset()
    model = Net()
    call = versions.following_flags(torch.compile(model, backend="aot_eager"))
    assert [trained(model, call, flag) for flag in (False, True, False)] == [False, True, False]


def test_a_function_says_that_it_follows_the_flags():
    class Owner:
        follows_flags = True

        @versions.marked_as_following
        def call(self) -> int:
            return 3

    assert Owner().call() == 3
    assert versions.follows_flags(Owner().call)
    assert not versions.follows_flags(Net().forward)
    assert not versions.follows_flags(Owner())  # a module may have an attribute of this name


@pytest.mark.parametrize("asked", [False, True])
def test_whether_the_compiler_follows_flags_is_known(asked):
    torch.compiler.reset()
    model = Net()
    call = torch.compile(model, backend="aot_eager")
    if asked:
        with flags_are_followed():
            assert versions.compiler_follows_flags()
            assert [trained(model, call, flag) for flag in (False, True, False)] == [False, True, False]
    else:
        known = versions.compiler_follows_flags()
        assert [trained(model, call, flag) for flag in (False, True, False)] == [False, known, False]


def test_the_setting_of_the_compiler_ends_with_the_call(monkeypatch):
    from torch._dynamo import config

    seen = []
    monkeypatch.setattr(versions, "_BEFORE_2_12", True)
    before = config.skip_tensor_guards_with_matching_dict_tags
    versions.following_flags(lambda: seen.append(config.skip_tensor_guards_with_matching_dict_tags))()
    assert seen == [False]
    assert config.skip_tensor_guards_with_matching_dict_tags is before
    assert not versions.compiler_follows_flags()
    with guards_of_every_flag():
        assert versions.compiler_follows_flags()
