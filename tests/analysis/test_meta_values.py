"""Code that reads values runs on the meta device: what it is told, and what only a real run can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.meta_values import MetaValues
from shardwright.analysis.recording import record_forward


class ChecksItsInputs(nn.Module):
    """A table whose forward asks something about the ids that it is given."""

    def __init__(self, check):
        super().__init__()
        self.table, self.check = nn.Embedding(8, 4), check

    def forward(self, ids):
        self.check(ids)
        return self.table(ids)


def warns(ids):
    if 0 in ids[:, [-1, 0]]:
        raise AssertionError("an answer of yes would say that these are padded")


def asserts(ids):
    assert (ids < 8).all()


@pytest.mark.parametrize("check", [warns, asserts])
def test_a_check_of_the_inputs_does_not_hinder_recording(check):
    recording = record_forward(ChecksItsInputs(check).to("meta"), torch.zeros(2, 3, dtype=torch.int64, device="meta"))
    assert [use.shape for use in recording.outputs] == [(2, 3, 4)]


@pytest.mark.parametrize("draw", [lambda: torch.rand([]), lambda: torch.empty(3).uniform_()])
def test_numbers_drawn_on_the_cpu_are_the_same_in_every_recording(draw):
    before = torch.get_rng_state()
    with MetaValues():
        assert (draw() == 0.5).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("x", "w", "grouped", "shape"),
    [((8, 4), (2, 4, 6), True, (8, 6)), ((2, 8, 4), (4, 6), True, (8, 6)), ((8, 4), (4, 6), True, (2, 8, 6)),
     ((2, 8, 4), (2, 4, 8), False, (2, 8, 8))],
)  # fmt: skip
def test_products_of_groups_have_a_shape_on_meta_in_every_dtype(x, w, grouped, shape):
    offsets = torch.tensor([4, 8], dtype=torch.int32, device="meta") if grouped else None
    with MetaValues():
        found = torch._grouped_mm(torch.empty(x, device="meta"), torch.empty(w, device="meta"), offs=offsets)
    assert found.shape == shape
