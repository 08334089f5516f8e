"""What ``verify`` must not lose sight of, and not touch: batches, complex numbers, hooks, buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.models.losses import MeanSquaredError

LOSS = MeanSquaredError()


def pair(width=6):
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))


def batch(width=6):
    return torch.randn(5, width, dtype=torch.float64), torch.randn(5, width, dtype=torch.float64)


# ---- batches


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = pair()

    def forward(self, x):
        return self.layers(x.add_(1.0))


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "dp2 tp2 mb2"])
def test_a_model_that_writes_into_its_inputs_is_given_copies(line):
    inputs, targets = batch()
    before = inputs.clone()
    verdict = verify(Overwriting(), line, [(inputs, targets)] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)
    assert torch.equal(inputs, before)


# ---- complex numbers


class Turned(nn.Module):
    """A layer in complex numbers before a pair in real ones."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.layers = pair()

    def forward(self, x):
        assert self.w.is_complex(), "as it was built"
        return self.layers((x * self.w).angle())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "dp2 tp2"])
def test_complex_parameters_and_inputs_stay_complex(line, dtype):
    inputs, targets = batch()
    for given in (inputs, torch.complex(inputs, inputs.flip(0)).to(torch.complex64)):
        verdict = verify(Turned(), line, [(given, targets)] * 2, loss=LOSS, dtype=dtype)
        assert verdict.equal, str(verdict)


# ---- hooks on parameters


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_by_name(how):
    model = pair()
    getattr(model[2].weight, how)(lambda found: None)
    with pytest.raises(PlanError, match="has a hook on its gradient"):
        verify(model, "dp2", [batch()], loss=LOSS)
    with pytest.raises((PlanError, RankFailedError), match="has a hook on its gradient"):
        launch(lambda world: parallelize(model, "dp2", world, loss=LOSS), 2, ranks="threads")


# ---- buffers


class Counting(nn.Module):
    """Keeps something of each forward in a buffer; ``keep`` says what."""

    def __init__(self, keep, start):
        super().__init__()
        self.keep, self.layers = keep, pair()
        self.register_buffer("kept", start)

    def forward(self, x):
        y = self.layers(x)
        if self.training:
            self.kept = self.keep(self.kept, y.detach())
        return y


KEEPS = {
    "the mean of its own samples": (lambda kept, y: 0.9 * kept + 0.1 * y.mean(0), torch.zeros(6)),
    "how many samples it has": (lambda kept, y: kept + len(y), torch.zeros((), dtype=torch.int64)),
    "the same where it is one number": (lambda kept, y: kept * 0 + len(y), torch.ones(())),
}


@pytest.mark.filterwarnings("ignore:'the model' takes a mean, with which it changes the buffer 'kept'")
@pytest.mark.parametrize("keep", KEEPS)
def test_a_buffer_that_depends_on_the_samples_of_one_rank_is_a_difference(keep):
    model = Counting(*KEEPS[keep])
    verdict = verify(model, "dp2", [batch()] * 2, loss=LOSS)
    assert not verdict.equal
    assert verdict.first_difference == verdict.worst_parameter == "kept"
    assert verdict.buffers_error > verdict.tolerance > verdict.parameters_error
    assert verify(model, "tp2", [batch()] * 2, loss=LOSS).equal


def test_a_buffer_that_no_step_changes_is_the_same_bit_for_bit_or_a_difference():
    def alter(run):
        run.model.kept[0] += 1e-300

    model = Counting(lambda kept, y: kept, torch.tensor([0.0, float("-inf"), 1e300]))
    assert verify(model, "dp2", [batch()], loss=LOSS).equal
    verdict = verify(model, "dp2", [batch()], loss=LOSS, alter=alter)
    assert not verdict.equal
    assert (verdict.first_difference, verdict.buffers_error) == ("kept", float("inf"))


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2 mb1", "pp2 dp2 mb1"])
def test_running_statistics_are_equal_under_every_kind_of_layout(line):
    model = nn.Sequential(pair(), nn.BatchNorm1d(6), pair(), nn.BatchNorm1d(6, affine=False))
    verdict = verify(model, line, [batch()] * 3, loss=LOSS)
    assert verdict.equal, str(verdict)

    def alter(run):
        for name, buffer in run.model.named_buffers():
            if name == "3.running_var" and not buffer.is_meta:
                run.model.get_submodule("3").momentum = 0.2

    verdict = verify(model, line, [batch()] * 3, loss=LOSS, alter=alter)
    assert verdict.first_difference == "3.running_mean"
    assert 0.01 < verdict.buffers_error < 1


class KeepsWhatItMade(nn.Linear):
    """Registers a buffer in its first forward, as attention biases that depend on the length often are."""

    def forward(self, x):
        if not hasattr(self, "bias_of_length"):
            self.register_buffer("bias_of_length", torch.ones(x.shape[-1], dtype=x.dtype), persistent=False)
        return super().forward(x) + self.bias_of_length


def test_a_buffer_that_the_first_forward_registers_is_no_error():
    torch.manual_seed(0)
    batch = torch.randn(4, 6, dtype=torch.float64), torch.arange(4)
    assert verify(KeepsWhatItMade(6, 6).double(), "dp2", [batch]).equal
