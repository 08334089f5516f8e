"""Refines the plan for a tensor-parallel mode: the layout of each tensor, and a note on how each module is cut.

Nothing is sent, and no module is changed.
"""

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
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import (
    EntryNote,
    GatherNote,
    HeadsNote,
    LinearNote,
    Mode,
    NormNote,
    TokensNote,
)
from shardwright.strategies.tensor_parallel.multihead_attention import MultiheadNote, place_multiheads
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Layer, LayerBoundary, States
from shardwright.strategies.tensor_parallel.sequence import cut_rows, is_asked, with_rows
from shardwright.strategy import check_samples_apart

NAMED = 8  # the most layers that an error lists


def sent(plan: Plan) -> float:
    """Returns the number of elements that a rank sends in a microbatch for linear layers and attentions.

    All-gathers of other tokens' keys and values are included; convolutions, norms, embeddings and the loss are not. The
    option ``auto`` compares modes by it.
    """
    notes = [note.tokens if isinstance(note, HeadsNote) else note for note in plan.notes.values()]
    return sum(note.elements for note in notes if isinstance(note, LinearNote | MultiheadNote | TokensNote))


def place(job: Job, plan: Plan, mode: Mode) -> Plan:
    """Returns the plan with all layers cut that the mode can cut.

    Tokens are cut in place of samples if the layout has ``/seq``, or if samples are fewer than ranks and that works.

    Raises: LayoutError: no layer can be cut, an attention has fewer elements than the one axis has ranks, a role that
        the user gave to a layer does not fit, or a layer mixes the samples or tokens that the layout cuts.
    """
    found = with_rows(job, plan, mode)
    if found.dim == 1 and not is_asked(plan):
        with suppress(LayoutError):  # /seq was not written: where it fails, samples are cut
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
        plan = _place_all_but_narrow(job, mode, plan)
        if all(isinstance(note, TokensNote) for note in plan.notes.values()):
            raise _nothing_to_cut(job.model, mode, plan)
    for path, module, _, _ in owners(job.model):
        if path not in plan.roles:
            plan = plan.role(path, mode.name, "copied", f"{type(module).__name__}: every rank computes it whole")
    return plan


def _place_all_but_narrow(job: Job, mode: Mode, plan: Plan) -> Plan:
    """Returns the plan with every layer cut but those too small for the grid; ``show`` prints why these stay whole."""
    narrow: dict[str, str] = {}
    while True:
        try:
            return _place_layers(PlanDraft(job, mode, plan, narrow))
        except GridError as error:
            if error.path is None or error.path in narrow:
                raise
            # what stays whole changes how features flow between layers: all is placed anew
            narrow[error.path] = f"too small: {error.given}; every rank computes it whole"


def place_alone(job: Job, plan: Plan, mode: Mode) -> Plan:
    """Returns the plan of a model that is one ``nn.Linear``, with its input cut like an activation between layers.

    Its output is cut by features over every axis that does not cut rows.

    Raises: GridError: the layer is too small for the grid.
    """
    layer = job.model
    assert isinstance(layer, nn.Linear)
    plan = cut_rows(plan, mode)
    stop: States = tuple("F" if state == "C" else state for state in mode.stream)
    draft = PlanDraft(job, mode, plan)
    _place_single(draft, "", mode.stream, stop)
    return draft.plan


