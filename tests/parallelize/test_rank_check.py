"""Ranks that have come apart are told from each other, and named, at the next comparison."""

from __future__ import annotations

from collections import deque
from math import prod

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwright import launch, parallelize
from shardwright.comm.agreement import tensor_digest
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, structural_copy
from shardwright.parallelize.rank_check import some_elements
from shardwright.parallelize.step_guard import MOST_UNCHANGED
from shardwright.plan.plan import Job

LINES = ("dp2", "tp2", "dp2/zero3", "dp2x2/zero3", "dp2 tp2", "pp2 mb2", "tp2x2/2d", "dp2 bf16")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 4


def trained(line, harm=lambda run, step, optimizer, batch: (True, batch), check_every=1, num_steps=3):
    """Trains; ``harm`` may change a rank's run, and says whether it updates, and on which batch."""

    model = plain()

    def work(world):
        run = parallelize(structural_copy(model, torch.clone), line, world, check_every=check_every)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        try:
            for step in range(num_steps):
                updates, batch = harm(run, step, optimizer, (X, Y))
                run.step(next(run.shard([batch])))
                optimizer.step() if updates else optimizer.zero_grad()
        except PlanError as error:
            return str(error)
        return ""

    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("line", LINES)
def test_ranks_that_train_alike_are_told_from_none(line):
    assert set(trained(line)) == {""}


@pytest.mark.parametrize("line", LINES)
def test_a_rank_that_skips_an_update_is_named(line):
    found = trained(line, lambda run, step, *rest: (run.world.rank != 1 or step != 0, rest[1]))
    assert len(set(found)) == 1
    assert "in the updates" in found[0]
    assert "rank 1 differs from rank 0" in found[0] or "rank 0 differs from rank 1" in found[0]


@pytest.mark.filterwarnings("error")
def test_a_rank_that_never_updates_is_named_where_the_warning_of_it_is_an_error():
    found = trained("dp2", lambda run, step, *rest: (run.world.rank != 1, rest[1]), MOST_UNCHANGED, MOST_UNCHANGED + 1)
    assert "in the updates" in found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3", "pp2 mb2"])
def test_another_learning_rate_for_one_update_between_two_comparisons_is_named(line):
    def harm(run, step, optimizer, batch):
        optimizer.param_groups[0]["lr"] = 0.2 if run.world.rank == 1 and step == 0 else 0.1
        return True, batch

    found = trained(line, harm, check_every=2)
    assert len(set(found)) == 1
    assert "in the updates: rates of all updates" in found[0]


def test_another_number_of_samples_between_two_comparisons_is_named():
    def harm(run, step, optimizer, batch):
        few = run.world.rank == 1 and step == 1
        return True, (X[:6], Y[:6]) if few else batch

    found = trained("dp2/zero3", harm, check_every=2)
    assert len(set(found)) == 1
    assert "in the step: samples of all steps" in found[0]


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3", "dp2x2/zero3", "pp2 mb2"])
def test_a_rank_with_another_learning_rate_is_named(line):
    def harm(run, step, optimizer, batch):
        if run.world.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        return True, batch

    found = trained(line, harm)
    assert len(set(found)) == 1
    assert "in the updates: learning rates" in found[0]


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "pp2 mb2"])
def test_a_rank_with_another_option_of_its_optimizer_is_named_where_no_copy_would_differ_too(line):
    def harm(run, step, optimizer, batch):
        if run.world.rank == 1 and step == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        return True, batch

    found = trained(line, harm)
    assert len(set(found)) == 1
    assert "in the updates: options" in found[0]
    assert "('weight_decay', 0.5)" in found[0]


@pytest.mark.parametrize("option", [lambda rank: [0.5, rank], lambda rank: {"knots": (rank,)}])
def test_a_rank_with_another_list_among_its_optimizers_options_is_named(option):
    def harm(run, step, optimizer, batch):
        optimizer.param_groups[0]["own"] = option(run.world.rank)
        return True, batch

    found = trained("dp2", harm)
    assert len(set(found)) == 1
    assert "in the updates: options" in found[0]


