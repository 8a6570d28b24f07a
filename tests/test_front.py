"""The front door: one line, the loop as it was, and everything taken away again."""

from __future__ import annotations

import copy
import gc
import html
import inspect
import re
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from tests.support.boosted import batch, hooks, pair, small_net, train
from tests.support.conv_nets import vgg
from torchboost import IncompatibleError, NoEffectWarning, Target, boost, prepare
from torchboost.front import boosted_of
from torchboost.graph import trace
from torchboost.optim import ScheduleFreeAdamW
from torchboost.registry import REGISTRY, Host
from torchboost.sheet import Sheet
from torchboost.workloads.models import Bottleneck, ResNet

SCALED = {"boost": {"mode": "manual", "loss_scale_group": True}}
EVERY_SECOND = {"extra": {"grad_accumulation": {"steps": 2}}}


def test_the_pair_trains_in_the_loop_that_was_there():
    given, sgd = pair()
    boosted = boost(given, sgd, total_steps=30)
    model, optimizer = boosted
    assert (model, optimizer) == (given, sgd)
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.9 * losses[0]
    assert boosted.plan.level == "O1"
    assert "level O1" in boosted.explain()
    assert "fused_optimizer" in repr(boosted)
    boosted.remove()
    assert not hooks(optimizer)
    assert not model._forward_pre_hooks
    assert boosted_of(optimizer) is None
    assert "removed" in boosted.explain().splitlines()[0]


def test_o0_changes_nothing():
    model, optimizer = pair()
    boosted = boost(model, optimizer, level="O0")
    assert (len(boosted.attached), hooks(optimizer)) == (0, 0)
    assert boosted.state_dict() == {"attached": {}}


@pytest.mark.parametrize("calibrate", [False, 0.2])
def test_o1_changes_neither_the_network_nor_the_update_rule(calibrate):
    model, optimizer = pair(lambda: ResNet(Bottleneck, [1, 1], width=8, classes=3))
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    parameters = [(name, id(parameter), parameter.shape) for name, parameter in model.named_parameters()]
    keys, groups = list(model.state_dict()), [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    boosted = boost(model, optimizer, level="O1", total_steps=10_000, calibrate=calibrate)
    for _ in range(2):
        assert (boosted.model, boosted.optimizer) == (model, optimizer)
        assert [(name, type(module)) for name, module in model.named_modules()] == kinds
        assert [(name, id(p), p.shape) for name, p in model.named_parameters()] == parameters
        assert list(model.state_dict()) == keys
        assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == groups
        assert boosted.attached or calibrate
        assert all(REGISTRY[name].lever for name in boosted.attached)
        train(model, optimizer, 2)


def test_a_missing_length_is_said_once_by_name():
    with pytest.warns(
        NoEffectWarning, match=r"^O2 runs without grad_freeze, which .* boost\(\.\.\., total_steps="
    ) as seen:
        boost(*pair(), level="O2")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    boost(*pair(), level="O2", config={"grad_freeze": {"total_steps": 100}})
    boost(*pair(), level="O2", config={"extra": {"grad_freeze": False}})
    boost(*pair())
    boost(*pair(), level="O0")


def test_a_level_compiles_and_freezes_without_a_setting_of_the_compiler():
    settings = {"extra": {"compile": {"backend": "eager"}}}
    boosted = boost(*pair(), level="O2", total_steps=10_000, config=settings, calibrate=False)
    assert {"compile", "grad_freeze"} <= set(boosted.attached)


def test_total_steps_reaches_auto_boost():
    booster = torchboost.AutoBoost("O2", total_steps=1000)
    booster.network_auto_process_train(*pair())
    assert booster.plan.algorithms[-1].total_steps == 1000  # pyright: ignore


def test_a_wrapped_model_is_told_which_line_to_move():
    model, optimizer = pair()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(
        IncompatibleError, match=r"wrapped by torch\.compile.*move the line with torchboost\.boost.*bare model"
    ):
        boost(compiled, optimizer, total_steps=10)  # pyright: ignore[reportArgumentType]
    with pytest.raises(IncompatibleError, match="bare model"):
        prepare(compiled, total_steps=10)  # pyright: ignore[reportArgumentType]


def test_a_wrapped_model_says_that_nothing_was_measured():
    model = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), backend="eager")
    boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=10_000)
    assert "not measured or checked: wrapped by torch.compile before boost" in boosted.checks["fused_optimizer"]


