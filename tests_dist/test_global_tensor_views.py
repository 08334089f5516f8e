"""Views of global tensors see what is written to their base, or are not read any more; sums in parts and infinity."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.global_tensor import placement, randn, sbp


def written_under_views(world) -> None:
    three = placement("cpu", ranks=[2, 0, 1])  # rank 3 holds nothing, and is told the same
    cut = randn(5, 3, placement=three, sbp=sbp.split(0), seed=0)
    writes = {
        "in place": lambda x: x.add_(1),
        "through a view that sees": lambda x: x[:, 1].zero_(),
        "through data": lambda x: x.data.mul_(2),
        "at random": lambda x: x.normal_(),
        "of a list": lambda x: torch._foreach_add_([x], 1),
    }
    for write in writes.values():
        x = cut.clone()
        gathered, of_it, own, kept = x[1:3], x.view(3, 5)[0].detach(), x[:, 0], x[1:3].clone()
        before = kept.full_tensor()
        write(x)
        for stale in (gathered, of_it):
            for read in (lambda x: x.sum(), lambda x: x.full_tensor(), lambda x: x.to_local(), lambda x: x.view(-1)):
                with pytest.raises(PlanError, match="before its base was written to"):
                    read(stale)
        assert torch.equal(own.full_tensor(), x.full_tensor()[:, 0])
        assert torch.equal(kept.full_tensor(), before)
        assert torch.equal(x[1:3].full_tensor(), x.full_tensor()[1:3])
    weight = cut.clone().requires_grad_()
    row = weight.detach()[0]
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
    with pytest.raises(PlanError, match="before its base was written to"):
        row.sum()
    with pytest.raises(PlanError, match="gathered to be looked at"):
        cut[1:3].normal_()
    for _ in range(2):  # gradients that are gathered views of each other still add up
        (weight.view(3, 5)[0] * 2).sum().backward()
    assert weight.grad.full_tensor().flatten().tolist() == [5.0] * 5 + [1.0] * 10
    world.everyone().barrier()


def test_a_gathered_view_is_not_read_once_its_base_was_written_to(pools):
    pools(4).run(written_under_views)
