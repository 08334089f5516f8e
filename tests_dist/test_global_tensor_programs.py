"""Programs written with ``to_global`` alone, over gloo processes; what is printed; what is refused, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from examples import global_tensors as example
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from shardwright.errors import CheckpointError, LayoutError, PlanError
from shardwright.global_tensor import (
    arange,
    from_local,
    full,
    load,
    module_to_global,
    ones,
    placement,
    plan_to_global,
    randn,
    save,
    sbp,
    to_global,
    zeros,
)

# ---- one matmul, four ways


def four_ways(world) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (5, 6), "w": (6, 7), "v": (7, 3)}
    ways = {
        example.data_parallel: ("x", "w", (sbp.split(0),)),
        example.model_parallel: ("x", "w", (sbp.split(1),)),
        example.pipeline_parallel: ("x", "w", "v", (sbp.split(0),)),
        example.hybrid_parallel: ("x", "w", (sbp.split(0), sbp.split(1))),
    }
    for way, (*names, one_sbp) in ways.items():
        given = [torch.randn(shapes[name], generator=draw, dtype=torch.float64).requires_grad_() for name in names]
        plain = [x.detach().clone().requires_grad_() for x in given]
        found, expected = way(*given), torch.linalg.multi_dot(plain)
        assert found.sbp == one_sbp
        torch.testing.assert_close(found.full_tensor().detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        found.square().sum().backward()
        expected.square().sum().backward()
        for mine, theirs in zip(given, plain, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_one_matmul_written_four_ways_is_one_matmul(pools):
    pools(4).run(four_ways)


def test_two_stages_of_two_ranks_train_to_the_losses_and_weights_of_one_device(pools):
    expected, weights = example.train_plain()
    for losses, found in pools(4).run(example.train_hybrid):
        assert losses == pytest.approx(expected, rel=1e-12)
        for a, b in zip(found, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- creation


def created(world) -> None:
    where = placement("cpu", ranks=[2, 0, 3])
    for one_sbp in (sbp.split(0), sbp.broadcast, sbp.partial_sum):
        assert torch.equal(arange(1, 8, 2, placement=where, sbp=one_sbp).full_tensor(), torch.arange(1, 8, 2))
        assert torch.equal(full((2, 3), 5, placement=where, sbp=one_sbp).full_tensor(), torch.full((2, 3), 5))
        assert torch.equal(ones(4, 2, placement=where, sbp=one_sbp).full_tensor(), torch.ones(4, 2))
        assert torch.equal(zeros((4, 2), placement=where, sbp=one_sbp).full_tensor(), torch.zeros(4, 2))
    torch.manual_seed(world.rank)  # ranks that would draw different numbers
    x = randn(6, 5, placement=where, sbp=sbp.split(0))
    torch.manual_seed(0)
    grid = placement("cpu", ranks=[[0, 1], [2, 3]])
    y = randn(6, 5, placement=grid, sbp=(sbp.partial_sum, sbp.split(1)))
    assert torch.equal(x.full_tensor(), y.full_tensor())
    whole = x.full_tensor()
    assert len(set(whole.flatten().tolist())) == whole.numel(), "no two shards hold the same numbers"


def test_creation_gives_the_same_tensor_under_every_layout(pools):
    pools(4).run(created)


def random_operators(world) -> None:
    where = placement("cpu", ranks=[0, 1, 2, 3])
    for fill in (lambda x: torch.rand_like(x), lambda x: x.clone().normal_(), lambda x: nn.functional.dropout(x + 1)):
        torch.manual_seed(world.rank)
        found = [
            fill(zeros(8, 50, placement=where, sbp=one_sbp)).full_tensor() for one_sbp in (sbp.split(0), sbp.split(1))
        ]
        for whole in found:
            assert len({tuple(row.tolist()) for row in whole}) == 8, "no two shards hold the same numbers"
            copies = world.everyone().all_gather(whole.unsqueeze(0))
            assert all(torch.equal(each, whole) for each in copies)


def test_random_numbers_differ_between_shards_and_agree_between_copies(pools):
    pools(4).run(random_operators)


def uneven_parts(world) -> None:
    where = placement("cpu", ranks=[0, 1, 2, 3])
    sizes = [7, 6, 6, 6]  # cut evenly, and not as torch.chunk cuts
    whole = torch.arange(50.0).view(25, 2)
    mine = whole.split(sizes)[world.rank].clone().requires_grad_()
    x = from_local(mine, where, sbp.split(0))
    assert torch.equal(x.full_tensor().detach(), whole)
    assert x.to_local().shape == whole.chunk(4)[world.rank].shape
    (x * x).sum().backward()
    assert torch.equal(mine.grad, 2 * whole.split(sizes)[world.rank])


def test_parts_that_are_cut_otherwise_are_cut_anew(pools):
    pools(4).run(uneven_parts)


# ---- modules


def whole_module(world) -> None:
    torch.manual_seed(world.rank)  # the first rank's values count
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    plain[2].weight.requires_grad_(False)
    layer = module_to_global(
        copy.deepcopy(plain), placement("cpu", ranks=[1, 3]), {"0.weight": sbp.split(0), "0.bias": sbp.split(0)}
    )
    assert layer[0].weight.sbp == (sbp.split(0),)
    assert layer[2].weight.sbp == (sbp.broadcast,)
    assert not layer[2].weight.requires_grad
    for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        first = theirs.detach().clone()
        world.everyone().broadcast(first, 1)
        assert torch.equal(mine.full_tensor().detach(), first)
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    x = ones(4, 5, placement=placement("cpu", ranks=[1, 3]), sbp=sbp.split(0), dtype=torch.float64)
    before = layer[0].weight.full_tensor().detach().clone()
    layer(x).sum().backward()
    nn.utils.clip_grad_norm_([p for p in layer.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    assert layer[0].weight.sbp == (sbp.split(0),)
    assert not torch.equal(layer[0].weight.full_tensor(), before)


def test_a_module_becomes_global_and_trains(pools):
    pools(4).run(whole_module)


# ---- checkpoints


def saved_and_loaded(world, folder: str) -> None:
    grid, two = placement("cpu", ranks=[[0, 1], [2, 3]]), placement("cpu", ranks=[3, 1])
    x = arange(35, placement=grid, sbp=(sbp.split(0), sbp.partial_sum)).view(5, 7)
    y = full((), 3.5, placement=two, sbp=sbp.broadcast)
    path = save({"x": x, "y": y}, folder, step=7, extra={"epoch": 2})
    other = {"x": zeros(5, 7, placement=two, sbp=sbp.split(1), dtype=torch.int64)}
    other["y"] = zeros((), placement=grid, sbp=(sbp.partial_sum, sbp.broadcast))
    assert load(path, other) == {"epoch": 2}
    assert torch.equal(other["x"].full_tensor(), torch.arange(35).view(5, 7))
    assert torch.equal(other["y"].full_tensor(), torch.tensor(3.5))
    with pytest.raises(CheckpointError, match="has no 'z'"):
        load(path, {"z": x})


def test_tensors_saved_under_one_layout_load_under_another(pools, tmp_path):
    pools(4).run(saved_and_loaded, str(tmp_path))


# ---- printing, plans


def printed(world) -> str:
    x = arange(4, placement=placement("cpu", ranks=[0, 2]), sbp=sbp.split(0))
    return repr(x)


def test_a_tensor_says_where_it_lies_and_what_is_here(pools):
    head = 'GlobalTensor(shape=[4], dtype=torch.int64, placement("cpu", ranks=[0, 2]), sbp=split(0),\n  '
    here = ["here: tensor([0, 1])", "nothing on this rank", "here: tensor([2, 3])", "nothing on this rank"]
    assert pools(4).run(printed) == [f"{head}{each})" for each in here]


def counted(world, shape, source, before, destination, after) -> int:
    x = ones(*shape, placement=placement("cpu", source), sbp=before)
    with world.recorder.recording() as records:
        x.to_global(placement("cpu", destination), after)
    total = torch.tensor(sum(each.num_bytes for each in records if each.kind == "send"))
    return int(world.everyone().all_reduce(total).item())


def test_a_transfer_sends_the_bytes_that_its_plan_foretells(pools):
    cases = [
        ((8, 4), [0, 1], sbp.split(0), [2, 3], sbp.split(1)),
        ((8, 4), [0, 1, 3], sbp.split(0), [2, 3], sbp.split(1)),
        ((9, 5), [[0, 1], [2, 3]], (sbp.split(0), sbp.partial_sum), [1, 0], sbp.broadcast),
        ((4, 4), [0, 1, 2], sbp.broadcast, [3, 0], sbp.partial_sum),
    ]
    for shape, source, before, destination, after in cases:
        route = plan_to_global(shape, placement("cpu", source), before, placement("cpu", destination), after)
        if all(step.kind == "messages" for step in route.steps):
            found = pools(4).run(counted, shape, source, before, destination, after)
            assert found == [route.moved_bytes(4)] * 4


# ---- what is refused


def odd_parts(world) -> DTensor:
    """Ranks 0 and 1 hold what they should of ten rows, the others do not."""
    part, mesh = torch.ones([3, 3, 2, 2][world.rank], 2), init_device_mesh("cpu", (4,))
    return DTensor.from_local(part, mesh, [Shard(0)], shape=torch.Size((10, 2)), stride=(2, 1))


def refusals(world) -> list[str]:
    two, other = placement("cpu", ranks=[0, 1]), placement("cpu", ranks=[2, 3])
    everyone = placement("cpu", ranks=[0, 1, 2, 3])
    x, y = ones(4, 4, placement=two, sbp=sbp.split(0)), ones(4, 4, placement=other, sbp=sbp.split(0))
    kind = torch.float64 if world.rank else torch.int64
    device = "meta" if world.rank else "cpu"
    part, whole = torch.ones(4, requires_grad=True), sbp.broadcast
    wrong = {
        "a rank twice": lambda: placement("cpu", ranks=[0, 0]),
        "a rank outside": lambda: placement("cpu", ranks=[0, 9]),
        "no grid": lambda: placement("cpu", ranks=[[0, 1], [2]]),
        "no ranks": lambda: placement("cpu", ranks=[]),
        "no type": lambda: placement("nowhere", ranks=[0]),
        "no such dim": lambda: x.to_global(other, sbp.split(2)),
        "too many sbp": lambda: x.to_global(other, (sbp.split(0), sbp.broadcast)),
        "no sbp": lambda: x.to_global(other, "split"),
        "no sbp for other axes": lambda: x.to_global(placement("cpu", ranks=[[0], [1]])),
        "not a placement": lambda: x.to_global([0, 1], sbp.broadcast),
        "two placements": lambda: x + y,
        "a plain tensor": lambda: x + torch.ones(4, 4),
        "a plain tensor first": lambda: torch.ones(4, 4) @ x,
        "parts that do not fit": lambda: from_local(torch.ones(world.rank + 1, world.rank + 1), everyone, sbp.split(0)),
        "parts of two types": lambda: from_local(torch.ones(2).to(kind), everyone, sbp.split(0)),
        "a part that is missing": lambda: from_local(torch.ones(2) if world.rank else None, everyone, sbp.split(0)),
        "a global part": lambda: from_local(x, everyone, sbp.split(0)),
        "copies that differ": lambda: from_local(torch.full((2,), world.rank), everyone, sbp.broadcast, check=True),
        "numbers on every rank": lambda: x.sum().item(),
        "a list on every rank": lambda: x.tolist(),
        "a truth on every rank": lambda: bool(x.sum() > 0),
        "an operator without a rule": lambda: torch.linalg.inv(x),
        "a shape that depends on values": lambda: x.nonzero(),
        "a pattern that matches nothing": lambda: module_to_global(nn.Linear(2, 2), two, {"weights": sbp.split(0)}),
        "another device": lambda: x.to("meta"),
        "pickling": lambda: copy.copy(x).__reduce_ex__(2),
        "a plain tensor without a place": lambda: to_global(torch.ones(2)),
        "a device that no rank has": lambda: placement("meta", ranks=[0]),
        "plain data": lambda: setattr(x, "data", torch.ones(4, 4)),
        "data of another layout": lambda: setattr(x, "data", x.to_global(two, sbp.split(1))),
        "a plain number that is written to": lambda: torch.tensor(1.0).add_(x.sum()),
        "a plain number with a gradient": lambda: x * torch.tensor(2.0, requires_grad=True),
        "a plain gradient": lambda: x.detach().requires_grad_().clone().backward(torch.ones(4, 4)),
        "a plain gradient over a transfer": lambda: (
            x.detach().requires_grad_().to_global(other, sbp.split(1)).backward(torch.ones(4, 4))
        ),
        "a list of weights": lambda: module_to_global(nn.Sequential(nn.GRU(2, 2)), two),
        "a module that differs": lambda: module_to_global(nn.Linear(2, 2 + world.rank), everyone),
        "a placement that differs": lambda: from_local(torch.ones(2), placement("cpu", [world.rank]), sbp.split(0)),
        "a plain tensor to save": lambda: save({"x": torch.ones(2)}, "nowhere"),
        "other tensors to save": lambda: save({f"x{world.rank}": x}, "nowhere"),
        "a part without strides": lambda: from_local(torch.eye(3).to_sparse(), two, sbp.broadcast),
        "another shape in place": lambda: x.to_global(sbp=sbp.broadcast).t_(),
        "another size in place": lambda: x.to_global(sbp=sbp.broadcast).resize_(3),
        "sharing with other processes": lambda: module_to_global(nn.Linear(2, 2), two).share_memory(),
        "no module": lambda: module_to_global(3, two),
        "values here and not there": lambda: module_to_global(nn.Linear(2, 2, device=device), two),
        "a dim that is no number": lambda: x.to_global(sbp=sbp.split("0")),
        "two dtypes": lambda: x @ x.double(),
        "the largest of nothing": lambda: zeros(0, 3, placement=two, sbp=sbp.split(0)).max(),
        "a copy of a result": lambda: copy.deepcopy(x.detach().requires_grad_() * 2),
        "a DTensor of odd parts": lambda: to_global(odd_parts(world), everyone, sbp.broadcast),
        "a part's gradient of another shape": lambda: from_local(part, everyone, whole, grad_sbp=sbp.split(0)),
        "the same back": lambda: x.to_local(grad_placements=[whole]),
        "batch norm of a cut batch": lambda: nn.functional.batch_norm(x, None, None, training=True),
    }  # fmt: skip
    said = []
    for name, call in wrong.items():
        try:
            found = call()
        except (LayoutError, PlanError, CheckpointError) as refusal:
            said.append(f"{name}: {refusal}")
        else:
            said.append(f"{name}: NOT REFUSED {found}")
    x.to_global(other, sbp.split(1))  # and no rank is left waiting
    world.everyone().barrier()
    return said


def test_bad_input_is_refused_alike_on_every_rank_and_no_rank_waits(pools):
    pool = pools(4)
    first, *others = pool.run(refusals)
    for each in first:
        assert "NOT REFUSED" not in each, each
        for word in ("given:", "allowed:", "fix:"):
            assert word in each, each
    for said in others:
        for mine, theirs in zip(first, said, strict=True):
            assert mine == theirs


# ---- what torch does with tensors


def used_by_torch(world) -> None:
    where = placement("cpu", ranks=[1, 2, 3])
    layer = module_to_global(nn.Linear(6, 5), where, {"weight": sbp.split(0)})
    x = randn(4, 6, placement=where, sbp=sbp.split(1), seed=0)
    whole, weight, bias = (each.full_tensor().detach() for each in (x, layer.weight, layer.bias))
    expected = nn.functional.linear(whole, weight, bias)
    with torch.inference_mode():  # there operators are not decomposed
        torch.testing.assert_close(layer(x).full_tensor(), expected)
        torch.testing.assert_close((x @ layer.weight.t() + layer.bias).full_tensor(), expected)
        assert torch.equal(nn.Dropout().eval()(x).full_tensor(), whole)
        dropped = nn.functional.dropout(x, 0.5, training=True).full_tensor()
        assert 0 < dropped.count_nonzero() < 24
        assert torch.equal(dropped, torch.where(dropped == 0, 0, 2 * whole))
    layer.double()
    assert layer.weight.dtype == layer.weight.to_local().dtype == torch.float64
    layer.load_state_dict({name: 2 * each for name, each in layer.state_dict().items()})
    torch.testing.assert_close(layer.weight.full_tensor().detach(), 2 * weight.double())
    again = copy.deepcopy(layer)
    assert again.weight.sbp == (sbp.split(0),)
    for _ in range(2):  # gradients accumulate, whatever the layout of each
        again(x.double()).square().sum().backward()
    twice = (2 * weight.double()).requires_grad_()
    loss = 2 * nn.functional.linear(whole.double(), twice, 2 * bias.double()).square().sum()
    (wanted,) = torch.autograd.grad(loss, [twice])
    torch.testing.assert_close(again.weight.grad.full_tensor(), wanted)


def test_modules_of_global_tensors_are_cast_copied_loaded_and_used_without_gradients(pools):
    pools(4).run(used_by_torch)


# ---- what must not be silently wrong


def never_silently(world) -> None:
    where = placement("cpu", ranks=[0, 1, 2, 3])
    terms = full((4, 4), 1.0, placement=where, sbp=sbp.partial_sum)
    there = zeros(4, 4, placement=where, sbp=sbp.broadcast)
    with pytest.raises(PlanError, match="out="):
        torch.add(terms, terms, out=there)
    assert terms.full_tensor().eq(1).all()
    numbers = randn(5, 6, placement=where, sbp=sbp.split(0), seed=1).to_global(where, sbp.partial_sum) * 9
    expected = numbers.full_tensor().cumsum(0, dtype=torch.int64)
    assert torch.equal(numbers.cumsum(0, dtype=torch.int64).full_tensor(), expected)
    index = full((2,), 99, placement=where, sbp=sbp.broadcast, dtype=torch.int64)
    with pytest.raises(IndexError, match="out of range"):
        nn.functional.embedding(index, ones(7, 3, placement=where, sbp=sbp.split(0)))
    with pytest.raises(IndexError, match="class of one_hot"):
        nn.functional.one_hot(index, 99)
    assert nn.functional.one_hot(index, 100).full_tensor().sum() == 2
    mesh = init_device_mesh("cpu", (4,))
    for one_sbp in (Partial("avg"), Partial("max")):
        with pytest.raises(LayoutError, match="no sbp"):
            to_global(DTensor.from_local(torch.ones(3), mesh, [one_sbp]), where, sbp.broadcast)
    cut = randn(8, placement=where, sbp=sbp.split(0), seed=2)
    assert cut.to_global(where, sbp.split(0)) is cut
    # a second derivative follows a transfer, and is refused where a plain tensor is between
    leaf = full((8,), 2.0, placement=where, sbp=sbp.split(0), dtype=torch.float64).requires_grad_()
    cubes = (leaf.to_global(where, sbp.broadcast) ** 3).sum()
    (first,) = torch.autograd.grad(cubes, [leaf], create_graph=True)
    (first**2).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), torch.full((8,), 288.0, dtype=torch.float64))
    plain = torch.full((2,), 2.0, requires_grad=True)
    with pytest.raises(PlanError, match="create_graph"):
        torch.autograd.grad((from_local(plain, where, sbp.split(0)) ** 3).sum().to_local(), [plain], create_graph=True)


def test_what_cannot_be_right_is_refused_and_not_silently_wrong(pools):
    pools(4).run(never_silently)
