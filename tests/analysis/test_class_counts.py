"""Counts of a batch's samples by class, by which a model or a loss trains, are named where a layout cuts the batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.samples.sample_mixing import warn_of_loss
from shardwright.models.given_loss import as_loss

WIDTH, EXPERTS = 4, 6

COUNTED = {
    "bincount": lambda chosen: torch.bincount(chosen.reshape(-1), minlength=EXPERTS),
    "histc": lambda chosen: torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1),
    "one_hot": lambda chosen: functional.one_hot(chosen, EXPERTS).sum((0, 1)),
    "scatter_add": lambda chosen: torch.zeros(EXPERTS, dtype=torch.long).scatter_add(
        0, (flat := chosen.reshape(-1)), torch.ones_like(flat)
    ),
    "one by one": lambda chosen: torch.stack([(chosen == expert).sum() for expert in range(EXPERTS)]),
}


class Router(nn.Module):
    """Chooses two experts for each sample, and uses, with the shares of all, how many samples each has."""

    def __init__(self, counted, used):
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(EXPERTS, WIDTH)
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.register_buffer("seen", torch.zeros(EXPERTS, dtype=torch.long))
        self.counted, self.used = counted, used

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        return self.used(self, shares, self.counted(shares.topk(2, -1).indices))


def balanced(self, shares, counts):
    return self.head(shares), (shares.mean(0) * counts).sum() / counts.sum()


def changes_a_buffer(self, shares, counts):
    self.load.add_(counts)
    return self.head(shares)


def replaces_a_buffer(self, shares, counts):
    self.load = 0.9 * self.load + counts
    return self.head(shares)


def counts_into_a_buffer(self, shares, counts):
    chosen = shares.argmax(-1)
    self.seen.index_add_(0, chosen, torch.ones_like(chosen))
    return self.head(shares)


def across_of(counted, used):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            name for _, name in ModelGraph(Router(counted, used), torch.empty(2, WIDTH, device="meta")).draws.across
        ]


@pytest.mark.parametrize("counted", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("used", [balanced, changes_a_buffer, replaces_a_buffer])
def test_counts_by_which_a_model_trains_or_changes_a_buffer_are_named(counted, used):
    named = across_of(counted, used)
    assert any(name.startswith("counts (") and ("buffer 'load'" in name) == (used is not balanced) for name in named)


def test_a_buffer_that_an_operator_counts_into_is_named():
    assert "counts (index_add_), with which it changes the buffer 'seen'," in across_of(
        COUNTED["bincount"], counts_into_a_buffer
    )


def test_under_a_layout_that_cuts_the_batch_such_a_model_is_warned_of_and_differs():
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)
    batch = torch.randn(8, WIDTH, generator=numbers, dtype=torch.float64), torch.arange(8) % WIDTH
    model = Router(COUNTED["bincount"], balanced).double()

    def loss(output, targets):
        scores, balance = output
        return functional.cross_entropy(scores, targets, reduction="sum") + len(targets) * balance, len(targets)

    with pytest.warns(UserWarning, match=r"takes counts \(bincount\) over all samples of a batch"):
        assert not verify(model, "dp2", [batch], loss=loss).equal


@pytest.mark.parametrize(
    "used",
    [
        lambda self, shares, counts: (self.head(shares), counts),
        lambda self, shares, counts: self.head(shares) if counts.min() >= 0 else shares,
        lambda self, shares, counts: self.head(shares) * (counts.sum() > 0),
        lambda self, shares, counts: self.head(shares.split([4, 2], -1)[0] @ self.head.weight),
    ],
    ids=["a metric", "a condition", "whether there are any", "not used"],
)
def test_counts_that_train_nothing_are_not_named(used):
    assert not [name for name in across_of(COUNTED["bincount"], used) if name.startswith("counts")]


def test_counts_of_each_sample_alone_are_not_named():
    class Bag(nn.Embedding):
        def forward(self, words):
            counts = functional.one_hot(words, 5).sum(1)
            return counts.float() @ self.weight / (words > 0).sum(1, keepdim=True)

    example = torch.zeros(2, 3, dtype=torch.long, device="meta")
    assert ModelGraph(Bag(5, WIDTH), example).draws.across == ()


def weighted_by_torch(output, targets):
    weight = 1 / torch.bincount(targets, minlength=WIDTH).clamp(min=1).float()
    return functional.cross_entropy(output, targets, weight=weight, reduction="sum"), len(targets)


def weighted_by_hand(output, targets):
    weight = 1 / torch.bincount(targets, minlength=WIDTH).clamp(min=1).float()
    return (functional.cross_entropy(output, targets, reduction="none") * weight[targets]).sum(), len(targets)


def adjusted(output, targets):
    shares = torch.bincount(targets, minlength=WIDTH).float().log1p()
    return functional.cross_entropy(output + shares, targets, reduction="sum"), len(targets)


def plain(output, targets):
    valid = targets > 0
    return (functional.cross_entropy(output, targets, reduction="none") * valid).sum(), valid.sum()


@pytest.mark.parametrize(
    ("loss", "is_named"), [(weighted_by_torch, True), (weighted_by_hand, True), (adjusted, True), (plain, False)]
)
def test_classes_that_a_loss_weighs_by_their_number_in_the_batch_are_named(loss, is_named):
    with warnings.catch_warnings(record=True, action="always") as told:
        warn_of_loss(as_loss(loss), torch.ones(6, WIDTH), torch.arange(6) % WIDTH)
    assert any("the loss takes counts (bincount)" in str(warning.message) for warning in told) == is_named
