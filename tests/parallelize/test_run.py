"""A run: shares of batches, steps, clipping, optimizers, evaluation, prediction, traffic."""

from __future__ import annotations

import inspect
import os
import signal
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.errors import LayoutError, PlanError
from shardwright.keyed_dropout import key_dropout
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig, MLPConfig, build_mlp
from shardwright.parallelize import parallelize
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.optimizer_check import ELEMENTWISE, _trial, _tried, is_elementwise
from shardwright.parallelize.planning import make_plan, structural_copy
from shardwright.plan.batch_shard import microbatch_samples
from shardwright.plan.plan import Job
from shardwright.rng import RngTracker
from shardwright.sharding.box import cut
from shardwright.weights.saving import save_weights

ONE_KV_HEAD = GPTConfig(
    style="llama", vocabulary=19, num_layers=2, num_heads=3, num_kv_heads=1, width=12, hidden=7, dropout=0.1
)
LINES = ("dp2", "dp3", "tp2", "tp3", "dp2 tp2", "dp2 tp3 mb2", "tp5")


def gpt(**changes):
    torch.manual_seed(0)
    settings = {field: getattr(ONE_KV_HEAD, field) for field in ONE_KV_HEAD.__dataclass_fields__}
    return GPT(GPTConfig(**{**settings, **changes})).double()


def tokens(num_samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(19, (num_samples, 6), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def on_ranks(model, line, work, **options):
    """``work(run)`` on every rank."""
    return launch(lambda world: work(parallelize(model, line, world, **options)), Layout.parse(line), ranks="threads")


def one_device(model, batch, loss=None, seed=0):
    """The model with the gradients of one step's mean, by plain torch."""
    model, rng, loss = structural_copy(model), RngTracker(seed), loss or CrossEntropy()
    place_parameters(model, {}, {}, seed, torch.device("cpu"))
    key_dropout(model, rng)
    rng.samples = range(len(batch[1]))
    loss_sum, count = loss(call_model(model, batch[0]), batch[1])
    (loss_sum / count).backward()
    return model, (loss_sum / count).item()


def assert_parts(run_plan, rank, found, whole):
    """Every named tensor of a rank is its part of the whole."""
    coord = run_plan.mesh.coord(rank)
    for name, part in found.items():
        layout = run_plan.compute[name]
        expected = cut(whole[name], layout.pieces(coord), layout.local_shape(coord))
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-13)


# ---- shares


@given(st.integers(0, 40), st.sampled_from(["single", "dp1", "dp2", "dp3", "dp7", "dp2 tp2", "tp3"]))
@settings(max_examples=60)
def test_shares_cover_every_sample_once_and_in_order(num_samples, line):
    plan, _ = make_plan(Job(build_mlp(MLPConfig()), CrossEntropy()), Layout.parse(line))
    for tp in range(plan.mesh["tp"]):
        shares = [plan.batch_shard({"dp": dp, "tp": tp}).local_samples(num_samples) for dp in range(plan.mesh["dp"])]
        assert [sample for share in shares for sample in share] == list(range(num_samples))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9))
def test_microbatches_cover_a_share_once_and_in_order(start, size, num_microbatches):
    found = microbatch_samples(range(start, start + size), num_microbatches)
    assert len(found) == num_microbatches
    assert [sample for part in found for sample in part] == list(range(start, start + size))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("line", LINES)
def test_every_rank_gets_its_own_rows_of_every_tensor_of_a_batch(line):
    inputs, targets = {"tokens_BT": torch.arange(35).view(7, 5) % 19}, torch.arange(35).view(7, 5) % 19

    def work(run):
        (part,) = run.shard([(inputs, targets)])
        assert part.samples == run.share(7)
        assert torch.equal(part.inputs["tokens_BT"], inputs["tokens_BT"][part.samples.start : part.samples.stop])
        assert torch.equal(part.targets, targets[part.samples.start : part.samples.stop])
        return run.coord.get("dp", 0), list(part.samples), run.step(part).item()

    found = on_ranks(gpt(), line, work)
    by_share = {dp: samples for dp, samples, _ in found}
    assert sorted(sample for samples in by_share.values() for sample in samples) == list(range(7))
    _, loss = one_device(gpt(), (inputs, targets))
    assert [each for _, _, each in found] == pytest.approx([loss] * len(found), rel=1e-10)


