# %% [markdown]
# # Long sequences
#
# Activations grow with the length of a sequence; parameters do not. This page cuts the sequence itself, and recomputes
# what it can.
#
# What there is not: context parallelism with ring attention (`cp`) is a word of the grammar that no strategy implements
# yet. Under `tp` with `/seq` or `/sp` the attention of a rank still sees all tokens of its heads.

# %%
import torch

import shardwright as sw
from shardwright.formatting import format_bytes
from shardwright.ledger import predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.plan import Job

LENGTH = 256
with sw.without_values():
    plain = GPT(GPTConfig(style="llama", num_layers=2, width=32, num_heads=4, max_tokens=LENGTH))
tokens = torch.randint(256, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
batch = tokens[:, :-1], tokens[:, 1:]  # one sample: nothing for data parallelism to cut

# %% [markdown]
# ## Where the memory goes
#
# The peak of a step on one rank, predicted on the meta device. With `tp4` each rank holds a quarter of the heads and of
# the inner features, but a copy of everything between them. `/seq` cuts that too, along the tokens. Activation
# checkpointing keeps only each block's input.

# %%
job = Job(plain, CrossEntropy())
for layout in ("single", "tp4", "tp4/sp/seq", "recompute:full", "tp4/sp/seq recompute:full"):
    account = predict_memory(job, layout, 0, batch)
    peak = account.at_peak()
    held, whole = format_bytes(peak["activations"]), format_bytes(sum(peak.values()))
    print(f"{layout:26} activations {held:>10}   in all {whole:>10}")

# %% [markdown]
# ## Equal, as always

# %%
short = batch[0][:, :30], batch[1][:, :30]  # 30 tokens on four ranks: sizes need not divide
print(sw.verify(plain, "tp4/sp/seq recompute:full", [short]))


# %% [markdown]
# ## Training
#
# Without `/seq`, `example` is enough: if there are fewer samples than ranks that share them, sequences are cut by
# themselves.


# %%
def train(world, layout):
    run = sw.parallelize(plain, layout, world, example=batch[0])
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for part in run.shard([batch] * 4):
        losses.append(run.step(part).item())
        optimizer.step()
    return losses


for layout in ("single", "tp2/sp/seq recompute:full"):
    losses = sw.launch(train, layout, layout, ranks="threads")[0]
    print(f"{layout:26} loss {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# ## What to try, in order
#
# 1. `recompute:selective`, then `recompute:full`: no message more in a layout without `tp`, a third more computation at
#    most.
# 2. `tpN/sp`: activations between layers are cut by samples, or with `/seq` by tokens.
# 3. `recompute:offload:disk`: activations of blocks lie in mapped files until the backward needs them.
# 4. `pp`: a stage holds the activations of its own layers.
#
# `shardwright show --layout LINE --memory` says for each what a rank will hold, before a run.
