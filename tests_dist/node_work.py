"""What ranks of several nodes run through the API: three steps of a layout, and how their groups send."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import shardwright as sw


def plain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))


def steps(world: sw.World, layout: str) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(3)]
    run = sw.parallelize(plain(), layout, world, loss=nn.MSELoss())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    losses = []
    for part in run.shard(batches):
        losses.append(run.step(part).item())
        optimizer.step()
    mesh = sw.Layout.parse(layout).mesh
    ways = {name: type(axis.channel).__name__ for name, axis in world.axes(mesh).items()}
    return {"rank": world.rank, "losses": losses, "ways": ways, "nodes": world.nodes}


def main() -> None:
    layout, out = sys.argv[1:]
    torch.manual_seed(0)
    (found,) = sw.launch(steps, sw.Layout.parse(layout), layout)
    (Path(out) / f"{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
