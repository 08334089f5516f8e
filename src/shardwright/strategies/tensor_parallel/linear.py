"""Tensor parallelism for ``nn.Linear``: on each axis column-parallel (h), row-parallel (k) or with rows cut (t).

::

    x --h--> | up: rows of its weight | --> elementwise --> | down: columns | --k, sum--> y

``roles.py`` chooses the roles; the arithmetic is in ``operators/linear.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.analysis.traced.structure import LayerChain
from shardwright.errors import PlanError
from shardwright.formatting import format_bytes, format_count
from shardwright.forward_stack import Rung, wrap
from shardwright.operators.linear import GridProduct, compilable, weight_of
from shardwright.operators.traced_take import gathering
from shardwright.plan.plan import Partial, Replicate, Shard
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import Range, width
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse
from shardwright.strategies.tensor_parallel.features import Features, common, merged, nested
from shardwright.strategies.tensor_parallel.moves import AxisMove, input_moves, output_moves
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft, own_names
from shardwright.strategies.tensor_parallel.roles import GridAxis, Layer, LayerBoundary, RoleStep, States, sent_elements
from shardwright.strategies.tensor_parallel.traffic import RankTraffic


@dataclass(frozen=True)
class LinearNote(OperatorNote):
    """The cut of one ``nn.Linear``: on each axis column-parallel, row-parallel or by rows, as ``step`` says.

    ``x`` and ``y`` are the cuts of its in- and out-features, ``fetches`` the axes over which its weight is all-gathered
    before use, and ``elements`` the number of elements that a rank sends for it in a microbatch. ``enters``: the layer
    all-gathers its own input; else an :class:`EntryNote` does so for several layers.
    """

    guarded: ClassVar[bool] = True

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

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the layer multiply this rank's features or rows, gathered or summed over each axis as its roles say."""
        fetch = rank.fetch(own_names(rank.job.model, path)["weight"], self.fetches) if self.fetches else ()
        terms = [a.name for a, role in zip(self.axes, self.step.roles, strict=True) if role == "k"]
        product = replace(
            rank.product(rank.moves(self.input_moves()), fetch, partial(weight_of, module)),
            give=rank.moves(self.output_moves()),
            # of the terms of a sum, one adds the bias
            bias_here=all(rank.coord[name] == 0 for name in terms),
        )
        product = compilable(module, product) if rank.compiles else product
        joined = [a.name for a, role in zip(self.axes, self.step.roles, strict=True) if role == "h"]
        num_given = width(self.x.held(rank.coord, over=() if self.enters else joined))
        forward = partial(_linear_forward, path, module, product, (num_given, self.x.size))
        roles = " ".join(f"{axis.name}:{role}" for axis, role in zip(self.axes, self.step.roles, strict=True))
        rank.operator(module, f"product, {roles}", forward)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the collectives of the input, the output and the weight, forward and backward."""
        trained, weight = path in here.trained, here.weights[path]
        again = not here.mode.keep and weight not in here.plan.frozen
        yield from here.input_traffic(self.input_moves(), self.step.rows_before, self.x, call, again=again)
        moves = self.output_moves()
        num_rows = here.num_rows(self.step.rows_gathered, call.y_shape)
        shape = (num_rows, width(self.y.held(here.coord, over=[m.axis for m in moves if m.kind == "features"])))
        yield from here.output_traffic(moves, shape, call, call.needs_gradient or trained)
        again = not here.mode.keep and call.needs_gradient
        yield from here.weight_traffic(weight, self.fetches, call.num_forwards + again)

    def fetched(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yields the weight with the axes of its all-gather, of which there may be none."""
        yield "weight", self.fetches

    def num_sent(self) -> float:
        """Returns the elements sent for the layer, and for an input that it shares with others, if counted here."""
        return self.elements


@dataclass(frozen=True)
class EntryNote(OperatorNote):
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

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the module gather its input once, before its forward, for all layers that share it."""
        around = gathering(module, rank.moves(self.input_moves()), compiles=rank.compiles)
        wrap(module, Rung.ENTRY, "gathers its input for all its layers at once", by=rank.mode.name, around=around)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of the shared input, and the sums of its gradient."""
        yield from here.input_traffic(self.input_moves(), self.step.rows_before, self.x, call)


