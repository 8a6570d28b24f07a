"""The runs of a workload in a JSON file, which is written after each of them and continued from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torchboost.measure.stopwatch import environment

Run = dict[str, Any]
Result = dict[str, Any]


class SavedRuns:
    """The runs of one workload.

    Args:
        file: Written after each run.
        about: What the file says of them.
        resume: Whether the runs in the file are kept.
        same: Entries of ``about`` which they must agree in, as in torch, processor and threads. Empty for no check.
    """

    indent: int | None = 1

    def __init__(self, file: Path, about: Result, *, resume: bool = True, same: Sequence[str] = ()) -> None:
        self.file, self.result = file, {**about, "environment": environment().model_dump(), "runs": []}
        if not (resume and file.is_file()):
            return
        saved: Result = json.loads(file.read_text(encoding="utf-8"))
        pairs = [(saved[name], self.result[name]) for name in same]
        machines = saved["environment"], self.result["environment"]
        pairs += [tuple(each[name] for each in machines) for name in ("torch", "processor", "threads") if same]
        if any(before != now for before, now in pairs):
            raise SystemExit(f"{file} holds runs of another size, data, version or machine; leave out --resume.")
        self.result = {**saved, **self.result, "runs": saved["runs"]}

    def get(self, key: Run, make: Callable[[], Run]) -> Run:
        """Return the run with these entries, or make and save it."""
        for run in self.result["runs"]:
            if run.items() >= key.items():
                return run
        run = {**key, **make()}
        self.result["runs"].append(run)
        self.save()
        print(json.dumps({"of": self.file.stem, **{name: run[name] for name in run if name != "times"}}), flush=True)
        return run

    def note(self, name: str, value: Any) -> None:
        self.result[name] = value
        self.save()

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.result, indent=self.indent) + "\n", encoding="utf-8")


def results(folder: Path, claim: str, names: Iterable[str]) -> dict[str, Result]:
    """Return the saved results of a claim that are there, by name."""
    files = {name: folder / f"{claim}-{name}.json" for name in names}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
