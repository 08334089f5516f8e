"""A tensor-parallel mode (1D to 3D) as data: its grid of ranks, how it cuts activations, and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.plan.batch_shard import RowMoves
from shardwright.plan.option import StrategyOption
from shardwright.strategies.tensor_parallel.roles import (
    GridAxis,
    Layer,
    LayerBoundary,
    RoleChoice,
    State,
    States,
    cheapest,
)


@dataclass(frozen=True)
class Mode:
    """The tensor-parallel settings of a layout: mesh axes, how they shard activations, and how matmuls run.

    ``keep``: all-gathered operands are kept for the backward. ``overlap``: collectives overlap with compute.
    ``pinned``: the fixed sharding of activations inside a block (``:summa``, ``:classic``); no partial sum is then
    reduce-scattered over features. ``dim``: the dim of the cut rows, 0 for samples, 1 for tokens.
    """

    name: str
    axes: tuple[GridAxis, ...]
    keep: bool = True
    overlap: bool = True
    pinned: States | None = None
    dim: Literal[0, 1] = 0

    @property
    def row_axes(self) -> tuple[GridAxis, ...]:
        """The axes that cut rows (samples or tokens) of activations between layers."""
        return tuple(axis for axis in self.axes if axis.stream == "T")

    @property
    def stream(self) -> States:
        """The state of activations between layers on each axis: ``T`` rows cut, ``F`` features cut, ``C`` copied."""
        return tuple(axis.stream for axis in self.axes)

    @property
    def feature_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes, as (name, size), that cut features of activations between layers."""
        return tuple((axis.name, axis.size) for axis in self.axes if axis.stream == "F")

    def states(self, cut: bool) -> States:
        """Returns the state on each axis (T, F or C) of an activation between layers.

        Without ``cut`` its features are whole: C (copied) takes the place of F (features cut).
        """
        whole: Mapping[State, State] = {"T": "T", "F": "C", "C": "C"}
        return self.stream if cut else tuple(whole[state] for state in self.stream)

    def axes_in(self, states: States, state: State) -> tuple[tuple[str, int], ...]:
        """Returns the axes (name, size) on which an activation has ``state``: T rows cut, F features cut, C copied."""
        return tuple((a.name, a.size) for a, s in zip(self.axes, states, strict=True) if s == state)

    def choose(
        self,
        layers: tuple[Layer, ...],
        boundaries: tuple[LayerBoundary, ...],
        num_tokens: int,
        rows_end: RowMoves | None = (),
    ) -> RoleChoice | None:
        """Returns how each axis cuts consecutive layers (column-parallel, row-parallel or by rows) to send least.

        A cut that the layout pins is taken where it fits; elsewhere the ``misfit`` of each step says why it does not.
        The result is None if no cut fits. ``boundaries`` are the activations before, between and after the layers, and
        ``rows_end`` is how rows are cut at the end, None for any cut.
        """
        if self.pinned is not None:
            inner = [b._replace(states=b.states or self.pinned, sums=False) for b in boundaries[1:-1]]
            last = boundaries[-1]._replace(sums=False)
            choice = cheapest(layers, (boundaries[0], *inner, last), self.axes, num_tokens, rows_end=rows_end)
            if choice is not None:
                return choice
        choice = cheapest(layers, boundaries, self.axes, num_tokens, regather=not self.keep, rows_end=rows_end)
        if choice is None or self.pinned is None:
            return choice
        misfit = self._misfit(boundaries)
        return replace(choice, steps=tuple(step._replace(misfit=misfit) for step in choice.steps))

    def _misfit(self, boundaries: Sequence[LayerBoundary]) -> str:
        """Returns why the pinned roles do not fit a block, as text that is appended to a reason."""
        whole = [
            f"{end} features are not cut over {axis.name}"
            for end, states in (("input", boundaries[0].states), ("output", boundaries[-1].states))
            for axis, outside, inside in zip(self.axes, states or (), self.pinned or (), strict=False)
            if outside == "C" and inside == "T" and len(boundaries) > 2  # no role leads from C to T, or back
        ]
        reason = f"the block's {' and its '.join(whole)}" if whole else "too few features or heads, or none contiguous"
        return f"; the pinned roles do not fit here, the cheapest are used: {reason}"


SEQ = "seq"

OPTIONS: Mapping[str, StrategyOption] = {
    SEQ: StrategyOption(
        "rows are the tokens of each sample and not samples: for batches of fewer samples than cut them"
    ),
    "regather": StrategyOption(
        "gathered operands are not kept for the backward but re-gathered: less memory, more traffic; "
        ":summa does so by itself, and tpN alone gathers nothing"
    ),
    "no-overlap": StrategyOption("no collective overlaps with computation: to see what overlap gains", searched=()),
}
"""The layout options that every tensor-parallel mode has."""
