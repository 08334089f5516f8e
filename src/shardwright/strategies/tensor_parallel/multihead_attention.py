"""torch's ``nn.MultiheadAttention`` in the grid: heads are what the inner features of a pair are.

::

    x --h--> | in_proj: rows of q, k and v of some heads | --> these heads --k--> | out_proj: their columns | --> y

Fewer heads than ranks are cut inside: each rank has some elements of one. Inside the module samples lie in dim 0,
whatever ``batch_first`` says of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from shardwright.analysis.known_modules import is_known_attention
from shardwright.analysis.module_calls import ModuleCall
from shardwright.analysis.structure import is_exactly
from shardwright.comm.axis import Axis
from shardwright.formatting import format_bytes, format_count
from shardwright.forward_stack import Rung, set_forward
from shardwright.mesh import Coord
from shardwright.operators.head_slices import head_rows, head_slices, query_heads
from shardwright.operators.linear import GridProduct, WeightFetch, weight_of
from shardwright.operators.multihead_attention import SomeHeads, multihead
from shardwright.operators.operand_moves import OperandMove
from shardwright.plan.batch_shard import BatchShard, RowMoves
from shardwright.plan.layer_overrides import Overrides
from shardwright.plan.plan import ActivationCut, Plan, Replicate, Shard
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import Ranges, concat
from shardwright.strategies.tensor_parallel.features import Features, merged
from shardwright.strategies.tensor_parallel.mode import Gathering, LinearNote, Mode, gives, takes
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Boundary, Choice, GridAxis, Layer, RoleStep

PARTS = {True: ("in_proj_weight",), False: ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
"""The projections' weights: one, or one for each of q, k and v."""


class Projection(NamedTuple):
    """One of the weights that make queries, keys and values: its own name, its name in the model, its fetches."""

    own: str
    name: str
    fetches: tuple[str, ...]


@dataclass(frozen=True)
class MultiheadNote:
    """How one attention runs: the roles before and after its heads, and how its projections come."""

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
        """Whether there are fewer heads than ranks, which then have parts of them."""
        return len(self.heads.parts) > self.heads.size

    def sharing(self, coord: Coord) -> list[int]:
        """Of the members that cut heads, those that have a part of this one's."""
        own = self.heads.parts[self.heads.number(coord)]
        return [number for number, part in enumerate(self.heads.parts) if part == own]

    def takes(self) -> tuple[Gathering, ...]:
        """The messages that bring each different input, in order."""
        return takes(self.before, self.axes, self.x)

    def gives(self) -> tuple[Gathering, ...]:
        """The messages that sum attention weights: as the output's, whose features they do not have."""
        return tuple(each for each in gives(self.after, self.axes, self.y) if each.lies != "features")


# ---- where everything lies


def place_multiheads(placing: PlanDraft, overrides: Overrides) -> None:
    """Cuts every attention of torch's that can be, by heads; the others stay whole, and ``show`` says why."""
    for path, module in placing.model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or overrides.speak_of([path, _joined(path, "out_proj")]):
            continue
        reason = _reason_against(placing, path, module) or _place(placing, path, module)
        if reason:
            placing.plan = placing.plan.role(path, placing.mode.name, "copied", reason)


def _reason_against(placing: PlanDraft, path: str, module: nn.MultiheadAttention) -> str:
    if not is_known_attention(module):
        asked = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        own = " ".join(f"{option}=True" for option, is_on in asked.items() if is_on)
        if own and is_exactly(module, nn.MultiheadAttention):
            return f"{own} gives it keys beside those of the tokens: every rank computes it whole"
        return "not torch's own forward, or with hooks"
    names = [*placing.names[path].values(), *placing.names[_joined(path, "out_proj")].values()]
    return "its parameters are used elsewhere too" if any(name in placing.shared for name in names) else ""


def _joined(path: str, own: str) -> str:
    return f"{path}.{own}" if path else own


def _choose(placing: PlanDraft, module: nn.MultiheadAttention) -> Choice | None:
    """Roles by which ranks have whole heads, or if need be parts of them over one axis."""
    mode, num_heads, width = placing.mode, module.num_heads, module.embed_dim
    whole, layers = mode.states(False), (Layer(width, 3 * width), Layer(width, width))

    def chosen(most_alone: int = 0) -> Choice | None:
        middle = Boundary(num_heads, sums=False, most_alone=most_alone)
        return mode.choose(layers, (Boundary(0, whole), middle, Boundary(width, whole)), placing.job.num_tokens)

    return chosen() or chosen(width)


