"""All-reduces in two levels, of ranks of this machine that are told that they are on several nodes."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from tests_dist import test_axis
from tests_dist.command import TINY, within

from comm.scenarios import SCENARIOS, held_by, same
from shardwright.comm.backends.two_level import TwoLevelChannel
from shardwright.comm.recorder import total_bytes

NODES = {2: "ab", 4: "aabb", 6: "aabbcc"}


def on_nodes(world, work, *args):
    """Runs ``work`` in a world whose ranks, four or six of them, are on nodes of two."""
    before = world.transport._hosts
    world.transport._hosts = dict(enumerate(NODES[world.size]))
    try:
        return work(world, *args)
    finally:
        world.transport._hosts = before


def way(world):
    axis = world.everyone()
    return [
        type(each.channel).__name__
        for each in (axis, axis.subset([i for i in range(axis.size) if axis.index // 2 == i // 2]))
    ]


def test_only_a_group_with_as_many_ranks_on_each_node_has_two_levels(pools):
    assert pools(4).run(on_nodes, way) == [["TwoLevelChannel", "SharedChannel"]] * 4
    assert {names[0] for names in pools(2).run(on_nodes, way)} == {"GlooChannel"}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removeprefix("scenario_"))
def test_two_levels_do_what_every_backend_must(pools, scenario):
    pools(4).run(on_nodes, scenario)


def test_large_messages_arrive_whole(pools):
    pools(4).run(on_nodes, test_axis.large, torch.float32)


@pytest.mark.parametrize("num", [900, 40_001])
def test_sums_repeat_bit_for_bit_and_are_equal_on_every_rank(pools, num):
    assert pools(4).run(on_nodes, test_axis.many_times, num) == [0] * 4


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_many_calls_are_under_way_and_end_in_any_order(pools, num_ranks):
    pools(num_ranks).run(on_nodes, test_axis.many_under_way, 60)


def out_of_order(world):
    """Ranks wait for their calls in different orders, and between them for each other."""
    axis, num = world.everyone(), 5000
    first = axis.all_reduce_async(held_by(world.rank, num))
    if world.rank % 2:
        axis.barrier()
    expected = torch.stack([held_by(rank, num) for rank in axis.ranks]).sum(0)
    same(first.wait(), expected)
    if not world.rank % 2:
        axis.barrier()


def test_a_call_that_was_started_goes_on_while_its_rank_waits_for_another(pools):
    pools(4).run(on_nodes, out_of_order)


def recorded(world):
    axis = world.everyone().for_strategy("it")
    with world.recorder.recording() as records:
        axis.all_reduce(torch.ones(5000))
        axis.all_reduce_together_async([torch.ones(3000), torch.ones(70, 2)]).wait()
    assert isinstance(axis.channel, TwoLevelChannel)
    return len(records), dict(total_bytes(records))


def test_the_payload_is_recorded_once_for_both_levels(pools):
    assert pools(4).run(on_nodes, recorded) == [(2, {("it", "world", "all_reduce"): 4 * (5000 + 3140)})] * 4


def trained(world):
    from shardwright import parallelize
    from shardwright.models import GPT, GPTConfig

    with torch.device("meta"):
        plain = GPT(GPTConfig(**{**TINY["settings"], "dropout": 0.0, "vocabulary": 64, "max_tokens": 16}))
    run = parallelize(plain, "dp4", world)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
    loss = run.step(next(run.shard([(tokens[:, :-1], tokens[:, 1:])]))).item()
    return loss, run.clip_grad_norm_(1e9).item()


def test_a_layout_over_two_levels_trains_as_in_one(pools):
    for found, expected in zip(pools(4).run(on_nodes, trained), pools(4).run(trained), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def sends_that_are_kept(world):
    """How many of 50 sent copies are still in memory when all have arrived."""
    axis, keep, copies = world.everyone(), world.transport.keep, []

    def seen(work, message):
        copies.append(ref(message))
        keep(work, message)

    world.transport.keep = seen
    try:
        for number in range(50):
            if axis.index == 0:
                axis.send(torch.full((1000,), float(number)), 1)
            else:
                assert axis.receive((1000,), torch.float32, 0).tolist()[0] == number
    finally:
        world.transport.keep = keep
    axis.barrier()
    within(20, lambda: not any(copy() is not None for copy in copies))
    return len(copies), sum(copy() is not None for copy in copies)


def test_what_was_sent_between_nodes_is_freed_when_it_has_arrived(pools):
    assert pools(2).run(on_nodes, sends_that_are_kept) == [(50, 0), (0, 0)]
