"""Builds any model class of transformers in a tiny config, made from the names of the config's settings alone.

A setting that many configs have, such as ``hidden_size`` or ``num_layers``, gets a small value; all others keep the
defaults of the class. A class whose config does not fit together in this way, or whose forward does not run, is left
out.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from zoo.building import CLASSES, HEADS, PICTURE, SAMPLES, TOKENS, VOCABULARY, WIDTH, Built, LeftOutError, tokens

LAYERS, MOST_ELEMENTS = 4, 2 * 10**7
"""The layers of a stack, and the most elements of the parameters of a model that is tried."""

_GROUPS = (
    (WIDTH, """hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size model_dim encoder_hidden_size
        decoder_hidden_size width projection_dim out_hidden_size text_hidden_size attention_hidden_size lru_width
        moe_intermediate_size moe_ffn_hidden_size shared_expert_intermediate_size expert_ffn_hidden_size"""),
    (2 * WIDTH, """intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size inner_dim
        feed_forward_size ffn_hidden_dim shared_intermediate_size mlp_hidden_size intermediate_dim mamba_d_ssm"""),
    (4 * TOKENS, """max_position_embeddings n_positions max_sequence_length max_seq_len max_source_positions
        max_target_positions n_ctx"""),
    (VOCABULARY, "vocab_size text_vocab_size vocab_size_per_layer_input"),
    (LAYERS, """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers depth num_blocks"""),
    (HEADS, """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads attention_heads linear_num_key_heads
        linear_num_value_heads"""),
    (WIDTH // HEADS, """head_dim attention_head_dim d_kv head_size kv_channels attention_head_size global_head_dim
        qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim linear_value_head_dim
        mamba_d_head mamba_head_dim"""),
    (8, """patch_size state_size mamba_d_state ssm_state_size sliding_window attention_window mamba_n_heads
        mamba_num_heads n_mamba_heads hidden_size_per_layer_input num_labels"""),
    (16, "kv_lora_rank q_lora_rank"),
    (4, """window_size num_experts n_routed_experts num_local_experts moe_num_experts conv_kernel time_step_rank
        mamba_dt_rank"""),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, """n_shared_experts num_shared_experts n_group topk_group num_expert_group first_k_dense_replace bos_token_id
        decoder_start_token_id"""),
    (0, "pad_token_id num_kv_shared_layers"),
    (2, "eos_token_id"),
    (2 * PICTURE, "image_size"),
)  # fmt: skip

SMALL = {name: value for value, names in _GROUPS for name in names.split()}
"""The value of a setting by its name."""

KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
"""Settings with fewer key heads than heads, where a model allows that."""

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
"""Settings that name the kind of each layer."""

STAGES = {"hidden_sizes": 16, "embed_dims": 16}
"""Settings with a width for each stage of a vision model, and the first of them; the next is twice as wide."""


def shrunk(kind: type, num_key_heads: int) -> dict[str, Any]:
    """Returns the options of a tiny config of the class ``kind``, and of the configs inside of it."""
    found: dict[str, Any] = {}
    for name, value in kind().to_dict().items():
        if isinstance(value, list) and value and name in KINDS:
            kinds = list(dict.fromkeys(value))
            found[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
        elif isinstance(value, list) and value and name in STAGES:
            found[name] = [STAGES[name] * 2**stage for stage in range(len(value))]
        elif isinstance(value, list) and value and name in ("depths", "num_heads", "num_attention_heads"):
            found[name] = [1 if name == "depths" else 2] * len(value)
        elif name in KEY_HEADS and type(value) is int:
            found[name] = num_key_heads
        elif name in SMALL and (type(value) is int or (value is None and name.endswith(("token_id", "head_dim")))):
            found[name] = SMALL[name]
        elif name == "use_cache":
            found[name] = False  # as for training
    for name, inner in (getattr(kind, "sub_configs", None) or {}).items():
        if hasattr(inner, "model_type") and inner.model_type:
            found[name] = shrunk(inner, num_key_heads)
    if kind().is_encoder_decoder:
        found.setdefault("decoder_start_token_id", 1)
    return found


def built(name: str, task: str) -> Built:
    """Returns a model of transformers by its class, and a batch for its task with labels, of which it makes its loss.

    Raises: LeftOutError: its small config does not fit together or is too large, or plain torch does not train it.
    """
    kind = getattr(importlib.import_module("transformers"), name)
    said = ""
    for num_key_heads in (2, HEADS):
        try:
            config = kind.config_class(**shrunk(kind.config_class, num_key_heads))
            with torch.device("meta"):
                num_elements = sum(parameter.numel() for parameter in kind(config).parameters())
            if num_elements > MOST_ELEMENTS:
                raise LeftOutError(f"{num_elements:,} elements of parameters in its small config")
            model = kind(config)
            inputs = _inputs(model, task)
            output = model(**inputs)
            (output["loss"] if "loss" in output else output[0]).backward()
        except Exception as failure:  # any class may refuse such a config or such a batch, in a way of its own
            said = said or " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
            continue
        return kind(config), (inputs, inputs["labels"])  # one that has kept nothing of the forward
    raise LeftOutError(said)


def _inputs(model: nn.Module, task: str) -> dict[str, torch.Tensor]:
    if task == "picture":
        size, channels = getattr(model.config, "image_size", 2 * PICTURE), getattr(model.config, "num_channels", 3)
        shape = (size, size) if isinstance(size, int) else tuple(size)
        classes = torch.randint(min(CLASSES, model.config.num_labels), (SAMPLES,))
        return {"pixel_values": torch.randn(SAMPLES, channels, *shape), "labels": classes}
    ids = tokens()
    labels = tokens() if task == "to another sequence" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
