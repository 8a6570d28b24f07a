"""The files around the code: what they promise exists."""

from __future__ import annotations

import os
import re

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

from tests.conftest import ROOT
from torchboost.cli.app import app

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML; the files are the same on all versions")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
JOBS = WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]["include"]
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
    wanted = "setup demo test test-all test-torch lint type layers docs check bench bench-gpu clean"
    assert set(wanted.split()) <= TARGETS
    check = re.search(r"^check: (.*)$", MAKEFILE, re.MULTILINE)
    assert check is not None
    assert check.group(1).split() == ["lint", "type", "layers", "test", "docs"]
    assert {"demo", "test"} <= commands("make") <= TARGETS
    entries = re.findall(r"entry: make (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert sorted(entries) == sorted(check.group(1).split())


def test_commands_of_the_pages_exist():
    for name in sorted(commands("torchboost") | {"bench"}):
        done = CliRunner().invoke(app, [name, "--help"])
        assert done.exit_code == 0, done.output
        assert "usage" in done.output.lower()


def test_ci_runs_the_test_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test VENV=", script.read_text(), re.MULTILINE)


def test_the_jobs_cover_the_oldest_and_the_newest_versions():
    versions = sorted({Version(str(job["torch"])) for job in JOBS})
    pythons = sorted({Version(job["python"]) for job in JOBS})
    oldest = f"{versions[0].major}.{versions[0].minor}"
    assert str(requirements(PROJECT["dependencies"])["torch"].specifier) == f">={oldest}"
    assert PROJECT["requires-python"].split(", ")[0] == f">={pythons[0]}"
    assert [version.minor for version in versions] == list(range(versions[0].minor, versions[-1].minor + 1))
    assert [python.minor for python in pythons] == list(range(pythons[0].minor, pythons[-1].minor + 1))
    assert f"Python {pythons[0]} or later, PyTorch {oldest} or later" in PAGES[0].read_text(encoding="utf-8")


def test_workflows_call_targets_that_exist_and_templates_can_be_read():
    for path in (ROOT / ".github" / "workflows").iterdir():
        yaml.safe_load(path.read_text())
        made = re.findall(r"run: make ((?:[a-z-]+ ?)+)(?![=a-zA-Z])", path.read_text())
        assert {target for targets in made for target in targets.split()} <= TARGETS, path.name
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir():
        head = yaml.safe_load(path.read_text().split("---")[1])
        assert {"name", "about"} <= set(head)


def test_the_classifiers_name_the_versions_of_python_that_are_tested():
    minors = {f"3.{job['python'].split('.')[1]}" for job in JOBS}
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", c)}
    assert named == minors


def test_core_needs_five_packages_and_bounds_none_from_above():
    core = requirements(PROJECT["dependencies"])
    assert set(core) == {"torch", "lazy-loader", "pydantic", "numpy", "safetensors", "typing-extensions"}
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


def test_versions_agree_and_the_package_says_that_it_is_typed():
    import torchboost

    versions = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert torchboost.__version__ == PROJECT["version"] == versions[0]
    assert versions == sorted(versions, key=Version, reverse=True)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == versions[0]
    assert (ROOT / "src" / "torchboost" / "py.typed").is_file()


def test_no_file_names_a_folder_of_one_machine():
    skipped = {".metadata", ".git"}  # of a distributed checkpoint; in a second work tree of git, it names the first
    texts = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".html", ""}
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples", "docs", ".ci")]
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*") if path.suffix in texts)]
    files = [path for path in paths if path.is_file() and path.name not in skipped]
    found = [path for path in files if MACHINE_FOLDER.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in found] == []
