"""What the import linter does not see, or cannot judge: imports by string, and imports inside functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import shardwright

SOURCE = Path(shardwright.__file__).parent
PROJECT = SOURCE.parents[1] / "pyproject.toml"

BY_STRING = {
    "cluster/ray_driver.py": "the driver of a Ray job is a file of its own, which another machine runs",
    "fork_server.py": "a new process is given its program as text, before anything of the package is imported there",
    "strategies/__init__.py": "the registry imports the files of its own folder",
    "comm/backends/task_pickle.py": "a function inside of a module's function is made again with that module's globals",
    "models/__init__.py": "a user's own factory, package.module:factory, is known by its name alone",
}

DTENSOR, VERBS, CYCLE = "loads DTensor", "loads rich and psutil: only for verbs that train or report", "needs this file"
PLANS = "only where a layout is planned"
INSIDE = {
    ("__init__.py", "global_tensor"): DTENSOR,
    ("__init__.py", "checkpoint"): DTENSOR,
    ("parallelize/run.py", "parallelize"): DTENSOR,
    ("cli/main.py", "train"): VERBS,
    ("cli/main.py", "report"): VERBS,
    ("cli/main.py", "cli"): VERBS,
    ("cli/main.py", "planner"): PLANS,
    ("cli/replaying.py", "train"): VERBS,
    ("cli/launching.py", "report"): VERBS,
    ("cli/weights.py", "train"): VERBS,
    ("cli/planning.py", "cli"): VERBS,
    ("cli/predicting.py", "cli"): VERBS,
    ("cli/predicting.py", "train"): VERBS,
    ("cli/calibrating.py", "cli"): VERBS,
    ("cli/calibrating.py", "planner"): PLANS,
    ("cli/planning.py", "cost"): PLANS,
    ("cli/planning.py", "models"): PLANS,
    ("cli/planning.py", "train"): VERBS,
    ("cli/calibrating.py", "train"): VERBS,
    ("cli/planning.py", "planner"): PLANS,
    ("cli/planning.py", "report"): VERBS,
    ("cli/reporting.py", "report"): VERBS,
    ("cli/reporting.py", "train"): VERBS,
    ("__init__.py", "planner"): PLANS,
    ("__init__.py", "train"): VERBS,
    ("cli/launching.py", "cli"): VERBS,
    ("global_tensor/tensor.py", "global_tensor"): CYCLE,
    ("global_tensor/indices.py", "global_tensor"): CYCLE,
    ("comm/launch.py", "comm"): "threads do not need what starts processes",
}


def heights():
    """The place of each package among the layers of pyproject.toml, the lowest first; the root knows all of them."""
    contracts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["shardwright"])
    found = {name: n for n, layer in enumerate(reversed(layers)) for name in re.findall(r"\w+", layer)}
    return {**found, "__init__": len(layers)}


@cache
def trees():
    """Each file of the package and its syntax tree."""
    files = sorted(SOURCE.rglob("*.py"))
    return [(path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def inside_functions(tree):
    """The packages of ours that functions of a file import."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                names = [node.module] if node.module != "shardwright" else [f"shardwright.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            assert not getattr(node, "level", 0), "imports name the whole path"
            yield from (name.split(".")[1] for name in names if name.startswith("shardwright."))


def by_string(tree):
    """The calls that import a module by its name, and texts of programs, other than docstrings, that import ours."""
    is_import = re.compile(r"\b(import|from)\s+shardwright\b").search
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
                yield node
        elif isinstance(node, ast.Constant) and id(node) not in alone and is_import(str(node.value)):
            yield node


def test_a_module_is_imported_by_string_only_where_it_has_a_reason():
    found = {file for file, tree in trees() if any(by_string(tree))}
    assert found == set(BY_STRING)


