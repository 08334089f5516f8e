"""Tensor parallelism for ``nn.MultiheadAttention``: a column-parallel and a row-parallel product around its heads.

::

    x --h--> | in_proj: rows of q, k and v of some heads | --> these heads --k--> | out_proj: their columns | --> y

With fewer heads than ranks each rank computes some elements of one head. Inside the module samples are dim 0, for
either value of ``batch_first``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

from torch import nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.analysis.traced.known_modules import is_known_attention
from shardwright.analysis.traced.structure import is_exactly
from shardwright.formatting import format_bytes, format_count
from shardwright.mesh import Coord
from shardwright.operators.attention import head_rows, head_slices, query_heads
from shardwright.operators.linear import weight_of
from shardwright.operators.multihead_attention import HeadShard, multihead
from shardwright.plan.layer_overrides import Overrides
from shardwright.plan.plan import Replicate, Shard
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import Ranges, concat
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.features import Features, merged
from shardwright.strategies.tensor_parallel.linear import LinearNote, cut_weight, linear_role
from shardwright.strategies.tensor_parallel.moves import AxisMove, input_moves, output_moves
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import GridAxis, Layer, LayerBoundary, RoleChoice, RoleStep
from shardwright.strategies.tensor_parallel.traffic import RankTraffic


class Projection(NamedTuple):
    """A weight of ``nn.MultiheadAttention`` that computes queries, keys or values.

    ``own`` is its name in the module, ``name`` that in the model, and ``fetches`` the axes over which it is
    all-gathered.
    """

    own: str
    name: str
    fetches: tuple[str, ...]


@dataclass(frozen=True)
class MultiheadNote(OperatorNote):
    """The cut of one ``nn.MultiheadAttention`` by heads: how each axis cuts its projections before and after them.

    ``x`` and ``y`` are the cuts of its input and output features, and ``heads`` that of its heads. ``projections`` are
    the weights that compute queries, keys and values, and ``bias`` is the model's name of ``in_proj_bias``, None
    without one. ``elements`` is the number of elements that a rank sends for ``projections`` in a microbatch.
    """

    guarded: ClassVar[bool] = True
    inner: ClassVar[tuple[str, ...]] = ("out_proj",)

    before: RoleStep
    after: RoleStep
    x: Features
    y: Features
    heads: Features
    axes: tuple[GridAxis, ...]
    projections: tuple[Projection, ...]
    bias: str | None
    elements: float

    @property
    def inside(self) -> bool:
        """Whether there are fewer heads than ranks, so that several ranks divide a head."""
        return len(self.heads.parts) > self.heads.size

    def sharing(self, coord: Coord) -> list[int]:
        """Returns the indices of the ranks that compute the same heads as the rank at ``coord``, that rank included.

        Ranks are counted row-major along the axes that cut the heads.
        """
        own = self.heads.parts[self.heads.number(coord)]
        return [number for number, part in enumerate(self.heads.parts) if part == own]

    def input_moves(self) -> tuple[AxisMove, ...]:
        """Returns the collectives of each distinct input (query, key, value), in order.

        They are all-gathers; a move "whole" gathers nothing and all-reduces the input gradient.
        """
        return input_moves(self.before, self.axes, self.x)

    def output_moves(self) -> tuple[AxisMove, ...]:
        """Returns the collectives that sum the attention weights, which the module returns with ``need_weights``.

        They are those of the output, without the ones over features, which attention weights do not have.
        """
        return tuple(move for move in output_moves(self.after, self.axes, self.y) if move.kind != "features")

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the module compute this rank's heads; for the out-projection inside the plan has another entry."""
        assert isinstance(module, nn.MultiheadAttention)
        heads = tuple(h for a, b in self.heads.held(rank.coord) for h in range(a, b))
        fetch = {own: rank.fetch(name, axes) for own, name, axes in self.projections}
        take, together, shares = rank.moves(self.input_moves()), None, None
        if "in_proj_weight" in fetch:
            weight = partial(weight_of, module, "in_proj_weight")
            together = rank.product(take, fetch["in_proj_weight"], weight)
        if self.inside:
            (axis,) = self.heads.names
            shares = rank.axes[axis].subset(self.sharing(rank.coord))
        part = HeadShard(heads, take, rank.moves(self.output_moves()), fetch, together, shares)
        rank.operator(module, "attention over this rank's heads", partial(multihead, module, part))

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the collectives of one call but for the out-projection, for which the plan has another entry."""
        attention, frozen = call.call, here.plan.frozen
        assert attention is not None, "an attention was called"
        moved, before = self.input_moves(), self.before.rows_before
        rows = tuple(move for move in moved if move.kind == "rows")
        # Self-attention with one packed weight runs one product. Its backward gathers the input again, unless the mode
        # keeps gathered operands.
        again = len(attention.inputs) == len(self.projections) == 1 and not here.mode.keep
        operands = [(moved, *sizes, again and self.projections[0].name not in frozen) for sizes in attention.inputs]
        operands += [(rows, 1, attention.mask, attention.mask_learns, False)] if attention.mask else []
        operands += [(rows, 1, attention.padding, attention.padding_learns, False)] if attention.padding else []
        for moves, tokens, num_features, learns, twice in operands:
            shape = (attention.num_samples, tokens, num_features)
            operand = ModuleCall(shape, shape, call.element_bytes, learns, num_forwards=call.num_forwards)
            yield from here.input_traffic(moves, before, Features.balanced(num_features, ()), operand, again=twice)
        of_each = [attention.mask] * attention.mask_learns + [attention.padding] * attention.padding_learns
        learnt = [attention.shared_mask, *(here.num_held(before) * size for size in of_each)]
        for axis in (move.axis for move in moved if move.kind == "whole"):
            for size in learnt:
                yield Traffic("all_reduce", axis, size * call.element_bytes, here.plan.mesh[axis])
        for _, name, axes in self.projections:
            yield from here.weight_traffic(name, axes, call.num_forwards + (again and attention.inputs[0][2]))
        if self.inside:
            names = (self.bias, *(projection.name for projection in self.projections[:2]))  # queries and keys
            learns = attention.scores_learn or any(name is not None and name not in frozen for name in names)
            num_bytes = here.num_held(self.before.rows_after) * attention.scores * call.element_bytes
            members = len(self.sharing(here.coord))
            yield Traffic("all_reduce", self.heads.names[0], num_bytes, members, call.num_forwards + learns)
        if attention.weights:
            weights_shape = (here.num_held(self.after.rows_gathered), attention.weights)
            of_samples = replace(call, y_shape=(here.num_held(()), attention.weights))
            yield from here.output_traffic(self.output_moves(), weights_shape, of_samples, attention.weights_learn)

    def fetched(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yields the packed weight of q, k and v, with the axes of its all-gather."""
        yield from ((own, axes) for own, _, axes in self.projections if own == "in_proj_weight")

    def num_sent(self) -> float:
        """Returns the elements sent for the projections of queries, keys and values."""
        return self.elements


