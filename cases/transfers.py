"""Transfers drawn by seed: every placement of up to 4 ranks and every pair of sbp, even and uneven shapes.

Each rank computes what ``torch.chunk`` would give it of a whole that all know; terms of a sum are gathered by other
means and added. Numbers are whole, so that sums are exact and equality is to the bit.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.comm.world import World
from shardwright.global_tensor import GlobalTensor, Placement, placement, sbp, to_global
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.tensor import wrap

GRIDS = {1: ((1,), (1, 1)), 2: ((2,), (1, 2), (2, 1)), 3: ((3,), (1, 3), (3, 1)), 4: ((4,), (1, 4), (4, 1), (2, 2))}
MOST_DIMS, DTYPES = 3, (torch.float64, torch.float32, torch.int64, torch.int32)

Form = tuple[object, ...]


class Drawn(NamedTuple):
    """One transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Placement
    before: Form
    destination: Placement
    after: Form


@cache
def placements(num_axes: int, num_ranks: int = 4) -> tuple[Placement, ...]:
    """Every placement of that many axes, in every order of every set of ranks."""
    return tuple(
        placement("cpu", torch.tensor(ranks).view(grid))
        for size in range(1, num_ranks + 1)
        for ranks in permutations(range(num_ranks), size)
        for grid in GRIDS[size]
        if len(grid) == num_axes
    )


@cache
def forms(num_dims: int, num_axes: int) -> tuple[Form, ...]:
    """Every sbp of that many axes for a tensor of that many dims."""
    letters = (sbp.broadcast, sbp.partial_sum, *map(sbp.split, range(num_dims)))
    return tuple(product(letters, repeat=num_axes))


@cache
def pairs() -> tuple[tuple[Form, Form], ...]:
    """Every pair of forms of a tensor of three dims, on one or two axes each."""
    every = (*forms(MOST_DIMS, 1), *forms(MOST_DIMS, 2))
    return tuple(product(every, every))


def draw(number: int, seed: int = 0) -> Drawn:
    """The transfer of that number: the first ones go through all pairs and all placements in turn."""
    rng = random.Random(f"{seed}/{number}")
    if number < len(pairs()):
        before, after = pairs()[number]
        num_dims = MOST_DIMS
    else:
        num_dims = rng.randint(1, MOST_DIMS)
        before, after = (rng.choice(forms(num_dims, rng.randint(1, 2))) for _ in "ab")
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12) if rng.random() < 0.95 else (0, 1, 2)
    shape = tuple(rng.choice(sizes) for _ in range(num_dims))
    source, destination = (_placement(number, each, rng) for each in (before, after))
    return Drawn(shape, rng.choice(DTYPES), source, before, destination, after)


def _placement(number: int, form: Form, rng: random.Random) -> Placement:
    every = placements(len(form))
    return every[number % len(every)] if number < 2 * len(pairs()) else rng.choice(every)


def shard_of(whole: Tensor, where: Placement, form: Form, rank: int, *, terms: bool) -> Tensor | None:
    """What ``torch.chunk`` gives this rank; as a term, times coordinate + 1 on the axes of a sum."""
    coord = where.coord(rank)
    if coord is None:
        return None
    for one, size, index in zip(form, where.shape, coord, strict=True):
        if isinstance(one, type(sbp.split(0))):
            chunks = whole.chunk(size, one.dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(one.dim, 0, 0)
        elif one == sbp.partial_sum and terms:
            whole = whole * (index + 1)
    return whole


def held(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """The numbers each term is a multiple of, and the whole that they add up to."""
    base = (torch.arange(torch.Size(drawn.shape).numel()) * 7 % 97).view(drawn.shape).to(drawn.dtype)
    factor = 1
    for one, size in zip(drawn.before, drawn.source.shape, strict=True):
        factor *= size * (size + 1) // 2 if one == sbp.partial_sum else 1
    return base, base * factor


def sweep(world: World, first: int, last: int, seed: int = 0, *, every_gradient: int = 5) -> list[str]:
    """Carries out these transfers, and says which came out wrong; every fifth is taken back by its gradient."""
    wrong: list[str] = []
    sums: list[tuple[int, Tensor]] = []
    for number in range(first, last):
        drawn = draw(number, seed)
        base, whole = held(drawn)
        x = _given(shard_of(base, drawn.source, drawn.before, world.rank, terms=True), base, drawn.source, drawn.before)
        gradient = number % every_gradient == 0 and drawn.dtype.is_floating_point
        y = to_global(x.requires_grad_(gradient), drawn.destination, drawn.after)
        _judge(world, number, y, whole, sums, wrong)
        if gradient:
            weight = shard_of(base, drawn.destination, drawn.after, world.rank, terms=False)
            plain = tuple(sbp.broadcast if one == sbp.partial_sum else one for one in drawn.after)
            y.backward(_given(weight, base, drawn.destination, plain))
            _judge(world, number, x.grad, base, sums, wrong)
    wrong += _wrong_sums(world, sums, seed)
    return wrong


def _given(local: Tensor | None, whole: Tensor, where: Placement, form: Form) -> GlobalTensor:
    """``from_local`` for parts whose shapes are known, so that a transfer is all that is sent."""
    if local is None:
        local = whole.new_empty((0,) * whole.ndim)
    return wrap(local.clone(), whole.shape, GlobalLayout(where, form))


def _judge(world: World, number: int, y, whole: Tensor, sums: list, wrong: list[str]) -> None:
    expected = shard_of(whole, y.placement, y.sbp, world.rank, terms=False)
    local = y.to_local().detach()
    if expected is None:
        if local.numel():
            wrong.append(f"{number}: rank {world.rank} is not a member, and holds {tuple(local.shape)}")
    elif local.shape != expected.shape or local.dtype != expected.dtype:
        wrong.append(f"{number}: rank {world.rank} holds {tuple(local.shape)} and not {tuple(expected.shape)}")
    elif sbp.partial_sum not in y.sbp and not torch.equal(local, expected):
        wrong.append(f"{number}: rank {world.rank} holds other values")
    if sbp.partial_sum in y.sbp:
        sums.append((number, y, whole))


def _num(whole: Tensor, y: GlobalTensor, rank: int) -> int:
    part = shard_of(whole, y.placement, y.sbp, rank, terms=False)
    return 0 if part is None else part.numel()


def _wrong_sums(world: World, sums: list, seed: int) -> list[str]:
    """Adds the terms of all sums, gathered in one message; no transfer of the library's is used."""
    wrong: list[str] = []
    mine = torch.cat([torch.empty(0), *(y.to_local().detach().flatten() for _, y, _ in sums)]).double()
    sizes = [sum(_num(whole, y, rank) for _, y, whole in sums) for rank in range(world.size)]
    parts = list(world.everyone().all_gather(mine, sizes=sizes).split(sizes))
    for number, y, whole in sums:
        total = torch.zeros(whole.shape, dtype=torch.float64)
        counted: dict[tuple, Tensor] = {}
        for rank, coord in y.placement.coords:
            piece = shard_of(total, y.placement, y.sbp, rank, terms=False)
            values, parts[rank] = parts[rank][: piece.numel()].view(piece.shape), parts[rank][piece.numel() :]
            key = tuple(-1 if one == sbp.broadcast else i for one, i in zip(y.sbp, coord, strict=True))
            if key not in counted:
                counted[key] = values
                piece += values
            elif not torch.equal(values, counted[key]):
                wrong.append(f"{number}: rank {rank} holds another copy of a term")
        if not torch.equal(total, whole.double()):
            wrong.append(f"{number}: the terms do not add up to the whole")
    return wrong