def _place(placing: PlanDraft, path: str, module: nn.MultiheadAttention) -> str:
    """Cuts one attention; returns why it cannot."""
    choice, width = _choose(placing, module), module.embed_dim
    cannot = f"{module.num_heads} heads of {module.head_dim} elements cannot be cut over {placing.sizes()}"
    if choice is None:
        allowed = f"one axis cuts at most {width} parts, several cut whole heads"
        return f"{cannot}: {allowed}; every rank computes it whole"
    before, after = choice.steps
    axes = placing.mode.axes_in(before.after, "F")
    parts = prod(size for _, size in axes)
    held, slices = query_heads(module, parts), head_slices(module, parts)
    heads = Features(module.num_heads, axes, tuple(((h[0], h[-1] + 1),) for h in held))
    rows: Ranges = tuple(merged(head_rows(module, h, part)) for h, part in zip(held, slices, strict=True))
    three = Features(3 * width, axes, concat((width,) * 3, (rows, rows, rows)))
    one = Features(width, axes, rows)
    packed = module.in_proj_weight is not None
    if (three if packed else one).fewest < before.num_fetched(placing.mode.axes):
        return f"{cannot}: some would hold no row of its projections; every rank computes it whole"
    projections, elements = [], 0.0
    for number, own in enumerate(PARTS[packed]):
        in_features = getattr(module, own).shape[1]
        x = placing.features_in(before.before, in_features)
        cut = _cut_projection(placing, path, own, before, x, three if packed else one, first=number == 0)
        projections.append(Projection(own, placing.names[path][own], cut.fetches))
        elements += cut.elements
    _cut_bias(placing, path, before, three)
    out = _joined(path, "out_proj")
    y = placing.features_in(after.after, width)
    placing.cut_weight(out, after, one, y, enters=True, first=True)
    placing.note_role(out, f"in-features of the heads that '{path}' holds", after)
    x = placing.features_in(before.before, width)
    bias = placing.names[path].get("in_proj_bias")
    note = MultiheadNote(before, after, x, y, heads, placing.mode.axes, tuple(projections), bias, elements)
    placing.plan = _noted(placing, path, note)
    return ""


def _cut_projection(
    placing: PlanDraft, path: str, own: str, step: RoleStep, x: Features, y: Features, *, first: bool
) -> LinearNote:
    """Cuts one of the attention's own weights as if it were a Linear's, under a name that only stands for one."""
    stand_in = f"{path}:{own}"
    placing.names[stand_in] = {"weight": placing.names[path][own]}
    placing.cut_weight(stand_in, step, x, y, enters=False, first=first)
    note = placing.plan.notes[stand_in]
    del placing.names[stand_in]
    placing.plan = placing.plan.without_note(stand_in)
    assert isinstance(note, LinearNote)
    return note


def _cut_bias(placing: PlanDraft, path: str, step: RoleStep, three: Features) -> None:
    name = placing.names[path].get("in_proj_bias")
    for axis, role in zip(placing.mode.axes, step.roles, strict=True):
        if role == "h" and name is not None:
            placing.cut(name, axis.name, 0, three.along(axis.name))


def _noted(placing: PlanDraft, path: str, note: MultiheadNote) -> Plan:
    roles = {axis.name: role for axis, role in zip(note.axes, note.before.roles, strict=True)}
    x = {axis: Shard(0) if role == "t" else Replicate() for axis, role in roles.items()}
    dy = {axis: Shard(0) if role == "t" else Shard(-1) for axis, role in roles.items()}
    plan = placing.plan.use(path, x=x, dy=dy).note(path, note, by=placing.mode.name)
    for axis in note.heads.names:
        plan = plan.cut_activation(path, ActivationCut(axis, 1, note.heads.size, note.heads.along(axis)))
    plan = plan.move_rows(path, note.before.rows_after)
    words = " ".join(f"{axis}:{role}" for axis, role in roles.items())
    num_bytes = note.elements * plan.compute_dtypes[note.projections[0].name].itemsize
    why = f"{note.heads.size} heads in {len(note.heads.parts)} parts: rows of q, k and v; "
    why += "each head over several ranks, scores summed; " if note.inside else ""
    why += f"sends {format_bytes(num_bytes)} for {format_count(placing.job.num_tokens)} tokens"
    return plan.role(path, placing.mode.name, words, why)


# ---- what a rank does


class Applying(Protocol):
    """What a rank has in hand when modules are changed."""

    plan: Plan
    axes: Mapping[str, Axis]
    mode: Mode
    shard: BatchShard

    @property
    def coord(self) -> dict[str, int]:
        """Its place in the grid."""
        ...

    def moves(self, gatherings: Sequence[Gathering]) -> tuple[OperandMove, ...]:
        """Messages with what their sizes are found by."""
        ...

    def product(
        self, take: tuple[OperandMove, ...], fetch: tuple[WeightFetch, ...], weight: Callable[[], Tensor]
    ) -> GridProduct:
        """A product whose output is summed by somebody else."""
        ...


