"""The search for roles against every path there is, walked with real rows, and against the classic algorithms."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, permutations, product
from math import prod
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig, MeanSquaredError
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.tensor_parallel.roles import GridAxis, Layer, LayerBoundary, cheapest

# ---- every path, by what the ranks hold: rows are numbers in an array of shape (*grid, rows on a rank)


class Path(NamedTuple):
    """One way through some layers: (states before, roles, states after) of each, and where the rows are by then."""

    steps: tuple
    rows: np.ndarray
    elements: Fraction

    def then(self, step, rows, elements):
        return Path((*self.steps, step), rows, self.elements + elements)


def can(before, role, after):
    """Whether a product that an axis cuts in this way takes and gives values in these states."""
    return {"t": before == after == "T", "h": after == "F", "k": before == "F"}[role]


def gathered(rows, number):
    whole = np.concatenate(np.split(rows, rows.shape[number], number), axis=-1)
    return np.repeat(whole, rows.shape[number], axis=number)


def cut(rows, number):
    parts = np.split(rows, rows.shape[number], -1)
    return np.concatenate([part.take([i], number) for i, part in enumerate(parts)], axis=number)


def own_rows(axes):
    """Each rank's rows of the model's input, on a grid of sides that share no divisor.

    A path must bring rows back for any sizes: on sides of 2 and 2 what one axis cuts is by chance what the other did.
    """
    sides = (2, 3, 5)[: len(axes)]
    rows = np.broadcast_to(np.arange(prod(sides)), [*sides, prod(sides)])
    for number, axis in enumerate(axes):
        rows = cut(rows, number) if axis.stream == "T" else rows
    return rows


def size_of(axes, which):
    return prod(axis.size for axis, here in zip(axes, which, strict=True) if here)


def summed_copies(axes, which):
    """What all ranks together send, for each element, to sum a value that is copied over some axes."""
    copies = size_of(axes, which)
    return sum(2 * (axis.size - 1) * copies // axis.size for axis, here in zip(axes, which, strict=True) if here)


def sent_by_all(layer, before, roles, after, axes, num_tokens, regather):
    """What all ranks together send: to gather g parts on each of g ranks, each part goes to g - 1 others."""
    x, w, y = num_tokens * layer.in_features, layer.in_features * layer.out_features, num_tokens * layer.out_features
    g_t, g_h, g_k = (size_of(axes, [role == name for role in roles]) for name in "thk")
    copied_x = [state == "C" for state in before]
    copied_y = [state == "C" and role == "k" for state, role in zip(after, roles, strict=True)]
    copies_x, copies_y = size_of(axes, copied_x), size_of(axes, copied_y)
    copies_w = size_of(axes, [not axis.stored for axis in axes])
    gather_x, gather_w = (g_h - copies_x) * x, (g_t - copies_w) * w
    sum_dx, sum_dw = gather_x + summed_copies(axes, copied_x) * x, gather_w + 2 * (copies_w - 1) * w
    once = gather_x + gather_w + (2 * (g_k - copies_y) + summed_copies(axes, copied_y)) * y + sum_dw
    again = gather_x + gather_w * layer.needs_gradient  # only the input's gradient is computed from the weight
    return once + again * regather + sum_dx * layer.needs_gradient


def joined_on_one(boundary, after, axes, num_tokens):
    """What each rank sends so that all rows' ``joined`` features come together, and their gradients apart again."""
    whole = Fraction(num_tokens * boundary.joined, size_of(axes, [state == "F" for state in after]))
    return 2 * (whole - whole / size_of(axes, [state == "T" for state in after]))


def allowed(boundary, states, axes):
    cuts = [axis.size for axis, state in zip(axes, states, strict=True) if state == "F"]
    new_rows = [axis for axis, state in zip(axes, states, strict=True) if state == "T" != axis.stream]
    most = max(boundary.most_parts, boundary.most_alone if len(cuts) == 1 else 0)
    return prod(cuts) <= most and (boundary.rows or not new_rows)


