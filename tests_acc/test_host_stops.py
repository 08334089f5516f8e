"""What stops the host in a step that is not the first: how often each rank waits for the device, by layout.

A GPT with dropout is trained by ``run.shard``, ``run.step``, ``run.clip_grad_norm_`` and AdamW. What the first steps
learn, and the comparison of ranks every so many steps, do not count.
"""

from __future__ import annotations

import threading
from weakref import ref

import pytest
import torch
from torch import nn

from shardwright.comm.launch import run_threads
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, GPTConfig, entry_of
from shardwright.parallelize import parallelize
from shardwright.runtime.copy_stream import CopyStream, made_ahead

CONFIG = GPTConfig(
    style="gpt2", vocabulary=19, max_tokens=6, num_layers=2, num_heads=2, width=12, hidden=12, dropout=0.0
)
NUM_STEPS = 2


def model_and_batch():
    torch.manual_seed(0)  # the constructor's draws are replayed
    with torch.device("meta"):
        model = entry_of(CONFIG).factory(CONFIG)
    return model, tuple(torch.randint(19, (8, 6)) for _ in range(2))


def stops_of(accelerator, line, *, clips=True, updates=False, read=None):
    """What stops the host in some steps of all ranks together, after three first ones."""
    model, batch = model_and_batch()
    num_ranks = Layout.parse(line).num_ranks
    everyone, found = threading.Barrier(num_ranks), []

    def work(world):
        run = parallelize(model, line, world, loss=CrossEntropy(), check_every=0, example=batch[0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)

        def take(num_steps):
            for part in run.shard([batch] * num_steps):
                loss = run.step(part, update=optimizer if updates else None)
                if clips:
                    run.clip_grad_norm_(1e-3)
                if not updates:
                    optimizer.step()
                if read is not None:
                    read(loss)

        take(3)
        everyone.wait()
        if world.rank == 0:
            counting = accelerator.counting()
            found.append(counting.__enter__())
        everyone.wait()
        take(NUM_STEPS)
        everyone.wait()
        if world.rank == 0:
            counting.__exit__(None, None, None)

    run_threads(work, num_ranks, device=accelerator.device)
    return {place: number / num_ranks / NUM_STEPS for place, number in found[0].items()}


NEVER = (
    "single", "dp2", "dp2 bf16", "dp2 mb2", "dp2/zero1", "dp2/zero2", "tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d",
    "tp2x2x2/3d", "pp2/1f1b mb2", "pp2/zb-v mb2", "dp2 recompute:full", "dp2 recompute:offload",
    "pp2/1f1b mb2 dp2/zero1 tp2",
)  # fmt: skip


@pytest.mark.parametrize("line", NEVER)
def test_a_step_and_a_clipping_never_stop_the_host(accelerator, line):
    assert stops_of(accelerator, line) == {}


@pytest.mark.parametrize("line", ["dp2", "tp2"])
def test_reading_the_loss_stops_the_host_once(accelerator, line):
    found = stops_of(accelerator, line, read=float)
    assert list(found.values()) == [1]
    assert "test_host_stops.py" in next(iter(found))


ONCE = {
    "dp2/zero3": "sharded_state.py",
    "dp2/zero3 mb2": "sharded_state.py",
    "dp2/zero3/offload": "sharded_state.py",
    "dp2/zero1/offload": "sharded_state.py",
    "dp2 fp16": "mixed_precision.py",
}
"""Layouts whose host waits once a step, and the file where: ranks are compared, gradients come to the host, one has
overflowed."""


@pytest.mark.parametrize("line", ONCE)
@pytest.mark.parametrize("updates", [False, True])
def test_some_layouts_stop_the_host_once_a_step(accelerator, line, updates):
    (found,) = stops_of(accelerator, line, clips=False, updates=updates).items()
    assert found[1] == 1
    assert ONCE[line] in found[0]


def test_clipping_offloaded_gradients_stops_the_host_once_more(accelerator):
    assert sum(stops_of(accelerator, "dp2/zero3/offload").values()) == 2


@pytest.mark.parametrize("line", ["dp2/zero3/offload", "dp2/zero1/offload"])
def test_updates_in_the_backward_of_offloaded_state_equal_those_after_it(accelerator, line):
    def trained(updates):
        model, batch = model_and_batch()
        batch[1][:5, :3] = -100  # so that gradients are scaled by the number of targets

        def work(world):
            run = parallelize(model, line, world, loss=CrossEntropy(), example=batch[0])
            optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
            for part in run.shard([batch] * 3):
                run.step(part, update=optimizer if updates else None)
                if not updates:
                    optimizer.step()
            return run.state_dict()

        return run_threads(work, 2, device=accelerator.device)

    for found, expected in zip(trained(True), trained(False), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_batch_is_copied_while_the_one_before_it_is_in_use(accelerator):
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield torch.full((2, 4), float(number)), torch.zeros(2, dtype=torch.int64)

    def work(world):
        run = parallelize(nn.Linear(4, 3), "single", world)
        return [(len(read), batch.inputs.tolist()[0][0]) for batch in run.shard(batches())]

    assert run_threads(work, 1, device=accelerator.device) == [[(2, 0.0), (3, 1.0), (3, 2.0)]]


def test_what_is_copied_ahead_is_there_only_after_its_arrival(accelerator):
    def work(world):
        copies, host = CopyStream(world.device), torch.ones(3)
        first, arrival = copies.moved(host, world.device), copies.arrival()
        second = copies.moved(host, world.device)
        early = first.isnan().all().item()
        arrival()
        return early, first.tolist(), second.isnan().all().item()

    assert run_threads(work, 1, device=accelerator.device) == [(True, [1, 1, 1], True)]


def test_a_loader_may_write_the_next_batch_into_the_same_memory_of_the_device(accelerator):
    def work(world):
        run, memory = parallelize(nn.Linear(4, 3), "single", world), torch.empty(2, 4, device=world.device)
        targets = torch.zeros(2, dtype=torch.int64)
        batches = ((memory.fill_(float(number)), targets) for number in range(3))
        return [batch.inputs.tolist()[0][0] for batch in run.shard(batches)]

    assert run_threads(work, 1, device=accelerator.device) == [[0.0, 1.0, 2.0]]


def test_an_error_of_a_loader_comes_after_the_batches_before_it(accelerator):
    def batches():
        yield torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
        raise OSError("no more")

    def work(world):
        parts = parallelize(nn.Linear(4, 3), "single", world).shard(batches())
        next(parts)
        with pytest.raises(OSError, match="no more"):
            next(parts)

    run_threads(work, 1, device=accelerator.device)


def test_a_loader_may_write_the_next_batch_into_the_same_pinned_memory(accelerator):
    def work(world):
        run, memory = parallelize(nn.Linear(4, 3), "single", world), torch.empty(2, 4).pin_memory()
        targets = torch.zeros(2, dtype=torch.int64)
        batches = ((memory.fill_(float(number)), targets) for number in range(3))
        return [batch.inputs.tolist()[0][0] for batch in run.shard(batches)]

    assert run_threads(work, 1, device=accelerator.device) == [[0.0, 1.0, 2.0]]


def test_a_batch_that_was_made_ahead_is_whole_before_its_memory_is_used_again(accelerator):
    def work(world):
        copies, made = CopyStream(world.device), []
        ahead = made_ahead(range(3), lambda number: made.append(copies.moved(torch.ones(3), world.device)), copies)
        next(ahead)
        before = [each.isnan().any().item() for each in made]
        ahead.close()
        return before, [each.isnan().any().item() for each in made]

    assert run_threads(work, 1, device=accelerator.device) == [([False, True], [False, False])]


def test_no_more_sources_than_said_are_kept_for_copies_under_way(accelerator):
    def work(world):
        copies = CopyStream(world.device, most_under_way=2)
        sources = [torch.ones(3, device=world.device) for _ in range(5)]
        kept = [ref(source) for source in sources]
        for _ in kept:
            copies.start(torch.empty(3).pin_memory(), sources.pop(0))
        return sum(each() is not None for each in kept)

    assert run_threads(work, 1, device=accelerator.device) == [2]
