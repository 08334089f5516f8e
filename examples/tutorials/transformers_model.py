# %% [markdown]
# # A transformers model
#
# A Llama of `transformers`, unmodified, under tensor and data parallelism: from a folder on disk, trained, and back
# into a folder that `from_pretrained` reads. The model here is tiny and has random values, so that the page runs
# anywhere; with your own folder nothing else changes.

# %%
import torch
from torch import nn
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
# Inputs are a dict of the model's keyword arguments. Targets are the next tokens, and the loss takes the model's
# output. A loss returns a sum and a count, so that the mean is over all targets of the global batch, however they are
# dealt out.

# %%
text = torch.tensor(list(b"shardwright places every tensor, runs the step, and keeps three promises. " * 8))


def batches(num_steps, num_samples=4, length=24):
    draw = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        starts = torch.randint(len(text) - length, (num_samples,), generator=draw)
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        yield {"input_ids": windows[:, :-1]}, windows[:, 1:]


class NextToken(nn.Module):
    def forward(self, output, targets):
        logits = output["logits"].flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


# %% [markdown]
# ## Is it equal?
#
# Two steps of each layout beside one device, in float64. The first line names what was cut.

# %%
model = LlamaForCausalLM.from_pretrained("pretrained", dtype=torch.float32)
for layout in ("tp2", "dp2/zero3", "pp2/1f1b mb2"):
    print(layout, "-", sw.verify(model, layout, list(batches(2)), loss=NextToken()))

# %% [markdown]
# ## Training
#
# `example` shows the shapes of a batch, from which the model is recorded once and cut. `run.state_dict()` gives the
# whole tensors under the model's own names, on every rank.


# %%
def train(world, layout, model):
    run = sw.parallelize(model, layout, world, loss=NextToken(), example=next(batches(1))[0])
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for batch in run.shard(batches(20)):
        losses.append(run.step(batch).item())
        optimizer.step()
    return losses, run.state_dict()


losses, state = sw.launch(train, "dp2 tp2", "dp2 tp2", model, ranks="threads")[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]

# %% [markdown]
# ## Back to transformers

# %%
model.load_state_dict(state)
model.save_pretrained("tuned")
tuned = LlamaForCausalLM.from_pretrained("tuned")
prompt = torch.tensor([list(b"shard")])
found = tuned.generate(prompt, max_new_tokens=12, do_sample=False)
print(bytes(found[0].tolist()))

# %% [markdown]
# - Each rank is given the whole model here, and keeps its slices. For a model that fits no host, build it under
#   `sw.without_values()` and fill the run by `sw.load_weights(run, folder)`: each rank reads its slices only.
# - [Models of others](../../docs/models.md) lists 103 models, and what came of each under each layout.
# - [`examples/transformers_llama.py`](../transformers_llama.py) is the same as a program with options.
