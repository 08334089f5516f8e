from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sharding.whole_process import execute_locally, fused_ranges

from processor_time import takes_less
from sharding.test_tensor_layout import build, layouts, numbered, thorough
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.sharding.box import Box, Piece, balanced_ranges, cut
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.transfer import plan_transfer


def cut_for(whole, layout, mesh):
    return {
        rank: cut(whole, layout.pieces(mesh.coord(rank)), layout.local_shape(mesh.coord(rank)))
        for rank in range(mesh.size)
    }


def empty_for(whole, layout, mesh):
    return {rank: torch.full_like(local, -7) for rank, local in cut_for(whole, layout, mesh).items()}


def line(start, stop, offset=0):
    return Piece(Box((start,), (stop,)), (offset,))


@thorough
@given(layouts(num_layouts=2))
def test_a_transfer_gives_every_destination_what_cutting_the_whole_gives(case):
    shape, (mesh, steps), (new_mesh, new_steps) = case
    whole, old, new = numbered(shape), build(shape, steps), build(shape, new_steps)
    found = empty_for(whole, new, new_mesh)
    transfer = plan_transfer(old.by_rank(mesh), new.by_rank(new_mesh))
    execute_locally(transfer, cut_for(whole, old, mesh), found)
    expected = cut_for(whole, new, new_mesh)
    assert all(found[rank].equal(expected[rank]) for rank in expected)


@thorough
@given(layouts(num_layouts=2))
def test_nothing_is_fetched_twice_and_no_element_that_a_rank_holds_is_sent_to_it(case):
    shape, (mesh, steps), (new_mesh, new_steps) = case
    old, new = build(shape, steps).by_rank(mesh), build(shape, new_steps).by_rank(new_mesh)
    transfer = plan_transfer(old, new)
    for rank, pieces in new.items():
        fetched = Counter()
        for message in transfer.messages_to(rank):
            assert not message.adds
            elements = numbered(shape)[message.box.slices].flatten().tolist()
            fetched.update(elements)
            if message.source != rank:
                here = [numbered(shape)[p.whole.slices].flatten().tolist() for p in old.get(rank, ())]
                assert not set(elements) & {i for held in here for i in held}
        wanted = Counter(i for p in pieces for i in numbered(shape)[p.whole.slices].flatten().tolist())
        assert fetched == wanted
    sent = [message for rank in old for message in transfer.messages_from(rank)]
    assert sorted(sent) == sorted(transfer.messages)


@thorough
@given(layouts(num_layouts=2), st.integers(1, 3), st.integers(1, 2))
def test_a_transfer_of_partial_sums_gives_the_sum_of_one_copy_of_each_term(case, num_terms, num_copies):
    shape, (mesh, steps), (new_mesh, new_steps) = case
    old, new = build(shape, steps), build(shape, new_steps)
    source, terms, sources = {}, {}, {}
    for copy in range(num_copies):
        for term in range(num_terms):
            for rank, local in cut_for(numbered(shape) * 10**term, old, mesh).items():
                name = (copy * num_terms + term) * mesh.size + rank
                source[name], terms[name], sources[name] = old.pieces(mesh.coord(rank)), term, local
    total = numbered(shape) * sum(10**term for term in range(num_terms))
    found = empty_for(total, new, new_mesh)
    transfer = plan_transfer(source, new.by_rank(new_mesh), terms=terms)
    execute_locally(transfer, sources, found)
    expected = cut_for(total, new, new_mesh)
    assert all(found[rank].equal(expected[rank]) for rank in expected)


@thorough
@given(layouts())
def test_a_layout_changed_to_itself_moves_nothing(case):
    shape, (mesh, steps) = case
    pieces = build(shape, steps).by_rank(mesh)
    transfer = plan_transfer(pieces, pieces)
    assert transfer.moved_elements == 0
    assert len(transfer.messages) == sum(len(held) for held in pieces.values())


