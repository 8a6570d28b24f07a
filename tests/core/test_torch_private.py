"""The private names of torch are still there, and mean what they meant in torch 2.9.1 to 2.14.1.

A failure of one of these tests after an update of torch names what has moved, and so what else of the package fails.
Functions that exist because versions of torch differ do the same in each.
"""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.versions import flags_are_followed
from torchboost.core import torch_private as private


def adam(**options: bool) -> torch.optim.Adam:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.Adam([parameter], **options)


# Modules


def test_base_classes_cover_their_layers():
    for kind, layers in [
        (private.AnyBatchNorm, [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]),
        (private.AnyNorm, [nn.BatchNorm2d(2), nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2)]),
        (private.AnyConv, [nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv3d(2, 2, 1), nn.ConvTranspose2d(2, 2, 1)]),
        (private.AnyTransposedConv, [nn.ConvTranspose1d(2, 2, 1), nn.ConvTranspose3d(2, 2, 1)]),
        (private.POOLING, [nn.MaxPool1d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool3d(1)]),
        (private.PADDING, [nn.ZeroPad2d(1), nn.ConstantPad1d(1, 0.0), nn.ReflectionPad2d(1), nn.ReplicationPad3d(1)]),
    ]:
        assert all(isinstance(layer, kind) for layer in layers)
        assert not isinstance(nn.Linear(1, 1), kind)
    assert not isinstance(nn.InstanceNorm2d(2), private.AnyBatchNorm)
    assert not isinstance(nn.Conv2d(2, 2, 1), private.AnyTransposedConv)


def test_slots_name_what_a_module_holds_and_what_is_absent():
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3))
    assert private.parameter_slots(model[0]) == {"weight": model[0].weight, "bias": None}
    assert set(private.buffer_slots(model[1])) == {"running_mean", "running_var", "num_batches_tracked"}
    assert list(private.child_slots(model)) == ["0", "1"]
    private.child_slots(model)["1"] = replaced = nn.Identity()
    assert model[1] is replaced
    private.parameter_slots(model[0])["bias"] = nn.Parameter(torch.ones(3))
    assert len(list(model.parameters())) == 2
    norm = nn.BatchNorm2d(3, eps=0.5)
    other = nn.BatchNorm2d.__new__(nn.BatchNorm2d)
    private.share_attributes(other, norm, buffers={"running_mean": torch.ones(3)}, children={"act": nn.ReLU()})
    assert (other.weight, other.eps) == (norm.weight, 0.5)
    assert [name for name, _ in other.named_buffers()] == ["running_mean"]
    assert [name for name, _ in other.named_children()] == ["act"]
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_hooks_of_a_module_and_of_its_state_dict_are_read_and_written():
    module, hook = nn.Linear(1, 1), lambda *_: None
    assert not any(private.module_hooks(module))
    for register in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        getattr(module, f"register_{register}")(hook)
    assert [len(hooks) for hooks in private.module_hooks(module)] == [1, 1, 1, 1]
    private.module_hooks(module)[1].clear()
    assert [len(hooks) for hooks in private.module_hooks(module)] == [1, 0, 1, 1]
    module.register_state_dict_post_hook(hook)
    module.register_load_state_dict_pre_hook(hook)
    written, read = private.state_dict_hooks(module)
    assert list(written.values()) == [hook]
    assert [one.hook for one in read.values()] == [hook]


def test_a_convolution_computes_in_an_inner_forward():
    class Standardised(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - weight.mean(), bias)

    plain, standardised = nn.Conv2d(1, 1, 1), Standardised(1, 1, 1)
    assert private.conv_forward(plain) is private.conv_forward(nn.Conv2d)
    assert private.conv_forward(standardised) is not private.conv_forward(nn.Conv2d)
    assert not standardised(torch.ones(1, 1, 2, 2)).ne(standardised.bias).any()  # it is called
    plain._conv_forward = lambda *_: torch.zeros(1)
    assert private.conv_forward(plain) is not private.conv_forward(nn.Conv2d)
    assert private.conv_forward(nn.Linear(1, 1)) is None
    assert list(private.conv_padding(nn.Conv2d(1, 1, 3, padding=(1, 2)))) == [2, 2, 1, 1]
    assert list(private.conv_padding(nn.Conv2d(1, 1, 3, padding="same"))) == [1, 1, 1, 1]


