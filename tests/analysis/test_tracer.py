"""Weights that a model's own code reads: a trace shows what is done with them and computes nothing of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.chunks.arguments import bind
from shardwright.analysis.chunks.call_graph import ChunkedModel, prepare, read_graph, run, sites
from shardwright.analysis.traced.kept_traces import kept, traces_kept
from shardwright.analysis.traced.structure import trace
from shardwright.errors import LayoutError


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(3, 3), read
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.layer(x) * self.read(self)


READS = {
    "a method": lambda m: m.layer.weight.sum(),
    "a function": lambda m: torch.linalg.norm(m.layer.weight),
    "a property": lambda m: m.layer.weight.T[0],
    "an operator": lambda m: 2 * m.layer.bias,
    "a buffer": lambda m: m.count + 1,
    "two weights": lambda m: torch.stack([m.layer.bias, m.layer.weight[0]]).mean(0),
    "a shape": lambda m: m.layer.weight.shape[0],
}


@pytest.mark.parametrize("name", READS)
def test_what_is_computed_from_a_weight_follows_the_weight(name):
    model, x = Reads(READS[name]), torch.randn(2, 3)
    graph = read_graph(model)
    chunked = ChunkedModel(graph, {site: 0 for _, site in sites(graph) if site is not None}, 1)
    ready = prepare(model, chunked, 0)
    for _ in range(2):
        torch.testing.assert_close(run(ready, bind(chunked, x)), model(x), rtol=0, atol=0)
        with torch.no_grad():  # a number kept from the trace would be an old one
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)


def test_a_trace_writes_into_nothing():
    model = Reads(lambda m: m.count.add_(1))
    trace(model, shows_weights=True)
    assert model.count.item() == 0


def test_code_that_counts_in_a_buffer_of_its_own_is_not_cut_into_stages():
    with pytest.raises(LayoutError, match="writes into 'count'"):
        read_graph(Reads(lambda m: m.count.add_(1)))


class Pooled(nn.Module):
    def __init__(self, *, indices):
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=indices)

    def forward(self, x):
        y = self.pool(x)
        if isinstance(y, tuple):
            y = y[0]
        return y * 2


@pytest.mark.parametrize("indices", [False, True])
def test_a_pooling_that_returns_indices_returns_a_tuple(indices):
    model, x = Pooled(indices=indices), torch.randn(1, 1, 4, 4)
    graph = trace(model)
    assert torch.equal(nn.Module.__call__(torch.fx.GraphModule(model, graph), x), model(x))


class Adaptive(nn.Module):
    """A head whose output is a tuple with names, in code that asks what it is."""

    def __init__(self, asks):
        super().__init__()
        self.head, self.asks = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]), asks

    def forward(self, x, targets):
        y = self.head(x, targets)
        return y * 0 if self.asks and isinstance(y, torch.Tensor) else y.loss


def test_the_result_of_an_adaptive_softmax_is_taken_for_no_tensor():
    """A trace that took it for one would follow the other branch than a run."""
    failures = []
    assert trace(Adaptive(True), failures=failures) is None
    assert "head" in str(failures[0])
    assert trace(Adaptive(False)) is not None


class Unreadable(nn.Linear):
    traced = 0

    def forward(self, x):
        type(self).traced += 1
        return super().forward(x) if x.sum() > 0 else x


def test_of_alike_modules_one_is_traced_in_all_plans_of_a_search_also_if_it_cannot_be():
    first, second, wide = Unreadable(2, 2), Unreadable(2, 2), Unreadable(2, 4)
    with traces_kept():
        for module in (first, second, wide):
            with traces_kept():
                assert kept(module, trace) is None
    assert Unreadable.traced == 2
    assert kept(second, trace) is None  # outside, each call traces
    assert Unreadable.traced == 3