def next_steps(layer, before, boundary, axes):
    """(roles, states after) that every rank can take part in.

    Values are copied where a path begins or ends, never inside: every rank would keep the full value.
    """
    for after in [boundary.states] if boundary.states else product("TF", repeat=len(axes)):
        if not allowed(boundary, after, axes):
            continue
        for roles in product("thk", repeat=len(axes)):
            each = list(zip(axes, before, roles, after, strict=True))
            summed_and_cut = any(role == "k" and a == "F" for _, _, role, a in each)
            parts = layer.out_features // size_of(axes, [role == "h" for role in roles])
            if (
                all(can(b, role, a) for _, b, role, a in each)
                and all(axis.stored or role == "t" for axis, _, role, _ in each)
                and (boundary.sums or not summed_and_cut)
                and parts >= size_of(axes, [role == "t" and axis.stored for axis, _, role, _ in each])
            ):
                yield roles, tuple(after)


def every_path(layers, boundaries, axes, num_tokens, regather):
    """Every path that ends with the rows where they began."""
    start = own_rows(axes)
    num_ranks = size_of(axes, [True] * len(axes))
    paths = [(boundaries[0].states, Path((), start, Fraction(0)))]
    for layer, boundary in zip(layers, boundaries[1:], strict=True):
        longer = []
        for before, path in paths:
            for roles, after in next_steps(layer, before, boundary, axes):
                sent = Fraction(sent_by_all(layer, before, roles, after, axes, num_tokens, regather), num_ranks)
                sent += Fraction(joined_on_one(boundary, after, axes, num_tokens))
                for rows in moved(path.rows, before, roles, after):
                    if boundary.joined and not (np.diff(rows, axis=-1) == 1).all():
                        continue  # some rank's rows are no run
                    longer.append((after, path.then((before, roles, after), rows, sent)))
        paths = longer
    return [path for _, path in paths if np.array_equal(path.rows, start)]


def moved(rows, before, roles, after):
    """The rows after a layer, for every order of gathering and of cutting: those that differ."""
    numbers = range(len(roles))
    gathers = [n for n in numbers if roles[n] == "h" and before[n] == "T"]
    cuts = [n for n in numbers if roles[n] == "k" and after[n] == "T"]
    found = {}
    for first in permutations(gathers):
        for second in permutations(cuts):
            there = rows
            for number in first:
                there = gathered(there, number)
            for number in second:
                there = cut(there, number)
            found.setdefault(there.tobytes(), there)
    return list(found.values())


# ---- the paths that modes ask for

STREAMS = ("C", "T", "F", "TF", "tT", "tF", "TT", "CC", "TC", "CF", "tTF", "TTF", "TCF", "CCF")
"""The state along each axis of a mode; a small t is T with weights copied."""

ENDS = {"C": "CF", "T": "T", "F": "FC"}
"""How a path of layers may begin and end on an axis of each state: features cut, or copied where they would be."""

features = st.integers(1, 40)


def grid(stream, *sizes):
    names = ("tp",) if len(sizes) == 1 else ("depth", "row", "col")
    return [GridAxis(*each, s.upper(), s.isupper()) for *each, s in zip(names, sizes, stream, strict=False)]


@st.composite
def problems(draw):
    stream = draw(st.sampled_from(STREAMS))
    axes = grid(stream, *(draw(st.integers(2, 4)) for _ in stream))
    widths = draw(st.lists(features, min_size=2, max_size=4))
    layers = [Layer(a, b, n > 0 or draw(st.booleans())) for n, (a, b) in enumerate(pairwise(widths))]
    first, last = (LayerBoundary(64, tuple(draw(st.sampled_from(ENDS[s])) for s in stream.upper())) for _ in range(2))
    inner = st.builds(
        LayerBoundary, features, st.none(), sums=st.booleans(), rows=st.booleans(), most_alone=st.integers(0, 8),
        joined=st.sampled_from((0, 0, 7)),
    )  # fmt: skip
    return layers, [first, *(draw(inner) for _ in layers[1:]), last], axes


