"""docs/architecture.md, docs/where_is.md and CONTRIBUTING.md name only files and symbols that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = "\n".join(
    [PAGE, *((ROOT / name).read_text(encoding="utf-8") for name in ("docs/where_is.md", "CONTRIBUTING.md"))]
)

MADE_BY_COMMANDS = {".venv/"}
"""Folders that a page names and that are no part of the repository."""


def symbols_of(file):
    """What a file defines: names at its top level, and of its classes the methods and attributes, as ``Class.name``."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        found |= set(defined(node))
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{name}" for each in node.body for name in defined(each)}
            found |= {f"{node.name}.{each.attr}" for method in methods for each in ast.walk(method) if is_set(each)}
    return found


def defined(node):
    """The names that a statement of a module or of a class defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def is_set(node):
    """Whether a node sets an attribute of ``self``."""
    is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_stored and isinstance(node.value, ast.Name) and node.value.id == "self"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./]+(?:\.py|\.md|/))`", PAGES)) - MADE_BY_COMMANDS))
def test_every_file_that_the_pages_name_exists(path):
    here = [ROOT / path, PACKAGE / path, *PACKAGE.rglob(f"*/{path}" if path != "__init__.py" else path)]
    assert any(each.exists() for each in here), path


NAMED = re.findall(r"((?:`[\w.()]+`(?:, | and )?)+) (?:in|of|\() ?`([\w/]+\.py)`", PAGES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("symbols", "path"), NAMED)
def test_every_symbol_stands_in_the_file_that_the_page_names(symbols, path):
    """The file's path is the one from the package, or from the root of the repository."""
    (file,) = [each for each in (PACKAGE / path, ROOT / path) if each.exists()]
    known = symbols_of(file)
    for symbol in re.findall(r"`([\w.]+)(?:\(\))?`", symbols):
        assert symbol in known, f"{symbol} in {path}"


BARE = sorted(set(re.findall(r"`([A-Z]\w*(?:\.(?!md)\w+)?)(?:\(.*?\))?`", PAGES)))
"""Classes, constants and methods that the pages name, with a file or without one."""


@pytest.fixture(scope="module")
def symbols():
    return set().union(*map(symbols_of, PACKAGE.rglob("*.py")))


def test_every_class_and_constant_that_the_pages_name_exists(symbols):
    assert len(BARE) > 50
    assert not set(BARE) - symbols


def test_a_journey_has_twelve_hops():
    journey = PAGE.partition("## One batch's journey")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", journey, flags=re.M)) == 12


NAMES_CUDA = {"devices.py", "analysis/on_meta/device_moves.py", "comm/backends/nccl.py"}
"""What asks torch about devices, the moves in users' code, and NCCL's own calls; all others ask ``devices.py``."""


ACCELERATOR = re.compile(r"(torch\.)?(is_)?(cuda|mps|xpu)([.:/].*)?")


def names_cuda(text):
    """The lines that ask for a device by the name of its type: ``torch.cuda``, ``is_cuda``, ``f"cuda:{number}"``."""
    if not re.search("cuda|mps|xpu", text):
        return
    for node in ast.walk(ast.parse(text)):
        names = [getattr(node, "attr", None), getattr(node, "module", None), getattr(node, "value", None)]
        names += [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if any(isinstance(name, str) and ACCELERATOR.fullmatch(name) for name in names):
            yield node.lineno


def test_only_three_files_ask_for_an_accelerator_by_name():
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert texts.keys() >= NAMES_CUDA
    found = [f"{name}:{line}" for name in sorted(texts.keys() - NAMES_CUDA) for line in names_cuda(texts[name])]
    assert not found, "ask shardwright.devices instead"


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.synchronize()", "x.is_cuda", 'x.to("cuda:1")', 'd.type == "cuda"', 'f"cuda:{number}"',
        '"cuda:" + str(number)', '"cuda/gloo"', "import torch.cuda", "import torch.cuda as card",
        "from torch import cuda", "from torch.cuda import Stream", "from torch.cuda.amp import autocast",
    ],
)  # fmt: skip
def test_each_way_to_ask_for_an_accelerator_by_name_is_found(text):
    assert list(names_cuda(text))


NAMES_STAGES = {
    "layout.py": "a layout line has the number of microbatches behind pp",
    "ledger/account.py": "the stage of a coord",
    "parallelize/explain.py": "the chunks of a coord",
    "parallelize/planning.py": "the chunks of a coord",
    "parallelize/rehearsal.py": "parameters on all stages, and the axis of P2P",
    "parallelize/step.py": "the stage of a coord, and the axis over which it shares an output",
    "planner/price.py": "the name of waiting for stages, if no strategy has them",
}
"""The files of the core that name the pipeline's axis, listed in docs/decisions/0016; others ask for axes of stages."""


def test_the_core_names_the_axis_of_stages_only_where_a_seam_is_left():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text)) if "pp" in text else ()
        if any(isinstance(node, ast.Constant) and node.value == "pp" for node in nodes):
            found.add(path.relative_to(PACKAGE).as_posix())
    assert {file for file in found if not file.startswith("strategies/")} == set(NAMES_STAGES)
