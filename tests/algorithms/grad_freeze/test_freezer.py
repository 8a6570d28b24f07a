import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

from tests.support.models import BottleneckNet
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights, train_share, wrap
from torchboost import IncompatibleError, NoEffectWarning, Target
from torchboost.algorithms.compile import Compile
from torchboost.algorithms.grad_freeze.freezer import Freezing, prefixes_of
from torchboost.algorithms.grad_freeze.schedule import Repeated
from torchboost.graph.blocks import blocks_of
from torchboost.workloads.models import GPT


def start(schedule=(0, 2), *, norms="update", seed=0, **options):
    torch.manual_seed(seed)
    model = BottleneckNet()
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | options
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    blocks = blocks_of(model)
    prefixes = prefixes_of(blocks, range(len(blocks)))
    return model, optimizer, Freezing(model, optimizer, prefixes, Repeated(tuple(schedule)), norms=norms)


def batch(step: int, size: int = 4):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def train(model, optimizer, steps) -> None:
    for step in steps:
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_names(model) -> set[str]:
    return {name.split(".")[0] + name.split(".")[1][:1] for name, p in model.named_parameters() if not p.requires_grad}


def test_flags_follow_the_schedule_from_the_first_update_on():
    model, optimizer, freezing = start((1, 0, 3))
    seen = []
    for step in range(4):
        seen.append((freezing.index, len(freezing.frozen), sum(not p.requires_grad for p in model.parameters())))
        train(model, optimizer, [step])
    assert [index for index, *_ in seen] == [1, 0, 3, 1]
    assert all(ours == flags for _, ours, flags in seen)
    assert [ours for _, ours, _ in seen] == [3, 0, 24, 3]


def test_the_step_by_which_torch_makes_the_state_of_an_optimizer_is_no_update():
    model, optimizer, freezing = start((1, 2), momentum=0.0)  # without a state, so that each checkpoint steps it
    for updates in range(2):
        get_optimizer_state_dict(model, optimizer)
        assert (freezing.step, freezing.index) == (updates, 1 + updates)
        train(model, optimizer, [updates])


def test_an_update_at_a_rate_of_zero_counts():
    model, optimizer, freezing = start(lr=0.0)
    train(model, optimizer, [0])
    assert freezing.step == 1


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_frozen_weights_moments_and_norms_keep_their_bytes_for_fifty_steps(rule, how):
    torch.manual_seed(0)
    model = BottleneckNet()
    settings = {"momentum": 0.9} if rule is torch.optim.SGD else {}
    optimizer = rule(model.parameters(), lr=0.01, weight_decay=0.1, **settings, **how)
    blocks = blocks_of(model)
    prefixes = prefixes_of(blocks, range(len(blocks)))
    Freezing(model, optimizer, prefixes, lambda step: 0 if step < 3 else 2, norms="eval")
    train(model, optimizer, range(3))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    parts = (model.stem, model.blocks[0])
    bytes_before = [value.clone() for part in parts for value in part.state_dict().values()]
    moments = copy.deepcopy([optimizer.state[p] for p in frozen])
    for step in range(50):
        model.train()  # as loops do at each epoch
        train(model, optimizer, [step])
    assert all(
        torch.equal(a, b)
        for a, b in zip(bytes_before, [v for p in parts for v in p.state_dict().values()], strict=True)
    )
    for before, p in zip(moments, frozen, strict=True):
        assert before.keys() == optimizer.state[p].keys()
        assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(optimizer.state[p][k])) for k in before)
    assert not torch.equal(model.head.weight, start()[0].head.weight)


def test_norms_go_on_updating_unless_told_otherwise():
    model, optimizer, _ = start((2,), norms="update")
    before = model.stem[1].running_mean.clone()
    train(model, optimizer, [0])
    assert not torch.equal(model.stem[1].running_mean, before)
    assert model.stem[1].training


def test_norms_come_back_when_their_block_trains_again():
    model, optimizer, _ = start((2, 0), norms="eval")
    assert not model.stem[1].training
    train(model, optimizer, [0])
    assert model.stem[1].training
    train(model, optimizer, [1])
    assert not model.stem[1].training
    model.eval()
    train(model, optimizer, [2])
    assert not model.stem[1].training, "the model is in eval mode"


