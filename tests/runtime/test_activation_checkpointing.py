"""Checkpointed blocks: equal to one device, with the stated traffic, and refused with clear errors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from contract import cases
from contract.cases import CASES, CONVNET, DEEP, GPT2, check_equal, check_refused, check_traffic
from shardwright import launch, parallelize, verify
from shardwright.analysis.on_meta.operator_results import _results
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.plan.recompute import recomputed_blocks

NAMED = {case.name: case for case in CASES}

EQUAL = [
    ("recompute:selective", "gpt2 partly frozen"),
    ("dp2 mb3 recompute:full", "gpt2 apart"),
    ("dp2 tp2/sp recompute:selective", "gpt2 tied"),
    ("tp2x2/2d recompute:full", "gpt2 tied"),
    ("tp2x2/2d/regather recompute:selective", "gpt2 tied"),
    ("tp2x2x2/3d recompute:full", "llama grouped heads"),
    ("tp2/seq recompute:full", "gpt2 tied"),
    ("pp2/zb-h1 mb3 recompute:full", "gpt2 apart"),
    ("pp2 mb3 tp2/sp recompute:selective", "llama one kv head"),
    ("tp2/spatial recompute:full", "convnet"),
    ("tp2 recompute:selective", "convnet"),
    ("dp2 recompute:full", "deep mlp"),
]


@pytest.mark.parametrize(("line", "name"), EQUAL)
@pytest.mark.sampled(100)
def test_what_is_computed_again_is_that_of_one_device_and_sends_what_is_stated(line, name):
    check_equal(line, NAMED[name])
    check_traffic(line, NAMED[name])


class Blocks(cases.Blocks):
    def __init__(self, make, num=2):
        super().__init__(make, num, num_in=6)


def wide():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 8), nn.Tanh())


def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(8, 2, 12, dropout=0.2, batch_first=True)


def batch(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, 6, generator=generator), torch.randint(5, shape, generator=generator)


class Doubled(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def doubled():
    return nn.Sequential(nn.Linear(8, 8), Doubled(), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8))


class Appends(nn.Module):
    """Gives its layers a list to which it adds what they return, as dense networks do."""

    class Layer(nn.Linear):
        def forward(self, before):
            return super().forward(torch.stack(before).sum(0)).tanh()

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(self.Layer(8, 8) for _ in range(3))

    def forward(self, x):
        before = [self.first(x)]
        for block in self.blocks:
            before.append(block(before))
        return self.last(before[-1])


@pytest.mark.parametrize("line", ["recompute:full", "dp2/zero3 recompute:full", "tp2 recompute:full"])
def test_a_block_is_computed_again_with_the_list_that_it_was_given(line):
    torch.manual_seed(0)
    verdict = verify(Appends(), line, [batch(5)])
    assert verdict.equal, str(verdict)


MADE = [("dp2", wide, (5,)), ("tp2", wide, (5,)), ("dp2", doubled, (5,)), ("dp2", normed, (6,))]
MADE += [("dp2 tp2", normed, (6,)), ("tp2", Encoder, (3, 4))]
MADE += [("pp2/1f1b mb2", wide, (5,)), ("pp2/1f1b mb2 dp2/zero3 tp2", doubled, (8,)), ("pp4 mb2", wide, (5,))]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("word", ["full", "selective"])
@pytest.mark.parametrize(("line", "make", "shape"), MADE)
def test_blocks_that_overwrite_drop_or_keep_statistics_come_out_right(word, line, make, shape):
    verdict = verify(Blocks(make), f"{line} recompute:{word}", [batch(*shape), batch(*shape)])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["tp2 recompute:selective", "tp2 recompute:full", "tp2/sp recompute:selective"])
def test_what_plans_a_call_in_the_first_step_is_not_kept_as_the_call_is(line):
    _results.cache_clear()  # as in a new process, where the call's results on the meta device are not known yet
    verdict = verify(Blocks(Encoder), line, [batch(3, 4), batch(3, 4)])
    assert verdict.equal, str(verdict)


class SharedParts(nn.Module):
    """Blocks without a forward, of which two hold one layer."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.ModuleDict({"shared": shared, "own": nn.Linear(6, 6)}) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["own"](block["shared"](x).tanh())
        return x


def test_blocks_without_a_forward_that_share_a_layer_are_recomputed():
    shapes = torch.randn(4, 6), torch.randint(6, (4,))
    assert verify(SharedParts(), "dp2 recompute:full", [shapes]).equal


