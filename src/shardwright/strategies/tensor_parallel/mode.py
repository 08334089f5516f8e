"""A tensor-parallel mode (1D to 3D) as data, and the notes in the plan that describe how each module is cut.

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
    GridAxis,
    Layer,
    LayerBoundary,
    RoleChoice,
    RoleStep,
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
            found = cheapest(layers, (boundaries[0], *inner, last), self.axes, num_tokens, rows_end=rows_end)
            if found is not None:
                return found
        found = cheapest(layers, boundaries, self.axes, num_tokens, regather=not self.keep, rows_end=rows_end)
        if found is None or self.pinned is None:
            return found
        misfit = self._misfit(boundaries)
        return replace(found, steps=tuple(step._replace(misfit=misfit) for step in found.steps))

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


class AxisMove(NamedTuple):
    """One all-gather, reduce-scatter or all-reduce along an axis: of an operand's rows, its features, or all of it.

    ``rows`` and ``features`` say how rows or features are cut where the operand is cut over the axis: before an
    all-gather, after a reduce-scatter. ``over`` are the axes over which the features are whole at that time.
    """

    axis: str
    kind: Literal["rows", "features", "whole"]
    rows: RowMoves = ()
    features: Features | None = None
    over: tuple[str, ...] = ()

    def feature_sizes(self, coord: Coord) -> tuple[int, ...]:
        """Returns the number of features of each rank along the axis, where they are whole over the axes ``over``."""
        assert self.features is not None, "features are cut"
        return self.features.sizes(coord, self.axis, self.over)


@dataclass(frozen=True)
class LinearNote:
    """The cut of one ``nn.Linear``: on each axis column-parallel, row-parallel or by rows, as ``step`` says.

    ``x`` and ``y`` are the cuts of its in- and out-features, ``fetches`` the axes over which its weight is all-gathered
    before use, and ``elements`` the number of elements that a rank sends for it in a microbatch. ``enters``: the layer
    all-gathers its own input; else an :class:`EntryNote` does so for several layers.
    """

    step: RoleStep
    x: Features
    y: Features
    axes: tuple[GridAxis, ...]
    enters: bool = True
    fetches: tuple[str, ...] = ()
    elements: float = 0.0

    def input_moves(self) -> tuple[AxisMove, ...]:
        """Returns the collectives of the input (:class:`AxisMove`), in order; none if an :class:`EntryNote` does them.

        They are all-gathers; a move "whole" gathers nothing and all-reduces the input gradient (Megatron's ``f``).
        """
        return input_moves(self.step, self.axes, self.x) if self.enters else ()

    def output_moves(self) -> tuple[AxisMove, ...]:
        """Returns the reduce-scatters or all-reduces of the output, in order."""
        return output_moves(self.step, self.axes, self.y)


@dataclass(frozen=True)
class EntryNote:
    """The collectives of an input that several layers of a module share, such as q, k and v: they run once for all.

    ``step`` says how each axis cuts these layers, and ``x`` how the features of the input are cut.
    """

    step: RoleStep
    x: Features
    axes: tuple[GridAxis, ...]

    def input_moves(self) -> tuple[AxisMove, ...]:
        """Returns the collectives of the shared input (:class:`AxisMove`), in order.

        They are all-gathers; a move "whole" gathers nothing and all-reduces the input gradient.
        """
        return input_moves(self.step, self.axes, self.x)


@dataclass(frozen=True)
class TokensNote:
    """The all-gathers of keys and values for an attention whose sequences are sharded by tokens.

    ``rows`` says how the tokens of a query are cut. ``kv`` is the cut of the keys' features, which the values share;
    ``causal``: a query sees no later tokens. ``makers`` are the layers that compute keys and values, and ``elements``
    is the number of elements that a rank sends for both in a microbatch.
    """

    rows: RowMoves
    gathers: tuple[AxisMove, ...]
    kv: Features
    causal: bool
    makers: tuple[str, ...]
    elements: float


@dataclass(frozen=True)
class HeadsNote:
    """The cut of an attention's heads over the grid of ranks.

    ``heads`` and ``kv`` are the cuts of query heads and of key and value heads. Rank i along the axes that cut them
    (counted row-major) has the query heads ``held[i]``, and of each head the elements ``slices[i]`` (start, stop), or
    the pairs of elements that a rotary embedding turns. These are all elements, except if ``inside`` is True: then
    several ranks divide a head. ``rows`` are the gathers and cuts of rows since the model's input. ``entry`` is the
    all-gather of the input of q, k and v, if they are separate layers; ``tokens`` that of keys and values, if sequences
    are cut.
    """

    heads: Features
    kv: Features
    held: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, int], ...]
    inside: bool
    rows: RowMoves
    entry: EntryNote | None = None
    tokens: TokensNote | None = None

    def held_kv(self, coord: Coord) -> list[int]:
        """Returns the numbers of the key and value heads on the rank at ``coord``."""
        return [head for a, b in self.kv.kept(coord) for head in range(a, b)]


@dataclass(frozen=True)
class NormNote:
    """The cut of a norm's features; ``centered`` if the norm subtracts the mean, as LayerNorm does."""

    features: Features
    centered: bool


@dataclass(frozen=True)
class EmbeddingNote:
    """The cut of an embedding table: its rows (the vocabulary) over some axes, its features over others.

    ``gathers`` are the all-gathers of its tokens, and ``sums`` the reduce-scatters or all-reduces that add up the
    ranks' looked-up rows. ``rows`` are the gathers and cuts of rows up to the look-up. ``per_sample`` is False for a
    table that does not look up the model's own input, such as one of positions.
    """

    vocabulary: Features
    features: Features
    gathers: tuple[AxisMove, ...]
    sums: tuple[AxisMove, ...]
    rows: RowMoves = ()
    per_sample: bool = True

    def width(self, coord: Coord) -> int:
        """Returns the number of features of each looked-up row on the rank at ``coord``, before rows are summed."""
        return width(self.features.held(coord, over=[each.axis for each in self.sums if each.kind == "features"]))


@dataclass(frozen=True)
class LossNote:
    """The cut of a cross-entropy loss by classes (``vocabulary``).

    ``gathers`` are the all-gathers of targets and losses, where rows are cut. ``head`` is the layer that computes the
    logits; ``num_numbers`` is how many numbers a rank sends for each token.
    """

    head: str
    vocabulary: Features
    gathers: tuple[AxisMove, ...]
    num_numbers: int


@dataclass(frozen=True)
class GatherNote:
    """The all-gathers of features before a module that takes whole inputs, or of the features of the model's output.

    ``arguments`` has the cut of each of the module's inputs, or of the output; None for one that is whole.
    """

    arguments: tuple[Features | None, ...]


def input_moves(step: RoleStep, axes: tuple[GridAxis, ...], x: Features) -> tuple[AxisMove, ...]:
    """Returns the collectives of a layer's input (:class:`AxisMove`) in order; ``step`` says how each axis cuts it.

    They are all-gathers of rows in the order of ``step.gathers``, then of features, fastest axis first. Before these
    come the moves "whole", for axes that copy the input: such a move gathers nothing, and all-reduces the input's
    gradient in the backward.
    """
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
    """Returns the collectives that sum a layer's output, in order; ``step`` says how each axis cuts the layer.

    They are reduce-scatters over features (slowest axis first), reduce-scatters over rows, then all-reduces.
    """
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
