"""Features cut over several axes, against sets of elements."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.sharding.box import width
from shardwright.strategies.tensor_parallel.features import Features, merged, nested

NAMES = ("depth", "row", "col")
axes_of = st.lists(st.integers(1, 4), max_size=3).map(lambda sizes: tuple(zip(NAMES, sizes, strict=False)))
ranges = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda r: (r[0], sum(r))), max_size=4)


def elements(held):
    return [i for a, b in held for i in range(a, b)]


def coords(axes):
    """Every coordinate, the last axis fastest."""
    return [dict(zip(dict(axes), index, strict=True)) for index in product(*(range(n) for _, n in axes))]


def coords_like(axes, coord, over):
    return [at for at in coords(axes) if all(at[name] == coord[name] for name in coord if name not in over)]


@st.composite
def cut_anyhow(draw):
    """Features whose parts are any ranges: they may leave gaps and overlap, as those of shared heads do."""
    axes = draw(axes_of)
    parts = [merged(draw(ranges)) for _ in range(prod(n for _, n in axes))]
    return Features(16, axes, tuple(parts))


def is_plain(held):
    """Whether ranges are not empty, ascend and do not touch."""
    edges = [edge for each in held for edge in each]
    return edges == sorted(set(edges))


@given(ranges)
def test_merged_ranges_hold_the_same_elements_and_do_not_touch(held):
    assert elements(merged(held)) == sorted(set(elements(held)))
    assert is_plain(merged(held))


@given(ranges)
def test_the_width_is_the_number_of_elements(held):
    assert width(held) == len(elements(held))


@given(st.integers(0, 30), axes_of)
def test_a_balanced_cut_gives_joint_indices_their_even_parts_in_order(size, axes):
    cut = Features.balanced(size, axes)
    parts = np.array_split(range(size), prod(n for _, n in axes))  # the first hold one more
    assert [elements(cut.held(at)) for at in coords(axes)] == [part.tolist() for part in parts]
    assert not cut.overlaps


@given(cut_anyhow())
def test_the_number_of_a_coordinate_is_its_place_with_the_last_axis_fastest(cut):
    assert [cut.number(at) for at in coords(cut.axes)] == list(range(len(cut.parts)))


@given(cut_anyhow(), st.sets(st.sampled_from(NAMES)))
def test_held_is_what_the_members_along_some_axes_hold_together(cut, over):
    for coord in coords(cut.axes):
        held = cut.held(coord, over)
        members = [cut.parts[cut.number(at)] for at in coords_like(cut.axes, coord, over)]
        assert set(elements(held)) == {i for part in members for i in elements(part)}
        assert is_plain(held)


@given(cut_anyhow())
def test_along_an_axis_lies_what_any_member_at_each_index_holds(cut):
    for name, size in cut.axes:
        for i, held in enumerate(cut.along(name)):
            there = [part for at, part in zip(coords(cut.axes), cut.parts, strict=True) if at[name] == i]
            assert set(elements(held)) == {e for part in there for e in elements(part)}
            assert is_plain(held)
        assert len(cut.along(name)) == size


@given(st.integers(0, 30), axes_of)
def test_a_rank_holds_what_it_holds_along_every_axis(size, axes):
    cut = Features.balanced(size, axes)
    for coord in coords(axes):
        along = [set(elements(cut.along(name)[coord[name]])) for name in cut.names]
        assert set(elements(cut.held(coord))) == set(range(size)).intersection(*along)


@given(cut_anyhow(), st.sets(st.sampled_from(NAMES)))
def test_sizes_count_what_each_member_of_an_axis_holds(cut, over):
    for coord in coords(cut.axes):
        for name, size in cut.axes:
            held = [cut.held({**coord, name: i}, over) for i in range(size)]
            assert cut.sizes(coord, name, over) == tuple(len(elements(each)) for each in held)


@given(st.integers(0, 30), axes_of)
def test_what_is_gathered_from_the_fastest_axis_on_adds_up_to_all_features(size, axes):
    cut = Features.balanced(size, axes)
    for coord in coords(axes):
        joined = ()
        for name in reversed(cut.names):
            sizes = cut.sizes(coord, name, joined)
            joined += (name,)
            assert sum(sizes) == width(cut.held(coord, joined))
        assert cut.held(coord, joined) == merged([(0, size)])


@given(cut_anyhow())
def test_parts_overlap_where_an_element_lies_in_two(cut):
    held = [i for part in cut.parts for i in elements(part)]
    assert cut.overlaps == (len(held) > len(set(held)))


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_a_nested_cut_gives_each_slice_its_even_share_of_what_every_index_holds(size, num_indices, parts, random):
    owner = [random.randrange(num_indices) for _ in range(size)]
    held = {(i,): merged([(e, e + 1) for e in range(size) if owner[e] == i]) for i in range(num_indices)}
    slices = nested(held, parts)
    for i in range(num_indices):
        shares = [[e for e in elements(each) if owner[e] == i] for each in slices]
        even = np.array_split([e for e in range(size) if owner[e] == i], parts)
        assert shares == [share.tolist() for share in even]
    assert sorted(e for each in slices for e in elements(each)) == list(range(size))
    assert all(is_plain(each) for each in slices)