def test_what_no_source_holds_is_named():
    with pytest.raises(PlanError, match=r"no source rank holds \[3:5\], a part of \[0:5\] for rank 9") as error:
        plan_transfer({0: [line(0, 2)], 1: [line(1, 3)]}, {9: [line(0, 5)]})
    assert "allowed:" in str(error.value)
    with pytest.raises(PlanError, match=r"\[2:3\]"):
        plan_transfer({0: [line(0, 2), line(3, 5, 2)]}, {0: [line(0, 5)]})
    with pytest.raises(PlanError, match="no source rank holds"):
        plan_transfer({}, {0: [line(0, 1)]})


def test_the_first_of_several_missing_parts_is_named():
    with pytest.raises(PlanError, match=r"holds \[0:1\]"):
        plan_transfer({0: [line(1, 3)], 1: [line(3, 4)]}, {0: [line(0, 5)]})


def test_a_term_that_leaves_out_a_part_is_named():
    with pytest.raises(PlanError, match=r"no source rank of term 1 holds \[1:2\]"):
        plan_transfer({0: [line(0, 2)], 1: [line(0, 1)]}, {0: [line(0, 2)]}, terms={0: 0, 1: 1})
    with pytest.raises(PlanError, match="term 1"):
        plan_transfer({0: [line(0, 2)], 1: []}, {0: [line(0, 2)]}, terms={0: 0, 1: 1})


def test_ranks_that_hold_nothing_and_state_no_term_add_no_term():
    transfer = plan_transfer({0: [], 1: [line(0, 2)]}, {0: [line(0, 2)], 1: []}, terms={1: 1})
    assert [(m.source, m.destination, m.adds) for m in transfer.messages] == [(1, 0, False)]


def test_copies_share_the_load_evenly():
    transfer = plan_transfer({rank: [line(0, 6)] for rank in range(4)}, {rank: [line(0, 6)] for rank in range(4, 16)})
    assert [len(transfer.messages_from(rank)) for rank in range(4)] == [3, 3, 3, 3]


def test_among_equals_the_nearest_rank_sends():
    transfer = plan_transfer({0: [line(0, 2)], 5: [line(0, 2)], 9: [line(0, 2)]}, {6: [line(0, 2)]})
    assert [message.source for message in transfer.messages] == [5]


def test_every_destination_adds_the_terms_in_the_same_order():
    source = {rank: [line(0, 4)] for rank in range(4)}
    transfer = plan_transfer(source, source, terms={0: 2, 1: 1, 2: 0, 3: 3})
    for rank in range(4):
        orders = [(message.source, message.adds) for message in transfer.messages_to(rank)]
        assert orders == [(2, False), (1, True), (0, True), (3, True)]


def test_a_plan_of_64_to_64_ranks_takes_a_tenth_of_a_processor_second_at_most_one_for_4096_messages():
    whole, mesh = TensorLayout.whole((4096, 4096)), Mesh(tp=64)
    rows = whole.cut("tp", 0, balanced_ranges(4096, 64)).by_rank(mesh)
    columns = whole.cut("tp", 1, balanced_ranges(4096, 64)).by_rank(mesh)
    few = whole.cut("tp", 0, balanced_ranges(4096, 64)).by_rank(mesh)
    for new, number, limit_s in ((few, 64, 0.1), (columns, 4096, 1.0)):
        assert len(plan_transfer(rows, new).messages) == number
        assert takes_less(limit_s, partial(plan_transfer, rows, new))


def test_fused_weights_change_tensor_parallel_size():
    whole = torch.randn(24, 5)
    old, new = (
        TensorLayout.whole((24, 5)).cut("tp", 0, fused_ranges((12, 6, 6), parts)).flat("dp", dp)
        for parts, dp in ((2, 3), (3, 2))
    )
    meshes = Mesh(dp=3, tp=2), Mesh(dp=2, tp=3)
    found = empty_for(whole, new, meshes[1])
    execute_locally(
        plan_transfer(old.by_rank(meshes[0]), new.by_rank(meshes[1])), cut_for(whole, old, meshes[0]), found
    )
    assert all(found[rank].equal(local) for rank, local in cut_for(whole, new, meshes[1]).items())
