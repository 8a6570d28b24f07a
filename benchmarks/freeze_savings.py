"""Claim: freezing a prefix saves at least 85 % of the time that the skipped operations take, in eager PyTorch.

The bound is written by hand: the prefix runs under ``no_grad``, and a separate network trains on its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

import torch
from options import Options, as_contestant, parameters_of, parser, run, save_steps
from torch import Tensor, nn

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze, freeze_blocks
from torchboost.graph.blocks import blocks_of
from torchboost.measure.evidence import AlgorithmRow, Contestant
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Comparison, compare
from torchboost.workloads.models import GPT, ResNet
from torchboost.workloads.named import Workload, find_workload

SHARES = (25, 50, 75)
JOBS = ("cifar10-resnet-bottleneck", "text-gpt")
BATCHES = 8

Step = Callable[[], object]


class Halves(nn.Module):
    """A network that is cut before one of its blocks."""

    def __init__(self, network: nn.Module, share: int) -> None:
        super().__init__()
        self.network = network
        self.blocks: list[nn.Module]
        if isinstance(network, ResNet):
            self.blocks = [block for stage in network.stages for block in stage]  # pyright: ignore
        else:
            assert isinstance(network, GPT)
            self.blocks = list(network.blocks)
        self.cut = len(self.blocks) * share // 100

    def front(self, inputs: Tensor) -> Tensor:
        network = self.network
        if isinstance(network, ResNet):
            x = network.stem(inputs)
        else:
            assert isinstance(network, GPT)
            x = network.tokens(inputs) + network.positions(torch.arange(inputs.shape[1], device=inputs.device))
        return self._through(x, self.blocks[: self.cut])

    def back(self, x: Tensor) -> Tensor:
        x, network = self._through(x, self.blocks[self.cut :]), self.network
        if isinstance(network, ResNet):
            return network.fc(network.pool(x).flatten(1))
        assert isinstance(network, GPT)
        return network.head(network.norm(x))

    def trained(self) -> list[nn.Parameter]:
        network = self.network
        rest = [network.fc] if isinstance(network, ResNet) else [network.norm, network.head]
        return [p for module in chain(self.blocks[self.cut :], rest) for p in module.parameters()]  # pyright: ignore

    def _through(self, x: Tensor, blocks: Iterable[nn.Module]) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


def whole(job: Workload, network: nn.Module, supply: Callable[[], tuple[Tensor, Tensor]], frozen: int = 0) -> Step:
    optimizer = job.optimizer(network.parameters())
    if frozen:
        count = len(blocks_of(network))
        freeze_blocks(network, optimizer, GradFreeze(pattern="fixed", groups=count, frozen=frozen))

    def step() -> None:
        inputs, targets = supply()
        job.loss(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bound(job: Workload, halves: Halves, supply: Callable[[], tuple[Tensor, Tensor]]) -> Step:
    optimizer = job.optimizer(halves.trained())

    def step() -> None:
        inputs, targets = supply()
        with torch.no_grad():
            x = halves.front(inputs)
        job.loss(halves.back(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def frozen_blocks(network: nn.Module, share: int) -> int:
    """The blocks up to the cut, including the stem or the embeddings."""
    return Halves(network, share).cut + 1


def stored_bytes(network: nn.Module, job: Workload, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, without parameters. Each storage counts once."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = job.loss(network(batch[0]), batch[1])
    del loss
    return sum(seen.values())


def measure(options: Options) -> list[Path]:
    return [measure_job(find_workload(name), options) for name in JOBS]


def measure_job(job: Workload, options: Options) -> Path:
    data = job.load(options.path_for(job.name), BATCHES * job.batch)
    batches = list(islice(data.train(job.batch, seed=0, epoch=0), BATCHES))
    fresh = partial(job.model, data, 0)
    steps: dict[str, Step] = {"stock": whole(job, fresh(), cycle(batches).__next__)}
    for share in SHARES:
        supply = cycle(batches).__next__
        steps[f"frozen {share} %"] = whole(job, network := fresh(), supply, frozen_blocks(network, share))
        steps[f"bound {share} %"] = bound(job, Halves(fresh(), share), cycle(batches).__next__)
    found = compare(steps, baselines=["stock"], pairs=2 if options.smoke else 40, progress=options.progress)
    memory = {0: stored_bytes(fresh(), job, batches[0])}
    for share in SHARES:
        network = fresh()
        settings = GradFreeze(pattern="fixed", groups=len(blocks_of(network)), frozen=frozen_blocks(network, share))
        freeze_blocks(network, job.optimizer(network.parameters()), settings)
        memory[share] = stored_bytes(network, job, batches[0])
    return save_steps(
        options.file("freeze_savings", job.name),
        [contestant(name, found, memory) for name in steps],
        title=f"Time saved by freezing: {job.title}, {job.model_name}",
        model=job.model_name,
        parameters=parameters_of(fresh()),
        batch=job.batch,
        notes=["eager float32; the bound is the same prefix under no_grad and the rest as a network of its own"],
    )


def contestant(name: str, found: Comparison, memory: dict[int, int]) -> Contestant:
    way, _, share = name.rstrip(" %").partition(" ")
    notes, rows = [], []
    if way == "frozen":
        rows = [AlgorithmRow(name="grad_freeze", settings=f"the first {share} % of the blocks")]
        stock, limit = found.samples["stock"], found.samples[f"bound {share} %"]
        times = zip(stock, found.samples[name], limit, strict=True)
        reached = bootstrap_median([100 * (full - own) / (full - least) for full, own, least in times])
        notes = [
            f"{reached.mid:.0f} % of the time between stock and bound saved (95 %: {reached.low:.0f} to "
            f"{reached.high:.0f}); {memory[int(share)] / 2**20:.1f} of {memory[0] / 2**20:.1f} MiB stored for backward"
        ]
    kind = {"stock": "stock", "bound": "hand"}.get(way, "algorithm")
    return as_contestant(found, name, kind, algorithms=rows, notes=notes)


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