@pytest.mark.parametrize(
    "code",
    [
        "importlib.import_module(name)",
        "__import__(name)",
        "run(['-c', 'import os; from shardwright.comm import x'])",
        "P = f'import  shardwright as {name}'",
    ],
)
def test_each_way_to_import_by_string_is_found(code):
    assert list(by_string(ast.parse(code)))
    assert not list(by_string(ast.parse('"""\n>>> import shardwright\n"""\nimport shardwright')))


def through_faces(tree, faces):
    """The names that a file imports from a package which has them from a deeper file only, with the deeper path.

    ``faces`` are the names that the ``__init__.py`` of each package imports, by package and name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in faces:
            for name in (alias.name for alias in node.names):
                deeper = faces[node.module].get(name, f"{node.module}.{name}")
                if deeper != f"{node.module}.{name}":
                    yield f"{node.module}.{name}: {deeper}"


def imports_of(tree):
    """The names that the statements of a file import from elsewhere, with their whole paths."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def test_files_of_the_package_import_from_where_a_name_is_defined_and_leave_faces_to_users():
    all_trees = dict(trees())
    inits = {file: tree for file, tree in all_trees.items() if file.endswith("__init__.py")}
    faces = {".".join(["shardwright", *Path(file).parts[:-1]]): imports_of(tree) for file, tree in inits.items()}
    assert "GlobalTensor" in faces["shardwright.global_tensor"]
    found = [f"{file}: {name}" for file, tree in all_trees.items() for name in through_faces(tree, faces)]
    assert not found, "import from the deeper path"


def test_an_import_through_a_face_is_found():
    faces = {"shardwright.models": {"GPT": "shardwright.models.gpt.GPT"}}
    assert list(through_faces(ast.parse("from shardwright.models import GPT"), faces))
    assert not list(through_faces(ast.parse("from shardwright.models import gpt, build"), faces))


def test_an_import_inside_a_function_has_a_reason_and_goes_downward():
    found = {(file, target) for file, tree in trees() for target in inside_functions(tree)}
    assert found == set(INSIDE)
    height = heights()
    for file, target in found:
        assert height[target] <= height[re.split(r"[/.]", file)[0]], f"{file} imports {target}, a higher layer"


@pytest.fixture(scope="module")
def imported():
    """The modules that are loaded with the package, and with its reports."""
    program = """
import gc, sys, torch
passes = []
gc.callbacks.append(lambda phase, found: passes.append(phase))
frozen = gc.get_freeze_count()  # Python 3.12 starts with objects of its own
import shardwright
during_import = len(passes)
print(*sys.modules)
import shardwright.report.timelines
print(*sys.modules)
print(during_import, gc.isenabled(), gc.get_freeze_count() - frozen)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_matplotlib_is_imported_only_when_something_is_drawn(imported):
    assert {"shardwright.report", "shardwright.report.timelines"} <= set(imported[1])
    assert "matplotlib" not in imported[1]


def test_importing_the_package_loads_neither_dtensor_nor_matplotlib_nor_rich(imported):
    loaded = imported[0]
    assert "shardwright.verify" in loaded
    assert not {"torch.distributed.tensor", "shardwright.global_tensor", "matplotlib", "rich"} & set(loaded)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("has_triton", [True, False])
def test_the_command_keeps_nothing_from_collection_at_its_end_where_triton_would_tell_of_it(has_triton):
    """Elsewhere the last pass over what was imported would take a third of a second, for nothing."""
    program = f"""
import atexit, gc, sys, types
sys.argv = ["shardwright", "--help"]
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 10_000))
from shardwright import command_start
from shardwright.cli.main import main
sys.modules |= {{"triton": types.ModuleType("triton")}} if {has_triton} else {{}}
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"frozen {not has_triton}"


def test_garbage_is_not_collected_while_the_package_is_imported_and_is_afterwards(imported):
    passes, is_enabled, frozen = imported[2]
    assert int(passes) <= 4, "before and after the block of imports"
    assert (is_enabled, frozen) == ("True", "0"), "in a program that is not the command"
