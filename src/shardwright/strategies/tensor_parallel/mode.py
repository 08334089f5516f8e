"""A tensor-parallel mode as data, and the notes that ``place`` writes into the plan for each module.

``apply`` turns a note into a module's forward, ``traffic`` into its collectives: both from the same :class:`AxisMove`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardwright.mesh import Coord
from shardwright.plan.batch_shard import RowMoves, rows_after
from shardwright.plan.option import StrategyOption
from shardwright.strategies.tensor_parallel.features import Features, width
from shardwright.strategies.tensor_parallel.roles import (
    Boundary,
    Choice,
    GridAxis,
    Layer,
    RoleStep,
    State,
    States,
    cheapest,
)


@dataclass(frozen=True)
class Mode:
    """Tensor-parallel settings of a layout: the mesh axes, how activations are sharded over them, how matmuls run.

    ``keep``: gathered operands are kept for the backward. ``overlap``: collectives overlap with compute. ``pinned``:
    the fixed sharding of activations inside a block (``:summa``, ``:classic``); there inputs are all-gathered over
    features, and partial sums are all-reduced. ``dim``: the dim of the cut rows, 0 for samples, 1 for tokens.
    """

    name: str
    axes: tuple[GridAxis, ...]
    keep: bool = True
    overlap: bool = True
    pinned: States | None = None
    dim: Literal[0, 1] = 0

    @property
    def row_axes(self) -> tuple[GridAxis, ...]:
        """The axes that cut rows (samples or tokens) between layers."""
        return tuple(axis for axis in self.axes if axis.stream == "T")

    @property
    def stream(self) -> States:
        """The state of activations between layers on each axis: ``T`` rows cut, ``F`` features cut, ``C`` copied."""
        return tuple(axis.stream for axis in self.axes)

    @property
    def feature_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes, as (name, size), that cut features between layers."""
        return tuple((axis.name, axis.size) for axis in self.axes if axis.stream == "F")

    def states(self, cut: bool) -> States:
        """An activation's state between layers on each axis (T, F or C); without ``cut``, features are whole: no F."""
        whole: Mapping[State, State] = {"T": "T", "F": "C", "C": "C"}
        return self.stream if cut else tuple(whole[state] for state in self.stream)

    def axes_in(self, states: States, state: State) -> tuple[tuple[str, int], ...]:
        """The axes, as (name, size), on which ``states`` has ``state``: T rows cut, F features cut, or C copied."""
        return tuple((a.name, a.size) for a, s in zip(self.axes, states, strict=True) if s == state)

    def choose(
        self,
        layers: tuple[Layer, ...],
        boundaries: tuple[Boundary, ...],
        num_tokens: int,
        rows_end: RowMoves | None = (),
    ) -> Choice | None:
        """Chooses each layer's role on each axis (t, h, k): the pinned ones where they fit, else those that send least.

        Where pinned roles do not fit, the ``misfit`` of each step says why.
        """
        if self.pinned is not None:
            inner = [b._replace(states=b.states or self.pinned, sums=False) for b in boundaries[1:-1]]
            last = boundaries[-1]._replace(sums=False)
            found = cheapest(layers, (boundaries[0], *inner, last), self.axes, num_tokens, rows_end=rows_end)
            if found is not None:
                return found
        found = cheapest(layers, boundaries, self.axes, num_tokens, regather=not self.keep, rows_end=rows_end)
        if found is None or self.pinned is None:
            return found
        misfit = self._misfit(boundaries)
        return replace(found, steps=tuple(step._replace(misfit=misfit) for step in found.steps))

    def _misfit(self, boundaries: Sequence[Boundary]) -> str:
        """Why the pinned roles do not fit between the first and the last boundary, as an addition to a reason."""
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
    "no-overlap": StrategyOption("no collective overlaps with computation: to see what overlap gains"),
}
"""The options that every mode has."""


class AxisMove(NamedTuple):
    """One all-gather, reduce-scatter or all-reduce along an axis: of an operand's rows, its features, or all of it.

    ``rows`` is how rows are cut before it, ``features`` how features are; ``over`` are the axes whose features are
    joined already.
    """

    axis: str
    kind: Literal["rows", "features", "whole"]
    rows: RowMoves = ()
    features: Features | None = None
    over: tuple[str, ...] = ()

    def feature_sizes(self, coord: Coord) -> tuple[int, ...]:
        """How many features each rank along the axis holds, with those gathered over other axes before."""
        assert self.features is not None, "features are cut"
        return self.features.sizes(coord, self.axis, self.over)