WHOLE_INPUT = (
    [Layer(1, 8), Layer(8, 2)],
    [LayerBoundary(9, tuple("TTC")), LayerBoundary(4), LayerBoundary(9, tuple("TTC"))],
)
TWO_ORDERS = (
    [Layer(1, 6), Layer(6, 2), Layer(2, 3)],
    [LayerBoundary(9, ("T", "T")), LayerBoundary(6), LayerBoundary(1, most_alone=2), LayerBoundary(9, ("T", "T"))],
)
NO_RUN = (  # only the slower axis can cut the two features: gathered over it alone, rows would not follow each other
    [Layer(1, 6), Layer(6, 6)],
    [LayerBoundary(9, ("T", "T")), LayerBoundary(2, joined=7), LayerBoundary(9, ("T", "T"))],
)
NO_GRADIENT = ([Layer(4, 4, False)], [LayerBoundary(9, ("T",)), LayerBoundary(9, ("T",))])

COPIES = (
    [Layer(1, 8), Layer(8, 1)],
    [LayerBoundary(64, tuple("CCF")), LayerBoundary(8), LayerBoundary(64, tuple("CCF"))],
)


@pytest.mark.sampled(0)
@example((*COPIES, grid("CCF", 2, 2, 2)), 1, False)
@example((*WHOLE_INPUT, grid("TTF", 2, 2, 2)), 1, False)
@example((*TWO_ORDERS, grid("TT", 2, 3)), 1, False)
@example((*NO_RUN, grid("TT", 2, 3)), 100, False)
@example((*NO_GRADIENT, grid("T", 2)), 1, True)
@settings(max_examples=200)
@given(problems(), st.integers(1, 100), st.booleans())
def test_the_roles_found_send_what_the_best_of_all_paths_sends(problem, num_tokens, regather):
    layers, boundaries, axes = problem
    found = cheapest(layers, boundaries, axes, num_tokens, regather=regather)
    paths = every_path(layers, boundaries, axes, num_tokens, regather)
    assert (found is None) == (not paths)
    if found is not None:
        assert found.elements == pytest.approx(min(path.elements for path in paths), rel=1e-9)
        steps = tuple((step.before, step.roles, step.after) for step in found.steps)
        assert found.elements == pytest.approx(min(p.elements for p in paths if p.steps == steps), rel=1e-9)


# ---- the classic algorithms, by the formulas of docs/design.md, section 5


def pair(num_tokens, width, hidden):
    """X, W and Y of both layers of an MLP, in elements."""
    x, w, y = num_tokens * width, width * hidden, num_tokens * hidden
    return (x, w, y), (y, w, x)


def classic_1d(p, layers):
    return 2 * (2 * (p - 1) / p * layers[0][0])


def classic_2p5d(d, r, c, layers):
    return sum(2 * ((c - 1) * x / d + (r - 1) * w) / (r * c) + 2 * (d - 1) / d * w / (r * c) for x, w, _ in layers)


def classic_2d(r, c, layers):
    return sum(2 * ((c - 1) * x + (r - 1) * w) / (r * c) for x, w, _ in layers)


def classic_3d(side, layers):
    return sum(2 * (side - 1) / side**3 * (x + w + y) for x, w, y in layers)


def found_for_an_mlp(axes, num_tokens, width, hidden):
    stream = LayerBoundary(width, tuple(axis.stream for axis in axes))
    layers = [Layer(width, hidden), Layer(hidden, width)]
    return cheapest(layers, [stream, LayerBoundary(hidden), stream], axes, num_tokens).elements


side = st.integers(2, 4)
wide = st.integers(1, 64).map(lambda n: 64 * n)  # at least one feature for each rank


