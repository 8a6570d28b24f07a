"""Small made-up reports with everything in them that a page can show."""

from __future__ import annotations

import math
from typing import Literal

from torchboost.measure.evidence import (
    AlgorithmRow,
    BenchReport,
    Contestant,
    Curve,
    DroppedRow,
    Environment,
    Interval,
    Ratio,
)

__all__ = ["contestant", "interval", "report", "winning_report"]

Kind = Literal["stock", "hand", "level", "algorithm", "config"]


def interval(mid: float, share: float = 0.02) -> Interval:
    return Interval(low=mid * (1 - share), mid=mid, high=mid * (1 + share))


def curves(step: float, final: float, *, seeds: int, setup: float) -> list[Curve]:
    epochs = [float(k) for k in range(1, 9)]
    made = []
    for seed in range(seeds):
        end = final + 0.0005 * math.cos(3 * seed + 100 * step)
        metric = [end - (end - 0.3) * math.exp(-k) for k in epochs[:-1]] + [end]
        made.append(
            Curve(
                seed=seed,
                epochs=epochs,
                seconds=[100 * step * k for k in epochs],
                train_loss=[2.3 * math.exp(-0.7 * k) for k in epochs],
                metric=metric,
                setup_seconds=setup,
                peak_bytes=(100 + seed) * 2**20,
            )
        )
    return made


def contestant(
    name: str,
    kind: Kind,
    step: float,
    final: float = 0.97,
    *,
    stock: float | None = None,
    hand: tuple[str, float] | None = None,
    seeds: int = 4,
    warmup: float = 0.5,
    spread: float = 0.02,
) -> Contestant:
    """A contestant whose figures agree with each other; ``stock`` and ``hand`` are the baselines' step times."""
    ratios = [] if stock is None else [Ratio(baseline="stock", interval=interval(stock / step, spread), pairs=12)]
    if hand is not None:
        ratios.append(Ratio(baseline=hand[0], interval=interval(hand[1] / step, spread), pairs=12))
    return Contestant(
        name=name,
        kind=kind,
        algorithms=_on(name) if kind == "level" else [],
        dropped=[DroppedRow(name="compile", reason="not measured on this device")] if kind == "level" else [],
        step_seconds=interval(step),
        samples=[step * (1 + 0.01 * (k % 3)) for k in range(12)],
        ratios=ratios,
        warmup_seconds=warmup,
        curves=curves(step, final, seeds=seeds, setup=warmup),
    )


def _on(level: str) -> list[AlgorithmRow]:
    freezing = [AlgorithmRow(name="grad_freeze", settings="GradFreeze()")] if level == "O2" else []
    return [AlgorithmRow(name="channels_last", settings="ChannelsLast()"), *freezing]


def report(*contestants: Contestant, title: str = "A small benchmark", metric: str = "accuracy") -> BenchReport:
    return BenchReport(
        title=title,
        workload="digits",
        model="a small ResNet",
        parameters=272_474,
        batch=64,
        metric_name=metric,
        epochs=8,
        train_samples=1_437,
        environment=Environment(
            torchboost="0.1.0",
            torch="2.13.0",
            python="3.12.3",
            platform="Linux",
            processor="a processor",
            cores=4,
            threads=2,
            device="cpu",
            commit="abcdef",
            date="2026-01-02T03:04:05+00:00",
        ),
        contestants=list(contestants),
    )


def winning_report(title: str = "A small benchmark") -> BenchReport:
    """Both levels pay, freezing alone costs accuracy, compiling alone takes long to start."""
    hand = ("hand", 0.02)
    return report(
        contestant("stock", "stock", 0.05, hand=hand),
        contestant("hand", "hand", 0.02, stock=0.05),
        contestant("O1", "level", 0.016, stock=0.05, hand=hand),
        contestant("O2", "level", 0.014, 0.955, stock=0.05, hand=hand),
        contestant("freeze", "algorithm", 0.04, 0.90, stock=0.05, hand=hand),
        contestant("compile", "algorithm", 0.03, stock=0.05, hand=hand, warmup=60.5),
        title=title,
    )
