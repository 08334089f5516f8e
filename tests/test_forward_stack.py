import copy
import pickle
import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from shardwright import Layout, forward_stack
from shardwright.analysis.traced.structure import runs_as
from shardwright.errors import LayoutError, PlanError
from shardwright.forward_stack import SEVERAL, Rung, record, set_forward, stack_of, wrap
from shardwright.keyed_dropout import key_dropout
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.rng import RngTracker
from shardwright.strategies import choose

HOOKS = ["UNSHARD", "GATHER", "FRAME"]
FORWARDS = [
    *("OFFLOAD", "RECOMPUTE", "UNSHARD_BLOCK", "COMPILE", "CONTRIBUTE_ONCE", "ON_SHARDS", "DRAWS", "CALLERS"),
    *("FOLLOWED", "ENTRY", "OPERATOR", "ATTEND", "NO_SAMPLES", "STATISTICS", "DROPOUT", "SPLIT_BACKWARD", "GUARD"),
]
"""The order of the rungs, outermost first, written out: each line of ``Rung`` says why it stands where it stands.

``tests/test_rooms.py`` holds docs/architecture.md to the order of ``Rung``.
"""

WRAPPERS = [Rung[name] for name in FORWARDS if name not in ("ATTEND", "GUARD")]


def test_the_order_of_the_rungs_is_this():
    assert [rung.name for rung in sorted(Rung)] == [rung.name for rung in Rung] == HOOKS + FORWARDS


def test_the_header_of_the_file_prints_the_first_rungs_in_their_order():
    header = re.findall(r"[A-Z_]{3,}", forward_stack.__doc__.partition("::")[2].partition("\n\nThe order")[0])
    assert header == (HOOKS + FORWARDS)[: len(header)]
    assert len(header) > len(HOOKS)


def saying(words, word, inner):
    def run(x):
        words.append(word)
        return inner(x)

    return run


