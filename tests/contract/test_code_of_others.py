"""Ways to write a forward that packages of others have, in a few lines each: equal, or refused or warned of by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.calls.draw_calls import draw_of
from shardwright.errors import LayoutError, PlanError

NUM, WIDTH = 8, 8


def classes(num=3):
    return torch.randint(num, (NUM,))


class KeepsAside(nn.Module):
    """Returns what a layer has kept on itself, as a loss of a router."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = torch.relu(self.linear(x))
            self.kept = y.mean(1)
            return x + y

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x), self.layers[0].kept


@pytest.mark.parametrize("line", ["dp2", "tp2/sp", "pp2/1f1b mb2", "pp2/zb-v mb4"])
def test_what_a_layer_keeps_on_itself_may_be_returned_by_the_model(line):
    def loss(outputs, targets):
        return functional.cross_entropy(outputs[0], targets, reduction="sum") + 0.1 * outputs[1].sum(), len(targets)

    verdict = verify(KeepsAside(), line, [(torch.randn(NUM, WIDTH), classes())], loss=loss)
    assert verdict.equal, str(verdict)


class Noised(nn.Module):
    """Draws a time for each sample and looks up its noise, as models of diffusion do when they train."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 20))

    def forward(self, x):
        kept = self.kept.gather(-1, torch.randint(0, 20, (x.shape[0],)).long())[:, None]
        noise = torch.randn_like(x)
        return self.net(kept.sqrt() * x + (1 - kept).sqrt() * noise) - noise


@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2/sp", "pp2/1f1b mb4"])
def test_numbers_that_are_drawn_may_be_indices(line):
    x = torch.randn(NUM, WIDTH)
    verdict = verify(Noised(), line, [(x, x)], loss=lambda output, _: (output.square().sum(), output.numel()))
    assert verdict.equal, str(verdict)


def test_integers_that_stand_for_drawn_ones_are_in_their_range():
    for args, least in (((20, (5,)), 0), ((3, 20, (5,)), 3)):
        assert draw_of(torch.randint, args, {}).without_numbers().tolist() == [least] * 5


class AsksDtype(nn.Module):
    """Casts to the dtype of a weight of a layer below, and asks for its device."""

    def __init__(self, *, adds=False):
        super().__init__()
        self.adds, self.first = adds, nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        weight = self.block[0].weight
        y = self.block(self.first(x).to(device=weight.device, dtype=weight.dtype))
        return y + weight.sum() if self.adds else y


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "tp2/sp", "tp2x2/2d"])
def test_code_may_ask_for_the_dtype_and_the_device_of_a_weight_that_is_cut(line):
    batch = torch.randn(NUM, WIDTH), torch.randn(NUM, WIDTH)
    verdict = verify(AsksDtype(), line, [batch], loss=nn.MSELoss())
    assert verdict.equal, str(verdict)
    assert verify(AsksDtype(adds=True), line, [batch], loss=nn.MSELoss()).equal  # the weight then stays whole


class ReshapesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, 3)

    def forward(self, x):
        places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device).unsqueeze_(-1)
        scales = torch.ones(WIDTH, x.shape[1], dtype=x.dtype, device=x.device).t_()
        return self.down(torch.relu(self.up(x + places * scales))).mean(1)


class AsksType(nn.Module):
    """Asks for the type of a tensor by its name, and drops out rows that are samples times heads."""

    def __init__(self):
        super().__init__()
        self.enter, self.table, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH), nn.Dropout(0.2)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.enter(x)
        x = x + self.table(torch.arange(x.shape[1])).type(x.type()).type(torch.float64).type_as(x)
        rows = x.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2).flatten(0, 1)
        return self.leave(self.dropout(rows).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2"])
@pytest.mark.parametrize("model", [ReshapesInPlace, AsksType])
def test_views_in_place_and_names_of_types_can_be_recorded(model, line):
    verdict = verify(model(), line, [(torch.randn(NUM, 5, WIDTH), classes())])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "bf16 dp2", "bf16 tp2"])
def test_a_loss_that_takes_targets_of_the_outputs_dtype_is_compared_in_bf16_too(line):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
    batch = torch.randn(NUM, 6), torch.rand(NUM, 1).round()
    verdict = verify(model, line, [batch], loss=nn.BCELoss())
    assert verdict.equal, str(verdict)


class Codebook(nn.Module):
    """Moves its codes to the means of the samples that are nearest, as VQ-VAE does."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x):
        z = self.enter(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        code = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = functional.one_hot(nearest, 6).to(z.dtype)
                self.codes.lerp_(chosen.t() @ z, 0.2)
        return self.leave(z + (code - z).detach())


def test_a_buffer_that_changes_with_sums_over_samples_is_warned_of_where_ranks_have_other_samples(recwarn):
    x = torch.randn(NUM, WIDTH)
    assert not verify(Codebook(), "dp2", [(x, x)], loss=nn.MSELoss()).equal
    assert any("with which it changes the buffer 'codes'" in str(each.message) for each in recwarn)


class Centre(nn.Module):
    """Replaces a buffer by the mean of the samples, as the teacher of DINO does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.layer(x) - self.centre
        self.centre = y.detach().mean(0)
        return y


def test_a_buffer_that_is_replaced_by_a_mean_over_samples_is_warned_of_too(recwarn):
    x = torch.randn(NUM, WIDTH)
    assert not verify(Centre(), "dp2", [(x, x)] * 2, loss=nn.MSELoss()).equal
    assert any("a mean, with which it changes the buffer 'centre'" in str(each.message) for each in recwarn)


class NormalizesItself(nn.Module):
    """A batch norm of torch's beside code of its own: its statistics are those of all ranks, and no warning comes."""

    def __init__(self):
        super().__init__()
        self.norm, self.leave = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.leave(self.norm(x).relu() * 2)


def test_a_batch_norm_is_not_warned_of(recwarn):
    assert verify(NormalizesItself(), "dp2", [(torch.randn(NUM, WIDTH), classes())]).equal
    assert not [each for each in recwarn if "changes the buffer" in str(each.message)]


class Sparse(nn.Module):
    """Whisper's mask of heads, which training does not read, beside a graph's matrix, which it may."""

    def __init__(self, reads):
        super().__init__()
        self.enter, self.leave, self.reads = nn.Linear(WIDTH, 12), nn.Linear(12, 3), reads
        self.register_buffer("heads", torch.ones(2, 2).to_sparse(), persistent=False)
        self.register_buffer("graph", (torch.eye(12) * 2).to_sparse(), persistent=False)
        self.rows = torch.eye(12, dtype=torch.float64).to_sparse_csr()

    def forward(self, x):
        x = self.enter(x)
        if self.reads:
            x = x + torch.sparse.mm(self.graph.to(x.dtype), x.t()).t() + (self.rows.to(x.dtype) @ x.t()).t()
        return self.leave(x.tanh())


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "tp2", "pp2/1f1b mb2", "dp2/zero2 mb2 recompute:enter"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("reads", [False, True])
def test_sparse_buffers_that_no_checkpoint_has_are_copied(line, reads):
    torch.manual_seed(0)
    model, batch = Sparse(reads), (torch.randn(NUM, WIDTH), classes())
    if reads and ("pp" in line or "tp" in line):
        with pytest.raises(LayoutError, match=r"Sparse CSR tensors do not have strides|cannot be recorded"):
            verify(model, line, [batch])
        return
    verdict = verify(model, line, [batch] * 2)
    assert verdict.equal, str(verdict)
    assert model._buffers["heads"].is_sparse, "the caller's model is left alone"


def test_a_sparse_buffer_that_checkpoints_have_is_refused_by_name():
    model = nn.Sequential(nn.Linear(WIDTH, 3))
    model.register_buffer("heads", torch.ones(2, 2).to_sparse())
    with pytest.raises(PlanError, match=r"'heads' is a sparse tensor(?s:.*)module\.heads\.to_dense\(\)"):
        verify(model, "dp2", [(torch.randn(NUM, WIDTH), classes())])


class OnABuffer(nn.Module):
    """Two layers that are given a buffer of places, beside one of the samples, as DeepONet has."""

    def __init__(self):
        super().__init__()
        self.branch, self.trunk = nn.Linear(WIDTH, 16), nn.ModuleList([nn.Linear(1, 32), nn.Linear(32, 16)])
        self.register_buffer("grid", torch.linspace(0, 1, 5)[:, None])

    def forward(self, x):
        return torch.einsum("bi,ni->bn", self.branch(x), self.trunk[1](torch.tanh(self.trunk[0](self.grid))))


@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d", "pp2 mb2"])
def test_layers_that_are_given_a_buffer_are_those_of_one_device(line):
    verdict = verify(OnABuffer(), line, [(torch.randn(NUM, WIDTH), torch.randn(NUM, 5))], loss=nn.MSELoss())
    assert verdict.equal, str(verdict)


class Pops(nn.Module):
    """Takes its input out of the batch's dict."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, batch):
        return self.net(batch.pop("x"))


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2"])
def test_a_forward_may_pop_from_the_dict_that_it_is_given(line):
    verdict = verify(Pops(), line, [({"batch": {"x": torch.randn(NUM, WIDTH)}}, classes())])
    assert verdict.equal, str(verdict)


class AddsATerm(torch.autograd.Function):
    """Gives the gradient of a balance loss in its backward, as experts of several repositories do."""

    @staticmethod
    def forward(ctx, x, term):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


class AddsToTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient + torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 0.1)


class ScalesTheGradient(torch.autograd.Function):
    """A straight-through estimator: of some elements the gradient is zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, gradient, torch.zeros_like(gradient))


class PadsTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x[:, :WIDTH].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        padded = gradient.new_zeros(len(gradient), 2 * WIDTH)
        padded[:, :WIDTH] = gradient
        return padded


class FillsTheGradient(ScalesTheGradient):
    """Writes the gradient into an empty tensor, half by half, as code around kernels does."""

    @staticmethod
    def backward(ctx, gradient):
        filled = torch.empty_like(*ctx.saved_tensors)  # of the input, so that it does not depend on the gradient
        filled[:, :WIDTH] = gradient[:, :WIDTH] * 2
        filled[:, WIDTH:] = gradient[:, WIDTH:] * 2
        return filled


class SelectsTheGradient(ScalesTheGradient):
    """Has a number in place of zeros, and a product beside the gradient."""

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, torch.addcmul(gradient, gradient, x), 0.0)


class WithFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.up = function, nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH if function is PadsTheGradient else 2 * WIDTH, 3)

    def forward(self, x):
        h = self.up(x)
        return self.down(self.function.apply(h, *([0.1 * h.square().mean()] * (self.function is AddsATerm))))


FUNCTIONS = (
    AddsATerm, AddsToTheGradient, ScalesTheGradient, PadsTheGradient, FillsTheGradient, SelectsTheGradient
)  # fmt: skip


@pytest.mark.parametrize("line", ["dp2", "mb2"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled(3)
def test_a_backward_that_adds_a_term_is_warned_of_where_it_may_be_a_mean_over_samples(function, line, recwarn):
    verdict = verify(WithFunction(function), line, [(torch.randn(NUM, WIDTH), classes())])
    assert verdict.equal is not (function is AddsATerm), str(verdict)  # AddsToTheGradient adds to each sample's own
    adds = function in (AddsATerm, AddsToTheGradient)
    assert any("adds a term to gradients" in str(each.message) for each in recwarn) is adds
