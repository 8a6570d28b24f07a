"""Whole fine-tunings, tiny: each host trains in each way, a run is kept, and what is missing is trained."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchboost.workloads.data import Documents

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

fine_tunings = importlib.import_module("fine_tunings")
options = importlib.import_module("options")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def few_texts() -> Iterator[None]:
    """Train on a few padded texts, whose first word tells the class. The real ones take seconds to read."""
    ids = torch.randint(1, 40, (160, 16), generator=torch.Generator().manual_seed(0))
    ids[torch.arange(16) >= torch.arange(160)[:, None] % 12 + 2] = 0
    labels = ids[:, 0] % 4
    parts = {"train_inputs": ids[:96], "train_labels": labels[:96], "test_inputs": ids[96:], "test_labels": labels[96:]}
    texts = Documents(**parts, words=tuple(map(str, range(40))), classes=tuple("abcd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tunings, "docstrings", lambda: texts)
        fine_tunings.job.cache_clear()
        yield
    fine_tunings.job.cache_clear()


@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("host", fine_tunings.HOSTS)
def test_every_way_is_trained_in_every_host_and_continues(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fine_tunings, "SETTLED", 2)
    smoke = options.Options(out=tmp_path, smoke=True)
    path = fine_tunings.measure(host, smoke)
    result = json.loads(path.read_text())
    ways, tiny = fine_tunings.HOSTS[host][1], fine_tunings.TINY
    assert {(run["way"], run["seed"]) for run in result["runs"]} == {(way, seed) for way in ways for seed in (0, 1)}
    for run in result["runs"]:
        assert len(run["times"]) == tiny.steps
        assert run["seconds"] == pytest.approx(sum(run["times"]), abs=1e-3)
        assert 0 < run["accuracy"] < 1
        if run["way"] == "O1":
            assert run["checks"]["unpad"].startswith("exact here"), run
    lines = fine_tunings.lines_of(host, result)
    assert [line[1] for line in lines] == list(ways)
    gone = result["runs"].pop()
    path.write_text(json.dumps(result))
    fine_tunings.measure(host, replace(smoke, resume=True))
    again = json.loads(path.read_text())["runs"]
    assert again[:-1] == result["runs"]
    assert (again[-1]["way"], again[-1]["seed"]) == (gone["way"], gone["seed"])
    result["batch"] += 1
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="leave out --resume"):
        fine_tunings.measure(host, replace(smoke, resume=True))
