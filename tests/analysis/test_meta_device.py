"""Models on the meta device: what code makes without naming a device, and layers that fail there for no samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.ledger.account import predict_memory
from shardwright.models import CrossEntropy
from shardwright.plan.plan import Job


class Causal(nn.Module):
    """Its forward makes masks, positions and factors on whatever device torch takes, or on that of its input."""

    def __init__(self, named=False):
        super().__init__()
        self.named = named
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True, dropout=0.0)
        self.token, self.position = nn.Embedding(31, 12), nn.Embedding(16, 12)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 31)

    def forward(self, x):
        where = x.device if self.named else None
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=where))
        h = h * torch.linspace(1, 2, 12, dtype=h.dtype, device=where)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype, device=where)
        return self.head(self.encoder(h, mask=mask))


def tokens():
    x = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(0))
    return x, x.flip(1).contiguous()


@pytest.mark.parametrize("line", ["pp2", "pp2 mb2 tp2", "tp2/auto"])
def test_what_a_forward_makes_without_naming_a_device_meets_what_has_no_values(line):
    verdict = verify(Causal(), line, [tokens()])
    assert verdict.equal, str(verdict)


def test_the_memory_of_a_forward_that_names_no_device_is_predicted_as_of_one_that_does():
    apart, named = (predict_memory(Job(Causal(x), CrossEntropy()), "single", 0, tokens()) for x in (False, True))
    assert apart.peak == named.peak


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_no_pictures_are_enlarged_as_one_is(mode):
    layer = nn.Upsample(scale_factor=(2, 1.5), mode=mode)
    sizes = []
    for num_samples in (0, 1):
        x = torch.empty(num_samples, 3, 4, 5, device="meta", requires_grad=True)
        with on_meta(layer):
            y = layer(x)
            y.sum().backward()
        assert x.grad.shape == x.shape
        sizes.append((len(y), *y.shape[1:]))
    assert sizes == [(0, 3, 8, 7), (1, 3, 8, 7)]


def test_a_recurrent_function_may_be_called_with_keywords():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            start = torch.zeros(1, len(x), 4)
            weights = [getattr(self.inner, name) for name in self.inner._flat_weights_names]
            return torch.gru(
                input=x, hx=start, params=weights, has_biases=True, num_layers=1, dropout=0.0, train=False,
                bidirectional=False, batch_first=True,
            )[0]  # fmt: skip

    with on_meta(module := Keywords().to("meta")):
        assert module(torch.empty(3, 5, 4, device="meta")).shape == (3, 5, 4)
