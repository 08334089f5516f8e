"""What any backend must do, as functions of a ``World``: each asserts against a whole tensor computed by brute force.

They need nothing but the world, whose size may be 2, 3 or 4, and can be pickled. The numbers are small integers, so
that sums are exact in every order and every dtype; where the order shows, a scenario says so.
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from shardwright.comm.autograd import (
    cut_to_shared,
    cut_to_whole,
    partial_to_whole,
    sum_gradient,
    whole_to_cut,
)
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.mesh import Mesh

DTYPES = (torch.float64, torch.float32, torch.int64)


def held_by(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The tensor that a rank contributes; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def held_by_all(axis: Axis, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [held_by(rank, *shape, dtype=dtype) for rank in axis.ranks]


def uneven(axis: Axis) -> list[int]:
    """A size for each member: 2, 0, 3, 1."""
    return [2, 0, 3, 1][: axis.size]


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype, f"{found.dtype}, not {expected.dtype}"
    assert found.shape == expected.shape, f"{list(found.shape)}, not {list(expected.shape)}"
    assert torch.equal(found, expected), f"{found}, not {expected}"


# ---- collectives


def scenario_all_reduce_sums_every_dtype(world: World) -> None:
    axis = world.everyone()
    for dtype in DTYPES:
        for shape in [(3, 2), (), (0, 4), (1,)]:
            mine = held_by(world.rank, *shape, dtype=dtype)
            expected = torch.stack(held_by_all(axis, *shape, dtype=dtype)).sum(0)
            assert axis.all_reduce(mine) is mine
            same(mine, expected)


def scenario_all_reduce_takes_the_maximum(world: World) -> None:
    axis = world.everyone()
    for dtype in DTYPES:
        expected = torch.stack(held_by_all(axis, 4, 3, dtype=dtype)).amax(0)
        same(axis.all_reduce(held_by(world.rank, 4, 3, dtype=dtype), "max"), expected)


def scenario_all_reduce_overwrites_what_is_not_contiguous(world: World) -> None:
    axis = world.everyone()
    storage = held_by(world.rank, 4, 6)
    expected = torch.stack(held_by_all(axis, 4, 6)).sum(0)
    view = storage.T[1:5:2]
    assert axis.all_reduce(view) is view
    same(storage.T[1:5:2], expected.T[1:5:2])
    same(storage.T[2:5:2], held_by(world.rank, 4, 6).T[2:5:2])


def scenario_all_gather_joins_parts_of_any_size_along_any_dim(world: World) -> None:
    axis = world.everyone()
    sizes = uneven(axis)
    for dtype in DTYPES:
        for dim in (0, 1, 2, -1, -3):
            parts = []
            for rank, size in zip(axis.ranks, sizes, strict=True):
                shape = [3, 2, 4]
                shape[dim] = size
                parts.append(held_by(rank, *shape, dtype=dtype))
            same(axis.all_gather(parts[axis.index], dim, sizes), torch.cat(parts, dim))


def scenario_all_gather_needs_no_sizes_where_parts_are_equal(world: World) -> None:
    axis = world.everyone()
    same(axis.all_gather(held_by(world.rank, 2, 3).T, 1), torch.cat([t.T for t in held_by_all(axis, 2, 3)], 1))


def scenario_what_a_member_contributes_is_not_written_to(world: World) -> None:
    axis = world.everyone()
    mine = held_by(world.rank, axis.size, 3)
    before = mine.clone(), mine._version  # autograd refuses a saved tensor whose version counter has changed
    axis.all_gather(mine)
    axis.all_gather(mine, 1)
    axis.reduce_scatter(mine)
    axis.all_to_all(list(mine), [(3,)] * axis.size)
    same(mine, before[0])
    assert mine._version == before[1]


def scenario_reduce_scatter_sums_and_cuts_along_any_dim(world: World) -> None:
    axis = world.everyone()
    sizes = uneven(axis)
    for dtype in DTYPES:
        for dim in (0, 1, 2, -1, -3):
            shape = [3, 2, 4]
            shape[dim] = sum(sizes)
            mine = held_by(world.rank, *shape, dtype=dtype)
            before = mine.clone()
            total = torch.stack(held_by_all(axis, *shape, dtype=dtype)).sum(0)
            same(axis.reduce_scatter(mine, dim, sizes), total.split(sizes, dim)[axis.index])
            same(mine, before)


def scenario_reduce_scatter_needs_no_sizes_where_parts_are_equal(world: World) -> None:
    axis = world.everyone()
    total = torch.stack(held_by_all(axis, 2 * axis.size, 3)).sum(0)
    same(axis.reduce_scatter(held_by(world.rank, 2 * axis.size, 3)), total.chunk(axis.size)[axis.index])


def scenario_tensors_are_summed_and_cut_end_to_end_and_may_be_let_go_of(world: World) -> None:
    axis = world.everyone()
    for scale in (1, 900):  # sent through the socket, and through shared memory
        shapes = [(2, 3 * scale), (0,), (scale, 2), (1,)]
        held = {rank: [held_by(rank + 10 * i, *shape) for i, shape in enumerate(shapes)] for rank in axis.ranks}
        total = torch.stack([torch.cat([each.flatten() for each in theirs]) for theirs in held.values()]).sum(0)
        s, r = scale, 2 * scale + 1
        sizes = {2: [5 * s, s + r], 3: [5 * s, s, r], 4: [5 * s, s, r, 0]}[axis.size]
        mine = held.pop(world.rank)
        mine[2] = mine[2].T.contiguous().T
        pending = axis.reduce_scatter_together_async(mine, sizes)
        del mine
        same(pending.wait(), total.split(sizes)[axis.index])


def scenario_all_to_all_gives_every_member_its_part(world: World) -> None:
    axis = world.everyone()

    def part(source: int, to: int) -> Tensor:
        return held_by(10 * source + to, source, to + 1)  # the parts of member 0 are empty

    parts = [part(axis.index, to) for to in range(axis.size)]
    shapes = [(source, axis.index + 1) for source in range(axis.size)]
    for source, found in enumerate(axis.all_to_all(parts, shapes)):
        same(found, part(source, axis.index))


def scenario_broadcast_gives_everyone_what_one_has(world: World) -> None:
    axis = world.everyone()
    for source, rank in enumerate(axis.ranks):
        mine = held_by(world.rank, 4, 3).T
        assert axis.broadcast(mine, source) is mine
        same(mine, held_by(rank, 4, 3).T)


def scenario_calls_may_be_under_way_together_and_end_in_any_order(world: World) -> None:
    axis = world.everyone()
    sizes = uneven(axis)
    terms, total = held_by(world.rank, 5), torch.stack(held_by_all(axis, 5)).sum(0)
    whole = torch.cat([held_by(rank, size) for rank, size in zip(axis.ranks, sizes, strict=True)])
    summed = torch.stack(held_by_all(axis, sum(sizes))).sum(0)
    pending = [
        axis.all_reduce_async(terms),
        axis.all_gather_async(held_by(world.rank, sizes[axis.index]), 0, sizes),
        axis.reduce_scatter_async(held_by(world.rank, sum(sizes)), 0, sizes),
        axis.broadcast_async(held_by(world.rank, 2), axis.size - 1),
    ]
    moved = axis.all_to_all_async([held_by(world.rank, 1)] * axis.size, [(1,)] * axis.size)
    expected = [total, whole, summed.split(sizes)[axis.index], held_by(axis.ranks[-1], 2)]
    for result, value in reversed(list(zip(pending, expected, strict=True))):
        same(result.wait(), value)
        same(result.wait(), value)  # a second time, the same
    for rank, found in zip(axis.ranks, moved.wait(), strict=True):
        same(found, held_by(rank, 1))


def scenario_a_barrier_lets_everyone_go_on(world: World) -> None:
    axis = world.everyone()
    for _ in range(3):
        axis.barrier()


def scenario_sums_repeat_bit_for_bit_and_are_equal_on_every_rank(world: World) -> None:
    axis = world.everyone()
    generator = torch.Generator().manual_seed(world.rank)
    mine = torch.randn(1000, generator=generator) * 10.0 ** torch.randint(-6, 7, (1000,), generator=generator)
    first = axis.all_reduce(mine.clone())
    cut = axis.reduce_scatter(mine, 0, [1000 - 7 * (axis.size - 1)] + [7] * (axis.size - 1))
    for _ in range(5):
        same(axis.all_reduce(mine.clone()), first)
        same(axis.reduce_scatter(mine, 0, [1000 - 7 * (axis.size - 1)] + [7] * (axis.size - 1)), cut)
    for other in axis.all_gather(first.view(1, -1)):
        same(other, first)


# ---- messages


def connected(axis: Axis) -> Axis:
    """The axis, on which any two members may send each other messages."""
    axis.connect(list(permutations(range(axis.size), 2)))
    return axis


def scenario_messages_arrive_in_the_order_in_which_they_were_sent(world: World) -> None:
    axis = connected(world.everyone())
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for number in range(3):
        axis.send(held_by(10 * world.rank + number, number + 1, 2).T, after)
    for number in range(3):
        found = axis.receive((2, number + 1), torch.float64, before)
        same(found, held_by(10 * axis.ranks[before] + number, number + 1, 2).T)


def scenario_what_was_sent_may_be_overwritten_once_the_wait_is_over(world: World) -> None:
    axis = connected(world.everyone())
    if axis.index == 0:
        message = held_by(0, 4)
        pending = [axis.send_async(message, to) for to in range(1, axis.size)]
        for each in pending:
            each.wait()
        message.fill_(99)
        axis.barrier()
    else:
        axis.barrier()
        same(axis.receive((4,), torch.float64, 0), held_by(0, 4))


def scenario_a_message_may_be_asked_for_before_it_is_sent(world: World) -> None:
    axis = connected(world.everyone())
    if axis.index == 0:
        pending = [axis.receive_async((3,), torch.int64, source) for source in range(1, axis.size)]
        axis.barrier()
        for rank, each in zip(axis.ranks[1:], pending, strict=True):
            same(each.wait(), held_by(rank, 3, dtype=torch.int64))
    else:
        axis.barrier()
        axis.send(held_by(world.rank, 3, dtype=torch.int64), 0)


def scenario_messages_to_all_members_at_once_meet(world: World) -> None:
    axis = world.everyone()
    others = [i for i in range(axis.size) if i != axis.index]
    with world.recorder.recording() as records:
        sends = {to: held_by(world.rank, to, 2) for to in others}
        found = axis.send_and_receive_async(sends, dict.fromkeys(others, (axis.index, 2)), torch.float64).wait()
    for source in others:
        same(found[source], held_by(axis.ranks[source], axis.index, 2))
    sent = sum(16 * to for to in others)
    assert sum(record.num_bytes for record in records if record.kind == "send") == sent
    assert [record.kind for record in records].count("receive") == (len(others) if axis.index else 0)


# ---- axes


def scenario_a_subset_has_its_own_order(world: World) -> None:
    axis = world.everyone()
    for number in range(1, axis.size + 1):
        for indices in permutations(range(axis.size), number):
            if axis.index not in indices:
                continue
            subset = axis.subset(indices)
            assert subset.ranks == tuple(axis.ranks[i] for i in indices)
            assert subset.ranks[subset.index] == world.rank
            same(subset.all_gather(held_by(world.rank, 2)), torch.cat(held_by_all(subset, 2)))
            same(subset.all_reduce(held_by(world.rank, 2)), torch.stack(held_by_all(subset, 2)).sum(0))


def scenario_members_of_a_subset_need_not_have_asked_for_the_same_others(world: World) -> None:
    axis = world.everyone()
    if axis.index == 0:
        axis.subset([0, axis.size - 1]).barrier()
    if axis.index == axis.size - 1:
        axis.subset([0, axis.size - 1]).barrier()
        for other in range(1, axis.size - 1):
            axis.subset([other, axis.size - 1]).barrier()
    if 0 < axis.index < axis.size - 1:
        subset = axis.subset([axis.index, axis.size - 1])
        subset.barrier()


def scenario_an_axis_of_one_member_sends_nothing(world: World) -> None:
    alone = world.everyone().subset([world.rank])
    x = held_by(world.rank, 2, 3)
    with world.recorder.recording() as records:
        assert alone.all_reduce(x) is x
        assert alone.broadcast(x) is x
        assert alone.all_gather(x, 1) is x
        assert alone.reduce_scatter(x, 1, [3]) is x
        same(alone.all_to_all([x], [(2, 3)])[0], x)
        alone.barrier()
    assert records == []


def scenario_two_meshes_live_side_by_side(world: World) -> None:
    size = world.size
    first = world.axes(Mesh(dp=2, tp=size // 2) if size % 2 == 0 else Mesh(dp=size))
    second = world.axes(Mesh(pp=size, tp=1))
    for _ in range(2):
        for axes in (first, second):
            for axis in axes.values():
                same(axis.all_reduce(held_by(world.rank, 3)), torch.stack(held_by_all(axis, 3)).sum(0))


def scenario_every_call_is_recorded_with_its_payload(world: World) -> None:
    axis = connected(world.everyone().for_strategy("someone"))
    sizes = uneven(axis)
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    with world.recorder.recording() as records:
        axis.all_reduce(torch.ones(3, dtype=torch.float64))
        axis.broadcast(torch.ones(3))
        axis.all_gather(torch.ones(sizes[axis.index], 2), 0, sizes)
        axis.reduce_scatter(torch.ones(2, sum(sizes)), 1, sizes)
        axis.all_to_all([torch.ones(1 + axis.index)] * axis.size, [(1 + i,) for i in range(axis.size)])
        axis.send(torch.ones(5), after)
        axis.receive((5,), torch.float32, before)
    assert {record.axis for record in records} == {"world"}
    assert {record.source for record in records} == {"someone"}
    assert [(record.kind, record.num_bytes) for record in records] == [
        ("all_reduce", 24),
        ("broadcast", 12),
        ("all_gather", sum(sizes) * 2 * 4),
        ("reduce_scatter", sum(sizes) * 2 * 4),
        ("all_to_all", (1 + axis.index) * axis.size * 4),
        ("send", 20),
        ("receive", 20),
    ]


# ---- gradients: y, dy -> dx, on small integers


def _through(function, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf * 1)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def scenario_gradients_come_back_the_other_way(world: World) -> None:
    axis = world.everyone()
    sizes, whole = uneven(axis), (2, sum(uneven(axis)))
    all_x = [held_by(rank, *whole) for rank in axis.ranks]
    all_dy = [held_by(50 + rank, *whole) for rank in axis.ranks]
    mine, dy, shared = all_x[axis.index], all_dy[axis.index], held_by(99, *whole)
    sum_x, sum_dy = torch.stack(all_x).sum(0), torch.stack(all_dy).sum(0)

    def part(tensor: Tensor) -> Tensor:
        return tensor.split(sizes, 1)[axis.index]

    def joined(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.split(sizes, 1)[i] for i, t in enumerate(tensors)], 1)

    for function, x, gradient, expected_y, expected_dx in [
        (lambda x: partial_to_whole(x, axis), mine, shared, sum_x, shared),
        (lambda x: sum_gradient(x, axis), shared, dy, shared, sum_dy),
        (lambda x: whole_to_cut(x, axis, 1, sizes), shared, part(dy), part(shared), joined(all_dy)),
        (lambda x: cut_to_whole(x, axis, 1, sizes), part(mine), shared, joined(all_x), part(shared)),
        (lambda x: cut_to_shared(x, axis, 1, sizes), part(mine), dy, joined(all_x), part(sum_dy)),
    ]:
        y, dx = _through(function, x, gradient)
        same(y, expected_y)
        same(dx, expected_dx)


SCENARIOS = tuple(function for name, function in list(globals().items()) if name.startswith("scenario_"))
