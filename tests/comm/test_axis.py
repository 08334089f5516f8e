"""Collectives and messages of an axis, against whole tensors computed by brute force."""

from __future__ import annotations

import pickle
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.scenarios import SCENARIOS
from shardwright.comm.backends.threads import ThreadTransport
from shardwright.comm.backends.through_host import ChannelThroughHost
from shardwright.comm.launch import launch, run_on_threads, run_threads
from shardwright.comm.world import World
from shardwright.errors import CommunicationError
from shardwright.mesh import Mesh

RANKS = st.integers(1, 5)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removeprefix("scenario_"))
def test_threads_do_what_every_backend_must(scenario, num_ranks):
    launch(scenario, num_ranks, ranks="threads")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removeprefix("scenario_"))
def test_channels_through_the_host_do_what_every_backend_must(scenario, monkeypatch):
    make = ThreadTransport.channel

    def through_host(transport, groups):
        return {place: ChannelThroughHost(channel) for place, channel in make(transport, groups).items()}

    monkeypatch.setattr(ThreadTransport, "channel", through_host)
    run_threads(scenario, 3)


def test_scenarios_can_be_sent_to_other_processes():
    assert len(SCENARIOS) > 15
    assert all(pickle.loads(pickle.dumps(scenario)) is scenario for scenario in SCENARIOS)


def on_every(num_ranks, work):
    """What ``work(axis)`` returns on each of so many ranks."""
    return launch(lambda world: work(world.everyone()), num_ranks, ranks="threads")


@st.composite
def contributions(draw, cut=False):
    """A tensor for each rank, often a strided view; with ``cut``, of sizes that differ along one dim."""
    num_ranks, dtype = draw(RANKS), draw(DTYPES)
    shape = draw(st.lists(st.integers(0, 4), min_size=1 if cut else 0, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    sizes = draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks))
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def tensor(shape):
        stored = [shape[d] * step for d in order]
        back = [order.index(d) for d in range(len(order))]
        whole = torch.randint(-5, 6, stored, generator=generator).to(dtype).permute(back)
        return whole[tuple(slice(None, None, step) for _ in shape)]

    shapes = [list(shape) for _ in range(num_ranks)]
    if cut:
        for each, size in zip(shapes, sizes, strict=True):
            each[dim] = size
    return [tensor(each) for each in shapes], dim, sizes


@given(contributions(), st.sampled_from(["sum", "max"]), st.booleans())
@settings(max_examples=60)
def test_all_reduce_is_the_sum_or_the_maximum_of_the_members_tensors(given, op, later):
    tensors, _, _ = given
    stack = torch.stack(tensors)
    expected = stack.sum(0, dtype=stack.dtype) if op == "sum" else stack.amax(0)

    def work(axis):
        mine = tensors[axis.index].clone(memory_format=torch.preserve_format)
        return axis.all_reduce_async(mine, op).wait() if later else axis.all_reduce(mine, op)

    for found in on_every(len(tensors), work):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@given(contributions(cut=True), st.booleans())
@settings(max_examples=60)
def test_all_gather_is_the_concatenation(given, later):
    tensors, dim, sizes = given
    expected = torch.cat(tensors, dim)

    def work(axis):
        mine = tensors[axis.index]
        return axis.all_gather_async(mine, dim, sizes).wait() if later else axis.all_gather(mine, dim, sizes)

    for found in on_every(len(tensors), work):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


def test_what_is_gathered_along_a_later_dim_is_contiguous():
    def work(axis):
        return axis.all_gather(torch.ones(3, 2 + axis.index, 4), 1, [2, 3]).is_contiguous()

    assert on_every(2, work) == [True, True]


@given(contributions(cut=True), st.booleans())
@settings(max_examples=60)
def test_reduce_scatter_is_a_slice_of_the_sum(given, later):
    tensors, dim, sizes = given
    whole = torch.cat(tensors, dim)
    terms = [whole * (index + 1) for index in range(len(tensors))]
    total = torch.stack(terms).sum(0, dtype=whole.dtype)

    def work(axis):
        mine = terms[axis.index]
        pending = axis.reduce_scatter_async(mine, dim, sizes) if later else None
        return pending.wait() if pending is not None else axis.reduce_scatter(mine, dim, sizes)

    found = on_every(len(tensors), work)
    for part, expected in zip(found, total.split(sizes, dim), strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part, expected)


@given(RANKS, DTYPES, st.integers(0, 9), st.booleans())
@settings(max_examples=40)
def test_all_to_all_is_a_transpose(num_ranks, dtype, seed, later):
    def part(source, to):
        rows, columns = (source * 3 + to + seed) % 4, (source + 2 * to) % 3
        return torch.full((columns, rows), 10 * source + to, dtype=dtype).T

    def work(axis):
        parts = [part(axis.index, to) for to in range(axis.size)]
        shapes = [part(source, axis.index).shape for source in range(axis.size)]
        return axis.all_to_all_async(parts, shapes).wait() if later else axis.all_to_all(parts, shapes)

    for to, found in enumerate(on_every(num_ranks, work)):
        for source, tensor in enumerate(found):
            assert tensor.shape == part(source, to).shape
            assert tensor.dtype == dtype
            assert torch.equal(tensor, part(source, to))