@dataclass(frozen=True)
class LinearNote:
    """One Linear: its roles, in- and out-features, axes to all-gather its weight over, and elements sent.

    ``enters``: it gathers its own input; else an :class:`EntryNote` gathers it for several layers.
    """

    step: RoleStep
    x: Features
    y: Features
    axes: tuple[GridAxis, ...]
    enters: bool = True
    fetches: tuple[str, ...] = ()
    elements: float = 0.0

    def input_moves(self) -> tuple[AxisMove, ...]:
        """The collectives that gather the input, in order; none where an :class:`EntryNote` does."""
        return input_moves(self.step, self.axes, self.x) if self.enters else ()

    def output_moves(self) -> tuple[AxisMove, ...]:
        """The reduce-scatters or all-reduces that sum the output, in order."""
        return output_moves(self.step, self.axes, self.y)


@dataclass(frozen=True)
class EntryNote:
    """A module in which several layers share one input, which is gathered once for all of them."""

    step: RoleStep
    x: Features
    axes: tuple[GridAxis, ...]

    def input_moves(self) -> tuple[AxisMove, ...]:
        """The collectives that gather the shared input, in order."""
        return input_moves(self.step, self.axes, self.x)


@dataclass(frozen=True)
class TokensNote:
    """An attention on a part of each sequence: the all-gathers of the other tokens' keys and values.

    ``kv`` are the features of the keys, as many as of the values; ``makers`` the layers that compute both.
    """

    rows: RowMoves
    gathers: tuple[AxisMove, ...]
    kv: Features
    causal: bool
    makers: tuple[str, ...]
    elements: float


@dataclass(frozen=True)
class HeadsNote:
    """Which heads of an attention each joint index of the grid has; if ``inside``, ranks divide one by ``slices``."""

    heads: Features
    kv: Features
    held: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, int], ...]
    inside: bool
    rows: RowMoves
    entry: EntryNote | None = None
    tokens: TokensNote | None = None

    def held_kv(self, coord: Coord) -> list[int]:
        """Returns the numbers of the key and value heads that the rank at ``coord`` holds."""
        return [head for a, b in self.kv.kept(coord) for head in range(a, b)]


@dataclass(frozen=True)
class NormNote:
    """A norm of cut features; ``centred`` if it subtracts the mean, as LayerNorm does."""

    features: Features
    centred: bool


@dataclass(frozen=True)
class EmbeddingNote:
    """An embedding: vocabulary cut over some axes, over which its output is summed, features cut over others."""

    vocabulary: Features
    features: Features
    gathers: tuple[AxisMove, ...]
    sums: tuple[AxisMove, ...]
    rows: RowMoves = ()
    per_sample: bool = True

    def width(self, coord: Coord) -> int:
        """Returns how many features the looked-up rows have before they are summed."""
        return width(self.features.held(coord, over=[each.axis for each in self.sums if each.kind == "features"]))


@dataclass(frozen=True)
class LossNote:
    """A loss on logits whose classes are cut; ``gathers`` are the all-gathers of targets and losses."""

    head: str
    vocabulary: Features
    gathers: tuple[AxisMove, ...]
    num_numbers: int


@dataclass(frozen=True)
class GatherNote:
    """A module whose inputs' features are all-gathered first: how each is cut. At the model's end: its output."""

    arguments: tuple[Features | None, ...]


def input_moves(step: RoleStep, axes: tuple[GridAxis, ...], x: Features) -> tuple[AxisMove, ...]:
    """Returns the collectives that gather a layer's input: whole operands, rows, then features, fastest axis first."""
    found = [
        AxisMove(axis.name, "whole")
        for axis, state, role in zip(axes, step.before, step.roles, strict=True)
        if role == "h" and state == "C"
    ]
    rows = step.rows_before
    for name in step.gathers:
        found.append(AxisMove(name, "rows", rows))
        rows = rows_after(rows, "gather", [name])
    joined: tuple[str, ...] = ()
    for axis, state, role in reversed(list(zip(axes, step.before, step.roles, strict=True))):
        if role == "h" and state == "F":
            found.append(AxisMove(axis.name, "features", features=x, over=joined))
            joined += (axis.name,)
    return tuple(found)


def output_moves(step: RoleStep, axes: tuple[GridAxis, ...], y: Features) -> tuple[AxisMove, ...]:
    """Returns the collectives that sum a layer's output: features, slowest axis first, rows, then whole operands."""
    cutting = [a.name for a, s, r in zip(axes, step.after, step.roles, strict=True) if r == "k" and s == "F"]
    found = [
        AxisMove(name, "features", features=y, over=tuple(cutting[number + 1 :])) for number, name in enumerate(cutting)
    ]
    rows = step.rows_gathered
    for name in step.cuts:
        rows = rows_after(rows, "cut", [name])
        found.append(AxisMove(name, "rows", rows))
    found += [
        AxisMove(axis.name, "whole")
        for axis, state, role in zip(axes, step.after, step.roles, strict=True)
        if role == "k" and state == "C"
    ]
    return tuple(found)
