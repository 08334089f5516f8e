"""Code behind conditions on values is looked at for both answers, whichever the record takes first."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.samples.sample_mixing import warn_of_loss
from shardwright.errors import LayoutError
from shardwright.models.given_loss import as_loss

WIDTH = 4


def centred(self, h, mask):
    return h - h.mean(0) if mask.any() else h


def centred_otherwise(self, h, mask):
    return h if mask.all() else h - h.mean(0)


def scaled(self, h, mask):
    return h / h.abs().max() if mask.any() else h


def sized(self, h, mask):
    return h / len(h) if mask.any() else h


def placed(self, h, mask):
    return h + torch.arange(len(h))[:, None] if mask.any() else h


def first(self, h, mask):
    return h + h[:1] if mask.sum() > 1 else h


class Model(nn.Module):
    """A layer, and after it a branch that is taken if some, or all, of the mask's values say so."""

    def __init__(self, branch):
        super().__init__()
        self.branch, self.layer, self.head = branch, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, mask):
        return self.head(self.branch(self, self.layer(x), mask))


def batch_of(num_samples=6):
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, WIDTH, generator=numbers, dtype=torch.float64)
    return {"x": x, "mask": x > 0}, torch.arange(num_samples) % WIDTH


def without_values(inputs):
    return {name: tensor.to("meta") for name, tensor in inputs.items()}


@pytest.mark.parametrize(
    ("branch", "named"),
    [
        (centred, "takes mean over all samples"),
        (centred_otherwise, "computes a sample's values from other samples|takes mean over all samples"),
        (scaled, "takes max over all samples"),
        (sized, "computes with the number of samples"),
        (placed, "computes with a sample's place in the batch"),
        (first, "takes slice over all samples"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_samples_that_meet_behind_a_condition_on_values_are_named(branch, named):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True, action="always") as told:
        try:
            assert not verify(Model(branch).double(), "dp2", [batch_of()]).equal
            said = "\n".join(str(warning.message) for warning in told)
        except LayoutError as refused:
            said = str(refused)
    assert any(part in said for part in named.split("|")), said


@pytest.mark.parametrize(
    "branch",
    [
        lambda self, h, mask: h - h.mean(-1, keepdim=True) if mask.any() else h,
        lambda self, h, mask: torch.clamp(h, -1, 1) if torch.isinf(h).any() else h,
        lambda self, h, mask: self.norm(h) if mask.any() else h,
    ],
    ids=["mean of each sample", "clamp", "BatchNorm"],
)
def test_a_branch_that_treats_samples_alone_is_not_named(branch):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify(Model(branch).double(), "dp2", [batch_of()]).equal


def test_a_parameter_that_a_branch_writes_to_is_known():
    class Resets(Model):
        def forward(self, x, mask):
            if torch.isnan(x).any():
                self.layer.weight.data.zero_()
            return super().forward(x, mask)

    model = Resets(lambda self, h, mask: h).double()
    assert ModelGraph(model, without_values(batch_of()[0])).written_parameters() == {"layer.weight": ""}


def test_each_branch_is_recorded_once_and_the_one_with_more_parameters_is_first():
    class Skips(Model):
        def forward(self, x, mask):
            return self.head(self.layer(x) if mask.any() else x)

    run = ModelGraph(Skips(None).double(), without_values(batch_of()[0])).run
    assert len(run.recording.parameters_used) == 4
    assert len(run.other_branch.recording.parameters_used) == 2
    assert run.recording.guess is True
    assert run.other_branch.recording.guess is False


def test_a_branch_of_a_loss_is_looked_at_too():
    def loss(output, targets):
        if output.isnan().any():
            output = output - output.mean(0)
        if (targets > 0).any():
            output = output / output.abs().max()
        return functional.cross_entropy(output, targets, reduction="sum"), len(targets)

    with warnings.catch_warnings(record=True, action="always") as told:
        assert warn_of_loss(as_loss(loss), torch.ones(6, WIDTH), batch_of()[1])
    said = "\n".join(str(warning.message) for warning in told)
    assert "the loss takes max" in said
    assert "the loss takes mean" in said


def test_a_layout_that_cuts_no_batch_says_nothing():
    torch.manual_seed(0)

    model = Model(centred).double()

    def work(world):
        return parallelize(model, "tp2", world, example=batch_of()[0]).plan is not None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(launch(work, 2, ranks="threads"))