@pytest.mark.parametrize("own_loop", [True, False])
def test_gradients_accumulate_in_either_loop(own_loop):
    model, sgd = pair()
    boosted = boost(model, sgd, level="O0", config=EVERY_SECOND)
    assert boosted.optimizer is not sgd
    before = [copy.deepcopy(model[0].weight)]  # pyright: ignore[reportIndexIssue]
    step = None if own_loop else boosted.step(F.cross_entropy)
    for _ in range(4):
        if step is None:
            train(model, boosted.optimizer, 1)
        else:
            step(*batch())
        before.append(copy.deepcopy(model[0].weight))  # pyright: ignore[reportIndexIssue]
    assert [torch.equal(a, b) for a, b in pairwise(before)] == [True, False, True, False]


def test_an_accumulating_step_says_when_it_updated():
    step = boost(*pair(), level="O0", config=EVERY_SECOND).step(F.cross_entropy)
    updated = []
    for _ in range(5):
        step(*batch())
        updated.append(step.updated)
    assert updated == [False, True, False, True, False]
    assert step.flush() is not None


def test_the_inner_optimizer_is_not_stepped_past_the_one_in_front():
    model, sgd = pair()
    boost(model, sgd, level="O0", config=EVERY_SECOND)
    with pytest.raises(IncompatibleError, match=r"model, optimizer = torchboost\.boost"):
        train(model, sgd, 1)


def test_a_step_without_a_loss_takes_the_models_own():
    network = torchboost.WithLoss(nn.Linear(4, 2), F.cross_entropy)
    step = boost(network, torch.optim.SGD(network.parameters(), lr=0.1), level="O0").step()
    assert step(torch.randn(8, 4), torch.randint(0, 2, (8,))).loss.ndim == 0


def test_the_scaler_of_the_loop_and_one_that_is_brought():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    boosted = boost(*pair(), level="O0", scaler=scaler)
    assert boosted.scaler is scaler
    assert "scaler" not in boosted.state_dict()
    assert boosted.step(F.cross_entropy)(*batch()).loss_scale == 8
    with pytest.raises(IncompatibleError, match="the target has a scaler already, a GradScaler"):
        boost(*pair(), level="O0", config=SCALED, scaler=torch.amp.GradScaler("cpu"))
    brought = boost(*pair(), level="O0", config=SCALED)
    assert brought.step(F.cross_entropy)(*batch()).loss_scale >= 2.0**16
    again = boost(*pair(), level="O0", config=SCALED)
    again.load_state_dict(copy.deepcopy(brought.state_dict()))
    assert again.state_dict() == brought.state_dict()
    with pytest.raises(ValueError, match="the checkpoint lacks scaler, unlike this boosted model"):
        again.load_state_dict({"attached": {}})


def test_a_second_boost_takes_the_first_one_away():
    model, optimizer = pair()
    first = boost(model, optimizer, total_steps=4)
    train(model, optimizer, 4)
    count = hooks(optimizer)
    second = boost(model, optimizer, total_steps=4)
    assert len(first.attached) == 0
    train(model, optimizer, 1)
    assert hooks(optimizer) == count
    assert boosted_of(optimizer) is second
    other = torch.optim.SGD(model.parameters(), lr=0.05)
    boost(model, other, total_steps=4)
    assert hooks(optimizer) == 0
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_second_boost_finds_the_optimizer_behind_the_one_in_front():
    model, sgd = pair()
    first = boost(model, sgd, level="O0", config=EVERY_SECOND)
    second = boost(model, first.optimizer, level="O0", config=EVERY_SECOND)
    assert second.optimizer is not first.optimizer
    assert getattr(second.optimizer, "opt", None) is sgd
    assert boosted_of(sgd) is boosted_of(second.optimizer) is second


