"""Leaves, their gradients, copies and optimizers; what plain tensors may and may not do beside global ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import LayoutError
from shardwright.global_tensor import from_local, full, load, module_to_global, ones, placement, randn, save, sbp, zeros

# ---- optimizers


def stepped(world) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 3)).double()
    grid = placement("cpu", ranks=[[0, 1], [2, 3]])
    sbps = {"0.weight": (sbp.split(0), sbp.broadcast), "2.weight": (sbp.split(1), sbp.split(0))}
    x = torch.randn(4, 5, dtype=torch.float64)
    on_some = placement("cpu", ranks=[1, 2, 0])
    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adamax(p, foreach=True),
        lambda p: torch.optim.RMSprop(p, foreach=True, centered=True),
    ):
        one, first = copy.deepcopy(plain), module_to_global(copy.deepcopy(plain), grid, sbps)
        other = module_to_global(nn.Linear(3, 2).double(), on_some, {"*": sbp.split(0)})
        alone = nn.Linear(3, 2).double()
        alone.load_state_dict({name: each.full_tensor() for name, each in other.state_dict().items()})
        both, mine = make([*first.parameters(), *other.parameters()]), make([*one.parameters(), *alone.parameters()])
        for _ in range(2):
            both.zero_grad()
            mine.zero_grad()
            rows = from_local(x, grid, (sbp.broadcast, sbp.broadcast))
            hidden = first(rows)
            (hidden.square().sum().to_global(on_some, sbp.broadcast) + 0).backward()
            other(hidden.detach().to_global(on_some, sbp.broadcast)).square().sum().backward()
            hidden = one(x)
            hidden.square().sum().backward()
            alone(hidden.detach()).square().sum().backward()
            nn.utils.clip_grad_norm_(first.parameters(), 0.5, foreach=True)
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            both.step()
            mine.step()
        pairs = zip([*first.parameters(), *other.parameters()], [*one.parameters(), *alone.parameters()], strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a.detach().full_tensor(), b.detach(), rtol=1e-9, atol=1e-9)
        assert first[2].weight.sbp == sbps["2.weight"]


def test_optimizers_that_step_all_tensors_at_once_step_to_the_weights_of_one_device(pools):
    pools(4).run(stepped)


# ---- leaves


def leaves(world) -> None:
    where = placement("cpu", ranks=[2, 0, 3])
    # a cut weight keeps its slice of a replicated gradient; a partial sum stays one
    weight = randn(6, 4, placement=where, sbp=sbp.split(0), seed=1, requires_grad=True)
    x = randn(4, placement=where, sbp=sbp.broadcast, seed=2)
    (weight @ x).softmax(0).square().sum().backward()
    assert weight.grad.sbp == (sbp.split(0),)
    plain = weight.detach().full_tensor().requires_grad_()
    (plain @ x.full_tensor()).softmax(0).square().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)
    # copies: of gradients too, tied ones tied, results of operators not at all
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    again = copy.deepcopy(module_to_global(tied, where, {"0.weight": sbp.split(1), "1.weight": sbp.split(1)}))
    assert again[0].weight is again[1].weight is not tied[0].weight
    assert torch.equal(copy.deepcopy(weight).grad.full_tensor(), weight.grad.full_tensor())
    # another tensor's values, if its layout is the same
    weight.data = torch.zeros_like(weight)
    assert weight.requires_grad
    assert weight.full_tensor().eq(0).all()
    module_to_global(tied, placement("cpu", ranks=[1]))
    assert torch.equal(tied[0].weight.full_tensor(), again[0].weight.full_tensor())


def test_leaves_keep_their_slices_their_ties_and_what_they_are_given(pools):
    pools(4).run(leaves)


# ---- plain tensors


def plain_ones(world, folder: str) -> None:
    where = placement("cpu", ranks=[0, 1, 3])
    # a part is copied: the backward sees what the forward saw
    part = torch.full((2, 2), 3.0, requires_grad=True)
    loss = from_local(part, where, sbp.split(0)).square().sum()
    with torch.no_grad():
        part.zero_()
    loss.backward()
    assert part.grad.eq(6.0).all() if world.rank in where else part.grad is None
    # a number in a plain tensor is one number, not one for each member
    terms, two = full((), 5.0, placement=where, sbp=sbp.partial_sum), torch.tensor(2.0)
    assert (terms * two + two).full_tensor().item() == 12.0
    assert torch.stack((terms, two)).full_tensor().tolist() == [5.0, 2.0]
    rows = ones(4, 4, placement=where, sbp=sbp.split(1))
    assert torch.addmm(two, rows, rows).full_tensor().eq(6.0).all()
    # what is no number in a term is none in the sum
    mine = 5.0 if world.rank else float("nan")
    terms = from_local(torch.tensor([mine, 1.0]), where, sbp.partial_sum)
    assert torch.nansum(terms).full_tensor().item() == 3.0
    # a list is the same on every rank, and what does not fit is refused on every rank
    assert torch.equal(rows[[2, -1], [0, 1]].full_tensor(), torch.ones(2))
    rows[:, [0, 2]] = 7.0
    assert rows.full_tensor()[0].tolist() == [7.0, 1.0, 7.0, 1.0]
    for wrong in ([4], [True, False]):
        with pytest.raises(IndexError, match="does not fit"):
            rows[wrong]
    with pytest.raises(LayoutError, match="plain"):
        rows[torch.tensor([0, 1])]
    # tensors of nothing are saved and loaded
    empty, number = zeros(0, 3, placement=where, sbp=sbp.split(1)), full((), 2.5, placement=where, sbp=sbp.broadcast)
    path = save({"empty": empty, "number": number}, folder)
    found = {"empty": ones(0, 3, placement=placement("cpu", ranks=[2]), sbp=sbp.broadcast), "number": number * 0}
    load(path, found)
    assert found["number"].full_tensor().item() == 2.5


def test_plain_tensors_beside_global_ones_are_exactly_right_or_refused(pools, tmp_path):
    pools(4).run(plain_ones, str(tmp_path))
