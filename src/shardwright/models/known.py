"""What is known of torch's own blocks, whose code has choices that a trace cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwright.models.structure import ELEMENTWISE_FUNCTIONS, Chain, is_elementwise_module, is_exactly, runs_as

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def known_chains(model: nn.Module) -> Iterator[tuple[Chain, bool]]:
    """The pairs of layers inside torch's transformer layers, and whether the samples are in dim 0 there.

    >>> layer = nn.TransformerDecoderLayer(8, 2, 16)
    >>> list(known_chains(layer))
    [(Chain(columns=('linear1',), between=('dropout',), row='linear2', entry=None), False)]
    """
    for path, layer in model.named_modules():
        if not any(runs_as(layer, kind) for kind in LAYERS):
            continue
        activation: Any = layer.activation
        elementwise = activation in ELEMENTWISE_FUNCTIONS or is_elementwise_module(activation)
        inside = {name: getattr(layer, name) for name in ("linear1", "dropout", "linear2", "self_attn")}
        kinds = {"linear1": nn.Linear, "dropout": nn.Dropout, "linear2": nn.Linear}
        if not elementwise or not all(is_exactly(inside[name], kind) for name, kind in kinds.items()):
            continue
        prefix = f"{path}." if path else ""
        between = ("activation",) * isinstance(activation, nn.Module) + ("dropout",)
        chain = Chain((f"{prefix}linear1",), tuple(prefix + name for name in between), f"{prefix}linear2", None)
        yield chain, bool(inside["self_attn"].batch_first)


def is_known_attention(module: nn.Module) -> bool:
    """Whether this is torch's attention and does what that does; learned or zero keys of its own are not known.

    >>> [is_known_attention(nn.MultiheadAttention(4, 2, add_bias_kv=more)) for more in (False, True)]
    [True, False]
    """
    return (
        is_exactly(module, nn.MultiheadAttention)
        and isinstance(module, nn.MultiheadAttention)
        and is_exactly(module.out_proj, NonDynamicallyQuantizableLinear)
        and module.bias_k is None
        and not module.add_zero_attn
    )