def test_a_rank_may_load_no_samples_but_its_own():
    batch = tokens(7)

    def work(run):
        mine = run.share(7)
        part = run.part(batch[0][mine.start : mine.stop], batch[1][mine.start : mine.stop], len(batch[0]))
        return run.step(part).item()

    _, loss = one_device(gpt(), batch)
    assert on_ranks(gpt(), "dp3", work) == pytest.approx([loss] * 3, rel=1e-10)


def test_a_batch_whose_tensors_have_different_numbers_of_samples_is_refused():
    def work(run):
        with pytest.raises(LayoutError, match="different numbers of samples"):
            next(run.shard([(torch.zeros(4, 5), torch.zeros(3))]))

    on_ranks(gpt(), "dp2", work)


# ---- steps


@pytest.mark.parametrize("line", [*LINES, "dp1 bf16", "tp2 mb2 bf16", "dp2/fp32-sums bf16", "dp2/zero2 mb2 bf16"])
def test_a_step_starts_from_zero_gradients(line):
    batch = tokens(7)
    model = gpt(dropout=0.0)

    def work(run):
        (part,) = run.shard([batch])
        run.step(part)
        first = [p.grad.clone() for p in run.parameters.values()]
        run.step(part)
        return all(torch.equal(a, p.grad) for a, p in zip(first, run.parameters.values(), strict=True))

    assert all(on_ranks(model, line, work))


def test_dropout_changes_from_step_to_step_and_not_from_run_to_run():
    (batch,) = [tokens(6)]

    def work(run):
        (part,) = run.shard([batch])
        return [run.step(part).item() for _ in range(3)]

    one, again = on_ranks(gpt(dropout=0.5), "dp2", work), on_ranks(gpt(dropout=0.5), "dp2", work)
    assert one == again
    assert len(set(one[0])) == 3
    assert one[0] != on_ranks(gpt(dropout=0.5), "dp2", work, seed=1)[0]


def test_a_model_that_trains_in_eval_mode_is_told_that_its_dropout_is_off(caplog):
    def work(world, model):
        run = parallelize(model, "dp2", world, loss=CrossEntropy())
        for batch in run.shard([(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))] * 2):
            run.step(batch)

    for model, times in (
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)), 0),
        (nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2)).eval(), 0),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).eval(), 1),
    ):
        caplog.clear()
        launch(work, 2, model, ranks="threads")
        assert caplog.text.count("trains without its dropout: '0' is in eval mode; write run.model.train()") == times


class InNumPy(nn.Module):
    """Scales its scores by what NumPy computes of them: no meta tensor has values for it."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = (
            nn.GRU(3, 4, batch_first=True),
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        )

    def forward(self, x, lengths):
        scores = self.head(self.rows(x)[1][0])
        return scores * float(scores.detach().numpy().std(1).shape[0])


@pytest.mark.parametrize(("line", "times"), [("dp2", 1), ("mb2", 1), ("tp2", 0), ("single", 0)])
def test_a_layout_that_cuts_the_batch_says_that_a_forward_was_not_looked_at(line, times, caplog):
    def work(world, model):
        parallelize(model, line, world, example=(torch.ones(4, 5, 3), torch.tensor([5, 2, 3, 1])))

    launch(work, Layout.parse(line).num_ranks, InNumPy(), ranks="threads")
    told = [each for each in caplog.messages if "the forward of InNumPy cannot be recorded, so code that" in each]
    assert len(told) == times
    assert all(f"which {line} cuts, is not found; verify shows a difference. It raised TypeE" in each for each in told)


def test_a_batch_where_every_target_is_ignored_has_a_loss_and_gradients_of_0():
    inputs, targets = tokens(5)

    def work(run):
        loss = run.step(next(run.shard([(inputs, torch.full_like(targets, -100))])))
        return loss.item(), sum(p.grad.abs().sum().item() for p in run.model.parameters())

    for line in ("single", "dp2", "tp2", "dp2 tp2"):
        assert set(on_ranks(gpt(), line, work)) == {(0.0, 0.0)}


class Weighted(nn.Module):
    """Cross entropy whose classes count for a little each, and not the same."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.01, 0.1, 7, dtype=torch.float64))

    def forward(self, logits, targets):
        weight = self.weight.to(logits.dtype)
        return functional.cross_entropy(logits, targets, weight, reduction="sum"), weight[targets].sum()


