"""Norms of sharded features against torch's norms, to rounding in float64 and at a mean of 1,000 in float32."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from shardwright import Mesh
from shardwright.comm.launch import launch
from shardwright.operators.norms import cut_layer_norm, cut_rms_norm

EPS = 1e-5


def layer_norm(x, w, b, size=None, splits=None):
    if splits is None:
        return functional.layer_norm(x, x.shape[-1:], w, b, EPS)
    return cut_layer_norm(x, w, b, eps=EPS, size=size, splits=splits)


def rms_norm(x, w, b, size=None, splits=None):
    if splits is None:
        return functional.rms_norm(x, x.shape[-1:], w, EPS)
    return cut_rms_norm(x, w, eps=EPS, size=size, splits=splits)


def with_gradients(norm, x, w, b, g, **cut):
    """The output and the gradients of x, w and b, where there are any."""
    leaves = [t.clone().requires_grad_() if t is not None else None for t in (x, w, b)]
    y = norm(*leaves, **cut)
    y.backward(g)
    return [y.detach(), *(t.grad for t in leaves if t is not None and t.grad is not None)]


def cut_apart(norm, widths, mesh, x, w, b, g):
    """The same on ranks that hold ``widths`` features each, joined again; and the calls of each rank.

    Along the first axis a member answers for its own features, along the next for those of its whole row.
    """
    cuts = list(pairwise(accumulate(widths, initial=0)))

    def work(world):
        axes, here = world.axes(mesh), slice(*cuts[world.rank])
        splits, groups = [], [(rank,) for rank in range(mesh.size)]
        for name in reversed(mesh.axes):
            splits.append((axes[name], tuple(sum(widths[r] for r in groups[rank]) for rank in axes[name].ranks)))
            groups = [tuple(r for other in mesh.group(name, rank) for r in groups[other]) for rank in range(mesh.size)]
        mine = [t[..., here] if t is not None else None for t in (x, w, b, g)]
        with world.recorder.recording() as records:
            found = with_gradients(norm, *mine, size=sum(widths), splits=splits)
        return found, [(r.kind, r.axis, r.num_bytes) for r in records]

    ranks = launch(work, mesh.size, ranks="threads")
    return [torch.cat(each, -1) for each in zip(*(found for found, _ in ranks), strict=True)], ranks[0][1]


meshes = st.one_of(
    st.integers(1, 4).map(lambda n: Mesh(tp=n)),
    st.tuples(st.integers(1, 3), st.integers(1, 2)).map(lambda n: Mesh(row=n[0], col=n[1])),
)


@settings(max_examples=60)
@given(meshes, st.data(), st.sampled_from([layer_norm, rms_norm]), st.booleans(), st.booleans())
def test_a_norm_of_cut_features_and_its_gradients_are_torch_s(mesh, data, norm, has_weight, has_bias):
    widths = data.draw(st.lists(st.integers(1, 5), min_size=mesh.size, max_size=mesh.size))
    size = sum(widths)
    generator = torch.Generator().manual_seed(size)
    x, g = torch.randn(2, 3, 2, size, dtype=torch.float64, generator=generator) + torch.tensor([[[[5.0]]], [[[0.0]]]])
    w, b = torch.randn(2, size, dtype=torch.float64, generator=generator)
    given = (x, w if has_weight else None, b if has_bias else None, g)
    found, _ = cut_apart(norm, widths, mesh, *given)
    expected = with_gradients(norm, *given)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


WIDE = [(size, num_ranks) for size in (67, 768, 3072) for num_ranks in (2, 3, 4)]


@pytest.mark.parametrize(("size", "num_ranks"), WIDE)
def test_at_a_mean_of_1000_in_float32_the_error_is_at_most_twice_that_of_torch_s_own_norm(size, num_ranks):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(64, size, generator=generator) + 1000
    w, b = torch.randn(2, size, generator=generator)
    g = torch.randn(64, size, generator=generator)
    exact = with_gradients(layer_norm, *(t.double() for t in (x, w, b, g)))
    torch_s = with_gradients(layer_norm, x, w, b, g)
    widths = [size // num_ranks + (i < size % num_ranks) for i in range(num_ranks)]
    ours, _ = cut_apart(layer_norm, widths, Mesh(tp=num_ranks), x, w, b, g)
    for name, mine, theirs, right in zip(("y", "dx", "dw", "db"), ours, torch_s, exact, strict=True):
        mine, theirs = ((each.double() - right).abs().max() for each in (mine, theirs))
        assert mine <= 2 * theirs, f"{name}: {float(mine):.1e}, torch {float(theirs):.1e}"


def test_cutting_features_sends_two_numbers_of_a_token_for_a_layer_norm_and_one_for_an_rms_norm():
    x, w, b, g = torch.randn(3, 5, 8), torch.randn(8), torch.randn(8), torch.randn(3, 5, 8)
    number = 15 * 4
    _, calls = cut_apart(layer_norm, (3, 5), Mesh(tp=2), x, w, b, g)
    assert calls == [("all_gather", "tp", 2 * 2 * number), ("all_reduce", "tp", 2 * number)]
    _, calls = cut_apart(rms_norm, (3, 5), Mesh(tp=2), x, w, b, g)
    assert calls == [("all_reduce", "tp", number)] * 2
