"""Chooses the tensor-parallel roles of consecutive layers by which ranks send least: a shortest path over states.

On each axis of a grid an activation is in one of three *states*, and each layer leads from a state of its input to a
state of its output, by the role that the layer has on that axis::

    T  rows (samples) are cut          T -t-> T     T -h-> F
    F  features are cut                F -h-> F     F -k-> T, F or C
    C  copied to every rank            C -h-> F

Role h is column-parallel (output features cut), k row-parallel (input features cut), t cuts the samples and fetches the
weight. A path begins and ends in states that the mode fixes; in between the roles are free. Costs are those of ring
collectives: a gather over g members sends (g - 1) / g of the gathered operand on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import inf, prod
from typing import Literal, NamedTuple

from shardwright.plan.batch_shard import RowMoves, rows_after

State = Literal["T", "F", "C"]
RoleName = Literal["t", "h", "k"]
States = tuple[State, ...]
"""The state of an activation (T, F or C) on each axis of the grid, in the mesh's order."""

ROLE: Mapping[tuple[State, State], tuple[RoleName, ...]] = {
    ("T", "T"): ("t",),
    ("T", "F"): ("h",),
    ("F", "F"): ("h", "k"),
    ("F", "T"): ("k",),
    ("F", "C"): ("k",),
    ("C", "F"): ("h",),
}
"""The roles that turn an input in one state into an output in another, by (input state, output state)."""


class GridAxis(NamedTuple):
    """One axis of a tensor-parallel grid; ``stream`` is the state of activations between layers on it.

    T cuts rows, F cuts features, C copies. ``stored``: weights are sharded over the axis; else they are copied.
    """

    name: str
    size: int
    stream: State
    stored: bool = True


class Layer(NamedTuple):
    """The in- and out-features of one linear layer, and whether its input needs a gradient."""

    in_features: int
    out_features: int
    needs_gradient: bool = True


class LayerBoundary(NamedTuple):
    """The ways in which an activation before, between or after layers may be cut.

    ``most_parts`` is the largest number of parts of its features, and ``most_alone``, if it is more, the number that
    one axis alone may make. ``states``: the fixed state on each axis, if any. ``sums``: whether partial sums may be
    reduce-scattered over the features; where parts are not contiguous they cannot. ``rows``: whether axes that do not
    cut the model's input may cut rows. ``joined``: where sequences are cut, the number of features of a token (keys,
    values) that all other tokens need; they are gathered over the axes that cut rows, so each rank's rows must be
    contiguous.
    """

    most_parts: int
    states: States | None = None
    sums: bool = True
    rows: bool = True
    most_alone: int = 0
    joined: int = 0


class RoleStep(NamedTuple):
    """One layer's role on each axis (h column-parallel, k row-parallel, t rows cut), and the states around it.

    ``gathers`` and ``cuts``: the axes that all-gather the input's rows and reduce-scatter the output's, in that order.
    ``rows_before``: the gathers and cuts of rows from the model's input up to this layer. ``misfit``: for ``show``, why
    the roles that the layout pins do not fit here; empty where they do.
    """

    before: States
    roles: tuple[RoleName, ...]
    after: States
    gathers: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    rows_before: RowMoves = ()
    misfit: str = ""

    def num_fetched(self, axes: Sequence[GridAxis]) -> int:
        """Returns in how many shards a weight is stored over the axes that cut samples or tokens and all-gather it."""
        return prod(a.size for a, role in zip(axes, self.roles, strict=True) if role == "t" and a.stored)

    @property
    def rows_gathered(self) -> RowMoves:
        """The gathers and cuts of rows (samples or tokens) up to the matrix product, with the input all-gathered."""
        return rows_after(self.rows_before, "gather", self.gathers)

    @property
    def rows_after(self) -> RowMoves:
        """The gathers and cuts of rows (samples or tokens) up to the layer's output, after its reduce-scatters."""
        return rows_after(self.rows_gathered, "cut", self.cuts)


@dataclass(frozen=True)
class RoleChoice:
    """How each axis cuts consecutive layers, and the number of elements that a rank sends for them in a microbatch."""

    steps: tuple[RoleStep, ...]
    elements: float


