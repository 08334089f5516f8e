"""The checks can fail: strategies that break one promise each, and the check that sees it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from contract.cases import (
    DEEP,
    GPT2,
    MLP,
    check_divides,
    check_equal,
    check_names,
    check_refused,
    check_shapes,
    check_traffic,
    two_steps,
)
from shardwright.errors import CommunicationError, LayoutError, explain
from shardwright.plan.traffic import Traffic
from shardwright.strategies import STRATEGIES

DATA, TENSOR = STRATEGIES["data_parallel"], STRATEGIES["tensor_1d"]


@dataclass(frozen=True)
class Wrong:
    """A strategy that does as another does, but for what it is given."""

    right: Any
    wrong: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name):
        return self.wrong.get(name) or getattr(self.right, name)


def test_a_strategy_that_only_passes_on_another_keeps_every_promise():
    for line, right in [("dp3", DATA), ("tp3", TENSOR)]:
        for check in (check_equal, check_divides, check_shapes, check_traffic, check_names):
            check(line, DEEP, strategies=[Wrong(right)])


def test_a_strategy_that_does_nothing_comes_out_equal_and_is_caught_for_dividing_nothing():
    idle = Wrong(DATA, {"place": lambda job, plan: plan})
    for check in (check_equal, check_shapes, check_traffic, check_names):
        check("dp2", MLP, strategies=[idle])
    with pytest.raises(AssertionError, match=r"data_parallel divides nothing over \['dp'\]"):
        check_divides("dp2", MLP, strategies=[idle])


def test_a_second_strategy_that_does_nothing_is_caught_beside_a_first_that_does():
    idle = Wrong(DATA, {"name": "idle", "place": lambda job, plan: plan})
    with pytest.raises(AssertionError, match="idle divides nothing"):
        check_divides("dp2", MLP, strategies=[DATA, idle])


def test_an_axis_over_which_nothing_is_divided_is_caught():
    with pytest.raises(AssertionError, match=r"nothing is divided over \['tp'\]"):
        check_divides("dp2 tp2", MLP, strategies=[DATA])


def test_gradients_that_are_not_summed_are_caught():
    forgetful = Wrong(DATA, {"place": lambda job, plan: replace(plan, inputs={"dp": 0})})
    check_divides("dp2", MLP, strategies=[forgetful])
    with pytest.raises(AssertionError, match=r"NOT equal to one device: first at linear1\.weight"):
        check_equal("dp2", MLP, strategies=[forgetful])


def test_gradients_that_are_not_summed_backward_are_caught():
    def forgetful(job, axes, plan):
        TENSOR.apply(job, axes, plan)
        for column in (job.model.linear1, job.model.linear3):
            column.forward = partial(nn.functional.linear, **column._parameters)

    with pytest.raises(AssertionError, match=r"NOT equal to one device: first at linear1\.weight"):
        check_equal("tp2", MLP, strategies=[Wrong(TENSOR, {"apply": forgetful})])
    with pytest.raises(AssertionError, match=r"does not make .*all_reduce"):
        check_traffic("tp2", MLP, strategies=[Wrong(TENSOR, {"apply": forgetful})])


def test_terms_that_are_not_summed_forward_are_caught():
    def forgetful(run):
        weight, bias = run.model.linear2.weight, run.model.linear2.bias
        run.model.linear2.forward = lambda x: nn.functional.linear(x, weight, bias)

    with pytest.raises(AssertionError, match="NOT equal to one device"):
        check_equal("tp2", MLP, alter=forgetful)


def test_a_mean_of_means_is_caught():
    def mean_of_means(run):
        plain = run.loss.forward
        run.loss.forward = lambda output, targets: (
            lambda total, count: (total / count.clamp(min=1), torch.ones_like(count))
        )(*plain(output, targets))

    with pytest.raises(AssertionError, match="NOT equal to one device"):
        check_equal("dp2", GPT2, alter=mean_of_means)


def test_dropout_drawn_by_each_rank_for_itself_is_caught():
    def own_dropout(run):
        run.rng.seed = run.world.rank

    check_equal("dp2", MLP, alter=lambda run: None)
    with pytest.raises(AssertionError, match="NOT equal to one device"):
        check_equal("dp2", MLP, alter=own_dropout)


LIES = {
    "says nothing": lambda said: (),
    "says a byte more": lambda said: (said[0]._replace(num_bytes=said[0].num_bytes + 1), *said[1:]),
    "says another kind": lambda said: (said[0]._replace(kind="reduce_scatter"), *said[1:]),
    "says another axis": lambda said: (said[0]._replace(axis="pp"), *said[1:]),
    "says one call twice": lambda said: (said[0]._replace(times=2), *said[1:]),
    "says two calls as one": lambda said: (
        said[0]._replace(num_bytes=said[0].num_bytes + said[1].num_bytes),
        *said[2:],
    ),
    "says one more": lambda said: (*said, Traffic("send", "dp", 8, 2)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("line", "right"), [("dp2/bucket:0", DATA), ("tp2", TENSOR)])
def test_a_strategy_that_misstates_its_traffic_is_caught(line, right, lie):
    liar = Wrong(right, {"traffic": lambda plan, batch, coord: LIES[lie](right.traffic(plan, batch, coord))})
    check_equal(line, DEEP, strategies=[liar])
    with pytest.raises(AssertionError, match=r"makes calls that traffic\(\) does not state|does not make"):
        check_traffic(line, DEEP, strategies=[liar])


def test_traffic_that_is_right_on_the_first_rank_alone_is_caught():
    def traffic(plan, batch, coord):
        return TENSOR.traffic(plan, batch, {**coord, "dp": 0}) if not coord["tp"] else ()

    with pytest.raises(AssertionError, match="rank 1"):
        check_traffic("tp2", MLP, strategies=[Wrong(TENSOR, {"traffic": traffic})])


def test_a_call_that_is_made_from_the_second_step_on_is_caught():
    def apply(job, axes, plan):
        forwards = []

        def hook(*_):
            forwards.append(1)
            if len(forwards) == 2:
                axes["tp"].all_reduce(torch.ones(1))

        job.model.register_forward_hook(hook)
        return TENSOR.apply(job, axes, plan)

    check_equal("tp2", MLP, strategies=[Wrong(TENSOR, {"apply": apply})])
    with pytest.raises(AssertionError, match=r"makes calls that traffic\(\) does not state in step 1"):
        check_traffic("tp2", MLP, strategies=[Wrong(TENSOR, {"apply": apply})])


def unwatched(right, *names):
    """The place of ``right``, but that nobody waits for the gradients of ``names``."""

    def place(job, plan):
        plan = right.place(job, plan)
        kept = [u._replace(parameters=tuple(n for n in u.parameters if n not in names)) for u in plan.param_groups]
        return replace(plan, param_groups=tuple(kept))

    return place


def test_a_shape_that_the_plan_does_not_say_is_caught():
    def apply(job, axes, plan):
        job.model.linear4.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    with pytest.raises(AssertionError, match="rank 0 under dp1 computes with other shapes"):
        check_shapes("dp1", MLP, strategies=[Wrong(DATA, {"apply": apply})])


def test_a_wrapper_that_changes_the_names_is_caught():
    def apply(job, axes, plan):
        job.model.linear1 = nn.Sequential(job.model.linear1)

    wrapping = Wrong(DATA, {"apply": apply, "place": unwatched(DATA, "linear1.weight", "linear1.bias")})
    with pytest.raises(AssertionError, match=r"adds \['linear1.0.bias', 'linear1.0.weight'\]"):
        check_names("dp1", MLP, strategies=[wrapping])


def test_a_buffer_that_one_device_does_not_have_is_caught():
    def apply(job, axes, plan):
        job.model.register_buffer("ranks", torch.ones(axes["dp"].size))

    with pytest.raises(AssertionError, match=r"rank 0 under dp2 adds \['ranks'\]"):
        check_names("dp2", MLP, strategies=[Wrong(DATA, {"apply": apply})])


def test_a_parameter_that_no_rank_holds_is_caught():
    def apply(job, axes, plan):
        job.model.linear4.bias = None

    losing = Wrong(DATA, {"apply": apply, "place": unwatched(DATA, "linear4.bias")})
    with pytest.raises(AssertionError, match=r"no rank under dp2 holds \['linear4.bias'\]"):
        check_names("dp2", MLP, strategies=[losing])


REFUSAL = explain("no", given="this", allowed="that", fix="so")


def test_a_strategy_that_refuses_on_one_rank_alone_is_caught():
    def apply(job, axes, plan):
        if axes["dp"].index == 1:
            raise LayoutError(REFUSAL)

    with pytest.raises(AssertionError, match="1 of 2 ranks accept"):
        check_refused("dp2", MLP.model, strategies=[Wrong(DATA, {"apply": apply})])


@pytest.mark.of_threads
def test_a_strategy_that_refuses_on_one_rank_while_the_others_wait_is_caught():
    def apply(job, axes, plan):
        if axes["dp"].index == 1:
            raise LayoutError(REFUSAL)
        axes["dp"].barrier()

    with pytest.raises(CommunicationError, match="rank 1 has returned already"):
        check_refused("dp2", MLP.model, strategies=[Wrong(DATA, {"apply": apply})])


def test_a_strategy_that_sends_before_it_refuses_is_caught():
    def apply(job, axes, plan):
        axes["dp"].all_reduce(torch.ones(1))
        raise LayoutError(REFUSAL)

    with pytest.raises(AssertionError, match="something was sent before"):
        check_refused("dp2", MLP.model, strategies=[Wrong(DATA, {"apply": apply})])


def test_ranks_that_refuse_in_different_words_are_caught():
    def apply(job, axes, plan):
        raise LayoutError(REFUSAL + str(axes["dp"].index))

    with pytest.raises(AssertionError, match="different words"):
        check_refused("dp2", MLP.model, strategies=[Wrong(DATA, {"apply": apply})])


def test_a_layout_that_is_accepted_is_no_refusal():
    with pytest.raises(AssertionError, match="2 of 2 ranks accept"):
        check_refused("dp2", MLP.model)


def test_the_traffic_of_the_cases_is_not_empty():
    for line in ("dp2", "tp2"):
        _, found = two_steps(line, MLP)
        assert all(len(each.recorded) == 2 and min(map(Counter.total, each.recorded)) > 0 for each in found)
