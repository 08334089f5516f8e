"""What a run held is given back once nobody holds the run."""

from __future__ import annotations

import gc
import os
from weakref import ref

import pytest
import torch
from torch import nn

import garbage
import shardwright as sw

LINES = ["single", "dp2", "dp2/zero3", "tp2", "pp2 mb2", "recompute:full", "dp1/zero1/offload:disk"]


@pytest.fixture(scope="module", autouse=True)
def _among_what_is_new():
    """Garbage is looked for among what these tests make, and not in all that tests before them have left."""
    garbage.collect()


def plain():
    with sw.without_values():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))


def held_after_a_launch(line, folder):
    """Weak references to what the runs were made of, and how many files are open."""
    seen = []

    def work(world):
        run = sw.parallelize(plain(), line, world, offload_folder=folder)
        optimizer = run.optimizer(torch.optim.AdamW)
        (batch,) = run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])
        run.step(batch)
        optimizer.step()
        seen.extend(map(ref, (run, run.model, run._executor, optimizer, *run.parameters.values())))

    sw.launch(work, sw.Layout.parse(line), ranks="threads")
    gc.collect()
    return seen, len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("line", LINES)
def test_a_launch_leaves_no_model_and_no_open_file(line, tmp_path):
    _, num_files = held_after_a_launch(line, tmp_path)
    seen, num_files_after = held_after_a_launch(line, tmp_path)
    assert len(seen) > 4
    assert [type(kept()).__name__ for kept in seen if kept() is not None] == []  # a dropped weight cannot be shown
    assert num_files_after == num_files
