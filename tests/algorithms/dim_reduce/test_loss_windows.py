import pytest

from torchboost.algorithms.dim_reduce.loss_windows import LossWindows


def test_compares_each_window_with_the_one_before():
    windows = LossWindows()
    full = [windows.add(loss, 2) for loss in (4.0, 2.0, 2.0, 1.0)]
    assert full == [False, False, False, True]
    assert windows.gain() == pytest.approx(0.5)
    assert [windows.add(loss, 2) for loss in (3.0, 3.0)] == [False, True]
    assert windows.gain() == pytest.approx(-1.0)


def test_a_loss_below_zero_gains_when_it_falls():
    windows = LossWindows()
    assert [windows.add(loss, 1) for loss in (-1.0, -2.0)] == [False, True]
    assert windows.gain() == pytest.approx(1.0)


def test_goes_on_from_a_checkpoint():
    windows, again = LossWindows(), LossWindows()
    for loss in (4.0, 2.0, 2.0):
        windows.add(loss, 2)
    again.load_state_dict(windows.state_dict())
    assert again.add(1.0, 2)
    assert windows.add(1.0, 2)
    assert again.gain() == windows.gain()
