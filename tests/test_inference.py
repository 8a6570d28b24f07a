"""The copy for inference computes what the network computes, for every input, and is made of torch's modules."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import pickletools
import threading
import time
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tests.support.conv_nets import ForeignNames, InvertedResidual, PreActNet, train_a_little, vgg
from tests.support.removal_nets import NormAct
from tests.support.zoo import ZOO
from torchboost import inference
from torchboost.algorithms.less_bn import less_bn
from torchboost.core.torch_private import interceptor_of
from torchboost.errors import NoEffectWarning
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.inference import fast_copy

FASTEST = inference.fastest


@pytest.fixture(autouse=True)
def _the_last_form_is_the_fastest(monkeypatch: pytest.MonkeyPatch):
    """Which form is the fastest must not depend on how busy the machine is."""
    monkeypatch.setattr(inference, "fastest", lambda forms, sample: list(forms)[-1])


def test_forms_are_timed():
    class Slow(nn.Linear):
        def forward(self, input):
            time.sleep(0.02)
            return super().forward(input)

    assert FASTEST({"slow": Slow(2, 2), "fast": nn.Linear(2, 2)}, torch.randn(1, 2)) == "fast"


def trained(model: nn.Module, size: int = 16) -> nn.Module:
    train_a_little(model, size=size)
    return model


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def difference(fast: nn.Module, network: nn.Module, *args: Tensor, **kwargs: Tensor) -> float:
    training = network.training
    with torch.no_grad():
        found, expected = fast(*args, **kwargs), network.eval()(*args, **kwargs)
    network.train(training)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("build", [vgg, ForeignNames, PreActNet])
def test_everything_that_can_go_goes(build):
    network, x = trained(build()), torch.randn(4, 3, 16, 16)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    fast = fast_copy(network)
    assert difference(fast, network, x) <= 1e-4
    assert norms(fast) < norms(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert fast.training is False


@pytest.mark.parametrize("given", [False, True])
def test_norms_that_a_plain_list_calls_stay_in_the_copy(given):
    network, x = ZOO["plain_list"].model(), torch.randn(4, 3, 8, 8)
    trained(network, 8)
    fast = fast_copy(network, sample=x if given else None)
    assert difference(fast, network, x) <= 1e-4
    assert (norms(network), norms(fast)) == (4, 3)


def test_the_check_is_over_after_the_first_call():
    network, x = trained(vgg()), torch.randn(4, 3, 16, 16)
    fast = fast_copy(network)
    assert interceptor_of(fast) is not None
    assert isinstance(fast, nn.Sequential)
    fast(x)
    assert interceptor_of(fast) is None


class Relies(nn.Module):
    """A path by the Python type of an argument, which no stand-in shows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        if isinstance(x, list):
            x = x[0]
            return torch.relu(self.norm(self.conv(x) * 2))
        return torch.relu(self.norm(self.conv(x)))


def test_the_first_inputs_decide():
    network, x = trained(nn.Sequential(Relies(), nn.AdaptiveAvgPool2d(1), nn.Flatten())), torch.randn(2, 3, 8, 8)
    fast = fast_copy(network)
    with pytest.warns(NoEffectWarning, match="is not folded"), torch.no_grad():
        found = fast([x])
    assert torch.equal(found, network.eval()([x]))
    assert norms(fast) == norms(network) == 1
    assert interceptor_of(fast) is None
    with pytest.raises(ValueError, match="does not run on the sample"):
        fast_copy(network, sample=torch.randn(2, 7, 8, 8))


def test_a_call_that_fails_settles_nothing():
    network, x = trained(vgg()), torch.randn(4, 3, 16, 16)
    fast = fast_copy(network)
    with pytest.raises(RuntimeError, match="channels"):
        fast(torch.randn(4, 5, 16, 16))
    assert fast(torch.full_like(x, torch.nan)).isnan().all()
    assert interceptor_of(fast) is not None
    assert difference(fast, network, x) <= 1e-4


