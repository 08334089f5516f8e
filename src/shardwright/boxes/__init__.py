"""Where tensors lie: boxes, pieces, layouts over a mesh, and the planner of transfers between layouts."""

from shardwright.boxes.box import (
    Box,
    Piece,
    Range,
    Ranges,
    balanced_ranges,
    cells,
    concat,
    cut,
    flat_boxes,
    fused_ranges,
    paste,
    read,
    runs,
    write,
)
from shardwright.boxes.lies import Lies
from shardwright.boxes.transfer import Message, Transfer, deliver, execute_locally, plan_transfer

__all__ = [
    "Box",
    "Lies",
    "Message",
    "Piece",
    "Range",
    "Ranges",
    "Transfer",
    "balanced_ranges",
    "cells",
    "concat",
    "cut",
    "deliver",
    "execute_locally",
    "flat_boxes",
    "fused_ranges",
    "paste",
    "plan_transfer",
    "read",
    "runs",
    "write",
]