@given(st.lists(side, min_size=3, max_size=3), st.integers(1, 100_000), wide, wide)
def test_the_roles_found_never_send_more_than_the_classic_algorithm_of_the_mode(sizes, num_tokens, width, hidden):
    d, r, c = sizes
    layers = pair(num_tokens, width, hidden)
    for axes, classic in [
        (grid("C", d), classic_1d(d, layers)),
        (grid("T", d), classic_1d(d, layers)),
        (grid("TF", r, c), classic_2d(r, c, layers)),
        (grid("tTF", d, r, c), classic_2p5d(d, r, c, layers)),
        (grid("TTF", d, d, d), classic_3d(d, layers)),
    ]:
        assert found_for_an_mlp(axes, num_tokens, width, hidden) <= classic * (1 + 1e-9)


KNOWN_MB = {
    "1D": (grid("C", 4), 12.6, classic_1d(4, pair(1024, 1024, 4096))),
    "1D, sequence parallel": (grid("T", 4), 12.6, classic_1d(4, pair(1024, 1024, 4096))),
    "2D": (grid("TF", 2, 2), 12.6, 21.0e6 / 4),
    "2.5D": (grid("tTF", 2, 2, 2), 14.7, classic_2p5d(2, 2, 2, pair(1024, 1024, 4096))),
    "3D": (grid("TTF", 2, 2, 2), 14.7, classic_3d(2, pair(1024, 1024, 4096))),
}


@pytest.mark.parametrize("name", KNOWN_MB)
def test_an_mlp_of_1024_and_4096_features_sends_the_megabytes_known_by_hand(name):
    axes, expected, classic = KNOWN_MB[name]
    elements = found_for_an_mlp(axes, 1024, 1024, 4096)
    assert round(elements * 4 / 1e6, 1) == expected
    assert elements <= classic


# ---- pinned roles that do not fit


def whys(model, line, loss=None):
    plan, _ = make_plan(Job(model, loss or MeanSquaredError()), Layout.parse(line))
    return {path: role.why for path, role in plan.roles.items() if ":" in role.name}


NO_FIT = "the pinned roles do not fit here, the cheapest are used"
WHOLE_ENDS = f"{NO_FIT}: the block's input features are not cut over col and its output features are not cut over col"
PLAIN = {
    "two layers": nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)),
    "four layers": nn.Sequential(*(nn.Linear(*sizes) for sizes in ((8, 16), (16, 8), (8, 16), (16, 8)))),
    "a norm and two layers": nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
    "an encoder": nn.TransformerEncoderLayer(8, 4, 16, batch_first=True),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_stack_says_why_the_pinned_classic_roles_do_not_fit(name):
    found = whys(PLAIN[name], "tp2x2x2/3d:classic")
    assert found
    assert all(NO_FIT in why for why in found.values())
    if name != "four layers":  # there the features between the two pairs are cut
        assert all(why.endswith(WHOLE_ENDS) for why in found.values())
    assert not any(NO_FIT in why for why in whys(PLAIN[name], "tp2x2x2/3d").values())


@pytest.mark.parametrize("line", ["tp2x2/2d:summa", "tp2x2x2/2.5d:summa", "tp2x2x2/3d:classic"])
def test_in_a_gpt_the_pinned_roles_fit_every_layer(line):
    found = whys(GPT(GPTConfig(num_layers=1)), line, CrossEntropy())
    assert found
    assert not any(NO_FIT in why for why in found.values())


@pytest.mark.parametrize("mode", ["tp2x2/2d:summa", "tp2x2x2/2.5d:summa"])
def test_pinned_roles_of_summa_gather_nothing_again_because_they_keep_nothing(mode):
    model, batch = GPT(GPTConfig(num_layers=1)), torch.zeros(8, 4, dtype=torch.int64)

    def sent(line):
        job = Job(model, CrossEntropy(), num_tokens=32)
        plan, chosen = make_plan(job, Layout.parse(line))
        found = StepTraffic(job, plan, chosen, batch).at({**dict.fromkeys(plan.mesh.axes, 0)})
        return sum(each.num_bytes * each.times for traffic in found.values() for each in traffic)

    kept, again = sent(mode), sent(f"{mode}/regather")
    assert 0 < kept == again
