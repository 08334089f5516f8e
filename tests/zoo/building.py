"""How models of the zoo are built: tiny, seeded, with one batch each, by what they take and give.

A builder returns (model, batch), where a batch is (inputs, targets); integer targets are classes, others are values.
Packages are imported when a model is built, so that the zoo can be listed where they are not installed.

N samples, T tokens
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Any, Tensor]
Built = tuple[nn.Module, Batch]

SAMPLES, TOKENS, VOCABULARY, WIDTH, LAYERS, HEADS, CLASSES = 8, 16, 128, 32, 2, 4, 8
PICTURE, WAVE = 32, 400
IMAGE = VOCABULARY - 1
"""The token that stands for a part of a picture in a text."""

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH, "max_position_embeddings": 4 * TOKENS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": CLASSES,
}  # fmt: skip
"""What most configs of transformers have; a model's own options come after these."""


class LeftOutError(Exception):
    """Raised for a model that cannot be tried here, with the reason."""


PREDICTIONS = ("logits", "prediction_logits", "reconstruction", "last_hidden_state")


class ZooLoss(nn.Module):
    """The sum and the count of cross entropies, or of squared differences, on a model's first prediction.

    >>> ZooLoss()({"logits": torch.zeros(2, 3, 4)}, torch.tensor([[0, 1, 2], [2, 3, 0]]))
    (tensor(8.3178), 6)
    """

    def forward(self, output: Any, targets: Tensor) -> tuple[Tensor, int]:
        prediction = prediction_of(output)
        if targets.is_floating_point():
            return (prediction - targets.to(prediction.dtype)).square().sum(), targets.numel()
        if prediction.dim() == 4:  # a class for each place of a picture: classes are in dim 1
            prediction = prediction.movedim(1, -1)
        logits = prediction.reshape(-1, prediction.shape[-1])
        return functional.cross_entropy(logits, targets.reshape(-1), reduction="sum"), targets.numel()


def prediction_of(output: Any) -> Tensor:
    """The tensor that the loss is computed on: the output, its first tensor, or the first of PREDICTIONS in it."""
    if isinstance(output, Mapping):
        if output.get("text_embeds") is not None:  # of pictures with their texts: what the two have in common
            return output["image_embeds"] * output["text_embeds"]
        return next(output[name] for name in PREDICTIONS if output.get(name) is not None)
    return output if isinstance(output, Tensor) else prediction_of(output[0])


class InnerLoss(nn.Module):
    """The loss that a model computed itself from ``labels``, a mean, as a sum and a count."""

    def forward(self, output: Any, targets: Tensor) -> tuple[Tensor, int]:
        count = targets[:, 1:].numel()  # such models shift the labels, so the first has no prediction
        return output.loss * count, count


class MeanLoss(nn.Module):
    """The loss that a model computed itself, a mean over samples, as a sum and a count."""

    def forward(self, output: Any, targets: Tensor) -> tuple[Tensor, int]:
        return output.loss * len(targets), len(targets)


def tokens(length: int = TOKENS) -> Tensor:
    """Token ids (N, length) without the special ones."""
    return torch.randint(3, VOCABULARY, (SAMPLES, length))


def classes(*shape: int) -> Tensor:
    """Class targets (N, \\*shape)."""
    return torch.randint(CLASSES, (SAMPLES, *shape))


def pretrained(name: str, **options: Any) -> nn.Module:
    """A model of transformers by its class, with random values, in a tiny config; an option of None is left out."""
    kind = getattr(importlib.import_module("transformers"), name)
    given = {name: value for name, value in {**SMALL, **options}.items() if value is not None}
    return kind(kind.config_class(**given))


def decoder(name: str, **options: Any) -> Built:
    """A language model that predicts the next token."""
    model, ids = pretrained(name, **options), tokens(TOKENS + 1)
    return model, ({"input_ids": ids[:, :-1]}, ids[:, 1:])


def decoder_with_labels(name: str, **options: Any) -> Built:
    """A language model that computes its loss itself."""
    model, ids = pretrained(name, **options), tokens()
    return model, ({"input_ids": ids, "labels": ids}, ids)


def encoder(name: str, **options: Any) -> Built:
    """A masked language model, on sequences of which some end in padding."""
    model, ids = pretrained(name, **options), tokens()
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return model, (inputs, ids)


def encoder_decoder(name: str, **options: Any) -> Built:
    """A model from one sequence to another."""
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS}
    layers |= {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH}
    model, ids = pretrained(name, **{**layers, "decoder_start_token_id": 1, **options}), tokens(TOKENS + 1)
    return model, ({"input_ids": tokens(), "decoder_input_ids": ids[:, :-1]}, ids[:, 1:])


