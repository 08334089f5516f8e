"""Which samples and tokens each rank has, against all ranks' lists, gathered and cut one step at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import run_on_threads
from shardwright.comm.autograd import cut_to_whole
from shardwright.mesh import Mesh
from shardwright.plan.batch_shard import BatchShard, held_sizes, local_range, microbatch_samples, rows_after

NAMES = ("dp", "depth", "row", "col")


@st.composite
def cases(draw):
    """A mesh, the axes that cut its samples, and how many samples there are in how many microbatches."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = Mesh(**dict(zip(draw(st.permutations(NAMES)), sizes, strict=False)))
    axes = draw(st.sets(st.sampled_from(mesh.axes)))
    return mesh, axes, draw(st.integers(0, 20)), draw(st.integers(1, 3))


def split(held, parts):
    """As even as can be, the first parts one more."""
    return [part.tolist() for part in np.array_split(np.array(held, dtype=int), parts)]


def own(case, number):
    """What every rank holds of microbatch ``number``: nested cuts, the slowest axis first."""
    mesh, axes, num_global, num_microbatches = case
    held = {}
    for rank in range(mesh.size):
        mine = list(range(num_global))
        for name, i in mesh.coord(rank).items():
            mine = split(mine, mesh[name])[i] if name in axes else mine
        held[rank] = split(mine, num_microbatches)[number]
    return held


def moved(mesh, held, what, axis):
    """What every rank holds after one step of all of them."""
    if what == "gather":
        return {rank: [i for other in mesh.group(axis, rank) for i in held[other]] for rank in held}
    return {rank: split(held[rank], mesh[axis])[mesh.coord(rank)[axis]] for rank in held}


def shard_at(case, rank, number):
    mesh, axes, num_global, num_microbatches = case
    shard = BatchShard(mesh, axes, mesh.coord(rank))
    shard.set_microbatch(num_global, number, num_microbatches)
    return shard


@given(cases(), st.data())
def test_every_rank_finds_the_samples_that_all_have_after_gathering_and_cutting(case, data):
    mesh, *_, num_microbatches = case
    number = data.draw(st.integers(0, num_microbatches - 1))
    step = st.tuples(st.sampled_from(("gather", "cut")), st.sampled_from(mesh.axes))
    steps = data.draw(st.lists(step, max_size=4))
    held = own(case, number)
    for what, axis in steps:
        held = moved(mesh, held, what, axis)
    here = data.draw(st.integers(0, mesh.size - 1))
    shard = shard_at(case, here, number)
    assert shard.samples(tuple(steps)) == tuple(held[here])
    for rank in range(mesh.size):
        assert shard.samples(tuple(steps), mesh.coord(rank)) == tuple(held[rank])
    for axis in mesh.axes:
        assert shard.sizes(tuple(steps), axis) == tuple(len(held[rank]) for rank in mesh.group(axis, here))


@given(cases(), st.integers(0, 20), st.data())
def test_where_sequences_are_cut_rows_are_their_tokens_and_every_rank_has_all_samples(case, num_tokens, data):
    mesh, axes, *_ = case
    token_axes = data.draw(st.sets(st.sampled_from(sorted(axes)))) if axes else set()
    step = st.tuples(st.sampled_from(("gather", "cut")), st.sampled_from(mesh.axes))
    steps = data.draw(st.lists(step, max_size=3))
    held = own((mesh, token_axes, num_tokens, 1), 0)
    for what, axis in steps:
        held = moved(mesh, held, what, axis)
    samples_of_all = own((mesh, axes - token_axes, *case[2:]), 0)
    here = data.draw(st.integers(0, mesh.size - 1))
    shard = BatchShard(mesh, axes - token_axes, mesh.coord(here), token_axes=token_axes)
    shard.set_microbatch(case[2], 0, case[3])
    for length in (num_tokens + 1, num_tokens):  # nothing is left of the last sequence
        shard.set_num_tokens(length)
        shard.tokens(tuple(steps))
    for rank in range(mesh.size):
        assert shard.tokens(tuple(steps), mesh.coord(rank)) == tuple(held[rank])
        if token_axes:
            assert shard.samples(tuple(steps), mesh.coord(rank)) == tuple(samples_of_all[rank])
    for axis in mesh.axes if token_axes else ():
        assert shard.sizes(tuple(steps), axis) == tuple(len(held[rank]) for rank in mesh.group(axis, here))


@given(cases())
def test_each_sample_is_computed_once_by_the_ranks_that_cut_the_batch(case):
    mesh, axes, num_global, num_microbatches = case
    found = []
    for number in range(num_microbatches):
        for at in mesh.coords(axes):
            copies = {shard_at(case, mesh.rank({**there, **at}), number).samples(()) for there in mesh.coords()}
            assert len(copies) == 1, "ranks that differ on other axes alone hold the same"
            found += copies.pop()
    assert sorted(found) == list(range(num_global))


