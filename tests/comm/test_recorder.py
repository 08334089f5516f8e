"""The record of each call, and the bytes that a ring sends for it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.comm.launch import launch
from shardwright.comm.recorder import Record, ring_factor, total_bytes


def recorded(num_ranks, work):
    """The records of each rank around ``work(axis)``."""

    def rank(world):
        axis = world.everyone().for_strategy("someone")
        with world.recorder.recording() as records:
            work(axis)
        return records

    return launch(rank, num_ranks, ranks="threads")


PAYLOADS = {
    "all_reduce": (lambda axis: axis.all_reduce(torch.ones(5, 2)), 40),
    "broadcast": (lambda axis: axis.broadcast(torch.ones(5, 2)), 40),
    "all_gather": (lambda axis: axis.all_gather(torch.ones(5, 1 + axis.index), 1, [1, 2, 3]), 5 * 6 * 4),
    "reduce_scatter": (lambda axis: axis.reduce_scatter(torch.ones(5, 6), 1, [1, 2, 3]), 5 * 6 * 4),
    "all_to_all": (lambda axis: axis.all_to_all([torch.ones(2)] * 3, [(2,)] * 3), 3 * 8),
    "barrier": (lambda axis: axis.barrier(), 1),
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_the_payload_is_the_whole_tensor_of_the_call(kind):
    work, num_bytes = PAYLOADS[kind]
    assert recorded(3, work) == [[Record(kind, "world", num_bytes, "someone")]] * 3


def test_the_payload_counts_the_bytes_of_the_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        records = recorded(2, lambda axis, dtype=dtype: axis.all_reduce(torch.ones(7, dtype=dtype)))
        assert [each.num_bytes for (each,) in records] == [7 * dtype.itemsize] * 2


def test_a_tensor_that_is_not_contiguous_counts_its_own_elements():
    records = recorded(2, lambda axis: axis.all_reduce(torch.ones(6, 4)[::2, ::2]))
    assert [each.num_bytes for (each,) in records] == [24, 24]


def test_a_message_is_recorded_by_its_sender_and_by_its_receiver():
    def work(axis):
        if axis.index == 0:
            axis.send(torch.ones(3), 1)
        else:
            axis.receive((3,), torch.float32, 0)

    sent, received = recorded(2, work)
    assert (sent, received) == (
        [Record("send", "world", 12, "someone")],
        [Record("receive", "world", 12, "someone")],
    )


def test_a_call_is_recorded_once_however_it_is_waited_for():
    def work(axis):
        pending = axis.all_reduce_async(torch.ones(1))
        pending.wait()
        pending.wait()

    assert [len(records) for records in recorded(2, work)] == [1, 1]


def test_recordings_nest_and_end():
    def work(world):
        axis = world.everyone()
        with world.recorder.recording() as outer:
            axis.barrier()
            with world.recorder.recording() as inner:
                axis.all_reduce(torch.ones(1))
        axis.barrier()
        return [r.kind for r in outer], [r.kind for r in inner]

    assert launch(work, 2, ranks="threads") == [(["barrier", "all_reduce"], ["all_reduce"])] * 2


def test_a_recording_ends_where_its_block_fails():
    def failing(world, found):
        with world.recorder.recording() as records:
            found.append(records)
            raise ZeroDivisionError

    def work(world):
        found = []
        with pytest.raises(ZeroDivisionError):
            failing(world, found)
        world.everyone().barrier()
        return found

    assert launch(work, 2, ranks="threads") == [[[]], [[]]]


def test_calls_belong_to_the_strategy_whose_axis_it_is():
    def work(world):
        axis = world.everyone()
        with world.recorder.recording() as records:
            axis.barrier()
            axis.for_strategy("zero").barrier()
            axis.for_strategy("zero").subset([1, 0]).barrier()
        return [r.source for r in records]

    assert launch(work, 2, ranks="threads") == [["core", "zero", "zero"]] * 2


def sent_in_a_ring(kind, num_ranks):
    """Parts that one rank sends, each 1 / num_ranks of the payload, when they go round one step at a time."""
    parts = 0
    if kind in ("reduce_scatter", "all_reduce"):  # each part collects its terms on the way round
        parts += num_ranks - 1
    if kind in ("all_gather", "all_reduce"):  # each part goes round once more
        parts += num_ranks - 1
    if kind == "all_to_all":  # all but what it keeps
        parts += num_ranks - 1
    return Fraction(parts, num_ranks)


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]), st.integers(1, 64))
def test_the_ring_factor_counts_the_parts_that_a_rank_sends(kind, num_ranks):
    assert ring_factor(kind, num_ranks) == sent_in_a_ring(kind, num_ranks)


@pytest.mark.parametrize(("kind", "factor"), [("send", 1), ("receive", 0), ("broadcast", 1), ("barrier", 0)])
def test_messages_are_sent_once_and_barriers_are_free(kind, factor):
    assert ring_factor(kind, 5) == factor


@given(st.lists(st.builds(Record, st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 9), st.just("s"))))
def test_total_bytes_adds_up_every_record_once(records):
    totals = total_bytes(records)
    assert totals.total() == sum(record.num_bytes for record in records)
    for (source, axis, kind), num_bytes in totals.items():
        assert num_bytes == sum(r.num_bytes for r in records if (r.source, r.axis, r.kind) == (source, axis, kind))
