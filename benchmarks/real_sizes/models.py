"""Models in the sizes in which they are trained, without values, from configs of transformers, and one batch each."""

import importlib

import torch

import shardwright as sw
from shardwright.models import GPT, GPTConfig

SAMPLES, TOKENS = 8, 512


def ids(tokens=TOKENS):
    return torch.empty(SAMPLES, tokens, dtype=torch.int64, device="meta")


def of(name, **options):
    """A model of transformers from its config."""
    kind = getattr(importlib.import_module("transformers"), name)
    with sw.without_values():
        return kind(kind.config_class(**options))


def llama(width, layers, heads, keys, inner, tokens=2048, vocabulary=32000):
    options = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    options |= {"num_key_value_heads": keys, "intermediate_size": inner, "vocab_size": vocabulary}
    options |= {"max_position_embeddings": 2 * tokens}
    return of("LlamaForCausalLM", **options), {"input_ids": ids(tokens)}


def bert():
    options = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return of("BertForMaskedLM", **options), {"input_ids": ids()}


def t5():
    model = of("T5ForConditionalGeneration", d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16)
    return model, {"input_ids": ids(), "decoder_input_ids": ids()}


def vit():
    options = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return of("ViTForImageClassification", num_labels=1000, **options), pictures()


def pictures():
    return {"pixel_values": torch.empty(SAMPLES, 3, 224, 224, device="meta")}


def resnet():
    return of("ResNetForImageClassification", num_labels=1000), pictures()  # its defaults are those of ResNet-50


def mixtral():
    model = of("MixtralForCausalLM", max_position_embeddings=4096)  # its defaults are those of 8x7 B
    return model.to(torch.bfloat16), {"input_ids": ids(2048)}  # without values torch groups products in bf16 alone


def opt():
    options = {"hidden_size": 12288, "num_hidden_layers": 96, "num_attention_heads": 96, "ffn_dim": 49152}
    return of("OPTForCausalLM", word_embed_proj_dim=12288, **options), {"input_ids": ids(2048)}


def gpt(layers, heads, width, vocabulary=50257, tokens=2048):
    config = {"num_layers": layers, "num_heads": heads, "width": width, "vocabulary": vocabulary, "max_tokens": tokens}
    with sw.without_values():
        return GPT(GPTConfig(**config)), ids(tokens)


def load():
    """The version of transformers, which takes long to load; None where it is not installed."""
    try:
        return importlib.import_module("transformers").__version__
    except ImportError:
        return None


MODELS = {
    "Llama 7 B": lambda: llama(4096, 32, 32, 32, 11008),
    "Llama 70 B": lambda: llama(8192, 80, 64, 8, 28672),
    "Llama 405 B": lambda: llama(16384, 126, 128, 8, 53248, vocabulary=128256),
    "BERT-large": bert,
    "T5-large": t5,
    "ViT-L": vit,
    "ResNet-50": resnet,
    "Mixtral 8x7 B": mixtral,
    "OPT 175 B": opt,
    "our GPT 175 B": lambda: gpt(96, 96, 12288),
    "Llama, tiny": lambda: llama(64, 2, 4, 2, 128, tokens=16, vocabulary=128),
    "our GPT, tiny": lambda: gpt(2, 4, 64, vocabulary=128, tokens=16),
}
