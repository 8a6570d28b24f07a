"""The elastic example, with ranks that are killed: torchrun starts it anew, and it ends with the same weights."""

from __future__ import annotations

import random
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.support.dying import SAID
from tests.support.ranks import run_ranks
from tests.support.torchrun import elastic, torchrun

EXAMPLE = ROOT / "examples" / "elastic_ddp.py"
DYING = ROOT / "tests" / "support" / "dying.py"
UPDATES, EVERY = 12, 4
pytestmark = pytest.mark.long


def _undisturbed(folder: Path) -> None:
    runpy.run_path(str(EXAMPLE))["train"](folder, UPDATES, EVERY)


def _drawn(seed: int) -> list[str]:
    """Draw three ends: after some update, in a write of a checkpoint, and after some update again."""
    draw = random.Random(seed)
    return [
        f"{draw.randrange(2)}:step:{draw.randint(1, UPDATES - EVERY)}",
        f"{draw.randrange(2)}:write:1",
        f"{draw.randrange(2)}:step:{draw.randint(1, EVERY)}",
    ]


def _check(folder: Path, plan: list[str], *, forked: bool) -> None:
    folder.mkdir(parents=True)
    run_ranks(_undisturbed, 2, folder / "undisturbed")
    (folder / "killed").mkdir()
    shutil.copy(folder / "undisturbed" / "plan.json", folder / "killed")  # both runs use the same levers
    words = (",".join(plan), EXAMPLE, folder / "killed", UPDATES, EVERY)
    if forked:
        said = elastic(DYING, *words, written=folder / "said.txt", restarts=len(plan))
    else:
        (said,) = torchrun(DYING, *words, restarts=len(plan))
    assert said.count(SAID) == len(plan), said
    # The agent may see first that the other rank lost its connection.
    assert len(re.findall(r"failed \(exitcode: (-9|1)\)", said)) == len(plan), said
    wanted, found = (torch.load(folder / name / "weights.pt") for name in ("undisturbed", "killed"))
    assert wanted.keys() == found.keys()
    for name, weights in wanted.items():
        assert torch.equal(weights, found[name]), f"{plan}: {name}\n{said}"
    left = sorted(path.name for path in (folder / "killed").iterdir())
    assert left == ["00000008", "00000012", "plan.json", "weights.pt"]


@pytest.mark.dist
def test_a_job_that_is_killed_while_it_writes_a_checkpoint_ends_with_the_weights_of_the_undisturbed_one(tmp_path):
    _check(tmp_path / "job", ["1:write:2"], forked=True)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_wherever_and_however_often_ranks_are_killed(seed, tmp_path):
    _check(tmp_path / "job", _drawn(seed), forked=False)
