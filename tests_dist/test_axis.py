"""The axis over processes: through shared memory, and through torch's process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.scenarios import SCENARIOS, held_by, same, uneven
from shardwright.comm.backends import process_groups as transport
from shardwright.comm.launch import launch
from shardwright.errors import CommunicationError

LINKS = ("auto", "sockets")
SIZES = (2, 3, 4)

EVERY_LINK = pytest.mark.parametrize("links", LINKS)
EVERY_SIZE = pytest.mark.parametrize("num_ranks", SIZES)


@EVERY_LINK
@EVERY_SIZE
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removeprefix("scenario_"))
def test_processes_do_what_every_backend_must(pools, scenario, num_ranks, links):
    pools(num_ranks, links).run(scenario)


# ---- which links these are


def way(world) -> str:
    return type(world.everyone().channel).__name__


def test_ranks_of_one_machine_talk_through_its_memory_unless_told_to_use_sockets(pools):
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    assert set(pools(2, "auto").run(way)) == {"NcclChannel" if on_gpus else "SharedChannel"}
    assert set(pools(2, "sockets").run(way)) == {"NcclChannel" if on_gpus else "GlooChannel"}


# ---- large messages


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, so that an order of summing shows."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-8, 9, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


def large(world, dtype) -> None:
    """Several MB, in parts that differ, against wholes computed by brute force in integers."""
    axis = world.everyone()
    sizes = [size * 200_000 + 3 for size in uneven(axis)]
    for num in (1_000_003, sum(sizes)):
        mine = held_by(world.rank, num, dtype=dtype)
        same(axis.all_reduce(mine), torch.stack([held_by(rank, num, dtype=dtype) for rank in axis.ranks]).sum(0))
    total = torch.stack([held_by(rank, sum(sizes), dtype=dtype) for rank in axis.ranks]).sum(0)
    for _ in range(2):
        found = axis.reduce_scatter(held_by(world.rank, sum(sizes), dtype=dtype), 0, sizes)
        same(found, total.split(sizes)[axis.index])
        same(axis.all_gather(found, 0, sizes), total)
        parts = [held_by(10 * world.rank + to, 2, sizes[to], dtype=dtype) for to in range(axis.size)]
        moved = axis.all_to_all(parts, [(2, sizes[axis.index])] * axis.size)
        for rank, each in zip(axis.ranks, moved, strict=True):
            same(each, held_by(10 * rank + axis.index, 2, sizes[axis.index], dtype=dtype))
        whole = held_by(world.rank, 700, 1001, dtype=dtype).T
        same(axis.broadcast(whole, axis.size - 1), held_by(axis.ranks[-1], 700, 1001, dtype=dtype).T)


def ring(world) -> None:
    """Every rank sends before it receives: several messages, some of several MB."""
    axis = world.everyone()
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for num in (1, 1_000_003, 700, 500_000):
        axis.send(held_by(world.rank, num), after)
    for num in (1, 1_000_003, 700, 500_000):
        same(axis.receive((num,), torch.float64, before), held_by(axis.ranks[before], num))


@EVERY_LINK
@EVERY_SIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_messages_in_uneven_parts_arrive_whole(pools, num_ranks, links, dtype):
    if dtype == torch.bfloat16:
        assert held_by(0, 5, dtype=dtype).dtype == dtype  # sums of four small integers are exact in it too
    pools(num_ranks, links).run(large, dtype)


@EVERY_LINK
@EVERY_SIZE
def test_a_sender_never_waits_for_the_receiver_to_ask(pools, num_ranks, links):
    pools(num_ranks, links).run(ring)


# ---- the same answer everywhere


def everything(world, num: int) -> list[Tensor]:
    """One of each call, on numbers where the order of summing shows."""
    axis = world.everyone()
    mine = drawn(world.rank, num)
    sizes = [num // axis.size + (i < num % axis.size) for i in range(axis.size)]
    parts = list(mine.split(sizes))
    joined = torch.cat(axis.all_to_all(parts, [(sizes[axis.index],)] * axis.size))
    return [
        axis.all_reduce(mine.clone()),
        axis.all_reduce(mine.clone(), "max"),
        axis.reduce_scatter(mine, 0, sizes),
        axis.all_gather(parts[axis.index], 0, sizes),
        axis.broadcast(mine.clone(), axis.size - 1),
        joined,
    ]


SUMS = (0, 2)
"""Which of them are sums: the others only move numbers."""


@EVERY_SIZE
@pytest.mark.parametrize("num", [7, 1000, 300_001])
def test_threads_shared_memory_and_sockets_give_the_same_up_to_rounding(pools, num_ranks, num):
    expected = launch(everything, num_ranks, num, ranks="threads")
    exact = [torch.stack([drawn(rank, num, dtype=torch.float64) for rank in range(num_ranks)])] * num_ranks
    for links in LINKS:
        found = pools(num_ranks, links).run(everything, num)
        for rank in range(num_ranks):
            for place, (ours, theirs) in enumerate(zip(found[rank], expected[rank], strict=True)):
                if place not in SUMS:
                    same(ours, theirs)
                    continue
                # each of the sum's additions rounds once, by at most half a unit of the largest partial sum
                size = exact[rank].abs().sum(0)
                size = size if place == 0 else size.tensor_split(num_ranks)[rank]
                assert ours.shape == theirs.shape
                assert ((ours.double() - theirs.double()).abs() <= 2 * num_ranks * 2**-24 * size).all()


def many_times(world, num: int) -> int:
    """How many of twenty repetitions differ from the first in any bit, and whether ranks differ from each other."""
    axis = world.everyone()
    first = everything(world, num)
    differ = sum(
        any(not torch.equal(a, b) for a, b in zip(first, everything(world, num), strict=True)) for _ in "x" * 20
    )
    copies = axis.all_gather(first[0].view(1, -1))
    return differ + sum(not torch.equal(copy, first[0]) for copy in copies)


@EVERY_LINK
@EVERY_SIZE
@pytest.mark.parametrize("num", [900, 40_001])
def test_sums_repeat_bit_for_bit_and_are_equal_on_every_rank(pools, num_ranks, links, num):
    assert pools(num_ranks, links).run(many_times, num) == [0] * num_ranks


# ---- many at once


def many_under_way(world, num_calls: int) -> None:
    axis = world.everyone()
    pending, expected = [], []
    for number in range(num_calls):
        shape = (1 + number * 977 % 6000,)
        pending.append(axis.all_reduce_async(held_by(world.rank + number, *shape)))
        expected.append(torch.stack([held_by(rank + number, *shape) for rank in axis.ranks]).sum(0))
        pending.append(axis.all_gather_async(held_by(world.rank + number, *shape)))
        expected.append(torch.cat([held_by(rank + number, *shape) for rank in axis.ranks]))
    order = torch.randperm(len(pending), generator=torch.Generator().manual_seed(0)).tolist()
    for place in order:
        same(pending[place].wait(), expected[place])


@EVERY_LINK
@EVERY_SIZE
def test_many_calls_are_under_way_and_end_in_any_order(pools, num_ranks, links):
    pools(num_ranks, links).run(many_under_way, 60)


def several_axes(world) -> None:
    """Every pair of ranks has an axis of its own, all with calls under way."""
    axis = world.everyone()
    others = [i for i in range(axis.size) if i != axis.index]
    pairs = {other: axis.subset(sorted((axis.index, other))) for other in others}
    for _ in range(5):
        pending = [(pairs[i], pairs[i].all_reduce_async(held_by(world.rank, 9000))) for i in others]
        for pair, each in reversed(pending):
            same(each.wait(), torch.stack([held_by(rank, 9000) for rank in pair.ranks]).sum(0))


@EVERY_LINK
@EVERY_SIZE
def test_axes_that_share_ranks_do_not_mix_their_messages(pools, num_ranks, links):
    pools(num_ranks, links).run(several_axes)


# ---- blocks of shared memory


def num_blocks(world, num_calls: int) -> list[int]:
    axis = world.everyone()
    if world.device.type == "cuda" and not hasattr(axis.channel, "exchange"):
        return [0] * num_calls  # NCCL has its own
    exchange = axis.channel.exchange
    counts = []
    for number in range(num_calls):
        tensor = torch.ones(50_000 + 100 * (number % 7))
        axis.all_reduce(tensor)
        axis.all_gather(tensor[:20_000])
        axis.reduce_scatter(torch.ones(axis.size * 9_000))
        axis.all_to_all([torch.ones(8_000)] * axis.size, [(8_000,)] * axis.size)
        axis.broadcast(torch.ones(30_000), number % axis.size)
        axis.send(torch.ones(25_000), (axis.index + 1) % axis.size)
        axis.receive((25_000,), torch.float32, (axis.index - 1) % axis.size)
        counts.append(len(exchange.blocks))
    axis.barrier()
    assert not exchange.received, "a message was left unread"
    return counts


@EVERY_SIZE
def test_blocks_of_shared_memory_are_used_again(pools, num_ranks):
    for counts in pools(num_ranks).run(num_blocks, 200):
        assert counts[-1] - counts[0] <= 8 * num_ranks, "a few of each size, and not a few for each call"


# ---- names and keys


def num_keys(world, num_calls: int) -> list[int]:
    """How many keys the store has after each call; a barrier on each side, so that no rank writes meanwhile."""
    axis, store = world.everyone(), world.transport.call_checker.store
    counts = []
    for _ in range(num_calls):
        axis.all_reduce(torch.ones(3))
        axis.subset([0, 1] if axis.index < 2 else [axis.index]).all_gather(torch.ones(2))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


@EVERY_LINK
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_the_witness_writes_does_not_pile_up(pools, num_ranks, links):
    for counts in pools(num_ranks, links).run(num_keys, 20):
        assert counts[-1] - counts[5] < 5, "the launcher may have written some of its own, and a rank two for each turn"


class OneForAll:
    """A hash that takes all names for the same one."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(8)


def same_keys(world) -> str:
    """What the ranks are told whose second group has the key of the first."""
    everyone, before = world.everyone(), transport.hashlib.blake2b
    world.transport._names.clear()
    transport.hashlib.blake2b = OneForAll
    try:
        first = everyone.subset([1, 0])
        assert torch.equal(first.all_reduce(torch.ones(2)), torch.full((2,), 2.0))
        world.everyone()
    except CommunicationError as refusal:
        return str(refusal)
    finally:
        transport.hashlib.blake2b = before
        world.transport._names.clear()
    return "not noticed"


def test_two_groups_of_the_same_key_are_refused_on_every_rank(pools):
    for text in pools(2).run(same_keys):
        assert text.startswith("two groups of ranks have the same key\n  given:   1-0/"), text
