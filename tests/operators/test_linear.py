"""One product on a grid of thread ranks, for every role on one axis and on two, against one matrix multiplication.

S samples, N tokens of each, K features in, H features out; the parts are uneven, the last the largest
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod
from threading import local
from typing import NamedTuple

import pytest
import torch
from torch import nn

from shardwright import Mesh
from shardwright.comm.axis import Axis
from shardwright.comm.launch import launch
from shardwright.comm.recorder import ring_factor
from shardwright.operators import linear as grid
from shardwright.operators.linear import GridProduct, WeightFetch
from shardwright.operators.operand_moves import OperandMove

S, N, K, H = 5, 2, 13, 17


class Way(NamedTuple):
    """One axis: the layout of X along it, its role, the layout of Y; ``stored``: whether it shards the stored W."""

    before: str
    role: str
    after: str
    stored: bool = True


WAYS = [Way(*"TtT"), Way(*"TtT", False), *(Way(*each) for each in ("ThF", "FhF", "ChF", "FkT", "FkF", "FkC"))]


# ---- who holds what: a list of indices for each coordinate


@dataclass(frozen=True)
class Held:
    """The indices that each coordinate holds, as axes cut and gather them."""

    sizes: dict
    at: object

    def cut(self, axis):
        def part(coord):
            whole, n, i = self.at(coord), self.sizes[axis], coord[axis]
            return whole[len(whole) * i // n : len(whole) * (i + 1) // n]

        return Held(self.sizes, part)

    def gather(self, axis):
        return Held(self.sizes, lambda coord: [i for j in range(self.sizes[axis]) for i in self.at({**coord, axis: j})])

    def counts(self, coord, axis):
        return tuple(len(self.at({**coord, axis: i})) for i in range(self.sizes[axis]))


def cut_over(size, sizes, axes):
    held = Held(sizes, lambda _: list(range(size)))
    for axis in axes:
        held = held.cut(axis)
    return held


class Laid(NamedTuple):
    """This rank's product and the indices of what it holds."""

    product: GridProduct
    x: tuple
    w: tuple
    bias: list
    y: tuple


def lay_out(ways, axes, coord):
    """The moves of a rank, innermost cuts first, as the plan would give them."""
    sizes = {name: axes[name].size for name in ways}

    def names(**wanted):
        return [n for n, way in ways.items() if all(getattr(way, key) == value for key, value in wanted.items())]

    def move(name, layout, held):
        counts = held.counts(coord, name)
        return OperandMove(axes[name], layout, lambda: counts)

    rows, columns = cut_over(S, sizes, names(before="T")), cut_over(K, sizes, names(before="F"))
    outputs = cut_over(H, sizes, names(after="F"))
    x, y_features = (rows.at(coord), columns.at(coord)), outputs.at(coord)
    take = [OperandMove(axes[name], "whole") for name in names(before="C")]
    for name in reversed(names(before="T", role="h")):
        take.append(move(name, "rows", rows))
        rows = rows.gather(name)
    for name in reversed(names(before="F", role="h")):
        take.append(move(name, "features", columns))
        columns = columns.gather(name)
    give = []
    for name in reversed(names(role="k", after="F")):
        give.insert(0, move(name, "features", outputs))
        outputs = outputs.gather(name)
    for name in names(role="k", after="T"):
        rows = rows.cut(name)
        give.append(move(name, "rows", rows))
    give += [OperandMove(axes[name], "whole") for name in names(after="C")]
    weight_rows, fetch = outputs, []
    for name in names(role="t", stored=True):
        weight_rows = weight_rows.cut(name)
        fetch.insert(0, WeightFetch(axes[name], weight_rows.counts(coord, name)))
    bias_here = all(coord[name] == 0 for name in names(role="k"))
    found = GridProduct(tuple(take), tuple(give), tuple(fetch), bias_here=bias_here)
    w = (weight_rows.at(coord), columns.at(coord))
    return Laid(found, x, w, outputs.at(coord), (rows.at(coord), y_features))


# ---- one device, and the grid