def vision(name: str, place: tuple[int, ...] = (), **options: Any) -> Built:
    """A model that classifies a picture, or each place of it."""
    model = pretrained(name, **{"image_size": PICTURE, "patch_size": 8, **options})
    return model, ({"pixel_values": torch.randn(SAMPLES, 3, PICTURE, PICTURE)}, classes(*place))


def images_and_text(
    name: str, num_places: int, text: dict[str, Any], picture: dict[str, Any], *, one_of_several: bool = False,
    sizes: bool = False, token: str = "image_token_id", **options: Any,
) -> Built:  # fmt: skip
    """A language model whose tokens ``IMAGE`` stand for the features of a picture, with some places before each text.

    ``one_of_several`` gives each sample a list of pictures, here of one. ``sizes`` passes the sizes of pictures too.
    ``token`` is the option with the number of the token.
    """
    package = importlib.import_module("transformers")
    kind = getattr(package, name)
    parts = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    parts |= {"num_attention_heads": HEADS}
    words = {**parts, "vocab_size": VOCABULARY, "max_position_embeddings": 4 * TOKENS, "num_key_value_heads": 2}
    words |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = kind.config_class(
        text_config={**words, **text},
        vision_config={**parts, "image_size": PICTURE, "patch_size": 8, **picture},
        **{token: IMAGE},
        **options,
    )
    ids = tokens(2 * TOKENS + 1).clamp(max=IMAGE - 1)
    ids[:, 1 : 1 + num_places] = IMAGE
    shape = (1, 3, PICTURE, PICTURE) if one_of_several else (3, PICTURE, PICTURE)
    inputs = {"input_ids": ids[:, :-1], "pixel_values": torch.randn(SAMPLES, *shape)}
    if sizes:
        inputs["image_sizes"] = torch.full((SAMPLES, 2), PICTURE)
    return kind(config), (inputs, ids[:, 1:])


def audio(name: str, **options: Any) -> Built:
    """A model that classifies a sound wave."""
    wave = {"conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (8, 4), "num_feat_extract_layers": 2}
    wave |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    wave |= {"classifier_proj_size": 16, "use_weighted_layer_sum": False}
    return pretrained(name, **{**wave, **options}), ({"input_values": torch.randn(SAMPLES, WAVE)}, classes())


def adapted(name: str, modules: list[str], **options: Any) -> Built:
    """A language model with adapters of low rank, by peft; all else is frozen."""
    peft = importlib.import_module("peft")
    model, batch = decoder(name, **options)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, lora_dropout=0.1)), batch


def x_transformer(kind: str = "Decoder", **options: Any) -> Built:
    """A TransformerWrapper of x-transformers, on tokens."""
    package = importlib.import_module("x_transformers")
    outer = {name: options.pop(name) for name in list(options) if name in ("tie_embedding", "num_memory_tokens")}
    inner = {"dim": WIDTH, "depth": LAYERS, "heads": HEADS, "attn_dim_head": WIDTH // HEADS, **options}
    model = package.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=2 * TOKENS, attn_layers=getattr(package, kind)(**inner), **outer
    )
    ids = tokens(TOKENS + 1)
    return model, (ids[:, :-1], ids[:, 1:])


def module_of(package: str, name: str) -> ModuleType:
    """One module of a package whose ``__init__`` imports torchvision, which is not installed, without running that."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"No module named '{package}'")
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = list(spec.submodule_search_locations or ())
    return importlib.import_module(f"{package}.{name}")


def vit_pytorch(file: str, name: str, shape: tuple[int, ...] = (3, PICTURE, PICTURE), **options: Any) -> Built:
    """A classifier of vit-pytorch; options that its class does not take are left to the caller."""
    model = getattr(module_of("vit_pytorch", file), name)(num_classes=CLASSES, **options)
    return model, (torch.randn(SAMPLES, *shape), classes())


PATCHES = {
    "image_size": PICTURE, "patch_size": 8, "dim": WIDTH, "depth": LAYERS, "heads": HEADS, "mlp_dim": 2 * WIDTH,
    "dim_head": WIDTH // HEADS,
}  # fmt: skip
"""What most classes of vit-pytorch take."""


def language(package: str, name: str, **options: Any) -> Built:
    """A language model of any package: tokens in, logits out."""
    model = getattr(importlib.import_module(package), name)(**options)
    ids = tokens(TOKENS + 1)
    return model, (ids[:, :-1], ids[:, 1:])


def features(package: str, name: str, **options: Any) -> Built:
    """A stack of any package from sequences of features to others of the same shape."""
    model = getattr(importlib.import_module(package), name)(**options)
    return model, (torch.randn(SAMPLES, TOKENS, WIDTH), torch.randn(SAMPLES, TOKENS, WIDTH))
