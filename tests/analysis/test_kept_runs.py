"""Forwards that are recorded once for all plans of a search."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.analysis.model_graph import ModelGraph, RecordStore


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) * 2


def graph(model, samples, width=3, kept=None, values=None):
    return ModelGraph(model, torch.empty(samples, 4, width, device="meta"), values, kept=kept or RecordStore())


def test_graphs_of_one_model_share_a_run_for_each_number_of_samples():
    model, kept = Doubles(), RecordStore()
    first, second = graph(model, 2, kept=kept), graph(model, 5, kept=kept)
    assert first.run is second.run
    assert first.every_run[1] is not second.every_run[1]
    assert first.every_run[1] is graph(model, 2, kept=kept).every_run[1]
    assert first.run is not graph(model, 2).run


def test_other_models_and_other_shapes_have_runs_of_their_own():
    model, kept = Doubles(), RecordStore()
    first = graph(model, 2, kept=kept)
    assert first.run is not graph(Doubles(), 2, kept=kept).run
    longer = ModelGraph(model, torch.empty(2, 5, 3, device="meta"), kept=kept)
    assert longer.run.recording.inputs[0].shape[1:] == (5, 3)


def test_runs_on_values_are_not_shared():
    class Reads(Doubles):
        def forward(self, x):
            return (
                super().forward(x) * (2 if x[0, 0, 0].item() > 0 else 1) + torch.ones(int(x.max().item()), 1, 1).sum()
            )

    model, kept = Reads(), RecordStore()
    ones = graph(model, 2, kept=kept, values=torch.ones(2, 4, 3))
    assert ones.reads_values
    twos = graph(model, 2, kept=kept, values=2 * torch.ones(2, 4, 3))
    assert ones.run is not twos.run