@given(contributions(), st.data(), st.booleans())
@settings(max_examples=40)
def test_broadcast_is_what_the_source_has(given, data, later):
    tensors, _, _ = given
    source = data.draw(st.integers(0, len(tensors) - 1))

    def work(axis):
        mine = tensors[axis.index].clone(memory_format=torch.preserve_format)
        return axis.broadcast_async(mine, source).wait() if later else axis.broadcast(mine, source)

    assert all(torch.equal(found, tensors[source]) for found in on_every(len(tensors), work))


@given(st.integers(2, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8), st.booleans())
@settings(max_examples=40)
def test_messages_between_two_ranks_keep_their_order(num_ranks, wishes, early):
    sent = [(a % num_ranks, b % num_ranks) for a, b in wishes if a % num_ranks != b % num_ranks]

    def work(axis):
        asked = [(n, a) for n, (a, b) in enumerate(sent) if b == axis.index]
        pending = [(n, axis.receive_async((1,), torch.int64, a)) for n, a in asked] if early else []
        for number, (a, b) in enumerate(sent):
            if a == axis.index:
                axis.send(torch.tensor([number]), b)
        if not early:
            return [(n, axis.receive((1,), torch.int64, a).item()) for n, a in asked]
        return [(n, each.wait().item()) for n, each in pending]

    for found in on_every(num_ranks, work):
        assert all(number == message for number, message in found)


@given(st.sampled_from(list(permutations(range(4), 3)) + list(permutations(range(4), 2))))
@settings(max_examples=36)
def test_a_subset_counts_its_members_in_the_order_given(indices):
    def work(axis):
        if axis.index not in indices:
            return None
        subset = axis.subset(indices)
        return subset.index, subset.all_gather(torch.tensor([axis.index])).tolist()

    for index, found in enumerate(on_every(4, work)):
        assert found == ((indices.index(index), list(indices)) if index in indices else None)


def test_a_subset_of_a_subset_is_a_subset():
    def work(axis):
        if axis.index == 1:
            return None
        inner = axis.subset([3, 2, 0])
        return inner.subset([0, 2]).all_gather(torch.tensor([axis.index])).tolist() if axis.index != 2 else None

    assert on_every(4, work) == [[3, 0], None, None, [3, 0]]


def test_a_subset_of_all_members_is_the_axis_itself():
    assert on_every(2, lambda axis: axis.subset([0, 1]) is axis) == [True, True]


def test_only_different_members_make_a_subset_and_only_they_may_call_it():
    def work(axis):
        for indices in [[1 - axis.index], [axis.index, axis.index], [], [axis.index, 2], [axis.index, -1]]:
            with pytest.raises(CommunicationError, match=f"on member {axis.index}"):
                axis.subset(indices)

    on_every(2, work)


def test_sums_are_added_in_the_order_of_the_members_whichever_rank_is_last():
    """1e16 + 1 - 1e16 is 0 in that order and 1 in another."""
    import time

    def work(axis, last):
        if axis.index == last:
            time.sleep(0.02)
        return axis.all_reduce(torch.tensor([1e16, 1.0, -1e16][axis.index], dtype=torch.float64)).item()

    for last in range(3):
        assert on_every(3, lambda axis, last=last: work(axis, last)) == [0.0] * 3


def test_collectives_keep_no_graph():
    def work(axis):
        x = torch.ones(2, requires_grad=True)
        found = [axis.all_gather(x * 1), axis.reduce_scatter(x * 1), *axis.all_to_all([x * 1, x * 1], [(2,), (2,)])]
        return [each.requires_grad for each in found]

    assert on_every(2, work) == [[False] * 4] * 2


def test_arguments_that_cannot_be_are_refused_before_anything_is_sent():
    def work(world: World):
        axis = world.everyone()
        with world.recorder.recording() as records:
            with pytest.raises(CommunicationError, match="allowed: sum, max"):
                axis.all_reduce(torch.ones(2), "product")
            with pytest.raises(CommunicationError, match="cannot cut dim 0 evenly"):
                axis.reduce_scatter(torch.ones(3))
            with pytest.raises(CommunicationError, match="one size for each member"):
                axis.all_gather(torch.ones(3), 0, [2, 2])
            with pytest.raises(CommunicationError, match="one size for each member"):
                axis.all_gather(torch.ones(3), 0, [3])
            with pytest.raises(CommunicationError, match="2 of each"):
                axis.all_to_all([torch.ones(1)], [(1,)])
        return records

    assert launch(work, 2, ranks="threads") == [[], []]


def test_every_rank_gets_the_axes_of_its_coordinate_in_the_mesh():
    mesh = Mesh(dp=2, tp=3)

    def work(axes):
        return {name: (axis.index, axis.ranks) for name, axis in axes.items()}

    for rank, found in enumerate(run_on_threads(mesh, work)):
        coord = mesh.coord(rank)
        assert found == {name: (coord[name], mesh.group(name, rank)) for name in mesh.axes}


def test_an_axis_that_joins_two_is_in_the_order_of_the_ranks():
    mesh = Mesh(pp=2, dp=2, tp=2)

    def work(world):
        axis = world.axis("pp+tp", mesh.groups(("pp", "tp")))
        return axis.all_gather(torch.tensor([world.rank])).tolist()

    assert launch(work, 8, ranks="threads") == [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]] * 2
