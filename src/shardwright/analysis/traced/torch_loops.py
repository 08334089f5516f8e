"""Traceable forwards of torch's TransformerEncoder and TransformerDecoder, without branches on tensor values.

torch's own code reads a mask's values to see whether it is causal. That is only a hint that makes a layer faster; with
the mask and without the hint the layers compute the same. In eval mode torch's encoder may skip padded positions and
write zeros there (``enable_nested_tensor``). The forwards here, as in every layout that shards layers, compute these
positions; all other positions are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn


def _encoder(
    encoder: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
    return src if encoder.norm is None else encoder.norm(src)


def _decoder(
    decoder: nn.TransformerDecoder, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None,
    tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None, tgt_is_causal: Any = None,
    memory_is_causal: Any = False,
) -> Any:  # fmt: skip
    for layer in decoder.layers:
        tgt = layer(
            tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )  # fmt: skip
    return tgt if decoder.norm is None else decoder.norm(tgt)


def _both(
    model: nn.Transformer, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None, memory_mask: Any = None,
    src_key_padding_mask: Any = None, tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None,
    src_is_causal: Any = None, tgt_is_causal: Any = None, memory_is_causal: Any = False,
) -> Any:  # fmt: skip
    memory = model.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
    return model.decoder(
        tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
        memory_is_causal=memory_is_causal,
    )  # fmt: skip


KNOWN_LOOPS: Mapping[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _both,
}
"""Maps torch's transformer encoder and decoder classes to functions that replace their forwards in a trace.

Each function takes the module, followed by the arguments of its forward.
"""


def loop_of(module: nn.Module) -> Callable[..., Any]:
    """Returns a module's forward or, for torch's transformer encoder and decoder, the traceable replacement.

    A subclass of these two, or one whose ``forward`` attribute was set, keeps its own forward.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 1, enable_nested_tensor=False)
    >>> import torch
    >>> x, mask = torch.ones(3, 1, 4), torch.zeros(3, 3)
    >>> torch.allclose(loop_of(encoder)(x, mask=mask), encoder(x, mask=mask))
    True
    """
    known = KNOWN_LOOPS.get(type(module))
    return module.forward if known is None or "forward" in vars(module) else partial(known, module)