def place_multiheads(draft: PlanDraft, overrides: Overrides) -> None:
    """Plans in ``draft`` a cut by heads for every ``nn.MultiheadAttention`` that allows it.

    The others stay whole, with a reason for ``show``. Attentions to which the user gave a role, such as "copied", are
    left alone.
    """
    for path, module in draft.model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or overrides.speak_of([path, _child(path, "out_proj")]):
            continue
        reason = _reason_against(draft, path, module) or _place(draft, path, module)
        if reason:
            draft.role(path, "copied", reason)


def _reason_against(draft: PlanDraft, path: str, module: nn.MultiheadAttention) -> str:
    if not is_known_attention(module):
        asked = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        own = " ".join(f"{option}=True" for option, is_on in asked.items() if is_on)
        if own and is_exactly(module, nn.MultiheadAttention):
            return f"{own} gives it keys beside those of the tokens: every rank computes it whole"
        return "not torch's own forward, or with hooks"
    names = [*draft.names[path].values(), *draft.names[_child(path, "out_proj")].values()]
    return "its parameters are used elsewhere too" if any(name in draft.shared for name in names) else ""


def _child(path: str, own: str) -> str:
    return f"{path}.{own}".lstrip(".")


def _choose(draft: PlanDraft, module: nn.MultiheadAttention) -> RoleChoice | None:
    """Returns how axes cut the layers to give each rank whole heads, or else parts of heads over one axis, or None."""
    mode, num_heads, width = draft.mode, module.num_heads, module.embed_dim
    whole, layers = mode.states(False), (Layer(width, 3 * width), Layer(width, width))

    def chosen(most_alone: int = 0) -> RoleChoice | None:
        middle = LayerBoundary(num_heads, sums=False, most_alone=most_alone)
        return mode.choose(layers, (LayerBoundary(0, whole), middle, LayerBoundary(width, whole)), draft.job.num_tokens)

    return chosen() or chosen(width)