def test_data_parallel_asks_a_module_for_replicas():
    module = nn.Linear(2, 2)
    replica = private.make_replica(module)
    assert type(replica) is nn.Linear
    assert replica is not module
    assert replica.in_features == 2
    assert callable(getattr(module, private.MAKES_REPLICAS))
    asked = []
    setattr(module, private.MAKES_REPLICAS, lambda: asked.append(1) or private.make_replica(module))
    replication = sys.modules["torch.nn.parallel.replicate"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replication, "_broadcast_coalesced_reshape", lambda tensors, devices, detach=False: [tensors])
        replication.replicate(module, [0])
    assert asked == [1]


# Tensors


@pytest.mark.usefixtures("one_rank")
def test_writes_moves_and_views_of_tensors_are_told():
    tensor = torch.ones(2)
    before, first = private.version(tensor), private.memory_stamp(tensor)
    tensor.add_(1)
    assert private.versions([tensor, torch.ones(1)]) == [before + 1, 0]
    second = private.memory_stamp(tensor)
    tensor.data = torch.ones(2)
    assert first[1] == second[1] != private.memory_stamp(tensor)[1]
    assert first[0] != second[0]
    sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
    assert private.memory_stamp(sharded)[1] == sharded.to_local().data_ptr()
    layer = nn.Conv2d(3, 4, 3)
    layer(torch.randn(1, 3, 5, 5)).sum().backward()
    flat = torch.zeros(4)
    with torch.no_grad():
        assert private.is_view(flat.view(2, 2))
    assert not any(private.is_view(each) for each in (flat, *(p.grad for p in layer.parameters())))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_shows_rows_and_values_before_it_is_coalesced():
    sparse = torch.sparse_coo_tensor([[2, 0, 2]], torch.ones(3, 4), (5, 4))
    assert private.sparse_rows(sparse).tolist() == [2, 0, 2]
    assert private.sparse_values(sparse).shape == (3, 4)
    private.sparse_values(sparse).mul_(3)  # the memory of the tensor itself
    assert sparse.to_dense()[0, 0] == 3


def test_hooks_that_wait_for_a_gradient_are_seen():
    tensor = torch.ones(1, requires_grad=True)
    assert not private.has_gradient_hooks(tensor)
    handle = tensor.register_hook(lambda grad: grad)
    assert private.has_gradient_hooks(tensor)
    handle.remove()
    assert not private.has_gradient_hooks(tensor)


def test_gradients_are_checked_and_divided_in_one_pass():
    grads = [torch.full((2,), 8.0), torch.tensor([4.0])]
    found = torch.zeros(1)
    private.check_and_unscale_(grads, found, torch.tensor(0.25))
    assert [grad.tolist() for grad in grads] == [[2.0, 2.0], [1.0]]
    assert found.item() == 0
    private.check_and_unscale_([torch.tensor([float("inf")])], found, torch.tensor(1.0))
    assert found.item() == 1


def test_hooks_for_saved_tensors_show_inside_a_checkpoint():
    seen = []

    def looks(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), private.has_saved_tensor_hooks()))
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    checkpoint(looks, x, use_reentrant=False).backward()
    assert seen == [(True, True), (True, True)]
    with torch.autograd.graph.save_on_cpu():
        assert private.has_saved_tensor_hooks()
    assert not private.has_saved_tensor_hooks()


def test_modes_that_see_everything_are_seen():
    assert not private.inside_mode()
    with torch.device("cpu"):
        assert not private.inside_mode()
    with FlopCounterMode(display=False):
        assert private.inside_mode()
    with TorchFunctionMode():
        assert private.inside_mode()
    assert not private.inside_mode()


def test_a_reentrant_checkpoint_shows_in_the_graph():
    x = torch.ones(1, requires_grad=True)
    reentrant = checkpoint(torch.exp, x, use_reentrant=True)
    plain = checkpoint(torch.exp, x, use_reentrant=False)
    assert private.is_reentrant_checkpoint(reentrant.grad_fn)
    assert not private.is_reentrant_checkpoint(plain.grad_fn)


