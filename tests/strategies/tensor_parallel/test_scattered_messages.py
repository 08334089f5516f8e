"""Layers of graph networks: messages between nodes are added where an index says, and features are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw

NODES, EDGES = 7, 20
WAYS = {
    "scatter_add": lambda zeros, to, sent: zeros.scatter_add(-2, to.view(-1, 1).expand_as(sent), sent),
    "scatter_add_": lambda zeros, to, sent: zeros.scatter_add_(-2, to.view(-1, 1).expand_as(sent), sent),
    "scatter_reduce": lambda zeros, to, sent: zeros.scatter_reduce(-2, to.view(-1, 1).expand_as(sent), sent, "amax"),
    "index_add": lambda zeros, to, sent: zeros.index_add(-2, to, sent),
}


class GraphLayer(nn.Module):
    """Sends what one layer makes of each node along the edges, and adds what a second one makes of the sums."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down, self.way = nn.Linear(12, 24), nn.Linear(24, 12), WAYS[way]

    def forward(self, x, edges):
        y = self.up(x)
        sums = self.way(torch.zeros_like(y), edges[1], y.index_select(-2, edges[0]))
        return x + self.down(sums.relu())


def batch(num=5):
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=draw)
    x, y = (torch.randn(num, NODES, 12, generator=draw) for _ in range(2))
    return {"x": x, "edges": sw.whole(edges)}, y


@pytest.mark.parametrize("line", ["tp2", "tp3", "dp2/zero3 tp2", "pp2/1f1b mb2 tp2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(100)
def test_features_of_nodes_are_cut_whatever_adds_up_their_messages(way, line):
    torch.manual_seed(0)
    model = nn.ModuleList([GraphLayer(way), GraphLayer(way)])

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x, edges):
            for layer in self.layers:
                x = layer(x, edges)
            return x

    verdict = sw.verify(Network(), line, [batch()], loss=sw.MeanSquaredError())
    assert verdict.equal, str(verdict)
    assert verdict.shares[next(each for each in line.split() if each.startswith("tp"))] > 0.9


@pytest.mark.parametrize("way", ["scatter_add", "index_add"])
def test_messages_between_samples_are_warned_of_where_the_batch_is_cut(way):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.way = nn.Linear(12, 12), WAYS[way]

        def forward(self, x):
            y = self.up(x)
            first = torch.arange(len(y)) // 2
            return y + self.way(torch.zeros_like(y), first, y).index_select(0, first)

    with pytest.warns(UserWarning, match="over all samples of a batch, which this layout cuts"):
        verdict = sw.verify(Between(), "dp2", [(torch.randn(6, 12), torch.randn(6, 12))], loss=sw.MeanSquaredError())
    assert not verdict.equal
