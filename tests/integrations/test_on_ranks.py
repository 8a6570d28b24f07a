"""The trainers on two ranks. All of it is in one pair of processes, because each has to import the trainers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers.modeling_outputs import SequenceClassifierOutput

import torchboost.optim
import torchboost.registry
from tests.integrations.trainers import HALF, STEPS, WAYS, Lit, TwoRanks, forget_accelerator, lightning_of, loader, run
from tests.support.ranks import run_ranks
from tests.support.trainer_models import KINDS, Kind, differences
from tests.support.wrapped import all_weights
from torchboost import IncompatibleError
from torchboost.core.hardware import HalfPrecision
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.integrations.accelerate import prepare
from torchboost.integrations.lightning import Boost

pytestmark = pytest.mark.long


def has_removed(net: torch.nn.Module) -> bool:
    return any(isinstance(module, RemovedNorm) for module in net.modules())


RESUMED = [*((trainer, "resnet") for trainer in WAYS), ("lightning", "bert")]
"""What resumes: in each trainer the network in which most is on, and one in which a trial decides."""


def resumed_on_ranks(folder: str) -> list[Any]:
    """Train whole and resumed. The speed of bfloat16 is measured on each rank; here the ranks find different ones."""
    results = []
    measured = HalfPrecision(torch.distributed.get_rank() == 1, "found by this rank")
    for trainer, kind in RESUMED:
        calibrate = "1" if kind == "bert" else "0"
        forget_accelerator()
        first = Path(folder) / f"{trainer}-{kind}-{calibrate}"
        options = {} if trainer == "accelerate" else {"setting": "two ranks"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHBOOST_CALIBRATE", calibrate)
            if trainer == "lightning":
                patch.setattr(torchboost.registry, "half_precision", lambda *_: measured)
            whole = run(trainer, kind, first, **options)
            torch.distributed.barrier()
            resumed = run(trainer, kind, first / "resumed", resumed=first, **options)
        weights = float(sum(p.detach().double().abs().sum() for p in whole.net.parameters()))
        results.append((trainer, kind, differences(whole.net, resumed.net), has_removed(whole.net), weights))
    return results


class Sharded(Lit):
    """The same, sharded by FSDP2, with a rule that keeps moments."""

    def configure_model(self) -> None:
        for block in [module for module in self.net.modules() if type(module).__name__ == "BertLayer"]:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2) if self.momentum else super().configure_optimizers()


def fit_sharded(
    name: str, momentum: float, folder: Path, *, whole: bool, level: str = "O1", resume: str | None = None
) -> list[float]:
    config = {"extra": {"less_bn": {}, "grad_freeze": {"pattern": "progressive"}}} if level == "O1" else None
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole)
    settings = {"strategy": strategy, "devices": 2, "plugins": [TwoRanks()], "use_distributed_sampler": False}
    boost, module = Boost(level or "O0", module="net", config=config), Sharded(KINDS[name].seeded(), momentum=momentum)
    lightning_of(folder, *([boost] if level else []), **settings).fit(module, loader(KINDS[name]), ckpt_path=resume)
    if level == "O1":
        assert "grad_freeze" in {algorithm.name for algorithm in boost.plan.algorithms}
        assert any(isinstance(m, RemovedNorm) for m in module.modules()) == (name == "resnet")
    return all_weights(module)


def sharded_in_lightning(folder: str) -> list[bool]:
    """Whole and resumed with moments, without and in one file; level O0 against Lightning alone."""
    results = []
    for number, (name, momentum, whole) in enumerate(
        (("bert", 0.9, False), ("bert", 0.0, False), ("bert", 0.9, True), ("resnet", 0.9, False))
    ):
        first = Path(folder) / str(number)
        uninterrupted = fit_sharded(name, momentum, first, whole=whole)
        torch.distributed.barrier()
        checkpoint = str(first / f"step={STEPS // 2}.ckpt")
        resumed = fit_sharded(name, momentum, first / "resumed", whole=whole, resume=checkpoint)
        results.append(uninterrupted == resumed)
    boosted, alone = (
        fit_sharded("bert", 0.9, Path(folder) / f"level{level}", whole=False, level=level) for level in ("O0", "")
    )
    settings = {"strategy": ModelParallelStrategy(1, 2), "devices": 2, "plugins": [TwoRanks()]}
    with pytest.raises(IncompatibleError, match="tensor parallelism"):
        lightning_of(Path(), Boost("O1"), **settings).fit(Sharded(KINDS["bert"].seeded()), loader(KINDS["bert"]))
    return [*results, boosted == alone]


class ConvNet(nn.Module):
    """A network with BatchNorms for the images of ``KINDS``, since Accelerate shards no ResNet of transformers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [[nn.Conv2d(w, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()] for w in (3, 16, 16, 16)]
        self.blocks = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
        self.head = nn.Linear(16 * 4, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        loss = F.cross_entropy(self.head(self.blocks(pixel_values).flatten(1)), labels)
        return SequenceClassifierOutput(loss=loss)  # pyright: ignore[reportArgumentType]


def freezing(**less_bn: int) -> dict[str, Any]:
    return {"extra": {"grad_freeze": {"pattern": "progressive"}, **({"less_bn": less_bn} if less_bn else {})}}


SHARDED = {
    "bert": ("BertLayer", KINDS["bert"]._replace(config=freezing())),
    "conv": (
        "Sequential",
        Kind(ConvNet, KINDS["resnet"].data, freezing(keep_every=2)),
    ),
    "kept": (
        "Sequential",
        Kind(ConvNet, KINDS["resnet"].data, freezing(keep_every=1)),
    ),
}


def fsdp2(wrapped: str, **options: Any) -> FullyShardedDataParallelPlugin:
    """Return a plugin, after Accelerate, which shards nothing on a CPU, was told that this is none."""
    forget_accelerator()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    policy: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [wrapped]}
    return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **policy, **options})


