"""What a strategy is: one file, one value, three functions; and the ``Plan`` that strategies refine in turn.

Data flows one way. ``place`` is pure and sees the whole plain model, so every ``LayoutError`` comes from here, on
every rank, before anything is sent. ``apply`` changes this rank's part of the model. ``traffic`` prices the plan
and shares no code with what records the calls.
"""

from __future__ import annotations

from shardwright.strategy.plan import (
    INPUT,
    LOSS,
    NUM_TOKENS,
    OUTPUT,
    Activation,
    Job,
    Partial,
    Plan,
    Replicate,
    Rest,
    Role,
    Shard,
    Spec,
    Use,
    computed_in,
)
from shardwright.strategy.protocol import (
    Applied,
    Offload,
    Strategy,
    apply_in_turn,
    check_samples_apart,
    check_table,
)
from shardwright.strategy.traffic import (
    Batch,
    Crossing,
    Share,
    Sharers,
    Traffic,
    is_shared_whole,
    partial_axes,
    statistics_traffic,
    sum_dtype,
    summed_axes,
    sync,
    sync_axes,
    sync_groups,
    sync_traffic,
    whole_uses,
)
from shardwright.strategy.units import (
    blocks,
)

__all__ = [
    "INPUT",
    "LOSS",
    "NUM_TOKENS",
    "OUTPUT",
    "Activation",
    "Applied",
    "Batch",
    "Crossing",
    "Job",
    "Offload",
    "Partial",
    "Plan",
    "Replicate",
    "Rest",
    "Role",
    "Shard",
    "Share",
    "Sharers",
    "Spec",
    "Strategy",
    "Traffic",
    "Use",
    "apply_in_turn",
    "blocks",
    "check_samples_apart",
    "check_table",
    "computed_in",
    "is_shared_whole",
    "partial_axes",
    "statistics_traffic",
    "sum_dtype",
    "summed_axes",
    "sync",
    "sync_axes",
    "sync_groups",
    "sync_traffic",
    "whole_uses",
]
