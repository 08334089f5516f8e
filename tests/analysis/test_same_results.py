"""What the check of traced calls says of values that chunks send each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.chunks.call_graph import CallSite, ChunkedModel, read_graph
from shardwright.analysis.chunks.same_results import difference_from_forward

WIDTH = 6


class TwoChunks(nn.Module):
    """A layer and what ``between`` makes of its result in chunk 0; in chunk 1 another layer, and then ``after``."""

    def __init__(self, between, after):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.after = between, after

    def forward(self, x):
        h = self.between(self.first(x))
        return self.after(self.last(h), h)


def difference(between, after):
    model = TwoChunks(between, after).to("meta")
    chunked = ChunkedModel(read_graph(model), {CallSite("first"): 0, CallSite("last"): 1}, 2)
    return difference_from_forward(model, chunked, torch.ones(3, WIDTH, WIDTH))


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h * 2,
        lambda h: h.transpose(0, 1),
        lambda h: h[:, 1:3],
        lambda h: h[:, ::2].transpose(0, 2)[1:5].movedim(2, 0),
        lambda h: h.movedim(1, 0).contiguous(),
        lambda h: h.mean(1, keepdim=True).expand(3, 4, WIDTH),
    ],
    ids=["whole", "transposed", "slice", "views of views", "copied", "expanded"],
)
def test_a_view_that_one_chunk_sends_and_another_reads_is_no_difference(view):
    assert difference(view, lambda y, h: y + h.relu()) == ""
    assert difference(view, lambda y, h: y.reshape(-1) * h.transpose(0, 1).transpose(0, 1).reshape(-1)) == ""


@pytest.mark.parametrize(
    ("between", "after"),
    [
        (lambda h: (h.transpose(0, 1), h), lambda h, y: h[0].add_(1).sum() + h[1].sum() + y.sum()),
        (lambda h: (h[:, :2], h), lambda h, y: h[0].relu_().sum() + h[1].sum() + y.sum()),
    ],
    ids=["transposed", "slice"],
)
def test_a_write_into_one_of_two_names_of_a_value_that_cross_is_a_difference(between, after):
    class Writes(TwoChunks):
        def forward(self, x):
            h = self.between(self.first(x))
            return self.after(h, self.last(h[1]))

    model = Writes(between, after).to("meta")
    chunked = ChunkedModel(read_graph(model), {CallSite("first"): 0, CallSite("last"): 1}, 2)
    x = torch.ones(3, WIDTH, WIDTH)
    assert difference_from_forward(model, chunked, x).startswith("a stage writes in place")
