"""The rule of the scale against a state machine written independently, and the alarm."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchboost.algorithms.loss_scale_group.rule import Alarm, ScaleRule
from torchboost.errors import ScaleCollapseWarning

RULES = st.builds(
    dict,
    growth=st.sampled_from([1.0, 2.0, 4.0, 2 ** (1 / 1000)]),
    shrink=st.sampled_from([0.5, 0.25, 2**-0.5]),
    window=st.integers(1, 5),
    floor=st.sampled_from([2.0**-20, 1.0]),
    ceiling=st.sampled_from([2.0**16, 2.0**30]),
    hysteresis=st.integers(1, 3),
)


def reference(rule: dict, scale: float, script: list[bool]) -> list[float]:
    """The history of overflows looked at anew at each step, without any state but the scale."""
    scales = []
    for now in range(len(script)):
        if script[now]:
            # Overflows since the last clean window are forgiven up to the hysteresis.
            past, run = 0, 0
            for overflow in script[: now + 1]:
                past, run = (past + 1, 0) if overflow else (past, run + 1)
                if run == rule["window"]:
                    past, run = 0, 0
            if past >= rule["hysteresis"]:
                scale = max(scale * rule["shrink"], rule["floor"])
        else:
            run = 0
            while run <= now and not script[now - run]:
                run += 1
            if run % rule["window"] == 0:
                scale = min(scale * rule["growth"], rule["ceiling"])
        scales.append(scale)
    return scales


SCRIPTS = (RULES, st.sampled_from([1.0, 1024.0, 2.0**16]), st.lists(st.booleans(), min_size=1, max_size=25))


def check_script(options: dict, scale: float, script: list[bool]) -> None:
    rule = ScaleRule(**options)
    state, found = rule.start(scale), []
    for overflow in script:
        state = rule.after(state, overflow)
        found.append(state.scale)
    assert found == reference(options, scale, script)
    assert all(rule.floor <= s <= rule.ceiling for s in found)


@settings(max_examples=500)
@given(*SCRIPTS)
def test_random_scripts_equal_the_reference_and_stay_within_bounds(options, scale, script):
    check_script(options, scale, script)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(*SCRIPTS)
def test_ten_thousand_random_scripts(options, scale, script):
    check_script(options, scale, script)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"growth": 0.5}, "give 1 or more"),
        ({"shrink": 1.0}, "give less than 1"),
        ({"shrink": 0.0}, "above 0"),
        ({"window": 0}, "window: found 0; give an integer of 1 or more"),
        ({"hysteresis": True}, "hysteresis: found True"),
        ({"floor": 8.0, "ceiling": 4.0}, "the floor must not be above the ceiling"),
        ({"ceiling": 2.0**101}, r"between 2\*\*-100 and 2\*\*100"),
    ],
)
def test_settings_that_make_no_sense(options, text):
    with pytest.raises(ValueError, match=text):
        ScaleRule(**options)


def test_a_start_out_of_bounds():
    with pytest.raises(ValueError, match=r"init_scale: found 0.5; allowed are 1.0 \(floor\)"):
        ScaleRule().start(0.5)
    with pytest.raises(TypeError, match="init_scale"):
        ScaleRule().start("8")  # pyright: ignore[reportArgumentType]


def test_the_alarm_warns_once_while_the_scale_collapses_and_again_after_it_recovered():
    alarm = Alarm("the loss scale of group 'stem'", 2.0**16, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(1, 12):
            alarm.observe(2.0 ** (16 - k), True, "the gradient of stem.weight")
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "group 'stem' fell from 65536 to 256 (floor 1): 8 overflows in a row, 8 in all" in text
    assert "stem.weight" in text
    alarm.observe(2.0**10, False, None)
    with pytest.warns(ScaleCollapseWarning, match="1 overflows in a row, 12 in all"):
        alarm.observe(2.0**7, True, None)
    other = Alarm("x", 2.0**16, 1.0)
    other.load(alarm.state())
    assert other.state() == alarm.state()


def test_a_single_overflow_now_and_then_is_no_alarm():
    alarm = Alarm("the loss scale", 2.0**16, 1.0)
    for _ in range(50):
        alarm.observe(2.0**15, True, "w")
        alarm.observe(2.0**16, False, None)
    assert alarm.overflows == 50
