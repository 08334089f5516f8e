"""Optimizers and clipping by torch's own means beside a run: they work, or are refused with the line to write."""

from __future__ import annotations

import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify, without_values
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.parallelize.planning import structural_copy
from shardwright.parallelize.step_guard import MOST_UNCHANGED

LINES = ("dp2/zero3", "dp2/zero1", "tp2", "dp2 bf16", "pp2 mb2")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def batch(num_samples=6):
    generator = torch.Generator().manual_seed(1)  # ranks are threads, which share torch's own
    return torch.randn(num_samples, 4, generator=generator), torch.randint(3, (num_samples,), generator=generator)


def on_ranks(line, work, model=None, **options):
    model = plain() if model is None else model
    return launch(lambda world: work(parallelize(model, line, world, **options)), Layout.parse(line), ranks="threads")


def refused(call):
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("line", ["single", "dp2", *LINES])
@pytest.mark.parametrize("on_meta", [False, True])
def test_an_optimizer_over_the_plain_model_is_refused_at_its_first_step_after_a_step(line, on_meta):
    if on_meta:
        with without_values():
            model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    else:
        model = plain()
    optimizers = []

    def work(run):
        optimizers.append(torch.optim.AdamW(model.parameters()))
        optimizers[-1].step()  # before any step of the run it loses nothing
        run.step(next(run.shard([batch()])))
        return refused(optimizers[-1].step)

    for text in on_ranks(line, work, model):
        assert "AdamW.step() would train nothing" in text
        assert "write optimizer = run.optimizer(torch.optim.AdamW, lr=...)" in text


@pytest.mark.parametrize("line", ["dp2/zero3", "dp2/zero1", "dp2 bf16"])
def test_an_optimizer_over_the_tensors_of_run_model_is_refused_where_others_are_stored(line):
    def work(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        run.step(next(run.shard([batch()])))
        return refused(optimizer.step)

    assert all("run.optimizer(torch.optim.SGD, lr=...)" in text for text in on_ranks(line, work))


def test_the_plain_model_may_be_trained_by_itself_beside_the_run():
    model = plain()

    def work(run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.step(next(run.shard([batch()])))
        nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
        optimizer.step()

    on_ranks("single", work, model)


@pytest.mark.parametrize("line", LINES)
def test_an_optimizer_over_run_parameters_trains_as_that_of_the_run(line):
    model = plain()  # built once: threads share torch's generator

    def work(run):
        losses = []
        for by_hand in (False, True):
            other = parallelize(structural_copy(model, torch.clone), line, run.world)
            made = torch.optim.SGD(other.parameters.values(), lr=0.5) if by_hand else None
            optimizer = made or other.optimizer(torch.optim.SGD, lr=0.5)
            for part in other.shard([batch()] * 3):
                losses.append(other.step(part).item())
                optimizer.step()
            losses.append(other.evaluate(part).item())
        assert losses[3] < losses[0]
        return losses[:4], losses[4:]

    for ours, by_hand in on_ranks(line, work):
        assert ours == by_hand


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("own", [True, False])
def test_clipping_by_torch_is_refused_where_a_rank_has_a_part_of_the_gradients(line, own):
    def work(run):
        run.step(next(run.shard([batch()])))
        if line == "dp2 bf16" and own:  # every rank has all gradients, whole
            torch.nn.utils.clip_grad_norm_(run.parameters.values(), 1e-3)
            return "write run.clip_grad_norm_(max_norm)"
        if line in ("tp2", "pp2 mb2") or own:
            tensors = run.parameters.values() if own else run.model.parameters()
            before = [p.grad.clone() for p in run.parameters.values()]
            text = refused(lambda: torch.nn.utils.clip_grad_norm_(tensors, 1e-3))
            assert all(torch.equal(p.grad, b) for p, b in zip(run.parameters.values(), before, strict=True))
            return text
        return refused(lambda: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3))

    assert all("write run.clip_grad_norm_(max_norm)" in text for text in on_ranks(line, work))


@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "tp2", "pp2 mb2"])
def test_clipping_in_two_parts_is_refused_too(line):
    def work(run):
        run.step(next(run.shard([batch()])))
        own = [*run.parameters.values()]
        gradients = [p.grad for p in own if p.grad is not None]
        first = refused(partial(torch.nn.utils.get_total_norm, gradients))
        norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
        return [first, *(refused(partial(clip, own, 1e-3, norm)) for clip in CLIPS)]

    for texts in on_ranks(line, work):
        assert all("write run.clip_grad_norm_(max_norm)" in text for text in texts)


CLIPS = (torch.nn.utils.clip_grads_with_norm_, torch.nn.utils.clip_grad.clip_grads_with_norm_)


