"""Operators on cut operands, each with the collectives it needs; the strategies choose among them."""

from shardwright.product.attention import attend_inside, attend_selected
from shardwright.product.batch_norm import batch_norms, forget_batches, share_statistics, shared_batch_norm
from shardwright.product.convolution import CutConvolution, Window, halo_convolution, halo_pool, output_sizes
from shardwright.product.grid import Ahead, Fetch, Later, Product, weight_of
from shardwright.product.guard import Forwarding, Running, guard
from shardwright.product.heads import head_rows, head_slices, kv_heads, query_heads
from shardwright.product.moves import Move, give, take
from shardwright.product.norms import Split, cut_layer_norm, cut_rms_norm
from shardwright.product.vocabulary import cut_cross_entropy, cut_embedding

__all__ = [
    "Ahead",
    "CutConvolution",
    "Fetch",
    "Forwarding",
    "Later",
    "Move",
    "Product",
    "Running",
    "Split",
    "Window",
    "attend_inside",
    "attend_selected",
    "batch_norms",
    "cut_cross_entropy",
    "cut_embedding",
    "cut_layer_norm",
    "cut_rms_norm",
    "forget_batches",
    "give",
    "guard",
    "halo_convolution",
    "halo_pool",
    "head_rows",
    "head_slices",
    "kv_heads",
    "output_sizes",
    "query_heads",
    "share_statistics",
    "shared_batch_norm",
    "take",
    "weight_of",
]
