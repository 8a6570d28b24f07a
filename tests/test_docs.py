"""The documentation tells the truth: its code runs, and every algorithm has its card."""

from __future__ import annotations

import importlib
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.conftest import ROOT
from tests.support.torchrun import loopback
from torchboost.front import boosted_of
from torchboost.registry import REGISTRY

DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "torchboost"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REFERENCED = re.compile(r"^::: (\S+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
SHORTER = {"docs/quick_tour.md": ("EPOCHS, BATCH = 10, 50", "EPOCHS, BATCH = 1, 50")}
"""What a page trains for long, and how much of it runs here. The first snippet of the page has it."""


def snippets(page: Path) -> list[str]:
    """Return every snippet of a page as a program of its own that keeps the page's line numbers."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, match.start(1)) + match.group(1) for match in SNIPPET.finditer(text)]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(page: Path, snippet: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__page__"}
    long, short = SHORTER.get(named(page), ("", ""))
    assert long in snippet
    snippet = snippet.replace(long, short) if long else snippet
    exec(compile(snippet, str(page), "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*does not have many workers.*")  # Lightning's own
@pytest.mark.parametrize(
    ("page", "snippet"),
    [
        pytest.param(page, snippet, id=f"{named(page)}-{k}")
        for page in PAGES
        for k, snippet in enumerate(snippets(page), start=1)
    ],
)
def test_every_snippet_runs_when_it_is_copied_alone(page, snippet, tmp_path, monkeypatch, one_accelerator):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    run(page, snippet)


def test_snippets_end_process_groups_by_shutdown():
    """After PyTorch's ``destroy_process_group``, one of about 50 runs hangs if DDP outlives the group."""
    texts = {named(page): "".join(snippets(page)) for page in PAGES}
    assert [page for page, text in texts.items() if "destroy_process_group" in text] == []
    started = [page for page, text in texts.items() if "init_process_group(" in text]
    assert started
    assert all("shutdown()" in texts[page] for page in started)


def test_the_diffs_of_the_readme_train_boosted():
    """What is left after the first diff is a program, given a model and its loader."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    diff = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[0]
    lines = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **size))
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([0, 1])}
    names: dict[str, Any] = {"torch": torch, "model": model, "loader": [batch, batch]}
    exec(compile("\n".join(lines), "README.md", "exec"), names)
    boosted = boosted_of(names["optimizer"])
    assert boosted is not None
    assert boosted.plan.level == "O1"


def test_the_readme_is_short_and_says_what_for_whom():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = ["Install", "Use", "Is it for you?", "Results", "Levels", "What you should know", "In a trainer"]
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == [*wanted, "Measure yours", "Limits", "Muon", "More"]
    prose = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    assert len(prose.split()) <= 900


MINDSPORE = (
    *("AutoBoost", "OptimizerProcess", "ParameterProcess", "BoostTrainOneStepCell", "LessBN", "GradientFreeze"),
    *("BoostTrainOneStepWithLossScaleCell", "FreezeOpt", "freeze_cell", "GradientAccumulation", "AdaSum", "DimReduce"),
    "GroupLossScaleManager",
)


def test_the_migration_page_has_the_documented_example_of_each_name():
    code = "\n".join(snippets(DOCS / "compat.md"))
    assert [name for name in MINDSPORE if not re.search(rf"\b{name}\(", code)] == []


def test_the_messages_that_are_explained_are_those_of_the_package():
    """Parts that vary stand as ``...``; a message may be written over several lines of source."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py")))
    source = re.sub(r'"\s*f?"', "", source)
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    parts = [part.strip() for message in rows for part in message.split("...")]
    assert len(rows) >= 20
    assert [part for part in parts if part not in source] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_between_pages_lead_somewhere(page):
    broken = [
        target for target in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("name", REGISTRY)
def test_every_algorithm_has_a_card_that_names_its_settings(name):
    card = DOCS / "algorithms" / f"{name}.md"
    assert card.is_file(), f"write {named(card)}: what, when it pays, when not, cost, settings, evidence, reference"
    text = card.read_text(encoding="utf-8")
    settings = [field.name for field in fields(REGISTRY[name].algorithm) if field.init]
    assert [setting for setting in settings if f"`{setting}" not in text and f"{setting}=" not in text] == []


def test_every_card_belongs_to_an_algorithm():
    cards = {card.stem for card in (DOCS / "algorithms").glob("*.md")} - {"index"}
    assert cards <= set(REGISTRY)


def navigation() -> list[dict[str, Any]]:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return runpy.run_path(str(DOCS / ".hooks" / "nav.py"))["expand"](settings["nav"], DOCS)


def test_the_navigation_has_six_parts_and_every_page_once():
    parts = {title: listed for part in navigation() for title, listed in part.items()}
    assert list(parts) == ["Get started", "In your trainer", "Measure yours", "Optimizers", "Algorithms", "Reference"]
    assert parts["Algorithms"][0] == "algorithms/index.md"
    pages = [page for listed in parts.values() for page in listed]
    assert sorted(pages) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_short_code_with_a_hyphen_is_kept_on_one_line():
    mark = runpy.run_path(str(DOCS / ".hooks" / "short_code.py"))["on_page_content"]
    option, long, plain = "--drop 0.5", "torchrun --nnodes 2 --nproc-per-node 4", "drop"
    found = mark("".join(f"<code>{text}</code>" for text in (option, long, plain, f"{option}\n")))
    assert re.findall(r'<code class="whole">([^<]*)</code>', found) == [option]


def test_every_public_package_has_its_page_of_names():
    stubs = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.pyi")}
    packages = {".".join(("torchboost", *stub.parts)) for stub in stubs}
    documented = {name for page in (DOCS / "api").glob("*.md") for name in REFERENCED.findall(page.read_text())}
    assert packages <= documented


def test_the_pages_of_names_show_examples_as_code_and_references_as_links():
    griffe = pytest.importorskip("griffe", reason="needs mkdocstrings: make setup")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    handler = next(each["mkdocstrings"] for each in settings["plugins"] if "mkdocstrings" in each)["handlers"]["python"]
    options = handler["options"]
    extensions = griffe.load_extensions(*(str(ROOT / path) for path in options["extensions"]))
    package = griffe.load("torchboost", search_paths=[ROOT / "src"], extensions=extensions)
    parts = [
        part
        for place in ("boost", "Boosted.explain", "core.step.TrainStep", "optim.Adam", "algorithms.unpad_forward")
        for part in package[place].docstring.parse(options["docstring_style"], **options["docstring_options"])
    ]
    kinds = [part.kind for part in parts]
    assert griffe.DocstringSectionKind.admonition not in kinds
    assert kinds.count(griffe.DocstringSectionKind.examples) >= 3
    assert {len(part.value) for part in parts if part.kind is griffe.DocstringSectionKind.returns} == {1}
    said = package["boost"].docstring.value
    for path in ("torchboost.front.prepare", "torchboost.optim.named_optimizer"):
        assert f'<autoref identifier="{path}" optional><code>{path.rpartition(".")[2]}</code></autoref>' in said
    assert ":func:" not in said


def test_the_tables_show_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for path, wanted in importlib.import_module("tables").written().items():
        assert path.read_text(encoding="utf-8") == wanted, f"{path}: run python benchmarks/tables.py"