def test_constants_of_a_trace_have_names_of_their_own():
    class Adds(nn.Module):
        def forward(self, x):
            return x + torch.ones(1)

    class Sets(nn.Module):
        def forward(self, x):
            self.kept = torch.zeros(1)
            return x + self.kept

    for kind, expected in ((Adds, {True}), (Sets, {True, False})):
        model = kind()
        before = set(vars(model))
        torch.fx.Tracer().trace(model)
        assert {private.is_traced_constant(name) for name in set(vars(model)) - before} == expected


def test_transforms_of_functions_and_tensors_under_vmap_are_told():
    seen = []
    torch.func.grad(lambda x: (seen.append(private.inside_function_transform()), x.sum())[1])(torch.ones(2))
    assert seen.pop()
    assert not private.inside_function_transform()
    torch.func.vmap(lambda x: seen.append(private.is_functorch_wrapped(x)) or x)(torch.ones(2))
    assert seen == [True]
    assert not private.is_functorch_wrapped(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        torch.jit.trace(lambda x: seen.append(private.is_tracing()) or x + 1, torch.ones(1), check_trace=False)
    assert seen == [True, True]
    assert not private.is_tracing()


def test_a_tree_comes_apart():
    assert private.tree_flatten({"a": [1, 2], "b": (3,)})[0] == [1, 2, 3]


def test_an_operation_on_lists_does_what_the_one_on_tensors_does():
    for name in sorted(vars(private.foreach)):
        lists = [[torch.rand(3) + 0.5, torch.rand(2, 2) + 0.5] for _ in range(3)]
        plain = name.rstrip("_")
        count = {"neg": 1, "sqrt": 1, "norm": 1, "addcdiv": 3, "addcmul": 3, "lerp": 2}.get(plain, 2)
        number = [0.5] if plain in ("lerp", "clamp_max", "clamp_min", "pow") else []
        count -= plain in ("clamp_max", "clamp_min", "pow")
        args = [copy.deepcopy(entries) for entries in lists[:count]]
        result = getattr(private.foreach, name)(*args, *number)
        result = args[0] if name.endswith("_") else result
        one_by_one = torch.linalg.vector_norm if plain == "norm" else getattr(torch.Tensor, plain, None)
        for at, value in enumerate(result):
            own = [entries[at].clone() for entries in lists[:count]]
            expected = own[1] if plain == "copy" else one_by_one(*own, *number)
            assert torch.equal(value, expected)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", [False, True])
def test_lists_are_interpolated_also_if_they_are_sharded(sharded):
    starts, ends = [torch.randn(4, 2), torch.randn(3)], [torch.randn(4, 2), torch.randn(3)]
    expected = [torch.lerp(start, end, 0.3) for start, end in zip(starts, ends, strict=True)]
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        starts, ends = ([distribute_tensor(one, mesh, [Shard(0)]) for one in part] for part in (starts, ends))
    found = private.foreach_lerp(starts, ends, 0.3)
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))
    assert all(isinstance(one, DTensor) is sharded for one in found)


@pytest.mark.usefixtures("one_rank")
def test_what_an_operator_raises_that_cannot_compute_with_shards_is_known():
    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(private.UNSUPPORTED_SHARDS, match="_foreach_copy_"):
        torch._foreach_copy_([shard], [shard])


def test_the_default_device_is_known_also_after_it_was_taken_back():
    def seen() -> list[str]:
        places = []
        for device in ("meta", None):
            torch.set_default_device(device)
            places.append(private.default_device().type)
        with torch.device("meta"):
            return [*places, private.default_device().type]

    with ThreadPoolExecutor(1) as thread:  # in 2.9 the rest of a thread that did so cannot compile
        assert thread.submit(seen).result() == ["meta", "cpu", "meta"]


# Optimizers


