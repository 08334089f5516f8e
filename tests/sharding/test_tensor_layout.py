from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sharding.whole_process import fused_ranges

from processor_time import takes_less
from shardwright.axes import mesh_axes
from shardwright.mesh import Mesh, balanced
from shardwright.sharding.box import balanced_ranges, cut, flat_boxes, read
from shardwright.sharding.tensor_layout import TensorLayout

thorough = settings(max_examples=3 * settings().max_examples, deadline=None)


@st.composite
def cuts_of(draw, size, parts):
    """Any cut of a dim: even, uneven, fused, or with indices that hold the same or nothing."""
    kind = draw(st.sampled_from(("balanced", "fused", "uneven", "overlapping")))
    if kind == "balanced":
        return balanced_ranges(size, parts)
    marks = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
    blocks = [b - a for a, b in pairwise(marks)]
    if kind == "fused":
        return fused_ranges(blocks, parts)
    sections = [(a, b) for a, b in pairwise(marks) if a < b]
    held = [[] for _ in range(parts)]
    for section in draw(st.permutations(sections)):
        most = 1 if kind == "uneven" else parts
        for part in draw(st.sets(st.integers(0, parts - 1), min_size=1, max_size=most)):
            held[part].append(section)
    return tuple(tuple(ranges) for ranges in held)


@st.composite
def steps_on(draw, shape, mesh):
    """Any sequence of steps over some of the mesh's axes, flat slices last."""
    axes = draw(st.permutations(mesh.axes))[draw(st.integers(0, 1)) :]
    steps, flat = [], False
    for axis in axes:
        flat = flat or (len(steps) > 0 and draw(st.booleans()))
        kind = draw(st.sampled_from(("cut", "cut", "cut", "only")))
        if kind == "only":
            indices = draw(st.sets(st.integers(0, mesh[axis] - 1), min_size=1))
            steps.append(("only", axis, sorted(indices)))
        elif flat or not shape:
            flat = True
            steps.append(("flat", axis, mesh[axis]))
        else:
            dim = draw(st.integers(0, len(shape) - 1))
            steps.append(("cut", axis, dim, draw(cuts_of(shape[dim], mesh[axis]))))
    return steps


@st.composite
def layouts(draw, shape=None, num_layouts=1):
    """A shape and, for each layout, a mesh and the steps that lay a tensor of this shape out on it."""
    if shape is None:
        shape = draw(st.lists(st.sampled_from((4, 5, 6, 3, 2, 1, 0)), max_size=3).map(tuple))
    cases = []
    for _ in range(num_layouts):
        axes = draw(st.permutations(mesh_axes()))[: draw(st.integers(0, 4))]
        mesh = Mesh(**{axis: draw(st.sampled_from((2, 3, 1))) for axis in axes})
        cases.append((mesh, draw(steps_on(shape, mesh))))
    return shape, *cases


def build(shape, steps):
    layout = TensorLayout.whole(shape)
    for name, *arguments in steps:
        layout = getattr(layout, name)(*arguments)
    return layout


def numbered(shape):
    return torch.arange(1, prod(shape) + 1).view(shape)


def local_by_hand(shape, steps, coord):
    """The local tensor, found by indexing elements one by one."""
    dims, flat = [list(range(size)) for size in shape], None
    for name, axis, *how in steps:
        if name == "cut":
            dim, ranges = how
            dims[dim] = [i for a, b in ranges[coord[axis]] for i in dims[dim] if a <= i < b]
    local = numbered(shape)
    for dim, indices in enumerate(dims):
        local = local.index_select(dim, torch.tensor(indices, dtype=torch.long))
    for name, axis, *how in steps:
        if name == "flat":
            flat = local.flatten()
            cuts = balanced(flat.numel(), how[0])
            local = flat[cuts[coord[axis]] : cuts[coord[axis] + 1]]
    held = all(coord[axis] in how[0] for name, axis, *how in steps if name == "only")
    return local if held else None


@thorough
@given(layouts())
@example(((4,), (Mesh(pp=3), [("only", "pp", [0, 2])])))
def test_every_rank_holds_what_indexing_by_hand_gives(case):
    shape, (mesh, steps) = case
    layout = build(shape, steps)
    for coord in mesh.coords():
        local = cut(numbered(shape), layout.pieces(coord), layout.local_shape(coord))
        expected = local_by_hand(shape, steps, coord)
        if expected is None:
            assert local.numel() == 0
            assert layout.pieces(coord) == ()
        else:
            assert local.shape == expected.shape
            assert local.equal(expected)
        assert layout.num_elements(coord) == local.numel()


