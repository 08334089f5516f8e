"""Idioms that repositories have, and tutorials repeat: each is equal to one device, and cut, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.errors import PlanError
from shardwright.models import MeanSquaredError
from shardwright.strategies.tensor_parallel.shards_plan import share_cut

WIDTH, HIDDEN = 8, 32


class Block(nn.Module):
    """Two layers; ``before`` is what code does with their input, ``inside`` with what lies between."""

    def __init__(self, before=lambda x: x, inside=torch.relu):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.before, self.inside = before, inside

    def forward(self, x):
        return x + self.down(self.inside(self.up(self.before(x))))


def strongest_period(x):
    """Folds the tokens of each sample by the period that NumPy reads of their spectrum."""
    spectrum = torch.fft.rfft(x, dim=1).abs().mean(0).mean(-1)
    (frequency,) = torch.topk(spectrum[1:], 1)[1].detach().cpu().numpy()
    period = 4 if frequency < 99 else 1  # the same for each rank, whatever samples it has
    return x.reshape(-1, period, WIDTH).reshape(x.shape)


def tokens():
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, 6, 12, WIDTH, generator=generator)) for _ in range(2)]


def check(model, line, *, least=0.0, dtype=None):
    plans = []
    verdict = verify(
        model, line, tokens(), loss=MeanSquaredError(), dtype=dtype, alter=lambda run: plans.append(run.plan)
    )
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) >= least
    return verdict


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "dp2 tp2"])
@pytest.mark.filterwarnings("ignore:.*over all samples of a batch")  # the spectrum is a mean of them
def test_a_number_that_numpy_reads_of_an_activation(line):
    torch.manual_seed(0)
    blocks = [Block(strongest_period, lambda x: functional.dropout(x.flatten(0, 1), 0.1).view(x.shape)) for _ in "ab"]
    check(nn.Sequential(*blocks), line, least=0.9 if "tp" in line else 0.0)


class Masked(Block):
    """Picks elements of a weight by a mask in uint8, as code from before torch had masks of bool does."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("mask", torch.eye(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.matrix[self.mask.byte()]


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2"])
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_a_mask_in_uint8(line):
    torch.manual_seed(0)
    check(nn.Sequential(Masked(), Masked()), line, least=0.8 if "tp" in line else 0.0)


class FanIn(nn.Module):
    """A layer that asks for the size of one row of its weight, as magnitude-preserving ones do."""

    def __init__(self, num_in, num_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in))

    def forward(self, x):
        return x @ (self.weight / self.weight[0].numel() ** 0.5).t()


class FanInBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = FanIn(WIDTH, HIDDEN), FanIn(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(functional.silu(self.up(x)))


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d"])
def test_the_size_of_a_row_of_a_weight(line):
    torch.manual_seed(0)
    check(nn.Sequential(FanInBlock(), FanInBlock()), line, least=0.9)


class Typed(nn.Module):
    """Converts positions to the type of the activations, whose name it asks for, between the modules of stages."""

    def __init__(self):
        super().__init__()
        self.first, self.positions = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        x = x + self.positions(x).type(x.type())
        return sum(block(x) for block in self.blocks)


@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/1f1b mb2 tp2"])
def test_the_name_of_a_type(line):
    torch.manual_seed(0)
    check(Typed(), line)


class Both(nn.Module):
    """Two pictures in one batch, with dropout, and a cast to float32, as models of optical flow have."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        hidden = functional.dropout(self.up(torch.cat([x, x.flip(1)])).relu(), 0.2)
        one, other = hidden.split([len(x), len(x)])
        return self.down((one * other).float())


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3", "tp2"])
def test_dropout_of_two_halves_in_a_model_that_runs_in_float32_alone(line):
    torch.manual_seed(0)
    assert check(Both(), line).only_float32


class NormalizesItself(nn.Linear):
    """Keeps its rows at length one by writing to them in each forward."""

    def forward(self, x):
        weight = self.weight
        with torch.no_grad():
            self.weight.copy_(functional.normalize(self.weight))
        return functional.linear(x, functional.normalize(weight), self.bias)


@pytest.mark.parametrize("line", ["dp2", "mb2", "tp2"])
def test_a_layer_that_writes_to_its_weight(line):
    torch.manual_seed(0)
    check(nn.Sequential(NormalizesItself(WIDTH, WIDTH), Block()), line)


def test_is_told_that_stages_run_other_microbatches_before_the_backward():
    torch.manual_seed(0)
    model = nn.Sequential(*(NormalizesItself(WIDTH, WIDTH) for _ in range(4)))
    with pytest.raises(PlanError, match="writes to a tensor that the backward of an earlier microbatch needs"):
        check(model, "pp2/gpipe mb2")


def test_an_error_in_both_dtypes_is_told_of_both():
    with pytest.raises(RuntimeError) as failure:
        verify(Block(before=lambda x: x.half()), "dp2", tokens(), loss=MeanSquaredError())
    assert "In float32 plain torch has no result either" in failure.value.__notes__[0]