@pytest.mark.parametrize("order", [WRAPPERS, WRAPPERS[::-1], WRAPPERS[1::2] + WRAPPERS[::2]], ids=str)
def test_wrappers_run_in_the_order_of_their_rungs_however_they_were_added(order):
    layer, said = nn.ReLU(), []
    for rung in order:
        wrap(layer, rung, rung.name, by="core", around=partial(saying, said, rung))
    assert layer(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert said == WRAPPERS == [each.rung for each in stack_of(layer).wrappers]


def test_on_a_rung_of_several_the_later_one_is_outside():
    layer, said = nn.ReLU(), []
    for word in ("first", "second"):
        wrap(layer, Rung.FOLLOWED, word, by="core", around=partial(saying, said, word))
    layer(torch.ones(1))
    assert said == ["second", "first"]


@pytest.mark.parametrize("rung", [rung for rung in WRAPPERS if rung not in SEVERAL])
def test_a_rung_that_is_taken_is_refused_with_both_names(rung):
    layer = nn.ReLU()
    wrap(layer, rung, "one thing", by="tensor_1d", around=lambda inner: inner)
    with pytest.raises(PlanError, match=f"{rung.name}(.|\n)*'one thing' by tensor_1d, and 'another' by toy(.|\n)*fix:"):
        wrap(layer, rung, "another", by="toy", around=lambda inner: inner)


def test_a_forward_that_the_user_assigned_to_the_module_is_wrapped():
    layer = nn.ReLU()
    layer.forward = lambda x: x - 1
    wrap(layer, Rung.RECOMPUTE, "twice", by="core", around=lambda inner: lambda x: 2 * inner(x))
    wrap(layer, Rung.ENTRY, "more", by="core", around=lambda inner: lambda x: inner(x) + 10)
    assert layer(3) == 24


def test_a_record_leaves_the_module_as_it_was():
    layer = nn.Linear(2, 2)
    record(layer, Rung.UNSHARD, "gathers", by="zero")
    assert runs_as(layer, nn.Linear)
    assert "forward" not in vars(layer)
    assert str(stack_of(layer)) == "UNSHARD          gathers (by zero)"


def test_the_forward_is_the_function_of_the_outermost_wrapper_and_nothing_around_it():
    layer = nn.ReLU()
    made = partial(torch.mul, other=2)
    set_forward(layer, Rung.OPERATOR, "doubled", by="toy", forward=made)
    assert layer.forward is made


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_the_same_and_wrapping_it_leaves_the_original_alone(copied):
    model = nn.Sequential(nn.Dropout(0.5), nn.PixelShuffle(2))
    key_dropout(model, RngTracker(seed=3, samples=range(2)))
    record(model[0], Rung.FRAME, "looks", by="core")
    other, x = copied(model), torch.ones(2, 4, 2, 2)
    assert other[0].forward.args[0] is other[0]
    assert torch.equal(other(x), model(x))
    assert str(stack_of(model[0])).splitlines()[0] == "FRAME            looks (by core)"
    key_dropout(other, RngTracker(seed=4, samples=range(2)))  # as for any model that has a forward of its own
    assert not torch.equal(other(x), model(x))
    wrap(other[0], Rung.RECOMPUTE, "nothing", by="core", around=lambda inner: lambda x: 0 * inner(x))
    assert not other[0](x).any()
    assert model[0](x).any()
    assert [each.rung for each in stack_of(model[0]).wrappers] == [Rung.FRAME, Rung.DROPOUT]


# ---- at plan time


@dataclass(frozen=True)
class Toy:
    rung: Rung
    path: str
    name: ClassVar[str] = "toy"
    axis: ClassVar[str] = "dp"
    phase: ClassVar[str] = "operators"
    default: ClassVar[bool] = False
    options: ClassVar[dict] = {}
    source: ClassVar[str] = "none"

    def place(self, job, plan):
        return plan.wraps(self.path, self.rung, self.name)

    def apply(self, job, axes, plan):
        raise AssertionError("never applied")

    def traffic(self, plan, batch, coord):
        return ()


def planned(line, toy, *more):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), *more)
    layout = Layout.parse(line)
    return make_plan(Job(model, nn.Identity()), layout, (*choose(layout), toy))[0]


@pytest.mark.parametrize(
    ("line", "rung", "path", "other"),
    [
        ("dp2 tp2", Rung.OPERATOR, "0", "tensor_1d"),
        ("dp2/zero3", Rung.UNSHARD, "2", "zero"),
        ("dp2 recompute:0", Rung.RECOMPUTE, "0", "core"),
        ("pp2/zb-h1 mb2", Rung.SPLIT_BACKWARD, "2", "pipeline"),
    ],
)
def test_two_strategies_on_one_rung_of_a_module_are_refused_when_the_plan_is_made(line, rung, path, other):
    with pytest.raises(LayoutError, match=f"rung {rung.name} of '{path}'") as caught:
        planned(line, Toy(rung, path))
    assert {"toy", other} <= set(str(caught.value).replace(",", " ").split())
    assert all(f"{word}:" in str(caught.value) for word in ("given", "allowed", "fix"))


def test_strategies_on_rungs_of_their_own_and_statistics_stand_beside_each_other():
    assert planned("dp2 tp2", Toy(Rung.ENTRY, "0")).wrapped["0"] == {
        Rung.OPERATOR: ("tensor_1d",),
        Rung.ENTRY: ("toy",),
    }
    assert planned("dp2", Toy(Rung.STATISTICS, "3"), nn.BatchNorm1d(4)).wrapped["3"][Rung.STATISTICS] == (
        "data_parallel",
        "toy",
    )


def test_a_note_of_another_strategy_is_not_overwritten():
    plan = planned("tp2", Toy(Rung.ENTRY, "0"))
    with pytest.raises(LayoutError, match=r"the note of '0'(.|\n)*tensor_1d and toy"):
        plan.note("0", "mine", by="toy", rung=Rung.NO_SAMPLES)