def test_stages_may_have_optimizers_and_groups_of_their_own():
    model = plain()

    def work(world):
        run = parallelize(structural_copy(model, torch.clone), "pp2 mb2", world, check_every=1)
        groups = [{"params": [p], "lr": 0.1 + 0.1 * world.rank} for p in run.parameters.values()]
        every, own = run.optimizer(torch.optim.SGD, groups, lr=1.0), torch.optim.SGD(run.parameters.values(), lr=0.1)
        for step in range(4):
            loss = run.step(next(run.shard([(X, Y)])))
            (own if world.rank and step % 2 else every).step()
        return loss.isfinite().item()

    assert launch(work, 2, ranks="threads") == [True, True]


@pytest.mark.parametrize("trains_everywhere", [True, False])
def test_a_stage_that_trains_nothing_differs_from_no_other_and_is_not_warned_of(trains_everywhere):
    model = plain()
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)

    def work(world):
        run = parallelize(structural_copy(model, torch.clone), "pp2 mb2", world, check_every=1)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(MOST_UNCHANGED + 2):
            loss = run.step(next(run.shard([(X, Y)])))
            if trains_everywhere or world.rank:
                optimizer.step()
        return loss.isfinite().item(), sum(p.requires_grad for p in run.parameters.values())

    assert launch(work, 2, ranks="threads") == [(True, 0), (True, 2)]


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2x2/zero3", "dp2 tp2", "tp2x2/2d", "dp2 bf16"])
def test_a_changed_copy_of_a_parameter_is_named(line):
    name = "4.bias" if "zero3" in line else "1.bias"  # the last rank stores the last elements

    def harm(run, step, optimizer, batch):
        parameter = run.parameters[name]
        if run.world.rank == run.world.size - 1 and step == 1 and parameter.numel():
            with torch.no_grad():
                parameter[-1:] += 0.5
            run.changed()
        return True, batch

    found = trained(line, harm)
    assert len(set(found)) == 1
    assert f"in the parameters: {name}" in found[0]


def test_copies_that_tensor_parallelism_makes_may_differ_by_rounding():
    def harm(run, step, optimizer, batch):
        if run.world.rank == 1 and step == 1:
            with torch.no_grad():
                run.parameters["1.weight"].mul_(1 + 1e-6)
        return True, batch

    assert set(trained("tp2", harm)) == {""}
    assert "1.weight" in trained("dp2", harm)[0]


@pytest.mark.parametrize("line", ["tp2", "dp2 tp2", "pp2 mb2"])
def test_other_samples_in_a_tensor_parallel_group_or_on_another_stage_are_named(line):
    def harm(run, step, optimizer, batch):
        mine = [*range(8)] if run.world.rank != 1 else [*range(7, -1, -1)]  # the same samples in another order
        return True, (X[mine], Y[mine])

    found = trained(line, harm)
    assert len(set(found)) == 1
    assert "in the batch: tensor 0" in found[0]
    assert "the same order of the samples" in found[0]


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "dp2 tp2", "pp2 dp2 mb2", "tp2x2/2d"])
def test_global_batches_in_another_order_are_named(line):
    def harm(run, step, optimizer, batch):
        ours = (
            [*range(8)]
            if run.axes.get("dp", run.axes.get("row", run.axes["world"])).index == 0
            else [*range(7, -1, -1)]
        )
        return True, (X[ours], Y[ours])

    found = trained(line, harm)
    assert len(set(found)) == 1
    assert "in the global batch: tensor 0" in found[0]
    assert "a generator with one seed" in found[0]


