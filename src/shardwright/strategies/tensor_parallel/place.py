"""Refines the plan for a tensor-parallel mode: the layout of each tensor, and a note on how each module is cut.

Nothing is sent, and no module is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from types import MappingProxyType

from torch import Tensor, nn

from shardwright.analysis.traced.callers import AllowedCallers, chain_callers
from shardwright.analysis.traced.convolution_chains import CONVOLUTIONS
from shardwright.analysis.traced.structure import is_inside, owners
from shardwright.errors import GridError, LayoutError
from shardwright.forward_stack import Rung
from shardwright.plan.plan import INPUT, OUTPUT, Job, Plan
from shardwright.strategies.tensor_parallel.attention import place_attentions
from shardwright.strategies.tensor_parallel.convolution import place_convolutions
from shardwright.strategies.tensor_parallel.embedding import explain_whole_tables, place_tables
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.gather import GatherNote, OutputNote
from shardwright.strategies.tensor_parallel.linear import place_chain, place_single
from shardwright.strategies.tensor_parallel.loss import place_head
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.multihead_attention import place_multiheads
from shardwright.strategies.tensor_parallel.norm import place_norm
from shardwright.strategies.tensor_parallel.note import notes_of
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import States
from shardwright.strategies.tensor_parallel.sequence import TokensNote, cut_rows, is_asked, with_rows
from shardwright.strategy import check_samples_apart

NAMED = 8  # the most layers that an error lists


def sent(plan: Plan) -> float:
    """Returns the number of elements that a rank sends in a microbatch for linear layers and attentions.

    All-gathers of other tokens' keys and values are included; convolutions, norms, embeddings and the loss are not. The
    option ``auto`` compares modes by it.
    """
    return sum(note.num_sent() for _, note in notes_of(plan))


def place(job: Job, plan: Plan, mode: Mode, apart: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """Returns the plan with every layer cut that the mode can cut.

    Tokens are cut in place of samples if the layout has ``/seq``, or if samples are fewer than ranks and that works.
    ``apart`` has layers that the planner, and no role of the user, keeps whole, each with the reason; ``job.roles`` has
    the role "copied" for them.

    Raises: LayoutError: no layer can be cut, an attention has fewer elements than the one axis has ranks, a role that
        the user gave to a layer does not fit, or a layer mixes the samples or tokens that the layout cuts.
    """
    row_mode = with_rows(job, plan, mode)
    if row_mode.dim == 1 and not is_asked(plan):
        with suppress(LayoutError):  # /seq is not written: if cutting tokens fails, samples are cut
            return _placed(job, plan, row_mode, apart)
        row_mode = mode
    return _placed(job, plan, row_mode, apart)


def _placed(job: Job, plan: Plan, mode: Mode, apart: Mapping[str, str]) -> Plan:
    if mode.row_axes and mode.dim == 0:
        check_samples_apart(job.model, str(plan.layout.factor("tp")))
    plan = cut_rows(plan, mode)
    if mode.dim == 1:
        names = " ".join(axis.name for axis in mode.row_axes)
        plan = plan.role(INPUT, mode.name, "tokens", f"each sample's tokens cut over {names}, not the samples")
    if mode.axes:
        plan = _place_all_but_narrow(job, mode, plan)
        if all(isinstance(note, TokensNote) for note in plan.notes.values()):
            raise _nothing_to_cut(job, mode, plan, apart)
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
            # a layer that stays whole changes how features flow between layers, so all layers are placed again
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
    place_single(draft, "", mode.stream, stop)
    return draft.plan


def _place_layers(draft: PlanDraft) -> Plan:
    """Returns the plan with every layer cut that the mode can cut."""
    place_attentions(draft)
    place_multiheads(draft, draft.overrides)
    for row, chain in draft.chains.items():
        place_chain(draft, chain, draft.flow.uses.get(row, FeatureUse("chain")))
    for path, use in draft.flow.uses.items():
        if path in draft.plan.roles:
            continue
        if use.kind == "linear" and path != draft.head:
            start, stop = draft.mode.states(use.takes_cut), draft.mode.states(use.gives_cut)
            place_single(draft, path, start, stop, flows=not use.from_input)
        elif use.kind == "norm" and use.takes_cut:
            place_norm(draft, path, use)
        elif use.kind == "elementwise" and use.takes_cut:
            draft.cut_activation(path, Features.balanced(use.size, draft.mode.feature_axes))
        elif use.kind == "gate":
            draft.note(path, GatherNote(tuple(map(draft.stream_of, use.sizes))), rung=Rung.GATHER)
    draft.plan = place_convolutions(draft.job, draft.mode, draft.plan, draft.shared, draft.head)
    explain_whole_tables(draft)
    if draft.head is not None:
        place_head(draft, draft.head)
    place_tables(draft)
    if draft.flow.output_size:
        features = Features.balanced(draft.flow.output_size, draft.mode.feature_axes)
        draft.note(OUTPUT, OutputNote(features), rung=Rung.GATHER)
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
    for path, note in notes_of(draft.plan):
        for own in note.inner:
            if own in dict(draft.model.get_submodule(path).named_children()):
                yield f"{path}.{own}".lstrip("."), AllowedCallers.of(path)
    for chain in draft.chains.values():
        if chain.row in draft.plan.notes:
            yield from chain_callers(draft.model, chain).items()
    if draft.head is not None:
        yield draft.head, AllowedCallers.of("")


def why_apart(path: str, apart: Mapping[str, str]) -> str:
    """Returns why a module stays whole: the reason of the nearest module around it in ``apart``; "" if none is."""
    nearest = max((outer_path for outer_path in apart if is_inside(path, outer_path)), key=len, default="")
    return apart.get(nearest, "")


_CUT = (nn.Linear, *CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase)
"""The layers that an error names if none of them is cut."""


def _first_weight(layer: nn.Module) -> Tensor:
    """Returns a layer's weight, or its largest parameter if a hook makes the weight in each forward."""
    names = ("weight", "weight_ih", "weight_ih_l0")
    held = [value for name in names if isinstance(value := getattr(layer, name, None), Tensor)]
    return held[0] if held else max(layer.parameters(), key=Tensor.numel)


def _nothing_to_cut(job: Job, mode: Mode, plan: Plan, apart: Mapping[str, str]) -> GridError:
    model, unrecorded = job.model, "" if job.graph is None else job.graph.failure
    total = prod(axis.size for axis in mode.axes)
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, _CUT) and [*m.parameters()]]
    sizes = ", ".join(f"{type(m).__name__} '{path}' {tuple(_first_weight(m).shape)}" for path, m in layers[:NAMED])
    sizes += f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    kept = [f"; its forward cannot be recorded: {unrecorded}"] if unrecorded else []
    whole: dict[str, list[str]] = {}
    for path, role in plan.roles.items():
        if role.name == "copied":
            whole.setdefault(why_apart(path, apart) or role.why, []).append(path)
    for why, (first, *others) in whole.items():
        kept.append(f"; '{first}' {f'and {len(others)} more are' if others else 'is'} kept whole: {why}")
    over = " ".join(f"{axis.name}={axis.size}" for axis in mode.axes)
    return GridError(
        f"no layer of the model can be cut over {over}",
        given=f"{type(model).__name__} with " + (sizes or "no layers of such kinds") + "".join(kept[:NAMED]),
        allowed="Linear -> elementwise or norm -> Linear, Conv -> norm, pool or elementwise -> Conv, attention, an "
        "embedding or head with many rows, or under tpN a recurrent layer without proj_size, each of at least as many "
        "features, channels or hidden units as ranks cut them",
        fix=f"write dp{total}",
    )
