"""Operators on cut operands, each with the collectives it needs; the strategies choose among them."""

from shardwright.product.attention import attend_gathered, attend_inside, attend_selected
from shardwright.product.batch_norm import (
    batch_norms,
    forget_batches,
    share_statistics,
    shared_batch_norm,
    shared_group_norm,
)
from shardwright.product.convolution import CutConvolution
from shardwright.product.grid import Ahead, Fetch, Later, Product, weight_of
from shardwright.product.guard import Forwarding, Running, guard
from shardwright.product.halo import (
    halo_convolution,
    halo_enlarge,
    halo_pool,
    halo_transposed_convolution,
    mean_of_rows,
    whole_rows,
)
from shardwright.product.heads import head_rows, head_slices, kv_heads, query_heads
from shardwright.product.moves import Move, give, take
from shardwright.product.norms import Split, cut_layer_norm, cut_rms_norm
from shardwright.product.rows import (
    Enlarged,
    Resize,
    Spread,
    Window,
    balanced_rows,
    output_sizes,
    reading_of,
    row_ranges,
)
from shardwright.product.vocabulary import cut_cross_entropy, cut_embedding

__all__ = [
    "Ahead",
    "CutConvolution",
    "Enlarged",
    "Fetch",
    "Forwarding",
    "Later",
    "Move",
    "Product",
    "Resize",
    "Running",
    "Split",
    "Spread",
    "Window",
    "attend_gathered",
    "attend_inside",
    "attend_selected",
    "balanced_rows",
    "batch_norms",
    "cut_cross_entropy",
    "cut_embedding",
    "cut_layer_norm",
    "cut_rms_norm",
    "forget_batches",
    "give",
    "guard",
    "halo_convolution",
    "halo_enlarge",
    "halo_pool",
    "halo_transposed_convolution",
    "head_rows",
    "head_slices",
    "kv_heads",
    "mean_of_rows",
    "output_sizes",
    "query_heads",
    "reading_of",
    "row_ranges",
    "share_statistics",
    "shared_batch_norm",
    "shared_group_norm",
    "take",
    "weight_of",
    "whole_rows",
]