@pytest.mark.parametrize("line", ["dp2", "tp2x2/2d", "pp2 mb2"])
def test_what_a_loss_counts_may_be_weights_that_are_less_than_one(line):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 7)).double()
    x, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 6, 3, 3, 1])
    expected = functional.cross_entropy(model(x), targets, Weighted().weight)

    def work(run):
        return run.step(next(run.shard([(x, targets)]))).item()

    for found in on_ranks(model, line, work, loss=Weighted()):
        assert found == pytest.approx(expected.item(), rel=1e-12)
    verdict = verify(model, line, [(x, targets)], loss=Weighted())
    assert verdict.equal, str(verdict)


def test_a_loss_that_is_no_pair_is_refused():
    class Mean(nn.Module):
        def forward(self, output, targets):
            return output.mean()

    def work(run):
        with pytest.raises(PlanError, match=r"given:   Tensor\n  allowed: a pair \(sum, count\)"):
            run.step(next(run.shard([tokens(4)])))

    on_ranks(gpt(), "dp2", work, loss=Mean())


# ---- the norm


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.sampled(100)
def test_clipping_is_that_of_torch_on_the_whole_model(line, max_norm):
    batch = tokens(7)
    whole, _ = one_device(gpt(), batch)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    def work(run):
        run.step(next(run.shard([batch])))
        with run.world.recorder.recording() as records:
            norm = run.clip_grad_norm_(max_norm)
        return run.plan, norm.item(), {n: p.grad for n, p in run.model.named_parameters()}, records

    for rank, (plan, norm, found, records) in enumerate(on_ranks(gpt(), line, work)):
        assert norm == pytest.approx(expected.item(), rel=1e-10)
        assert_parts(plan, rank, found, gradients)
        assert [(r.kind, r.axis, r.num_bytes, r.source) for r in records] == [("all_reduce", "world", 8, "clip")]


def test_the_norm_without_gradients_is_0():
    assert on_ranks(gpt(), "tp2", lambda run: run.clip_grad_norm_(1.0).item()) == [0.0, 0.0]


# ---- the optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_some_are_cut(kind):
    def work(run):
        with pytest.raises(PlanError, match=rf"given:   {kind.__name__} under tp2\n  allowed: optimizers that update"):
            run.optimizer(kind, lr=0.1)

    on_ranks(gpt(), "tp2", work)


def test_such_an_optimizer_may_be_used_where_every_rank_holds_whole_tensors():
    batch = tokens(7)

    def work(run):
        optimizer = run.optimizer(torch.optim.Adafactor, lr=0.1)
        run.step(next(run.shard([batch])))
        optimizer.step()
        return run.plan, {name: p.detach() for name, p in run.model.named_parameters()}

    model = gpt()
    found = on_ranks(structural_copy(gpt()), "dp2", work)
    whole, _ = one_device(model, batch)
    torch.optim.Adafactor(whole.parameters(), lr=0.1).step()
    for rank, (plan, parameters) in enumerate(found):
        assert_parts(plan, rank, parameters, {name: p.detach() for name, p in whole.named_parameters()})


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_the_optimizers_of_torch_that_are_not_tried_would_pass_the_trial(kind):
    switches = ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov")
    switched = {name: True for name in switches if name in inspect.signature(kind).parameters}
    numbers = {name: 0.4 for name in ("momentum", "weight_decay") if name in inspect.signature(kind).parameters}
    for options in ({"lr": 0.1}, {"lr": 0.02, **switched, **numbers}):
        assert _tried(kind, options, [{}, {"lr": 0.3}], flat=True, in_turn=False, whole=False)
        assert _tried(kind, options, [{}], flat=True, in_turn=True, whole=False)
        assert _tried(kind, options, [{}], flat=True, in_turn=False, whole=True)


def test_options_that_a_class_refuses_are_told_before_a_step():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        is_elementwise(torch.optim.AdamW, {"lr": -1.0})


