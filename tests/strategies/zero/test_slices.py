"""ZeRO: what a rank sends, what it holds and when, and how optimizers step shards."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.models import GPTConfig, MLPConfig, build_mlp
from shardwright.models.gpt import GPT
from shardwright.models.losses import MeanSquaredError
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.zero import flat_parameter as flat
from shardwright.strategies.zero.prefetch import Prefetcher, ShardedGroup, UnshardHold, UnshardStatus
from shardwright.strategies.zero.resharded import ShardedParameter

WIDTHS = (6, 8, 8, 8, 8, 5)


def gpt(**changes):
    settings = {"num_layers": 3, "width": 12, "num_heads": 2, "vocabulary": 20, "max_tokens": 8}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**settings, **changes})).double()


def mlp():
    with torch.device("meta"):
        return build_mlp(MLPConfig(widths=WIDTHS)).double()


def tokens(batch=6):
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(20, (batch, 7), generator=draw)
    return drawn[:, :-1], drawn[:, 1:]


def numbers(batch=6):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(batch, 6, generator=draw, dtype=torch.float64), torch.randint(5, (batch,), generator=draw)


def on_threads(work, line):
    return launch(work, Layout.parse(line), ranks="threads")


# ---- traffic


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("stage", "num_microbatches", "times"),
    [(1, 1, 2), (1, 3, 2), (2, 1, 2), (2, 3, 4), (3, 1, 3), (3, 3, 9)],
)
@pytest.mark.sampled(100)
def test_a_step_moves_2_and_m_plus_1_and_3m_times_the_parameters(stage, num_microbatches, times, size, tied):
    line = f"dp{size}/zero{stage}/bucket:0 mb{num_microbatches}"
    num_bytes = sum(p.numel() for p in gpt(tied=tied).parameters()) * 8

    def work(world):
        run = parallelize(gpt(tied=tied), line, world)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        (batch,) = run.shard([tokens()])
        sent = []
        for _ in range(3):
            with world.recorder.recording() as records:
                run.step(batch)
                optimizer.step()
            sent.append(sum(r.num_bytes for r in records if r.axis == "dp" and r.source == "zero"))
        return sent

    for sent in on_threads(work, line):
        assert sent == [times * num_bytes] * 3


def test_a_param_group_is_unsharded_in_one_all_gather_and_reduced_in_one_reduce_scatter():
    def work(world):
        run = parallelize(mlp(), "dp3/zero3/bucket:0", world)
        (batch,) = run.shard([numbers()])
        with world.recorder.recording() as records:
            run.step(batch)
        return Counter(r.kind for r in records if r.source == "zero")

    num_layers = len(WIDTHS) - 1
    for found in on_threads(work, "dp3/zero3"):
        assert found == {"all_gather": 2 * num_layers, "reduce_scatter": num_layers}


def test_replicas_sum_the_gradients_of_their_shards_once_a_step():
    line = "dp2x3/zero3/bucket:0 mb2"
    num_elements = sum(p.numel() for p in mlp().parameters())

    def work(world):
        run = parallelize(mlp(), line, world)
        (batch,) = run.shard([numbers(24)])
        with world.recorder.recording() as records:
            run.step(batch)
        return [r.num_bytes for r in records if r.axis == "replica" and r.kind == "all_reduce"], run.coord

    found = on_threads(work, line)
    for replica in range(2):
        assert sum(sum(sent) for sent, coord in found if coord["replica"] == replica) == num_elements * 8


REPLICAS = [("dp2x2/zero1/bucket:0 mb2", "replica"), ("dp2x2/zero3/bucket:0 mb2", "replica")]


@pytest.mark.parametrize(("line", "axis"), [*REPLICAS, ("dp2/zero2/bucket:0 tp2/sp", "tp")])
def test_shards_are_summed_over_other_axes_while_the_backward_goes_on(line, axis):
    def work(world):
        run = parallelize(gpt(), line, world)
        (batch,) = run.shard([tokens(8)])
        with world.recorder.recording() as records:
            run.step(batch)
        kinds = [(record.kind, record.axis) for record in records if record.source not in ("core", "loss")]
        own = [place for place, kind in enumerate(kinds) if kind == ("reduce_scatter", "dp")]
        sums = [place for place, kind in enumerate(kinds) if kind == ("all_reduce", axis) and place > own[0]]
        return sums[0] < own[-1], sums[-1] > own[-1]

    assert on_threads(work, line) == [(True, True)] * 4


# ---- memory


@pytest.mark.parametrize("batch", [2, 5])
def test_between_steps_a_rank_of_stage_3_holds_its_shards_and_no_more(batch):
    def work(world):
        run = parallelize(gpt(), "dp4/zero3/bucket:0", world)
        optimizer = run.optimizer(torch.optim.AdamW)
        run.step(next(run.shard([tokens(batch)])))
        optimizer.step()
        run.predict(tokens(batch)[0])
        shown = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in run.model.parameters()}
        state = sum(s["exp_avg"].numel() for s in optimizer.state.values())
        return sum(shown.values()), sum(p.numel() for p in run.parameters.values()), state

    found = on_threads(work, "dp4/zero3")
    total = sum(p.numel() for p in gpt().parameters())
    assert sum(size for _, size, _ in found) == sum(state for _, _, state in found) == total
    for shown, size, _ in found:
        assert shown <= 8 * 6  # one number for each param group
        assert abs(size - total / 4) < 6


@pytest.mark.parametrize(
    ("line", "per_parameter"),
    [
        ("dp4/zero1", 4),
        ("dp4/zero2", 4),
        ("dp4/zero3", 1),
        ("dp4/zero1 bf16", 3),
        ("dp4/zero3 bf16", 1),
        ("dp2 bf16", 6),
    ],
)
def test_a_plan_says_what_parameters_take_between_steps(line, per_parameter):
    with torch.device("meta"):
        model = build_mlp(MLPConfig(widths=WIDTHS))
    total = sum(p.numel() for p in model.parameters())
    plan, _ = make_plan(Job(model, nn.Identity()), Layout.parse(line))
    for coord in plan.mesh.coords():
        assert sum(plan.parameter_bytes(name, coord) for name in plan.state) == pytest.approx(
            per_parameter * total, abs=4
        )


@pytest.fixture
def alive(monkeypatch):
    """By rank, the most unsharded buffers of flat parameters that were allocated at once."""
    known, most = defaultdict(list), Counter()
    unshard = flat.FlatParameter.unshard

    def counted(self):
        unshard(self)
        here = threading.get_ident()
        known[here] = [ref for ref in known[here] if not ref.expired()]
        known[here].append(StorageWeakRef(self.unsharded.untyped_storage()))
        most[here] = max(most[here], len(known[here]))

    monkeypatch.setattr(flat.FlatParameter, "unshard", counted)
    return most


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_no_more_param_groups_are_unsharded_at_once_than_one_and_those_prefetched(alive, ahead, num_microbatches):
    line = f"dp2/zero3/ahead:{ahead}/bucket:0 mb{num_microbatches}"

    def work(world):
        run = parallelize(gpt(tied=False), line, world)
        optimizer = run.optimizer(torch.optim.AdamW)
        for batch in run.shard([tokens()] * 2):
            run.step(batch)
            optimizer.step()
            run.evaluate(batch)

    on_threads(work, line)
    assert set(alive.values()) == {ahead + 1}


def test_a_param_group_that_shares_a_parameter_stays_unsharded_during_an_action_and_no_longer(alive):
    def work(world):
        run = parallelize(gpt(tied=True), "dp2/zero3/bucket:0", world)
        for batch in run.shard([tokens()] * 2):
            run.step(batch)

    on_threads(work, "dp2/zero3")
    assert set(alive.values()) == {3}  # one, one prefetched, and the table that the head shares


def test_the_longest_hold_of_a_group_counts_and_the_end_of_a_shorter_one_leaves_it():
    group = ShardedGroup("group", ())
    prefetcher = Prefetcher([group], num_prefetch=0, reshard_after_use=True, chunks={})
    prefetcher.ensure_unsharded(group, UnshardHold.UNTIL_ACTION_ENDS)
    prefetcher.ensure_unsharded(group, UnshardHold.UNTIL_NEXT_MODULE)
    prefetcher.on_module_call()
    assert (group.hold, group.state) == (UnshardHold.UNTIL_ACTION_ENDS, UnshardStatus.UNSHARDED)
    prefetcher.end_action()
    assert (group.hold, group.state) == (UnshardHold.NONE, UnshardStatus.SHARDED)
    prefetcher.ensure_unsharded(group, UnshardHold.EVERY_ACTION)
    prefetcher.end_action()
    assert (group.hold, group.state) == (UnshardHold.EVERY_ACTION, UnshardStatus.SHARDED)


# ---- overlap


def test_the_next_param_group_is_prefetched_while_one_computes_forward_and_backward(monkeypatch):
    seen = defaultdict(list)
    unshard, reduce = flat.FlatParameter.unshard, flat.FlatParameter.reduce_scatter

    def named(self):
        return int(next(iter(self.parameters)).removeprefix("linear").partition(".")[0])

    def noted(word, plain):
        def call(self):
            seen[threading.get_ident()].append((word, named(self)))
            return plain(self)

        return call

    monkeypatch.setattr(flat.FlatParameter, "unshard", noted("unshard", unshard))
    monkeypatch.setattr(flat.FlatParameter, "reduce_scatter", noted("reduce", reduce))

    def work(world):
        run = parallelize(mlp(), "dp2/zero3/bucket:0", world)
        here = seen[threading.get_ident()]
        for number in range(1, len(WIDTHS)):
            layer = run.model.get_submodule(f"linear{number}")

            def note_pass(module, args, output, n=number):
                here.append(("forward", n))
                output.register_hook(lambda _: here.append(("backward", n)))

            layer.register_forward_hook(note_pass)
        for batch in run.shard([numbers()] * 2):
            here.clear()
            run.step(batch)
        return list(here)

    for found in on_threads(work, "dp2/zero3"):
        place = {each: n for n, each in reversed(list(enumerate(found)))}
        again = dict(map(reversed, enumerate(found)))  # the last of equal ones: unshards of the backward
        for group in range(1, 5):
            assert place["unshard", group + 1] < place["forward", group]
        for group in range(2, 5):
            assert again["unshard", group - 1] < place["reduce", group]  # which ends the backward of the group
        for group in range(2, 6):
            assert place["reduce", group] < place["backward", group - 1]


# ---- optimizers


def trained(line, kind, grouped, clip=None):
    def work(world):
        run = parallelize(gpt(), line, world)
        groups = None
        if grouped:
            decayed = [p for name, p in run.parameters.items() if name.endswith("weight")]
            others = [p for name, p in run.parameters.items() if not name.endswith("weight")]
            groups = [{"params": decayed, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
        optimizer = run.optimizer(kind, groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        norms, losses = [], []
        for batch in run.shard([tokens()] * 4):
            losses.append(run.step(batch).item())
            if clip is not None:
                norms.append(run.clip_grad_norm_(clip).item())
            optimizer.step()
            scheduler.step()
        return losses, norms

    return on_threads(work, line)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_groups_with_their_own_rate_and_decay_and_clipping_train_as_one_device_does(stage, kind):
    expected = trained("single", kind, grouped=True, clip=0.5)
    found = trained(f"dp3/zero{stage}/bucket:0", kind, grouped=True, clip=0.5)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert expected[0][0] != expected[0][1]


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
def test_an_optimizer_that_needs_whole_tensors_is_refused(kind):
    def work(world):
        run = parallelize(mlp(), "dp2/zero1", world)
        with pytest.raises(PlanError, match=f"{kind} needs whole tensors") as refusal:
            run.optimizer(getattr(torch.optim, kind), lr=0.1)
        return str(refusal.value)

    (text,) = set(on_threads(work, "dp2/zero1"))
    assert "is not whole on every rank" in text
    assert "fix:     use AdamW, or a layout that shards no parameter" in text


def test_a_parameter_that_no_forward_reaches_stays_as_it_is():
    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 5).double(), nn.Linear(6, 5).double()

        def forward(self, x):
            return self.used(x)

    model = Extra()

    def work(world, line):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        before = {name: p.detach().clone() for name, p in run.parameters.items()}
        run.step(next(run.shard([numbers()])))
        optimizer.step()
        return {name for name, p in run.parameters.items() if p.numel() and not torch.equal(p, before[name])}

    for line in ("dp2/zero1/bucket:0", "dp2/zero3/bucket:0"):
        found = launch(work, Layout.parse(line), line, ranks="threads")
        assert set().union(*found) == {"used.weight", "used.bias"}


# ---- reading


def test_a_resharded_weight_cannot_be_read_and_one_read_in_a_forward_is_unsharded_first():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)

        def forward(self, x):
            hidden = self.down(self.up(x))
            return nn.functional.linear(hidden, self.up.weight) + self.up.weight.sum()

    torch.manual_seed(0)
    model = Tied().double()

    def work(world, line):
        run = parallelize(model, line, world)
        dropped = [isinstance(p, ShardedParameter) for p in run.model.parameters()]
        losses = [run.step(batch).item() for batch in run.shard([numbers()] * 2)]
        return dropped, losses

    line = "dp2/zero3/bucket:0"
    expected = launch(work, Layout.parse("single"), "single", ranks="threads")[0][1]
    for dropped, losses in launch(work, Layout.parse(line), line, ranks="threads"):
        assert all(dropped)
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_forward_that_lists_all_parameters_has_them_unsharded_until_it_ends():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x):
            known = dict(self.named_parameters())
            hidden = torch.tanh(nn.functional.linear(x, known["up.weight"], known["up.bias"]))
            decay = sum(p.square().sum() for p in self.parameters())
            return nn.functional.linear(hidden, known["down.weight"], self.down.bias) * (1 + decay)

    assert verify(Listed(), "dp2/zero3/bucket:0/ahead:0", [numbers()] * 2).equal


def test_a_batch_norm_that_runs_again_by_itself_has_its_weights():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5))
    assert verify(model, "dp2/zero3/bucket:0 recompute:full", [numbers()] * 2).equal


# ---- bad input


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("dp2/zero1/zero3", "write dp2/zero3"),
        ("dp2/zero3:x", "write dp2/zero3"),
        ("dp2/ahead:1", "write dp2/zero1"),
        ("dp2/zero3/ahead", "write ahead:1"),
        ("dp2/zero3/ahead:many", "write ahead:1"),
    ],
)
def test_what_zero_cannot_do_is_refused(line, fix):
    with pytest.raises(LayoutError, match=fix):
        make_plan(Job(mlp(), nn.Identity()), Layout.parse(line))


@pytest.mark.parametrize("line", ["bf16", "fp16", "dp1/zero1", "dp1/zero3", "dp1/zero2/offload:disk"])
def test_a_table_that_rescales_rows_is_refused_where_these_would_not_reach_the_optimizers_parameters(line):
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 5))
    with pytest.raises(PlanError, match="the table '0' rescales") as refusal:
        make_plan(Job(model, nn.Identity()), Layout.parse(line))
    assert "fix:     leave out max_norm, or bf16, fp16 and zero" in str(refusal.value)
    make_plan(Job(model, nn.Identity()), Layout.parse("single"))


def test_a_frozen_parameter_of_integers_is_resharded_too():
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.arange(36, dtype=torch.int8).view(6, 6), requires_grad=False)
            self.layer = nn.Linear(6, 5)

        def forward(self, x):
            return self.layer(x @ self.codes.to(x.dtype))

    assert verify(Coded(), "dp2/zero3/bucket:0", [numbers()] * 2).equal


# ---- optimizers


@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero2/bucket:0 mb2", "dp2/zero1 bf16", "dp2 bf16"])
def test_an_optimizer_made_by_hand_over_the_runs_parameters_trains_as_one_made_by_the_run(line):
    def work(world, is_by_hand):
        run = parallelize(mlp().float(), line, world)
        inputs, targets = numbers()
        kind = torch.optim.SGD
        optimizer = kind(run.parameters.values(), 0.5) if is_by_hand else run.optimizer(kind, lr=0.5)
        losses = []
        for batch in run.shard([(inputs.float(), targets)] * 2):
            run.step(batch)
            before = run.evaluate(batch)
            optimizer.step()
            losses += [before.item(), run.evaluate(batch).item()]
        return losses

    found, expected = (launch(work, 2, is_by_hand, ranks="threads")[0] for is_by_hand in (True, False))
    assert found == expected
    assert expected[0] > expected[1] == expected[2] > expected[3]


@pytest.mark.parametrize("line", ["bf16", "dp2 bf16", "dp2/zero1 bf16", "dp2/zero3"])
def test_what_is_written_by_hand_through_data_is_computed_with(line):
    def work(world):
        run = parallelize(mlp().float(), line, world)
        inputs, targets = numbers()
        losses = []
        for batch in run.shard([(inputs.float(), targets)] * 2):
            run.step(batch)
            losses.append(run.evaluate(batch).item())
            for parameter in run.parameters.values():
                parameter.data.add_(parameter.grad, alpha=-0.5)
            losses.append(run.evaluate(batch).item())
        return losses

    found = on_threads(work, line)[0]
    assert found[0] > found[1] == found[2] > found[3]


@pytest.mark.parametrize("line", ["dp2/zero3", "dp2 bf16"])
def test_an_optimizer_over_the_models_unsharded_parameters_is_refused(line):
    def work(world):
        run = parallelize(mlp().float(), line, world)
        with pytest.raises(PlanError, match=r"fix: .*run\.parameters"):
            run.optimizer(torch.optim.AdamW, [{"params": list(run.model.parameters())}], lr=0.1)
        run.optimizer(torch.optim.AdamW, iter([run.parameters["linear1.bias"]]), lr=0.1)

    launch(work, 2, ranks="threads")


class ReadsTwo(nn.Module):
    """One product of two layers' weights, which are in different param groups."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x @ (self.layers[0].weight @ self.layers[3].weight)


