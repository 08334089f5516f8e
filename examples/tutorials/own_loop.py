# %% [markdown]
# # Your own loop, converted
#
# You have a training loop for one device. This page changes it into one for any number of ranks, line by line, and
# shows that the losses stay the same. The model is not touched.
#
# ## Before
#
# A plain PyTorch script: a model, an optimizer, a scheduler, a loop.

# %%
import torch
from torch import nn


def batches(num_steps):
    draw = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        x = torch.randn(12, 8, generator=draw)
        yield x, (x.sum(1) > 0).long()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2))


# %%
def train():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    loss_of = nn.CrossEntropyLoss()
    losses = []
    for x, y in batches(20):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


plain = train()
print(f"one device: {plain[0]:.6f} -> {plain[-1]:.6f}")

# %% [markdown]
# ## After
#
# The same loop as a function that runs once per rank. `parallelize` takes the plain model and the loss, `run.shard`
# gives each rank its part of every global batch, and `run.step` is forward, backward and gradient sync in one. It
# returns the mean loss of the *global* batch, on every rank.

# %%
import shardwright as sw


def train_on(world, layout, model):
    run = sw.parallelize(model, layout, world, loss=nn.CrossEntropyLoss())
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    losses = []
    for batch in run.shard(batches(20)):
        loss = run.step(batch)
        run.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# What changed:
#
# ```diff
# -def train():
# -    model = build()
# -    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# +def train_on(world, layout, model):
# +    run = sw.parallelize(model, layout, world, loss=nn.CrossEntropyLoss())
# +    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
#      scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
# -    loss_of = nn.CrossEntropyLoss()
#      losses = []
# -    for x, y in batches(20):
# -        optimizer.zero_grad()
# -        loss = loss_of(model(x), y)
# -        loss.backward()
# -        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
# +    for batch in run.shard(batches(20)):
# +        loss = run.step(batch)
# +        run.clip_grad_norm_(1.0)
#          optimizer.step()
#          scheduler.step()
#          losses.append(loss.item())
#      return losses
# ```
#
# ## Any layout, the same losses
#
# `launch` starts the ranks. As threads they run in this process, on the CPU, which is enough to try a layout; leave
# `ranks="threads"` out for processes, with a GPU each where there are GPUs.

# %%
for layout in ("single", "dp2", "tp2", "dp2/zero3 tp2", "pp2/1f1b mb4 dp2"):
    losses = sw.launch(train_on, layout, layout, build(), ranks="threads")[0]
    apart = max(abs(a - b) for a, b in zip(plain, losses, strict=True))
    print(f"{layout:17} {losses[0]:.6f} -> {losses[-1]:.6f}, off by {apart:.0e} at most")
    assert apart < 1e-4  # float32: sums are taken in another order

# %% [markdown]
# In float64 nothing is left of that difference: `verify` trains both ways, and compares the loss, every gradient and
# every parameter.

# %%
print(sw.verify(build(), "dp2 tp2", list(batches(2)), loss=nn.CrossEntropyLoss()))

# %% [markdown]
# ## What to remember
#
# - A batch is a pair (inputs, targets) of the *global* batch, the same on every rank. Each rank keeps its part. Do not
#   give the loader a `DistributedSampler`; to load only a rank's samples, use `run.share` and `run.part`.
# - `run.step` clears gradients first. `run.accumulate` takes several batches for one step, and so does `mb4` in the
#   layout, with one batch that is cut in four.
# - Optimizers must update each element by itself (SGD, Adam, AdamW, ...), because a rank holds slices.
# - With dropout the losses are those of the layout `single`, under every layout, and not those of the plain script: a
#   mask is drawn from the seed, the step and the place of an element in the global batch, the same on every rank.
# - Every rank gets the same model: seed it before, build it once, or build it on the meta device with
#   `sw.without_values()`, and no rank ever holds all of it.
