"""Count a checkout: lines, files, classes, private functions named once, prose, tests, the walk of ``boost`` at O1.

``python benchmarks/house.py FOLDER`` reads the files of any checkout with the interpreter that runs it, which needs
torch and pytest. Calls are counted by ``sys.setprofile`` in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PHRASES = {
    "what is": r"\bwhat (?:is|are|was|were)\b",
    "that of, those of": r"\b(?:that|those) of\b",
    "semicolons": ";",
    "stays": r"\bstay(?:s|ed)?\b",
    "leave out": r"\b(?:leave|leaves|left|leaving) out\b",
    "so many": r"\bso many\b",
}
PRONOUNS = "it they them this that these those one other others both each all own mine what which who none some any"
IRREGULAR = """found held said made given known shown taken told seen done kept left sent built chosen written drawn
grown spent begun gone met lost won paid bound brought bought caught felt got heard laid lent meant sold sought stood
struck taught thought understood worn broken driven fallen forgotten frozen hidden thrown"""
UNFIT = {*PRONOUNS.split(), *IRREGULAR.split()}
NOUNS = {"bed", "feed", "seed", "need", "speed", "embed", "breed", "shed", "red"}
CODE = re.compile(r"``.*?``|`[^`]*`|^\s*(?:>>>|\.\.\.) .*$", re.DOTALL | re.MULTILINE)
WALK = """
import os, sys
import torch
from torch import nn
import torchboost
sizes = [3, 16, 16, 32, 32, 64]
blocks = [
    nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    for a, b in zip(sizes, sizes[1:])
]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
package, files, calls = os.path.dirname(torchboost.__file__) + os.sep, set(), [0, 0]
def profile(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        calls[1] += 1
        if frame.f_code.co_filename.startswith(package):
            calls[0] += 1
            files.add(frame.f_code.co_filename[len(package):])
from torchboost import boost
sys.setprofile(profile)
boosted = boost(model, optimizer, level="O1")
sys.setprofile(None)
print(len(files), *calls)
"""


def house(folder: Path) -> dict[str, Any]:
    """Return all figures of a checkout."""
    return {"source": code(folder / "src"), "tests": {**code(folder / "tests"), **cases(folder)}, "walk": walk(folder)}


def code(folder: Path) -> dict[str, Any]:
    """Return the size of the Python files of a folder, and the rates of unfit names and phrases."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    once = [function for tree in trees for function in named_once(tree)]
    names = Counter(name for node in nodes for name in bound(node))
    prose = " ".join(CODE.sub("", text) for node in nodes if (text := docstring(node)))
    words, unfit = len(prose.split()), [name for name in names if is_unfit(name)]
    return {
        "lines": sum(len(text.splitlines()) for text in texts),
        "files": len(texts),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "private_functions": sum(is_private(node) for node in nodes),
        "private_functions_named_once": len(once),
        "lines_of_them": sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in once),
        "unfit_names_percent": round(100 * sum(names[name] for name in unfit) / max(1, sum(names.values())), 2),
        "most_frequent_unfit": dict(Counter({name: names[name] for name in unfit}).most_common(10)),
        "docstring_words": words,
        "per_10_000_words": {
            name: round(1e4 * len(re.findall(phrase, prose, re.IGNORECASE)) / max(1, words), 1)
            for name, phrase in PHRASES.items()
        },
    }


def is_private(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and bool(re.match("_(?!_)", node.name))


def named_once(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the private functions of a file that it names at one place, their definition aside."""
    nodes = list(ast.walk(tree))
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses += Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and is_private(node) and uses[node.name] == 1:
            yield node


def bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def is_unfit(name: str) -> bool:
    """Whether a name is one participle or pronoun."""
    word = "" if name.startswith("__") else name.strip("_").lower()
    return word in UNFIT or (bool(re.fullmatch("[a-z]+ed", word)) and word not in NOUNS)


def docstring(node: ast.AST) -> str | None:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.get_docstring(node) if isinstance(node, owners) else None


def cases(folder: Path) -> dict[str, int]:
    """Return how many test functions pytest collects, and as how many cases."""
    output = run(folder, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", "tests")
    lines = [line for line in output.splitlines() if "::" in line and not line.startswith(" ")]
    return {"functions": len({line.partition("[")[0] for line in lines}), "cases": len(lines)}


def walk(folder: Path) -> dict[str, int]:
    """Return the files of the package that ``boost`` enters on five convolutions, and its Python calls."""
    files, package, everywhere = map(int, run(folder, "-c", WALK).split())
    return {"files": files, "calls_in_package": package, "calls": everywhere}


def run(folder: Path, *arguments: str) -> str:
    settings = {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def lines(found: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in found.items():
        text = key.replace("_", " ")
        if isinstance(value, dict):
            yield f"{indent}{text}"
            yield from lines(value, indent + "  ")
        else:
            yield f"{indent}{text:<{32 - len(indent)}}{value:>12,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], help="Root of a checkout.")
    parser.add_argument("--json", action="store_true", help="Answer in JSON.")
    parser.add_argument("--out", type=Path, help="Also write the JSON to this file.")
    arguments = parser.parse_args()
    figures = house(arguments.folder.resolve())
    text = json.dumps(figures, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text if arguments.json else "\n".join(lines(figures)))


if __name__ == "__main__":
    main()
