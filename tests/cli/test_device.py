from __future__ import annotations

import pytest
import torch

from torchboost.cli.device import usable_device


def test_a_device_that_is_here():
    assert usable_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_other_devices_are_refused_in_one_line(device):
    with pytest.raises(ValueError, match=f"--device: '{device}' cannot be used here: ") as caught:
        usable_device(device)
    assert "\n" not in str(caught.value)