@pytest.mark.parametrize("line", ["dp2/zero3/bucket:0/ahead:0", "pp2 mb2 dp2/zero3/bucket:0"])
def test_one_expression_may_read_parameters_of_several_param_groups(line):
    verdict = verify(ReadsTwo(), line, [(torch.randn(4, 6), torch.randint(6, (4,)))] * 2)
    assert verdict.equal, str(verdict)


class Complex(nn.Module):
    """A parameter that is read as complex numbers, as in state space models."""

    def __init__(self, form):
        super().__init__()
        self.form, self.first, self.last = form, nn.Linear(8, 8), nn.Linear(8, 8)
        self.numbers, self.shift = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        numbers = torch.view_as_complex(self.numbers)
        if self.form == "conjugated":
            numbers = numbers.conj()
        elif self.form == "negated":
            return self.last(self.first(x) * numbers.conj().imag * numbers.real)
        return self.last(self.first(x) * (numbers**2 * numbers.abs()).imag + self.shift.sum())


@pytest.mark.parametrize("line", ["dp2/zero3", "dp3/zero3/bucket:0", "dp2/zero3 tp2", "pp2/1f1b mb2 dp2/zero3"])
@pytest.mark.parametrize("form", ["plain", "conjugated", "negated"])
def test_what_autograd_saves_of_a_parameter_may_be_of_another_dtype(form, line):
    torch.manual_seed(0)
    batch = torch.randn(12, 8), torch.randn(12, 8)
    verdict = verify(nn.Sequential(Complex(form), Complex(form)), line, [batch, batch], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
