"""docs/architecture.md and CONTRIBUTING.md name only files and symbols that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def names_in(path):
    """Every class, function, method and module-level name of a file or of the files of a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))))
def test_every_file_that_the_page_names_exists(path):
    here = [ROOT / path, PACKAGE / path, *PACKAGE.rglob(f"*/{path}" if path != "__init__.py" else path)]
    assert any(each.exists() for each in here), path


@pytest.mark.parametrize(
    ("symbols", "path"), re.findall(r"((?:`[\w.()]+`(?:, | and )?)+) (?:in|of) `([\w/]+\.py)`", PAGE)
)
def test_every_symbol_stands_in_the_file_that_the_page_names(symbols, path):
    known = names_in(PACKAGE / path) if (PACKAGE / path).exists() else names_in(PACKAGE)
    for symbol in re.findall(r"`([\w.]+)(?:\(\))?`", symbols):
        assert all(part in known for part in symbol.split(".")), f"{symbol} in {path}"


def test_a_journey_has_twelve_hops():
    journey = PAGE.partition("## One batch's journey")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", journey, flags=re.M)) == 12


NAMES_CUDA = {"devices.py", "analysis/device_moves.py", "comm/backends/nccl.py"}
"""What asks torch about devices, the moves in users' code, and NCCL's own calls; all others ask ``devices.py``."""


def names_cuda(text):
    """The lines that ask for a device by the name of its type: ``torch.cuda``, ``is_cuda``, ``"cuda:0"``."""
    if not re.search("cuda|mps|xpu", text):
        return
    for node in ast.walk(ast.parse(text)):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and re.fullmatch(r"(is_)?(cuda|mps|xpu)(:\d+)?", name):
            yield node.lineno


def test_only_three_files_ask_for_an_accelerator_by_name():
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert texts.keys() >= NAMES_CUDA
    found = [f"{name}:{line}" for name in sorted(texts.keys() - NAMES_CUDA) for line in names_cuda(texts[name])]
    assert not found, "ask shardwright.devices instead"


@pytest.mark.parametrize("text", ["torch.cuda.synchronize()", "x.is_cuda", 'x.to("cuda:1")', 'd.type == "cuda"'])
def test_each_way_to_ask_for_an_accelerator_by_name_is_found(text):
    assert list(names_cuda(text))
