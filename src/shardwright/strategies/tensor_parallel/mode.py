"""A tensor-parallel mode as data, and what the grid writes into the plan for each module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.mesh import Coord
from shardwright.plan.batch_shard import RowMoves, rows_after
from shardwright.plan.option import StrategyOption
from shardwright.plan.plan import Plan
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
    """Which axes a mode has and how activations and weights lie along them between layers.

    ``middle`` pins how activations lie inside a block, where a classic algorithm is asked for instead of the cheapest
    roles; there input features are gathered, and sums of features are not cut. ``dim`` is what the axes cut that cut
    rows: 0 is samples, 1 the tokens of each.
    """

    name: str
    axes: tuple[GridAxis, ...]
    keep: bool = True
    overlap: bool = True
    middle: States | None = None
    dim: Literal[0, 1] = 0

    @property
    def row_axes(self) -> tuple[GridAxis, ...]:
        """The axes that cut rows between layers."""
        return tuple(axis for axis in self.axes if axis.stream == "T")

    @property
    def stream(self) -> States:
        """How activations lie between layers."""
        return tuple(axis.stream for axis in self.axes)

    @property
    def feature_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that cut features between layers."""
        return tuple((axis.name, axis.size) for axis in self.axes if axis.stream == "F")

    def states(self, cut: bool) -> States:
        """How a value lies whose features are cut, or whole where the mode would cut them."""
        whole: Mapping[State, State] = {"T": "T", "F": "C", "C": "C"}
        return self.stream if cut else tuple(whole[state] for state in self.stream)

    @property
    def still(self) -> States:
        """How activations lie inside a block that no samples may be gathered or cut for."""
        return tuple("T" if axis.stream == "T" else "F" for axis in self.axes)

    def axes_in(self, states: States, state: State) -> tuple[tuple[str, int], ...]:
        """The axes that are in this state."""
        return tuple((a.name, a.size) for a, s in zip(self.axes, states, strict=True) if s == state)

    def choose(
        self,
        layers: tuple[Layer, ...],
        boundaries: tuple[Boundary, ...],
        num_tokens: int,
        rows_end: RowMoves | None = (),
    ) -> Choice | None:
        """The roles of a path of layers: the cheapest, or those of the classic algorithm where it fits."""
        regather = not self.keep
        if self.middle is not None:
            inner = [b._replace(states=b.states or self.middle, sums=False) for b in boundaries[1:-1]]
            last = boundaries[-1]._replace(sums=False)
            found = cheapest(layers, (boundaries[0], *inner, last), self.axes, num_tokens, rows_end=rows_end)
            if found is not None:
                return found
        return cheapest(layers, boundaries, self.axes, num_tokens, regather=regather, rows_end=rows_end)


SEQ = "seq"

OPTIONS: Mapping[str, StrategyOption] = {
    SEQ: StrategyOption(
        "rows are the tokens of each sample and not samples: for batches of fewer samples than cut them"
    ),
    "regather": StrategyOption(
        "gathered operands are not kept for the backward but gathered again: less memory, more traffic; "
        ":summa does so without being asked, and tpN alone gathers nothing"
    ),
    "no-overlap": StrategyOption("no message travels while something is computed: to see what overlap gains"),
}
"""What every mode has a choice of."""


def mode(name: str, plan: Plan, stream: Mapping[str, State], copied: Collection[str] = ()) -> Mode:
    """The mode that a layout's ``tp`` factor asks for; an axis of one rank is left out.

    ``stream`` gives the state of activations along each axis between layers, ``copied`` the axes over which weights
    are.
    """
    factor = plan.layout.factor("tp")
    assert factor is not None, "chosen for a layout with tp"
    axes = tuple(
        GridAxis(axis, size, stream[axis], axis not in copied)
        for axis, size in zip(factor.mesh_axes, factor.sizes, strict=True)
        if size > 1
    )
    overlap = factor.option("no-overlap") is None
    pinned = next((option.value for option in factor.options if option.value in ("summa", "classic")), None)
    keep = factor.option("regather") is None and pinned != "summa"
    turned: Mapping[str, State] = {**stream, "row": "F", "col": "T"} if pinned == "classic" else stream
    middle = tuple(turned[axis.name] for axis in axes) if pinned is not None else None
    return Mode(name, axes, keep, overlap, middle, 1 if plan.token_axes.intersection(stream) else 0)


class Gathering(NamedTuple):
    """One message: an operand along one axis; the rows as they lie where they are cut, or the features."""

    axis: str
    lies: str
    rows: RowMoves = ()
    features: Features | None = None
    over: tuple[str, ...] = ()

    def feature_sizes(self, coord: Coord) -> tuple[int, ...]:
        """How many features each member holds, with what other axes have joined."""
        assert self.features is not None, "features are cut"
        return self.features.sizes(coord, self.axis, self.over)


