"""The next training call is looked at once, long blocks end in time."""

from __future__ import annotations

import contextlib
import copy
import io
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchboost.algorithms import Compile
from torchboost.calibration.watch import Gate, TimeUp, is_training_call, time_limit
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.torch_private import compiled_call, compiled_graphs, interceptor_of

needs_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no SIGALRM")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


X = torch.ones(2, 3)


class Counter(list[int]):
    """The rows of the training call that a gate has let through."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gate = Gate(model, self.meet)

    def meet(self, call: Any) -> bool:
        if not is_training_call(self.model, call):
            return False
        self.append(len(call[0][0]))
        return True


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small()


def test_one_training_call_is_counted_and_nothing_is_left(model: Small):
    keys, expected = set(vars(model)), model(X)
    seen = Counter(model)
    assert torch.equal(model(X), expected)
    assert seen == [2]
    assert set(vars(model)) == keys
    model(X)
    assert seen == [2]


def test_the_hooks_of_the_model_run_once(model: Small):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    seen = Counter(model)
    model(X)
    model.eval()(X)
    assert (len(calls), seen) == (2, [2])


def without_training(model: Small) -> None:
    with torch.no_grad():
        model(X)
    model.eval()(X)
    model.train()


def jit_trace(model: Small) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        torch.jit.trace(model, X)


def jit_script(model: Small) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        assert torch.equal(torch.jit.script(model)(X), model.eval()(X))
    model.train()


def export(model: Small) -> None:
    torch.export.export(model, (X,))


def symbolic_trace(model: Small) -> None:
    assert torch.equal(torch.fx.symbolic_trace(model).eval()(X), model.eval()(X))
    model.train()


def compile_it(model: Small) -> None:
    torch.compile(model, backend="eager", fullgraph=True)(X)


def copies(model: Small) -> None:
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert interceptor_of(other) is None
        other(X)


def inside_checkpoint(model: Small) -> None:
    checkpoint(model, X, use_reentrant=False).sum().backward()


def functional(model: Small) -> None:
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.func.functional_call(model, values, (X,))
    torch.func.grad(lambda values: torch.func.functional_call(model, values, (X,)).sum())(values)


def mapped(model: Small) -> None:
    torch.func.vmap(lambda factor: factor * model(X), randomness="same")(torch.ones(2))


def replicas(model: Small) -> None:
    replica: Any = model._replicate_for_data_parallel()
    replica.linear = nn.Linear(3, 3)
    assert torch.equal(replica(X), replica.linear(X).relu())


OTHER_CALLS = [without_training, jit_trace, jit_script, export, symbolic_trace, compile_it, copies]
OTHER_CALLS += [inside_checkpoint, functional, mapped, replicas]


@pytest.mark.parametrize("use", OTHER_CALLS, ids=lambda use: use.__name__)
def test_other_uses_of_the_model_are_not_counted_and_do_what_they_did(model: Small, use: Callable[[Small], None]):
    seen = Counter(model)
    use(model)
    assert seen == []
    assert interceptor_of(model) is seen.gate
    model(X)
    assert seen == [2]


def test_replicas_of_a_compiled_model_run_eagerly_with_their_own_weights(model: Small):
    model.compile(backend="eager")
    seen = Counter(model)
    replicas(model)
    assert seen == []


@pytest.mark.parametrize("sequential", [False, True], ids=["own forward", "Sequential"])
def test_a_compiled_model_stays_compiled_without_another_graph(model: Small, sequential: bool):
    network = nn.Sequential(model, nn.ReLU()) if sequential else model
    attached = attach_all(Target(network, torch.optim.SGD(network.parameters(), lr=0.1)), [Compile(backend="eager")])
    network(X)
    with torch.no_grad():
        network(X)
    call, graphs = vars(network)["_compiled_call_impl"], compiled_graphs()
    seen = Counter(network)
    assert compiled_call(network) is call
    with torch.no_grad():
        network(X)
    network(X)
    assert seen == [2]
    assert vars(network)["_compiled_call_impl"] is call
    assert compiled_graphs() == graphs
    again = Counter(network)
    attached.remove()
    assert compiled_call(network) is None
    network(X)
    assert again == [2]
    assert compiled_graphs() == graphs
    assert "_compiled_call_impl" not in vars(network)


def test_removal_puts_back_only_its_own_place(model: Small):
    waiting = (counter := Counter(model)).gate
    model.compile(backend="eager")
    call = compiled_call(model)
    waiting.remove()
    assert compiled_call(model) is call
    waiting = (counter := Counter(model)).gate
    waiting.remove()
    waiting.remove()
    assert compiled_call(model) is call
    assert counter == []


def test_a_call_that_raises_leaves_nothing(model: Small):
    seen = Counter(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))
    assert interceptor_of(model) is None
    assert seen == [2]


def is_as_before() -> bool:
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@needs_alarm
def test_a_block_that_takes_too_long_is_interrupted_even_if_it_catches_exceptions():
    def stubborn() -> None:
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    with pytest.raises(TimeUp), time_limit(0.02):
        stubborn()
    assert is_as_before()


@needs_alarm
@pytest.mark.parametrize("nested", [False, True])
def test_what_an_interrupted_block_switched_in_torch_is_as_before(nested: bool):
    def switch() -> None:
        """Leave what a context manager has switched when the alarm comes between its lines."""
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", not nested)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.autocast_increment_nesting()
        while True:
            time.sleep(60)

    with torch.autocast("cpu", torch.bfloat16) if nested else contextlib.nullcontext():
        with pytest.raises(TimeUp), time_limit(0.02):
            switch()
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") == nested
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        weight = torch.nn.Parameter(torch.ones(2, 2))
        with torch.autocast("cpu", torch.bfloat16):
            weight @ weight
        with torch.no_grad():
            weight.zero_()
    # Casts of weights are kept until the outermost context ends; one level too many, and they would be used for ever.
    with torch.autocast("cpu", torch.bfloat16):
        assert not (weight @ weight).any()


@needs_alarm
def test_a_block_in_time_is_not_disturbed_and_its_error_passes():
    with time_limit(60):
        pass
    assert is_as_before()
    with pytest.raises(ZeroDivisionError), time_limit(60):
        _ = 1 / 0
    assert is_as_before()


@needs_alarm
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_user_on_its_way_out_of_a_block_is_not_lost(stop: type[BaseException]):
    def slowly_stopped() -> None:
        try:
            raise stop
        finally:
            time.sleep(0.1)

    with pytest.raises(stop), contextlib.suppress(TimeUp), time_limit(0.02):
        slowly_stopped()
    try:
        raise stop
    except stop:  # one that the program handles is not raised again
        with pytest.raises(TimeUp), time_limit(0.02):
            time.sleep(0.1)


@needs_alarm
def test_an_alarm_of_the_program_stays():
    rang = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: rang.set())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with time_limit(0.001):
            assert rang.wait(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@needs_alarm
def test_other_threads_are_not_limited():
    done = threading.Event()

    def work() -> None:
        with time_limit(0.001):
            time.sleep(0.05)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert done.is_set()
    assert is_as_before()


class Endless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(60)
        return gradients[0]


@needs_alarm
def test_a_backward_pass_that_is_interrupted_while_it_is_traced_is_not_called_an_error():
    """Compilers trace a backward pass under the detection of anomalies, which names the function that raised."""
    inputs = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=False), pytest.raises(TimeUp), time_limit(0.02):
            Endless.apply(inputs).sum().backward()
    assert not [one for one in warned if "Error detected" in str(one.message)]


@needs_alarm
def test_a_warning_is_shown_once_however_many_blocks_have_a_limit():
    """Python forgets which warnings it has shown when its filters change, and each step of a trial is such a block."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(3):
            with time_limit(60):
                warnings.warn("of the user", stacklevel=1)
    assert len(warned) == 1


@needs_alarm
def test_an_interrupt_leaves_the_filters_of_warnings_as_they_were():
    before = list(warnings.filters)
    with pytest.raises(TimeUp), time_limit(0.01):
        time.sleep(60)
    assert list(warnings.filters) == before