# ---- what is cut


def place_chain(draft: PlanDraft, chain: LayerChain, use: FeatureUse) -> None:
    """Plans a chain: column-parallel layers and the row-parallel one that takes their output, such as an MLP.

    ``use`` is the call of the chain, as traced.

    Raises: GridError: the features between them are too few for the grid, and the layers around them are cut.
    """
    layers = (*chain.columns, chain.row)
    if any(layer in draft.plan.roles for layer in layers):
        return
    row = draft.model.get_submodule(chain.row)
    first = draft.model.get_submodule(chain.columns[0])
    assert isinstance(row, nn.Linear)
    assert isinstance(first, nn.Linear)
    middle, start, stop = row.in_features, draft.mode.states(use.takes_cut), draft.mode.states(use.gives_cut)
    flows = not use.from_input
    inner: States | None = None
    if draft.stays_still(chain):
        inner = tuple("T" if axis.stream == "T" else "F" for axis in draft.mode.axes)
    choice = draft.mode.choose(
        (Layer(first.in_features, middle * len(chain.columns), flows), Layer(middle, row.out_features)),
        (LayerBoundary(0, start), LayerBoundary(middle, inner), LayerBoundary(row.out_features, stop)),
        draft.job.num_tokens,
    )
    if choice is None:
        for layer in layers:
            why = f"{middle} features cannot be cut over {draft.sizes()}"
            draft.plan = draft.plan.role(layer, "", "copied", why)
        if use.takes_cut or use.gives_cut:
            raise draft.too_small(chain.row, f"{middle} features between '{chain.columns[0]}' and it")
        return
    before, after = choice.steps
    mid = draft.features_in(before.after, middle)
    if chain.entry is not None:
        x = draft.features_in(start, first.in_features)
        draft.note(chain.entry, EntryNote(before, x, draft.mode.axes), rung=Rung.ENTRY)
        draft.role(chain.entry, "entry", "its layers share one input")
    for column in chain.columns:
        enters = chain.entry is None
        pays = enters or column == chain.columns[0]
        own = draft.model.get_submodule(column)
        assert isinstance(own, nn.Linear)
        x = draft.features_in(start, own.in_features)  # each column may have an input of its own
        note = cut_weight(draft, column, before, x, mid, enters=enters, first=pays, flows=flows)
        linear_role(draft, column, f"{middle} features before '{chain.row}'", note)
    note = cut_weight(draft, chain.row, after, mid, draft.features_in(stop, row.out_features))
    linear_role(draft, chain.row, f"{middle} features to {row.out_features}", note)
    for between in chain.between:
        draft.cut_activation(between, mid, step=before)


def place_single(draft: PlanDraft, path: str, start: States, stop: States, *, flows: bool = True) -> None:
    """Plans the cut of one Linear between two states (by axis: T rows, F features cut, C copied).

    ``flows``: its input needs a gradient. A layer that is too small for the grid raises GridError.
    """
    layer = draft.model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    choice = draft.mode.choose(
        (Layer(layer.in_features, layer.out_features, flows),),
        (LayerBoundary(0, start), LayerBoundary(layer.out_features, stop)),
        draft.job.num_tokens,
    )
    what = f"{layer.in_features} features to {layer.out_features}"
    if choice is None:
        raise draft.too_small(path, what)
    (step,) = choice.steps
    x, y = draft.features_in(start, layer.in_features), draft.features_in(stop, layer.out_features)
    linear_role(draft, path, what, cut_weight(draft, path, step, x, y, flows=flows))


