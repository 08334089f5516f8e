"""Layers under torch's spectral norms, whose vectors are normalised in each forward, are cut like others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import MeanSquaredError, verify
from shardwright.errors import LayoutError

NORMS = {"hooks": nn.utils.spectral_norm, "parametrizations": nn.utils.parametrizations.spectral_norm}


class Discriminator(nn.Module):
    def __init__(self, norm):
        super().__init__()
        sizes = ((3, 8), (8, 16), (16, 16))
        self.layers = nn.Sequential(
            *(layer for i, o in sizes for layer in (norm(nn.Conv2d(i, o, 4, 2)), nn.LeakyReLU(0.2, inplace=True)))
        )
        self.mix, self.score = nn.Conv2d(16, 16, 1), norm(nn.Conv2d(16, 1, 1, bias=False))

    def forward(self, x):
        return self.score(torch.relu(self.mix(self.layers(x))))


def batches():
    numbers = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, 22, 22, generator=numbers), torch.randn(4, 1, 1, 1, generator=numbers))] * 2


@pytest.mark.parametrize("line", ["tp2", "tp2 dp2", "dp2/zero3"])
@pytest.mark.parametrize("norm", NORMS)
def test_layers_under_spectral_norms_are_cut_and_equal(norm, line):
    torch.manual_seed(0)
    verdict = verify(Discriminator(NORMS[norm]), line, batches(), loss=MeanSquaredError())
    assert verdict.equal
    if "tp2" in line:
        assert verdict.shares["tp2"] > 0.9


class OfNumbers(nn.Module):
    """Divides by the norm of a vector: of one number for each sample, or of a parameter."""

    def __init__(self, of_samples):
        super().__init__()
        self.a, self.b, self.score = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.scale, self.of_samples = nn.Parameter(torch.randn(16)), of_samples

    def forward(self, x):
        scale = self.scale if self.of_samples else nn.functional.normalize(self.scale, dim=0)
        h = self.score(torch.relu(self.b(torch.relu(self.a(x)))) * scale).squeeze(-1)
        return h / h.norm() if self.of_samples else h


@pytest.mark.parametrize("line", ["tp2/sp", "tp4/2d"])
def test_a_norm_of_a_vector_of_samples_is_refused_where_samples_are_cut_and_one_of_weights_is_equal(line):
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8)
    with pytest.raises(LayoutError, match="from other samples of the batch"):
        verify(OfNumbers(of_samples=True), line, [batch], loss=MeanSquaredError())
    assert verify(OfNumbers(of_samples=False), line, [batch], loss=MeanSquaredError()).equal
