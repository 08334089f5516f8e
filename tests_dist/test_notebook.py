"""Ranks that are processes run functions of a notebook, in a real Jupyter kernel; skipped where Jupyter is missing."""

from __future__ import annotations

import pytest

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


@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_a_function_of_a_notebook_runs_on_processes_and_returns_the_notebooks_own_classes():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for package in ("ipykernel", "cloudpickle"):
        pytest.importorskip(package)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    assert "trained in a notebook" in str(notebook.cells[-1].outputs)
