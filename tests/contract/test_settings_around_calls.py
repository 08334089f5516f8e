"""Forwards that freeze parameters, or set modules to evaluation, themselves: equal to one device, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import MeanSquaredError, verify
from shardwright.errors import PlanError

X = torch.randn(8, 8)
BATCHES = [(X, X), (X.flip(0), X)]


class Around(nn.Module):
    """A generator whose forward changes a setting of its critic for one of two calls, and sets it back or not."""

    def __init__(self, change, norm=nn.Dropout, *, stays=False):
        super().__init__()
        self.encoder, self.middle, self.change, self.stays = nn.Linear(8, 8), nn.Linear(8, 8), change, stays
        self.critic = nn.Sequential(nn.Linear(8, 16), norm(16) if norm is nn.BatchNorm1d else norm(), nn.Linear(16, 8))

    def forward(self, x):
        hidden = self.middle(torch.tanh(self.encoder(x)))
        self.change(self.critic, False)
        judged = self.critic(hidden)
        if self.stays:
            return hidden + judged
        self.change(self.critic, True)
        return hidden + judged + 2 * self.critic(hidden.detach())


@pytest.mark.parametrize("line", ["dp2", "mb2", "tp2", "dp2/zero3", "dp2/zero1 tp2"])
@pytest.mark.parametrize("change", [nn.Module.requires_grad_, nn.Module.train], ids=["frozen", "mode"])
def test_a_setting_that_is_changed_around_a_call_holds_there(change, line):
    verdict = verify(Around(change), line, BATCHES, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/1f1b mb2", "pp2/1f1b mb2 dp2/zero1 tp2"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nn.Module.requires_grad_, r"changes requires_grad of the parameter 'critic\.0\.weight' for some of its calls"),
        (nn.Module.train, "calls 'critic' in another mode than it leaves it in"),
    ],
)
def test_stages_which_run_calls_alone_refuse_it(change, said, line):
    with pytest.raises(PlanError, match=said):
        verify(Around(change), line, BATCHES, loss=MeanSquaredError())


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b"])
def test_a_module_that_stays_in_evaluation_is_as_on_one_device(line):
    verdict = verify(Around(nn.Module.train, stays=True), line, BATCHES, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_batch_norm_is_called_in_evaluation_and_then_in_training(line):
    verdict = verify(Around(nn.Module.train, nn.BatchNorm1d), line, BATCHES, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2", "dp2/zero3"])
def test_a_forward_that_freezes_parameters_for_good_is_refused_until_it_has_run_once(line):
    model = Around(nn.Module.requires_grad_, nn.Identity, stays=True)
    with pytest.raises(PlanError, match="call the model once on such a batch before that"):
        verify(model, line, BATCHES, loss=MeanSquaredError())
    model(X)
    assert verify(model, line, BATCHES, loss=MeanSquaredError()).equal


class MakesParameters(nn.Module):
    """Makes a parameter in its forward, as code does that was written for other layers, and freezes that one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        shift = nn.Parameter(torch.ones(16, dtype=x.dtype))
        return self.down(torch.tanh(self.up(x)) + shift.requires_grad_(False))


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b"])
def test_a_parameter_that_the_forward_makes_may_be_frozen_by_it(line):
    verdict = verify(MakesParameters(), line, BATCHES, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
