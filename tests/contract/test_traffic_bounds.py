"""What tensor-parallel modes send, recorded, against what they say and what docs/design.md, section 5 allows."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
import torch
from torch import nn

from contract.cases import ASIDE
from shardwright.comm.launch import launch
from shardwright.comm.recorder import ring_factor
from shardwright.layout import Layout
from shardwright.models import MeanSquaredError
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.tensor_parallel.mode import OPTIONS

WIDTH, HIDDEN = 72, 144


class Residual(nn.Module):
    """A pair of layers whose input comes cut as the mode cuts it between layers, and whose output goes on so."""

    def __init__(self, width, hidden):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False))

    def forward(self, x):
        return x + self.pair(x)


def model_of(num_pairs, width, hidden):
    pairs = [Residual(width, hidden) for _ in range(num_pairs)]
    return nn.Sequential(nn.Linear(width, width, bias=False), *pairs, nn.Linear(width, width, bias=False))


def sent(line, model, num_samples, num_tokens):
    """The bytes that each rank sends in one step, ranks forming rings: recorded, and as the strategies say."""
    layout, loss = Layout.parse(line), MeanSquaredError()
    job = Job(model, loss, num_samples * num_tokens)
    plan, chosen = make_plan(job, layout)
    x = torch.ones(num_samples, num_tokens, model[0].in_features)

    def work(world):
        run = parallelize(model, line, world, loss=loss, num_tokens=job.num_tokens)
        (batch,) = run.shard([(x, x)])
        with world.recorder.recording() as records:
            run.step(batch)
        return [record for record in records if record.source not in ASIDE]

    found, traffic_at = [], StepTraffic(job, plan, chosen, x).at
    for rank, records in enumerate(launch(work, layout, ranks="threads")):
        said = traffic_at(plan.mesh.coord(rank))
        calls = [traffic for each in said.values() for traffic in each]
        # along a joined axis those share a gradient who hold the same part of the weight
        members = {traffic.axis: traffic.num_ranks for traffic in calls} | dict(plan.mesh.sizes)
        assert all(members[traffic.axis] == traffic.num_ranks for traffic in calls)
        recorded = sum(ring_factor(r.kind, members[r.axis]) * r.num_bytes for r in records)
        found.append((recorded, sum(ring_factor(t.kind, t.num_ranks) * t.num_bytes * t.times for t in calls)))
    return found


# ---- what is said


UNEVEN = (
    "tp4", "tp4/sp", "tp4/sp/regather", "tp6", "tp2x2/2d", "tp2x2/2d/regather", "tp2x3/2d", "tp3x3/2d", "tp1x4/2d",
    "tp4x1/2d", "tp2x2x2/2.5d", "tp3x2x2/2.5d/regather", "tp2x2x2/3d", "tp2x2x2/3d/regather", "tp3x2x2/3d",
    "tp2x3x1/3d",
)  # fmt: skip


@pytest.mark.parametrize("line", UNEVEN)
@pytest.mark.sampled(100)
def test_each_rank_sends_the_bytes_that_the_strategies_say_where_nothing_can_be_divided(line):
    for num_tokens in (1, 40):  # few and many beside the weights: other roles
        for recorded, said in sent(line, model_of(1, 13, 29), 7, num_tokens):
            assert recorded == said


# ---- what is allowed: elements that one rank sends for a pair, forward and backward


def formula_1d(sizes, operands, again):
    """One all-reduce of X forward and one backward, or as much in gathers and reduce-scatters."""
    p = prod(sizes)
    return Fraction((4 + again) * (p - 1), p) * operands[0][0]


def formula_2p5d(sizes, operands, again):
    """2D is a depth of 1."""
    d, r, c = (1, *sizes)[-3:]
    grids = sum((2 + again) * ((c - 1) * Fraction(x, d) + (r - 1) * w) / (r * c) for x, w, _ in operands)
    return grids + sum(2 * Fraction(d - 1, d) * w / (r * c) for _, w, _ in operands)


def formula_3d(sizes, operands, again):
    """Role t over depth, h over row, k over col; then h and k change places. What k sums is not gathered again."""
    d, r, c = sizes
    (x, w, y), (x_2, w_2, y_2) = operands
    up = (2 + again) * ((r - 1) * x + (d - 1) * w) + 2 * (c - 1) * y
    down = (2 + again) * ((c - 1) * x_2 + (d - 1) * w_2) + 2 * (r - 1) * y_2
    return Fraction(up + down, d * r * c)


FORMULAS = {"1d": formula_1d, "2d": formula_2p5d, "2.5d": formula_2p5d, "3d": formula_3d}
NUM_SAMPLES = 72  # each grid here divides them, and all widths


def allowed_bytes(line, num_tokens):
    factor = Layout.parse(line).factor("tp")
    mode = next((option.name for option in factor.options if option.name in FORMULAS), "1d")
    again = any("regather" in (option.name, option.value) or option.value == "summa" for option in factor.options)
    rows = NUM_SAMPLES * num_tokens
    x, w, y = rows * WIDTH, WIDTH * HIDDEN, rows * HIDDEN
    return 4 * FORMULAS[mode](factor.sizes, ((x, w, y), (y, w, x)), again)


def sent_for_a_pair(line, num_tokens):
    """What each rank sends for one pair more."""
    one, two = (sent(line, model_of(n, WIDTH, HIDDEN), NUM_SAMPLES, num_tokens) for n in (1, 2))
    assert all(recorded == said for recorded, said in (*one, *two))
    return {more - less for (more, _), (less, _) in zip(two, one, strict=True)}


EVEN = {
    4: ("tp4", "tp4/sp", "tp2x2/2d", "tp2x2/2d/regather", "tp2x1x2/2.5d", "tp2x2x1/3d"),
    6: ("tp6", "tp6/sp/regather", "tp2x3/2d", "tp1x2x3/2.5d", "tp1x2x3/3d"),
    8: ("tp8", "tp2x4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "tp2x2x2/3d/regather"),
    9: ("tp9", "tp3x3/2d", "tp3x1x3/2.5d", "tp3x1x3/3d"),
    12: ("tp12/sp", "tp3x4/2d", "tp3x2x2/2.5d", "tp3x2x2/3d"),
}
"""Every mode, by how many ranks it is on."""


@pytest.mark.parametrize("line", [line for lines in EVEN.values() for line in lines])
@pytest.mark.sampled(100)
def test_a_pair_of_layers_sends_no_more_than_the_formula_of_its_mode(line):
    for num_tokens in (1, 20):
        assert max(sent_for_a_pair(line, num_tokens)) <= allowed_bytes(line, num_tokens)


@pytest.mark.parametrize("line", ["tp2x3/2d:summa", "tp3x2x2/2.5d:summa", "tp2x2x2/3d:classic", "tp3x2x2/3d:classic"])
def test_a_classic_algorithm_sends_exactly_what_its_formula_says(line):
    assert sent_for_a_pair(line, 3) == {allowed_bytes(line, 3)}


def sent_with_and_without_regather(line):
    model = model_of(2, WIDTH, HIDDEN)
    found = [sent(each, model, NUM_SAMPLES, 3) for each in (line, f"{line}/regather")]
    assert all(recorded == said for of_ranks in found for recorded, said in of_ranks)
    return [[recorded for recorded, _ in of_ranks] for of_ranks in found]


@pytest.mark.parametrize("line", ["tp4/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "tp2x2x2/3d:classic"])
def test_regather_sends_more_in_every_mode_that_keeps_what_it_gathers(line):
    plain, again = sent_with_and_without_regather(line)
    assert all(more > less for more, less in zip(again, plain, strict=True))


UNCHANGED = {"tp2x2/2d:summa": ":summa", "tp2x2x2/2.5d:summa": ":summa", "tp4": "tpN alone"}


@pytest.mark.parametrize("line", UNCHANGED)
def test_where_regather_changes_nothing_the_list_of_options_says_so(line):
    plain, again = sent_with_and_without_regather(line)
    assert again == plain
    _, exceptions = OPTIONS["regather"].text.split("; ")
    assert UNCHANGED[line] in exceptions