STEPPED = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), STEPPED, ids=[kind.__name__ for kind, _ in STEPPED])
def test_steps_of_elementwise_optimizers_are_those_of_one_device(kind, options):
    assert is_elementwise(kind, options)
    batch = tokens(7)
    whole, _ = one_device(gpt(), batch)
    for p in whole.parameters():
        p.data = p.data.clone()
    kind(whole.parameters(), **options).step()
    expected = {name: p.detach() for name, p in whole.named_parameters()}

    def work(run):
        for p in run.model.parameters():
            p.data = p.data.clone()
        optimizer = run.optimizer(kind, **options)
        run.step(next(run.shard([batch])))
        optimizer.step()
        return run.plan, {name: p.detach() for name, p in run.model.named_parameters()}

    for rank, (plan, found) in enumerate(on_ranks(gpt(), "dp2 tp2", work)):
        coord = plan.mesh.coord(rank)
        for name, part in found.items():
            layout = plan.compute[name]
            theirs = cut(expected[name], layout.pieces(coord), layout.local_shape(coord))
            torch.testing.assert_close(part, theirs, rtol=1e-6, atol=1e-6)  # of gradients near 0 they keep the sign


class _ByHand(torch.optim.Optimizer):
    """Descends by what ``direction`` makes of a parameter's gradient."""

    def __init__(self, params, direction):
        super().__init__(params, {"direction": direction})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["direction"](p.grad))


@pytest.mark.parametrize(
    ("direction", "in_boxes", "in_ranges"),
    [
        (lambda g: g / (g.square().mean(-1, keepdim=True).sqrt() + 1), False, False),
        (lambda g: g / (g.square().mean(0, keepdim=True).sqrt() + 1), False, False),
        (lambda g: g * (2 if g.dim() > 1 else 1), True, False),
        (lambda g: g.sign(), True, True),
    ],
    ids=["looks at rows", "looks at columns", "looks at the number of dims", "looks at single elements"],
)
def test_an_optimizer_that_looks_at_more_than_a_rank_has_in_hand_is_refused(direction, in_boxes, in_ranges):
    options = {"direction": direction}
    assert is_elementwise(_ByHand, options, flat=False) == in_boxes
    assert is_elementwise(_ByHand, options) == in_ranges

    model = build_mlp(MLPConfig())

    def work(world, line):
        run = parallelize(model, line, world)
        try:
            run.optimizer(_ByHand, **options)
        except PlanError as refused:
            return "needs whole tensors" not in str(refused)
        return True

    assert launch(work, 2, "tp2", ranks="threads") == [in_boxes] * 2
    assert launch(work, 2, "dp2/zero1", ranks="threads") == [in_ranges] * 2


