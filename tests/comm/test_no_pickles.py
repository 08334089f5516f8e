"""No module but the launcher's own reads a pickle: from a socket, a store or a file it could run any code."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shardwright"
LAUNCHER = {"comm/backends/processes.py", "comm/backends/started_ranks.py", "comm/failures.py"}
"""They pickle what passes through pipes that a rank inherits, which no other process can open."""


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            yield from ([module] if module else [alias.name for alias in node.names])
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr.endswith("_object"):
            yield node.attr  # torch.distributed's collectives of objects


def test_only_the_launcher_pickles_and_it_reads_from_inherited_pipes_alone():
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch.load", "torch.save", "all_gather_object",
              "broadcast_object", "multiprocessing.connection"}  # fmt: skip
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if unsafe & set(names_in(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == LAUNCHER
