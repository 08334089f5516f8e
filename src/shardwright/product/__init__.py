"""Operators on cut operands, each with the collectives it needs; the strategies choose among them."""

from shardwright.product.attention import attend_inside, attend_selected
from shardwright.product.guard import Forwarding, guard
from shardwright.product.heads import head_rows, head_slices, kv_heads, query_heads
from shardwright.product.linear import enter, row_linear
from shardwright.product.vocabulary import cut_cross_entropy, cut_embedding

__all__ = [
    "Forwarding",
    "attend_inside",
    "attend_selected",
    "cut_cross_entropy",
    "cut_embedding",
    "enter",
    "guard",
    "head_rows",
    "head_slices",
    "kv_heads",
    "query_heads",
    "row_linear",
]
