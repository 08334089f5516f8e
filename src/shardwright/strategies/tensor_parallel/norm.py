"""Tensor parallelism for LayerNorm and RMSNorm of cut features: each rank has some, statistics are combined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

from torch import nn

from shardwright.analysis.module_calls import ModuleCall
from shardwright.analysis.structure import is_exactly
from shardwright.operators.norms import cut_norm
from shardwright.plan.plan import Shard
from shardwright.plan.traffic import Traffic
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.traffic import RankTraffic


@dataclass(frozen=True)
class NormNote(OperatorNote):
    """The cut of a norm's features; ``centered`` if the norm subtracts the mean, as LayerNorm does."""

    guarded: ClassVar[bool] = True

    features: Features
    centered: bool

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the norm normalise this rank's features by statistics of all, combined over the axes that cut them."""
        splits = tuple((rank.axes[name], self.features.sizes(rank.coord, name)) for name in self.features.names)
        rank.operator(module, "norm of cut features", partial(cut_norm, module, self.features.size, splits))

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers or all-reduces of statistics, and those of two sums in the backward."""
        learns = call.needs_gradient or path in here.trained
        num_rows = prod(call.x_shape[:-1])
        two = 2 if self.centered else 1
        element_bytes = max(call.element_bytes, 4)  # statistics are no narrower than float32
        for axis in self.features.names:
            size = here.plan.mesh[axis]
            if self.centered:
                yield Traffic("all_gather", axis, size * two * num_rows * element_bytes, size, call.num_forwards)
            else:
                yield Traffic("all_reduce", axis, num_rows * element_bytes, size, call.num_forwards)
            if learns:
                yield Traffic("all_reduce", axis, two * num_rows * element_bytes, size)


def place_norm(draft: PlanDraft, path: str, use: FeatureUse) -> None:
    """Plans the norm at ``path`` with its features cut, as they are between layers."""
    features = Features.balanced(use.size, draft.mode.feature_axes)
    for name in draft.names.get(path, {}).values():
        for axis in features.names:
            draft.cut(name, axis, 0, features.along(axis))
    spec = {axis: Shard(-1) for axis in features.names}
    centered = is_exactly(draft.model.get_submodule(path), nn.LayerNorm)
    draft.plan = draft.plan.use(path, x=spec, dy=spec)
    draft.note(path, NormNote(features, centered))
    draft.role(path, "norm", f"{use.size} features, statistics combined")