@given(cases())
def test_what_a_rank_computes_is_a_run_of_the_batch_and_its_microbatches_a_cut_of_that(case):
    mesh, _, num_global, num_microbatches = case
    for rank in range(mesh.size):
        local = shard_at(case, rank, 0).local_samples(num_global)
        shares = microbatch_samples(local, num_microbatches)
        assert [i for share in shares for i in share] == list(local)
        assert [tuple(share) for share in shares] == [
            shard_at(case, rank, number).samples(()) for number in range(num_microbatches)
        ]


@given(cases())
def test_what_is_cut_over_an_axis_that_does_not_cut_the_batch_and_gathered_again_is_as_it_was(case):
    mesh, axes, *_ = case
    for axis in set(mesh.axes) - axes:
        for rank in range(mesh.size):
            shard = shard_at(case, rank, 0)
            assert shard.samples((("cut", axis), ("gather", axis))) == shard.samples(())


@given(cases(), st.data())
def test_what_is_gathered_over_an_axis_that_cuts_the_batch_and_cut_again_is_as_it_was(case, data):
    mesh, axes, *_, num_microbatches = case
    number = data.draw(st.integers(0, num_microbatches - 1))
    for axis in axes:
        for rank in range(mesh.size):
            shard = shard_at(case, rank, number)
            assert shard.samples((("gather", axis), ("cut", axis))) == shard.samples(())


@given(cases(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=2, max_size=4))
def test_the_next_microbatch_or_batch_leaves_nothing_of_the_last(case, begun):
    mesh, axes, _, num_microbatches = case
    shard = BatchShard(mesh, axes, mesh.coord(0))
    for num_global, number in begun:
        number %= num_microbatches
        shard.set_microbatch(num_global, number, num_microbatches)
        assert list(shard.samples(())) == own((mesh, axes, num_global, num_microbatches), number)[0]


@given(cases(), st.integers(0, 9))
def test_where_a_batch_is_not_cut_every_rank_holds_all_of_it(case, num_samples):
    shard = shard_at(case, 0, 0)
    cut = shard.samples(())
    shard.set_uncut(num_samples)
    for rank in range(case[0].size):
        assert shard.samples((), case[0].coord(rank)) == tuple(range(num_samples))
    shard.set_microbatch(case[2], 0, case[3])
    assert shard.samples(()) == cut


@pytest.mark.parametrize("cuts_tokens", [False, True])
@pytest.mark.parametrize("gathered", [(), ("row",), ("dp",)])
def test_rows_that_are_cut_and_joined_again_are_the_batch_in_its_order_and_so_are_their_gradients(
    cuts_tokens, gathered
):
    mesh = Mesh(dp=3, row=2)
    whole = torch.arange(33.0).view((3, 11) if cuts_tokens else (11, 3))

    def work(axes):
        coord = {name: axes[name].index for name in mesh.axes}
        cut = {"axes": (), "token_axes": mesh.axes} if cuts_tokens else {"axes": mesh.axes}
        shard = BatchShard(mesh, coord=coord, **cut)
        shard.set_microbatch(len(whole))
        shard.set_num_tokens(whole.shape[1])
        x = whole.clone().requires_grad_()
        mine, moves = shard.cut(x, axes), ()
        places = shard.tokens(()) if cuts_tokens else shard.samples(())
        assert torch.equal(mine, whole[:, places] if cuts_tokens else whole[list(places)])
        for name in gathered:  # a layer has gathered already, and rows now lie in its order
            mine = cut_to_whole(mine, axes[name], shard.dim, shard.sizes(moves, name))
            moves = rows_after(moves, "gather", [name])
        y = shard.join(mine, axes, moves)
        (y * whole).sum().backward()
        return torch.equal(y, whole), torch.equal(x.grad, whole)

    assert run_on_threads(mesh, work) == [(True, True)] * mesh.size


def test_a_snapshot_restores_the_microbatch_in_hand():
    shard = BatchShard(Mesh(dp=2), ("dp",), {"dp": 1})
    shard.set_microbatch(6, 0, 3)
    held, restore = shard.samples(()), shard.snapshot()
    shard.set_microbatch(6, 1, 3)
    assert shard.samples(()) != held
    restore()
    assert shard.samples(()) == held


@given(cases())
def test_the_sizes_held_are_those_of_all_ranks(case):
    mesh, axes, num_global, _ = case
    every = {len(local_range(mesh, axes, mesh.coord(rank), num_global)) for rank in range(mesh.size)}
    assert held_sizes(mesh, axes, num_global) == every