def _place_layers(draft: PlanDraft) -> Plan:
    """Returns the plan with every layer cut that the mode can cut."""
    place_attentions(draft)
    place_multiheads(draft, draft.overrides)
    for row, chain in draft.chains.items():
        _place_chain(draft, chain, draft.flow.uses.get(row, FeatureUse("chain")))
    for path, use in draft.flow.uses.items():
        if path in draft.plan.roles:
            continue
        if use.kind == "linear" and path != draft.head:
            start, stop = draft.mode.states(use.takes_cut), draft.mode.states(use.gives_cut)
            _place_single(draft, path, start, stop, flows=not use.from_input)
        elif use.kind == "norm" and use.takes_cut:
            _place_norm(draft, path, use)
        elif use.kind == "elementwise" and use.takes_cut:
            draft.cut_activation(path, Features.balanced(use.size, draft.mode.feature_axes))
        elif use.kind == "gate":
            draft.note(path, GatherNote(tuple(map(draft.stream_of, use.sizes))), rung=Rung.GATHER)
    draft.plan = place_convolutions(draft.job, draft.mode, draft.plan, draft.shared, draft.head)
    place_head_and_tables(draft)
    if draft.flow.output_size:
        draft.note(OUTPUT, GatherNote((draft.stream_of(draft.flow.output_size),)), rung=Rung.GATHER)
    for path, why in draft.narrow.items():
        if path in draft.names:
            draft.role(path, "copied", why)
    draft.plan = draft.plan.allow_callers(dict(_allowed_callers(draft)))
    return draft.overrides.explained(draft.plan, draft.mode.name)


def _allowed_callers(draft: PlanDraft) -> Iterator[tuple[str, AllowedCallers]]:
    """Yields, for each module with a cut input or output, the modules whose traced code calls it."""
    for path, use in draft.flow.uses.items():
        if use.takes_cut or use.gives_cut or use.kind == "gate":
            yield path, AllowedCallers("", frozenset(draft.flow.callers.get(path, ())))
    for path, note in draft.plan.notes.items():
        layers = {HeadsNote: ("qkv", "q", "k", "v", "o", "attention_dropout"), MultiheadNote: ("out_proj",)}
        for own in layers.get(type(note), ()):
            if own in dict(draft.model.get_submodule(path).named_children()):
                yield f"{path}.{own}".lstrip("."), AllowedCallers.of(path)
    for chain in draft.chains.values():
        if chain.row in draft.plan.notes:
            yield from chain_callers(draft.model, chain).items()
    if draft.head is not None:
        yield draft.head, AllowedCallers.of("")


def _place_chain(draft: PlanDraft, chain: LayerChain, use: FeatureUse) -> None:
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
    if chain.row in draft.overrides.still:  # no rows may be gathered or cut inside this block
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
    x, mid = draft.features_in(start, first.in_features), draft.features_in(before.after, middle)
    if chain.entry is not None:
        draft.note(chain.entry, EntryNote(before, x, draft.mode.axes), rung=Rung.ENTRY)
        draft.role(chain.entry, "entry", "its layers share one input")
    for column in chain.columns:
        enters = chain.entry is None
        pays = enters or column == chain.columns[0]
        draft.cut_weight(column, before, x, mid, enters=enters, first=pays, flows=flows)
        draft.linear_role(column, f"{middle} features before '{chain.row}'", before)
    draft.cut_weight(chain.row, after, mid, draft.features_in(stop, row.out_features))
    draft.linear_role(chain.row, f"{middle} features to {row.out_features}", after)
    for between in chain.between:
        draft.cut_activation(between, mid, step=before)


def _place_single(draft: PlanDraft, path: str, start: States, stop: States, *, flows: bool = True) -> None:
    """Plans the cut of one Linear between two states; ``flows``: its input needs a gradient."""
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
    draft.cut_weight(path, step, x, y, flows=flows)
    draft.linear_role(path, what, step)


def _place_norm(draft: PlanDraft, path: str, use: FeatureUse) -> None:
    features = Features.balanced(use.size, draft.mode.feature_axes)
    for name in draft.names.get(path, {}).values():
        for axis in features.names:
            draft.cut(name, axis, 0, features.along(axis))
    spec = {axis: Shard(-1) for axis in features.names}
    centered = is_exactly(draft.model.get_submodule(path), nn.LayerNorm)
    draft.plan = draft.plan.use(path, x=spec, dy=spec)
    draft.note(path, NormNote(features, centered))
    draft.role(path, "norm", f"{use.size} features, statistics combined")


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
