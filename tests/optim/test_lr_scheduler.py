from __future__ import annotations

import torch

from torchboost import optim
from torchboost.optim.learning_rates import ScheduleLR


def test_the_name_of_torch_leads_to_torchs_schedulers_and_ours():
    assert optim.lr_scheduler.OneCycleLR is torch.optim.lr_scheduler.OneCycleLR
    assert optim.lr_scheduler.ScheduleLR is ScheduleLR
    assert set(torch.optim.lr_scheduler.__all__) < set(optim.lr_scheduler.__all__)
    assert all(hasattr(optim.lr_scheduler, name) for name in optim.lr_scheduler.__all__)
    assert "lr_scheduler" in dir(optim)