@pytest.mark.parametrize(("shape", "count"), [((1,), 1), ((4,), 4), ((0, 3), 0), ((256, 16), 241), ((300, 8, 8), 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_some_elements_of_any_tensor_are_compared_in_all_places_of_a_sample(shape, count, dtype):
    (found,) = some_elements(torch.arange(prod(shape)).view(shape).to(dtype))
    assert len(found) == count
    assert tensor_digest(found)
    places = some_elements(torch.arange(prod(shape)).view(shape))[0] % max(1, prod(shape[1:]))
    assert len(places.unique()) == min(count, prod(shape[1:]))


def test_parts_of_batches_that_ranks_loaded_alone_are_not_compared_with_others():
    model = plain()

    def work(world):
        run = parallelize(model, "dp2", world, check_every=1)
        mine = run.share(8)
        return run.step(run.part(X[mine.start : mine.stop], Y[mine.start : mine.stop], 8)).isfinite().item()

    assert launch(work, 2, ranks="threads") == [True, True]


def test_another_number_of_samples_is_named_before_anything_is_computed():
    def harm(run, step, optimizer, batch):
        return True, batch if run.world.rank == 0 else (X[:6], Y[:6])

    found = trained("dp2", harm)
    assert len(set(found)) == 1
    assert "in the step: samples" in found[0]


@pytest.mark.parametrize("check_every", [0, 2])
def test_ranks_are_compared_every_so_many_steps_or_never_and_what_is_sent_is_told(check_every):
    layout = Layout.parse("dp2 tp2")
    model = plain()
    job = job_for(model, CrossEntropy(), layout, X)
    plan, chosen = make_plan(Job(job.model, job.loss), layout)
    said = StepTraffic(job, plan, chosen, X).at(dict.fromkeys(plan.mesh.axes, 0), checked=True)["core"]

    def work(world):
        run = parallelize(model, layout, world, check_every=check_every)
        sent = []
        for batch in run.shard([(X, Y)] * 5):
            with world.recorder.recording() as records:
                run.step(batch)
            sent.append([(r.kind, r.axis, r.num_bytes) for r in records if r.source == "core"])
        return sent

    told = [(each.kind, each.axis, each.num_bytes) for each in said]
    assert told == [("all_gather", "world", 32)]
    expected = [told if check_every and step % check_every == 0 else [] for step in range(5)]
    assert launch(work, layout, ranks="threads") == [expected] * 4


@pytest.mark.parametrize("line", ["dp2", "tp2"])
def test_a_loader_that_ranks_shuffle_differently_from_the_second_epoch_on_is_told_of_in_step_8(line):
    model = plain()

    def work(world):
        run = parallelize(model, line, world)
        batches = [(torch.full_like(X, float(number)), Y) for number in range(6)]
        second = batches if world.rank == 0 else batches[::-1]
        with pytest.raises(PlanError, match="batch") as caught:
            deque(map(run.step, run.shard([*batches, *second])), maxlen=0)
        return run.num_steps, "before step 8" in str(caught.value)

    assert launch(work, line, ranks="threads") == [(8, True)] * 2


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3", "pp2 mb2"])
def test_a_loader_that_each_rank_shuffles_by_itself_is_told_with_the_line_to_write(line):
    model = plain()

    def work(world):
        run = parallelize(model, line, world)
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
        with pytest.raises(PlanError) as caught:
            run.step(next(run.shard(loader)))
        return str(caught.value)

    for text in launch(work, line, ranks="threads"):
        assert "one seed" in text
        assert "DataLoader(data, batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))" in text


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "dp2 tp2", "pp2 mb2 dp2"])
def test_ranks_that_evaluate_different_batches_are_told_and_equal_ones_give_the_loss_of_one_device(line):
    model = plain()

    def work(world):
        run = parallelize(model, line, world)
        found = run.evaluate_all(run.shard([(X, Y), (X[:3], Y[:3])])).item()
        own = X + 0.1 * (run.coord["dp"] == 1)
        with pytest.raises(PlanError, match="ranks evaluate different global batches"):
            run.evaluate(next(run.shard([(own, Y)])))
        unchecked = parallelize(model, line, world, check_every=0)
        assert unchecked.evaluate(next(unchecked.shard([(own, Y)]))) > 0
        return found

    both = torch.cat([X, X[:3]]), torch.cat([Y, Y[:3]])
    expected = nn.functional.cross_entropy(model(both[0]), both[1]).item()
    assert launch(work, line, ranks="threads") == pytest.approx([expected] * Layout.parse(line).num_ranks, abs=1e-6)
