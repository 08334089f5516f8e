"""Layout transfers that every global tensor must do: values and gradients, over processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.global_tensor import from_local, placement, sbp

CASES = json.loads(Path(__file__).with_name("global_tensor_cases.json").read_text())["cases"]


def sbp_of(words: list[str]) -> tuple:
    """S(1), B and P as the library has them."""
    known = {"B": sbp.broadcast, "P": sbp.partial_sum}
    return tuple(known[w] if w in known else sbp.split(int(re.fullmatch(r"S\((\d+)\)", w).group(1))) for w in words)


def base_of(case: dict) -> Tensor:
    dtype, shape = getattr(torch, case["dtype"]), case["shape"]
    return (torch.arange(torch.Size(shape).numel()) % 97).reshape(shape).to(dtype)


def shard_of(whole: Tensor, where, spec: tuple, rank: int) -> Tensor | None:
    """What ``torch.chunk`` gives this rank, times coordinate + 1 on the axes of a sum; None on others."""
    if where.coord(rank) is None:
        return None
    for one, size, index in zip(spec, where.shape, where.coord(rank), strict=True):
        if isinstance(one, sbp.Shard):
            chunks = whole.chunk(size, one.dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(one.dim, 0, 0)
        elif one == sbp.partial_sum:
            whole = whole * (index + 1)
    return whole


def whole_of(world, x) -> Tensor:
    """The unsharded tensor, joined from all ranks' parts by a plain all-gather, not by the library's transfers."""
    axis = world.everyone()
    local = x.to_local().detach()
    total = torch.zeros(x.shape, dtype=x.dtype)
    seen = torch.zeros(x.shape, dtype=torch.int64)
    counted = set()
    for rank in range(world.size):
        shape = (shard_of(total, x.placement, x.sbp, rank) if rank in x.placement else local.new_empty(0)).shape
        part = local.clone().contiguous() if rank == world.rank else local.new_empty(shape)
        assert part.shape == shape or rank not in x.placement, f"rank {rank} holds {part.shape} and not {shape}"
        axis.broadcast(part, rank)
        if rank not in x.placement:
            assert part.numel() == 0
            continue
        copies = tuple(-1 if one == sbp.broadcast else i for one, i in zip(x.sbp, x.placement.coord(rank), strict=True))
        place = torch.arange(total.numel()).view(total.shape)
        for one, size, index in zip(x.sbp, x.placement.shape, x.placement.coord(rank), strict=True):
            if isinstance(one, sbp.Shard):
                chunks = place.chunk(size, one.dim)
                place = chunks[index] if index < len(chunks) else place.narrow(one.dim, 0, 0)
        if copies in counted:  # a copy is equal to the one that counts
            continue
        counted.add(copies)
        total.view(-1).index_add_(0, place.flatten(), part.flatten())
        seen.view(-1).index_add_(0, place.flatten(), torch.ones(part.numel(), dtype=torch.int64))
    assert (seen >= 1).all()
    copy = torch.empty_like(local)
    if world.rank in x.placement:  # every copy is the same
        if sbp.partial_sum not in x.sbp:
            torch.testing.assert_close(local, shard_of(total, x.placement, x.sbp, world.rank), rtol=0, atol=0)
    else:
        assert copy.numel() == 0
    return total


def transfers(world, case: dict) -> None:
    base = base_of(case)
    src, dst = placement("cpu", case["src"]["ranks"]), placement("cpu", case["dst"]["ranks"])
    before, after = sbp_of(case["src"]["sbp"]), sbp_of(case["dst"]["sbp"])
    factor = 1
    for one, size in zip(before, src.shape, strict=True):
        factor *= sum(range(1, size + 1)) if one == sbp.partial_sum else 1
    assert case["expect"]["logical"] in ("base", f"{factor}*base")
    x = from_local(shard_of(base, src, before, world.rank), src, before)
    if "grad" in case["expect"]:
        x.requires_grad_()
    y = x.to_global(dst, after)
    assert (y.placement, y.sbp, tuple(y.shape), y.dtype) == (dst, after, tuple(base.shape), base.dtype)
    found = whole_of(world, y)
    assert torch.equal(found, factor * base)
    assert found.sum().item() == case["expect"]["logical_sum"]
    if world.rank not in dst:
        assert y.to_local().numel() == 0
    if "grad" in case["expect"]:
        weights = from_local(base if world.rank in dst else None, dst, (sbp.broadcast,) * dst.ndim)
        (y * weights).sum().backward()
        assert (x.grad.placement, x.grad.sbp) == (src, before)
        assert torch.equal(whole_of(world, x.grad), base)


def stays(world) -> None:
    """A partial leaf that is redistributed to its own layout."""
    where = placement("cpu", [0, 1, 2, 3])
    x = from_local(torch.full((4,), world.rank + 1.0), where, sbp.partial_sum).requires_grad_()
    y = x.to_global(where, sbp.partial_sum)
    (y * from_local(torch.arange(4.0), where, sbp.broadcast)).sum().backward()
    assert x.grad.sbp == (sbp.partial_sum,)
    assert whole_of(world, x.grad).tolist() == [0.0, 1.0, 2.0, 3.0]
    with torch.no_grad():
        y.mul_(2)
    assert whole_of(world, x).tolist() == [10.0] * 4


def test_the_gradient_of_a_leaf_that_stays_lies_as_the_leaf_does(pools):
    pools(4).run(stays)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"].split(" (test")[0])
def test_a_transfer_arrives_whole_and_its_gradient_comes_back(pools, case):
    pools(4).run(transfers, case)