def train_sharded(
    name: str,
    folder: str = "",
    *,
    resume: str = "",
    back: str = "",
    rule: str = "adamw",
    level: str = "O1",
    tried: bool = False,
) -> list[float]:
    """Train for eight updates, save after four, resume from there, or go back to there; return all weights."""
    wrapped, kind = SHARDED[name]
    accelerator, model = Accelerator(fsdp_plugin=fsdp2(wrapped)), kind.seeded()
    parts: Any = (model, RULES[rule](model.parameters()), DataLoader(kind.data(), 4))
    if level:
        config = kind.config if level != "O0" else None
        settings = {"level": level, "total_steps": STEPS, "config": config, "calibrate": 1.0 if tried else "auto"}
        *parts, boosted = prepare(accelerator, *parts, **settings)
        assert ("grad_freeze" in boosted.attached) == (level != "O0")
        assert any(isinstance(m, RemovedNorm) for m in model.modules()) == (name == "conv")
        assert ("found nothing to change" in boosted.explain()) == (name == "kept")
    else:
        parts = accelerator.prepare(*parts)
    model, optimizer, loader = parts
    if resume:
        accelerator.load_state(resume)
    batches, done = [batch for _ in range(2) for batch in loader], HALF if resume else 0
    while done < STEPS:
        accelerator.backward(model(**batches[done]).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == HALF and folder:
            accelerator.save_state(folder)
        if done == STEPS - 1 and back:
            assert not all(p.requires_grad for p in model.parameters())
            accelerator.load_state(back)
            done, back = HALF, ""
    assert not tried or boosted.choice.source == ("checkpoint" if resume else "trial")
    return all_weights(model)


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "stateless": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "ours": partial(torchboost.optim.AdamW, lr=1e-2),
}


def sharded_in_accelerate(folder: str) -> list[bool]:
    """Every rule resumes exactly, also going back in the same run; a trial is not repeated; O0 changes nothing."""
    results = []
    for name, rule in (*(("bert", rule) for rule in RULES), ("conv", "adamw"), ("kept", "adamw")):
        saved = f"{folder}/{name}-{rule}"
        whole = train_sharded(name, saved, rule=rule)
        assert all(map(math.isfinite, whole))
        assert rule != "ours" or whole == train_sharded(name, rule=rule), "a checkpoint changes nothing"
        results.append(whole == train_sharded(name, resume=saved, rule=rule))
        if (name, rule) in (("bert", "adamw"), ("bert", "stateless"), ("conv", "adamw")):
            results.append(whole == train_sharded(name, back=saved, rule=rule))
    tried = train_sharded("bert", f"{folder}/tried", tried=True)
    results.append(tried == train_sharded("bert", resume=f"{folder}/tried", tried=True))
    results.append(train_sharded("bert", level="O0") == train_sharded("bert", level=""))
    return results


def everything(folder: Path) -> dict[str, Any]:
    return {
        "resumed": resumed_on_ranks(str(folder / "resumed")),
        "lightning": sharded_in_lightning(str(folder / "lightning")),
        "accelerate": sharded_in_accelerate(str(folder / "accelerate")),  # the last: it sets environment variables
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("ranks"), timeout=600.0)


@pytest.mark.dist
def test_a_resumed_run_on_two_ranks_equals_the_uninterrupted_one(two: list[dict[str, Any]]):
    first, second = (answer["resumed"] for answer in two)
    assert first == second
    for trainer, kind, different, removed, _ in first:
        assert (different, removed) == ({}, kind == "resnet"), trainer


@pytest.mark.dist
def test_a_resumed_run_under_fsdp2_equals_the_uninterrupted_one(two: list[dict[str, Any]]):
    assert [(answer["lightning"], answer["accelerate"]) for answer in two] == [([True] * 5, [True] * 11)] * 2


@pytest.mark.usefixtures("one_accelerator")
def test_fsdp1_and_full_state_dicts_are_refused_unchanged():
    model = KINDS["bert"].seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for options, said in (({"fsdp_version": 1}, "FSDP"), ({"state_dict_type": "FULL_STATE_DICT"}, "loses the moments")):
        accelerator = Accelerator(fsdp_plugin=fsdp2("BertLayer", **options))
        with pytest.raises(IncompatibleError, match=said):
            prepare(accelerator, model, optimizer)


@pytest.mark.usefixtures("one_accelerator")
def test_fsdp2_takes_no_built_optimizer():
    accelerator = Accelerator(fsdp_plugin=fsdp2("BertLayer"))
    model = KINDS["bert"].seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(IncompatibleError, match=r"recipe.optimizer='muon' and FSDP2.*muon_from"):
        prepare(accelerator, model, optimizer, total_steps=STEPS, config={"recipe": {"optimizer": "muon"}})
