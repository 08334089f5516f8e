"""Sums and means of a batch end in any view, are named where code bends them or keeps them, and else are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.samples.sample_mixing import warn_of_loss
from shardwright.models.given_loss import as_loss


class Layers(nn.Module):
    """A layer, what a function makes of its output, and a layer."""

    def __init__(self, function):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.function = function
        self.register_buffer("bank", torch.zeros(8, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.down(self.function(self, self.up(x)))


class WithTerm(Layers):
    """Returns beside the output a term that a function makes of the hidden layer."""

    def forward(self, x):
        hidden = self.up(x).tanh()
        return self.down(hidden), self.function(self, hidden)


def met_in(model, example):
    graph = ModelGraph(model, tree_map(lambda tensor: tensor.to("meta"), example), example)
    assert graph.run.recording.calls
    return [name for _, name in graph.draws.across]


def rows():
    return torch.randn(12, 6)


# ---- views that leave a sum as it is

SAME_VIEWS = {
    "view": lambda m, h: h.mean(0).view(-1),
    "slice": lambda m, h: h.mean(0)[:],
    "reshape": lambda m, h: h.square().mean().reshape([]),
    "tensordot": lambda m, h: torch.tensordot(h, h, dims=([0], [0])).sum() / len(h),
    "views of views": lambda m, h: h.mean(0).view(8)[:].expand(8),
    "written view": lambda m, h: h.sum(0).view(-1).mul_(0.5),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SAME_VIEWS)
def test_a_view_that_leaves_a_sum_of_samples_as_it_is_ends(name):
    assert not met_in(WithTerm(SAME_VIEWS[name]), rows())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["view", "slice"])
def test_a_mean_in_such_a_view_that_goes_back_into_each_sample_mixes_them(name):
    model = Layers(lambda m, h: h - SAME_VIEWS[name](m, h))
    assert ModelGraph(model, rows()).mixing_call().name == "mean"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("view", [lambda s: s.view([]), lambda s: s.reshape(()), lambda s: s.expand(())])
def test_a_view_of_a_loss_that_leaves_it_as_it_is_ends_without_a_warning(view):
    def loss(y, t):
        return view((y - t).square().sum()), len(y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_loss(as_loss(loss), torch.randn(8, 4), torch.randn(8, 4))


# ---- what a term bends


def zeros(h, size=8):
    return torch.zeros(size, device=h.device, dtype=h.dtype)


def covariance(h):
    return h.t() @ h / len(h)


def one(h):
    return torch.eye(8, device=h.device, dtype=h.dtype)


def matched(m, h):
    """The means of features of two views, as in domain adaptation."""
    return functional.mse_loss(h.mean(0), h.flip(1).mean(0))


BENT = {
    "matched features": ("mse_loss", matched),
    "coding rate": ("_linalg_slogdet", lambda m, h: -torch.logdet(one(h) + covariance(h))),
    "determinant": ("_linalg_det", lambda m, h: torch.det(one(h) + covariance(h))),
    "eigenvalues": ("_linalg_eigh", lambda m, h: torch.linalg.eigvalsh(covariance(h)).max()),
    "mean of all": ("mse_loss", lambda m, h: functional.mse_loss(h, h.mean(0, keepdim=True).expand_as(h))),
    "huber": ("smooth_l1_loss", lambda m, h: functional.smooth_l1_loss(h.mean(0), zeros(h))),
    "cross entropy": (
        "binary_cross_entropy",
        lambda m, h: functional.binary_cross_entropy(h.sigmoid().mean(0), zeros(h) + 0.5),
    ),
    "cross entropy of logits": (
        "binary_cross_entropy_with_logits",
        lambda m, h: functional.binary_cross_entropy_with_logits(h.mean(0), zeros(h) + 0.5),
    ),
    "norm": ("linalg_vector_norm", lambda m, h: h.mean(0).norm()),
    "elu": ("elu", lambda m, h: functional.elu(h.mean(0)).sum()),
    "sine": ("sin", lambda m, h: torch.sin(h.mean(0)).sum()),
    "leaky": ("leaky_relu", lambda m, h: functional.leaky_relu(h.mean(0)).sum()),
    "sorted": ("sort", lambda m, h: (h.mean(0).sort().values * torch.arange(8, device=h.device)).sum()),
    "normalized": (
        "native_layer_norm",
        lambda m, h: (functional.layer_norm(h.mean(0), (8,)) * torch.arange(8, device=h.device)).sum(),
    ),
    "product": ("prod", lambda m, h: h.mean(0).prod()),
    "spread": ("std", lambda m, h: h.mean(0).std()),
    "distances": ("_cdist_forward", lambda m, h: torch.cdist(h.mean(0)[None], m.gate.weight).sum()),
}

KEPT = {
    "entropy of each": lambda m, h: -(m.gate(h).softmax(1) * m.gate(h).log_softmax(1)).sum(1).mean(),
    "logits of each": lambda m, h: m.gate(h).logsumexp(1).square().mean(),
    "nearest entries": lambda m, h: functional.mse_loss(
        h, m.gate.weight[torch.cdist(h, m.gate.weight).argmin(1)].detach()
    ),
    "a mean by a number": lambda m, h: h.square().mean() / 0.3,
    "differences of features": lambda m, h: (h[:, 1:] - h[:, :-1]).abs().mean(),
    "divergence of each": lambda m, h: -0.5 * (1 + h[:, 4:] - h[:, :4] ** 2 - h[:, 4:].exp()).sum(1).mean(),
    "layer of a mean": lambda m, h: m.gate(h.mean(0)).sum(),
    "weights of a mean": lambda m, h: (h.mean(0) * m.gate.weight[0]).sum(),
}


@pytest.mark.parametrize("name", BENT)
def test_a_term_that_bends_a_mean_of_a_batch_is_named(name):
    operator, function = BENT[name]
    assert operator in met_in(WithTerm(function), rows())


@pytest.mark.parametrize("name", KEPT)
def test_a_term_that_is_a_mean_of_terms_of_each_sample_is_not_named(name):
    assert not met_in(WithTerm(KEPT[name]), rows())


def loss_and_term(output, target):
    prediction, term = output
    return (prediction - target).square().sum() + 0.5 * term * len(target), len(target)


@pytest.mark.parametrize("line", ["dp2", "pp1 mb2"])
def test_a_layout_that_cuts_a_batch_warns_of_a_bent_mean_that_it_changes(line):
    torch.manual_seed(0)
    batch = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="takes mse_loss over all samples of a batch"):
        verdict = verify(WithTerm(matched).double(), line, [batch], loss=loss_and_term)
    assert not verdict.equal


# ---- samples in another order


class TimeFirst(nn.Module):
    """Brings the time of a series to the front of (batch, time, features), or views its numbers so."""

    def __init__(self, is_viewed):
        super().__init__()
        self.recurrent, self.down, self.is_viewed = nn.GRU(2, 8), nn.Linear(8, 3), is_viewed

    def forward(self, x):
        series = x.view(len(x), 3, 2)
        outputs, _ = self.recurrent(series.view(3, len(x), 2) if self.is_viewed else series.transpose(0, 1))
        return self.down(outputs[-1])


def test_a_view_that_takes_the_dim_of_samples_for_another_is_named_and_a_transpose_is_not():
    assert "view" in met_in(TimeFirst(is_viewed=True), rows())
    assert not met_in(TimeFirst(is_viewed=False), rows())


def swapped(m, h):
    first, second = h.chunk(2)
    return torch.cat([second, first])


def compared(m, h):
    """Each view of a sample compared with the other, where both are halves of a batch."""
    return h * (1 - functional.cosine_similarity(h.tanh(), swapped(m, h).detach(), dim=1))[:, None]


def swapped_slices(m, h):
    half = len(h) // 2
    return h * torch.cat([h[half:], h[:half]])


@pytest.mark.parametrize("function", [swapped, compared, swapped_slices])
def test_swapped_halves_of_a_batch_are_named(function):
    assert "cat" in met_in(Layers(function), rows())


@pytest.mark.parametrize("line", ["dp2", "pp1 mb2"])
def test_a_layout_that_cuts_a_batch_warns_of_swapped_halves(line):
    torch.manual_seed(0)
    batch = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="takes cat over all samples of a batch"):
        verdict = verify(Layers(compared).double(), line, [batch], loss=lambda y, t: ((y - t).square().sum(), len(y)))
    assert not verdict.equal


def halves_in_order(m, h):
    first, second = h.chunk(2)
    return torch.cat([first, second])


def test_halves_of_a_batch_in_their_order_are_not_named():
    assert not met_in(Layers(halves_in_order), rows())


# ---- buffers


def into_a_slice(m, h):
    m.bank[:4] = h.detach().mean(0)
    return h + m.bank[:4].mean(0)


def into_a_row(m, h):
    m.bank[0] = h.detach().mean(0)
    return h * 2


def into_a_view(m, h):
    m.bank[0].copy_(h.detach().mean(0))
    return h * 2


def by_nearest_entries(m, h):
    """Moves the entries of a code book to the samples that are nearest to each."""
    entries = m.bank[:4].clone()
    nearest = torch.cdist(h.detach(), entries).argmin(1)
    m.bank[:4] = 0.9 * entries + 0.1 * (functional.one_hot(nearest, 4).to(h.dtype).t() @ h.detach())
    return h + (entries[nearest] - h).detach()


WRITES = {"mean": [into_a_slice, into_a_row, into_a_view], "mm": [by_nearest_entries]}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("operator", "function"), [(name, each) for name in WRITES for each in WRITES[name]])
def test_a_mean_of_a_batch_written_into_a_part_of_a_buffer_is_named(operator, function):
    assert f"a {operator}, with which it changes the buffer 'bank'," in met_in(Layers(function), rows())


def counted(m, h):
    m.count += 1
    return h / (1 + m.count)


def into_a_slice_plainly(m, h):
    m.bank[:4] = m.bank[:4] * 0.9 + m.gate.weight.detach()
    return h * 2


def normalized_by_what_is_kept(m, h):
    return functional.batch_norm(h, m.mean, torch.ones_like(m.mean), training=False)


@pytest.mark.parametrize("function", [counted, into_a_slice_plainly, normalized_by_what_is_kept])
def test_a_buffer_that_no_sample_changes_is_not_named(function):
    assert not met_in(Layers(function), rows())


# ---- sequences


class Sequences(nn.Module):
    """Embedded ids, what a function makes of them with a mask and lengths, and a layer."""

    def __init__(self, function):
        super().__init__()
        self.embedding, self.down, self.function = nn.Embedding(11, 8), nn.Linear(8, 3), function
        self.recurrent, self.forward_in_time = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8)
        self.attention, self.conv = nn.MultiheadAttention(8, 2), nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)
        self.register_buffer("positions", torch.randn(64, 8))

    def forward(self, ids, mask, lengths):
        return self.down(self.function(self, self.embedding(ids), mask, lengths, ids))


def pooled(h, mask):
    return (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def viewed_time_first(m, h, mask, lengths, ids):
    return h.view(h.shape[1], h.shape[0], 8).mean(0)


def by_lstm(m, h, mask, lengths, ids):
    return m.forward_in_time(h.view(h.shape[1], h.shape[0], 8))[0].mean(0)


def packed(m, h, mask, lengths, ids):
    rows = nn.utils.rnn.pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return m.recurrent(rows)[1][0][0]


def packed_and_padded(m, h, mask, lengths, ids):
    rows = nn.utils.rnn.pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(m.recurrent(rows)[0], batch_first=True)[0].sum(1)


def sorted_and_packed(m, h, mask, lengths, ids):
    descending, order = lengths.sort(descending=True)
    rows = nn.utils.rnn.pack_padded_sequence(h[order], descending.cpu(), batch_first=True)
    return m.recurrent(rows)[1][0][0][order.argsort()]


def attended(m, h, mask, lengths, ids):
    steps = h.transpose(0, 1)
    return m.attention(steps, steps, steps)[0].mean(0)


def normalized_rows(m, h, mask, lengths, ids):
    kept, out = mask.bool(), torch.zeros_like(h)
    out[kept] = m.batch_norm(h[kept])
    return out.mean(1)


def every_other(m, h, mask, lengths, ids):
    out = pooled(h, mask).clone()
    out[::2] *= -1
    return out


def trimmed(m, h, mask, lengths, ids):
    longest = int(lengths.max())
    return pooled(h[:, :longest], mask[:, :longest])


QUIET = {
    "pooled": lambda m, h, mask, lengths, ids: pooled(h, mask),
    "trimmed": trimmed,
    "packed": packed,
    "packed and padded": packed_and_padded,
    "sorted and packed": sorted_and_packed,
    "recurrent": lambda m, h, mask, lengths, ids: m.forward_in_time(h.transpose(0, 1))[0].mean(0),
    "attended": attended,
    "viewed for a convolution": lambda m, h, mask, lengths, ids: m.conv(h.reshape(len(h), 8, -1)).mean(2),
    "norm of tokens": lambda m, h, mask, lengths, ids: m.batch_norm(h.reshape(-1, 8)).view(h.shape).mean(1),
    "norm of kept tokens": normalized_rows,
    "norm in time": lambda m, h, mask, lengths, ids: m.batch_norm(h.transpose(1, 2)).mean(2),
    "groups of each token": lambda m, h, mask, lengths, ids: m.group_norm(h.reshape(-1, 8)).view(h.shape).mean(1),
    "positions": lambda m, h, mask, lengths, ids: (h + m.positions[: h.shape[1]]).mean(1),
    "shifted in time": lambda m, h, mask, lengths, ids: (h - functional.pad(h, (0, 0, 1, 0))[:, :-1]).mean(1),
    "mask of lengths": lambda m, h, mask, lengths, ids: pooled(
        h, (torch.arange(h.shape[1], device=h.device)[None] < lengths[:, None]).to(h.dtype)
    ),
    "split by lengths": lambda m, h, mask, lengths, ids: torch.stack(
        [part.mean(0) for part in h[mask.bool()].split(lengths.tolist())]
    ),
    "every other": every_other,
    "greatest of ids": lambda m, h, mask, lengths, ids: pooled(h, mask) * (ids / ids.max()).mean(1, keepdim=True),
}


def sequences(number=12):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 6, (number,), generator=generator)
    lengths[0] = lengths[7] = 5
    mask = (torch.arange(5)[None] < lengths[:, None]).float()
    return {"ids": torch.randint(0, 11, (number, 5), generator=generator), "mask": mask, "lengths": lengths}


@pytest.mark.parametrize("name", QUIET)
def test_sequences_that_stay_apart_are_not_named(name):
    assert not met_in(Sequences(QUIET[name]), sequences())


@pytest.mark.parametrize("function", [viewed_time_first, by_lstm])
def test_sequences_whose_time_is_viewed_first_are_named(function):
    assert "view" in met_in(Sequences(function), sequences())


def test_a_product_with_blocks_of_neighbours_is_not_named():
    def averaged(m, h):
        blocks = [torch.full((2, 2), 0.5, device=h.device, dtype=h.dtype) for _ in range(len(h) // 2)]
        return torch.block_diag(*blocks) @ h

    assert not met_in(Layers(averaged), rows())


# ---- what asks for no record


def test_no_forward_is_recorded_to_ask_for_values_that_a_batch_has_not():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    graph = ModelGraph(Counted(6, 3), torch.empty(4, 6, device="meta"))
    assert not graph.selects_by_values
    assert not calls
    assert graph.run.recording.calls
    assert calls, "the record itself runs the forward"