def cut_weight(
    draft: PlanDraft,
    path: str,
    step: RoleStep,
    x: Features,
    y: Features,
    *,
    enters: bool = True,
    first: bool = True,
    flows: bool = True,
) -> LinearNote:
    """Plans the cut of a Linear's parameters by its role on each axis: h column-, k row-parallel, t rows cut.

    Also records the layouts of its input and output gradient, and returns the note. ``x`` and ``y`` are the cuts of its
    in- and out-features. ``enters``: it all-gathers its input itself; ``first``: the input's traffic is counted here,
    not at another layer that shares it; ``flows``: its input needs a gradient.
    """
    names, axes = draft.names[path], draft.mode.axes
    roles = dict(zip((axis.name for axis in axes), step.roles, strict=True))
    for axis in axes:
        if roles[axis.name] == "h":
            for own, name in names.items():
                if own in ("weight", "bias"):
                    draft.cut(name, axis.name, 0, y.along(axis.name))
        if roles[axis.name] == "k":
            draft.cut(names["weight"], axis.name, 1, x.along(axis.name))
    fetches = [] if y.overlaps else _store_apart(draft, names["weight"], y, roles)
    # Where several ranks hold the same key and value heads, each rank's gradient of them is one term of a sum.
    column = Partial() if y.overlaps else Shard(-1)
    x_spec: dict[str, Any] = {
        axis: {"t": Shard(0), "h": Replicate(), "k": Shard(-1)}[role] for axis, role in roles.items()
    }
    dy_spec: dict[str, Any] = {
        axis: {"t": Shard(0), "h": column, "k": Replicate()}[role] for axis, role in roles.items()
    }
    draft.plan = draft.plan.use(path, x=x_spec, dy=dy_spec)
    layer, again = Layer(x.size, y.size, flows), not draft.mode.keep
    elements = sent_elements(layer, step, axes, draft.job.num_tokens, regather=again, with_input=first)
    note = LinearNote(step, x, y, axes, enters, tuple(reversed(fetches)), elements)
    draft.note(path, note)
    return note


def _store_apart(draft: PlanDraft, name: str, y: Features, roles: Mapping[str, str]) -> list[str]:
    """Shards a weight's rows at rest over the axes of role t; returns these axes, which all-gather it."""
    fetches: list[str] = []
    coords = draft.plan.mesh.coords([axis for axis, role in roles.items() if role == "h"])
    others = [n for n in y.names if roles[n] != "h"]
    # For each combination of indices along the column-parallel axes: the rows of the weight that the product there
    # needs. Axes of role t shard these rows further.
    held: dict[tuple[int, ...], Sequence[Range]] = {
        tuple(at.values()): y.held({**dict.fromkeys(y.names, 0), **at}, over=others) for at in coords
    }
    for axis in draft.mode.axes:
        if roles[axis.name] == "t" and axis.stored:
            ranges = nested(held, axis.size)
            draft.cut(name, axis.name, 0, ranges)
            held = {(*key, i): merged(common(ranges[i], rows)) for key, rows in held.items() for i in range(axis.size)}
            fetches.append(axis.name)
    return fetches


def linear_role(draft: PlanDraft, path: str, what: str, note: LinearNote) -> None:
    """Adds to the plan, for ``show``, how each axis cuts a Linear (h, k or t), why, and the bytes that it sends.

    h is column-parallel, k row-parallel, and t cuts samples or tokens.
    """
    names = " ".join(f"{axis.name}:{role}" for axis, role in zip(note.axes, note.step.roles, strict=True))
    num_bytes = note.elements * draft.plan.compute_dtypes[draft.names[path]["weight"]].itemsize
    sends = f"sends {format_bytes(num_bytes)} for {format_count(draft.job.num_tokens)} tokens"
    draft.role(path, names, f"{what}; {sends}{note.step.misfit}")


# ---- forward


def _linear_forward(
    path: str, module: nn.Module, product: GridProduct, sizes: tuple[int, int], input: Tensor
) -> Tensor:
    if input.shape[-1] != sizes[0]:
        raise PlanError(
            f"'{path}' is called with other features than this rank's part",
            given=f"{input.shape[-1]} features, where this rank multiplies {sizes[0]} of {sizes[1]}",
            allowed="a column-parallel layer, elementwise operations, then its row-parallel layer",
            fix=f'let what is called first be the column-parallel one, or keep both: roles={{"{path}": "copied"}}',
        )
    return product(input, weight_of(module), module._parameters["bias"])