class _UnderConditions(torch.optim.Optimizer):
    """Steps as one of those that look at a whole tensor under conditions that few tensors and gradients meet."""

    def __init__(self, params, way, lr=0.01):
        super().__init__(params, {"way": way, "lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(g, 0.1)
                square = state.setdefault("square", torch.ones_like(p)).lerp_(g * g, 0.1)
                update = mean / square.sqrt()
                if group["way"] == "cautious":
                    agrees = (update * g > 0).to(g.dtype)
                    update = update * agrees / agrees.mean()
                elif group["way"] == "of large dims" and p.dim() == 2 and min(p.shape) >= 128:
                    update = g / (square.mean(1, keepdim=True) * square.mean(0) / square.mean()).sqrt()
                elif group["way"] == "clipped":
                    update = update / (g * g / square).mean().sqrt().clamp(min=2)
                elif group["way"] == "where orthogonal":
                    along = torch.cosine_similarity(g.flatten(), p.flatten(), dim=0).abs()
                    if along < 0.1 / p.numel() ** 0.5:
                        update = update - p * (p * update).sum() / (p * p).sum()
                elif group["way"] == "by former norms":
                    norm = state.setdefault("norm", g.norm()).lerp_(g.norm(), 0.1)
                    update = update * norm / g.norm() if norm > g.norm() else update
                p.sub_(update * group["lr"])


@pytest.mark.parametrize(
    "way", ["cautious", "of large dims", "clipped", "where orthogonal", "by former norms", "each element alone"]
)
def test_an_optimizer_that_looks_at_whole_tensors_under_conditions_is_refused(way):
    assert is_elementwise(_UnderConditions, {"way": way}) == (way == "each element alone")
    assert is_elementwise(_UnderConditions, {"way": way}, whole=True)


class _Overflows(torch.optim.Optimizer):
    """Computes numbers that are none, in each element alone."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad.exp().exp()).mul_(p - p)


def test_the_trial_of_optimizers_is_on_the_cpu_and_takes_numbers_that_overflow():
    _trial.cache_clear()
    with torch.device("meta"):
        assert {each.device.type for each in (_trial()[0], *_trial()[1])} == {"cpu"}
    assert is_elementwise(_Overflows, {})


class _Counted(torch.optim.SGD):
    made = 0

    def __init__(self, *args, **named):
        type(self).made += 1
        super().__init__(*args, **named)


def test_an_optimizer_is_tried_once_for_its_class_and_options():
    tries = []
    for options in ({"lr": 0.5}, {"lr": 0.5}, {"lr": 0.25}, {"lr": torch.tensor(0.5)}, {"lr": torch.tensor(0.5)}):
        before = _Counted.made
        assert is_elementwise(_Counted, options)
        tries.append(_Counted.made > before)
    assert tries == [True, False, True, True, True]  # what is not plain is not known again


class _ByNorm(torch.optim.Optimizer):
    """Descends by gradients over their norm: that of all of them, in groups that ask for it."""

    def __init__(self, params, over_all):
        super().__init__(params, {"over_all": over_all})

    @torch.no_grad()
    def step(self):
        norm = torch.stack([p.grad.square().sum() for p in self.param_groups[0]["params"]]).sum().sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (norm if group["over_all"] else 1))


@pytest.mark.parametrize("line", ["dp2/zero1", "tp2", "pp2 mb2"])
def test_an_optimizer_that_looks_at_all_parameters_together_is_refused_also_where_a_group_asks_for_it(line):
    def work(run):
        groups = [{"params": [p]} for p in run.parameters.values()]
        run.optimizer(_ByNorm, iter(groups), over_all=False)
        for listed, common in ((groups, True), ([*groups[:-1], {**groups[-1], "over_all": True}], False)):
            with pytest.raises(PlanError, match=r"or all of them|needs all tensors"):
                run.optimizer(_ByNorm, listed, over_all=common)

    on_ranks(build_mlp(MLPConfig()), line, work)


def test_groups_of_parameters_and_schedulers_work_as_torch_has_them():
    def work(run):
        named = dict(run.model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = run.optimizer(torch.optim.AdamW, groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        run.step(next(run.shard([tokens(4)])))
        optimizer.step()
        scheduler.step()
        return [group["lr"] for group in optimizer.param_groups], len(optimizer.param_groups)

    assert on_ranks(gpt(), "dp2 tp2", work) == [([0.05, 0.05], 2)] * 4


# ---- parameters that are not trained


@pytest.mark.parametrize("line", LINES)
def test_a_frozen_parameter_stays_and_is_not_sent(line):
    frozen = ("token.weight", "blocks.0.mlp.up.weight", "blocks.1.attention.k.weight", "norm.weight")
    batch = tokens(7)
    model = gpt()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    whole, _ = one_device(model, batch)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def work(run):
        for p in run.model.parameters():
            p.data = p.data.clone()
        optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
        assert len(optimizer.param_groups[0]["params"]) == len(values) - len(frozen)
        run.step(next(run.shard([batch])))
        optimizer.step()
        named = dict(run.model.named_parameters())
        return run.plan, {n: p.grad for n, p in named.items()}, {n: p.detach() for n, p in named.items()}

    for rank, (plan, found, after) in enumerate(on_ranks(model, line, work)):
        assert {name for name, gradient in found.items() if gradient is None} == set(frozen)
        assert_parts(plan, rank, {n: g for n, g in found.items() if g is not None}, gradients)
        assert_parts(plan, rank, {name: after[name] for name in frozen}, values)


# ---- evaluation and prediction


@pytest.mark.parametrize("line", LINES)
def test_evaluation_is_that_of_one_device_and_keeps_no_gradients(line):
    batch = tokens(7)
    model = gpt(dropout=0.5)
    loss_sum, count = CrossEntropy()(model.eval()(batch[0]), batch[1])
    model.train()

    def work(run):
        loss = run.evaluate(next(run.shard([batch])))
        assert run.model.training
        assert all(p.grad is None for p in run.model.parameters())
        assert not loss.requires_grad
        return loss.item()

    expected = (loss_sum / count).item()
    assert on_ranks(model, line, work) == pytest.approx([expected] * Layout.parse(line).num_ranks, rel=1e-10)


@pytest.mark.parametrize("line", LINES)
def test_every_rank_predicts_the_whole_output(line):
    inputs, _ = tokens(3)
    model = gpt(dropout=0.5)
    expected = model.eval()(inputs).detach()
    model.train()
    for found in on_ranks(model, line, lambda run: run.predict(inputs)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_layer_in_eval_stays_so_when_a_run_has_evaluated_and_predicted():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
    model[1].eval()

    def work(run):
        (batch,) = run.shard([(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))])
        seen = []
        for look in (lambda: run.evaluate(batch), lambda: run.predict(torch.ones(4, 3))):
            look()
            seen += [layer.training for layer in run.model]
        return seen

    assert on_ranks(model, "dp2", work) == [[True, False, True, True] * 2] * 2


def test_evaluation_between_steps_changes_no_step():
    batches = [tokens(5, 0), tokens(5, 1)]

    def work(run, between):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        for p in run.model.parameters():
            p.data = p.data.clone()
        losses = []
        for part in run.shard(batches):
            if between:
                run.evaluate(part)
                run.predict(batches[0][0])
            losses.append(run.step(part).item())
            optimizer.step()
        return losses

    with_it, without = (on_ranks(gpt(), "dp2 tp2", lambda run, b=b: work(run, b)) for b in (True, False))
    assert with_it == without


# ---- a loop of a person's own that is told to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_loop_that_asks_whether_to_stop_ends_at_a_signal_on_all_ranks_after_the_same_step(number):
    before, model = signal.signal(number, signal.default_int_handler), nn.Linear(2, 2)

    def work(world):
        run = parallelize(model, "dp3", world)
        steps = 0
        while not run.stop_requested():
            steps += 1
            if steps == 3 and world.rank == 1:
                while signal.getsignal(number) is signal.default_int_handler:  # until the main thread has its own
                    time.sleep(0.01)
                os.kill(os.getpid(), number)
        return steps

    try:
        assert len({*launch(work, 3, ranks="threads")}) == 1
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


class WithExtra(nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("line", ["dp2", "pp2"])
def test_extra_state_that_no_file_has_is_warned_of(line, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), WithExtra(4, 4))

    def work(world):
        run = parallelize(model, line, world)
        save(tmp_path, run)
        run.state_dict()
        save_weights(run, tmp_path / "x.pt")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch(work, 2, ranks="threads")
    assert sum("the extra state of a module is left out" in str(each.message) for each in caught) == 3


class Centered(nn.Module):
    """A loss that follows the mean of the outputs, as that of DINO does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, output, targets):
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * output.mean(0)
        return ((output - self.center - targets) * self.scale).square().sum(), targets.numel()


class Caches(nn.Module):
    """A loss that makes a mask when it is called, and its constants anew in the dtype of the outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, output, targets):
        self.scale = self.scale.to(output)
        if self.mask is None:
            self.mask = torch.ones_like(output)
        return ((output - targets) * self.scale * self.mask).square().sum(), targets.numel()


@pytest.mark.parametrize(("loss", "extra"), [(Caches, None), (Centered, {"center": 1})])
def test_buffers_that_hold_the_same_or_are_kept_by_the_user_are_not_warned_of(loss, extra, tmp_path):
    model = nn.Linear(4, 4)

    def work(world):
        run = parallelize(model, "single", world, loss=loss())
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for batch in run.shard([(torch.ones(2, 4), torch.ones(2, 4))] * 2):
            run.step(batch, update=optimizer)
        save(tmp_path, run, optimizer, extra=extra)

    with warnings.catch_warnings(action="error"):
        launch(work, 1, ranks="threads")


@pytest.mark.parametrize("line", ["single", "tp2", "pp2"])
def test_buffers_that_a_loss_changes_are_warned_of_where_they_are_saved(line, tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))

    def work(world):
        run = parallelize(model, line, world, loss=Centered())
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        save(tmp_path / "unchanged", run, optimizer)
        for batch in run.shard([(torch.ones(2, 4), torch.ones(2, 4))]):
            run.step(batch, update=optimizer)
        save(tmp_path / "changed", run, optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch(work, line, ranks="threads")
    (told,) = [text for each in caught if "what a loss changes" in (text := str(each.message))]
    assert "whose buffers center were changed" in told
