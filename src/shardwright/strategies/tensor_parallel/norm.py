"""Tensor parallelism for norms of cut features (``FEATURE_NORMS``): each rank has some, statistics are combined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from torch import nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.operators.norms import FEATURE_NORMS, feature_norm_of
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
    """The cut of the features of a norm, which is of the class ``kind`` in ``FEATURE_NORMS``."""

    guarded: ClassVar[bool] = True

    features: Features
    kind: type[nn.Module]

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the norm normalise this rank's features by statistics of all, combined over the axes that cut them."""
        splits = tuple((rank.axes[name], self.features.sizes(rank.coord, name)) for name in self.features.names)
        run, size = FEATURE_NORMS[self.kind].run, self.features.size
        rank.operator(module, "norm of cut features", lambda input: run(module, input, size, splits))

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the collectives of statistics, and the all-reduces of sums in the backward."""
        norm, learns = FEATURE_NORMS[self.kind], call.needs_gradient or path in here.trained
        element_bytes = max(call.element_bytes, 4)  # statistics are no narrower than float32
        number_bytes = prod(call.x_shape[:-1]) * element_bytes  # of one number for each token
        for axis in self.features.names:
            size = here.plan.mesh[axis]
            members = size if norm.combines == "all_gather" else 1  # the payload is the whole tensor's size
            yield Traffic(norm.combines, axis, members * norm.num_statistics * number_bytes, size, call.num_forwards)
            if learns:
                yield Traffic("all_reduce", axis, norm.num_sums * number_bytes, size)


def place_norm(draft: PlanDraft, path: str, use: FeatureUse) -> None:
    """Plans the norm at ``path`` with its features cut, as they are between layers."""
    features = Features.balanced(use.size, draft.mode.feature_axes)
    for name in draft.names.get(path, {}).values():
        for axis in features.names:
            draft.cut(name, axis, 0, features.along(axis))
    spec = {axis: Shard(-1) for axis in features.names}
    kind = feature_norm_of(draft.model.get_submodule(path))
    assert kind is not None, "only such norms get cut features"
    draft.plan = draft.plan.use(path, x=spec, dy=spec)
    draft.note(path, NormNote(features, kind))
    draft.role(path, "norm", f"{use.size} features, statistics combined")
