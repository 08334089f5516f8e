# %% [markdown]
# # A pipeline
#
# A GPT in stages: where it is cut, which schedule runs, how long stages wait, and how to choose.

# %%
import torch

import shardwright as sw
from shardwright.models import GPT, GPTConfig

with sw.without_values():  # no rank ever holds the whole model
    plain = GPT(GPTConfig(num_layers=4, width=32, num_heads=4, dropout=0.1))
tokens = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
batch = tokens[:, :-1], tokens[:, 1:]

# %% [markdown]
# ## Train it
#
# `pp2/1f1b mb4` is two stages, the schedule 1F1B, and four microbatches a step. Each stage holds its layers only, under
# their plain names.


# %%
def train(world, layout):
    run = sw.parallelize(plain, layout, world, example=batch[0])
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for part in run.shard([batch] * 10):
        losses.append(run.step(part).item())
        optimizer.step()
    held = sorted({name.split(".")[1] for name in run.parameters if name.startswith("blocks.")})
    return losses, held


for rank, (losses, held) in enumerate(sw.launch(train, "pp2/1f1b mb4", "pp2/1f1b mb4", ranks="threads")):
    print(f"rank {rank} holds blocks {', '.join(held)}; loss {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# It is equal to one device, dropout included, under every schedule. Zero-bubble schedules split the backward in two.

# %%
for layout in ("pp4/1f1b mb8", "pp2/interleaved:v2 mb4", "pp2/zb-v mb4 tp2"):
    print(layout, "-", sw.verify(plain, layout, [batch]))

# %% [markdown]
# ## How long do stages wait?
#
# A schedule is data, and one simulator predicts any of them. Here with equal times for all stages: a forward of 1, a
# backward of 2.

# %%
from shardwright.strategies.pipeline.schedules import build
from shardwright.strategies.pipeline.simulate import ChunkTimes, simulate

for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
    schedule = build(name, 4, 8)
    timeline = simulate(schedule, ChunkTimes.equal(schedule.num_chunks))
    print(f"{name:15} bubble {timeline.bubble:.1%}")

# %% [markdown]
# `run.timeline(batch)` measures one step, and these commands do the same for a layout, with a picture of both:
#
# ```sh
# shardwright show --layout "pp4/zb-v mb8"
# shardwright show --layout "pp2/zb-h1 mb4" --measured --timeline pipeline.png
# ```
#
# ![A schedule, predicted and measured](../../docs/pictures/pipeline.png)
#
# ## How to choose
#
# - More microbatches make the bubble smaller. Four for each stage is a start.
# - `1f1b` keeps fewer activations than `gpipe` at the same bubble; `interleaved:v2` has less bubble and more messages;
#   `zb-v` has the least, in the memory of `1f1b`.
# - `pp4/auto mb8` searches for the schedule that is fastest with the costs of your layers, and `auto:8GiB` keeps it
#   within a memory limit.
# - Stages are cut where costs are even. `cut:NAME,NAME` cuts by hand, and `--measured-costs` by timed layers.
