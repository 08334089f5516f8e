"""Changes of a tensor's layout, against autograd on one device that holds the whole tensor.

On one device the members' work is written out as a sum over members of ``work(r, y_r)``; members that all do the same
work count it once.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.autograd import (
    cut_to_shared,
    cut_to_whole,
    partial_to_whole,
    sum_gradient,
    whole_to_cut,
)
from shardwright.comm.launch import launch


def drawn(seed, shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def work(seed, y):
    """Some work on y whose gradient depends on y."""
    return ((y * drawn(seed, y.shape)).sin() * y).sum()


@st.composite
def cuts(draw):
    """A number of ranks, a whole shape, a dim, and the members' sizes along it, some of them 0."""
    num_ranks = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks).filter(any))
    shape[dim] = sum(sizes)
    return num_ranks, tuple(shape), dim, sizes


def check(num_ranks, across, here, xs, whole_work):
    """``across(axis, x)`` then ``here(rank, y)`` on ranks, against ``whole_work(xs)`` on one device."""

    def rank(world):
        x = xs[world.rank].clone().requires_grad_()
        y = across(world.everyone(), x * 1)
        here(world.rank, y).backward()
        return y.detach(), x.grad

    leaves = [x.clone().requires_grad_() for x in xs]
    expected_y, loss = whole_work(leaves)
    gradients = torch.autograd.grad(loss, leaves)
    for found, y, gradient in zip(launch(rank, num_ranks, ranks="threads"), expected_y, gradients, strict=True):
        torch.testing.assert_close(found[0], y.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], gradient, rtol=1e-12, atol=1e-12)


@given(cuts())
@settings(max_examples=25)
def test_partial_to_whole_passes_the_gradient_of_the_sum_to_every_term(given):
    num_ranks, shape, _, _ = given
    xs = [drawn(rank, shape) for rank in range(num_ranks)]

    def whole_work(leaves):
        y = torch.stack(leaves).sum(0)
        return [y] * num_ranks, work(50, y)

    check(num_ranks, lambda axis, x: partial_to_whole(x, axis), lambda _, y: work(50, y), xs, whole_work)


@given(cuts(), st.booleans())
@settings(max_examples=25)
def test_sum_gradient_adds_the_gradients_of_all_members(given, overwrite):
    num_ranks, shape, _, _ = given
    x = drawn(0, shape)

    def rank(world):
        leaf = x.clone().requires_grad_()
        y = sum_gradient(leaf, world.everyone(), overwrite=overwrite)
        work(50 + world.rank, y).backward()
        return leaf.grad

    leaf = x.clone().requires_grad_()
    sum(work(50 + r, leaf) for r in range(num_ranks)).backward()
    for found in launch(rank, num_ranks, ranks="threads"):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-12)


@given(cuts())
@settings(max_examples=25)
def test_whole_to_cut_joins_the_gradients_of_the_parts(given):
    num_ranks, shape, dim, sizes = given
    x = drawn(0, shape)

    def rank(world):
        leaf = x.clone().requires_grad_()
        y = whole_to_cut(leaf, world.everyone(), dim, sizes)
        work(50 + world.rank, y).backward()
        return y.detach(), leaf.grad

    leaf = x.clone().requires_grad_()
    parts = leaf.split(sizes, dim)
    sum(work(50 + r, part) for r, part in enumerate(parts)).backward()
    for (y, gradient), part in zip(launch(rank, num_ranks, ranks="threads"), parts, strict=True):
        assert torch.equal(y, part.detach())
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


@given(cuts())
@settings(max_examples=25)
def test_cut_to_whole_gives_every_part_its_slice_of_the_one_gradient(given):
    num_ranks, shape, dim, sizes = given
    xs = list(drawn(0, shape).split(sizes, dim))

    def whole_work(leaves):
        y = torch.cat(leaves, dim)
        return [y] * num_ranks, work(50, y)

    across = lambda axis, x: cut_to_whole(x, axis, dim, sizes)  # noqa: E731
    check(num_ranks, across, lambda _, y: work(50, y), xs, whole_work)


@given(cuts())
@settings(max_examples=25)
def test_cut_to_shared_sums_the_gradients_of_all_members(given):
    num_ranks, shape, dim, sizes = given
    xs = list(drawn(0, shape).split(sizes, dim))

    def whole_work(leaves):
        y = torch.cat(leaves, dim)
        return [y] * num_ranks, sum(work(50 + r, y) for r in range(num_ranks))

    across = lambda axis, x: cut_to_shared(x, axis, dim, sizes)  # noqa: E731
    check(num_ranks, across, lambda rank, y: work(50 + rank, y), xs, whole_work)