def paste(whole, local, pieces):
    for piece in pieces:
        whole[piece.whole.slices] = read(local, piece, piece.whole)


@thorough
@given(layouts())
def test_what_all_ranks_hold_pastes_together_to_the_whole(case):
    shape, (mesh, steps) = case
    layout, restored = build(shape, steps), torch.zeros(shape, dtype=torch.long)
    for coord in mesh.coords():
        paste(restored, cut(numbered(shape), layout.pieces(coord), layout.local_shape(coord)), layout.pieces(coord))
    assert restored.equal(numbered(shape))


@thorough
@given(layouts())
def test_every_element_is_owned_once_by_a_rank_that_holds_it(case):
    shape, (mesh, steps) = case
    layout, count = build(shape, steps), torch.zeros(shape, dtype=torch.long)
    for coord in mesh.coords():
        local = cut(numbered(shape), layout.pieces(coord), layout.local_shape(coord))
        restored = torch.zeros(shape, dtype=torch.long)
        paste(restored, local, layout.owned(coord, mesh))
        for piece in layout.owned(coord, mesh):
            count[piece.whole.slices] += 1
            assert restored[piece.whole.slices].equal(numbered(shape)[piece.whole.slices])
    assert count.eq(1).all()


@thorough
@given(layouts())
def test_before_flat_slices_the_owner_is_the_first_rank_that_holds_an_element(case):
    shape, (mesh, steps) = case
    layout = build(shape, [step for step in steps if step[0] != "flat"])
    mesh = Mesh(**{axis: size for axis, size in mesh.sizes if ("flat", axis, size) not in steps})
    seen = torch.zeros(shape, dtype=torch.bool)
    for coord in mesh.coords():
        held, owned = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for piece in layout.pieces(coord):
            held[piece.whole.slices] = True
        for piece in layout.owned(coord, mesh):
            owned[piece.whole.slices] = True
        assert owned.equal(held & ~seen)
        seen |= held


@thorough
@given(layouts(), st.data())
def test_holders_of_a_box_are_the_ranks_of_the_group_that_hold_it(case, data):
    shape, (mesh, steps) = case
    layout = build(shape, steps)
    rank = data.draw(st.integers(0, mesh.size - 1))
    axes = data.draw(st.sets(st.sampled_from(mesh.axes))) if mesh.axes else set()
    count = torch.zeros(shape, dtype=torch.long)
    holders = layout.holders(mesh, axes, mesh.coord(rank))
    for member in mesh.group(axes, rank):
        held = torch.zeros(shape, dtype=torch.bool)
        for piece in layout.pieces(mesh.coord(member)):
            held[piece.whole.slices] = True
        for box, ranks in holders:
            assert held[box.slices].eq(member in ranks).all()
        count |= held.long()
    for box, ranks in holders:
        assert list(ranks) == sorted(set(ranks))
        count[box.slices] -= 1
    assert count.eq(0).all()


@thorough
@given(layouts())
def test_the_table_holds_every_rank_that_holds_anything(case):
    shape, (mesh, steps) = case
    layout = build(shape, steps)
    for coord in mesh.coords():
        assert layout.table.get(tuple(coord[axis] for axis in layout.axes), ()) == layout.pieces(coord)


def test_steps_that_may_change_places_give_equal_and_hashable_layouts():
    halves, thirds = balanced_ranges(4, 2), balanced_ranges(6, 3)
    one = TensorLayout.whole((4, 6)).cut("tp", 0, halves).only("pp", [1]).cut("dp", 1, thirds)
    other = TensorLayout.whole((4, 6)).cut("dp", 1, thirds).cut("tp", 0, halves).only("pp", [0, 1]).only("pp", [1, 2])
    assert one == other
    assert len({one, other}) == 1
    assert one.pieces({"pp": 1}) == other.pieces({"pp": 1})
    assert one != one.flat("cp", 2)