def operands():
    generator = torch.Generator().manual_seed(0)
    shapes = [(S, N, K), (H, K), (H,), (S, N, H)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def one_device():
    """Y and the gradients of X, W and the bias."""
    x_SNK, w_HK, b_H, dy_SNH = operands()
    leaves = [t.requires_grad_() for t in (x_SNK, w_HK, b_H)]
    y_SNH = nn.functional.linear(*leaves)
    y_SNH.backward(dy_SNH)
    return [y_SNH.detach(), *(t.grad for t in leaves)]


def part(whole, held):
    rows, columns = held
    return whole[rows][..., columns]


def run(world, ways, sizes, options):
    """For each of the options: how far this rank's Y, dX, dW and db are from one device's, and what was sent."""
    mesh = Mesh(**sizes)
    axes, coord = world.axes(mesh), mesh.coord(world.rank)
    laid = lay_out(ways, axes, coord)
    x_SNK, w_HK, b_H, g_SNH = operands()
    y_SNH, dx_SNK, dw_HK, db_H = one_device()
    found = []
    for keep, overlap in options:
        layer = replace(laid.product, keep=keep, overlap=overlap)
        x, w, b = part(x_SNK, laid.x).requires_grad_(), nn.Parameter(part(w_HK, laid.w)), nn.Parameter(b_H[laid.bias])
        with world.recorder.recording() as records:
            y = layer(x, w, b)
            y.backward(part(g_SNH, laid.y))
            layer.pending_gradients.finish()
            for name in (name for name, way in ways.items() if not way.stored):
                axes[name].all_reduce(w.grad)  # where weights are copied the core sums their gradients
        for name in (name for name, way in ways.items() if way.role == "t"):
            axes[name].all_reduce(b.grad)
        expected = [part(y_SNH, laid.y), part(dx_SNK, laid.x), part(dw_HK, laid.w), db_H[laid.bias]]
        errors = [
            float((a - b).abs().max()) if b.numel() else 0.0
            for a, b in zip([y.detach(), x.grad, w.grad, b.grad], expected, strict=True)
        ]
        sent = sum(ring_factor(r.kind, mesh[r.axis]) * Fraction(r.num_bytes, 8) for r in records)
        found.append((errors, sent))
    return found


def formula(ways, sizes, keep):
    """What all ranks send together, in elements: docs/design.md, section 5, any grid.

    Over g members of which c hold copies, 2 (g - c) for gathering and summing and 2 (c - 1) for the sum over copies;
    over two axes of copies that is two sums, each of all.
    """
    x, w, y, again = S * N * K, H * K, S * N * H, 0
    total = 0
    for size, role, is_copied in [
        (x, "h", lambda way: way.before == "C"),
        (w, "t", lambda way: not way.stored),
        (y, "k", lambda way: way.after == "C"),
    ]:
        members = prod(sizes[name] for name, way in ways.items() if way.role == role)
        copied = [sizes[name] for name, way in ways.items() if is_copied(way)]
        total += 2 * size * (members - prod(copied) + sum((n - 1) * prod(copied) // n for n in copied))
        again += size * (members - prod(copied)) if role != "k" else 0
    return total + (0 if keep else again)


OPTIONS = tuple(product((True, False), repeat=2))


def check(ways, sizes):
    found = launch(run, prod(sizes.values()), ways, sizes, OPTIONS, ranks="threads")
    for number, (keep, overlap) in enumerate(OPTIONS):
        for rank, each in enumerate(found):
            errors, _ = each[number]
            assert max(errors) <= 1e-12, f"{keep=} {overlap=} rank {rank}: Y, dX, dW, db are off by {errors}"
        assert sum(each[number][1] for each in found) == formula(ways, sizes, keep), f"{keep=} {overlap=}"


def spelled(way):
    return "".join(way[:3]) + ("" if way.stored else "copied")


EVERY_WAY = {"argvalues": WAYS, "ids": spelled}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("way", **EVERY_WAY)
def test_every_role_on_one_axis_gives_one_device_s_product_and_sends_what_the_formula_says(way, size):
    check({"tp": way}, {"tp": size})


@pytest.mark.parametrize("col", **EVERY_WAY)
@pytest.mark.parametrize("row", **EVERY_WAY)
@pytest.mark.sampled(5)
def test_any_two_roles_give_one_device_s_product_and_send_what_the_formula_says(row, col):
    check({"row": row, "col": col}, {"row": 2, "col": 3})


THREE = ("TtT ThF FkT", "TtT FkT ThF", "ThF TtT FhF", "ThF ThF FkT", "FkT FkT ThF", "FkF FkF FkF", "TtT TtT FkF")


@pytest.mark.parametrize("ways", THREE)
def test_three_roles_give_one_device_s_product_and_send_what_the_formula_says(ways):
    depth, row, col = (Way(*way) for way in ways.split())
    check({"depth": depth, "row": row, "col": col}, {"depth": 2, "row": 2, "col": 3})
    depth = depth._replace(stored=depth.role != "t")
    check({"depth": depth, "row": row, "col": col}, {"depth": 3, "row": 2, "col": 2})


# ---- what is left out


def kinds_sent(way, *, x_trains=True, w_trains=True, keep=False):
    """The calls of one product, forward and backward, on each of two ranks."""

    def work(world):
        axes = world.axes(Mesh(tp=2))
        laid = lay_out({"tp": way}, axes, {"tp": world.rank})
        x_SNK, w_HK, b_H, g_SNH = operands()
        x = part(x_SNK, laid.x).requires_grad_(x_trains)
        w, b = part(w_HK, laid.w).requires_grad_(w_trains), b_H[laid.bias].requires_grad_()
        with world.recorder.recording() as records:
            layer = replace(laid.product, keep=keep)
            layer(x, w, b).backward(part(g_SNH, laid.y))
            layer.pending_gradients.finish()
        return [record.kind for record in records]

    first, second = launch(work, 2, ranks="threads")
    assert first == second
    return first


def test_an_input_that_needs_no_gradient_is_sent_none_and_its_weight_is_not_fetched_again():
    assert kinds_sent(Way(*"ThF"), x_trains=False, keep=True) == ["all_gather"]
    assert kinds_sent(Way(*"ChF"), x_trains=False) == []
    assert kinds_sent(Way(*"TtT"), x_trains=False) == ["all_gather", "reduce_scatter"]


def test_a_weight_that_is_not_trained_is_sent_no_gradient_and_its_input_is_not_gathered_again():
    assert kinds_sent(Way(*"TtT"), w_trains=False, keep=True) == ["all_gather"]
    assert kinds_sent(Way(*"ThF"), w_trains=False) == ["all_gather", "reduce_scatter"]


def test_a_weight_used_in_several_products_collects_the_gradients_of_all():
    def work(world):
        axes = world.axes(Mesh(tp=2))
        laid = lay_out({"tp": Way(*"TtT")}, axes, {"tp": world.rank})
        x_SNK, w_HK, b_H, g_SNH = operands()
        x, g, w = part(x_SNK, laid.x), part(g_SNH, laid.y), nn.Parameter(part(w_HK, laid.w))
        for _ in range(2):
            sum((laid.product(x, w, b_H) * g).sum() for _ in range(3)).backward()
        laid.product.pending_gradients.finish()
        return float((w.grad - 6 * part(one_device()[2], laid.w)).abs().max())

    assert max(launch(work, 2, ranks="threads")) <= 1e-12


# ---- what travels while something is multiplied


ASYNC = ("all_reduce_async", "all_gather_async", "gather_parts_async", "reduce_scatter_parts_async")
PRODUCTS = ("_multiply", "_input_gradient", "_weight_gradient")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_no_message_is_under_way_while_something_is_multiplied(monkeypatch, keep, overlap):
    under_way, found = local(), []

    def counted(start):
        def begin(axis, *args, **named):
            started = start(axis, *args, **named)
            pending = started[1] if isinstance(started, tuple) else started
            under_way.messages = {*getattr(under_way, "messages", ()), pending}
            return started

        return begin

    def watched(multiply):
        def run(*args):
            waiting = getattr(under_way, "messages", ())
            found.append((multiply.__name__, sum(pending._finish is not None for pending in waiting)))
            return multiply(*args)

        return run

    for name in ASYNC:
        monkeypatch.setattr(Axis, name, counted(getattr(Axis, name)))
    for name in PRODUCTS:
        monkeypatch.setattr(grid, name, watched(getattr(grid, name)))
    ways = {"row": Way("T", "t", "T"), "col": Way("F", "h", "F")}
    launch(run, 4, ways, {"row": 2, "col": 2}, [(keep, overlap)], ranks="threads")
    assert {name for name, _ in found} == set(PRODUCTS)
    assert {name for name, count in found if count} >= ({"_multiply", "_weight_gradient"} if overlap else set())
    assert overlap or not any(count for _, count in found)