def test_an_interrupted_first_call_settles_nothing():
    class Interrupted(nn.Module):
        patience = 0

        def __init__(self):
            super().__init__()
            self.net = trained(vgg())

        def forward(self, x):
            Interrupted.patience -= 1
            if Interrupted.patience == 0:
                raise KeyboardInterrupt
            return self.net(x)

    network, x = Interrupted(), torch.randn(4, 3, 16, 16)
    fast = fast_copy(network)
    for patience in (1, 2):
        Interrupted.patience = patience
        with pytest.raises(KeyboardInterrupt):
            fast(x)
        assert interceptor_of(fast) is not None
    assert difference(fast, network, x) <= 1e-4
    assert interceptor_of(fast) is None


def test_a_warning_that_is_an_error_leaves_the_copy_unfolded():
    network, x = trained(nn.Sequential(Relies(), nn.AdaptiveAvgPool2d(1), nn.Flatten())), torch.randn(2, 3, 8, 8)
    fast = fast_copy(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NoEffectWarning):
            fast([x])
    assert interceptor_of(fast) is None
    with torch.no_grad():
        assert torch.equal(fast([x]), network.eval()([x]))


def test_threads_that_call_first_all_get_the_right_outputs():
    network, x, found = trained(vgg()), torch.randn(4, 3, 16, 16), []
    fast, start = fast_copy(network), threading.Barrier(4)

    def call() -> None:
        start.wait(30)
        with torch.no_grad():
            found.append(fast(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = network.eval()(x).detach()
    assert len(found) == 4
    for outputs in found:
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [True, False])
def test_a_view_in_forward_stays_possible(given):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 8, 5), nn.BatchNorm2d(8)
            self.head = nn.Linear(8 * 64, 4)

        def forward(self, x):
            return self.head(torch.relu(self.norm(self.b(self.a(x)))).view(-1, 8 * 64))

    network, x = trained(Views()), torch.randn(2, 3, 16, 16)
    fast = fast_copy(network, sample=x if given else None)
    assert difference(fast, network, x) <= 1e-4
    assert norms(fast) == 0
    assert all(p.is_contiguous() for p in fast.parameters())


def test_a_sample_is_checked_at_once_and_the_fastest_form_is_picked(monkeypatch):
    network, x, offered = trained(vgg()), torch.randn(4, 3, 16, 16), []

    def pick(form):
        monkeypatch.setattr(inference, "fastest", lambda forms, sample: offered.extend(forms) or form)

    pick("folded")
    fast = fast_copy(network, sample=x)
    assert offered == ["plain", "folded", "channels-last"]
    assert interceptor_of(fast) is None
    assert norms(fast) == 0
    assert all(p.is_contiguous() for p in fast.parameters())
    pick("channels-last")
    assert not fast_copy(network, sample=x)[0].weight.is_contiguous()


def test_the_copy_is_plain_torch():
    network = trained(nn.Sequential(vgg(), nn.Flatten()))
    for kept in (fast_copy(network, sample=torch.randn(2, 3, 16, 16)), fast_copy(network)):
        names = {str(op[1]).split(" ")[0] for op in pickletools.genops(pickle.dumps(kept, protocol=2))}
        assert not [name for name in names if name.startswith(("torchboost", "tests"))]
        again = pickle.loads(pickle.dumps(kept))
        assert type(again) is type(copy.deepcopy(kept)) is nn.Sequential
        torch.testing.assert_close(again(torch.ones(2, 3, 16, 16)), kept(torch.ones(2, 3, 16, 16)))
        file = io.BytesIO()
        torch.save(kept, file)


