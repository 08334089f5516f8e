# %% [markdown]
# # Fine-tuning with LoRA
#
# `peft` adds small trainable matrices to a frozen model. shardwright cuts both: the frozen weights as the layout says,
# the adapters beside them. Only adapters have gradients, optimizer state and gradient traffic.

# %%
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
base = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(FOLDER)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")

# %%
text = torch.tensor(list(b"fine-tuning changes little, and adapters are what it changes. " * 8))


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
# With the adapters' dropout on, under tensor parallelism and under ZeRO-3.

# %%
for layout in ("tp2", "dp2/zero3"):
    print(layout, "-", sw.verify(model, layout, list(batches(2)), loss=NextToken()))


# %% [markdown]
# ## Training
#
# Nothing is said about adapters: `run.optimizer` takes the parameters that require gradients.


# %%
def train(world, layout, model):
    run = sw.parallelize(model, layout, world, loss=NextToken(), example=next(batches(1))[0])
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-2)
    losses = []
    for batch in run.shard(batches(20)):
        losses.append(run.step(batch).item())
        optimizer.step()
    updated = [name for name, parameter in run.parameters.items() if parameter in optimizer.state]
    return losses, updated, run.state_dict()


losses, updated, state = sw.launch(train, "dp2 tp2", "dp2 tp2", model, ranks="threads")[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(updated)} tensors were updated")
assert losses[-1] < losses[0]
assert all("lora" in name for name in updated)

# %% [markdown]
# ## Save the adapter
#
# The whole tensors go back into the plain model, and `peft` saves its part of it. `model.merge_and_unload()` merges it
# into the base model.

# %%
model.load_state_dict(state)
model.save_pretrained("adapter")
print(sorted(path.name for path in Path("adapter").iterdir()))
