"""Collects from a plan's notes the sizes that tensor parallelism's ``traffic`` reads, to find ranks that send alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from shardwright.plan.alike_ranks import FeatureParts, TrafficCuts
from shardwright.plan.batch_shard import RowMoves
from shardwright.plan.plan import Plan
from shardwright.sharding.tensor_shard import ALL
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.roles import RoleStep
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote


def traffic_cuts(plan: Plan) -> TrafficCuts:
    """Returns the feature cuts and row moves in a plan's notes (its entries for modules), each once.

    If several ranks compute one head, some features are in several parts; ``AlikeRanks`` then takes no two ranks as
    alike.
    """
    features: dict[FeatureParts, None] = {}
    rows: dict[RowMoves, None] = {}
    for note in plan.notes.values():
        for cut in _shards_of(note, plan) if isinstance(note, ShardsNote) else _inside(note):
            if isinstance(cut, FeatureParts):
                features[cut] = None
            else:
                rows[cut] = None
    return TrafficCuts(tuple(features), tuple(rows))


def _inside(value: Any) -> Iterator[FeatureParts | RowMoves]:
    """Yields the feature cuts and row moves in a note (a module's entry in the plan)."""
    if isinstance(value, Features):
        yield FeatureParts(value.size, value.names, value.parts)
    elif isinstance(value, RoleStep):
        yield from (value.rows_before, value.rows_gathered, value.rows_after)
    elif isinstance(value, tuple):
        if _is_moves(value):
            yield value
            return
        for child in value:
            yield from _inside(child)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _inside(getattr(value, field.name))
        for name in ("input_moves", "output_moves"):
            if hasattr(value, name):
                yield from _inside(getattr(value, name)())


def _is_moves(value: tuple[Any, ...]) -> bool:
    """Returns whether a tuple is :data:`RowMoves`, such as ``(("gather", "row"), ("cut", "col"))``."""
    return bool(value) and all(isinstance(e, tuple) and len(e) == 2 and e[0] in ("gather", "cut") for e in value)


def _shards_of(note: ShardsNote, plan: Plan) -> Iterator[FeatureParts]:
    """Yields the cut of each sharded dim of the parameters and buffers of a model that runs on tensor shards."""
    if note.axis is None:
        return
    for shard in note.shards.values():
        for cut in (cut for cut in shard.cuts if cut is not None):
            ranges = tuple(
                tuple((i, i + 1) for i, label in enumerate(cut) if label in (rank, ALL))
                for rank in range(plan.mesh[note.axis])
            )
            yield FeatureParts(len(cut), (note.axis,), ranges)