def test_clipping_by_torch_is_right_where_every_rank_has_all_gradients():
    def work(run):
        (part,) = run.shard([batch()])
        run.step(part)
        norm = torch.nn.utils.clip_grad_norm_(run.parameters.values(), 1e-3)
        run.step(part)
        return norm.item(), run.clip_grad_norm_(1e-3).item()

    for norm, ours in on_ranks("dp2", work):
        assert norm == pytest.approx(ours, rel=1e-5)


# ---- several steps for one update


@pytest.mark.parametrize("by_hand", [False, True])
def test_two_steps_before_an_update_are_refused_since_the_first_gradients_are_lost(by_hand):
    def work(run):
        made = torch.optim.SGD(run.parameters.values(), lr=0.1) if by_hand else None
        optimizer = made or run.optimizer(torch.optim.SGD, lr=0.1)
        (part,) = run.shard([batch()])
        run.step(part)
        optimizer.step()
        run.step(part)
        run.step(part)
        text = refused(optimizer.step)
        optimizer.zero_grad()
        run.step(part)
        optimizer.step()  # dropped on purpose
        run.timeline(part)
        run.step(part)
        optimizer.step()
        return text

    for text in on_ranks("dp2/zero3", work):
        assert "would lose the gradients of 1 of 2 steps" in text
        assert "write run.accumulate([first, second])" in text


@pytest.mark.parametrize("line", ["single", "dp2", *LINES])
def test_accumulated_gradients_are_those_of_the_mean_over_all_targets(line):
    def work(run):
        x, y = batch(7)
        y[0] = -100
        (whole,) = run.shard([(x, y)])
        parts = list(run.shard([(x[:2], y[:2]), (x[2:], y[2:]), (x[:1], y[:1])]))  # the last has no target
        one = run.step(whole).item()
        expected = {name: p.grad.clone() for name, p in run.parameters.items()}
        several = run.accumulate(parts).item()
        tolerance = 2e-2 if "bf16" in line else 1e-5
        for name, parameter in run.parameters.items():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=tolerance, atol=tolerance)
        assert run.num_steps == 4
        return one, several

    for one, several in on_ranks(line, work):
        assert several == pytest.approx(one, rel=1e-2 if "bf16" in line else 1e-6)


def test_accumulated_batches_draw_dropout_of_their_own_and_none_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def work(run):
        (part,) = run.shard([batch()])
        once = run.step(part).item()
        run.num_steps = 0
        assert run.accumulate([part, part]).item() != once
        return refused(lambda: run.accumulate([]))

    assert "no batches to accumulate" in on_ranks("single", work, model)[0]


# ---- groups of parameters


def decays(name, shape):
    return {"weight_decay": 0.5 if len(shape) > 1 else 0.0, "lr": 0.1}


@pytest.mark.parametrize("line", ["single", "dp2", *LINES, "pp2 mb2 dp2/zero3"])
def test_groups_by_name_and_plain_shape_are_those_of_one_device(line):
    whole = plain()
    groups = [
        {"params": [p for p in whole.parameters() if (p.dim() > 1) == decayed], **decays("", (1,) * (1 + decayed))}
        for decayed in (True, False)
    ]
    alone = torch.optim.AdamW(groups)
    for _ in range(2):
        alone.zero_grad()
        nn.functional.cross_entropy(whole(batch()[0]), batch()[1]).backward()
        alone.step()
    expected = nn.functional.cross_entropy(whole(batch()[0]), batch()[1]).item()

    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, parameters=decays)
        for part in run.shard([batch()] * 2):
            run.step(part)
            optimizer.step()
        return run.evaluate(part).item(), [group["weight_decay"] for group in optimizer.param_groups]

    for loss, decay in on_ranks(line, work):
        assert loss == pytest.approx(expected, rel=3e-2 if "bf16" in line else 1e-4)
        assert decay == [0.5, 0.0]


def test_a_function_may_leave_out_parameters_but_not_all_and_returns_mappings():
    def work(run):
        kind = torch.optim.SGD
        optimizer = run.optimizer(kind, parameters=lambda name, shape: {} if "bias" in name else None, lr=0.1)
        held = [run.parameters["0.bias"], run.parameters["2.bias"]]
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in held]
        nothing = refused(lambda: run.optimizer(kind, parameters=lambda name, shape: None, lr=0.1))
        return nothing, refused(lambda: run.optimizer(kind, parameters=lambda name, shape: 0.1, lr=0.1))

    for nothing, number in on_ranks("dp2/zero1", work):
        assert "leaves out every parameter" in nothing
        assert "the options of '0.weight' are no mapping" in number


