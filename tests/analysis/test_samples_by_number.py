"""Code that combines samples of a batch, picked by number or in windows, with others is named, and nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import MeanLoss, verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.samples.sample_mixing import warn_of_loss
from shardwright.models.given_loss import as_loss


class Between(nn.Module):
    """A layer, ``between`` of what it gives, and another layer; ``inner`` is a layer that ``between`` may use."""

    def __init__(self, between, inner=None):
        super().__init__()
        self.first, self.last, self.between, self.inner = nn.Linear(6, 8), nn.Linear(8, 4), between, inner
        self.register_buffer("places", torch.tensor([0, 1]))

    def forward(self, x):
        return self.last(self.between(self, self.first(x), x))


def named(between, inner=None, samples=8):
    return [name for _, name in ModelGraph(Between(between, inner), torch.randn(samples, 6)).draws.across]


def views_by_chunk(m, y, x):
    one, other = y.chunk(2)
    return torch.cat([one + other, one * other])


def pairs(m, y, x):
    return torch.stack([y[::2] + y[1::2], y[::2] - y[1::2]], 1).flatten(0, 1)


def running_mean(m, y, x):
    state, found = torch.zeros(8), []
    for each in y:
        state = state / 2 + each
        found.append(state)
    return torch.stack(found)


def in_groups(m, y, x):
    group = (x[:, 0] > 0).long()
    return y + torch.zeros(2, 8).index_add(0, group, y)[group]


def in_scattered_groups(m, y, x):
    group = (x[:, 0] > 0).long()
    return y + torch.zeros(2, 8).scatter_reduce(0, group[:, None].expand(-1, 8), y, "mean")[group]


def backwards(y):
    return torch.arange(len(y) - 1, -1, -1)


def as_signal(y):
    return y.T[None]


PLACES = torch.tensor([0, 1])


def flat_places(m, y):
    """The numbers of rows of flattened (samples, 2) by a buffer of places in a sample, and the sample's first row."""
    return (2 * torch.arange(len(y))[:, None] + m.places).flatten()


MEET = {
    "index by numbers": lambda m, y, x: y - y[torch.tensor([0, 1])].sum(0),
    "index by numbers of before": lambda m, y, x: y - y[PLACES].sum(0),
    "index_select by numbers": lambda m, y, x: y - y.index_select(0, PLACES).sum(0),
    "index by a buffer": lambda m, y, x: y - y[m.places].sum(0),
    "gather by a buffer": lambda m, y, x: y - y.gather(0, m.places[:, None].expand(2, 8)).sum(0),
    "gather of the first": lambda m, y, x: y - y.gather(0, torch.zeros(1, 8, dtype=torch.long)),
    "gather of two": lambda m, y, x: y - y.gather(0, torch.arange(2)[:, None].expand(2, 8)).sum(0),
    "index beyond the record": lambda m, y, x: y + y[torch.arange(30) % 8].sum(0),
    "gather backwards": lambda m, y, x: y - y.gather(0, backwards(y)[:, None].expand_as(y)),
    "gather along a dim": lambda m, y, x: y - torch.take_along_dim(y, m.places[:, None], 0).sum(0),
    "split": views_by_chunk,
    "slice": lambda m, y, x: y - y[:1],
    "slice of neighbours": lambda m, y, x: y + functional.pad(y.diff(dim=0), (0, 0, 1, 0)),
    "slice of pairs": pairs,
    "slice by narrow": lambda m, y, x: y - y.narrow(0, len(y) - 1, 1),
    "select": lambda m, y, x: y + y[0],
    "unbind": running_mean,
    "index": lambda m, y, x: y + y[backwards(y)],
    "index_select": lambda m, y, x: y + y.index_select(0, backwards(y)),
    "flip": lambda m, y, x: y + y.flip(0),
    "roll": lambda m, y, x: y + y.roll(1, 0),
    "kthvalue": lambda m, y, x: y - y.kthvalue(2, 0).values,
    "convolution": lambda m, y, x: functional.conv1d(y.T[:, None], torch.ones(1, 1, 3), padding=1)[:, 0].T,
    "avg_pool2d": lambda m, y, x: functional.avg_pool1d(as_signal(y), 3, 1, 1)[0].T,
    "upsample_nearest1d": lambda m, y, x: y + functional.interpolate(as_signal(y), size=1)[0].T,
    "_fft_r2c": lambda m, y, x: torch.fft.rfft(y, dim=0).abs().sum() + y,
    "native_layer_norm": lambda m, y, x: functional.layer_norm(y.T, (len(y),)).T,
    "native_group_norm": lambda m, y, x: functional.group_norm(as_signal(y), 2)[0].T,
    "scaled_dot_product_attention": lambda m, y, x: functional.scaled_dot_product_attention(y[None], y[None], y[None])[
        0
    ],
    "cat of a shift": lambda m, y, x: y * torch.cat([y[1:], y[:1]]),
    "cat behind a row": lambda m, y, x: torch.cat([torch.zeros(1, 8), y[:-1]]),
    "embedding": lambda m, y, x: y + functional.embedding(backwards(y), y),
    "embedding by a buffer": lambda m, y, x: y + functional.embedding(m.places, y).sum(0),
    "index_add": in_groups,
    "scatter_reduce": in_scattered_groups,
}


