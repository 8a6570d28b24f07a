"""A block that takes too long is interrupted; signals stay as they were."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
import torch

from torchboost.calibration.watch import TimeUp, time_limit

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no SIGALRM")


def is_as_before() -> bool:
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


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


def test_a_block_in_time_is_not_disturbed():
    with time_limit(60):
        pass
    assert is_as_before()


def test_an_error_of_the_block_passes():
    with pytest.raises(ZeroDivisionError), time_limit(60):
        _ = 1 / 0
    assert is_as_before()


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
