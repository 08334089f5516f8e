"""BatchNorms of tables and of one sample at a time, weights that hooks scale, and functions that write in place."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import nn

from shardwright import CrossEntropy, MeanSquaredError, verify
from shardwright.errors import LayoutError


class OfTable(nn.Module):
    """Normalizes a table of items, of which samples take rows, as graph and recommender models do."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, items):
        return self.head(self.norm(self.table.weight)[items])


class OfEach(nn.Module):
    """Normalizes the items of one sample after another, as episodes of few-shot learning are."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return torch.stack([self.head(self.norm(self.layer(items)).relu()).mean(0) for items in x])


ITEMS = [(torch.randint(6, (8,)), torch.randint(3, (8,)))] * 2
EPISODES = [(torch.randn(4, 6, 4), torch.randint(3, (4,)))] * 2


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "dp2 mb2/own-statistics", "tp2", "dp2/zero1 tp2"])
def test_a_batch_norm_of_a_table_has_the_statistics_of_one_table(line):
    verdict = verify(OfTable(), line, ITEMS, loss=CrossEntropy())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_batch_norm_of_one_sample_after_another_is_refused_where_ranks_have_some_of_them(line):
    with pytest.raises(LayoutError, match="native_batch_norm over the samples in 'norm'"):
        verify(OfEach(), line, EPISODES, loss=CrossEntropy())


@pytest.mark.parametrize("line", ["tp2", "mb2/own-statistics"])
def test_a_batch_norm_of_one_sample_after_another_is_equal_where_each_rank_has_all(line):
    verdict = verify(OfEach(), line, EPISODES, loss=CrossEntropy())
    assert verdict.equal, str(verdict)


def scale(module, args):
    weight = module.weight_orig
    module.weight = weight * sqrt(2 / (weight.data.size(1) * weight.data[0][0].numel()))


class Scaled(nn.Module):
    """Layers whose weights a hook makes in each forward from others, as StyleGAN's do; at first they have none."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        for layer in (self.up, self.down):
            layer.register_parameter("weight_orig", layer._parameters.pop("weight"))
            layer.register_forward_pre_hook(scale)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("line", ["tp2", "dp2 tp2", "dp2/zero3"])
def test_weights_that_a_hook_scales_by_sizes_of_the_parameter_are_cut(line):
    x, plans = torch.randn(4, 8), []
    verdict = verify(Scaled(), line, [(x, x)] * 2, loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    if "tp" in line:
        assert "tp" in plans[0].compute["up.weight_orig"].axes


class Rotate(torch.autograd.Function):
    """Rotates pairs of features in place, through views, as rotary positions of diffusion transformers do."""

    @staticmethod
    def forward(x, angles):
        first, second = x[..., :2], x[..., 2:4]
        rotated = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        first.copy_(rotated[0])
        second.copy_(rotated[1])
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        return Rotate.apply(gradient.clone(), -ctx.saved_tensors[0]), None


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("angles", torch.rand(2))

    def forward(self, x):
        heads = self.up(x).unflatten(-1, (4, 4)) * 1.0
        return self.down(Rotate.apply(heads, self.angles).flatten(-2))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3 tp2"])
def test_a_function_of_autograd_that_writes_through_views_is_recorded(line):
    x = torch.randn(4, 8)
    verdict = verify(Rotated(), line, [(x, x)] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class OfSelected(nn.Module):
    """Normalizes the rows that a mask among the inputs selects: these are of all ranks' samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, mask):
        hidden = self.layer(x)
        chosen = torch.zeros_like(hidden)
        chosen[mask] = self.norm(hidden[mask])
        return self.head(chosen.mean(1))


def test_a_batch_norm_of_selected_rows_has_the_statistics_of_those_of_all_ranks():
    mask = torch.tensor([[True, False, True, True, False, True]] * 2 + [[False, True, True, True, True, False]] * 2)
    batch = (torch.randn(4, 6, 4), mask), torch.randint(3, (4,))
    verdict = verify(OfSelected(), "dp2", [batch] * 2, loss=CrossEntropy())
    assert verdict.equal, str(verdict)