def loop_over_samples(m, y, x):
    return torch.stack([each * (1 + x[number, 0]) for number, each in enumerate(y)])


def loop_with_writes(m, y, x):
    found = torch.zeros_like(y)
    for number in range(len(y)):
        found[number] = y[number] * 2
    return found


def loop_with_a_sum(m, y, x):
    assert sum(each.square().sum() for each in y).dim() == 0
    return y, sum(each.square().sum() for each in y)


def last_of_each(m, y, x):
    return y + y[:, None].repeat(1, 3, 1).flatten(0, 1)[2::3]


def joined_and_parted(m, y, x):
    one, other = torch.cat([y, 2 * y]).chunk(2)
    return one + other


def sorted_and_put_back(m, y, x):
    order = y.argmax(1).argsort()
    return torch.zeros_like(y).index_add(0, order, m.inner(y[order]))


def windows(m, y, x):
    rows, order = y.repeat_interleave(4, 0), torch.tensor([[0, 1], [2, 3]])
    each = [rows[4 * number + torch.arange(4).view(2, 2)].sum((0, 1)) for number in range(len(y))]
    return y + torch.stack(each) * len(order)


def tokens_first(m, y, x):
    z = torch.stack([y, 2 * y]).flatten(0, 1)
    return y + torch.zeros_like(z).index_add(0, torch.arange(len(z)), z).view(2, -1, 8).sum(0)


APART = {
    "a loop over samples": loop_over_samples,
    "a loop that writes": loop_with_writes,
    "the shape of one sample": lambda m, y, x: y * y[0].numel(),
    "whole slices": lambda m, y, x: y + y[:] * y[0:] + y[:, :1] + y[..., -1:] + y.flip(1),
    "looked up in order": lambda m, y, x: y + functional.embedding(torch.arange(len(y)), y),
    "looked up in a table": lambda m, y, x: y + functional.embedding(y.argmax(1), m.inner.weight),
    "parts put together again": lambda m, y, x: y + torch.cat([part.tanh() for part in y.split(4)]),
    "two batches, end to end": joined_and_parted,
    "one of each sample's tokens": last_of_each,
    "one feature of each sample": lambda m, y, x: y + y[torch.arange(len(y)), y.argmax(1)][:, None],
    "rows that are put back": sorted_and_put_back,
    "places that sizes decide": lambda m, y, x: y + torch.zeros_like(y).index_add(0, torch.arange(len(y)), y),
    "gathered in order": lambda m, y, x: y + y.gather(0, torch.arange(len(y))[:, None].expand_as(y)),
    "places of each sample by a buffer": lambda m, y, x: (
        y + y.repeat_interleave(2, 0)[flat_places(m, y)].view(-1, 2, 8).sum(1)
    ),
    "gathered by a buffer": lambda m, y, x: (
        y + y.repeat_interleave(2, 0).gather(0, flat_places(m, y)[:, None].expand(-1, 8)).view(-1, 2, 8).sum(1)
    ),
    "numbers of Python for each sample": lambda m, y, x: y + y[[*range(len(y))]] + y[torch.tensor([*range(len(y))])],
    "tokens first, added in order": tokens_first,
    "windows of each sample alone": windows,
    "no places": lambda m, y, x: y + y.gather(0, torch.zeros(0, 8, dtype=torch.long)).sum(),
    "features by a buffer": lambda m, y, x: y + y[:, m.places].sum(1, keepdim=True),
    "a convolution of each sample": lambda m, y, x: functional.conv1d(y[:, None], torch.ones(1, 1, 3), padding=1)[:, 0],
    "a window of one": lambda m, y, x: functional.conv1d(y.T[:, None], torch.ones(1, 1, 1))[:, 0].T,
    "attention inside of samples": lambda m, y, x: functional.scaled_dot_product_attention(*[y[:, None]] * 3)[:, 0],
}


