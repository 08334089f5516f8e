"""One matmul, four ways; a pipeline by placement; a hybrid of both with accumulation: all with ``to_global`` alone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.global_tensor import GlobalTensor, module_to_global, placement, sbp, to_global

# ---- one matmul, four ways


def data_parallel(x: Tensor, w: Tensor) -> GlobalTensor:
    """Shards the rows of x and replicates w: each rank computes its own rows of the product."""
    two = placement("cpu", ranks=[0, 1])
    return spread(x, two, sbp.split(0)) @ spread(w, two, sbp.broadcast)


def model_parallel(x: Tensor, w: Tensor) -> GlobalTensor:
    """Replicates x and shards the columns of w: each rank computes its own columns of the product."""
    two = placement("cpu", ranks=[0, 1])
    return spread(x, two, sbp.broadcast) @ spread(w, two, sbp.split(1))


def pipeline_parallel(x: Tensor, w: Tensor, v: Tensor) -> GlobalTensor:
    """Computes the first product on ranks 0 and 1, the second on ranks 2 and 3."""
    first, second = placement("cpu", ranks=[0, 1]), placement("cpu", ranks=[2, 3])
    hidden = spread(x, first, sbp.broadcast) @ spread(w, first, sbp.split(1))
    return hidden.to_global(second, sbp.split(0)) @ spread(v, second, sbp.broadcast)


def hybrid_parallel(x: Tensor, w: Tensor) -> GlobalTensor:
    """Shards the rows of x over one axis of a grid of ranks, the columns of w over the other."""
    grid = placement("cpu", ranks=[[0, 1], [2, 3]])
    return spread(x, grid, (sbp.split(0), sbp.broadcast)) @ spread(w, grid, (sbp.broadcast, sbp.split(1)))


def spread(whole: Tensor, where, how) -> GlobalTensor:
    """Makes a global tensor with the sbp ``how`` from one that every rank has; its gradient is replicated."""
    everywhere = placement("cpu", ranks=range(torch.distributed.get_world_size()))
    return to_global(whole, everywhere, sbp.broadcast).to_global(where, how)


# ---- two stages, two ways data parallel, with accumulation


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).double()


def batches(num_steps: int, num_microbatches: int) -> list[list[tuple[Tensor, Tensor]]]:
    draw = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(4, 6, generator=draw, dtype=torch.float64), torch.randint(3, (4,), generator=draw))
            for _ in range(num_microbatches)
        ]
        for _ in range(num_steps)
    ]


def train_plain(num_steps: int = 3, num_microbatches: int = 2) -> tuple[list[float], list[Tensor]]:
    """Computes the same on one device."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in batches(num_steps, num_microbatches):
        total = 0.0
        for x, y in step:
            loss = nn.functional.cross_entropy(model(x), y) / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, [p.detach() for p in model.parameters()]


def train_hybrid(world: sw.World, num_steps: int = 3, num_microbatches: int = 2) -> tuple[list[float], list[Tensor]]:
    """Runs layers 0 to 2 on ranks 0 and 1, the others on ranks 2 and 3; each pair shards a microbatch's samples."""
    model, everyone = plain_model(), placement("cpu", ranks=range(world.size))
    stages = [placement("cpu", ranks=[0, 1]), placement("cpu", ranks=[2, 3])]
    first = module_to_global(copy.deepcopy(model[:3]), stages[0])
    second = module_to_global(copy.deepcopy(model[3:]), stages[1])
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for step in batches(num_steps, num_microbatches):
        total = 0.0
        for x, y in step:
            hidden = first(spread(x, stages[0], sbp.split(0)))
            scores = second(hidden.to_global(stages[1], sbp.split(0)))
            loss = nn.functional.cross_entropy(scores, spread(y, stages[1], sbp.split(0))) / num_microbatches
            loss.backward()  # through both stages, over to_global
            total += loss.detach().to_global(everyone, sbp.broadcast).item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, [p.detach().to_global(everyone, sbp.broadcast).to_local() for p in parameters]


def main(world: sw.World) -> None:
    """Runs once per rank."""
    x, w, v = torch.arange(20.0).view(4, 5), torch.ones(5, 8), torch.eye(8)
    for way in (data_parallel, model_parallel, hybrid_parallel):
        found = way(x, w)
        whole = found.full_tensor()
        if world.rank == 0:
            print(f"{way.__name__}: {found.placement} {sbp.sbp_text(found.sbp)}, equal: {torch.equal(whole, x @ w)}")
    found = pipeline_parallel(x, w, v)
    whole = found.full_tensor()
    losses, _ = train_hybrid(world)
    if world.rank == 0:
        print(f"pipeline_parallel: {found.placement} {sbp.sbp_text(found.sbp)}, equal: {torch.equal(whole, x @ w @ v)}")
        print("two stages, two ways data parallel:", ", ".join(f"{loss:.4f}" for loss in losses))
        print("one device:                        ", ", ".join(f"{loss:.4f}" for loss in train_plain()[0]))


if __name__ == "__main__":
    sw.launch(main, 4)
