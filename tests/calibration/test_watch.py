"""The next training call is looked at once, changes of steps and inputs are reported once, long blocks end in time."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torchboost.algorithms import Compile
from torchboost.calibration.watch import Gate, StepWatch, TimeUp, entries_in, is_training_call, time_limit
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
    """The entries of the training call that a gate has let through."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gate = Gate(model, self.meet)

    def meet(self, call: Any) -> bool:
        if not is_training_call(self.model, call):
            return False
        self.append(entries_in(call))
        return True


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small()


def test_one_training_call_is_counted_and_nothing_is_left(model: Small):
    keys, expected = set(vars(model)), model(X)
    seen = Counter(model)
    assert torch.equal(model(X), expected)
    assert seen == [6]
    assert set(vars(model)) == keys
    model(X)
    assert seen == [6]


def test_the_hooks_of_the_model_run_once(model: Small):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    seen = Counter(model)
    model(X)
    model.eval()(X)
    assert (len(calls), seen) == (2, [6])


def test_entries_are_those_of_all_tensors_in_the_arguments():
    assert entries_in(((X, [torch.ones(4)], 7), {"mask": {"a": torch.ones(2, 2)}, "flag": None})) == 14


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


OTHER_CALLS = [without_training, jit_trace, jit_script, export, symbolic_trace, compile_it, copies]
OTHER_CALLS += [inside_checkpoint, functional, mapped]


@pytest.mark.parametrize("use", OTHER_CALLS, ids=lambda use: use.__name__)
def test_other_uses_of_the_model_are_not_counted_and_do_what_they_did(model: Net, use: Callable[[Small], None]):
    seen = Counter(model)
    use(model)
    assert seen == []
    assert interceptor_of(model) is seen.gate
    model(X)
    assert seen == [6]


@pytest.mark.parametrize("sequential", [False, True], ids=["own forward", "Sequential"])
def test_a_compiled_model_stays_compiled_without_another_graph(model: Net, sequential: bool):
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
    assert seen == [6]
    assert vars(network)["_compiled_call_impl"] is call
    assert compiled_graphs() == graphs
    again = Counter(network)
    attached.remove()
    assert compiled_call(network) is None
    network(X)
    assert again == [6]
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
    assert seen == [10]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[torch.optim.Optimizer, Clock, list[str], StepWatch]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock, reports = Clock(), []
    return optimizer, clock, reports, StepWatch(model, optimizer, reports.append, read=clock)


def run(optimizer: torch.optim.Optimizer, clock: Clock, seconds: float, steps: int, noise: float = 0.0) -> None:
    generator = random.Random(0)
    for _ in range(steps):
        clock.now += seconds * generator.lognormvariate(0, noise)
        optimizer.step()


def test_slower_steps_are_reported_once():
    optimizer, clock, reports, _ = watched()
    run(optimizer, clock, 5.0, 6)  # compilation
    run(optimizer, clock, 0.1, 200)
    run(optimizer, clock, 0.2, 400)
    run(optimizer, clock, 0.4, 400)
    assert reports == ["a step takes 200.0 ms, after the trial it took 100.0 ms"]


def test_hooks_after_the_watch_run_in_the_step_that_it_reports():
    optimizer, clock, reports, watch = watched()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(len(reports)))
    run(optimizer, clock, 0.1, 60)
    run(optimizer, clock, 0.2, 200)
    assert len(seen) == 260
    assert seen[-1] == 1
    watch.remove()


def test_steps_that_are_as_fast_and_pauses_are_not_reported():
    for factor in (0.5, 1.0, 1.2):
        optimizer, clock, reports, _ = watched()
        run(optimizer, clock, 0.1, 100, noise=0.2)
        run(optimizer, clock, 0.1 * factor, 500, noise=0.2)
        assert reports == []
    optimizer, clock, reports, _ = watched()
    for _ in range(50):
        run(optimizer, clock, 0.1, 20)
        clock.now += 60
    run(optimizer, clock, 0.2, 60)  # one busy window
    run(optimizer, clock, 0.1, 200)
    assert reports == []


def test_a_removed_watch_sees_nothing():
    optimizer, clock, reports, watch = watched()
    run(optimizer, clock, 0.1, 100)
    watch.remove()
    run(optimizer, clock, 1.0, 300)
    assert reports == []
    assert not optimizer._optimizer_step_post_hooks


