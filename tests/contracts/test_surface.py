"""The public surface: a change of it is a change of this snapshot, made on purpose.

``python -m tests.contracts.test_surface`` writes the snapshot again.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import torchboost
from torchboost import algorithms, compat, core, optim
from torchboost.cli.app import app
from torchboost.config import BoostConfig

SNAPSHOT = Path(__file__).with_name("surface.json")


def signature(value: Any) -> Any:
    if not callable(value):
        return type(value).__name__
    if not inspect.isclass(value):
        return str(inspect.signature(value))
    methods = {
        name: str(inspect.signature(member))
        for name, member in inspect.getmembers(value, callable)
        if not name.startswith("_") and getattr(member, "__module__", "").startswith("torchboost")
    }
    try:
        return {"()": str(inspect.signature(value)), **methods}
    except ValueError:  # built-in constructors have none
        return methods


def surface() -> dict[str, Any]:
    commands = typer.main.get_command(app).commands
    return {
        "names": {name: signature(getattr(torchboost, name)) for name in sorted(torchboost.__all__)},
        **{
            package.__name__.removeprefix("torchboost."): {
                name: signature(getattr(package, name)) for name in sorted(package.__all__)
            }
            for package in (algorithms, core, optim)
        },
        "levels": {level: {name: dict(s) for name, s in row.items()} for level, row in torchboost.LEVELS.items()},
        "schema": BoostConfig.model_json_schema(),
        "commands": {
            name: sorted(option for parameter in command.params for option in parameter.opts)
            for name, command in sorted(commands.items())
        },
    }


def test_the_surface_is_the_one_agreed_on():
    expected = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(surface()))
    for part, entries in expected.items():
        assert found[part] == entries, f"{part} changed; if on purpose: python -m tests.contracts.test_surface"
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("package", [torchboost, algorithms, compat, core, optim], ids=lambda package: package.__name__)
def test_every_public_name_is_listed_once_and_loads(package):
    assert set(package.__all__) <= set(dir(package))
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    named = [alias.name for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names]
    assert sorted(named) == sorted(package.__all__)
    for name in package.__all__:
        getattr(package, name)


def test_no_two_names_differ_by_an_ending_or_by_case_only():
    asked_for = {"adasum": {"AdaSum", "adasum"}, "boost": {"boost", "Boosted"}}
    asked_for["lessbn"] = {
        "LessBN",
        "LessBn",
        "less_bn",
    }  # MindSpore's class, and the subject's name
    stems: dict[str, set[str]] = {}
    for package in (torchboost, algorithms, compat, core, optim):
        for name in package.__all__:
            if inspect.ismodule(getattr(package, name)):
                continue
            stem = re.sub(r"(er|ion|ing|ed|able|(?:m)ent|manager|s)$", "", name.replace("_", "").lower())
            stems.setdefault(re.sub(r"(at|e)$", "", stem), set()).add(name)
    assert {stem: names for stem, names in stems.items() if len(names) > 1} == asked_for


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
