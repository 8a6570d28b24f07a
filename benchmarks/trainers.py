"""Claim: what a level gains in the user's own loop arrives inside the trainers, within five percent.

The contestants are the loop, ``transformers.Trainer``, Lightning's ``Trainer`` and a loop with Accelerate, each alone
and boosted. Each trains in a thread of its own, which waits at the end of each step, so that steps are timed in turns.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

from options import Options, as_contestant, parameters_of, parser, run, save_steps
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from zoo_networks import TINY, ZOO, Batch, Network, Training

from torchboost import boost
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant, Interval
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Comparison, Warmup, compare

LEVEL = "O1"
NETWORKS = ("resnet", "bert", "gpt2")
PAIRS = 30
PLANNED_STEPS = 100_000
CONFIG = {"extra": {"grad_freeze": False}}
"""Freezing trains a part of the model only, so its gain changes during a run."""
LOOP = "loop"

Pause = Callable[[], bool]
"""Called at the end of each step; returns whether to continue."""


class Turns:
    """One training in a thread of its own, of which each call runs one step.

    Args:
        train: Trains, and calls what it is given after each step until this returns False.
    """

    def __init__(self, train: Callable[[Pause], object]) -> None:
        self._train = train
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._over, self._error = False, None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the training."""
        self._over = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._train(self._pause)
        except Exception as error:
            self._error = error
        finally:
            self._done.release()

    def _pause(self) -> bool:
        self._done.release()
        self._go.acquire()
        return not self._over


class WithLoss(nn.Module):
    """A network that computes its loss from one batch, as trainers call it."""

    accepts_loss_kwargs = False

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.network, self._loss = training.model, training.loss

    def forward(self, inputs: tuple[Tensor, ...], named: dict[str, Tensor], target: Tensor | None) -> dict[str, Tensor]:
        return {"loss": self._loss(self.network(*inputs, **named), Batch(target=target))}


class Batches(Dataset):
    """The batches of a training in turn, over and over."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return PLANNED_STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self._batches[index % len(self._batches)]
        return {"inputs": batch.args, "named": batch.kwargs, "target": batch.target}


def loop(network: Network, level: str | None, pause: Pause) -> None:
    training = network.training()
    model, optimizer = WithLoss(training), training.optimizer
    if level is not None:
        boost(model, optimizer, level=level, total_steps=PLANNED_STEPS, config=CONFIG)
    for index in itertools.count():
        model(**Batches(training.batches)[index])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if not pause():
            return


def transformers(network: Network, level: str | None, pause: Pause) -> None:
    import transformers as package

    from torchboost.integrations.transformers import BoostTrainer

    class Pausing(package.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not pause()

    training = network.training()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        same = {"max_steps": PLANNED_STEPS, "per_device_train_batch_size": 1, "max_grad_norm": 0.0, "use_cpu": True}
        args = package.TrainingArguments(folder, remove_unused_columns=False, **quiet, **same)
        given = {
            "train_dataset": Batches(training.batches),
            "data_collator": lambda rows: rows[0],
            "optimizers": (training.optimizer, LambdaLR(training.optimizer, lambda step: 1.0)),
            "callbacks": [Pausing()],
        }
        model = WithLoss(training)
        if level is None:
            package.Trainer(model, args, **given).train()
        else:
            BoostTrainer(model, args, boost=level, boost_config=CONFIG, **given).train()


def lightning(network: Network, level: str | None, pause: Pause) -> None:
    import lightning.pytorch as package

    from torchboost.integrations.lightning import Boost

    class Pausing(package.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = not pause()

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = WithLoss(training)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return training.optimizer

    training = network.training()
    callbacks = [*([Boost(level, config=CONFIG)] if level is not None else []), Pausing()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = package.Trainer(
        max_steps=PLANNED_STEPS, accelerator="cpu", callbacks=callbacks, enable_checkpointing=False, **quiet
    )
    trainer.fit(Module(), DataLoader(Batches(training.batches), batch_size=None))


def accelerate(network: Network, level: str | None, pause: Pause) -> None:
    import accelerate as package

    from torchboost.integrations.accelerate import prepare

    training = network.training()
    accelerator = package.Accelerator(cpu=True)
    pair = (WithLoss(training), training.optimizer)
    if level is None:
        model, optimizer = accelerator.prepare(*pair)
    else:
        model, optimizer, _ = prepare(accelerator, *pair, level=level, total_steps=PLANNED_STEPS, config=CONFIG)
    for index in itertools.count():
        accelerator.backward(model(**Batches(training.batches)[index])["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if not pause():
            return


HOSTS: dict[str, Callable[[Network, str | None, Pause], None]] = {
    LOOP: loop,
    "transformers": transformers,
    "lightning": lightning,
    "accelerate": accelerate,
}


def measure(options: Options) -> list[Path]:
    names = tuple(TINY) if options.smoke else NETWORKS
    return [measure_network(name, options) for name in names]


def measure_network(name: str, options: Options) -> Path:
    network = {**ZOO, **TINY}[name]
    turns = {
        called(host, level): Turns(lambda pause, host=host, level=level: HOSTS[host](network, level, pause))
        for host in HOSTS
        for level in (None, LEVEL)
    }
    try:
        found = compare(
            turns,
            baselines=[called(host, None) for host in HOSTS],
            pairs=2 if options.smoke else PAIRS,
            warmup=Warmup(least=6, limit=60, seconds=300),
            progress=options.progress,
        )
    finally:
        for each in turns.values():
            each.close()
    return save(name, network, found, options)


def called(host: str, level: str | None) -> str:
    return host if level is None else f"{host}+{level}"


def gain_of(samples: Mapping[str, Sequence[float]], host: str) -> list[float]:
    """Return for each round how many times as fast the boosted step is."""
    alone, boosted = samples[called(host, None)], samples[called(host, LEVEL)]
    return [a / b for a, b in zip(alone, boosted, strict=True)]


def arrived(samples: Mapping[str, Sequence[float]], host: str) -> Interval:
    """Return the share of the loop's gain that a trainer has."""
    both = zip(gain_of(samples, host), gain_of(samples, LOOP), strict=True)
    return bootstrap_median([own / raw for own, raw in both])


def share_of(report: BenchReport, host: str) -> Interval:
    """Return the same from a saved report."""
    return arrived({contestant.name: contestant.samples for contestant in report.contestants}, host)


def save(name: str, network: Network, found: Comparison, options: Options) -> Path:
    training = network.training()
    notes = [f"{host}: {describe(found, host)}" for host in HOSTS]
    return save_steps(
        options.file("trainers", name),
        [contestant(each, found) for each in found.samples],
        title=f"In trainers: {network.title}",
        model=network.title,
        parameters=parameters_of(training.model),
        batch=training.batches[0].size,
        notes=["grad_freeze is off, which trains a part of the model only", *notes],
    )


def contestant(name: str, found: Comparison) -> Contestant:
    host, _, level = name.partition("+")
    rows = [AlgorithmRow(name=level, settings=f"inside {host}")] if level else []
    return as_contestant(found, name, "stock" if name == LOOP else "level" if level else "hand", algorithms=rows)


def describe(found: Comparison, host: str) -> str:
    gain, share = bootstrap_median(gain_of(found.samples, host)), arrived(found.samples, host)
    text = f"{LEVEL} makes a step {gain.mid:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f})"
    if host == LOOP:
        return text
    return f"{text}, {share.mid:.3f} of the loop's gain ({share.low:.3f} to {share.high:.3f})"


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