class Fed:
    """A model that is trained on inputs of given lengths, and watched."""

    def __init__(self, entries: int | None = 100) -> None:
        self.model = nn.Linear(1, 1)
        self.loop_model: Callable[[Tensor], Tensor] = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.clock, self.reports = Clock(), []
        self.watch = StepWatch(self.model, self.optimizer, self.reports.append, entries=entries, read=self.clock)

    def train(self, lengths: Iterable[int], seconds: float = 0.1) -> None:
        for length in lengths:
            self.clock.now += seconds
            self.loop_model(torch.ones(length, 1)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_inputs_of_another_size_are_reported_once_without_a_trace():
    fed = Fed()
    fed.train([100] * 200)
    fed.train([126] * 300)
    assert fed.reports == ["the inputs have 126 entries, at the trial 100"]
    assert interceptor_of(fed.model) is None
    fed.train([500] * 600, seconds=1.0)
    assert len(fed.reports) == 1
    fed.watch.remove()
    assert not fed.optimizer._optimizer_step_post_hooks


def test_smaller_inputs_are_reported():
    fed = Fed()
    fed.train([74] * 300)
    assert fed.reports == ["the inputs have 74 entries, at the trial 100"]


def padded(seed: int) -> list[int]:
    return random.Random(seed).choices([60, 80, 90, 100, 110, 120, 140], k=2000)


@pytest.mark.parametrize(
    "lengths",
    [
        *([75] * 600, [125] * 600, *map(padded, range(5))),
        [(60, 140)[(step // 50) % 2] for step in range(600)],
        *([20 if (step + start) % 51 == 0 else 100 for step in range(320)] for start in range(0, 51, 3)),
        *([20 if (step + start) % 10 == 0 else 100 for step in range(320)] for start in range(10)),
    ],
    ids=lambda lengths: str(lengths[:12]),
)
def test_sizes_as_before_padding_and_the_short_last_batch_of_an_epoch_are_not_reported(lengths):
    fed = Fed()
    fed.train(lengths)
    assert fed.reports == []


def test_an_unknown_size_is_that_of_the_first_inputs_that_are_counted():
    fed = Fed(entries=None)
    fed.train([40] * 200)
    fed.train([80] * 300)
    assert fed.reports == ["the inputs have 80 entries, before 40"]


def test_slower_steps_on_larger_inputs_are_one_report_that_gives_both():
    fed = Fed()
    fed.train([100] * 120)
    fed.train([300] * 600, seconds=0.3)
    assert fed.reports == [
        "a step takes 300.0 ms, after the trial it took 100.0 ms, and the inputs have 300 entries, at the trial 100"
    ]


def test_only_one_call_in_a_window_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    looks, look = [], Gate.__call__

    def counted(self: Gate, *args: Any) -> Any:
        looks.append(1)
        return look(self, *args)

    monkeypatch.setattr(Gate, "__call__", counted)
    fed = Fed()
    fed.train([100] * 505)
    assert len(looks) == 9


def test_removal_while_a_call_is_awaited_leaves_no_trace():
    fed = Fed()
    fed.train([100] * 55)
    assert interceptor_of(fed.model) is not None
    fed.watch.remove()
    assert "_compiled_call_impl" not in vars(fed.model)


class Net(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # code of the user, which the compiler does not skip
        return super().forward(input)


def test_a_model_that_the_loop_compiles_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    monkeypatch.setattr(nn, "Linear", Net)
    fed = Fed()
    fed.train([100])
    fed.loop_model = torch.compile(fed.model, backend="eager")
    fed.train([100] * 10)
    graphs = compiled_graphs()
    fed.train([100] * 300)
    assert compiled_graphs() == graphs
    assert interceptor_of(fed.model) is None


def test_inputs_are_counted_inside_ddp(one_rank: None):
    fed = Fed()
    fed.train([100] * 55)
    assert interceptor_of(fed.model) is not None
    fed.loop_model = DistributedDataParallel(fed.model)
    fed.train([300] * 300)
    assert fed.reports == ["the inputs have 300 entries, at the trial 100"]


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
