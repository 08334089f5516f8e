"""Parameters, gradients and optimizer state at rest in flat slices; whole while something computes with them."""

from __future__ import annotations

from shardwright.slices.groups import Group, groups, rest_in_slices
from shardwright.slices.state import SlicedState

__all__ = ["Group", "SlicedState", "groups", "rest_in_slices"]
