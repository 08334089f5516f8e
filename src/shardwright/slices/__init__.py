"""Parameters, gradients and optimizer state at rest in flat slices; whole while something computes with them."""

from __future__ import annotations

from shardwright.slices.groups import Group, chunks_with, groups, rest_in_slices
from shardwright.slices.state import SlicedState
from shardwright.slices.storage import Place, Storage

__all__ = ["Group", "Place", "SlicedState", "Storage", "chunks_with", "groups", "rest_in_slices"]