def test_hooks_before_a_step_are_listed_in_order():
    optimizer = adam()
    seen = []
    first = optimizer.register_step_pre_hook(lambda *_: seen.append("first"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("second"))
    for hook in private.step_pre_hooks(optimizer).values():
        hook(optimizer, (), {})
    assert seen == ["first", "second"]
    first.remove()
    assert len(private.step_pre_hooks(optimizer)) == 1
    around = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
    around.inner = optimizer
    assert private.calls_hooks(optimizer)
    assert not private.calls_hooks(around)
    attributes = vars(optimizer)
    left = private.without_hooks(attributes)
    assert {"state", "param_groups", "defaults"} <= set(left)
    assert all("hooks" in name for name in set(attributes) - set(left))
    assert not any("hooks" in name for name in left)


def test_a_schedule_marks_its_optimizer():
    optimizer = torch.optim.SGD(adam().param_groups[0]["params"], lr=0.1)
    assert not private.drives_schedule(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert private.drives_schedule(optimizer)


def test_a_fused_step_remembers_that_it_has_checked():
    optimizer = torch.optim.SGD(adam().param_groups[0]["params"], lr=0.1)
    assert not private.has_fused_mark(optimizer)
    optimizer.param_groups[0]["fused"] = True
    optimizer.step()
    assert private.has_fused_mark(optimizer)
    private.forget_fused_mark(optimizer)
    assert not private.has_fused_mark(optimizer)
    optimizer.step()  # it looks once more
    assert private.has_fused_mark(optimizer)
    assert {"cpu", "cuda"} <= set(private.fused_devices())
    assert "cuda" in private.capturable_devices()


# torch.compile


def test_a_module_compiled_in_place_is_told_and_freed():
    module = nn.Linear(1, 1)
    assert private.compiled_call(module) is None
    module.compile(backend="eager")
    assert private.compiled_call(module) is not None
    private.set_compiled_call(module, None)
    assert private.compiled_call(module) is None
    private.set_compiled_call(module, lambda x: (private.call_uncompiled(module, x), "ours"))
    output, mark = module(torch.ones(1, 1))
    assert mark == "ours"
    assert torch.equal(output, module.forward(torch.ones(1, 1)))


def test_the_module_inside_a_compiled_one_is_found():
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert private.inside_compiled(compiled) is module
    assert private.inside_compiled(module) is None
    for function in (module.forward, types.MethodType(lambda self, x: x, module)):
        assert private.beneath_compiled(torch.compile(function, backend="eager")) == function
        assert private.beneath_compiled(function) is None


class Counting(private.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_compiled_code_which_compiles_later_all_the_same():
    torch._dynamo.reset()
    before = private.compiled_graphs()
    compiled = torch.compile(lambda x: x.add_(1), backend="eager")
    x, y = torch.ones(2), torch.ones(2)
    with Counting() as outer, Counting() as inner:
        compiled(x)
        torch.add(x, 1, out=y)
    assert outer.operations == ["add_", "add"] == inner.operations
    assert private.compiled_graphs() == before
    compiled(x)
    assert private.compiled_graphs() == before + 1
    assert private.recompile_limit() == torch._dynamo.config.recompile_limit


def test_a_mode_inside_a_compiled_function_is_entered_all_the_same():
    seen = []

    @torch.compiler.disable
    def watched(x):
        with Counting() as mode:
            x = x.mul_(2)
        seen.append(len(mode.operations))
        return x

    assert float(torch.compile(lambda x: watched(x) + 1, backend="eager")(torch.ones(()))) == 3
    assert seen == [1]


class Counts(private.Interceptor):
    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return private.call_uncompiled(self.module, *args)


def test_an_interceptor_answers_calls_and_does_not_count_as_compiled():
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = module(x)
    counts = Counts(module)
    private.set_compiled_call(module, counts)
    assert private.interceptor_of(module) is counts
    assert private.compiled_call(module) is None
    assert torch.equal(module(x), expected)
    assert counts.calls == 1
    assert private.interceptor_of(copy.deepcopy(module)) is None
    private.set_compiled_call(module, None)
    module(x)
    assert counts.calls == 1


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


@pytest.mark.parametrize("way", ["as it is", "as documented", "by us"])
def test_compiled_code_follows_the_flags(way):
    torch.compiler.reset()
    model = Net()
    call = torch.compile(model, backend="aot_eager")
    if way == "as documented":
        with flags_are_followed():
            assert private.compiler_follows_flags()
            assert [trained(model, call, flag) for flag in (False, True, False)] == [False, True, False]
    else:
        known = way == "by us" or private.compiler_follows_flags()
        call = private.following_flags(call) if way == "by us" else call
        assert [trained(model, call, flag) for flag in (False, True, False)] == [False, known, False]


def test_a_function_says_that_it_follows_the_flags():
    class Owner:
        follows_flags = True

        @private.marked_as_following
        def call(self) -> int:
            return 3

    assert Owner().call() == 3
    assert private.follows_flags(Owner().call)
    assert not private.follows_flags(Net().forward)
    assert not private.follows_flags(Owner())  # a module may have an attribute of this name


def test_the_setting_of_the_compiler_ends_with_the_call(monkeypatch):
    from torch._dynamo import config

    seen = []
    monkeypatch.setattr(private, "_BEFORE_2_12", True)
    before = config.skip_tensor_guards_with_matching_dict_tags
    private.following_flags(lambda: seen.append(config.skip_tensor_guards_with_matching_dict_tags))()
    assert seen == [False]
    assert config.skip_tensor_guards_with_matching_dict_tags is before
    assert not private.compiler_follows_flags()
    with private.guards_of_every_flag():
        assert private.compiler_follows_flags()


def test_the_processor_is_described_as_torch_computes():
    capabilities = private.cpu_capabilities()
    assert {"avx512_bf16", "amx_bf16"} <= set(capabilities)
    assert capabilities["avx512_bf16"] is torch.cpu._is_avx512_bf16_supported()


# Several ranks


def test_a_communication_hook_is_listed_with_its_state(one_rank):
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    assert private.comm_hooks(ddp) == []
    assert private.built_in_comm_hook(ddp) is None
    ddp.register_comm_hook(None, allreduce_hook)
    assert private.comm_hooks(ddp) == [(allreduce_hook, None)]
    assert private.built_in_comm_hook(ddp) == "allreduce_hook"
    ddp = DistributedDataParallel(nn.Linear(1, 1))  # a built-in hook is known by its name only
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert private.comm_hooks(ddp) == []
    assert private.built_in_comm_hook(ddp)


def test_ddp_is_built_again_for_other_flags(one_rank):
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, allreduce_hook)
    reducer, group = ddp.reducer, ddp.process_group
    module[0].requires_grad_(False)
    private.build_again(ddp)
    assert ddp.reducer is not reducer
    assert ddp.process_group is group
    assert private.comm_hooks(ddp) == []
    ddp.register_comm_hook(None, allreduce_hook)  # a reducer takes one only
    ddp(torch.ones(1, 1)).sum().backward()  # the old reducer would wait for the frozen layer
    ddp(torch.ones(1, 1)).sum().backward()
    assert module[0].weight.grad is None
    assert module[1].weight.grad is not None


def test_ddp_says_that_its_forward_runs(one_rank):
    seen = []

    class Asks(nn.Linear):
        def forward(self, input):
            seen.append(private.active_ddp())
            return super().forward(input)

    ddp = DistributedDataParallel(Asks(1, 1))
    ddp(torch.ones(1, 1))
    assert seen == [ddp]
    assert private.active_ddp() is None
    norm = nn.BatchNorm1d(1)
    ddp = DistributedDataParallel(norm)
    with torch.enable_grad(), ddp.no_sync():
        private.exchange_of_a_pass(ddp)  # without the model
    assert norm.num_batches_tracked == 0


def test_all_reduce_hooks_of_a_sharded_module_are_listed(one_rank):
    unit = fully_shard(nn.Linear(2, 2))
    assert private.all_reduce_hooks(unit) == [None]
    hook = print
    unit.set_all_reduce_hook(hook)
    assert private.all_reduce_hooks(unit) == [hook]
    outer = fully_shard(nn.Sequential(unit))
    assert private.all_reduce_hooks(outer) == []


def test_fsdp2_ends_a_pass_that_raised_in_the_middle(one_rank):
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Identity()))
    private.end_pass(model)  # before the first pass
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    private.end_pass(model)
    model.reshard()
    assert all(hasattr(p, "device_mesh") for p in model.parameters()), "the shards are back"
    model(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_that_fsdp2_holds_back_are_seen(one_rank):
    unit = fully_shard(nn.Linear(2, 2))
    assert not private.holds_back_gradients(unit)
    unit.set_requires_gradient_sync(False)
    assert private.holds_back_gradients(unit)
    unit(torch.ones(1, 2)).sum().backward()
    unit.set_requires_gradient_sync(True)
    assert private.holds_back_gradients(unit)
    unit(torch.ones(1, 2)).sum().backward()
    assert not private.holds_back_gradients(unit)
    shard = private.local_shard(unit.weight)
    assert shard is private.local_shard(unit.weight)
    assert type(shard) is torch.Tensor
