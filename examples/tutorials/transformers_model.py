# %% [markdown]
# # A transformers model
#
# A Llama of `transformers`, unmodified, under tensor and data parallelism: from a folder on disk, trained with a
# `DataLoader` of dicts and the model's own loss, and back into a folder that `from_pretrained` reads. The model here is
# tiny and has random values, so that the page runs anywhere; with your own folder nothing else changes.

# %%
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("pretrained")  # stands for a folder that you have

# %% [markdown]
# ## The data and the loss
#
# A batch is what `model(**batch)` takes, labels included. `sw.ModelLoss()` says that the model computes the loss from
# them: it is the mean over all labels of the global batch, however the batch is dealt out.
#
# Every rank goes through the same batches, so the order has a seed. There is no `DistributedSampler`: `run.shard` gives
# each rank its own part.

# %%
text = torch.tensor(list(b"shardwright places every tensor, runs the step, and keeps four promises. " * 8))
samples = [{"input_ids": part, "labels": part} for part in text.unfold(0, 24, 4)]


def batches():
    return DataLoader(samples, batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))


# %% [markdown]
# ## Is it equal?
#
# Two steps of each layout beside one device, dropout masks included where a model has dropout. Each line ends with what
# was cut.

# %%
model = LlamaForCausalLM.from_pretrained("pretrained", dtype=torch.float32)
for layout in ("tp2", "dp2/zero3", "pp2/1f1b mb2"):
    print(layout, "-", sw.verify(model, layout, [*batches()][:2], loss=sw.ModelLoss()))

# %% [markdown]
# ## Training
#
# `sw.without_values()` builds the model without memory for its values, and each rank then reads its own slices from the
# files, so that a model may be larger than any host. `example` shows the shapes of a batch, from which the model is
# recorded once and cut. At the end, rank 0 writes the whole tensors, one after the other, and `config.json`.


# %%
def train(world, layout, source, target):
    with sw.without_values():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(source))
    run = sw.parallelize(model, layout, world, loss=sw.ModelLoss(), example=next(iter(batches())))
    sw.load_weights(run, source)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for batch in run.shard(batches()):
        losses.append(run.step(batch).item())
        optimizer.step()
    sw.save_weights(run, target, format="transformers")
    return losses


losses = sw.launch(train, "dp2 tp2", "dp2 tp2", "pretrained", "tuned", ranks="threads")[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
assert losses[-1] < losses[0]

# %% [markdown]
# ## Back to transformers

# %%
tuned = LlamaForCausalLM.from_pretrained("tuned")
prompt = torch.tensor([list(b"shard")])
found = tuned.generate(prompt, max_new_tokens=12, do_sample=False)
print(bytes(found[0].tolist()))

# %% [markdown]
# - A loss of your own on the model's output takes its place where you want one:
#   [the guide](../../docs/guide.md) says what a loss returns.
# - [Models of others](../../docs/models.md) lists models that others wrote, and what came of each under each layout.
# - [`examples/transformers_llama.py`](../transformers_llama.py) is a program with options that does the same.
