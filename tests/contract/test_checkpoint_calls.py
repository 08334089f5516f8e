"""Code that a backward runs again, as torch.utils.checkpoint does, equals the same code without a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import verify
from shardwright.errors import PlanError
from shardwright.models.losses import MeanSquaredError
from shardwright.rng import RngTracker
from shardwright.runtime.keyed_draws import key_draws
from shardwright.strategies.tensor_parallel.shards_plan import share_cut

WIDTH, SAMPLES = 8, 6


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as many repositories have one of their own; it is shorter than torch's."""

    @staticmethod
    def forward(ctx, run_function, x):
        ctx.run_function = run_function
        ctx.save_for_backward(x)
        return run_function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run_function(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


CHECKPOINTS = {
    "none": lambda run, x: run(x),
    "torch's": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "its own": OwnCheckpoint.apply,
}

DRAWS = {
    "dropout": lambda x: functional.dropout(functional.dropout(x, 0.2), 0.3),
    "noise": lambda x: x * (1 + torch.rand_like(x)) + torch.randn(x.shape, dtype=x.dtype, device=x.device),
}


class Draws(nn.Module):
    """A block whose method draws by functions, runs inside of a checkpoint, and calls a module that draws."""

    def __init__(self, how: str, draw: str):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(0.1)
        self.how, self.draw = how, draw

    def run(self, x):
        return self.drop(self.down(DRAWS[self.draw](self.up(x))))

    def forward(self, x):
        return functional.dropout(x + CHECKPOINTS[self.how](self.run, x), 0.1)


def blocks(how, draw="dropout", block=Draws):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block(how, draw), block(how, draw), nn.Linear(WIDTH, WIDTH))


def gradients(model):
    rng = RngTracker(seed=3, samples=range(SAMPLES))
    key_draws(model.double(), rng, None)
    model(torch.ones(SAMPLES, WIDTH, dtype=torch.float64)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("how", [how for how in CHECKPOINTS if how != "none"])
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_of_a_checkpoint_have_gradients_as_without_it(how, draw):
    for found, expected in zip(gradients(blocks(how, draw)), gradients(blocks("none", draw)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("line", ["dp2", "mb2", "tp2", "dp2/zero3 recompute:full", "pp2/1f1b mb2", "pp2/zb-h1 mb2 dp2"])
@pytest.mark.parametrize("how", [how for how in CHECKPOINTS if how != "none"])
def test_draws_of_a_checkpoint_equal_one_device(how, line):
    model = blocks(how)
    if "tp" in line:  # beside layers that are cut
        model.append(nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)))
    batches = [(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)) for _ in range(2)]
    verdict = verify(model, line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Nested(Draws):
    def forward(self, x):
        return CHECKPOINTS[self.how](lambda x: CHECKPOINTS[self.how](self.run, x).tanh(), x)


@pytest.mark.parametrize("how", [how for how in CHECKPOINTS if how != "none"])
def test_draws_inside_of_two_checkpoints_are_an_error(how):
    with pytest.raises(PlanError, match="one in the other"):
        gradients(blocks(how, block=Nested))


class Mixed(Draws):
    """A checkpoint without reentry inside of a reentrant one, in which it keeps nothing."""

    def forward(self, x):
        return checkpoint(lambda x: checkpoint(self.run, x, use_reentrant=False).tanh(), x, use_reentrant=True)


def test_draws_inside_of_two_checkpoints_of_unlike_kinds_are_an_error_too():
    with pytest.raises(PlanError, match="one in the other"):
        gradients(blocks("none", block=Mixed))


class InCheckpoint(nn.Module):
    """A block that is checkpointed as a whole, and has a checkpoint inside."""

    def __init__(self, how, draw):
        super().__init__()
        self.how, self.inner = how, Draws(how, draw)

    def forward(self, x):
        return CHECKPOINTS[self.how](self.inner, x).tanh()


@pytest.mark.parametrize("how", ["torch's", "reentrant"])
def test_a_module_that_is_checkpointed_may_have_a_checkpoint_inside(how):
    found, expected = (gradients(blocks(each, block=InCheckpoint)) for each in (how, "none"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Rounded(torch.autograd.Function):
    """Rounds gradients up or down at random."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return torch.floor(dy * 64 + torch.rand_like(dy)) / 64


@pytest.mark.parametrize("line", ["dp2", "tp2", "mb2", "pp2/1f1b mb2"])
def test_a_backward_that_draws_numbers_of_its_own_is_refused_before_the_first_step(line):
    class Rounds(nn.Sequential):
        def forward(self, x):
            return super().forward(Rounded.apply(x))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rounds(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)))
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    with pytest.raises(PlanError, match=r"drawn in a backward(.*\n)*.*of Rounded"):
        verify(model, line, [batch], loss=MeanSquaredError())


class Squashed(torch.autograd.Function):
    """An activation with a backward of its own, which may measure its tensors."""

    @staticmethod
    def forward(ctx, x, measures):
        y = x.tanh()
        ctx.save_for_backward(y)
        ctx.measures = measures
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return dy * (1 - y.square()) / (y.shape[-1] if ctx.measures else 1), None


class Squashes(nn.Sequential):
    measures = False

    def forward(self, x):
        up, down = self
        return down(Squashed.apply(up(x), self.measures))


class Checkpoints(nn.Module):
    def __init__(self, measures):
        super().__init__()
        self.inner = Squashes(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH))
        self.inner.measures = measures

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize("line", ["tp2", "tp4/2d", "tp2 dp2"])
def test_layers_around_a_users_function_are_cut_inside_of_a_checkpoint_too(line, measures):
    torch.manual_seed(0)
    plans = []
    model = nn.Sequential(Checkpoints(measures), Checkpoints(False))
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert (share_cut(plans[0]) > 0.9) is (not measures or "2d" in line)  # the output of its first layer is whole


class Strided(nn.Sequential):
    """Computes with the strides and bytes that it asks its tensors for."""

    def forward(self, x):
        up, down = self
        x = up(x)
        return down((x * x.stride(0) / 64 + x.stride()[0] * x.stride(1)).tanh() / x[0].nbytes)


@pytest.mark.parametrize("line", ["tp2", "tp3"])
def test_strides_and_bytes_of_a_tensor_that_is_cut_are_those_of_the_whole(line):
    torch.manual_seed(0)
    plans = []
    model = nn.Sequential(Strided(nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)))
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9
