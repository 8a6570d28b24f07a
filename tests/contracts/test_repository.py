"""The files around the code: what they promise exists."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from tests.conftest import ROOT
from torchboost.cli.app import app

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MACHINE_FOLDER = re.compile(r"(?<![\w.:/])/(?:home|root|opt|work|mnt|Users)/\w")


def commands(program: str) -> set[str]:
    """Return the words that follow ``program`` at the start of a line of a console block of any page."""
    found: set[str] = set()
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            found |= set(re.findall(rf"^(?:\$ )?{program} ([a-z][a-z-]*)", block, re.MULTILINE))
    return found


def requirements(names: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, names)}


def test_make_targets():
    wanted = {
        "setup",
        "demo",
        "test",
        "test-all",
        "lint",
        "type",
        "layers",
        "docs",
        "check",
        "bench",
        "bench-gpu",
        "clean",
    }
    assert wanted <= TARGETS
    check = re.search(r"^check: (.*)$", MAKEFILE, re.MULTILINE)
    assert check is not None
    assert check.group(1).split() == ["lint", "type", "layers", "test", "docs"]


def test_the_readme_names_its_two_commands():
    assert {"demo", "test"} <= commands("make")
    assert commands("make") <= TARGETS


def test_commands_of_the_pages_exist():
    for name in sorted(commands("torchboost") | {"bench"}):
        done = CliRunner().invoke(app, [name, "--help"])
        assert done.exit_code == 0, done.output
        assert "usage" in done.output.lower()


def test_pre_commit_runs_make_targets():
    entries = re.findall(r"entry: make (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {"lint", "type", "layers", "test", "docs"} == set(entries) & TARGETS == set(entries)


def test_ci_runs_the_test_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test VENV=", script.read_text(), re.MULTILINE)


def test_core_needs_five_packages_and_bounds_none_from_above():
    core = requirements(PROJECT["dependencies"])
    assert set(core) == {"torch", "lazy-loader", "pydantic", "numpy", "safetensors"}
    extras = [Requirement(r) for group in PROJECT["optional-dependencies"].values() for r in group]
    bounded = [str(r) for r in [*core.values(), *extras] if any(s.operator not in (">=", "!=") for s in r.specifier)]
    assert not bounded


def test_constraints_pin_exactly_and_cover_what_we_import():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = requirements(lines)
    assert all([s.operator for s in pin.specifier] == ["=="] for pin in pins.values())
    extras = PROJECT["optional-dependencies"]
    direct = requirements([*PROJECT["dependencies"], *(r for group in extras.values() for r in group)])
    assert set(direct) - {"torchboost"} <= set(pins)


def test_versions_agree():
    import torchboost

    assert torchboost.__version__ == PROJECT["version"]
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_package_says_that_it_is_typed():
    assert (ROOT / "src" / "torchboost" / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "docs", ".ci"])
def test_no_file_names_a_folder_of_one_machine(folder):
    texts = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".html", ""}
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in texts]
    assert [_named(path) for path in files if MACHINE_FOLDER.search(path.read_text(encoding="utf-8"))] == []


def test_no_root_file_names_a_folder_of_one_machine():
    # In a second work tree of git, .git is a file that names the first.
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    assert [path.name for path in files if MACHINE_FOLDER.search(path.read_text(encoding="utf-8"))] == []


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))