def sent_elements(
    layer: Layer,
    step: RoleStep,
    axes: Sequence[GridAxis],
    num_tokens: int,
    *,
    regather: bool = False,
    with_input: bool = True,
) -> float:
    """Returns the number of elements that one rank sends for one layer, forward and backward, by ring collectives.

    ``regather``: operands are all-gathered again in the backward. ``with_input=False`` leaves out all that is sent for
    the input, which another layer that shares it counts: its all-gather, and the sum of its gradient.

    >>> tp = [GridAxis("tp", 4, "C")]
    >>> column = RoleStep(("C",), ("h",), ("F",))
    >>> sent_elements(Layer(1024, 4096), column, tp, 1024) == 2 * 3 / 4 * 1024 * 1024
    True
    """
    cut_x = prod(a.size for a, state in zip(axes, step.before, strict=True) if state != "C")
    x = num_tokens * layer.in_features / cut_x
    w = layer.in_features * layer.out_features / prod(a.size for a in axes if a.stored)
    elements, held_x = 0.0, x
    for axis, state, role in zip(axes, step.before, step.roles, strict=True):
        share = (axis.size - 1) / axis.size
        if role == "h" and not with_input:
            continue
        if role == "h" and state == "C":
            elements += 2 * share * held_x if layer.needs_gradient else 0.0
        elif role == "h":
            x *= axis.size
            elements += (1 + regather + layer.needs_gradient) * share * x
        elif role == "t":
            w *= axis.size if axis.stored else 1
            elements += (2 + (regather and axis.stored and layer.needs_gradient)) * share * w
    # this rank's part of the output before it is summed over the axes of role k
    y = num_tokens * layer.out_features / prod(a.size for a, r in zip(axes, step.roles, strict=True) if r != "k")
    outputs = list(zip(axes, step.after, step.roles, strict=True))
    for axis, state, role in sorted(outputs, key=lambda output: output[1] == "C"):  # reduce-scatters before all-reduces
        if role == "k":
            elements += 2 * (axis.size - 1) / axis.size * y
            y /= axis.size if state != "C" else 1
    return elements


def joined_elements(boundary: LayerBoundary, states: States, axes: Sequence[GridAxis], num_tokens: int) -> float:
    """Returns the number of elements that one rank sends to all-gather keys and values of all tokens, with gradients.

    >>> axes = [GridAxis("row", 2, "T"), GridAxis("col", 2, "F")]
    >>> joined_elements(LayerBoundary(4, joined=16), ("T", "F"), axes, 100)
    800.0
    """
    over, kept = (prod(a.size for a, s in zip(axes, states, strict=True) if s == state) for state in "TF")
    return 2 * (over - 1) / over * num_tokens * boundary.joined / kept


def follow_each_other(rows: RowMoves, axes: Sequence[GridAxis]) -> bool:
    """Returns whether each rank's rows are contiguous and in order after these gathers and cuts of rows.

    All-gathers of whole sequences need it. It holds if rows are gathered over the fastest axes first and then cut.

    >>> axes = [GridAxis("depth", 2, "T"), GridAxis("row", 2, "T")]
    >>> follow_each_other((("gather", "row"),), axes), follow_each_other((("gather", "depth"),), axes)
    (True, False)
    """
    gathers = [axis for what, axis in rows if what == "gather"]
    fastest = [axis.name for axis in reversed(axes) if axis.stream == "T"][: len(gathers)]
    return gathers == fastest and all(what == "gather" for what, _ in rows[: len(gathers)])


def fits(boundary: LayerBoundary, states: States, axes: Sequence[GridAxis]) -> bool:
    """Returns whether an activation may be cut as ``states`` says for each axis: T rows, F features, C copied.

    Each rank must get features, and only if ``boundary.rows`` is set may axes that do not cut the model's input cut
    rows.
    """
    sizes = [a.size for a, state in zip(axes, states, strict=True) if state == "F"]
    new_rows = any(state == "T" and a.stream != "T" for a, state in zip(axes, states, strict=True))
    enough = prod(sizes) <= boundary.most_parts or (len(sizes) == 1 and sizes[0] <= boundary.most_alone)
    return enough and (boundary.rows or not new_rows)