def test_the_backward_pass_stops_at_the_border_and_stores_nothing_before_it():
    model, _, _ = start((3,), norms="eval")
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t.numel()) or t, lambda t: t):
        features = model.blocks(model.stem(batch(0)[0]))
    assert not features.requires_grad
    assert stored == []


def test_optimizer_state_has_one_set_of_moments_and_its_groups_never_change():
    model, optimizer, _ = start((0, 1, 2, 3))
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    train(model, optimizer, range(8))
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == groups
    assert sum(s["momentum_buffer"].numel() for s in optimizer.state.values()) == sum(
        p.numel() for p in model.parameters()
    )


def test_equals_a_loop_that_freezes_by_hand():
    schedule = (0, 2, 1, 3, 0, 1)
    model, optimizer, _ = start(schedule)
    train(model, optimizer, range(6))
    by_hand, plain, freezing = start(schedule)
    freezing.remove()
    blocks = [block.parameters for block in blocks_of(by_hand)]
    for step, index in enumerate(schedule):
        for at, parameters in enumerate(blocks):
            for p in parameters:
                p.requires_grad_(at >= index)
        train(by_hand, plain, [step])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))


def test_tied_weights_train_through_their_last_use_only():
    torch.manual_seed(0)
    model = GPT(16, context=8, layers=2, heads=2, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = blocks_of(model)
    freezing = Freezing(model, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated((2,)))
    tokens = torch.randint(0, 16, (2, 8))
    assert not model.blocks[0](model.tokens(tokens)).requires_grad
    model(tokens).sum().backward()
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    assert used == {
        n for n, _ in model.named_parameters() if n == "tokens.weight" or n[:8] in ("blocks.1", "norm.wei", "norm.bia")
    }
    freezing.remove()
    assert model.tokens(tokens).requires_grad
    assert not model.tokens._forward_hooks


def test_what_the_caller_froze_stays_frozen():
    torch.manual_seed(0)
    model = BottleneckNet()
    model.stem.requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    blocks = blocks_of(model)
    freezing = Freezing(model, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated((2, 0)))
    train(model, optimizer, [0, 1, 2])
    freezing.remove()
    assert not any(p.requires_grad for p in model.stem.parameters())
    assert all(p.requires_grad for p in model.blocks.parameters())


def test_a_skipped_update_does_not_advance_the_schedule():
    model, optimizer, freezing = start((0, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = batch(0)
    for factor, step in ((float("inf"), 0), (1.0, 1)):
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert freezing.step == step


def test_resume_at_every_step_is_bit_identical():
    schedule = (0, 2, 1, 0, 3, 0, 1, 2, 0, 3, 1, 0)
    model, optimizer, freezing = start(schedule, norms="eval")
    states = []
    for step in range(12):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), freezing.state_dict())))
        train(model, optimizer, [step])
    for step, (weights, moments, state) in enumerate(states):
        again, other, resumed = start(schedule, norms="eval", seed=5)
        again.load_state_dict(weights)
        other.load_state_dict(moments)
        resumed.load_state_dict(state)
        train(again, other, range(step, 12))
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_checkpoint_of_another_schedule_is_refused_before_anything_changes():
    _, _, freezing = start((0, 3))
    freezing._after_update()
    model, _, other = start((0, 1))
    with pytest.raises(ValueError, match=r"froze 24 parameters at update 1, but these settings freeze 3; attach with"):
        other.load_state_dict(freezing.state_dict())
    assert other.step == 0
    assert all(p.requires_grad for p in model.parameters())


