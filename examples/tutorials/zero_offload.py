# %% [markdown]
# # ZeRO with offload
#
# What each ZeRO stage takes away from a rank's memory, what it sends instead, and how state moves to disk.

# %%
import torch

import shardwright as sw
from shardwright.formatting import format_bytes
from shardwright.ledger import predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.plan import Job

with sw.without_values():
    plain = GPT(GPTConfig(num_layers=4, width=64, num_heads=4, dropout=0.1))
tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
batch = tokens[:, :-1], tokens[:, 1:]

# %% [markdown]
# ## Memory, before anything runs
#
# `predict_memory` rehearses a step on the meta device and lists what a rank holds at its peak, by kind. The same as a
# command: `shardwright show --memory`.

# %%
job = Job(plain, CrossEntropy())
kinds = ["parameters", "gradients", "optimizer"]
print(f"{'layout':28}", *(f"{kind:>12}" for kind in kinds))
for line in ("dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "dp2/zero3/offload:disk"):
    layout = line.replace("dp2", "dp2/bucket:64")  # small param groups for a small model
    peak = predict_memory(job, layout, 0, batch).at_peak()
    print(f"{line:28}", *(f"{format_bytes(peak.get(kind, 0)):>12}" for kind in kinds))

# %% [markdown]
# The peak is one moment of a step. Stage 1 frees gradients as it reduces them too, if a step has one microbatch; with
# several, it holds them until the last, and stage 2 does not.
#
# Stage 3 gathers each block's parameters before use and frees them after. It sends half as much again as stages 1 and
# 2, and the next group is gathered while one computes (`/ahead:2` gathers two ahead).
#
# ## Training with state on disk
#
# `/offload:disk` keeps the stored parameters and the optimizer's state in memory-mapped files. `update=optimizer` lets
# each param group be updated while the backward of earlier layers still runs.


# %%
def train(world, layout):
    run = sw.parallelize(plain, layout, world)  # offload_folder=... where the temporary folder is in memory
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = [run.step(part, update=optimizer).item() for part in run.shard([batch] * 8)]
    on_disk = sum(tensor.nbytes for tensor in run.offload.tensors) if run.offload else 0
    return losses, on_disk


for layout in ("dp2", "dp2/zero3", "dp2/zero3/offload:disk"):
    losses, on_disk = sw.launch(train, layout, layout, ranks="threads")[0]
    print(f"{layout:24} loss {losses[0]:.5f} -> {losses[-1]:.5f}, on disk {format_bytes(on_disk)}")

# %% [markdown]
# ## And on one device
#
# `dp1/zero1/offload:disk` needs no second rank: the state of a model that does not fit beside its activations lies on
# disk.

# %%
losses, on_disk = sw.launch(train, "dp1/zero1/offload:disk", "dp1/zero1/offload:disk", ranks="threads")[0]
print(f"loss {losses[0]:.5f} -> {losses[-1]:.5f}, on disk {format_bytes(on_disk)}")

# %% [markdown]
# ## Checkpoints
#
# A checkpoint does not know how it was written. This one is saved under ZeRO-3 and loaded under tensor parallelism.


# %%
def save(world):
    run = sw.parallelize(plain, "dp2/zero3", world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
    for part in run.shard([batch] * 3):
        run.step(part)
        optimizer.step()
    return sw.save("saved", run, optimizer), run.evaluate(next(run.shard([batch]))).item()


def load(world):
    run = sw.parallelize(plain, "tp2", world)
    sw.load("saved", run, run.optimizer(torch.optim.AdamW, lr=3e-3))
    return run.num_steps, run.evaluate(next(run.shard([batch]))).item()


path, before = sw.launch(save, 2, ranks="threads")[0]
step, after = sw.launch(load, 2, ranks="threads")[0]
print(f"{path}: loss {before:.6f} under dp2/zero3, {after:.6f} under tp2 at step {step}")
assert abs(before - after) < 1e-5