@pytest.mark.parametrize("name", MEET)
def test_samples_that_are_combined_with_others_are_named(name):
    assert name.split()[0] in named(MEET[name])


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_taken_apart_only_are_not_named(name):
    assert not named(APART[name], nn.Linear(8, 8))


def test_a_loop_that_ends_in_a_sum_is_not_named():
    class Summed(Between):
        def forward(self, x):
            return loop_with_a_sum(self, self.first(x), x)

    assert not ModelGraph(Summed(None), torch.randn(8, 6)).draws.across


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_whose_time_is_the_samples_is_named(layer):
    def run(m, y, x):
        return m.inner(y[:, None])[0][:, 0]

    found = ModelGraph(Between(run, layer(8, 8)), torch.randn(8, 6)).draws.across
    assert found == (("inner", "unbind"),)
    assert not named(run, layer(8, 8, batch_first=True))


def test_a_layout_that_cuts_the_batch_warns_of_the_first_sample_before_the_result_differs():
    torch.manual_seed(0)
    batch = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    with pytest.warns(UserWarning, match="takes slice over all samples of a batch"):
        assert not verify(Between(MEET["slice"]).double(), "dp2", [batch]).equal


def masked_mean(y, t):
    mask = (t > 0).float()
    return ((y - t).square() * mask).sum() / mask.sum()


def weights(y):
    return torch.tensor([1.0, 2.0, 3.0, 4.0], device=y.device)


def of_targets(y, t):
    counted = t != -100
    return (functional.cross_entropy(y, t, reduction="none") * counted).sum() / counted.sum()


VALUES, CLASSES, IGNORED = torch.randn(8, 4), torch.arange(8) % 4, torch.tensor([0, 1, -100, 3, 0, -100, 2, 1])

OTHER_MEANS = {
    "div": (MeanLoss(masked_mean), VALUES),
    "div by a count": (MeanLoss(lambda y, t: ((y - t).square() * (t > 0)).sum() / (t > 0).sum().clamp(min=1)), VALUES),
    "nll_loss_forward": (MeanLoss(lambda y, t: functional.cross_entropy(y, t, weight=weights(y))), CLASSES),
    "nll_loss_forward of kept": (MeanLoss(lambda y, t: functional.cross_entropy(y, t, ignore_index=0)), CLASSES),
    "nll_loss_forward, ignored": (lambda y, t: (functional.cross_entropy(y, t) * len(t), len(t)), IGNORED),
    "split": (lambda y, t: ((1 - functional.cosine_similarity(*y.chunk(2))).sum(), len(y)), VALUES),
}

ITS_MEANS = {
    "a mean": (lambda y, t: (functional.cross_entropy(y, t) * len(t), len(t)), CLASSES),
    "a mean of targets": (MeanLoss(functional.cross_entropy), IGNORED),
    "a smoothed mean": (MeanLoss(lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1)), IGNORED),
    "kept classes": (MeanLoss(lambda y, t: functional.cross_entropy(y, t, ignore_index=0), ignore_index=0), CLASSES),
    "a count": (MeanLoss(of_targets), IGNORED),
    "a mask": (lambda y, t: (masked_mean(y, t) * (t > 0).float().sum(), (t > 0).sum()), VALUES),
    "weights": (
        lambda y, t: (functional.cross_entropy(y, t, weight=weights(y)) * weights(y)[t].sum(), weights(y)[t].sum()),
        CLASSES,
    ),
    "a mask of each sample": (
        MeanLoss(lambda y, t: (((y - t).square() * (t > 0)).sum(1) / (t > 0).sum(1).clamp(min=1)).mean()),
        VALUES,
    ),
}


