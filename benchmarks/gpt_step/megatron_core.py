"""megatron-core's tensor parallelism over gloo: a plain GPT's weights, cut between all ranks.

megatron-core is written for CUDA. On CPU its layers are the "local" ones, without Transformer Engine, and weights are
made there (``use_cpu_initialization``). Its local attention needs CUDA's random states and the current CUDA device;
torch's fused attention, which every other variant runs, stands in its place. Nothing of megatron-core is patched.
"""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional


class FusedAttention(torch.nn.Module):
    """torch's attention over this rank's heads, as a megatron-core ``core_attention``.

    Shapes: query, key, value (T, B, N, D); returns (T, B, N * D).
    """

    def __init__(self, **options):  # megatron-core passes its config, the layer's number, ...
        super().__init__()

    def forward(self, query, key, value, attention_mask, **options):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def build(plain):
    """The GPT, of style gpt2 and with tied ends, as megatron-core's. Raises: ImportError: there is no megatron-core."""
    warnings.filterwarnings("ignore", module="megatron")  # on falling back to torch, and on settings for CUDA
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    config, size = plain.config, dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, create_gloo_process_groups=False)
    settings = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.width,
        num_attention_heads=config.num_heads,
        ffn_hidden_size=config.feed_forward_width,
        activation_func=partial(functional.gelu, approximate="tanh"),
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        settings, spec, config.vocabulary, config.max_tokens, parallel_output=True,
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    parts = cut(plain.state_dict(), config)
    mine = dict(model.named_parameters())
    assert mine.keys() == parts.keys(), mine.keys() ^ parts.keys()
    for name, part in parts.items():
        assert mine[name].shape == part.shape, name
        mine[name].data.copy_(part)
    return model


def cut(whole, config):
    """This rank's parts of tensors named and shaped as the plain model's parameters, under megatron-core's names.

    A column layer is cut by output, a row layer by input; the fused projection holds head after head, each with its
    query, key and value.
    """
    size, rank = dist.get_world_size(), dist.get_rank()

    def columns(x):
        return x.chunk(size)[rank]

    def heads(x):
        return columns(x.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2))

    def rows(x):
        return x.chunk(size, dim=1)[rank]

    def same(x):
        return x

    parts = {
        "embedding.word_embeddings.weight": columns(whole["token.weight"]),
        "embedding.position_embeddings.weight": whole["position.weight"],
        "decoder.final_layernorm.weight": whole["norm.weight"],
        "decoder.final_layernorm.bias": whole["norm.bias"],
    }
    layers = {
        "input_layernorm": ("norm1", same, same),
        "self_attention.linear_qkv": ("attention.qkv", heads, heads),
        "self_attention.linear_proj": ("attention.o", rows, same),
        "pre_mlp_layernorm": ("norm2", same, same),
        "mlp.linear_fc1": ("mlp.up", columns, columns),
        "mlp.linear_fc2": ("mlp.down", rows, same),
    }
    for i in range(config.num_layers):
        for theirs, (ours, cut_weight, cut_bias) in layers.items():
            parts[f"decoder.layers.{i}.{theirs}.weight"] = cut_weight(whole[f"blocks.{i}.{ours}.weight"])
            parts[f"decoder.layers.{i}.{theirs}.bias"] = cut_bias(whole[f"blocks.{i}.{ours}.bias"])
    return parts


def loss_of(model, batch):
    """The mean loss, from logits whose vocabulary stays cut."""
    tokens, targets = batch
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, labels=targets).mean()


def check(model, plain, batch):
    """Raises AssertionError unless loss and every gradient are the plain model's: it would be no peer otherwise."""
    found = loss_of(model, batch)
    found.backward()
    wanted = functional.cross_entropy(plain(batch[0]).flatten(0, 1), batch[1].flatten())
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    parts = cut({name: parameter.grad for name, parameter in plain.named_parameters()}, plain.config)
    for name, parameter in model.named_parameters():
        error = ((parameter.grad - parts[name]).norm() / parts[name].norm()).item()
        assert error < 2e-5, f"the gradient of {name} is off by {error:.1e}"
