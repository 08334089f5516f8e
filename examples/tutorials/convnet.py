# %% [markdown]
# # A CNN on pictures
#
# A residual network on CIFAR-10, data parallel with ZeRO, and cut into rows of pictures where maps are too large for
# one device. Set `CIFAR10` in the environment to the folder of the binary version (`data_batch_1.bin`, ...). Without
# it, this page makes a small folder of the same format, with random pictures, so that everything runs.

# %%
import os
from pathlib import Path

import torch
from torch import nn

import shardwright as sw


def made_folder():
    """Writes pictures in which a class is a brightness, each record one byte of label and 3,072 of picture."""
    folder = Path("made-cifar-10")
    folder.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    for name, count in (("data_batch_1.bin", 256), ("test_batch.bin", 64)):
        labels = torch.randint(10, (count, 1), generator=draw)
        pictures = labels * 20 + torch.randint(40, (count, 3072), generator=draw)
        (folder / name).write_bytes(torch.cat([labels, pictures], 1).to(torch.uint8).numpy().tobytes())
    return folder


folder = Path(os.environ.get("CIFAR10") or made_folder())
stored = torch.frombuffer(bytearray((folder / "data_batch_1.bin").read_bytes()), dtype=torch.uint8).view(-1, 3073)
labels, pictures = stored[:, 0].long(), stored[:, 1:].view(-1, 3, 32, 32) / 127.5 - 1
print(f"{len(labels)} pictures of {tuple(pictures.shape[1:])}")


# %% [markdown]
# ## The model
#
# Plain PyTorch, with BatchNorm and a skip connection.


# %%
class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))


def build(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), Residual(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), Residual(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def batches(num_steps, size=24):
    draw = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        chosen = torch.randint(len(labels), (size,), generator=draw)
        yield pictures[chosen], labels[chosen]


# %% [markdown]
# ## Training
#
# BatchNorm takes its statistics over the whole batch, so they are summed over the data-parallel ranks: the losses are
# those of one device.


# %%
STEPS = 100 if "CIFAR10" in os.environ else 12


def train(world, layout, model):
    run = sw.parallelize(model, layout, world, example=pictures[:24])
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for batch in run.shard(batches(STEPS)):
        losses.append(run.step(batch).item())
        optimizer.step()
    scores = run.predict(pictures[:8])  # all samples, on every rank
    return losses, scores.argmax(1).tolist()


for layout in ("single", "dp2/zero2"):
    losses, found = sw.launch(train, layout, layout, build(), ranks="threads")[0]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"{layout:10} loss {first:.4f} -> {last:.4f} (means of five), classes of eight pictures: {found}")

# %% [markdown]
# ## Pictures too large for one device
#
# `tp3/spatial` cuts each picture into rows. Every rank computes its rows of each feature map, and fetches from its
# neighbours the rows that its kernels reach into. The sizes need not divide: 32 rows go to three ranks.

# %%
print(sw.verify(build(), "dp2 tp3/spatial", list(batches(1, size=4))))

# %% [markdown]
# ## Channels instead of rows
#
# Plain `tp2` cuts pairs of convolutions by channels: few bytes where maps are small and channels many. `verify` also
# says how much of the model it cut.

# %%
print(sw.verify(build(), "tp2", list(batches(1, size=4))))

# %% [markdown]
# From the command line, with the built-in network:
#
# ```sh
# shardwright train --model convnet --data path/to/cifar-10-batches-bin --layout "dp2/zero1" --steps 400 --out runs/cnn
# shardwright sample --from runs/cnn --num 8
# ```
