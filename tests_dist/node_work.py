"""What ranks of several nodes run through the API: three steps of each layout, and how their groups send.

The model's sums of gradients are large enough to be all-reduced in two levels, where a group has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.comm.backends.two_level import TwoLevels
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending


def plain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)) for _ in range(4)))


def steps(world: sw.World, *layouts: str) -> dict[str, object]:
    return {"rank": world.rank, "nodes": world.nodes, "under": {line: steps_of(world, line) for line in layouts}}


def steps_of(world: sw.World, layout: str) -> dict[str, object]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(3)]
    run = sw.parallelize(plain(), layout, world, loss=nn.MSELoss())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    losses: list[float] = []
    sums: list[int] = []  # the bytes of each all-reduce in two levels
    start = TwoLevels.start

    def noted(levels: TwoLevels, call: CollectiveCall, tensors: list[Tensor]) -> Pending[None]:
        sums.append(sum(tensor.nbytes for tensor in tensors))
        return start(levels, call, tensors)

    with patch.object(TwoLevels, "start", noted):
        for part in run.shard(batches):
            losses.append(run.step(part).item())
            optimizer.step()
    mesh = sw.Layout.parse(layout).mesh
    ways = {name: type(axis.channel).__name__ for name, axis in world.axes(mesh).items()}
    return {"losses": losses, "ways": ways, "sums": sums}


def main() -> None:
    out, *layouts = sys.argv[1:]
    (found,) = sw.launch(steps, sw.Layout.parse(layouts[0]), *layouts)
    (Path(out) / f"{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