# ---- tensors that must not change


def test_sum_gradient_leaves_the_gradients_of_others_alone():
    """In ``y + x`` autograd passes one tensor to both: what is summed in place must be a copy."""

    def rank(world):
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        other = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        y = sum_gradient(x, world.everyone()) + other * 1
        (y * (1 + world.rank)).sum().backward()
        return x.grad.tolist(), other.grad.tolist()

    assert launch(rank, 2, ranks="threads") == [([3.0] * 3, [1.0] * 3), ([3.0] * 3, [2.0] * 3)]


def test_gradients_share_no_memory_with_other_gradients():
    def rank(world):
        axis = world.everyone()
        found = []
        for function, shape in [
            (partial(partial_to_whole, axis=axis), (2, 3)),
            (partial(sum_gradient, axis=axis), (2, 3)),
            (partial(cut_to_whole, axis=axis, dim=0, sizes=[1, 1]), (1, 3)),
            (partial(cut_to_shared, axis=axis, dim=0, sizes=[1, 1]), (1, 3)),
        ]:
            x = torch.zeros(shape, requires_grad=True)
            other = torch.zeros(2, 3, requires_grad=True)
            y = function(x * 1 if shape == (2, 3) else x) + other
            y.backward(torch.ones(2, 3))
            x.grad.mul_(0)
            found.append(other.grad.eq(1).all().item())
        return found

    assert launch(rank, 2, ranks="threads") == [[True] * 4] * 2


def test_partial_to_whole_overwrites_its_terms_and_nothing_else_is_changed():
    def rank(world):
        axis = world.everyone()
        x = drawn(world.rank, (2, 4))
        kept = x.clone()
        for function in (
            lambda x: sum_gradient(x, axis),
            lambda x: whole_to_cut(x, axis, 1, [1, 3]),
            lambda x: cut_to_whole(x, axis, 0, [2, 2]),
            lambda x: cut_to_shared(x, axis, 0, [2, 2]),
        ):
            function(x)
            assert torch.equal(x, kept)
        assert partial_to_whole(x, axis).data_ptr() == x.data_ptr()
        return x

    found = launch(rank, 2, ranks="threads")
    assert torch.equal(found[0], drawn(0, (2, 4)) + drawn(1, (2, 4)))
    assert torch.equal(found[0], found[1])


def test_a_part_is_no_view_of_the_whole():
    def rank(world):
        x = drawn(0, (2, 4))
        part = whole_to_cut(x, world.everyone(), 1, [1, 3])
        part.fill_(99)
        return torch.equal(x, drawn(0, (2, 4)))

    assert launch(rank, 2, ranks="threads") == [True, True]


# ---- traffic

CALLS = {
    "partial_to_whole": (lambda x, axis: partial_to_whole(x, axis), ["all_reduce 64"], []),
    "sum_gradient": (lambda x, axis: sum_gradient(x, axis), [], ["all_reduce 64"]),
    "whole_to_cut": (lambda x, axis: whole_to_cut(x, axis, 1, [1, 3]), [], ["all_gather 64"]),
    "cut_to_whole": (lambda x, axis: cut_to_whole(x, axis, 0, [2, 2]), ["all_gather 128"], []),
    "cut_to_shared": (lambda x, axis: cut_to_shared(x, axis, 0, [2, 2]), ["all_gather 128"], ["reduce_scatter 128"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_change_makes_the_calls_that_its_table_says(name):
    function, forward, backward = CALLS[name]

    def rank(world):
        x = drawn(0, (2, 4)).requires_grad_()
        with world.recorder.recording() as before:
            y = function(x * 1, world.everyone())
        with world.recorder.recording() as after:
            y.sum().backward()
        return [[f"{r.kind} {r.num_bytes}" for r in records] for records in (before, after)]

    assert launch(rank, 2, ranks="threads") == [[forward, backward]] * 2


@pytest.mark.parametrize("name", CALLS)
def test_on_one_rank_each_change_is_nothing(name):
    function = CALLS[name][0]

    def rank(world):
        x = drawn(0, (2, 4)).requires_grad_()
        with world.recorder.recording() as records:
            same = function(x, world.everyone()) is x
        return same, records

    assert launch(rank, 1, ranks="threads") == [(True, [])]
