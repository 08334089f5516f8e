"""A part of a batch that a rank loaded by itself: only the samples of its share are taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError, PlanError


def test_a_part_with_another_number_of_samples_than_the_share_is_refused():
    plain, x, y = nn.Linear(3, 3), torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)

    def work(world):
        run = sw.parallelize(plain, "dp2", world)
        mine = run.share(4)
        with pytest.raises(LayoutError, match="another number of samples") as refused:
            run.part(x, y, 4)
        assert "4 samples of 4" in str(refused.value)
        return len(run.part(x[mine.start : mine.stop], y[mine.start : mine.stop], 4).samples)

    assert sw.launch(work, 2, ranks="threads") == [2, 2]


def test_a_part_whose_targets_are_of_other_samples_than_its_inputs_is_refused():
    plain = nn.Linear(3, 3)

    def work(world):
        run = sw.parallelize(plain, "dp2", world)
        with pytest.raises(LayoutError, match="different numbers of samples"):
            run.part(torch.randn(2, 3), torch.zeros(4, dtype=torch.int64), 4)

    sw.launch(work, 2, ranks="threads")


@pytest.mark.parametrize("arguments", [1, 2, 3])
def test_a_part_without_the_number_of_samples_of_its_batch_is_refused_with_the_call(arguments):
    x, y = torch.randn(2, 3), torch.zeros(2, dtype=torch.int64)
    given, plain = (((x, y),), (x, y), (x, y, y)), nn.Linear(3, 3)

    def work(world):
        run = sw.parallelize(plain, "dp2", world)
        with pytest.raises(PlanError, match=r"write run.part\(inputs, targets, num_global\)"):
            run.part(*given[arguments - 1])

    sw.launch(work, 2, ranks="threads")