def steps_from(
    layer: Layer, before: States, rows: RowMoves, boundary: LayerBoundary, axes: Sequence[GridAxis]
) -> Iterator[RoleStep]:
    """Yields every way to cut one layer (column-parallel, row-parallel or by rows, by axis) whose output is allowed.

    ``before`` says how each axis cuts the input: T rows, F features, C copied. ``rows`` are the gathers and cuts of
    rows before the layer, and ``boundary`` says how its output may be cut. Unless it fixes that, copied outputs are
    not tried: every rank would hold the full activation.
    """
    either: tuple[State, State] = "T", "F"
    targets = [boundary.states] if boundary.states is not None else product(either, repeat=len(axes))
    for after in targets:
        if not fits(boundary, after, axes):
            continue
        choices = [ROLE.get((s, e), ()) for s, e in zip(before, after, strict=True)]
        for roles in product(*choices):
            if any(role != "t" for axis, role in zip(axes, roles, strict=True) if not axis.stored):
                continue  # a weight copied over this axis (2.5D depth) allows role t only
            if not boundary.sums and ("k", "F") in zip(roles, after, strict=True):
                continue
            kept = prod(a.size for a, role in zip(axes, roles, strict=True) if role == "h")
            if layer.out_features // kept < RoleStep(before, roles, after).num_fetched(axes):
                continue  # some rank would store no row of the weight
            for orders in _moved(rows, axes, before, roles, after):
                step = RoleStep(before, roles, after, *orders, rows)
                if not boundary.joined or follow_each_other(step.rows_after, axes):
                    yield step


def _moved(
    rows: RowMoves, axes: Sequence[GridAxis], before: States, roles: Sequence[RoleName], after: States
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yields the orders of row gathers before a product and row cuts after it that a later layer can undo."""
    gathers = [a for a, s, r in zip(axes, before, roles, strict=True) if r == "h" and s == "T"]
    cuts = [a for a, e, r in zip(axes, after, roles, strict=True) if r == "k" and e == "T"]
    for first in permutations(reversed(gathers)):
        for second in permutations(cuts):
            gathered = rows_after(rows, "gather", [axis.name for axis in first])
            ended = rows_after(gathered, "cut", [axis.name for axis in second])
            if _in_place(gathered, axes) and _in_place(ended, axes):
                yield tuple(axis.name for axis in first), tuple(axis.name for axis in second)


def _in_place(rows: RowMoves, axes: Sequence[GridAxis]) -> bool:
    """Returns whether rows are only gathered over axes that cut the model's input, and only cut over the others."""
    from_input = {axis.name: axis.stream == "T" for axis in axes}
    return all(from_input[axis] is (what == "gather") for what, axis in rows)


def cheapest(
    layers: Sequence[Layer],
    boundaries: Sequence[LayerBoundary],
    axes: Sequence[GridAxis],
    num_tokens: int,
    *,
    regather: bool = False,
    rows_end: RowMoves | None = (),
) -> RoleChoice | None:
    """Returns how to cut consecutive layers so that a rank sends the fewest elements; None if nothing fits.

    On each axis a layer is column-parallel, row-parallel or cut by rows. ``boundaries`` are the activations before,
    between and after the layers; how the first is cut is fixed. ``rows_end`` is how rows are cut at the end, None for
    any cut. ``regather``: operands are all-gathered again in the backward. Ties are broken by the order of the search,
    so every rank chooses the same.

    >>> axes = [GridAxis("row", 2, "T"), GridAxis("col", 2, "F")]
    >>> stream = LayerBoundary(1024, ("T", "F"))
    >>> found = cheapest([Layer(1024, 4096), Layer(4096, 1024)], [stream, LayerBoundary(4096), stream], axes, 1024)
    >>> [step.roles for step in found.steps], round(found.elements * 4 / 1e6, 1)
    ([('h', 'h'), ('k', 'k')], 12.6)
    """
    start = boundaries[0].states
    assert start is not None, "the states at the start of a path are fixed"
    # Dynamic programming: per layer, the cheapest choice that ends in each (states, cut of the rows).
    best: dict[tuple[States, RowMoves], RoleChoice] = {(start, ()): RoleChoice((), 0.0)}
    for layer, boundary in zip(layers, boundaries[1:], strict=True):
        choices: dict[tuple[States, RowMoves], RoleChoice] = {}
        for (before, rows), so_far in best.items():
            for step in steps_from(layer, before, rows, boundary, axes):
                elements = so_far.elements + sent_elements(layer, step, axes, num_tokens, regather=regather)
                elements += joined_elements(boundary, step.after, axes, num_tokens)
                key = (step.after, step.rows_after)
                if elements < choices.get(key, RoleChoice((), inf)).elements - 1e-6:
                    choices[key] = RoleChoice((*so_far.steps, step), elements)
        best = choices
    ends = [choice for (_, rows), choice in best.items() if rows_end is None or rows == rows_end]
    return min(ends, key=lambda choice: choice.elements, default=None)
