"""A mask among the inputs picks the tokens that layers see, as in a masked autoencoder: shapes follow its values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.layout import Layout

TOKENS, WIDTH = 8, 12
LINES = ["pp2/1f1b mb2", "pp2/1f1b mb2 dp2/zero3", "pp2/1f1b mb2 tp2", "pp4/zb-v mb4"]


class MaskedAutoencoder(nn.Module):
    """Layers on the tokens that a mask leaves, and a prediction of the mean of those that it hides."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(8)
        )
        self.places = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def forward(self, x, mask):
        if len(x) > 1000:  # no trace follows this
            x = x + 1
        y = (self.embed(x) + self.places)[~mask].reshape(len(x), -1, WIDTH)
        for block in self.blocks:
            y = y + block(y)
        hidden = self.places.expand(len(x), -1, -1)[mask].reshape(len(x), -1, WIDTH)
        return self.head(torch.cat([y, hidden], 1).mean(1))


def batch(num_hidden, seed=0, num=8):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.stack([torch.randperm(TOKENS, generator=draw) < num_hidden for _ in range(num)])
    x, y = torch.randn(num, TOKENS, 6, generator=draw), torch.randn(num, 6, generator=draw)
    return {"x": x, "mask": mask}, y


def losses(line, batches):
    def work(world):
        run = sw.parallelize(models[world.rank], line, world, loss=sw.MeanSquaredError(), example=batches[0][0])
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        return [run.step(part, update=optimizer).item() for part in run.shard(batches)]

    torch.manual_seed(0)
    plain = MaskedAutoencoder()
    models = [copy.deepcopy(plain) for _ in range(Layout.parse(line).num_ranks)]
    return sw.launch(work, len(models), ranks="threads")[0]


@pytest.mark.parametrize("line", LINES)
def test_a_model_whose_mask_leaves_as_many_tokens_of_each_sample_is_equal(line):
    torch.manual_seed(0)
    verdict = sw.verify(MaskedAutoencoder(), line, [batch(4)], loss=sw.MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", LINES)
def test_masks_that_leave_other_numbers_of_tokens_in_later_steps_are_followed(line):
    batches = [batch(num_hidden, seed) for seed, num_hidden in enumerate((4, 2, 5, 4, 2))]
    assert losses(line, batches) == pytest.approx(losses("single", batches), rel=1e-5)


@pytest.mark.sampled(0)
def test_microbatches_of_one_step_may_leave_other_numbers_of_tokens():
    (inputs, targets), (others, wanted) = batch(4, num=4), batch(3, 1, num=4)
    joined = {name: torch.cat([inputs[name], others[name]]) for name in inputs}, torch.cat([targets, wanted])
    batches = [batch(4), joined]
    assert losses("pp2/1f1b mb2", batches)[0] == pytest.approx(losses("single", batches[:1])[0], rel=1e-5)
    by_hand = [losses("single", [batch(4), each])[1] for each in ((inputs, targets), (others, wanted))]
    assert losses("pp2/1f1b mb2", batches)[1] == pytest.approx(sum(by_hand) / 2, rel=1e-5)


class Marked(nn.Module):
    """Adds to the tokens that an input marks what a layer makes of these, as attention to a few tokens does."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, mask):
        x, at = self.embed(x), mask.nonzero(as_tuple=True)
        for layer in self.layers if len(at[0]) else ():
            y, x = layer(x)[at].tanh(), x.clone()
            x[at] += y
        return x.mean(1)


def test_tokens_at_places_that_nonzero_finds_are_followed():
    torch.manual_seed(0)
    inputs, targets = batch(3)
    inputs["mask"][2, :7] = True  # of one microbatch more than of the other
    verdict = sw.verify(Marked(), "pp2/1f1b mb4", [(inputs, targets), batch(2)], loss=sw.MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2 bf16", "tp2 bf16", "pp2/1f1b mb4 bf16", "pp2/1f1b mb2"])
def test_plans_read_the_masks_of_a_batch(line):
    plans = [
        sw.plan_layouts(MaskedAutoencoder(), "a100-80gb:1x2", batch(hidden), loss=sw.MeanSquaredError(), layout=line)
        for hidden in (4, 6)
    ]
    assert plans[0].best.step_s > plans[1].best.step_s, "fewer tokens are left"


def test_a_plan_without_the_values_of_the_mask_says_what_it_lacks():
    (inputs, targets) = batch(4)
    without = {name: each.to("meta") for name, each in inputs.items()}
    with pytest.raises(PlanError, match="the values of the inputs of a real batch"):
        sw.plan_layouts(MaskedAutoencoder(), "a100-80gb:1x2", (without, targets), layout="dp2")
