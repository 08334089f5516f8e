"""Figures of a source tree, for decision records: ``python tools/figures.py src/shardwright``."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

LADDER = 3
"""So many isinstance calls in one function make a ladder."""


def comments_of(text: str) -> int:
    """Lines that hold a comment other than a directive to a tool or a heading."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = (token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
    return sum(not word.startswith(("type:", "noqa", "fmt:", "----")) for word in words)


def is_call_of(node: ast.AST, name: str) -> bool:
    """Whether a node calls the function of this name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def figures(root: Path) -> dict[str, float]:
    """Lines, files, functions and what a reader stumbles over, counted from the text."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lines = sum(text.count("\n") for text in texts.values())
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    ladders = [f for f in functions if sum(is_call_of(node, "isinstance") for node in ast.walk(f)) >= LADDER]
    replaced = [
        node
        for node in nodes
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr == "forward" for target in node.targets)
    ]
    return {
        "lines": lines,
        "files": len(texts),
        "lines in the longest file": max(text.count("\n") for text in texts.values()),
        "lines in the longest function": max(f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno),
        "public classes": len(names),
        "public class names given twice or more": sum(names.count(name) > 1 for name in set(names)),
        "comments per 100 lines": round(100 * sum(map(comments_of, texts.values())) / lines, 1),
        "functions with three isinstance calls or more": len(ladders),
        "places that assign a module's forward": len(replaced),
        "calls of explain( around an error's text": sum(is_call_of(node, "explain") for node in nodes),
    }


if __name__ == "__main__":
    for name, value in figures(Path(sys.argv[1])).items():
        print(f"{value:>8}  {name}")
