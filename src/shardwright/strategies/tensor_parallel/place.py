"""Where everything lies under a tensor-parallel mode, and what each layer does: refines the plan, purely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod

from torch import nn

from shardwright.analysis.callers import AllowedCallers, chain_callers
from shardwright.analysis.convolution_chains import CONVOLUTIONS
from shardwright.analysis.structure import LayerChain, is_exactly, owners
from shardwright.errors import GridError, LayoutError
from shardwright.forward_stack import Rung
from shardwright.plan.plan import INPUT, OUTPUT, Job, Plan, Shard
from shardwright.strategies.tensor_parallel.attention import place_attentions
from shardwright.strategies.tensor_parallel.convolution import place_convolutions
from shardwright.strategies.tensor_parallel.embedding import place_head_and_tables
from shardwright.strategies.tensor_parallel.feature_flow import Place
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import (
    EntryNote,
    GateNote,
    HeadsNote,
    LinearNote,
    Mode,
    NormNote,
    TokensNote,
)
from shardwright.strategies.tensor_parallel.multihead_attention import MultiheadNote, place_multiheads
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Boundary, Layer, States
from shardwright.strategies.tensor_parallel.sequence import cut_rows, is_asked, with_rows
from shardwright.strategy import check_samples_apart

NAMED = 8
"""How many layers an error names one by one."""


def sent(plan: Plan) -> float:
    """The elements that one rank sends in a step for all linear layers, as far as roles decide it."""
    notes = [note.tokens if isinstance(note, HeadsNote) else note for note in plan.notes.values()]
    return sum(note.elements for note in notes if isinstance(note, LinearNote | MultiheadNote | TokensNote))


def place(job: Job, plan: Plan, mode: Mode) -> Plan:
    """Finds what the mode can cut and cuts it. Raises LayoutError when nothing can be, naming the sizes found."""
    found = with_rows(job, plan, mode)
    if found.dim == 1 and not is_asked(plan):
        with suppress(LayoutError):  # what nobody asked for refuses nothing
            return _placed(job, plan, found)
        found = mode
    return _placed(job, plan, found)


def _placed(job: Job, plan: Plan, mode: Mode) -> Plan:
    if mode.row_axes and mode.dim == 0:
        check_samples_apart(job.model, str(plan.layout.factor("tp")))
    plan = cut_rows(plan, mode)
    if mode.dim == 1:
        names = " ".join(axis.name for axis in mode.row_axes)
        plan = plan.role(INPUT, mode.name, "tokens", f"each sample's tokens cut over {names}, not the samples")
    if mode.axes:
        plan = _place_but_for_the_narrow(job, mode, plan)
        if all(isinstance(note, TokensNote) for note in plan.notes.values()):
            raise _nothing_to_cut(job.model, mode, plan)
    for path, module, _, _ in owners(job.model):
        if path not in plan.roles:
            plan = plan.role(path, mode.name, "copied", f"{type(module).__name__}: every rank computes it whole")
    return plan


def _place_but_for_the_narrow(job: Job, mode: Mode, plan: Plan) -> Plan:
    """Where everything lies; layers that are smaller than the grid stay whole, and ``show`` says why."""
    narrow: dict[str, str] = {}
    while True:
        try:
            return _place_everything(PlanDraft(job, mode, plan, narrow))
        except GridError as error:
            if error.path is None or error.path in narrow:
                raise
            narrow[error.path] = f"too small: {error.given}; every rank computes it whole"


def place_alone(job: Job, plan: Plan, mode: Mode) -> Plan:
    """One ``nn.Linear`` as the whole model: input and output lie as between layers, but what was copied comes cut."""
    layer = job.model
    assert isinstance(layer, nn.Linear)
    plan = cut_rows(plan, mode)
    stop: States = tuple("F" if state == "C" else state for state in mode.stream)
    placing = PlanDraft(job, mode, plan)
    choice = mode.choose(
        (Layer(layer.in_features, layer.out_features),),
        (Boundary(0, mode.stream), Boundary(layer.out_features, stop)),
        job.num_tokens,
    )
    if choice is None:
        raise placing.too_small("", f"{layer.in_features} features to {layer.out_features}")
    (step,) = choice.steps
    placing.cut_weight(
        "", step, placing.features_in(mode.stream, layer.in_features), placing.features_in(stop, layer.out_features)
    )
    return placing.plan


def _place_everything(placing: PlanDraft) -> Plan:
    """The plan with every layer that the mode can cut."""
    place_attentions(placing)
    place_multiheads(placing, placing.overrides)
    for row, chain in placing.chains.items():
        _place_chain(placing, chain, placing.flow.places.get(row, Place("chain")))
    for path, place in placing.flow.places.items():
        if path in placing.plan.roles:
            continue
        if place.kind == "linear" and path != placing.head:
            _place_single(placing, path, place)
        elif place.kind == "norm" and place.takes_cut:
            _place_norm(placing, path, place)
        elif place.kind == "elementwise" and place.takes_cut:
            placing.cut_activation(path, Features.balanced(place.size, placing.mode.feature_axes))
        elif place.kind == "gate":
            gate = GateNote(tuple(placing.stream_of(size) for size in place.sizes))
            placing.plan = placing.plan.note(path, gate, by=placing.mode.name, rung=Rung.GATHER)
    placing.plan = place_convolutions(placing.job, placing.mode, placing.plan, placing.shared, placing.head)
    place_head_and_tables(placing)
    if placing.flow.output_size:
        gate = GateNote((placing.stream_of(placing.flow.output_size),))
        placing.plan = placing.plan.note(OUTPUT, gate, by=placing.mode.name, rung=Rung.GATHER)
    for path, why in placing.narrow.items():
        if path in placing.names:
            placing.plan = placing.plan.role(path, placing.mode.name, "copied", why)
    placing.plan = placing.plan.at_home(dict(_homes(placing)))
    return placing.overrides.explained(placing.plan, placing.mode.name)


def _homes(placing: PlanDraft) -> Iterator[tuple[str, AllowedCallers]]:
    """Where the calls come from of all that takes or gives a part."""
    for path, place in placing.flow.places.items():
        if place.takes_cut or place.gives_cut or place.kind == "gate":
            yield path, AllowedCallers("", frozenset(placing.flow.callers.get(path, ())))
    for path, note in placing.plan.notes.items():
        layers = {HeadsNote: ("qkv", "q", "k", "v", "o", "attention_dropout"), MultiheadNote: ("out_proj",)}
        for own in layers.get(type(note), ()):
            if own in dict(placing.model.get_submodule(path).named_children()):
                yield f"{path}.{own}".lstrip("."), AllowedCallers.of(path)
    for chain in placing.chains.values():
        if chain.row in placing.plan.notes:
            yield from chain_callers(placing.model, chain).items()
    if placing.head is not None:
        yield placing.head, AllowedCallers.of("")


def _place_chain(placing: PlanDraft, chain: LayerChain, place: Place) -> None:
    layers = (*chain.columns, chain.row)
    if any(layer in placing.plan.roles for layer in layers):
        return
    row = placing.model.get_submodule(chain.row)
    first = placing.model.get_submodule(chain.columns[0])
    assert isinstance(row, nn.Linear)
    assert isinstance(first, nn.Linear)
    middle, start, stop = row.in_features, placing.mode.states(place.takes_cut), placing.mode.states(place.gives_cut)
    flows = not place.from_input
    inner = placing.mode.still if chain.row in placing.overrides.still else None
    choice = placing.mode.choose(
        (Layer(first.in_features, middle * len(chain.columns), flows), Layer(middle, row.out_features)),
        (Boundary(0, start), Boundary(middle, inner), Boundary(row.out_features, stop)),
        placing.job.num_tokens,
    )
    if choice is None:
        for layer in layers:
            placing.plan = placing.plan.role(
                layer, "", "copied", f"{middle} features cannot be cut over {placing.sizes()}"
            )
        if place.takes_cut or place.gives_cut:
            raise placing.too_small(chain.row, f"{middle} features between '{chain.columns[0]}' and it")
        return
    before, after = choice.steps
    x, mid, y = (
        placing.features_in(start, first.in_features),
        placing.features_in(before.after, middle),
        placing.features_in(stop, row.out_features),
    )
    if chain.entry is not None:
        entry = EntryNote(before, x, placing.mode.axes)
        placing.plan = placing.plan.note(chain.entry, entry, by=placing.mode.name, rung=Rung.ENTRY)
        placing.plan = placing.plan.role(chain.entry, placing.mode.name, "entry", "its layers share one input")
    for column in chain.columns:
        enters = chain.entry is None
        pays = enters or column == chain.columns[0]
        placing.cut_weight(column, before, x, mid, enters=enters, first=pays, flows=flows)
        placing.note_role(column, f"{middle} features before '{chain.row}'", before)
    placing.cut_weight(chain.row, after, mid, y)
    placing.note_role(chain.row, f"{middle} features to {row.out_features}", after)
    for between in chain.between:
        placing.cut_activation(between, mid, step=before)


def _place_single(placing: PlanDraft, path: str, place: Place) -> None:
    layer = placing.model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    start, stop = placing.mode.states(place.takes_cut), placing.mode.states(place.gives_cut)
    choice = placing.mode.choose(
        (Layer(layer.in_features, layer.out_features, not place.from_input),),
        (Boundary(0, start), Boundary(layer.out_features, stop)),
        placing.job.num_tokens,
    )
    if choice is None:
        raise placing.too_small(path, f"{layer.in_features} features to {layer.out_features}")
    (step,) = choice.steps
    x, y = placing.features_in(start, layer.in_features), placing.features_in(stop, layer.out_features)
    placing.cut_weight(path, step, x, y, flows=not place.from_input)
    placing.note_role(path, f"{layer.in_features} features to {layer.out_features}", step)


def _place_norm(placing: PlanDraft, path: str, place: Place) -> None:
    features = Features.balanced(place.size, placing.mode.feature_axes)
    for name in placing.names.get(path, {}).values():
        for axis in features.names:
            placing.cut(name, axis, 0, features.along(axis))
    spec = {axis: Shard(-1) for axis in features.names}
    centred = is_exactly(placing.model.get_submodule(path), nn.LayerNorm)
    note = NormNote(features, centred)
    placing.plan = placing.plan.use(path, x=spec, dy=spec).note(path, note, by=placing.mode.name)
    placing.plan = placing.plan.role(path, placing.mode.name, "norm", f"{place.size} features, statistics combined")


def _nothing_to_cut(model: nn.Module, mode: Mode, plan: Plan) -> GridError:
    total = prod(axis.size for axis in mode.axes)
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))]
    sizes = ", ".join(f"{type(m).__name__} '{path}' {tuple(m.weight.shape)}" for path, m in layers[:NAMED])
    sizes += f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    kept = [f"; '{path}' is kept whole: {role.why}" for path, role in plan.roles.items() if role.name == "copied"]
    over = " ".join(f"{axis.name}={axis.size}" for axis in mode.axes)
    return GridError(
        f"no layer of the model can be cut over {over}",
        given=f"{type(model).__name__} with " + (sizes or "no Linear layers") + "".join(kept[:NAMED]),
        allowed="Linear -> elementwise -> Linear, Conv -> norm, pool or elementwise -> Conv, attention, or an "
        "embedding or head with many rows, each of at least as many features or channels as ranks cut them",
        fix=f"write dp{total}",
    )
