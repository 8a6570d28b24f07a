"""Files that were written once and are kept: every later version goes on from them with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.fixtures.optimizers.write import FOLDER, NAMES, STEPS, go_on, rate
from tests.support.optimizers import CASES, RULES

FILES = sorted(FOLDER.glob("*.pt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_old_file_goes_on_to_the_same_numbers(file):
    kept = torch.load(file, weights_only=True)
    params = [nn.Parameter(weight.clone()) for weight in kept["weights"]]
    optimizer = CASES[file.stem](params, lr=rate)
    optimizer.load_state_dict(kept["optimizer"])
    assert optimizer.param_groups[0]["updates"] == STEPS
    for got, want in zip(go_on(optimizer, params, range(STEPS, 2 * STEPS)), kept["expected"], strict=True):
        # Another processor may round the last bits differently.
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_every_rule_has_a_small_file():
    assert {file.stem for file in FILES} == set(NAMES)
    assert {file.stem.split("-")[0] for file in FILES} == set(RULES)
    assert all(file.stat().st_size < 8192 for file in FILES)
