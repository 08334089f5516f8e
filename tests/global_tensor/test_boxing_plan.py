"""Boxing plans, made and run in one process: correct for any two layouts, and as cheap as possible."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sharding.whole_process import execute_locally

from shardwright.global_tensor import placement, plan_to_global, sbp
from shardwright.global_tensor.boxing_plan import BoxingStep, cheapest_plan
from shardwright.global_tensor.geometry import GlobalLayout, boxes, is_partial, local_shape, terms

GRIDS = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 1))


@st.composite
def layouts(draw, num_dims: int) -> GlobalLayout:
    grid = draw(st.sampled_from(GRIDS))
    size = torch.Size(grid).numel()
    ranks = draw(st.sampled_from(list(permutations(range(4), size))))
    letters = [sbp.broadcast, sbp.partial_sum, *map(sbp.split, range(num_dims))]
    forms = tuple(draw(st.sampled_from(letters)) for _ in grid)
    return GlobalLayout(placement("cpu", torch.tensor(ranks).view(grid)), forms)


@st.composite
def transfers(draw) -> tuple[tuple[int, ...], GlobalLayout, GlobalLayout]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def parts(whole: torch.Tensor, where: GlobalLayout) -> dict[int, torch.Tensor]:
    """Each rank's local tensor: term i of a sum is i + 1 times the tensor, and term 0 makes up the difference."""
    of_rank, held = terms(where), boxes(tuple(whole.shape), where)
    num = max(of_rank.values()) + 1
    factors = [1 - sum(range(2, num + 1)), *range(2, num + 1)]
    return {rank: factors[of_rank[rank]] * whole[box.slices] for rank, box in held.items()}


def joined(local: dict[int, torch.Tensor], shape: tuple[int, ...], where: GlobalLayout) -> torch.Tensor:
    """The unsharded tensor: the sum of each box of each term, taken once."""
    whole, seen = torch.zeros(shape, dtype=torch.int64), {}
    for rank, box in boxes(shape, where).items():
        term = (terms(where)[rank], box)
        if term not in seen:
            seen[term] = local[rank]
            whole[box.slices] += local[rank]
        assert torch.equal(local[rank], seen[term]), "copies of a term are equal"
    return whole


GRID = placement("cpu", [[0, 1], [2, 3]])
COPIED_TERMS = GlobalLayout(GRID, (sbp.partial_sum, sbp.broadcast))


@pytest.mark.sampled(0)
@settings(max_examples=300, deadline=None)
@given(transfers())
@example(((5, 6), GlobalLayout(GRID, (sbp.split(1), sbp.split(0))), COPIED_TERMS))
@example(((5, 6), GlobalLayout(placement("cpu", [3, 0]), (sbp.split(1),)), COPIED_TERMS))
def test_any_layout_turns_into_any_other_and_the_whole_stays_the_same(drawn):
    shape, source, destination = drawn
    whole = torch.arange(torch.Size(shape).numel()).view(shape) + 1
    local = parts(whole, source)
    for step in cheapest_plan(shape, source, destination).steps:
        make = torch.zeros if is_partial(step.destination) else torch.empty
        members = step.destination.placement.ranks
        out = {rank: make(local_shape(shape, step.destination, rank), dtype=torch.int64) for rank in members}
        execute_locally(step.transfer, local, out)
        local = out
    assert torch.equal(joined(local, shape, destination), whole)
    for rank, box in boxes(shape, destination).items():
        if not is_partial(destination):
            assert torch.equal(local[rank], whole[box.slices]), "every copy"


@settings(max_examples=200, deadline=None)
@given(transfers())
def test_without_sums_each_element_is_fetched_once_by_each_rank_that_lacks_it(drawn):
    shape, source, destination = drawn
    if is_partial(source) or is_partial(destination):
        return
    held, lacking = boxes(shape, source), 0
    for rank, box in boxes(shape, destination).items():
        common = box.intersect(held[rank]) if rank in held else None
        lacking += box.size - (common.size if common is not None else 0)
    assert cheapest_plan(shape, source, destination).moved_elements == lacking


@pytest.mark.sampled(0)
@settings(max_examples=200, deadline=None)
@given(transfers())
def test_a_plan_never_moves_more_than_its_plain_messages(drawn):
    shape, source, destination = drawn
    found = cheapest_plan(shape, source, destination)
    assert found.moved_elements <= BoxingStep(shape, source, destination).moved_elements


def test_a_sum_for_many_ranks_is_added_up_before_it_is_copied():
    two, three = placement("cpu", [0, 1, 2]), placement("cpu", [3, 4, 5])
    found = plan_to_global((6, 4), two, sbp.partial_sum, three, sbp.broadcast)
    assert found.moved_elements == 2 * 24 + 3 * 24, "two thirds of each term to sum, one whole to each copy"


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_an_all_reduce_moves_what_a_ring_sends(num_ranks):
    here = placement("cpu", list(range(num_ranks)))
    (step,) = plan_to_global((6, 5), here, sbp.partial_sum, here, sbp.broadcast).steps
    assert step.kind == "all_reduce"
    assert step.moved_elements == 2 * (num_ranks - 1) * 30, "of 30 elements each rank sends 2 (n - 1) / n"


def test_collectives_are_found_where_ranks_and_boxes_form_one():
    two = placement("cpu", [0, 1])
    kinds = {
        (sbp.partial_sum, sbp.broadcast): "all_reduce",
        (sbp.partial_sum, sbp.split(0)): "reduce_scatter",
        (sbp.split(1), sbp.broadcast): "all_gather",
        (sbp.split(1), sbp.split(0)): "all_to_all",
        (sbp.broadcast, sbp.split(0)): "messages",
        (sbp.split(0), sbp.partial_sum): "messages",
    }
    for (before, after), kind in kinds.items():
        (step,) = plan_to_global((5, 4), two, before, two, after).steps
        assert step.kind == kind


@pytest.mark.parametrize("held_sbp", [sbp.broadcast, sbp.split(0), sbp.split(1)])
def test_terms_of_a_sum_stay_where_they_are_held(held_sbp):
    two = placement("cpu", [0, 1])
    assert plan_to_global((5, 4), two, held_sbp, two, sbp.partial_sum).moved_elements == 0