def test_blocks_that_hold_no_module_are_refused():
    model = nn.ModuleList([nn.ParameterDict({"weight": nn.Parameter(torch.ones(2))})])
    with pytest.raises(LayoutError, match="no module at 0 has a forward, so there is nothing to recompute"):
        recomputed_blocks(model, Layout.parse("recompute:0"))


def channels(momentum):
    norm = nn.BatchNorm2d(6, momentum=momentum)
    return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1))


@pytest.mark.parametrize(
    "line", ["tp2 recompute:full", "tp2 mb2/own-statistics recompute:selective", "tp2x2/2d recompute:selective"]
)
def test_statistics_of_channels_that_are_cut_are_counted_once(line):
    model = nn.Sequential(*map(channels, (0.1, None)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(6, 4, 5, 5, generator=draw), torch.arange(6) % 5
    verdict = verify(model, line, [batch, batch])
    assert verdict.equal, str(verdict)
    assert verdict.buffers_error < 1e-10


class Counts(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def calls_of(line):
    model = Blocks(wide)

    def work(world):
        run = parallelize(model, line, world)
        (mine,) = run.shard([batch(5)])
        run.step(mine)
        with Counts() as counts:
            run.step(mine)
        return counts.calls

    return sum(launch(work, Layout.parse(line), ranks="threads"), Counter())


def test_full_computes_products_again_as_far_as_they_are_wanted_and_selective_none():
    plain, full, selective = (calls_of(line) for line in ("single", "recompute:full", "recompute:selective"))
    assert plain["addmm"] == selective["addmm"] == 6
    assert full["addmm"] == 10
    assert plain["tanh"] == 2
    assert full["tanh"] == 4
    assert selective["tanh"] == 4


def test_blocks_of_a_sequence_of_layers_are_offloaded_in_stages_too():
    plan, _ = make_plan(Job(Blocks(wide), CrossEntropy()), Layout.parse("pp2 mb2 recompute:offload"))
    called = {name for chunk in range(2) for name in plan.stages.chunked.calls_of(chunk)}
    assert plan.offloaded_activations == ("blocks.0", "blocks.1")
    assert called >= set(plan.offloaded_activations)


@pytest.mark.parametrize("line", ["pp2 mb2 recompute:full", "pp2/1f1b mb2 recompute:blocks.*"])
def test_blocks_of_a_sequence_of_layers_are_computed_again_in_stages_too(line):
    assert calls_of("pp2 mb2")["addmm"] == 12
    assert calls_of(line)["addmm"] == 20


def test_a_pattern_names_what_is_computed_again():
    assert calls_of("recompute:blocks.1")["addmm"] == 8
    assert calls_of("recompute:blocks.*")["addmm"] == 10


class CastsInside(Blocks):
    """Casts around its blocks, in a forward that is over when the backward recomputes them."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("word", ["full", "selective"])
@pytest.mark.parametrize("make", [Blocks, CastsInside])
def test_what_is_computed_again_drops_and_casts_as_it_did_to_the_last_bit(make, word):
    def work(world, line):
        run = parallelize(model, line, world, seed=3)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        losses = []
        for mine in run.shard([batch(5)] * 3):
            losses.append(run.step(mine))
            optimizer.step()
        return losses, [p.detach().clone() for p in run.parameters.values()]

    torch.manual_seed(0)
    model = make(wide)
    for line in ("dp2", "dp2/zero3/bucket:0"):
        kept, values = launch(work, 2, line, ranks="threads")[1]
        again, same = launch(work, 2, f"{line} recompute:{word}", ranks="threads")[1]
        assert kept == again
        assert kept[0] != kept[1]
        assert all(map(torch.equal, values, same))


class AttendsToItself(nn.Module):
    """Self-attention, which its module recognizes by one tensor as query, key and value."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("line", ["dp2 recompute:*.attn", "tp2x2/2d recompute:*.attn"])
def test_an_input_that_is_given_twice_is_one_when_it_is_computed_from_again(line):
    batch = (torch.randn(5, 3, 6), torch.randint(5, (5, 3)))
    verdict = verify(Blocks(AttendsToItself), line, [batch])
    assert verdict.equal, str(verdict)


def test_without_gradients_nothing_is_kept_or_computed_again():
    def work(world):
        run = parallelize(Blocks(wide), "recompute:full", world)
        (mine,) = run.shard([batch(5)])
        with Counts() as counts:
            run.evaluate(mine)
        return counts.calls["addmm"]

    assert launch(work, 1, ranks="threads") == [6]


@pytest.mark.parametrize(
    ("line", "model", "word"),
    [
        ("dp2 recompute:block.*", lambda: GPT2.model, "recompute:blocks"),
        ("tp2 recompute:layers.*", lambda: DEEP.model, "recompute:"),
        ("dp2 recompute:full", lambda: nn.Linear(3, 3), "leave it out: dp2"),
        ("tp2 recompute:conv9", lambda: CONVNET.model, "recompute:conv"),
    ],
)
def test_a_word_that_means_no_module_is_refused_on_every_rank(line, model, word):
    text = check_refused(line, model())
    assert "nothing to recompute" in text
    assert word in text


def test_where_there_are_no_blocks_to_offload_no_word_is_named_that_offloads_nothing():
    text = check_refused("dp2 recompute:offload:disk", nn.Linear(3, 3))
    assert "could be offloaded" in text
    assert text.endswith("leave it out: dp2")


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x.mul_(2))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().mean(0)
        return self.layer(x) * self.seen


@pytest.mark.parametrize(
    ("make", "num_ranks", "what"), [(Overwriting, 2, "its inputs"), (Remembering, 1, "blocks.0.seen")]
)
def test_a_block_that_changes_what_it_is_computed_from_is_refused(make, num_ranks, what):
    model = Blocks(make)

    def work(world):
        run = parallelize(model, f"dp{num_ranks} recompute:full", world)
        (mine,) = run.shard([batch(5)])
        with pytest.raises(PlanError, match="cannot be recomputed") as refusal:
            run.step(mine)
        return str(refusal.value)

    assert all(what in text for text in launch(work, num_ranks, ranks="threads"))


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(8, 8), 0

    def forward(self, x):
        self.count += 1
        return self.layer(x.sin()) if self.count % 2 else self.layer(x)


class Moving(Undecided):
    def forward(self, x):
        self.count += 1
        return self.layer(x.sin()) if self.count % 2 else self.layer(torch.cat([x, x]).sin())[: len(x)]


@pytest.mark.parametrize("make", [Undecided, Moving])
def test_a_block_that_does_something_else_the_second_time_is_an_error(make):
    model = Blocks(make, num=1)

    def work(world):
        run = parallelize(model, "dp2 recompute:full", world)
        (mine,) = run.shard([batch(5)])
        with pytest.raises(PlanError, match="computes something else"):
            run.step(mine)

    launch(work, 2, ranks="threads")


class Force(nn.Module):
    """Gives the gradient of an energy, from which gradients flow on, or do not."""

    def __init__(self, create_graph=True):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 6))
        self.out, self.create_graph = nn.Linear(6, 6), create_graph

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.layers(x).square().sum(), x, create_graph=self.create_graph)
        return self.out(force)


