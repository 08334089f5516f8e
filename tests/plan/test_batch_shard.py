"""Whose samples a rank has in hand, against all ranks' lists, gathered and cut one step at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.mesh import Mesh
from shardwright.plan.batch_shard import Samples, local_samples, microbatch_samples

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


def samples_at(case, rank, number):
    mesh, axes, num_global, num_microbatches = case
    samples = Samples(mesh, axes, mesh.coord(rank))
    samples.begin(num_global, number, num_microbatches)
    return samples


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
    samples = samples_at(case, here, number)
    assert samples.ids(tuple(steps)) == tuple(held[here])
    for rank in range(mesh.size):
        assert samples.ids(tuple(steps), mesh.coord(rank)) == tuple(held[rank])
    for axis in mesh.axes:
        assert samples.sizes(tuple(steps), axis) == tuple(len(held[rank]) for rank in mesh.group(axis, here))


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
    samples = Samples(mesh, axes - token_axes, mesh.coord(here), token_axes=token_axes)
    samples.begin(case[2], 0, case[3])
    for length in (num_tokens + 1, num_tokens):  # nothing is left of the last sequence
        samples.cut_tokens(length)
        samples.tokens(tuple(steps))
    for rank in range(mesh.size):
        assert samples.tokens(tuple(steps), mesh.coord(rank)) == tuple(held[rank])
        if token_axes:
            assert samples.ids(tuple(steps), mesh.coord(rank)) == tuple(samples_of_all[rank])
    for axis in mesh.axes if token_axes else ():
        assert samples.sizes(tuple(steps), axis) == tuple(len(held[rank]) for rank in mesh.group(axis, here))


@given(cases())
def test_each_sample_is_computed_once_by_the_ranks_that_cut_the_batch(case):
    mesh, axes, num_global, num_microbatches = case
    found = []
    for number in range(num_microbatches):
        for at in mesh.coords(axes):
            copies = {samples_at(case, mesh.rank({**there, **at}), number).ids(()) for there in mesh.coords()}
            assert len(copies) == 1, "ranks that differ on other axes alone hold the same"
            found += copies.pop()
    assert sorted(found) == list(range(num_global))


@given(cases())
def test_what_a_rank_computes_is_a_run_of_the_batch_and_its_microbatches_a_cut_of_that(case):
    mesh, axes, num_global, num_microbatches = case
    for rank in range(mesh.size):
        local = local_samples(mesh, axes, mesh.coord(rank), num_global)
        shares = microbatch_samples(local, num_microbatches)
        assert [i for share in shares for i in share] == list(local)
        assert [tuple(share) for share in shares] == [
            samples_at(case, rank, number).ids(()) for number in range(num_microbatches)
        ]


@given(cases())
def test_what_is_cut_over_an_axis_that_does_not_cut_the_batch_and_gathered_again_is_as_it_was(case):
    mesh, axes, *_ = case
    for axis in set(mesh.axes) - axes:
        for rank in range(mesh.size):
            samples = samples_at(case, rank, 0)
            assert samples.ids((("cut", axis), ("gather", axis))) == samples.ids(())


@given(cases(), st.data())
def test_what_is_gathered_over_an_axis_that_cuts_the_batch_and_cut_again_is_as_it_was(case, data):
    mesh, axes, *_, num_microbatches = case
    number = data.draw(st.integers(0, num_microbatches - 1))
    for axis in axes:
        for rank in range(mesh.size):
            samples = samples_at(case, rank, number)
            assert samples.ids((("gather", axis), ("cut", axis))) == samples.ids(())


@given(cases(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=2, max_size=4))
def test_the_next_microbatch_or_batch_leaves_nothing_of_the_last(case, begun):
    mesh, axes, _, num_microbatches = case
    samples = Samples(mesh, axes, mesh.coord(0), num_microbatches)
    for num_global, number in begun:
        number %= num_microbatches
        samples.begin(num_global, number)
        assert list(samples.ids(())) == own((mesh, axes, num_global, num_microbatches), number)[0]


@given(cases(), st.integers(0, 9))
def test_where_a_batch_is_not_cut_every_rank_holds_all_of_it(case, num_samples):
    samples = samples_at(case, 0, 0)
    cut = samples.ids(())
    samples.alone(num_samples)
    for rank in range(case[0].size):
        assert samples.ids((), case[0].coord(rank)) == tuple(range(num_samples))
    samples.begin(case[2], 0, case[3])
    assert samples.ids(()) == cut