def test_a_dim_cut_over_two_axes_counts_in_the_whole_both_times():
    layout = TensorLayout.whole((8,)).cut("row", 0, balanced_ranges(8, 2)).cut("col", 0, fused_ranges((4, 4), 2))
    held = [layout.pieces(coord)[0].whole for coord in Mesh(row=2, col=2).coords()]
    assert [(box.start[0], box.stop[0]) for box in held] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_later_cut_of_a_dim_stores_in_the_order_of_its_own_ranges():
    layout = (
        TensorLayout.whole((4,))
        .cut("tp", 0, (((0, 4),), ((2, 4), (0, 2))))
        .cut("dp", 0, (((0, 1), (1, 4)), ((2, 4), (0, 2))))
    )
    assert [piece.whole.start[0] for piece in layout.pieces({"dp": 0, "tp": 1})] == [0, 2, 1]
    assert [piece.whole.start[0] for piece in layout.pieces({"dp": 1, "tp": 1})] == [2, 0]


def test_a_flat_slice_of_separate_columns_follows_the_local_rows():
    layout = TensorLayout.whole((2, 6)).cut("tp", 1, fused_ranges((2, 2, 2), 2)).flat("dp", 3)
    assert cut(numbered((2, 6)), layout.pieces({"dp": 1, "tp": 0}), (2,)).tolist() == [5, 7]


def test_heads_held_by_several_ranks_are_owned_by_the_first():
    ranges = (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),))
    layout, mesh = TensorLayout.whole((4, 3)).cut("tp", 0, ranges), Mesh(dp=2, tp=4)
    owners = [rank for rank in range(8) if layout.owned(mesh.coord(rank), mesh)]
    assert owners == [0, 2]


def test_a_whole_flat_slice_has_at_most_2n_minus_1_pieces():
    layout = TensorLayout.whole((5, 7, 3)).cut("tp", 0, balanced_ranges(5, 2)).flat("dp", 4)
    assert max(len(pieces) for pieces in layout.table.values()) <= 5
    assert layout.pieces({"dp": 1})[0].whole == flat_boxes((3, 7, 3), 16, 32)[0]


def test_a_part_of_a_rank_with_nothing_keeps_the_dims_that_are_not_cut():
    layout = TensorLayout.whole((1, 6)).cut("tp", 0, balanced_ranges(1, 2))
    assert layout.local_shape({"tp": 1}) == (0, 6)
    assert layout.flat("dp", 2).local_shape({"tp": 1}) == (0,)
    assert TensorLayout.whole(()).only("pp", [0]).local_shape({"pp": 1}) == (0,)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda layout: layout.cut("tp", 2, balanced_ranges(4, 2)), "no dim 2"),
        (lambda layout: layout.cut("tp", 0, balanced_ranges(5, 2)), "leaves a dim of 4"),
        (lambda layout: layout.cut("tp", 0, balanced_ranges(3, 2)), "leave out a part"),
        (lambda layout: layout.cut("tp", 0, (((0, 3), (2, 4)), ())), "overlap"),
        (lambda layout: layout.cut("xp", 0, balanced_ranges(4, 2)), "no such axis"),
        (lambda layout: layout.cut("tp", 0, balanced_ranges(4, 2)).flat("tp", 2), "cuts once"),
        (lambda layout: layout.flat("dp", 2).cut("tp", 0, balanced_ranges(4, 2)), "cut first"),
        (lambda layout: layout.only("pp", []), "held at no index"),
        (lambda layout: layout.cut("tp", 0, balanced_ranges(4, 2)).owned({}, Mesh(tp=3)), "cut in 2, and tp=3"),
        (lambda layout: layout.only("pp", [2]).holders(Mesh(pp=2), {"pp"}, {}), "pp=2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(wrong, why):
    with pytest.raises(AssertionError, match=why):
        wrong(TensorLayout.whole((4, 6)))


def test_ownership_of_one_rank_of_3072_takes_no_time():
    mesh = Mesh(pp=8, dp=48, tp=8)
    layout = (
        TensorLayout.whole((50_304, 12_288)).cut("tp", 0, balanced_ranges(50_304, 8)).flat("dp", 48).only("pp", [7])
    )
    coord = mesh.coord(mesh.size - 1)
    assert sum(piece.whole.size for piece in layout.owned(coord, mesh)) == 50_304 * 256 // 8
    assert takes_less(0.05, lambda: [*layout.owned(mesh.coord(mesh.size - 1), mesh)], tries=10)
