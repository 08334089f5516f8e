"""Views of global tensors see what is written to their base, or can no longer be read; partial sums and infinity."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor import full, ones, placement, randn, sbp


def written_under_views(world) -> None:
    three = placement("cpu", ranks=[2, 0, 1])  # rank 3 holds nothing, and is told the same
    cut = randn(5, 3, placement=three, sbp=sbp.split(0), seed=0)
    writes = {
        "in place": lambda x: x.add_(1),
        "through a view that sees": lambda x: x[:, 1].zero_(),
        "through data": lambda x: x.data.mul_(2),
        "at random": lambda x: x.normal_(),
        "of a list": lambda x: torch._foreach_add_([x], 1),
        "as its own result": lambda x: torch.add(x, 10, out=x),
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
    with pytest.raises(PlanError, match="gathered to be looked at"):
        torch.add(view := cut[1:3], 10, out=view)
    for _ in range(2):  # gradients that are gathered views of each other still add up
        (weight.view(3, 5)[0] * 2).sum().backward()
    assert weight.grad.full_tensor().flatten().tolist() == [5.0] * 5 + [1.0] * 10
    world.everyone().barrier()


def test_a_gathered_view_is_not_read_once_its_base_was_written_to(pools):
    pools(4).run(written_under_views)


def written_as_results(world) -> None:
    two = placement("cpu", ranks=[1, 2])
    terms = full((3,), 5.0, placement=two, sbp=sbp.partial_sum)
    for function, expected in ((torch.add, 6.0), (torch.sub, 4.0), (torch.mul, 5.0)):
        x = terms.clone()
        function(x, 1, out=x)
        assert x.full_tensor().tolist() == [expected] * 3, function
    square = ones(2, 2, placement=two, sbp=sbp.split(0))
    for refused in (lambda x: torch.mm(x, x, out=x), lambda x: torch.cumsum(x, 0, out=x)):
        with pytest.raises(PlanError, match="leave out 'out='"):
            refused(square.clone())
    world.everyone().barrier()


def test_an_operator_whose_result_is_its_input_is_right_or_refused(pools):
    pools(4).run(written_as_results)


# ---- partial sums and infinity


def infinities(world) -> None:
    two = placement("cpu", ranks=[1, 2])
    terms, inf = full((3,), 5.0, placement=two, sbp=sbp.partial_sum), float("inf")  # 5 and 0
    zeros = ones(3, placement=two, sbp=sbp.broadcast) - 1
    infinite = {
        "times": terms * inf,
        "from the left": -inf * terms * -1,
        "times a number in a tensor": terms * torch.tensor(inf),
        "by zero": terms / 0,
        "by zero in a tensor": terms / torch.tensor(0.0),
        "by zeros": terms / zeros,
        "in place": terms.clone().div_(0),
        "in a list": torch._foreach_mul([terms], inf)[0],
        "added": torch.add(terms, terms, alpha=inf),
    }
    for name, found in infinite.items():
        assert found.full_tensor().tolist() == [inf] * 3, name
    for found in (terms * 2, terms / 4, terms * torch.tensor(2.0), terms / torch.tensor(2.0), terms * (zeros + 1)):
        assert found.sbp == (sbp.partial_sum,)  # nothing was sent


def test_a_sum_in_parts_times_infinity_or_by_zero_is_infinite_as_on_one_device(pools):
    pools(4).run(infinities)


# ---- gradients of two placements


def clipped(world) -> None:
    stages = [[full((4, 3), 1.0, placement=placement("cpu", ranks), sbp=sbp.split(0))] for ranks in ([0, 1], [2, 3])]
    for factor, (x,) in enumerate(stages, 1):
        (factor * x.requires_grad_()).sum().backward()
    with pytest.raises(LayoutError, match="get_total_norm of each"):
        clip_grad_norm_([x for (x,) in stages], 1.0)
    everyone = placement("cpu", ranks=range(4))
    norms = [get_total_norm([p.grad for p in stage]).to_global(everyone, sbp.broadcast) for stage in stages]
    total = torch.linalg.vector_norm(torch.stack(norms)).full_tensor()
    for factor, stage in enumerate(stages, 1):
        clip_grads_with_norm_(stage, 1.0, total)
        torch.testing.assert_close(stage[0].grad.full_tensor(), torch.full((4, 3), factor / 60**0.5))


def test_gradients_of_two_placements_are_clipped_by_their_norms_as_the_refusal_says(pools):
    pools(4).run(clipped)
