"""Private names of torch are read in one file, and those of the package in the file that defines them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from tests.conftest import ROOT

SOURCE = ROOT / "src" / "torchboost"
EXEMPT = SOURCE / "core" / "torch_private.py"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != EXEMPT)

DOCUMENTED = {"_asdict", "_make", "_replace"}
"""Methods of named tuples, public by Python's documentation."""
OF_PYTHON = {"copyreg._reconstructor"}
"""Private names of other packages. A pickle must name this function; no public one does the same."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_torch() -> frozenset[str]:
    """The private names that objects of torch have."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    compiled = {"_orig_mod", "_compiled_call_impl", "_need_device_dtype_check_for_fused", "_conv_forward"}
    owners = (nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), torch.Tensor, optimizer, nn.parallel.DistributedDataParallel)
    return frozenset(name for owner in owners for name in dir(owner) if is_private(name)) | compiled


OF_TORCH = of_torch()


def own_names(tree: ast.Module) -> set[str]:
    """The private names that a file defines: functions, methods, fields, and what ``self`` is given."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if is_private(name)}


def is_of_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def trespasses(text: str) -> Iterator[str]:
    """Name what a file reads of others' private names, with the line."""
    tree = ast.parse(text)
    excused = (own_names(tree) - OF_TORCH) | DOCUMENTED
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_of_self(node.value):
            if node.attr not in excused and ast.unparse(node) not in OF_PYTHON:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            home = getattr(node, "module", None) or ""
            for alias in node.names:
                if any(is_private(part) for part in f"{home}.{alias.name}".split(".")):
                    yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and node.value in OF_TORCH:
            yield f"{node.lineno}: {node.value!r}"


def test_no_private_name_of_others_is_read():
    texts = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in MODULES}
    found = {path: lines for path, text in texts.items() if (lines := list(trespasses(text)))}
    assert found == {}, "read it through torchboost.core.torch_private, or give it a public name"


def test_the_scan_sees_names_of_others_and_lets_own_ones_pass():
    for text in (
        "model._buffers",
        "self.model._buffers",
        "def f(self):\n    self._buffers = {}\n    return model._buffers",
        "getattr(module, '_orig_mod')",
        "vars(norm)['_modules']",
        "from torch.nn.modules.conv import _ConvNd",
        "import torch._dynamo",
        "from torch._dynamo import config",
        "from torchboost.front import _given",
        "other._value",
    ):
        assert len(list(trespasses(text))) == 1, text
    for text in (
        "self._buffers",
        "super()._load_from_state_dict(state)",
        "found._replace(a=1)",
        "class A:\n    def __init__(self, other):\n        self._value = other._value",
        '"""Reads ``_buffers``."""',
    ):
        assert list(trespasses(text)) == [], text


def test_all_that_the_file_of_private_names_offers_is_used():
    body = ast.parse(EXEMPT.read_text(encoding="utf-8")).body
    offered = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    offered |= {ast.unparse(t) for node in body if isinstance(node, ast.Assign) for t in node.targets}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in [*MODULES, EXEMPT]]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name) and is_read(node)}
    assert [name for name in sorted(offered - used) if name.isidentifier() and not is_private(name)] == []


def is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)
