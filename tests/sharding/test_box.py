from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sharding.whole_process import fused_ranges

from shardwright.sharding.box import (
    Box,
    Piece,
    balanced_ranges,
    cells,
    concat,
    cut,
    flat_boxes,
    read,
    runs,
    write,
)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    corners = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return Box(tuple(a for a, _ in corners), tuple(b for _, b in corners))


shapes_and_two_boxes = shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape)))


def points(box):
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def numbered(shape):
    return torch.arange(prod(shape)).view(shape)


@given(shapes_and_two_boxes)
def test_an_intersection_holds_the_points_of_both_boxes(case):
    _, one, other = case
    common = one.intersect(other)
    assert (points(common) if common else set()) == points(one) & points(other)


@given(shapes_and_two_boxes)
def test_a_difference_is_disjoint_boxes_with_the_points_of_the_first_box_only(case):
    shape, one, other = case
    parts = one.minus(other)
    assert len(parts) <= max(1, 2 * len(shape))
    assert sum(part.size for part in parts) == len(points(one) - points(other))
    assert set().union(*map(points, parts)) == points(one) - points(other)


def test_a_box_of_no_dims_has_one_element():
    box = Box.of(())
    assert (box.size, box.shape, box.slices, box.intersect(box), box.minus(box)) == (1, (), (), box, ())


@given(st.integers(0, 20), st.integers(1, 8))
def test_balanced_ranges_follow_on_each_other_and_differ_by_at_most_one(size, parts):
    ranges = balanced_ranges(size, parts)
    assert [i for held in ranges for a, b in held for i in range(a, b)] == list(range(size))
    lengths = [sum(b - a for a, b in held) for held in ranges]
    assert len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1
    assert all(a < b for held in ranges for a, b in held)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 5))
def test_fused_ranges_give_each_part_its_balanced_slice_of_every_section(blocks, parts):
    fused = fused_ranges(blocks, parts)
    sections = torch.arange(sum(blocks)).split(blocks)
    for part, held in enumerate(fused):
        expected = torch.cat([section.tensor_split(parts)[part] for section in sections]).tolist()
        assert [i for a, b in held for i in range(a, b)] == expected


def test_sections_may_be_cut_in_different_ways():
    copied = (((0, 2),), ((0, 2),))
    assert concat((4, 2), [balanced_ranges(4, 2), copied]) == (((0, 2), (4, 6)), ((2, 4), (4, 6)))


def test_a_section_that_leaves_its_size_is_refused():
    with pytest.raises(AssertionError, match="leaves 2"):
        concat((2,), [(((0, 3),),)])


@given(shapes, st.data())
def test_flat_boxes_hold_a_flat_range_in_order_in_at_most_2n_minus_1_boxes(shape, data):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    boxes = flat_boxes(shape, start, stop)
    found = [i for box in boxes for i in numbered(shape)[box.slices].flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_boxes_need_all_of_2n_minus_1_boxes_for_the_middle_of_a_cube():
    assert len(flat_boxes((4, 4, 4), 1, 63)) == 5


def test_a_tensor_with_no_elements_has_no_flat_boxes():
    assert flat_boxes((3, 0), 0, 0) == ()


@given(shapes_and_two_boxes)
def test_runs_are_contiguous_and_hold_a_box_in_order(case):
    shape, box, _ = case
    found = list(runs(shape, box))
    expected = numbered(shape)[box.slices].flatten().tolist()
    assert [first + i for first, run in found for i in range(run.size)] == expected
    assert all(numbered(shape)[run.slices].flatten().tolist()[0] == first for first, run in found)


def test_runs_are_as_long_as_they_can_be():
    assert [first for first, _ in runs((4, 3, 2), Box((1, 0, 0), (3, 3, 2)))] == [6]
    assert [first for first, _ in runs((4, 3, 2), Box((1, 1, 0), (2, 3, 2)))] == [8]
    assert [first for first, _ in runs((4, 3, 2), Box((1, 0, 0), (3, 2, 2)))] == [6, 12]


@st.composite
def holdings(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    return [(holder, draw(st.lists(boxes_in(shape), max_size=3))) for holder in range(draw(st.integers(0, 4)))]


@given(holdings())
def test_cells_are_disjoint_and_cover_what_is_held_with_exactly_its_holders(held):
    holders = {}
    for holder, boxes in held:
        for point in set().union(*map(points, boxes)):
            holders.setdefault(point, set()).add(holder)
    found = [(point, set(holder)) for cell, holder in cells(held) for point in points(cell)]
    assert len(found) == len(holders)
    assert dict(found) == holders


def test_neighbours_with_the_same_holders_are_one_cell():
    quarters = [Box((r, c), (r + 2, c + 2)) for r in (0, 2) for c in (0, 2)]
    assert cells([(7, quarters), (8, [Box.of((4, 4))])]) == ((Box.of((4, 4)), frozenset({7, 8})),)


@st.composite
def flat_pieces(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    piece = draw(boxes_in(shape))
    inside = draw(boxes_in(piece.shape)).shift(piece.start)
    return shape, piece, inside, draw(st.integers(0, 3))


@given(flat_pieces(), st.booleans())
def test_reading_any_box_of_a_piece_gives_that_box_of_the_whole_as_a_view(case, flat):
    shape, box, inside, offset = case
    whole = numbered(shape)
    piece = Piece(box, (offset,) if flat else (offset,) * len(shape))
    local = torch.full((offset + box.size,) if flat else tuple(offset + n for n in box.shape), -1)
    local[piece.local_box.slices] = whole[box.slices].reshape(piece.local_box.shape)
    found = read(local, piece, inside)
    assert found.equal(whole[inside.slices])
    assert found.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    write(local, piece, inside, torch.full(inside.shape, -2))
    whole[inside.slices] = -2
    assert read(local, piece, box).equal(whole[box.slices])
    assert int((local == -1).sum()) == local.numel() - box.size


@given(flat_pieces(), st.booleans())
def test_the_parts_of_a_piece_hold_a_box_in_it_where_the_piece_does(case, flat):
    shape, box, inside, offset = case
    whole = numbered(shape)
    piece = Piece(box, (offset,) if flat else (offset,) * len(shape))
    local = cut(whole, [piece], (offset + box.size,) if flat else tuple(offset + n for n in box.shape))
    parts = piece.parts(inside)
    assert all(read(local, part, part.whole).equal(whole[part.whole.slices]) for part in parts)
    assert sorted(point for part in parts for point in points(part.whole)) == sorted(points(inside))


def test_reading_outside_a_piece_is_refused():
    with pytest.raises(AssertionError, match="not inside"):
        read(torch.zeros(4), Piece(Box((0,), (2,)), (0,)), Box((1,), (3,)))


def test_a_tensor_of_no_dims_is_cut_and_read_flat_and_not():
    for offset, shape in (((), ()), ((0,), (1,))):
        piece = Piece(Box.of(()), offset)
        local = cut(torch.tensor(3.0), [piece], shape)
        assert local.shape == shape
        assert read(local, piece, piece.whole).item() == 3.0


def test_cut_copies_what_it_cuts_and_takes_no_gradient():
    whole = torch.nn.Parameter(torch.zeros(4, 2))
    pieces = [Piece(Box((a, 0), (b, 2)), (a, 0)) for a, b in pairwise((0, 2, 4))]
    local = cut(whole, pieces, (4, 2))
    assert local.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert not local.requires_grad