@dataclass(frozen=True)
class LinearNote:
    """How one Linear runs: its roles, its features, the axes that its weight is fetched over, and what it sends."""

    step: RoleStep
    x: Features
    y: Features
    axes: tuple[GridAxis, ...]
    enters: bool = True
    fetches: tuple[str, ...] = ()
    elements: float = 0.0

    def takes(self) -> tuple[Gathering, ...]:
        """The messages that bring the input, in order; none where an entry before brings it."""
        return takes(self.step, self.axes, self.x) if self.enters else ()

    def gives(self) -> tuple[Gathering, ...]:
        """The messages that sum the output, in order."""
        return gives(self.step, self.axes, self.y)


@dataclass(frozen=True)
class EntryNote:
    """A module whose layers share one input: it is gathered once."""

    step: RoleStep
    x: Features
    axes: tuple[GridAxis, ...]

    def takes(self) -> tuple[Gathering, ...]:
        """The messages that bring the input, in order."""
        return takes(self.step, self.axes, self.x)


@dataclass(frozen=True)
class TokensNote:
    """An attention of some tokens of a sequence: what gathers the keys and values of the others.

    ``kv`` are the features of the keys, as many as of the values; ``makers`` the layers that make both.
    """

    rows: RowMoves
    gathers: tuple[Gathering, ...]
    kv: Features
    causal: bool
    makers: tuple[str, ...]
    elements: float


@dataclass(frozen=True)
class HeadsNote:
    """The query heads of each joint index, and which of a head's elements where it belongs to several ranks."""

    heads: Features
    kv: Features
    held: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, int], ...]
    inside: bool
    rows: RowMoves
    entry: EntryNote | None = None
    tokens: TokensNote | None = None

    def held_kv(self, coord: Coord) -> list[int]:
        """The key and value heads that ``coord`` holds: those that it holds along every axis."""
        return [head for a, b in self.kv.kept(coord) for head in range(a, b)]


@dataclass(frozen=True)
class NormNote:
    """A norm of cut features; ``centred`` ones take the mean away first."""

    features: Features
    centred: bool


@dataclass(frozen=True)
class TableNote:
    """A table whose rows are cut over some axes (its output is a sum over them) and whose features over others."""

    vocabulary: Features
    features: Features
    gathers: tuple[Gathering, ...]
    sums: tuple[Gathering, ...]
    rows: RowMoves = ()
    per_sample: bool = True

    def width(self, coord: Coord) -> int:
        """How many features the rows found have, before they are summed."""
        return width(self.features.held(coord, over=[each.axis for each in self.sums if each.lies == "features"]))


@dataclass(frozen=True)
class LossNote:
    """A loss on logits whose classes are cut, perhaps of more samples than this rank's own."""

    head: str
    vocabulary: Features
    gathers: tuple[Gathering, ...]
    num_numbers: int


@dataclass(frozen=True)
class GateNote:
    """A module that takes whole features: for each argument how it comes cut. At the model's end, what goes out."""

    arguments: tuple[Features | None, ...]


def takes(step: RoleStep, axes: tuple[GridAxis, ...], x: Features) -> tuple[Gathering, ...]:
    """Whole operands first, then rows in the order of the step, then features, the fastest axis first."""
    found = [
        Gathering(axis.name, "whole")
        for axis, state, role in zip(axes, step.before, step.roles, strict=True)
        if role == "h" and state == "C"
    ]
    rows = step.rows_before
    for name in step.gathers:
        found.append(Gathering(name, "rows", rows))
        rows = rows_after(rows, "gather", [name])
    joined: tuple[str, ...] = ()
    for axis, state, role in reversed(list(zip(axes, step.before, step.roles, strict=True))):
        if role == "h" and state == "F":
            found.append(Gathering(axis.name, "features", features=x, over=joined))
            joined += (axis.name,)
    return tuple(found)


def gives(step: RoleStep, axes: tuple[GridAxis, ...], y: Features) -> tuple[Gathering, ...]:
    """Features first, the slowest axis first, then rows in the order of the step, then whole operands."""
    cutting = [a.name for a, s, r in zip(axes, step.after, step.roles, strict=True) if r == "k" and s == "F"]
    found = [
        Gathering(name, "features", features=y, over=tuple(cutting[number + 1 :]))
        for number, name in enumerate(cutting)
    ]
    rows = step.rows_gathered
    for name in step.cuts:
        rows = rows_after(rows, "cut", [name])
        found.append(Gathering(name, "rows", rows))
    found += [
        Gathering(axis.name, "whole")
        for axis, state, role in zip(axes, step.after, step.roles, strict=True)
        if role == "k" and state == "C"
    ]
    return tuple(found)
