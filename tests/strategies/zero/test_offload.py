"""Offload: state in files gives the same steps to the last bit, leaves memory, and is refused before the first step."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwright as sw
from checkpoint.runs import go, loaded, saved, start, whole
from shardwright.errors import LayoutError, PlanError
from shardwright.ledger.account import measure_memory, predict_memory
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.zero import zero

WIDTHS = (6, 8, 9, 8, 5)


def mlp(widths=WIDTHS):
    with sw.without_values():
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def numbers(width=6, batch=6):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(batch, width, generator=draw), torch.randint(5, (batch,), generator=draw)


def trained(world, line, kind, options, clip=None):
    """The state after three steps, in two groups, under a schedule; what hooks and counters saw."""
    run = sw.parallelize(mlp(), line, world)
    decayed, others = ([p for n, p in run.parameters.items() if n.endswith(e)] for e in ("weight", "bias"))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    optimizer = run.optimizer(kind, groups, **options)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in run.shard([numbers()] * 3):
        run.step(batch)
        if clip is not None:
            run.clip_grad_norm_(clip)
        optimizer.step()
        schedule.step()
    state = {
        (name, key): value.clone()
        for name, p in run.parameters.items()
        for key, value in (("value", p.detach()), *optimizer.state[p].items())
        if isinstance(value, torch.Tensor)
    }
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return state, calls, sizes, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("line", "kind", "options", "clip"),
    [
        ("dp2/zero1/bucket:0", torch.optim.AdamW, {"fused": True}, 0.1),
        ("dp3/zero2/bucket:0 mb2", torch.optim.AdamW, {"foreach": True, "amsgrad": True}, None),
        ("dp2/zero3/bucket:0", torch.optim.SGD, {"momentum": 0.9}, None),
        ("dp2x2/zero3/bucket:0", torch.optim.Adagrad, {}, None),
        ("dp2/zero3/bucket:0 bf16", torch.optim.AdamW, {}, 0.1),
        ("dp2/zero1 fp16", torch.optim.AdamW, {}, None),
        ("dp1/zero1/bucket:0", torch.optim.AdamW, {"weight_decay": 0.2}, None),
    ],
)
def test_state_on_disk_is_to_the_last_bit_what_it_is_in_memory(line, kind, options, clip):
    away = line.replace("/bucket:0", "/bucket:0/offload:disk").replace("zero1 fp16", "zero1/offload:disk fp16")
    work = (kind, {"lr": 0.01, **options}, clip)
    size = sw.Layout.parse(line).num_ranks
    expected = sw.launch(trained, size, line, *work, ranks="threads")
    found = sw.launch(trained, size, away, *work, ranks="threads")
    for (mine, *seen), (theirs, *there) in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
        assert seen == there  # hooks once a step, all of each group, rates as scheduled
        assert seen[0] == ["before", "after"] * 3


@pytest.mark.parametrize("line", ["dp2/zero1/bucket:0", "dp2x2/zero3/bucket:0 bf16"])
def test_state_in_host_memory_is_to_the_last_bit_what_it_is_on_the_device(monkeypatch, line):
    """The code path of an accelerator, on a CPU: shards in other memory than the buffers that compute."""
    monkeypatch.setattr(zero, "_moves", lambda target, device: True)
    size = sw.Layout.parse(line).num_ranks
    work = (torch.optim.AdamW, {"lr": 0.01}, 0.1)
    expected = sw.launch(trained, size, line, *work, ranks="threads")
    found = sw.launch(trained, size, line.replace("bucket:0", "bucket:0/offload"), *work, ranks="threads")
    for (mine, *seen), (theirs, *there) in zip(found, expected, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
        assert seen == there


def test_a_second_optimizer_takes_over_the_room_of_the_first():
    def work(world):
        run = sw.parallelize(mlp(), "dp2/zero1/offload:disk", world)
        held, losses = [], []
        for _ in range(2):
            optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
            for batch in run.shard([numbers()] * 2):
                losses.append(run.step(batch).item())
                optimizer.step()
            held.append(len(run.offload.tensors))
        return held, losses, {int(state["step"]) for state in optimizer.state.values()}

    for held, losses, steps in sw.launch(work, 2, ranks="threads"):
        assert held[0] == held[1]
        assert losses == sorted(losses, reverse=True)
        assert steps == {2}


def test_master_weights_and_optimizer_state_are_in_files_without_a_name(tmp_path):
    def work(world):
        run = sw.parallelize(mlp(), "dp2/zero3/bucket:0/offload:disk", world, offload_folder=tmp_path / "new")
        optimizer = run.optimizer(torch.optim.AdamW)
        for batch in run.shard([numbers()] * 2):
            run.step(batch)
            optimizer.step()
        kept = [p for p in run.parameters.values() if p.numel()]
        kept += [value for p in kept for value in optimizer.state[p].values() if value.dim()]
        spans = [(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in run.offload.tensors]
        inside = [any(low <= tensor.data_ptr() < high for low, high in spans) for tensor in kept]
        return all(inside), len(inside), sum(high - low for low, high in spans)

    found = sw.launch(work, 2, ranks="threads")
    assert all(inside and number > 8 for inside, number, _ in found)
    assert sum(num_bytes for *_, num_bytes in found) == 3 * 4 * sum(p.numel() for p in mlp().parameters())
    assert list((tmp_path / "new").iterdir()) == []


def in_memory(folder):
    """The bytes of a folder's files that are in this process's memory."""
    inside, found = False, 0
    for text in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", text):
            inside = str(folder) in text
        elif inside and text.startswith("Rss:"):
            found += int(text.split()[1]) * 1024
    return found


def reserved_in(folder):
    """What the disk has set aside for the files of a folder that this process holds open."""
    names = {os.readlink(each): each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    return sum(each.stat().st_blocks * 512 for name, each in names.items() if name.startswith(str(folder)))


@pytest.mark.sampled(0)
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="/proc/self/smaps is on Linux alone")
def test_no_more_than_one_param_group_is_in_memory_during_updates_and_none_after(tmp_path):
    widths = (512,) * 5
    group_bytes = 512 * 513 * 4 * 3
    seen = []

    def work(world):
        run = sw.parallelize(mlp(widths), "dp1/zero1/bucket:0/offload:disk", world, offload_folder=tmp_path)
        assert in_memory(tmp_path) == 0
        plain = torch.optim.AdamW.step

        def watched(optimizer):
            plain(optimizer)
            seen.append(in_memory(tmp_path))

        kind = type("Watched", (torch.optim.AdamW,), {"step": watched})
        optimizer = run.optimizer(kind, lr=1e-3)
        assert reserved_in(tmp_path) >= 4 * group_bytes  # though nothing is written yet
        for batch in run.shard([numbers(512)] * 2):
            seen.clear()
            run.step(batch)
            optimizer.step()
            assert in_memory(tmp_path) == 0

    sw.launch(work, 1, ranks="threads")
    assert len(seen) == 4
    assert all(0 < each <= group_bytes * 1.1 for each in seen), (seen, group_bytes)


# ---- beside the backward


def updated(world, line, together):
    """Parameters after three steps, some targets ignored; how many updates were done at the first layer."""
    run = sw.parallelize(mlp(), line, world)
    done, seen = [], []

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            super().step()
            done.append(sum(len(group["params"]) for group in self.param_groups))

    def watch(output):
        output.register_hook(lambda _: seen.append(len(done)))

    optimizer = run.optimizer(Watched, lr=0.01)
    if "pp" not in line:
        first = run.model.get_submodule("0")
        first.register_forward_hook(lambda *given: watch(given[2]))
    inputs, targets = numbers()
    targets[2:4] = -100
    for batch in run.shard([(inputs, targets)] * 3):
        done.clear()
        if together:
            run.step(batch, update=optimizer)
            assert all(p.grad is None for p in run.parameters.values())
        else:
            run.step(batch)
            optimizer.step()
    return {name: p.detach().clone() for name, p in run.parameters.items()}, seen[-1:]


@pytest.mark.parametrize(
    ("line", "beside"),
    [
        ("dp2/zero1/bucket:0/ahead:0/offload:disk", True),
        ("dp2/zero2/bucket:0/ahead:0/offload:disk mb2 bf16", True),
        ("dp2/zero3/bucket:0/ahead:0/offload:disk", True),
        ("dp2x2/zero3/bucket:0/ahead:0/offload:disk", False),  # replicas sum their slices after the backward
        ("dp2/zero1/bucket:0/ahead:0/offload:disk fp16", False),
        ("pp2 dp2/zero1/bucket:0/offload:disk mb2", False),
        ("dp2/zero3/bucket:0", False),
    ],
)
def test_param_groups_are_updated_beside_the_backward_to_the_same_last_bit(line, beside):
    size = sw.Layout.parse(line).num_ranks
    expected = sw.launch(updated, size, line, False, ranks="threads")
    found = sw.launch(updated, size, line, True, ranks="threads")
    for (mine, seen), (theirs, _) in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert (seen and seen[0] >= 2) == beside or "pp" in line


@pytest.mark.parametrize("line", ["dp2/zero1/bucket:0/offload:disk", "dp2/zero3/bucket:0/offload:disk"])
def test_a_frozen_parameter_that_is_given_a_gradient_by_hand_is_updated_though_no_param_group_is_its_own(line):
    """Only trained parameters are in the groups that an optimizer with offloaded state updates one after the other."""

    def work(world):
        plain = mlp()
        plain[1].requires_grad_(False)
        run = sw.parallelize(plain, line, world)
        optimizer = run.optimizer(torch.optim.SGD, list(run.parameters.values()), lr=0.5)
        before = {name: parameter.detach().clone() for name, parameter in run.parameters.items()}
        run.step(next(run.shard([numbers()])))
        run.parameters["1.weight"].grad = torch.ones_like(run.parameters["1.weight"])
        optimizer.step()
        moved = {name: before[name] - parameter.detach() for name, parameter in run.parameters.items()}
        assert moved["1.weight"].allclose(torch.tensor(0.5))
        return {name for name, by in moved.items() if by.any()}

    trained = {f"{layer}.{kind}" for layer in (0, 2, 3) for kind in ("weight", "bias")}
    assert set().union(*sw.launch(work, 2, ranks="threads")) == {*trained, "1.weight"}


def test_a_parameter_that_a_backward_needs_after_its_gradients_are_complete_is_named():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up, self.between = (nn.Linear(6, 6) for _ in range(3))
            self.last = nn.Linear(6, 5)

        def forward(self, x):
            x = nn.functional.linear(self.first(x), self.up.weight.detach())
            return self.last(self.up(self.between(x)))

    def work(world):
        with sw.without_values():
            plain = Again()
        run = sw.parallelize(plain, "dp2/zero3/bucket:0/ahead:0/offload:disk", world)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        (batch,) = run.shard([numbers()])
        with pytest.raises(PlanError, match="'up' are used after their gradients were complete"):
            run.step(batch, update=optimizer)

    sw.launch(work, 2, ranks="threads")


# ---- checkpoints


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dp2/zero3/offload:disk", "single"),
        ("tp2", "dp3/zero1/offload:disk"),
        ("dp2/zero1/offload:disk bf16", "pp2 dp2/zero3/offload:disk mb2 bf16"),
    ],
)
def test_a_checkpoint_of_state_on_disk_loads_under_any_layout_and_any_other_loads_there(tmp_path, source, target):
    before = saved(source, tmp_path, steps=2)
    expected, found = whole(source, before), whole(target, loaded(target, tmp_path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_loaded_state_is_in_files_again(tmp_path):
    saved("dp2/zero3/offload:disk", tmp_path, steps=2)

    def work(world):
        run, optimizer = start(world, "dp2/zero3/offload:disk")
        sw.load(tmp_path, run, optimizer)
        addresses = {tensor.data_ptr() for tensor in run.offload.tensors}
        storages = {v.untyped_storage().data_ptr() for s in optimizer.state.values() for v in s.values() if v.dim()}
        go(run, optimizer, 3)
        return storages - {0} <= addresses

    assert sw.launch(work, 2, ranks="threads") == [True, True]


KILLED = """
import sys, os, signal, torch, shardwright as sw
from checkpoint.runs import go, start
def work(world):
    run, optimizer = start(world, "dp2/zero3/offload:disk")
    go(run, optimizer, 2)
    sw.save(sys.argv[1], run, optimizer, extra={"note": [1, "two"]})
    go(run, optimizer, 3)
    os.kill(os.getpid(), signal.SIGKILL)
