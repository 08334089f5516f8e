"""Recognizes modules whose code is known, although it cannot be traced: torch's transformer layers, and attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwright.analysis.traced.structure import (
    ELEMENTWISE_FUNCTIONS,
    LayerChain,
    is_elementwise_module,
    is_exactly,
    runs_as,
)
from shardwright.function_copies import with_names
from shardwright.keyed_dropout import TRANSFORMER_LAYERS
from shardwright.models.attention import Attention, Rotary


class MetaForward(partial[Any]):
    """The forward of a module inside of :func:`without_branches`: the forward of its class, without reads of masks."""


@contextmanager
def without_branches(model: nn.Module) -> Iterator[None]:
    """Returns a context in which torch's transformers run on the meta device.

    Inside it they do not read a mask's values to find out whether the mask is causal. Unlike the replacements in
    ``torch_loops.py``, torch's own code runs, including what it allocates once for all layers.

    >>> import torch
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False).to("meta")
    >>> x, mask = torch.empty(3, 1, 4, device="meta"), torch.empty(3, 3, device="meta")
    >>> with without_branches(model):
    ...     model(x, mask).shape
    torch.Size([3, 1, 4])
    """
    kinds = (nn.TransformerEncoder, nn.TransformerDecoder)
    transformers = [module for module in model.modules() if any(runs_as(module, kind) for kind in kinds)]
    for module in transformers:
        forward = with_names(type(module).forward, _detect_is_causal_mask=_is_causal)
        module.forward = MetaForward(forward, module)
    try:
        yield
    finally:
        for module in transformers:
            del module.forward


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Replaces torch's function: a mask counts as causal only if the caller passes ``is_causal``."""
    return is_causal is True


def known_chains(model: nn.Module) -> Iterator[tuple[LayerChain, bool]]:
    """Yields the chain of the two feed-forward linears of each of torch's transformer layers, and its ``batch_first``.

    In the chain the first linear is column-parallel and the second row-parallel.

    Subclasses are left out, and so are layers whose forward was replaced, whose activation is not elementwise, or whose
    feed-forward part was replaced or has hooks.

    >>> layer = nn.TransformerDecoderLayer(8, 2, 16)
    >>> list(known_chains(layer))
    [(LayerChain(columns=('linear1',), between=('dropout',), row='linear2', entry=None, owner=''), False)]
    """
    for path, layer in model.named_modules():
        if not any(runs_as(layer, kind) for kind in TRANSFORMER_LAYERS):
            continue
        activation: Any = layer.activation
        module = activation if isinstance(activation, nn.Module) else None
        elementwise = activation in ELEMENTWISE_FUNCTIONS if module is None else is_elementwise_module(module)
        inside = {name: getattr(layer, name) for name in ("linear1", "dropout", "linear2", "self_attn")}
        kinds = {"linear1": nn.Linear, "dropout": nn.Dropout, "linear2": nn.Linear}
        if not elementwise or not all(is_exactly(inside[name], kind) for name, kind in kinds.items()):
            continue
        prefix = f"{path}." if path else ""
        between = ("activation",) * (module is not None) + ("dropout",)
        between = tuple(prefix + name for name in between)
        chain = LayerChain((f"{prefix}linear1",), between, f"{prefix}linear2", None, path)
        yield chain, bool(inside["self_attn"].batch_first)


def is_known_attention(module: nn.Module) -> bool:
    """Returns whether a module is a plain ``nn.MultiheadAttention``, without ``add_bias_kv`` and ``add_zero_attn``.

    The result is False for a subclass, and for a module with hooks, a replaced forward or a replaced output projection.

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


def attention_layers(attention: Attention) -> tuple[str, ...]:
    """Returns the attribute names of an attention's projections: queries, keys, values and output.

    If queries, keys and values are projected by one fused layer, its name is ``qkv``.

    >>> attention_layers(Attention(8, 2))
    ('q', 'k', 'v', 'o')
    """
    return ("qkv", "o") if attention.fused else ("q", "k", "v", "o")


def is_plain_attention(module: nn.Module) -> bool:
    """Returns whether a module is this library's ``Attention`` as constructed, with no part replaced and no hooks.

    >>> attention = Attention(8, 2)
    >>> plain = is_plain_attention(attention)
    >>> attention.attend = lambda q, k, v: v
    >>> plain, is_plain_attention(attention)
    (True, False)
    """
    if not isinstance(module, Attention) or not is_exactly(module, Attention):
        return False
    if not {"attend", "project"}.isdisjoint(vars(module)):
        return False
    kinds: dict[str, type[nn.Module]] = dict.fromkeys(attention_layers(module), nn.Linear)
    kinds |= {"attention_dropout": nn.Dropout} | ({"rotary": Rotary} if module.rotary is not None else {})
    children = dict(module.named_children())
    if children.keys() != kinds.keys() or not all(is_exactly(children[name], kind) for name, kind in kinds.items()):
        return False
    q_width, kv_width = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
    made = [children[name].out_features for name in attention_layers(module)[:-1]]
    as_built = [q_width + 2 * kv_width] if module.fused else [q_width, kv_width, kv_width]
    whole_heads = module.rotary is None or module.rotary.pairs == tuple(range(module.head_dim // 2))
    return made == as_built and module.o.in_features == q_width and whole_heads
