"""Transfers among tensors that one process has all of, and ranges of dims that are cut section by section."""

from __future__ import annotations

from shardwright.sharding.box import balanced_ranges, concat, read
from shardwright.sharding.transfer import deliver


def execute_locally(transfer, sources, destinations):
    """Runs a transfer: reads ``sources`` and writes ``destinations``, tensors by rank that share no memory."""
    for message in transfer.messages:
        values = read(sources[message.source], message.source_piece, message.box)
        deliver(message, destinations[message.destination], values)


def fused_ranges(blocks, parts):
    """The ranges of each of the parts, which has a balanced slice of every section; ``blocks`` are their sizes."""
    return concat(blocks, [balanced_ranges(size, parts) for size in blocks])
