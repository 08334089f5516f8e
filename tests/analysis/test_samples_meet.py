"""Code in which the samples of a batch meet is named, where a layout gives no rank the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import MeanLoss, launch, parallelize, verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.samples.sample_mixing import warn_of_loss
from shardwright.models.given_loss import as_loss


class Scaled(nn.Module):
    """Layers that divide by their largest activation: of the batch, or of each sample."""

    def __init__(self, dims=None):
        super().__init__()
        self.layer, self.dims = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), dims

    def forward(self, x):
        x = self.layer(x)
        return x / (x.abs().max() if self.dims is None else x.abs().amax(self.dims, keepdim=True))


def verdict_of(model, line):
    batch = torch.randn(4, 4, dtype=torch.float64), torch.arange(4)
    return verify(model.double(), line, [batch])


@pytest.mark.parametrize("line", ["dp2", "pp1 mb2"])
def test_a_maximum_over_the_batch_is_named_before_it_differs(line):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="takes max over all samples of a batch"):
        assert not verdict_of(Scaled(), line).equal


@pytest.mark.parametrize(("line", "dims"), [("dp2", -1), ("single", None), ("tp2", None)])
def test_a_maximum_over_each_sample_is_not_named(line, dims):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict_of(Scaled(dims), line).equal


class Measuring(nn.Module):
    """A maximum over the batch, which is dropped, or kept in an attribute or a buffer for the next forward."""

    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 4), keep
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        x = self.layer(x)
        most = x.detach().abs().max()
        if self.keep == "buffer":
            self.largest.copy_(most)
        elif self.keep == "attribute":
            self.now = most
        return x


@pytest.mark.parametrize("keep", ["", "attribute", "buffer"])
def test_a_maximum_that_nothing_uses_is_not_named(keep):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True, action="always") as told:
        verdict_of(Measuring(keep), "dp2")
    assert any("takes max over all samples" in str(warning.message) for warning in told) == bool(keep)


def test_a_maximum_over_the_batch_is_not_named_where_each_microbatch_is_a_batch_of_its_own():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict_of(Scaled(), "pp1 mb2/own-statistics").equal


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (1, "'0' takes max over all"),
        (3, "'0', '1' and '2' take max over all"),
        (6, "'0', '1', '2' and 3 more take max over all"),
    ],
)
def test_one_warning_names_the_modules_in_which_samples_meet_alike(number, told):
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(number)))
    batch = torch.randn(4, 4), torch.arange(4)
    with warnings.catch_warnings(record=True, action="always") as found:
        launch(lambda world: parallelize(model, "mb2", world, example=batch[0]), 1, ranks="threads")
    assert [text for each in found if (text := str(each.message)).startswith(told)]
    assert len(found) == 1


class Meets(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def up_to_three(y, dim=0):
    """Masks what comes after the first three that have a choice, as experts do that take so many tokens each."""
    chosen = functional.one_hot(y.argmax(1), 4)
    return y * (chosen * (chosen.cumsum(dim) <= 3))


def first_selected(y):
    """Doubles the first three samples that a condition selects, as experts do that take so many tokens each."""
    chosen = (y[:, 0] > 0).nonzero()[:, 0][:3]
    return y.index_add(0, chosen, y[chosen])


def centred(y, dim=0):
    """Subtracts a mean from the samples that a condition selects: theirs, or with dim 1 that of each."""
    mask = y[:, 0] > 0
    held, changed = y[mask], y.clone()
    changed[mask] = held - held.mean(dim, keepdim=True)
    return changed


def in_slices(y):
    rows = y[y[:, 0] > 0]
    return torch.cat([rows[:4].relu(), rows[4:].relu()])


def with_selected(y):
    chosen = torch.where(y[:, 0] > 0)[0]
    return y.index_add(0, chosen, y[chosen][:, :1].expand(-1, 4))


def of_channels(y, function):
    """Adds to each channel of each sample one of two marks of it; the rows of both are (samples, channels), or not."""
    marks = y[:, :2] * 2
    marks = function(marks)
    return (y[:, :3].reshape(-1, 1) + marks).sum(1).view(-1, 3)


def near(y):
    return (y[:, 0] > 0).long()


MEET = {
    "add, of rows in which the samples lie in two orders,": lambda y: of_channels(y, lambda z: z.repeat(3, 1)),
    "slice, of rows that a condition selects,": first_selected,
    "mean, of rows that a condition selects,": centred,
    "_softmax, of rows that a condition selects,": lambda y: y[y[:, 0] > 0].softmax(0),
    "amax, of rows that a condition selects,": lambda y: y / y[y[:, 0] > 0].amax(0, keepdim=True),
    "topk, of rows that a condition selects,": lambda y: y[y[:, 0] > 0].topk(2, 0).values.sum(),
    "cumsum, of rows that a condition selects,": lambda y: y[y[:, 0] > 0].cumsum(0),
    "a running count": up_to_three,
    "_softmax": lambda y: y.softmax(0),
    "topk": lambda y: y + y.topk(1, 0).values.mean(),
    "sqrt": lambda y: (y - y.detach(), y.square().mean().sqrt()),
    "mul": lambda y: (y, (y.softmax(1).mean(0) * (y > 0).to(y).mean(0)).sum()),  # as experts are balanced
    "a decision by a mean": lambda y: y.roll(int(y.mean(0).topk(1).indices[0]), 1),
    "_cdist_forward": lambda y: torch.cdist(y, y).sum(1),
    "any": lambda y: y * (y > 2).any(0),
    "all": lambda y: y * (y > -1).all(0),
    "mm": lambda y: y - torch.ones(len(y), len(y), device=y.device) @ y / len(y),
    "linalg_qr": lambda y: y * torch.linalg.qr(y)[1][0, 0],
    "_linalg_svd": lambda y: y / torch.linalg.matrix_norm(y, 2),
    "linalg_pinv": lambda y: y + torch.linalg.pinv(y).T,
    "_pdist_forward": lambda y: y * torch.pdist(y).sum(),
    "dist": lambda y: y * torch.dist(y, torch.zeros_like(y)),
    "renorm": lambda y: torch.renorm(y, 2, 1, 1.0),
    "segment_reduce": lambda y: y - torch.segment_reduce(y, "mean", lengths=torch.tensor([len(y)], device=y.device))[0],
    "index_put": lambda y: y - torch.zeros(2, 4, device=y.device).index_put((near(y),), y, accumulate=True)[near(y)],
}


def packed(y):
    """Puts the samples that a condition selects in the order of their lengths, as torch packs sequences."""
    rows = y[y[:, 0] > 0]
    lengths, order = (rows > 0).sum(1).sort(descending=True)
    return (rows[order] * lengths[:, None]).sum()


APART = {
    "selected rows in the order of their lengths": packed,
    "two orders in what is not returned": lambda y: (of_channels(y, lambda z: z.repeat(3, 1)), y)[1],
    "two orders of counts": lambda y: (y, of_channels((y > 0).long(), lambda z: z.repeat(3, 1))),
    "shuffled channels beside others": lambda y: y + y.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4),
    "two orders in each sample": lambda y: (
        y[:, :, None].expand(-1, 4, 3).reshape(len(y), 12) + y[:, None].expand(-1, 3, 4).reshape(len(y), 12)
    ),
    "rows of both, with the samples outermost": lambda y: (
        y[:, :, None].expand(-1, 4, 3).reshape(-1, 1) + y[:, None].expand(-1, 3, 4).reshape(-1, 1)
    ),
    "marks of each sample, in its rows": lambda y: of_channels(y, lambda z: z.repeat_interleave(3, 0)),
    "a mean of each selected row": lambda y: centred(y, 1),
    "a feature of selected rows": with_selected,
    "all selected rows, in slices": in_slices,
    "a softmax of each selected row": lambda y: y[y[:, 0] > 0].softmax(1),
    "selected rows in parts": lambda y: torch.cat([part.relu() for part in y[y[:, 0] > 0].split(4)]).sum(),
    "a mean of selected rows": lambda y: (y, y[y[:, 0] > 0].mean()),
    "in each sample": lambda y: torch.stack([row[(row > 0).nonzero()[:2, 0]].sum() for row in y]),
    "counts in each sample": lambda y: up_to_three(y, 1),
    "of each sample": lambda y: y.softmax(1) * y.mean(1, keepdim=True).sqrt(),
    "a number that is added": lambda y: (y, y.square().mean() + y.abs().mean() / 3),
    "a mean by a count": lambda y: (y, (y.square() * (y > 0)).sum() / len(y)),
    "matrices of each sample": lambda y: torch.linalg.svdvals(y.view(-1, 2, 2)).sum(1),
    "factors of each sample": lambda y: torch.linalg.qr(y.view(-1, 2, 2))[1],
    "a solution for each sample": lambda y: torch.linalg.solve(torch.eye(4, device=y.device) * 2, y.T).T,
    "lengths of each sample": lambda y: torch.renorm(y, 2, 0, 1.0),
    "any of each sample": lambda y: y * (y > 2).any(1, keepdim=True),
    "weights between features": lambda y: y @ torch.ones(4, 4, device=y.device),
    "rows that are put back": lambda y: torch.zeros_like(y).index_put((torch.arange(len(y)),), y, accumulate=True),
    "a decision by one sample": lambda y: y.roll(int(y[0, 0] > 0), 1),
}


@pytest.mark.parametrize("name", [*MEET, *APART])
def test_what_samples_meet_by_is_named_and_nothing_else(name):
    graph = ModelGraph(Meets({**MEET, **APART}[name]), torch.empty(8, 4))
    assert name in [name for _, name in graph.draws.across] if name in MEET else not graph.draws.across


class Counted(nn.Module):
    """Counts its inputs along the samples, as code does that says where each sequence of a row begins."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + (x > 0).long().cumsum(0)


