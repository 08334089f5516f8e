"""Grids of ranks: every shape once, each with all ranks, the most even first."""

from math import prod

from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from shardwright.grid_shapes import NUM_SIDES, default_shape, shapes


@given(sampled_from(["2d", "2.5d", "3d"]), integers(1, 64))
def test_every_shape_has_all_ranks_and_the_one_taken_by_default_is_among_them(mode, num_ranks):
    found = shapes(mode, num_ranks)
    assert len(set(found)) == len(found)
    assert all(prod(sides) == num_ranks and len(sides) == NUM_SIDES[mode] for sides in found)
    assert default_shape(mode, num_ranks) in found
    assert [max(sides) for sides in found] == sorted(max(sides) for sides in found)