def test_nothing_keeps_a_boosted_pair_alive():
    model, optimizer = pair()
    boosted = boost(model, optimizer, total_steps=10)
    train(model, optimizer, 2)
    gone = [weakref.ref(boosted), weakref.ref(optimizer)]
    del boosted, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-4), (True, 3e-2)])
def test_the_copy_for_inference_computes_the_same(autocast, tolerance):
    model, optimizer = pair(vgg)
    boosted = boost(model, optimizer, total_steps=10, config={"extra": {"autocast": autocast}})
    x = torch.randn(2, 3, 32, 32)
    model(x)
    copied = boosted.eval_model(x)
    assert not copied.training
    assert model.training
    expected = model.eval()(x)
    assert (copied(x) - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("listed", [False, True])
def test_a_copy_for_inference_of_weights_of_training_warns_once(listed):
    model, _ = pair()
    x, y = batch()
    body, head = list(model[:-1].parameters()), list(model[-1].parameters())
    average = ScheduleFreeAdamW(head if listed else [*body, *head], lr=0.1)
    others = [torch.optim.SGD(body, 0.1)] if listed else []
    boosted = boost(model, [*others, average] if listed else average, calibrate=False)
    boosted.eval_model()  # nothing is trained yet
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        for optimizer in (*others, average):
            optimizer.step()
            optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"copy for inference has the weights of training.*optimizer.eval\(\)") as said:
        trained = boosted.eval_model()
    assert said[0].filename == __file__
    boosted.eval_model()
    average.eval()
    averaged = boosted.eval_model()
    expected = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(averaged(x), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(trained(x), expected, rtol=1e-3, atol=1e-3)


def test_the_model_is_traced_once_before_it_is_changed_and_once_after(monkeypatch):
    traces = []
    record = trace.trace_paths
    monkeypatch.setattr(trace, "trace_paths", lambda *args, **kwargs: traces.append(1) or record(*args, **kwargs))
    boosted = boost(*pair(lambda: ResNet(Bottleneck, [1, 1], width=8)), level="O2", total_steps=10_000)
    assert {"less_bn", "grad_freeze"} <= set(boosted.attached)
    assert len(traces) == 2


def test_a_forward_that_holds_the_model_does_not_let_boost_touch_it():
    model, optimizer = pair()
    forward = model[3].forward
    model[3].forward = lambda x: forward(x)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    gradients, state = [p.grad.clone() for p in model.parameters()], copy.deepcopy(model.state_dict())
    boosted = boost(model, optimizer, calibrate=False)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    F.cross_entropy(model(x), y)  # the levers are checked here, on the model itself
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert "channels_last" in boosted.checks
    with pytest.raises(TypeError, match="of the original"):
        boosted.eval_model(sample=x)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_was_boosted_inside_inference_mode_can_be_trained(mode):
    model, optimizer = pair(lambda: ResNet(Bottleneck, [1, 1], width=8, classes=3))
    extra = {"channels_last": True, "less_bn": True, "compile": False}
    with mode():
        boosted = boost(model, optimizer, calibrate=False, config={"extra": extra})
    assert {"channels_last", "less_bn"} <= set(boosted.attached)
    train(model, optimizer, 1)
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


def test_a_second_boost_lists_what_the_first_one_changed_in_the_model():
    torch.manual_seed(0)
    model = ResNet(Bottleneck, [1, 1], width=8, classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        boosted = torchboost.boost(model, optimizer, level="O2", total_steps=1000, calibrate=False)
        assert {"less_bn", "gradient_centralization"} <= {algorithm.name for algorithm in boosted.plan.algorithms}
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        boosted.remove()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_by_name(level):
    torch.manual_seed(0)
    model = small_cnn()
    boosted = boost(model, "muon", lr=0.01, level=level, total_steps=1000, calibrate=False)
    found, optimizer = boosted
    assert {group["rule"] for group in optimizer.param_groups} == {"muon", "adamw"}
    before = [param.detach().clone() for param in found.parameters()]
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(found(images), labels).backward()
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, found.parameters(), strict=True))
    boosted.remove()


