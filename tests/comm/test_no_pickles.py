"""No module but the launcher's own reads a pickle: from a socket, a store or a file it could run any code."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shardwright"
WRITES = "comm/backends/task_pickle.py"
LAUNCHER = {"comm/backends/processes.py", "comm/backends/started_ranks.py", "comm/failures.py", WRITES}
"""They pickle what passes through pipes that a rank inherits, which no other process can open; one writes alone."""

FILES = {"weights/targets.py", "weights/torch_folder.py", "weights/torch_records.py"}
"""They write and read torch's own formats: one writes alone, one lets a pickle name a few classes, one lets torch."""

DIGEST = "planner/model_digest.py"
"""It pickles a model to tell it from others by a digest of the bytes, which are neither kept nor read."""

MODULES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing.connection",
           "multiprocessing.reduction", "torch.serialization")  # fmt: skip
CALLS = ("torch.load", "torch.save", "torch.package")
"""What pickles, or may; torch.distributed's collectives of objects are known by ``_object`` in their names."""


def names_in(tree):
    """The full names of what a module imports, and the dotted names that its code reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.arg


def pickles(text):
    """Whether a module's text imports or names something by which it could read a pickle."""
    return any(
        name == "allow_pickle"
        or any(name == each or name.startswith(f"{each}.") for each in (*MODULES, *CALLS))
        or any("_object" in part for part in name.split(".")[-1:] if "distributed" in name or name.startswith("dist."))
        for name in names_in(ast.parse(text))
    )


@pytest.mark.sampled(0)
def test_only_the_launcher_pickles_and_it_reads_from_inherited_pipes_alone():
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if pickles(path.read_text(encoding="utf-8"))
    }
    assert found == LAUNCHER | FILES | {DIGEST}
    reads = {f"{module}.{name}" for module in ("pickle", "cloudpickle") for name in ("load", "loads")}
    for path in (WRITES, DIGEST, *FILES):
        assert not reads.intersection(names_in(tree_of(path))), path
    for path in (WRITES, DIGEST, "weights/targets.py"):
        assert "pickle.Unpickler" not in names_in(tree_of(path)), path


def test_files_of_torch_are_read_with_what_their_pickles_may_name():
    folder = tree_of("weights/torch_folder.py")
    (reader,) = [each for each in ast.walk(folder) if isinstance(each, ast.ClassDef) and each.name == "_Unpickler"]
    assert "find_class" in [each.name for each in reader.body if isinstance(each, ast.FunctionDef)]
    calls = [
        each
        for path in FILES
        for each in ast.walk(tree_of(path))
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "torch.load"
    ]
    assert calls
    for call in calls:
        assert ("weights_only", "True") in [(each.arg, ast.unparse(each.value)) for each in call.keywords]


def tree_of(path):
    """The code of a module of the library."""
    return ast.parse((SOURCE / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import pickle as safe",
        "from pickle import loads",
        "import marshal",
        "from _pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "from torch.serialization import load",
        "dist.broadcast_object_list(found)",
        "dist.all_gather_object(found, mine)",
        "torch.distributed.gather_object(x)",
        "dist.scatter_object_list(found, mine)",
        "dist.recv_object_list(found)",
        "from torch.distributed import all_gather_object",
        "import torch.distributed as dist; dist.send_object_list([])",
        "from multiprocessing import connection",
        "import multiprocessing.connection",
        "from multiprocessing.connection import Client",
        "np.load(path, allow_pickle=True)",
        "import cloudpickle",
    ],
)
def test_each_way_of_reading_a_pickle_is_seen(line):
    assert pickles(line)


@pytest.mark.parametrize("line", ["import json", "from torch import nn", "torch.loads = 1", "self.held_objects(x)"])
def test_what_reads_no_pickle_is_left_alone(line):
    assert not pickles(line)
