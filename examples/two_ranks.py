"""The smallest use of the library: a plain model, one line of layout, two ranks."""

import torch
from torch import nn

import shardwright as sw


def work(world: sw.World) -> list[float]:
    """Runs once per rank."""
    with sw.without_values():  # no rank ever allocates the whole model
        plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    run = sw.parallelize(plain, "tp2", world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    draw = torch.Generator().manual_seed(0)
    batch = (torch.randn(32, 16, generator=draw), torch.randint(4, (32,), generator=draw))
    losses = []
    for part in run.shard([batch] * 20):
        losses.append(run.step(part).item())
        optimizer.step()
    return losses


if __name__ == "__main__":
    losses = sw.launch(work, sw.Layout.parse("tp2"))[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