def test_a_rate_without_a_name_and_a_wrong_name_are_refused():
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="next to SGD, which has its own"):
        boost(model, optimizer, lr=0.2)
    with pytest.raises(ValueError, match="there are muon, schedule_free_adamw"):
        boost(model, "adam")
    with pytest.raises(TypeError, match=r'found None; give a torch\.optim\.Optimizer.*"muon" or "schedule_free_adamw"'):
        boost(model, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"adamw_lr: found 0\.2 next to SGD"):
        boost(model, optimizer, adamw_lr=0.2)


def test_the_names_of_mindspore_that_are_not_here_lead_to_their_counterparts():
    managers = (("DynamicLossScaleManager", r"DynamicLossScale\("), ("FixedLossScaleManager", r"FixedLossScale\("))
    others = (("Model", "your own loop"), ("WithLossCell", "WithLoss"), ("set_train", "model.train"))
    for name, counterpart in (*managers, *others):
        with pytest.raises(AttributeError, match=rf"no {name}; use .*{counterpart}.*docs/compat\.md"):
            getattr(torchboost, name)
    assert not hasattr(torchboost, "TrainOneStepCell")
    assert not hasattr(torchboost, "a_name_of_neither")
    model, optimizer = pair()
    cell = torchboost.BoostTrainOneStepCell(torchboost.WithLoss(model, F.cross_entropy), optimizer)
    with pytest.raises(AttributeError, match=r"BoostTrainOneStepCell has no set_train; use model\.train\(\)"):
        cell.set_train()


def test_explain_says_what_was_on_before_and_takes_no_credit():
    model = small_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    boosted = boost(model, optimizer, "O2", total_steps=1000, calibrate=False)
    first, *_ = lines = boosted.explain().splitlines()
    assert first == "level O2 for AdamW, 1,000 steps"
    states = [line.split("  ")[1].strip() for line in lines if line.startswith(("less_bn", "fused_optimizer"))]
    assert "was on before" in next(line for line in lines if line.startswith("fused_optimizer"))
    assert len(states) == 2
    assert lines[-1].startswith("next: ")
    page = boosted._repr_html_()
    assert all(html.escape(cell) in page for row in boosted.levers.explanation().rows for cell in row)


def test_a_channels_last_program_or_one_under_autocast_is_no_gain():
    torch.manual_seed(0)
    model = small_cnn().to(memory_format=torch.channels_last)
    boosted = boost(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=10_000, calibrate=0.2)
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        model(images).square().mean().backward()
    before = {row.name for row in boosted.levers.explanation().rows if row.state == "was on before"}
    assert {"channels_last", "autocast"} <= before


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_copy_of_a_boosted_model_computes_channels_last_before_its_own_boost(layout):
    model, images = small_cnn(), torch.randn(4, 3, 8, 8).to(memory_format=layout)

    def state_of(trained: nn.Module) -> tuple[str, str]:
        boosted = boost(trained, torch.optim.SGD(trained.parameters(), lr=0.1), total_steps=10_000, calibrate=False)
        trained(images).square().mean().backward()
        return next((row.state, row.did) for row in boosted.levers.explanation().rows if row.name == "channels_last")

    ours = ("on", "stores images and kernels channels-last")
    assert state_of(model) == ours
    assert state_of(copy.deepcopy(model)) == ("was on before", "its convolutions compute channels-last as they are")
    assert state_of(model) == ours  # the kernels are as the first boost of this very model has stored them
    narrow = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 2))
    if layout is torch.contiguous_format:
        assert state_of(narrow) == ours  # kernels of 1 x 1 have both formats


