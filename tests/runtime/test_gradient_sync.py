"""Gradient sync, derived from the layout of each use of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.comm.autograd import cut_to_whole, whole_to_cut
from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models import MLPConfig, build_mlp
from shardwright.parallelize import parallelize
from shardwright.plan.plan import Shard, Spec
from shardwright.verify import verify


class Tied(nn.Module):
    """Two layers with one weight, each with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


ROWS = [3, 2]
BATCH = (torch.randn(5, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1, 4, 2]))


@dataclass(frozen=True)
class SomeRowsEach:
    """Each of two ranks computes some rows of the named modules' input; the outputs are gathered."""

    modules: tuple[str, ...]
    layouts: Mapping[str, Spec] = field(default_factory=lambda: {"x": {"tp": Shard(0)}, "dy": {"tp": Shard(0)}})
    name = "some_rows_each"
    axis = "tp"

    def place(self, job, plan):
        for module in self.modules:
            plan = plan.use(module, **self.layouts)
        return plan

    def apply(self, job, axes, plan):
        for name in self.modules:
            module = job.model.get_submodule(name)
            module.register_forward_pre_hook(lambda _, args: (whole_to_cut(args[0], axes["tp"], 0, ROWS),))
            module.register_forward_hook(lambda _, args, y: cut_to_whole(y, axes["tp"], 0, ROWS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modules", [("one",), ("two",), ("one", "two")])
def test_uses_that_disagree_about_one_parameter_are_summed_once(modules):
    """Where one use gives a term and the other the whole, one rank alone contributes the whole."""
    verdict = verify(Tied(), "tp2", [BATCH], strategies=[SomeRowsEach(modules)])
    assert verdict.equal, str(verdict)


def test_a_use_that_does_not_say_it_is_cut_is_caught():
    assert not verify(Tied(), "tp2", [BATCH], strategies=[SomeRowsEach(("one",), layouts={})]).equal


def test_a_use_that_says_it_is_cut_and_is_not_is_caught():
    class AllRows(SomeRowsEach):
        def apply(self, job, axes, plan):
            return None

    assert not verify(Tied(), "tp2", [BATCH], strategies=[AllRows(("two",))]).equal


def test_only_what_is_partial_is_summed():
    model = Tied()

    def work(world):
        run = parallelize(model, "tp2", world, strategies=[SomeRowsEach(("one",))])
        with world.recorder.recording() as records:
            run.step(next(run.shard([BATCH])))
        return [(r.kind, r.num_bytes) for r in records if r.kind == "all_reduce"]

    assert launch(work, 2, ranks="threads") == [[("all_reduce", 4 * (25 + 5))]] * 2  # the other bias is whole


# ---- param groups


def on_ranks(model, line, work):
    """``work(run)`` on every rank."""
    layout = Layout.parse(line)
    return launch(lambda world: work(parallelize(model, line, world, check_every=0)), layout, ranks="threads")


def test_a_parameter_that_no_rank_uses_has_no_gradient_as_on_one_device():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.used(x)

    def work(run):
        run.step(next(run.shard([(torch.ones(5, 3), torch.zeros(5, dtype=torch.int64))])))
        return [p.grad is not None for p in run.model.parameters()]

    for line in ("single", "dp2", "dp2/bucket:0", "dp3 mb2"):
        assert set(map(tuple, on_ranks(Half(), line, work))) == {(True, True, False, False)}
    batch = (torch.ones(5, 3), torch.zeros(5, dtype=torch.int64))
    assert verify(Half().to("meta"), "dp2", [batch, batch]).equal  # nor does weight decay reach it


def test_param_groups_are_summed_while_backward_goes_on_and_once_each():
    model = build_mlp(MLPConfig(widths=(4, 6, 6, 3)))
    batch = (torch.ones(6, 4), torch.zeros(6, dtype=torch.int64))

    def work(run):
        with run.world.recorder.recording() as records:
            run.step(next(run.shard([batch])))
        return [(r.source, r.num_bytes) for r in records]

    sizes = [4 * (6 * 3 + 3), 4 * (6 * 6 + 6), 4 * (6 * 4 + 6)]  # from the last layer to the first
    expected = [("data_parallel", num_bytes) for num_bytes in sizes] + [("loss", 16)]
    for mb in ("", " mb3"):
        assert on_ranks(model, f"dp2/bucket:0{mb}", work) == [expected] * 2
    assert on_ranks(model, "dp2", work) == [[("data_parallel", sum(sizes)), ("loss", 16)]] * 2


class RunsAgain(torch.autograd.Function):
    """Runs code again in its backward, as a checkpoint does, and says so under no name that is known."""

    @staticmethod
    def forward(ctx, code, x):
        ctx.code, ctx.x = code, x
        return code(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.code(x), dy)
        return None, x.grad


class CalledThrice(nn.Module):
    """One layer, called three times, each recomputed by a backward of its own."""

    def __init__(self, call=lambda code, x: checkpoint(code, x, use_reentrant=True)):
        super().__init__()
        self.again, self.call = nn.Linear(5, 5), call

    def forward(self, x):
        x = x.detach().requires_grad_()  # or else torch computes nothing again
        for _ in range(3):
            x = self.call(self.again, torch.tanh(x))
        return x


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "dp2/zero1 mb2"])
def test_a_layer_that_reentrant_checkpoints_run_again_has_one_gradient(line):
    verdict = verify(CalledThrice(), line, [BATCH] * 2)
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore:the backward of 'RunsAgain' adds a term")
@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_gradient_that_comes_after_its_param_group_was_summed_is_refused_by_name(line):
    model = CalledThrice(RunsAgain.apply)

    def work(world):
        run = parallelize(model, line, world, check_every=0)
        with pytest.raises(PlanError, match=r"'again\.\w+' gets another gradient(.*\n)*.*use torch.utils.checkpoint"):
            run.step(next(run.shard([BATCH])))

    launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.filterwarnings("ignore:the backward of 'RunsAgain' adds a term")
def test_a_gradient_in_several_backwards_is_whole_where_nothing_is_sent():
    assert verify(CalledThrice(RunsAgain.apply), "mb2", [BATCH]).equal