def test_a_count_of_what_the_inputs_say_is_not_named():
    assert not ModelGraph(Counted(), torch.empty(8, 4)).draws.across


def test_a_choice_by_a_mean_of_all_samples_that_goes_back_into_each_mixes_them():
    model = Meets(lambda y: y.index_select(1, y.mean(0).topk(2).indices))
    assert ModelGraph(model, torch.empty(8, 4)).mixing_call().name == "mean"


LOSSES = {
    "mm": lambda y, t: (functional.cross_entropy(y @ y.T, torch.arange(len(y)), reduction="sum"), len(y)),
    "_softmax": lambda y, t: (y.softmax(0).square().sum(), len(y)),
    "sqrt": MeanLoss(lambda y, t: functional.mse_loss(y, t).sqrt()),
    "mean": lambda y, t: ((y - y.mean(0)).square().sum(), len(y)),
    "pow": lambda y, t: ((y.T @ t / len(y) - torch.eye(4)).square().sum() * len(y), len(y)),
    "std": lambda y, t: (functional.relu(1 - y.std(0)).sum() * len(y), len(y)),
    "sub": lambda y, t: ((y[:, None] - y[None]).abs().sum(), len(y)),
}

PLAIN_LOSSES = {
    "mean": MeanLoss(functional.mse_loss),
    "of targets that count": lambda y, t: (((y - t).square() * (t > 0)).sum(), (t > 0).sum()),
    "roots": lambda y, t: ((y - t).square().mean(1).sqrt().sum(), len(y)),
    "cosines": lambda y, t: ((1 - functional.cosine_similarity(y, t)).sum(), len(y)),
    "divergences": lambda y, t: (functional.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="sum"), len(y)),
}