def test_remove_gives_everything_back():
    model, optimizer, freezing = start((3,), norms="eval")
    assert not model.stem[1].training
    freezing.remove()
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("norms", ["update", "eval"])
@pytest.mark.usefixtures("followed_flags")
def test_compiled_training_follows_the_flags(norms):
    schedule = (0, 1, 3, 0)
    eager, plain, _ = start(schedule, norms=norms)
    torch.manual_seed(0)
    model = BottleneckNet()
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    blocks = blocks_of(model)
    Freezing(model, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated(schedule), norms=norms)
    for step in range(6):
        train(eager, plain, [step])
        train(model, optimizer, [step])
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("followed_flags")
def test_a_tied_weight_is_cut_in_a_compiled_model_too():
    torch.manual_seed(0)
    model = GPT(16, context=8, layers=2, heads=2, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = blocks_of(model)
    model.compile(backend="aot_eager")
    Freezing(model, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated((0, 2)))
    tokens = torch.randint(0, 16, (2, 8))
    reached = []
    for _ in range(2):
        model(tokens).sum().backward()
        reached.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert reached[0] == len(list(model.parameters()))
    assert reached[1] < reached[0]


@pytest.mark.parametrize("first", ["compile", "freezing"])
def test_what_a_level_compiles_is_trained_again_when_it_is_thawed(first, monkeypatch):
    """A level attaches compile first, a trial that keeps it attaches it last. It needs no setting in any torch."""
    monkeypatch.setattr("torchboost.algorithms.grad_freeze.freezer.compiler_follows_flags", lambda: False)
    model = BottleneckNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    blocks, compilation = blocks_of(model), Compile(backend="aot_eager")
    if first == "compile":
        compilation.attach(Target(model, optimizer))
    Freezing(model, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated((2, 0, 3)))
    if first == "freezing":
        compilation.attach(Target(model, optimizer))
    for frozen in (True, False, True):
        before = model.stem[0].weight.detach().clone()
        train(model, optimizer, [0])
        assert torch.equal(model.stem[0].weight, before) is frozen


def test_wrappers_that_cannot_follow_are_refused(monkeypatch):
    (found,) = run_ranks(_refusals, 1)
    assert "static_graph=True" in found[0]
    monkeypatch.setattr("torchboost.algorithms.grad_freeze.freezer.compiler_follows_flags", lambda: False)
    model = BottleneckNet()
    model.compile(backend="eager")
    with pytest.raises(IncompatibleError, match="pytorch#139476"):
        Freezing(model, torch.optim.SGD(model.parameters(), lr=0.1), prefixes_of(blocks_of(model), (0, 1)), lambda s: 0)


def _refusals() -> list[str]:
    found = []
    for options in ({"static_graph": True},):
        model = wrap(BottleneckNet(), "ddp", **options)
        try:
            Freezing(
                model, torch.optim.SGD(model.parameters(), lr=0.1), prefixes_of(blocks_of(model), (0, 1)), lambda s: 0
            )
        except IncompatibleError as error:
            found.append(str(error))
    return found


def _trained(kind: str) -> list[float]:
    torch.manual_seed(0)
    model = BottleneckNet()
    for module in model.modules():  # statistics of a share of the batch are not those of the batch
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    wrapped = wrap(model, kind)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    blocks = blocks_of(wrapped)
    Freezing(wrapped, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated((0, 2, 1, 3)))
    train_share(Target(wrapped, optimizer), model, steps=6)
    return all_weights(wrapped)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(kind):
    first, second = run_ranks(_trained, 2, kind)
    assert first == second
    assert first == pytest.approx(_trained("single"), abs=1e-6)


def test_everything_trains_after_the_end_of_the_run_and_more_updates_are_said():
    torch.manual_seed(0)
    model = BottleneckNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    blocks = blocks_of(model)
    prefixes = prefixes_of(blocks, range(len(blocks)))
    freezing = Freezing(model, optimizer, prefixes, Repeated((0, 2)), total_steps=4, norms="eval")
    train(model, optimizer, range(4))
    assert freezing.index == 0
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())
    with pytest.warns(NoEffectWarning, match="update 5 comes after the end of the run, total_steps=4") as seen:
        train(model, optimizer, range(3))
    assert len(seen) == 1
    assert freezing.index == 0


def test_an_optimizer_that_moves_weights_without_gradients_is_refused():
    model = BottleneckNet()
    with pytest.raises(IncompatibleError, match=r"LBFGS\.step needs a closure"):
        Freezing(model, torch.optim.LBFGS(model.parameters()), prefixes_of(blocks_of(model), (0, 1)), Repeated((1,)))
    assert all(p.requires_grad for p in model.parameters())