@pytest.mark.parametrize("line", ["dp2/zero3", "dp2/zero1"])
def test_groups_by_the_dims_of_slices_are_refused_since_all_slices_have_one(line):
    def work(run):
        groups = [
            {"params": [p for p in run.parameters.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in run.parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return refused(lambda: run.optimizer(torch.optim.AdamW, groups, lr=0.1))

    for text in on_ranks(line, work):
        assert "parameters=lambda name, shape: {'weight_decay': 0.1} if len(shape) > 1 else {}" in text


def by_dims(run):
    parameters = run.parameters.values()
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("line", ["dp2/zero3", "dp2/zero1"])
def test_groups_by_the_dims_of_slices_are_refused_of_optimizers_made_by_hand_too(line):
    def work(run):
        optimizer = torch.optim.AdamW(by_dims(run), lr=0.1)
        run.step(next(run.shard([batch()])))
        return refused(optimizer.step)

    for text in on_ranks(line, work):
        assert "group 0 has no parameter, and this rank stores slices of one dim" in text
        assert "parameters=lambda name, shape: {'weight_decay': 0.1} if len(shape) > 1 else {}" in text


def by_dim_each(parameters, _):
    """As some training scripts have it: a group for each parameter."""
    return [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in parameters]


def by_dims_where_any(parameters, run):
    return [group for group in by_dims(run) if group["params"]]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("groups", [by_dim_each, by_dims_where_any])
def test_groups_that_all_say_that_nothing_decays_are_refused_of_slices(groups, kind):
    def work(run):
        found = groups([*run.parameters.values()], run)
        text = refused(lambda: run.optimizer(kind, found, lr=0.1))
        without = [{"params": group["params"]} for group in found]
        for optimizer in (
            run.optimizer(kind, without, lr=0.1, weight_decay=0.0),
            run.optimizer(kind, parameters=lambda name, shape: {"weight_decay": 0.0}, lr=0.1),
        ):
            assert optimizer.param_groups[0]["weight_decay"] == 0.0
            run.step(next(run.shard([batch()])))
            optimizer.step()
        return text

    for text in on_ranks("dp2/zero1", work):
        assert "no group of the optimizer decays, and this rank stores slices of one dim" in text
        assert "parameters=lambda name, shape: {'weight_decay': 0.1} if len(shape) > 1 else {}" in text
    assert len(on_ranks("dp2", lambda run: run.optimizer(kind, groups([*run.parameters.values()], run), lr=0.1))) == 2


def test_groups_by_the_dims_of_slices_are_refused_on_every_stage_of_a_pipeline():
    def work(run):
        return refused(lambda: run.optimizer(torch.optim.AdamW, by_dims(run), lr=0.1))

    for text in on_ranks("pp2 mb2 dp2/zero3", work):
        assert "this rank stores slices of one dim" in text


def test_a_stage_that_has_no_matrix_to_decay_may_have_none():
    """The table of the first stage is not decayed, by its name; the layer of the second is."""

    def work(run):
        own = run.parameters.items()
        groups = [
            {"params": [p for name, p in own if name == "2.weight"], "weight_decay": 0.1},
            {"params": [p for name, p in own if name != "2.weight"], "weight_decay": 0.0},
        ]
        return len(run.optimizer(torch.optim.AdamW, groups, lr=0.1).param_groups)

    assert on_ranks("pp2 mb2 dp2/zero3", work) == [2] * 4


def test_groups_by_name_may_decay_vectors_alone():
    def work(run):
        own = run.parameters.items()
        groups = [{"params": [p for name, p in own if "bias" in name], "weight_decay": 0.1},
                  {"params": [p for name, p in own if "bias" not in name], "weight_decay": 0.0}]  # fmt: skip
        return len(run.optimizer(torch.optim.AdamW, groups, lr=0.1).param_groups)

    assert on_ranks("dp2/zero3", work) == [2, 2]


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_gradients_of_a_first_try_of_the_model_hide_no_optimizer_that_trains_nothing(line):
    model = plain()
    nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()

    def work(run):
        optimizer = torch.optim.AdamW(model.parameters())
        run.step(next(run.shard([batch()])))
        return refused(optimizer.step)

    assert all("AdamW.step() would train nothing" in text for text in on_ranks(line, work, model))


@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3"])
def test_groups_by_name_may_leave_one_empty_in_a_model_without_biases(line):
    def work(run):
        groups = [{"params": [*run.parameters.values()], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
        by_hand = torch.optim.AdamW(groups, lr=0.1)
        run.step(next(run.shard([batch()])))
        by_hand.step()
        return len(run.optimizer(torch.optim.AdamW, groups, lr=0.1).param_groups)

    assert on_ranks(line, work, nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))) == [2, 2]


@pytest.mark.sampled(0)
def test_rates_of_an_optimizer_that_one_rank_has_dropped_are_not_compared():
    def work(run):
        kept = []
        for rate in (0.1, 0.2, 0.3, 0.4):  # a new optimizer each step, as the next may have the address of the last
            optimizer = run.optimizer(torch.optim.SGD, lr=rate)
            run.step(next(run.shard([batch()])))
            optimizer.step()
            if run.world.rank == 1:
                kept.append(optimizer)
            del optimizer
            gc.collect()
        return run.step(next(run.shard([batch()]))).item() > 0

    assert on_ranks("dp2", work, check_every=4) == [True, True]


def update_by_hand(tensors):
    with torch.no_grad():
        for parameter in tensors:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)


def told_after(line, tensors_of, num_steps=MOST_UNCHANGED + 2):
    """Returns the warnings and the first and last losses of a loop with updates by hand."""
    model = plain()

    def work(run):
        losses = []
        for _ in range(num_steps):
            losses.append(run.step(next(run.shard([batch()]))).item())
            update_by_hand(tensors_of(run, model))
        return losses[0], losses[-1]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = on_ranks(line, work, model, check_every=5)
    return [str(each.message) for each in caught if "no parameter has changed" in str(each.message)], losses[0]


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3", "dp2 bf16", "pp2 mb2"])
def test_updates_by_hand_that_train_nothing_are_warned_of(line):
    told, (first, last) = told_after(line, lambda run, model: model.parameters())
    assert first == last
    assert told
    assert all("update run.parameters.values()" in text for text in told)
    if "bf16" in line or "zero3" in line:
        with pytest.raises(PlanError, match=r"run.parameters\['0.weight'\].grad"):
            told_after(line, lambda run, model: run.model.parameters())


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3", "dp2 bf16", "pp2 mb2"])
def test_updates_by_hand_of_the_run_s_own_tensors_train(line):
    told, (first, last) = told_after(line, lambda run, model: run.parameters.values())
    assert last < first
    assert told == []


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "tp2"])
def test_options_that_an_optimizer_refuses_are_refused_in_its_own_words(line):
    def work(run):
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            run.optimizer(torch.optim.SGD, lr=-1.0)
        return True

    assert on_ranks(line, work) == [True, True]


