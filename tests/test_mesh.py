"""Ranks, axes and groups."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.axes import mesh_axes
from shardwright.errors import LayoutError
from shardwright.mesh import Mesh, balanced, balanced_part

AXES = mesh_axes()
MESHES = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), max_size=4).map(lambda sizes: Mesh(**sizes))


@given(MESHES)
def test_every_rank_has_one_coordinate_and_every_coordinate_one_rank(mesh):
    coords = [mesh.coord(rank) for rank in range(mesh.size)]
    assert [mesh.rank(coord) for coord in coords] == list(range(mesh.size))
    assert coords == list(mesh.coords())
    assert all(0 <= coord[axis] < mesh[axis] for coord in coords for axis in mesh.axes)


@given(MESHES)
def test_axes_are_in_one_order_however_they_are_given(mesh):
    assert Mesh(**dict(reversed(mesh.sizes))) == mesh
    assert mesh.axes == tuple(axis for axis in AXES if axis in mesh.axes)


def test_the_strategies_give_a_mesh_these_axes_in_this_order():
    assert mesh_axes() == ("pp", "replica", "dp", "cp", "depth", "row", "col", "tp")
    assert mesh_axes("copies") == ("replica", "dp")
    assert mesh_axes("operators") == ("cp", "depth", "row", "col", "tp")


@given(MESHES, st.data())
def test_the_groups_of_any_axes_partition_the_ranks(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(AXES), unique=True))
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert all(mesh.group(axes, rank) == group for group in groups for rank in group)


@given(MESHES, st.sampled_from(AXES))
def test_a_group_of_an_axis_has_its_size_and_varies_in_it_alone(mesh, axis):
    for group in mesh.groups(axis):
        assert len(group) == mesh[axis]
        coords = [mesh.coord(rank) for rank in group]
        assert [coord.get(axis, 0) for coord in coords] == list(range(mesh[axis]))
        assert len({tuple(index for name, index in c.items() if name != axis) for c in coords}) == 1


@given(MESHES)
def test_the_last_axis_varies_fastest(mesh):
    if mesh.axes:
        assert mesh.group(mesh.axes[-1], 0) == tuple(range(mesh[mesh.axes[-1]]))


@given(st.integers(0, 1000), st.integers(1, 50))
def test_a_balanced_cut_sums_to_the_whole_and_its_parts_differ_by_at_most_one(size, parts):
    points = balanced(size, parts)
    lengths = [end - start for start, end in pairwise(points)]
    assert (points[0], points[-1], len(lengths)) == (0, size, parts)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] in (0, 1)
    assert [balanced_part(size, parts, part) for part in range(parts)] == [range(*ends) for ends in pairwise(points)]


def test_a_mesh_without_axes_is_one_rank():
    mesh = Mesh()
    assert (mesh.size, mesh.axes, mesh.coord(0), mesh.groups("tp"), str(mesh)) == (
        1,
        (),
        {},
        ((0,),),
        "one rank",
    )


@pytest.mark.parametrize(("sizes", "fix"), [({"tpp": 2}, "write tp"), ({"tp": 0}, "leave out tp")])
def test_an_unknown_or_empty_axis_is_refused_with_its_fix(sizes, fix):
    with pytest.raises(LayoutError, match=fix):
        Mesh(**sizes)


def test_coords_take_axes_that_can_be_read_once():
    mesh = Mesh(dp=2, tp=2)
    assert mesh.coords(iter(["dp", "tp"])) == mesh.coords(["dp", "tp"])