def named_in(loss, *given):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_loss(as_loss(loss), *given)
    return [str(each.message).split()[3] for each in found]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_which_samples_meet_is_named(name):
    assert name in named_in(LOSSES[name], torch.randn(8, 4), torch.randn(8, 4))


@pytest.mark.parametrize("name", PLAIN_LOSSES)
def test_a_loss_of_each_sample_is_not_named(name):
    assert not named_in(PLAIN_LOSSES[name], torch.randn(8, 4), torch.randn(8, 4))


class Product(nn.Module):
    """A layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 4), Product])
@pytest.mark.parametrize(("line", "meets"), [("dp2", True), ("dp2 tp2", True), ("pp2/1f1b mb2", True), ("tp2", False)])
def test_a_layout_that_cuts_samples_names_a_loss_that_it_changes(line, meets, layer):
    torch.manual_seed(0)
    model, batch = nn.Sequential(layer(), nn.Tanh(), layer()), (torch.randn(8, 4), torch.randn(8, 4))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        verdict = verify(model, line, [batch], loss=LOSSES["mm"])
    assert verdict.equal is not meets
    assert any("the loss takes mm over all samples" in str(each.message) for each in found) is meets


MIXED = {
    "nansum": lambda y: y - y.nansum(0),
    "a mean in a slice": lambda y: centred_by_slice(y),
    "a decorrelation": lambda y: (
        torch.linalg.solve_triangular(
            torch.linalg.cholesky(y.T @ y + torch.eye(4, device=y.device)), y.T, upper=False
        ).T
    ),
    "a norm of a list": lambda y: y / torch._foreach_norm([y])[0],
}


def centred_by_slice(y):
    means = torch.zeros(2, 4, device=y.device)
    means[0:1] = y.mean(0, keepdim=True)
    return y - means[0]


@pytest.mark.parametrize("name", MIXED)
def test_sums_that_go_back_into_each_sample_by_rarer_ways_mix_samples(name):
    assert ModelGraph(Meets(MIXED[name]), torch.empty(8, 4)).mixing_call() is not None