@pytest.mark.parametrize("checked", [True, False])
def test_the_copy_can_be_scripted_traced_compiled_and_exported(checked):
    network, x = trained(vgg()), torch.randn(2, 3, 16, 16)
    expected = network.eval()(x).detach()
    for build in (
        torch.jit.script,
        lambda fast: torch.compile(fast, backend="eager", fullgraph=True),
        lambda fast: torch.export.export(fast, (x,)).module(),
    ):
        fast = fast_copy(network, sample=x if checked else None)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.testing.assert_close(build(fast)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_the_copy_can_be_exported_to_onnx():
    runtime = pytest.importorskip("onnxruntime", reason="needs onnx, onnxscript and onnxruntime")
    network, x = trained(vgg()), torch.randn(2, 3, 16, 16)
    assert less_bn(network).removed
    expected = network.eval()(x).detach()
    file = io.BytesIO()
    torch.onnx.export(fast_copy(network, sample=x), (x,), input_names=["x"], dynamo=True).save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


def test_norms_that_went_in_training_become_modules_of_torch_too():
    tailed = NormAct(4, nn.ReLU())
    network = nn.Sequential(nn.Conv2d(3, 4, 1), RemovedNorm(nn.BatchNorm2d(4), copies=False), nn.Conv2d(4, 4, 1))
    network.append(RemovedNorm(tailed, copies=False))
    fast, x = fast_copy(network), torch.randn(2, 3, 4, 4)
    assert difference(fast, network, x) <= 1e-4
    assert [type(module) for module in fast][1::2] == [nn.Identity, nn.Sequential]
    assert (fast[1].num_features, fast[3].act.__class__) == (4, nn.ReLU)


def test_a_norm_that_went_keeps_its_copy_in_front_of_an_activation_in_place():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), RemovedNorm(NormAct(3, nn.ReLU(inplace=True)))

        def forward(self, x):
            x = self.conv(x)
            return x + self.norm(x)

    network, x = Skips(), torch.randn(2, 3, 4, 4)
    for sample in (None, x):
        assert difference(fast_copy(network, sample=sample), network, x) <= 1e-4


def test_under_autocast_the_check_is_in_full_precision():
    network, x = trained(vgg()), torch.randn(4, 3, 16, 16)
    fast = fast_copy(network)
    with torch.autocast("cpu", torch.bfloat16):
        fast(x.bfloat16())
    assert interceptor_of(fast) is None
    assert norms(fast) == 0


def test_keywords_and_other_outputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = InvertedResidual(3, 3)

        def forward(self, x, *, scale=None):
            y = self.block(x if scale is None else x * scale)
            return {"features": y, "masked": torch.full_like(y, float("-inf")), "count": len(x)}

    network = Named()
    for _ in range(3):
        network(torch.randn(4, 3, 8, 8))
    fast, x = fast_copy(network), torch.randn(2, 3, 8, 8)
    assert norms(fast) == 0
    torch.testing.assert_close(fast(x, scale=x), network.eval()(x, scale=x), rtol=1e-4, atol=1e-4)
    assert interceptor_of(fast) is None


def test_a_network_without_convolutions_or_norms_is_copied():
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    fast = fast_copy(network)
    assert fast is not network
    assert torch.equal(fast(torch.ones(1, 3)), F.linear(torch.ones(1, 3), network[0].weight, network[0].bias))
    assert interceptor_of(fast) is None


@pytest.mark.usefixtures("one_accelerator")
def test_a_network_that_accelerate_has_prepared():
    accelerate = pytest.importorskip("accelerate")
    network = trained(vgg())
    x = torch.randn(4, 3, 16, 16)
    expected = network.eval()(x).detach()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare(network)
        assert not torch.equal(prepared(x), expected)
        fast = fast_copy(prepared)
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
        assert norms(fast) == 0
        assert not torch.equal(prepared(x), expected)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


class ThroughLambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.both = lambda x: self.norm(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)


def test_a_copy_that_computes_with_the_layers_of_the_network_is_refused():
    network, x = ThroughLambda(), torch.randn(2, 3, 8, 8)
    with pytest.raises(TypeError, match="weight of a Conv2d of the original"):
        fast_copy(network, sample=x)
    fast = fast_copy(network)
    for _ in range(2):
        with pytest.raises(TypeError, match="weight of a Conv2d of the original"):
            fast(x)
    assert network.norm.num_batches_tracked == 0


def test_a_part_of_the_network_that_a_function_keeps_alive_is_found():
    network, x = vgg(), torch.randn(2, 3, 16, 16)
    layer = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    forward = layer.forward
    layer.forward = lambda x: forward(x)
    fast = fast_copy(network)
    del network, layer
    with pytest.raises(TypeError, match="of the original"):
        fast(x)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda forward: functools.partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False),
        lambda forward: torch.compile(forward, backend="eager"),
    ],
)
def test_a_replaced_forward_that_can_be_copied_computes_with_the_copy(wrap, checked):
    network, x = trained(vgg()), torch.randn(2, 3, 16, 16)
    network.forward = wrap(network.forward)
    fast = fast_copy(network, sample=x if checked else None)
    assert difference(fast, network, x) <= 1e-4
    expected = fast(x)
    nn.init.zeros_(next(network.parameters()))
    assert torch.equal(fast(x), expected)
