"""Notebooks in a real Jupyter kernel: functions of one on ranks that are processes, and every tutorial.

Skipped where Jupyter is missing, or a package that a tutorial is about.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TUTORIALS = sorted(Path(__file__).parents[1].glob("examples/tutorials/*.ipynb"))
NEEDED = {"lora": ("transformers", "peft"), "transformers_model": ("transformers",)}
"""The packages that tutorials are about, by name."""

CELLS = [
    """
import torch, shardwright as sw
from dataclasses import dataclass

@dataclass
class Found:
    loss: float
    rank: int

model = torch.nn.Linear(4, 3)
batch = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)

def work(world, steps):
    run = sw.parallelize(model, "dp2/zero3", world)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for part in run.shard([batch] * steps):
        loss = run.step(part, update=optimizer)
    return Found(loss.item(), world.rank)
""",
    """
found = sw.launch(work, "dp2/zero3", 3, ranks="processes")
assert [type(each) is Found for each in found] == [True, True]
assert [each.rank for each in found] == [0, 1] and found[0].loss == found[1].loss
print("trained in a notebook")
""",
]


def run(notebook, folder=None):
    """Runs the cells of a notebook in a kernel of its own, in ``folder``; an error in one is raised."""
    nbclient = pytest.importorskip("nbclient")
    for package in ("ipykernel", "cloudpickle"):
        pytest.importorskip(package)
    resources = {} if folder is None else {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()


@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_a_function_of_a_notebook_runs_on_processes_and_returns_the_notebooks_own_classes():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    run(notebook)
    assert "trained in a notebook" in str(notebook.cells[-1].outputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_in_a_kernel_and_prints_as_much_as_it_shows(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    for package in NEEDED.get(path.stem, ()):
        pytest.importorskip(package)
    shown, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    run(notebook, tmp_path)
    for cell, before in zip(notebook.cells, shown.cells, strict=True):
        if cell.cell_type == "code":
            assert num_lines(cell) == num_lines(before), cell.source


def num_lines(cell):
    """The lines that a cell has printed; what libraries say on stderr, such as warnings, does not count."""
    printed = (each for each in cell.outputs if each.output_type != "stream" or each.name == "stdout")
    return sum(str(each.get("text", each.get("data"))).count("\n") for each in printed)
