"""Idioms that repositories have, and tutorials repeat: each is equal to one device, and cut, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.errors import LayoutError, PlanError
from shardwright.models import MeanSquaredError
from shardwright.models.model_loss import ModelLoss
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


def test_fractions_that_numpy_reads_are_not_guessed():
    model = Block(inside=lambda hidden: hidden * float(hidden.detach().mean().numpy()))
    with pytest.raises(PlanError, match=r"cannot be recorded(.*\n)*.*to numpy"):
        _ = ModelGraph(model, torch.empty(2, WIDTH)).run


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


class Rotates(nn.Module):
    """Has a forward that nobody calls, and a method that gives its table, as the embeddings of EVA and DINOv3."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(12, 2 * WIDTH), persistent=False)

    def embeddings(self):
        return self.table.chunk(2, -1)

    def forward(self, x):
        return x * self.table[0, :WIDTH]


class Turned(Block):
    def forward(self, x, turns):
        one, other = turns
        rest = x[:, -12:]
        return super().forward(torch.cat([x[:, :-12], rest * one + rest.flip(-1) * other], 1))


class WithToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns, self.token = Rotates(), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Turned() for _ in range(4))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.first(x)], 1)
        turns = self.turns.embeddings()
        for block in self.blocks:
            x = block(x, turns)
        return x[:, 1:]


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp2/1f1b tp2", "tp2"])
def test_a_table_that_a_method_gives(line):
    torch.manual_seed(0)
    check(WithToken(), line)


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
    assert "In float32 plain torch has no result:" in failure.value.__notes__[0]


class OwnLoss(nn.Module):
    """Reconstructs its input, and returns the mean of its own loss, as ``give`` says."""

    def __init__(self, give):
        super().__init__()
        self.layer, self.give = nn.Linear(WIDTH, WIDTH), give

    def forward(self, x):
        output = self.layer(x)
        return self.give(output, (output - x).square().mean())


OUTPUTS = {
    "alone": lambda output, loss: loss,
    "in a dict": lambda output, loss: {"loss": loss},
    "behind the output": lambda output, loss: (output, loss),
    "in front of it": lambda output, loss: (loss, output),
}


@pytest.mark.parametrize("line", ["dp2", "mb3", "tp2", "pp1 dp3"])
@pytest.mark.parametrize("how", OUTPUTS)
def test_a_model_that_learns_without_labels_and_returns_its_loss(how, line):
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, WIDTH)}
    verdict = verify(OwnLoss(OUTPUTS[how]), line, [batch] * 2, loss=ModelLoss("x", over="samples"))
    assert verdict.equal, str(verdict)


def test_the_message_about_missing_labels_says_how_a_model_learns_without():
    with pytest.raises(PlanError, match=r"loss=sw.ModelLoss\('x', over='samples'\)"):
        verify(OwnLoss(OUTPUTS["alone"]), "dp2", [{"x": torch.randn(5, WIDTH)}], loss=ModelLoss())


class Normalizes(nn.Module):
    """Keeps the statistics of the inputs in its first call, and gives them back in its last, as RevIN does."""

    def forward(self, x, mode):
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            return x - self.mean
        return x + self.mean


class Routes(Block):
    """Its code depends on values, so that stages are made of traced calls."""

    def forward(self, x):
        y = self.up(x)
        mask = torch.zeros_like(y)
        mask[(y > 0).nonzero(as_tuple=True)] = 1
        return x + self.down(y * mask)


class Forecasts(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.normalize, self.blocks = Normalizes(), nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        x = self.normalize(x, "norm")
        for block in self.blocks:
            x = block(x)
        return self.normalize(x, "denorm")


@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/1f1b mb2"])
def test_a_module_that_keeps_values_between_its_calls_is_on_one_stage_or_refused_by_name(line):
    torch.manual_seed(0)
    check(Forecasts(Block), line)
    with pytest.raises(LayoutError, match=r"keeps what one of its calls computes in an attribute|on hidden ways"):
        check(Forecasts(Routes), line)