@pytest.mark.parametrize("options", [{"total_steps": 100}, {"total_steps": 10_000, "calibrate": False}])
def test_without_a_trial_too_no_credit_is_taken_for_what_the_loop_does(options):
    torch.manual_seed(0)
    model, images = small_cnn().to(memory_format=torch.channels_last), torch.randn(4, 3, 8, 8)
    boosted = boost(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with torch.autocast("cpu", torch.bfloat16):
        model(images.to(memory_format=torch.channels_last)).square().mean().backward()
    rows = {row.name: row for row in boosted.levers.explanation().rows}
    assert rows["autocast"].state == rows["channels_last"].state == "was on before"
    assert rows["autocast"].did == "the loop computes under torch.autocast to bfloat16"
    assert not {"autocast", "channels_last"} & {*boosted.attached, *boosted.checks}
    assert rows["fused_optimizer"].state == "on"


def test_what_was_asked_for_or_is_only_idle_in_the_first_call_stays_without_a_trial():
    model, images = small_cnn(), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted = boost(model, optimizer, total_steps=100, config={"extra": {"autocast": True}})
    with torch.autocast("cpu", torch.bfloat16):
        model(images).square().mean().backward()
    assert "autocast" in boosted.attached
    padded = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    boosted = boost(padded, torch.optim.SGD(padded.parameters(), lr=0.1), total_steps=100)
    padded(torch.randn(2, 3, 8), src_key_padding_mask=torch.zeros(2, 3, dtype=torch.bool)).mean().backward()
    assert "unpad" in boosted.attached


def test_a_cell_of_a_page_is_escaped():
    page = Sheet(before=("a < b",), headings=("x",), rows=(("<script>",),))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a &lt; b" in page


def small_cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 2))


def test_two_models_do_not_share_an_optimizer():
    first, second = small_net(), small_net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    boosted = boost(first, optimizer, total_steps=10_000)
    before = list(boosted.attached)
    with pytest.raises(IncompatibleError, match="boosted with another model, a Sequential; give each"):
        boost(second, optimizer, total_steps=10_000)
    assert list(boosted.attached) == before
    assert boosted_of(optimizer) is boosted
    both = boost(nn.ModuleList([first, second]), optimizer, total_steps=10_000)
    assert boosted_of(optimizer) is both
    both.remove()
    boost(second, optimizer, total_steps=10_000).remove()


def test_facts_are_those_of_the_loop(bfloat16):
    bfloat16(2.0, 2.0)
    facts = Host(loop="transformers", precision="bf16").facts(nn.Linear(2, 2))
    assert (facts.loop, facts.precision) == ("transformers", "bf16")
    assert Host(loop="transformers").facts(nn.Linear(8, 8)).half_precision is True


def test_a_prepared_model_is_attached_later():
    model = ResNet(Bottleneck, [1, 1], width=8)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    plan = prepare(model, level="O2", total_steps=1000)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) < norms
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = plan.attach(Target(torch.compile(model, backend="eager"), optimizer))  # pyright: ignore
    assert "less_bn" in attached


def test_what_has_nothing_to_change_is_left_out_and_nothing_is_said_to_be_measured():
    text = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), level="O2", total_steps=10_000).explain()
    assert re.search(r"^less_bn +off ", text, re.MULTILINE)
    assert "measures which of these pay" not in text


def test_what_has_transformed_the_model_before_stays_on():
    model = ResNet(Bottleneck, [1, 1], width=8)
    first = prepare(model, level="O2", total_steps=1000).algorithms
    assert "less_bn" in {algorithm.name for algorithm in first}
    assert prepare(model, level="O2", total_steps=1000).algorithms == first


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (
            {"boost_config_dict": {}},
            "boost takes no 'boost_config_dict', which is MindSpore's name; here it is config=",
        ),
        ({"boost_level": "O1"}, "boost takes no 'boost_level', which is MindSpore's name; here it is level=."),
        ({"total_step": 10}, "boost takes no 'total_step'; did you mean 'total_steps'?"),
    ],
)
def test_arguments_that_it_does_not_take_are_translated(named, said):
    model, optimizer = pair()
    with pytest.raises(TypeError, match=re.escape(said)):
        boost(model, optimizer, "O1", **named)
    assert not hooks(optimizer)
    assert "_unknown" not in inspect.signature(boost).parameters