SIX = (torch.randn(5, 6), torch.randint(6, (5,)))


@pytest.mark.parametrize("line", ["recompute:full", "dp2/zero3 recompute:selective", "mb2 recompute:1.layers"])
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_taken_in_a_forward_is_that_of_one_device(line, create_graph):
    verdict = verify(nn.Sequential(nn.Linear(6, 6), Force(create_graph)), line, [SIX])
    assert verdict.equal, str(verdict)


def test_a_gradient_taken_in_a_forward_that_ranks_compute_again_together_is_refused():
    with pytest.raises(PlanError, match="'1' takes a gradient in its forward"):
        verify(nn.Sequential(nn.Linear(6, 6), Force(create_graph=False)), "tp2 recompute:1", [SIX])


class Transformed(nn.Module):
    """Layers of which the middle one adds the gradient that ``torch.func`` gives of what it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList([self.Block(), self.Block()])

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x + torch.func.grad(lambda each: (each**3).sum())(x))

    def forward(self, x):
        for block in self.blocks:
            x = block(torch.tanh(self.first(x)))
        return x


def test_a_gradient_by_torch_func_in_a_block_that_is_computed_again_is_refused_by_name():
    batch = (torch.randn(4, 6), torch.randn(4, 6))
    assert verify(Transformed(), "dp2", [batch], loss=nn.MSELoss()).equal
    with pytest.raises(
        (PlanError, RankFailedError), match=r"'blocks\.0' takes a gradient by torch\.func in its forward"
    ):
        verify(Transformed(), "dp2 recompute:full", [batch], loss=nn.MSELoss())