def named_in(loss, targets):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_loss(as_loss(loss), torch.randn(8, 4), targets)
    return [str(each.message).split()[3] for each in found]


@pytest.mark.parametrize("name", OTHER_MEANS)
def test_a_loss_with_a_mean_over_something_else_than_its_count_is_named(name):
    assert name.replace(",", "").split()[0] in named_in(*OTHER_MEANS[name])


@pytest.mark.parametrize("name", ITS_MEANS)
def test_a_loss_with_a_mean_over_its_count_is_not_named(name):
    assert not named_in(*ITS_MEANS[name])


def of_boxes(y, t):
    return sum((one - each["boxes"]).square().sum() for one, each in zip(y, t, strict=False)), len(y)


@pytest.mark.parametrize("rows", [lambda number: 1 + number % 3, lambda number: 8])
def test_a_loss_of_each_picture_with_its_boxes_is_not_named(rows):
    assert not named_in(of_boxes, [{"boxes": torch.randn(rows(number), 4)} for number in range(8)])


def test_losses_of_samples_that_are_added_up_are_not_named():
    def added_up(y, t):
        return sum((one - target).square().sum() for one, target in zip(y, t, strict=True)), len(y)

    assert not named_in(added_up, VALUES)


# ---- layers that some samples pass by their place in the batch


class TwoLayers(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.one, self.other = run, nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.run(self, x)


def written(m, x, write):
    out = x.new_zeros(len(x), 4)
    write(out, slice(4), m.one(x[:4]))
    write(out, slice(4, None), m.other(x[4:]))
    return out


def _set(out, rows, values):
    out[rows] = values


BY_PLACE = {
    "joined": lambda m, x: torch.cat([m.one(x[:4]), m.other(x[4:])]),
    "set": lambda m, x: written(m, x, _set),
    "copied into views": lambda m, x: written(m, x, lambda out, rows, values: out[rows].copy_(values)),
    "halves": lambda m, x: torch.cat([f(part) for f, part in zip((m.one, m.other), x.chunk(2), strict=True)]),
    "the first only": lambda m, x: torch.cat([m.one(x[:1]) + m.other(x[:1]), m.other(x[1:])]),
    "one passed by": lambda m, x: m.other(x).index_add(0, torch.tensor([0]), m.one(x[:1])),
}

ALL_PASS = {
    "parts": lambda m, x: torch.cat([m.one(part) for part in x.split(3)]),
    "halves by one": lambda m, x: torch.cat([m.one(part) for part in x.tensor_split(2)]) * m.other(x),
    "the first, for its shape": lambda m, x: m.one(x) + x.new_ones(m.other(x[:1]).shape[1]),
    "by values": lambda m, x: m.one(x).index_put((x[:, 0] > 0,), m.other(x[x[:, 0] > 0])),
    "features": lambda m, x: m.one(torch.cat([x[:, :3], x[:, 3:]], 1)) + m.other(x),
}


def by_place(run):
    found = ModelGraph(TwoLayers(run), torch.randn(8, 6)).draws.across
    return [what for _, what in found if "layers that other samples do not pass" in what]


@pytest.mark.parametrize("name", BY_PLACE)
def test_a_layer_that_some_samples_pass_by_their_place_is_named(name):
    assert by_place(BY_PLACE[name])


@pytest.mark.parametrize("name", ALL_PASS)
def test_a_layer_that_all_samples_pass_is_not_named(name):
    assert not by_place(ALL_PASS[name])


def test_a_layout_that_cuts_the_batch_warns_of_layers_by_place_before_the_result_differs():
    torch.manual_seed(0)
    batch = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    with pytest.warns(UserWarning, match="takes slice, for layers that other samples do not pass, over all samples"):
        assert not verify(TwoLayers(BY_PLACE["set"]).double(), "dp2", [batch]).equal