def _place(draft: PlanDraft, path: str, module: nn.MultiheadAttention) -> str:
    """Plans the cut of one attention; returns the reason if it cannot be cut, else an empty text."""
    choice, width = _choose(draft, module), module.embed_dim
    cannot = f"{module.num_heads} heads of {module.head_dim} elements cannot be cut over {draft.sizes()}"
    if choice is None:
        allowed = f"one axis cuts at most {width} parts, several cut whole heads"
        return f"{cannot}: {allowed}; every rank computes it whole"
    before, after = choice.steps
    axes = draft.mode.axes_in(before.after, "F")
    parts = prod(size for _, size in axes)
    held, slices = query_heads(module, parts), head_slices(module, parts)
    heads = Features(module.num_heads, axes, tuple(((h[0], h[-1] + 1),) for h in held))
    rows: Ranges = tuple(merged(head_rows(module, h, part)) for h, part in zip(held, slices, strict=True))
    three = Features(3 * width, axes, concat((width,) * 3, (rows, rows, rows)))
    one = Features(width, axes, rows)
    packed = module.in_proj_weight is not None
    if (three if packed else one).fewest < before.num_fetched(draft.mode.axes):
        return f"{cannot}: some would hold no row of its projections; every rank computes it whole"
    projections, elements = [], 0.0
    owns = ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    for number, own in enumerate(owns):
        in_features = getattr(module, own).shape[1]
        x = draft.features_in(before.before, in_features)
        cut = _cut_projection(draft, path, own, before, x, three if packed else one, first=number == 0)
        projections.append(Projection(own, draft.names[path][own], cut.fetches))
        elements += cut.elements
    bias = draft.names[path].get("in_proj_bias")
    for axis, role in zip(draft.mode.axes, before.roles, strict=True):
        if role == "h" and bias is not None:
            draft.cut(bias, axis.name, 0, three.along(axis.name))
    out = _child(path, "out_proj")
    y = draft.features_in(after.after, width)
    linear_role(draft, out, f"in-features of the heads that '{path}' holds", cut_weight(draft, out, after, one, y))
    x = draft.features_in(before.before, width)
    note = MultiheadNote(before, after, x, y, heads, draft.mode.axes, tuple(projections), bias, elements)
    _record(draft, path, note)
    return ""


def _cut_projection(
    draft: PlanDraft, path: str, own: str, step: RoleStep, x: Features, y: Features, *, first: bool
) -> LinearNote:
    """Cuts one of the attention's own weights as a Linear's, under a temporary module name."""
    stand_in = f"{path}:{own}"
    draft.names[stand_in] = {"weight": draft.names[path][own]}
    note = cut_weight(draft, stand_in, step, x, y, enters=False, first=first)
    del draft.names[stand_in]
    draft.plan = draft.plan.without_note(stand_in)
    return note


def _record(draft: PlanDraft, path: str, note: MultiheadNote) -> None:
    roles = {axis.name: role for axis, role in zip(note.axes, note.before.roles, strict=True)}
    x = {axis: Shard(0) if role == "t" else Replicate() for axis, role in roles.items()}
    dy = {axis: Shard(0) if role == "t" else Shard(-1) for axis, role in roles.items()}
    draft.plan = draft.plan.use(path, x=x, dy=dy)
    draft.note(path, note)
    draft.cut_activation(path, note.heads, dim=1, step=note.before)
    words = " ".join(f"{axis}:{role}" for axis, role in roles.items())
    num_bytes = note.elements * draft.plan.compute_dtypes[note.projections[0].name].itemsize
    why = f"{note.heads.size} heads in {len(note.heads.parts)} parts: rows of q, k and v; "
    why += "each head over several ranks, scores summed; " if note.inside else ""
    why += f"sends {format_bytes(num_bytes)} for {format_count(draft.job.num_tokens)} tokens{note.before.misfit}"
    draft.role(path, words, why)