class LooksUp(torch.optim.SGD):
    """An optimizer that updates no tensor but those that its code knows."""

    def step(self, closure=None):
        return {}["weight"]


def test_an_optimizer_that_fails_with_any_error_is_taken_to_need_whole_tensors():
    def work(run):
        return refused(lambda: run.optimizer(LooksUp, lr=0.1))

    assert all("LooksUp needs whole tensors" in text for text in on_ranks("dp2/zero3", work))


def test_an_accumulation_of_many_batches_is_one_step_before_an_update():
    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            run.accumulate(run.shard([batch()] * (MOST_UNCHANGED + 5)))
            optimizer.step()
        return run.num_steps

    assert on_ranks("dp2", work, check_every=5) == [3 * (MOST_UNCHANGED + 5)] * 2


class NeedsRates(torch.optim.SGD):
    """An optimizer whose groups must each name a rate, as torch's own once did."""

    def __init__(self, groups, lr=None, **options):
        if lr is None and not all("lr" in group for group in groups if isinstance(group, dict)):
            raise ValueError("parameter group did not specify a value of required parameter lr")
        super().__init__(groups, lr=lr or 1.0, **options)


def test_options_that_only_groups_name_are_those_with_which_an_optimizer_is_tried():
    def work(run):
        groups = [{"params": [p], "lr": 0.1} for p in run.parameters.values()]
        return [group["lr"] for group in run.optimizer(NeedsRates, groups).param_groups]

    assert on_ranks("dp2/zero3", work) == [[0.1] * 4] * 2


# ---- an optimizer that the model holds, as agents of reinforcement learning do


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.middle, self.down = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def forward(self, x):
        return self.down(torch.relu(self.middle(torch.relu(self.up(x)))))


@pytest.mark.parametrize("line", [*LINES, "tp2x2/2d", "pp2 mb2 dp2/zero1 tp2"])
def test_a_model_that_holds_its_optimizer_is_laid_out_as_one_without(line):
    verdict = verify(Agent(), line, [batch()] * 2)
    assert verdict.equal, str(verdict)
    if "tp" in line:
        assert max(verdict.shares.values()) > 0.8


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("is_copied", [False, True])
def test_the_optimizer_that_a_model_holds_is_told_that_it_trains_nothing(line, is_copied):
    agent = Agent()

    def work(run):
        run.step(next(run.shard([batch()])))
        return refused((run.model if is_copied else agent).optimizer.step)

    for text in on_ranks(line, work, agent):
        assert "Adam.step() would train nothing" in text
        assert "run.optimizer(torch.optim.Adam" in text
