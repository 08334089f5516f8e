"""Embedding and cross entropy over a sharded vocabulary, against torch's unsharded ones, in float64.

S samples, N tokens of each, V vocabulary, W width; the parts are uneven, the last the largest
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import Mesh
from shardwright.comm.launch import launch
from shardwright.operators.operand_moves import OperandMove
from shardwright.operators.vocabulary import cut_cross_entropy, cut_embedding

S, N, W = 5, 3, 4


def bounds(size, parts):
    return list(pairwise(size * i // parts for i in range(parts + 1)))


def part(size, mesh, axes, coord):
    """What ``coord`` holds of a dim that some axes cut one inside the other, the slowest first."""
    held = range(size)
    for name in axes:
        a, b = bounds(len(held), mesh[name])[coord[name]]
        held = held[a:b]
    return held


def move(axes, name, layout, held):
    """A message over one axis; ``held(i)`` is what its member i holds."""
    counts = tuple(len(held(i)) for i in range(axes[name].size))
    return OperandMove(axes[name], layout, lambda: counts)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# ---- tables


TABLES = {  # rows over, features over, samples over; where both rows and samples: tokens are gathered, rows summed
    "rows over one axis": (Mesh(tp=3), ["tp"], [], []),
    "rows over two axes": (Mesh(row=2, col=3), ["row", "col"], [], []),
    "rows and features": (Mesh(row=2, col=3), ["row"], ["col"], []),
    "features alone": (Mesh(tp=3), [], ["tp"], []),
    "rows of all samples' tokens": (Mesh(tp=3), ["tp"], [], ["tp"]),
    "rows of all samples' tokens over two axes": (Mesh(depth=2, row=3), ["depth", "row"], [], ["depth", "row"]),
    "rows of all samples' tokens, and features": (Mesh(row=2, col=3), ["row"], ["col"], ["row"]),
    "rows over two axes, samples over one": (Mesh(row=2, col=3), ["row", "col"], [], ["row"]),
}


@pytest.mark.parametrize("size", [7, 50_257])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.sampled(5)  # every fourth case would be of a small table
def test_a_cut_table_finds_the_rows_and_gives_the_gradients_of_a_whole_one(name, size):
    mesh, by_rows, by_width, by_sample = TABLES[name]
    generator = torch.Generator().manual_seed(0)
    tokens_SN = torch.randint(size, (S, N), generator=generator)
    tokens_SN[0, 0], tokens_SN[-1, -1] = 0, size - 1
    w_VW = torch.randn(size, W, dtype=torch.float64, generator=generator).requires_grad_()
    g_SNW = torch.randn(S, N, W, dtype=torch.float64, generator=generator)
    expected_SNW = functional.embedding(tokens_SN, w_VW)
    expected_SNW.backward(g_SNW)

    def work(world):
        axes, coord = world.axes(mesh), mesh.coord(world.rank)
        rows, features = part(size, mesh, by_rows, coord), part(W, mesh, by_width, coord)
        samples, take, give = part(S, mesh, by_sample, coord), [], []
        own = samples
        for name in reversed(by_sample):
            left = by_sample[: by_sample.index(name) + 1]
            moved = move(axes, name, "rows", lambda i, n=name, left=left: part(S, mesh, left, {**coord, n: i}))
            take.append(moved)
            give.insert(0, moved)
        give += [OperandMove(axes[name], "whole") for name in by_rows if name not in by_sample]
        local = nn.Parameter(w_VW.detach()[rows.start : rows.stop, features.start : features.stop])
        found = cut_embedding(tokens_SN[own.start : own.stop], local, rows.start, size, take, give)
        here = (slice(own.start, own.stop), slice(None), slice(features.start, features.stop))
        found.backward(g_SNW[here])
        close(found.detach(), expected_SNW.detach()[here])
        close(local.grad, w_VW.grad[rows.start : rows.stop, features.start : features.stop])

    launch(work, mesh.size, ranks="threads")


def test_features_found_over_an_axis_that_cuts_rows_may_be_cut_where_they_are_summed():
    """A table that is tied to a head is sharded by rows, and its output by features."""
    mesh, size = Mesh(col=3), 11
    w_VW = torch.randn(size, W, dtype=torch.float64)
    tokens_SN = torch.randint(size, (S, N))

    def work(world):
        axes, coord = world.axes(mesh), mesh.coord(world.rank)
        rows, features = part(size, mesh, ["col"], coord), part(W, mesh, ["col"], coord)
        give = [move(axes, "col", "features", lambda i: part(W, mesh, ["col"], {"col": i}))]
        local = nn.Parameter(w_VW[rows.start : rows.stop])
        found = cut_embedding(tokens_SN, local, rows.start, size, (), give)
        close(found.detach(), w_VW[tokens_SN][..., features.start : features.stop])
        found.square().sum().backward()
        return local.grad

    whole = w_VW.clone().requires_grad_()
    functional.embedding(tokens_SN, whole).square().sum().backward()
    close(torch.cat(launch(work, 3, ranks="threads")), whole.grad)


@pytest.mark.parametrize("token", [-1, 11])
def test_a_token_outside_the_whole_table_is_refused_before_anything_is_sent(token):
    def work(world):
        tp = world.axes(Mesh(tp=2))["tp"]
        with (
            world.recorder.recording() as records,
            pytest.raises(IndexError, match=f"token {token} is outside 0 to 10"),
        ):
            cut_embedding(torch.tensor([[0, token]]), torch.zeros(5, W), 0, 11, (), [OperandMove(tp, "whole")])
        return records

    assert launch(work, 2, ranks="threads") == [[], []]


# ---- losses


LOSSES = {  # classes over, samples whose logits are gathered over
    "one rank": (Mesh(tp=1), ["tp"], []),
    "one axis": (Mesh(tp=3), ["tp"], []),
    "two axes": (Mesh(row=2, col=3), ["row", "col"], []),
    "three axes": (Mesh(depth=2, row=2, col=2), ["depth", "row", "col"], []),
    "one axis, of all its samples": (Mesh(tp=3), ["tp"], ["tp"]),
    "two axes, of one's samples": (Mesh(row=2, col=3), ["row", "col"], ["row"]),
    "two axes, of all their samples": (Mesh(depth=2, row=3), ["depth", "row"], ["depth", "row"]),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("size", [13, 50_257])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sampled(5)  # every fourth case would be without label smoothing
def test_a_loss_on_cut_classes_and_its_gradient_are_torch_s(name, size, ignore_index, smoothing):
    mesh, by_class, by_sample = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    logits_SNV = 10 * torch.randn(S, N, size, dtype=torch.float64, generator=generator)
    targets_SN = torch.randint(size, (S, N), generator=generator)
    targets_SN[::2, 1] = ignore_index
    logits_SNV.requires_grad_()
    each_SN = functional.cross_entropy(
        logits_SNV.flatten(0, 1), targets_SN.flatten(), ignore_index=ignore_index, label_smoothing=smoothing,
        reduction="none",
    ).view(S, N)  # fmt: skip
    share_S = each_SN.sum(1)

    def work(world):
        axes, coord = world.axes(mesh), mesh.coord(world.rank)
        own, classes, take = part(S, mesh, by_sample, coord), part(size, mesh, by_class, coord), []
        for name in reversed(by_sample):
            left = by_sample[: by_sample.index(name) + 1]
            take.append(move(axes, name, "rows", lambda i, n=name, left=left: part(S, mesh, left, {**coord, n: i})))
        local = logits_SNV.detach()[..., classes.start : classes.stop].requires_grad_()
        loss_N, count = cut_cross_entropy(
            local, targets_SN[own.start : own.stop], classes.start, size, [axes[n] for n in reversed(by_class)],
            ignore_index=ignore_index, label_smoothing=smoothing, take=take,
        )  # fmt: skip
        loss = loss_N.sum()
        close(loss.detach(), share_S.detach()[own.start : own.stop].sum())
        assert count == (targets_SN[own.start : own.stop] != ignore_index).sum()
        factor = 1.0 + own.start  # shows whose gradient is whose
        (factor * loss).backward()
        return own, classes, factor, local.grad

    found = launch(work, mesh.size, ranks="threads")
    factors_S = torch.empty(S, dtype=torch.float64)
    for own, _, factor, _ in found:
        factors_S[own.start : own.stop] = factor
    (share_S * factors_S).sum().backward()
    for _, classes, _, gradient in found:
        close(gradient, logits_SNV.grad[..., classes.start : classes.stop])
