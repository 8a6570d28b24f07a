"""Checkpoints of dimension-reduced training that come from elsewhere: from before, from other files, from a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.algorithms.dim_reduce.test_algorithm import batch, checkpoints, network, start
from torchboost.algorithms import DimReduction


def test_a_checkpoint_of_the_version_before_goes_on() -> None:
    """Saved by commit 7a9cc5a while it collected, and in the subspace, with settings that are gone."""
    saved = torch.load(Path(__file__).parents[1] / "fixtures" / "dim_reduce.pt", weights_only=True)
    settings = DimReduction(n_components=2, snapshots=3, snapshot_every=2)
    for updates in (3, 8):
        model, step, run = start(settings, seed=5)
        for part, state in zip((model, run, step), saved[updates], strict=True):
            part.load_state_dict(state)
        assert (run.updates, run.phase) == (updates, "collect" if updates == 3 else "subspace")
        for number in range(updates, 12):
            step(*batch(number))
        assert run.phase == "subspace"
    state = copy.deepcopy(run.state_dict())
    state["front"]["phase"] = "full"
    with pytest.raises(ValueError, match=r"saved after the given optimizer had taken over again.*without dim_reduce"):
        run.load_state_dict(state)


def test_checkpoints_that_make_another_basis_are_refused_on_resume(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3)
    settings = DimReduction(n_components=2, weight_load_dir=str(tmp_path))
    _, step, run = start(settings)
    step(*batch(0))
    state = copy.deepcopy(run.state_dict())
    checkpoints(tmp_path, 5)
    _, _, other = start(settings)
    with pytest.raises(ValueError, match="or other directions"):
        other.load_state_dict(state)


@pytest.mark.gpu
def test_resumes_from_a_checkpoint_that_was_mapped_to_the_gpu(tmp_path: Path) -> None:
    settings = DimReduction(n_components=2, snapshots=3, snapshot_every=2)
    for saved_at in (4, 8):
        ends = []
        for broken in (False, True):
            model, step, run = start(settings, model=network().cuda())
            for number in range(10):
                if broken and number == saved_at:
                    torch.save((model.state_dict(), run.state_dict(), step.state_dict()), tmp_path / "state.pt")
                    loaded = torch.load(tmp_path / "state.pt", map_location="cuda:0", weights_only=True)
                    model, step, run = start(settings, seed=5, model=network(5).cuda())
                    model.load_state_dict(loaded[0])
                    run.load_state_dict(loaded[1])
                    step.load_state_dict(loaded[2])
                x, y = batch(number)
                step(x.cuda(), y.cuda())
            assert run.phase == "subspace"
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert torch.equal(*ends)
