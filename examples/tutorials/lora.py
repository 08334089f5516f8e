# %% [markdown]
# # Fine-tuning with LoRA
#
# `peft` adds small trainable matrices to a frozen model. shardwright cuts both: the frozen weights as the layout says,
# the adapters beside them. Only adapters have gradients, optimizer state and gradient traffic.

# %%
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("base")  # stands for a folder that you have
base = LlamaForCausalLM.from_pretrained("base")
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")

# %%
text = torch.tensor(list(b"fine-tuning changes little, and adapters are what it changes. " * 8))
samples = [{"input_ids": part, "labels": part} for part in text.unfold(0, 24, 4)]


def batches():
    return DataLoader(samples, batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))


# %% [markdown]
# ## Is it equal?
#
# With the adapters' dropout on, under tensor parallelism and under ZeRO-3.

# %%
for layout in ("tp2", "dp2/zero3"):
    print(layout, "-", sw.verify(model, layout, [*batches()][:2], loss=sw.ModelLoss()))


# %% [markdown]
# ## Training
#
# Nothing is said about adapters: `run.optimizer` takes the parameters that require gradients. `sw.save_weights` writes
# the folder of the adapter, as `model.save_pretrained` does.


# %%
def train(world, layout, model, target):
    run = sw.parallelize(model, layout, world, loss=sw.ModelLoss(), example=next(iter(batches())))
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-2)
    losses = []
    for batch in run.shard(batches()):
        losses.append(run.step(batch).item())
        optimizer.step()
    sw.save_weights(run, target, format="transformers")
    return losses, [name for name, parameter in run.parameters.items() if parameter in optimizer.state]


losses, updated = sw.launch(train, "dp2 tp2", "dp2 tp2", model, "adapter", ranks="threads")[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(updated)} tensors were updated")
assert losses[-1] < losses[0]
assert all("lora" in name for name in updated)

# %% [markdown]
# ## Use the adapter
#
# `peft` loads it onto the base model, and `merge_and_unload()` adds it to the weights.

# %%
print(sorted(path.name for path in Path("adapter").iterdir()))
base = LlamaForCausalLM.from_pretrained("base").eval()
batch = next(iter(batches()))
before = base(**batch).loss.item()
merged = PeftModel.from_pretrained(base, "adapter").merge_and_unload()
print(f"the loss of a batch: {before:.3f} of the base model, {merged(**batch).loss.item():.3f} with the adapter")
