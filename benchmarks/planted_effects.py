"""Claim: of 100 simulated tunings each, at least 95 reject a planted loss and accept what is harmless.

No network is trained: a run draws its metric from a normal distribution around a planted mean, with a part of the
noise shared by all runs of a seed, and takes a planted time. The accepted drop is 1 point; the noise of a difference is
half a point, the longest comparison 12 seeds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from options import Options, parser, run_own

from torchboost.bench.report.table import Table
from torchboost.tuning.race import Race
from torchboost.tuning.report import Candidate, Run

POINT = 0.01
SPREAD = 0.5 * POINT
LATE = 4.0
"""Points that stock loses per unit of its share of the steps."""


@dataclass(frozen=True)
class Planted:
    """Args: what a candidate does to the metric, in points; its time, times that of stock."""

    effect: float = 0.0
    time: float = 0.7
    skips_work: bool = True


CASES: dict[str, tuple[dict[str, Planted], set[str]]] = {
    "a loss of 2 points": ({"a": Planted(effect=-2.0)}, set()),
    "a loss of 1 point, the accepted drop itself": ({"a": Planted(effect=-1.0)}, set()),
    "harmless": ({"a": Planted()}, {"a"}),
    "harmless, computes the same": ({"a": Planted(skips_work=False)}, {"a"}),
    "equal to fewer steps": ({"a": Planted(effect=-LATE * 0.3, time=0.7)}, set()),
    "equal to fewer steps, within the drop": ({"a": Planted(effect=-LATE * 0.15, time=0.85)}, set()),
    "harmless, saves nothing": ({"a": Planted(time=1.0)}, set()),
    "one harmless, one harmful": ({"a": Planted(), "b": Planted(effect=-2.0)}, {"a"}),
}


def tuned(planted: dict[str, Planted], seed: int, *, budget: float = 1e9) -> Race:
    """Race candidates with planted effects; all runs follow from the seed."""

    def train(candidate: Candidate, number: int, *_: float) -> Run:
        parts = [planted[name] for name in candidate.name.split(" + ") if name in planted]
        key = [ord(letter) for letter in candidate.name]
        own, common = np.random.default_rng([seed, number, *key]), np.random.default_rng([seed, number])
        effect = sum(part.effect for part in parts) - LATE * (1 - candidate.share)
        noise = common.normal(0, 2 * SPREAD) + own.normal(0, SPREAD / 2**0.5)
        time = float(np.prod([part.time for part in parts])) * candidate.share * own.lognormal(0, 0.005)
        metric = 0.9 + POINT * effect + noise
        seconds = {"setup_seconds": 0.01, "seconds": time, "wall_seconds": time}
        return Run(name=candidate.name, seed=number, steps=101, metric=metric, **seconds)

    candidates = [
        Candidate(name=name, extra={name: True}, skips_work=part.skips_work) for name, part in planted.items()
    ]
    return Race(train=train, candidates=candidates, drop=POINT, budget=budget, total_steps=101)


def measure(options: Options) -> Path:
    repetitions = 5 if options.smoke else 100
    found = {}
    for title, (planted, wanted) in CASES.items():
        races = [tuned(planted, seed) for seed in range(repetitions)]
        decisions = [set(race.decide()) for race in races]
        runs = [len(race.runs) for race in races]
        found[title] = {
            "right": sum(decision == wanted for decision in decisions),
            "of": repetitions,
            "runs": float(np.median(runs)),
        }
        print(f"{title}: {found[title]}", flush=True)
    file = options.file("planted_effects", "tune")
    file.write_text(json.dumps({"spread": SPREAD, "drop": POINT, "cases": found}, indent=1) + "\n", encoding="utf-8")
    return file


def _right(planted: dict[str, Planted], wanted: set[str]) -> str:
    if not wanted:
        return "not turned on"
    return "turned on" if wanted == planted.keys() else "only the harmless one turned on"


def table(file: Path) -> Table:
    """Return how often each planted effect was decided rightly."""
    cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    lines = [
        (
            title,
            _right(*CASES[title]),
            f"{one['right']} of {one['of']}",
            f"{one['runs']:g}",
        )
        for title, one in cases.items()
    ]
    return Table(
        headings=("planted", "right answer", "tunings with this answer", "trainings, median"), rows=tuple(lines)
    )


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
