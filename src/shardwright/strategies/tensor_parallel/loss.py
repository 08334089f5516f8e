"""Tensor parallelism for the output head and the cross entropy on its logits, both cut by classes.

::

    x --> | head: rows of its weight, some classes | --> logits, cut --> | three numbers a token, gathered | --> loss
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.models.losses import CrossEntropy
from shardwright.operators.vocabulary import cut_cross_entropy
from shardwright.plan.plan import LOSS, OUTPUT, ActivationCut
from shardwright.plan.traffic import Traffic
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.linear import cut_weight, linear_role
from shardwright.strategies.tensor_parallel.moves import AxisMove, input_moves
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Layer, LayerBoundary, States
from shardwright.strategies.tensor_parallel.traffic import INDEX_BYTES, RankTraffic


@dataclass(frozen=True)
class LossNote(OperatorNote):
    """The cut of a cross-entropy loss by classes (``vocabulary``).

    ``gathers`` are the all-gathers of targets and losses, where rows are cut. ``head`` is the layer that computes the
    logits; ``num_numbers`` is how many numbers a rank sends for each token.
    """

    head: str
    vocabulary: Features
    gathers: tuple[AxisMove, ...]
    num_numbers: int

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the loss compute the cross entropy from this rank's classes, and sum it over ranks with the others."""
        assert isinstance(module, CrossEntropy)
        start = self.vocabulary.held(rank.coord)[0][0]
        gathers = rank.moves(self.gathers)
        over = tuple(rank.axes[name] for name in reversed(self.vocabulary.names))

        def forward(logits_V: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss_N, count = cut_cross_entropy(
                logits_V, targets, start, self.vocabulary.size, over, ignore_index=module.ignore_index,
                label_smoothing=module.label_smoothing, take=gathers,
            )  # fmt: skip
            return loss_N.sum(), count

        rank.operator(module, "cross entropy of cut classes", forward)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the traffic of the vocabulary-parallel cross entropy.

        Over the axes that cut tokens, targets and losses are all-gathered; over those that cut classes, a few numbers
        of each token.
        """
        of_each = here.rows_each(call.y_shape)
        num_rows = here.num_rows((), call.y_shape)
        element_bytes = max(call.element_bytes, 4)  # losses are no narrower than float32
        for move in self.gathers:
            num_rows = int(sum(here.shard.sizes(move.rows, move.axis)) * of_each)
            size = here.plan.mesh[move.axis]
            yield Traffic("all_gather", move.axis, num_rows * INDEX_BYTES, size)
            yield Traffic("all_gather", move.axis, num_rows * element_bytes, size)
        for axis in self.vocabulary.names:
            size = here.plan.mesh[axis]
            yield Traffic("all_gather", axis, num_rows * self.num_numbers * size * element_bytes, size)

    def called_as(self, path: str) -> str:
        """Returns the path of the head, whose output is the loss's input."""
        return self.head


def place_head(draft: PlanDraft, head: str) -> None:
    """Plans the layer ``head`` with its classes cut, and the loss on logits that are cut by classes.

    Raises: LayoutError: the head has too few classes for the grid.
    """
    layer = draft.model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    use = draft.flow.uses.get(head, FeatureUse("linear"))
    start, tied = draft.mode.states(use.takes_cut), draft.is_tied(head)
    # a tied weight is cut by its rows (the vocabulary), over every axis that cuts weights
    states: States | None = tuple("F" if axis.stored else "T" for axis in draft.mode.axes) if tied else None
    choice = draft.mode.choose(
        (Layer(layer.in_features, layer.out_features, not use.from_input),),
        (LayerBoundary(0, start), LayerBoundary(layer.out_features, states, sums=not tied, rows=False)),
        draft.job.num_tokens,
        rows_end=None,
    )
    if choice is None:
        raise draft.too_small(head, f"{layer.out_features} classes")
    (step,) = choice.steps
    x, y = draft.features_in(start, layer.in_features), draft.features_in(step.after, layer.out_features)
    note = cut_weight(draft, head, step, x, y)
    linear_role(draft, head, f"{layer.out_features} classes; the loss takes them cut", note)
    assert isinstance(draft.job.loss, CrossEntropy)
    numbers = 4 if draft.job.loss.label_smoothing > 0 else 3
    gathers = tuple(g for g in input_moves(step, draft.mode.axes, x) if g.kind == "rows")
    draft.note(LOSS, LossNote(head, y, gathers, numbers))
    parts = len(y.parts)
    why = f"{layer.out_features} classes" + (f" in {parts} parts: a gather for each token" if parts > 1 else "")
    draft.role(LOSS, f"{'four' if numbers == 4 else 'three'} numbers", why)
    for axis in y.names:
        activation = ActivationCut(axis, -1, y.size, y.along(axis))
        draft.plan = draft.plan.cut_activation(OUTPUT, activation)
    draft.plan = draft.plan.move_rows(OUTPUT, step.rows_after)