def apply_multihead(applying: Applying, module: nn.Module, note: MultiheadNote) -> None:
    """Gives the module the forward of its heads."""
    assert isinstance(module, nn.MultiheadAttention)
    heads = tuple(h for a, b in note.heads.held(applying.coord) for h in range(a, b))
    heads = heads if note.heads.names else tuple(range(note.heads.size))
    fetch = {own: _fetch(applying, name, axes) for own, name, axes in note.projections}
    take, together, shares = applying.moves(note.takes()), None, None
    if "in_proj_weight" in fetch:
        together = applying.product(take, fetch["in_proj_weight"], partial(weight_of, module, "in_proj_weight"))
    if note.inside:
        (axis,) = note.heads.names
        shares = applying.axes[axis].subset(note.sharing(applying.coord))
    part = SomeHeads(heads, take, applying.moves(note.gives()), fetch, together, shares)
    forward = partial(multihead, module, part)
    set_forward(module, Rung.OPERATOR, "attention over this rank's heads", by=applying.mode.name, forward=forward)


def _fetch(applying: Applying, name: str, axes: Sequence[str]) -> tuple[WeightFetch, ...]:
    lies, mesh = applying.plan.compute[name], applying.plan.mesh
    here = applying.shard.coord

    def rows(index: int, number: int) -> int:
        inner = mesh.coords(axes[:number])
        return sum(lies.local_shape({**here, axes[number]: index, **there})[0] for there in inner)

    sizes = [tuple(rows(i, number) for i in range(mesh[axis])) for number, axis in enumerate(axes)]
    return tuple(WeightFetch(applying.axes[axis], each) for axis, each in zip(axes, sizes, strict=True))


def leave_fast_path(model: nn.Module) -> None:
    """Keeps torch's transformer layers from the evaluation that reads all weights at once, where some are cut."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # read by nothing but the choice of that path
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


# ---- what it sends


class Pricing(Protocol):
    """What prices a step."""

    plan: Plan
    coord: Coord
    mode: Mode

    def _num_rows(self, rows: RowMoves, tokens: int) -> int: ...
    def _taken(
        self, gatherings: Sequence[Gathering], rows: RowMoves, x: Features, visit: ModuleCall, *, again: bool = False
    ) -> Iterator[Traffic]: ...
    def _summed(
        self, gatherings: Sequence[Gathering], shape: tuple[int, int], visit: ModuleCall, learns: bool
    ) -> Iterator[Traffic]: ...


def price_multihead(pricing: Pricing, note: MultiheadNote, visit: ModuleCall) -> Iterator[Traffic]:
    """The calls of one visit, but for the out-projection's, which is priced as any Linear."""
    call = visit.call
    assert call is not None, "an attention was called"
    moved, before = note.takes(), note.before.rows_before
    rows = tuple(each for each in moved if each.lies == "rows")
    together = len(call.inputs) == len(note.projections) == 1
    again = together and not pricing.mode.keep
    operands = [(moved, *each, again and note.projections[0].name not in pricing.plan.frozen) for each in call.inputs]
    operands += [(rows, 1, call.mask, call.mask_learns, False)] if call.mask else []
    operands += [(rows, 1, call.padding, call.padding_learns, False)] if call.padding else []
    for gatherings, tokens, width, learns, twice in operands:
        shape = (call.num_samples, tokens, width)
        operand = ModuleCall(shape, shape, visit.element_bytes, learns, num_forwards=visit.num_forwards)
        yield from pricing._taken(gatherings, before, Features.balanced(width, ()), operand, again=twice)
    of_each = [call.mask] * call.mask_learns + [call.padding] * call.padding_learns
    learnt = [call.shared_mask, *(pricing._num_rows(before, 1) * size for size in of_each)]
    for axis in (each.axis for each in moved if each.lies == "whole"):
        for size in learnt:
            yield Traffic("all_reduce", axis, size * visit.element_bytes, pricing.plan.mesh[axis])
    for _, name, axes in note.projections:
        yield from _fetched(pricing, name, axes, visit.num_forwards + (again and call.inputs[0][2]))
    if note.inside:
        made = (note.bias, *(each.name for each in note.projections[:2]))  # queries and keys
        learns = call.scores_learn or any(name is not None and name not in pricing.plan.frozen for name in made)
        num_bytes = pricing._num_rows(note.before.rows_after, 1) * call.scores * visit.element_bytes
        members = len(note.sharing(pricing.coord))
        yield Traffic("all_reduce", note.heads.names[0], num_bytes, members, visit.num_forwards + learns)
    if call.weights:
        given = (pricing._num_rows(note.after.rows_gathered, 1), call.weights)
        yield from pricing._summed(note.gives(), given, replace(visit, y_shape=given), call.weights_learn)


def _fetched(pricing: Pricing, name: str, axes: Sequence[str], num_forwards: int) -> Iterator[Traffic]:
    plan = pricing.plan
    for number, axis in enumerate(axes):
        there = plan.mesh.coords(axes[: number + 1])
        num_elements = sum(plan.compute[name].num_elements({**pricing.coord, **at}) for at in there)
        num_bytes, size = num_elements * plan.compute_dtypes[name].itemsize, plan.mesh[axis]
        yield Traffic("all_gather", axis, num_bytes, size, num_forwards)
        if name not in plan.frozen:
            yield Traffic("reduce_scatter", axis, num_bytes, size)