sw.launch(work, 2, ranks="threads")
"""


@pytest.mark.sampled(0)
def test_a_killed_run_leaves_no_files_and_goes_on_from_its_checkpoint(tmp_path):
    folder = tmp_path / "offloaded"
    folder.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    assert list(folder.iterdir()) == []

    def straight(world):
        return go(*start(world, "dp2/zero3"), 4)

    found = loaded("dp2/zero3/offload:disk", tmp_path / "run", more=2)
    expected = sw.launch(straight, 2, ranks="threads")
    assert [each.losses for each in found] == [losses[2:] for losses in expected]


# ---- the ledger


@pytest.mark.parametrize("line", ["dp2/zero1/bucket:0/offload:disk", "dp2/zero3/bucket:0/offload:disk bf16"])
def test_the_ledger_counts_what_is_on_disk_apart_and_what_computes_as_the_plan_says(line):
    widths = (64, 64, 64, 64, 5)

    def work(world):
        run = sw.parallelize(mlp(widths), line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
        batches = list(run.shard([numbers(64)] * 2))
        run.step(batches[0])
        optimizer.step()
        return measure_memory(run, batches[1], optimizer)

    job = Job(mlp(widths), CrossEntropy())
    plan, _ = make_plan(job, sw.Layout.parse(line))
    for rank, measured in enumerate(sw.launch(work, 2, ranks="threads")):
        predicted = predict_memory(job, line, rank, numbers(64), ranks="threads")
        slices = sum(state.parameter.num_elements(plan.mesh.coord(rank)) for state in plan.state.values())
        assert measured.elsewhere == predicted.elsewhere == {"disk": 3 * 4 * slices}
        held = sum(plan.parameter_bytes(name, plan.mesh.coord(rank)) for name in plan.state)
        for account in (measured, predicted):
            assert min(moment.held[0] for moment in account.moments) == pytest.approx(held, abs=256)
            assert account.most()["optimizer"] < 4 * 64 * 65 * 2 + 256  # what an update of one param group works with


# ---- bad input


def refused(world, folders, limit=None):
    """The error that a rank gets when its run, or its optimizer, is made; each rank has a folder."""
    folder = folders[world.rank]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    world.everyone().barrier()
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        run = sw.parallelize(mlp((512, 512, 512)), "dp2/zero1/offload:disk", world, offload_folder=folder)
        made = "the run"
        run.optimizer(torch.optim.AdamW)
    except PlanError as refusal:
        return str(refusal)
    finally:
        world.everyone().barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return f"{made} was made"


@pytest.mark.parametrize("limit", [2**20, 3 * 2**19])  # less than the slices; less than the moments as well
def test_a_disk_too_small_is_refused_on_every_rank_before_the_first_step(tmp_path, limit):
    found = sw.launch(refused, 2, (tmp_path, tmp_path), limit, ranks="threads")
    assert len(set(found)) == 1
    assert "no room to offload to disk" in found[0]
    assert "--offload-folder" in found[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    found = sw.launch(refused, 2, (tmp_path, tmp_path / "file" / "below"), ranks="threads")
    assert len(set(found)) == 1
    assert "rank 1: Not a directory" in found[0]


def test_an_optimizer_that_counts_for_all_parameters_together_is_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = group["lr"] / 2
            return super().step(closure)

    def work(world):
        run = sw.parallelize(mlp(), "dp2/zero1/offload:disk", world)
        with pytest.raises(PlanError, match="Counting counts its steps for all parameters together"):
            run.optimizer(Counting, lr=0.1)

    sw.launch(work, 2, ranks="threads")


def test_a_place_that_there_is_not_is_refused():
    with pytest.raises(LayoutError, match="fix:     write offload:disk"):
        make_plan(Job(mlp(), nn.Identity()), sw.Layout.parse("dp2/zero1/offload:tape"))


@pytest.mark.parametrize("line", ["dp2/zero3/offload:disk/bucket:0", "dp2/zero1/offload:disk/bucket:0"])
def test_a_param_group_may_have_no_vector(line):
    """The table's group of parameters holds one matrix alone, so one of the optimizer's groups is empty beside it."""
    seen = []

    def work(world):
        run = sw.parallelize(model, line, world)
        optimizer = run.optimizer(
            torch.optim.AdamW, parameters=lambda _, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0}
        )
        run.step(next(run.shard([batch])))
        if world.rank == 0:
            handle = register_optimizer_step_pre_hook(lambda *_: seen.append(threading.current_thread().name))
        world.everyone().barrier()
        optimizer.step()
        world.everyone().barrier()
        if world.rank == 0:
            handle.remove()
        return run._guard.num_updates

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 5))
    batch = torch.arange(6), torch.arange(6) % 5
    assert sw.launch(work, 2, ranks="threads") == [1, 1]
    assert sorted(seen) == ["rank 0", "rank 1"], "hooks of all optimizers run once a step"
