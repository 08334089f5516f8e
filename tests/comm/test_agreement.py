"""Ranks that hold different lines or report a problem all get the first one, in as few messages as possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import data, integers, sampled_from

from shardwright import Mesh, launch, run_on_threads
from shardwright.comm.agreement import (
    Difference,
    first_difference_async,
    first_problem,
    gather_json,
    tensor_digest,
    text_digest,
)
from shardwright.errors import PlanError


def recorded(work, num_ranks=2):
    """What ``work`` returns on each rank, and the kinds and bytes that rank 0 has sent."""

    def on_rank(world):
        with world.recorder.recording() as records:
            found = work(world.everyone())
        return found, [(record.kind, record.num_bytes) for record in records]

    results = launch(on_rank, num_ranks, ranks="threads")
    return [found for found, _ in results], results[0][1]


def test_equal_lines_cost_one_all_reduce_of_two_numbers():
    found, sent = recorded(lambda axis: first_difference_async(axis, ["the same"] * 1000)())
    assert found == [None, None]
    assert sent == [("all_reduce", 16)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([["a", "b"], ["a", "c"], ["a", "b"]], Difference(2, 0, "b", 1, "c")),
        ([["a", "b"], ["a", "b"], ["a"]], Difference(2, 0, "b", 2, "nothing")),
        ([[], [], ["a"]], Difference(1, 0, "nothing", 2, "a")),
    ],
    ids=["another line", "a line less", "a line more"],
)
def test_every_rank_gets_the_first_line_that_differs(lines, expected):
    found, _ = recorded(lambda axis: first_difference_async(axis, lines[axis.index])(), 3)
    assert found == [expected] * 3


@pytest.mark.parametrize("odd", [None, 3])
def test_groups_may_differ_from_each_other_and_all_ranks_get_a_difference_within_one(odd):
    groups = [(0, 2), (1, 3)]

    def work(axis):
        lines = ["odd" if axis.index == odd else f"group {axis.index % 2}"]
        wait = first_difference_async(axis, lines, groups)
        lines.clear()  # the lines were copied, so the caller may change its own
        found = wait()
        return None if found is None else str(found)

    found, sent = recorded(work, 4)
    assert found == [None if odd is None else "rank 1 has 'group 1', rank 3 'odd'"] * 4
    assert sent[0] == ("all_reduce", 32)
    assert (len(sent) == 1) is (odd is None)


def test_the_first_rank_that_reports_a_problem_is_named_by_its_rank_in_the_world():
    def work(axes):
        return first_problem(axes["tp"], "" if axes["dp"].index == 0 else f"full at tp {axes['tp'].index}")

    assert run_on_threads(Mesh(dp=2, tp=2), work) == [None, None, (2, "full at tp 0"), (2, "full at tp 0")]


@pytest.mark.parametrize("length", [3, 61, 62, 500])
def test_values_that_fit_the_room_are_one_message_and_longer_ones_arrive_as_well(length):
    found, sent = recorded(lambda axis: gather_json(axis, "x" * (length if axis.index else 1), room=64))
    assert found == [["x", "x" * length]] * 2
    assert sent[0] == ("all_gather", 128)
    assert len(sent) == (1 if length + 2 < 64 else 3)  # two quotes


def test_a_number_of_another_call_is_not_read_as_the_length_of_a_text():
    """A step compares digests in one all-gather, which a save on another rank would read as 867 petabytes of text."""

    def work(world):
        axis = world.everyone()
        if axis.index == 0:
            with pytest.raises(PlanError, match=r"(?s)ranks make different calls.*rank 1: another call"):
                gather_json(axis, "text")
            return
        for number in (text_digest("values"), 3):
            axis.all_gather(torch.tensor([number]))

    launch(work, 2, ranks="threads")


@settings(max_examples=30)
@given(data(), sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]), integers(1, 9000))
def test_a_digest_differs_where_one_element_differs_or_two_are_swapped(drawn, dtype, size):
    tensor = torch.arange(size).to(torch.uint8).to(dtype)
    offset = torch.cat([tensor[:1], tensor])[1:]  # its bytes are not aligned to eight
    assert tensor_digest(offset) == tensor_digest(tensor)
    place, other = (drawn.draw(integers(0, size - 1)) for _ in range(2))
    changed = tensor.clone()
    changed[place] += 1
    assert tensor_digest(changed) != tensor_digest(tensor)
    swapped = tensor.clone()
    swapped[[place, other]] = swapped[[other, place]]
    assert (tensor_digest(swapped) == tensor_digest(tensor)) == (tensor[place] == tensor[other]).item()


@pytest.mark.parametrize("other", [1, 512], ids=["in a row", "in a column"])
def test_two_numbers_that_change_places_in_the_matrix_that_is_summed_change_the_digest(other):
    tensor = torch.arange(2000)
    swapped = tensor.clone()
    swapped[[0, other]] = swapped[[other, 0]]
    assert tensor_digest(swapped) != tensor_digest(tensor)
