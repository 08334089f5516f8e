"""Tables of vectors and the head that shares them: vocabulary or features cut, and the loss on cut classes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

from shardwright.models import CrossEntropy
from shardwright.plan.plan import LOSS, OUTPUT, ActivationCut, Replicate, Shard
from shardwright.strategies.tensor_parallel.feature_flow import Place, not_to_cut
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import LossNote, Mode, TableNote, gives, takes
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Boundary, Layer, RoleName, RoleStep, States


def place_head_and_tables(placing: PlanDraft) -> None:
    """Cuts the head, with the loss that takes its classes cut, and every table that may be."""
    _explain_whole_tables(placing)
    if placing.head is not None:
        _place_head(placing, placing.head)
    for path in sorted(placing.tables()):
        found = placing.flow.places.get(path)
        table = placing.model.get_submodule(path)
        assert isinstance(table, nn.Embedding)
        tied = placing.head is not None and placing.head in placing.users(path)
        if found is None and not tied:
            if placing.may_cut_table(path):
                found = Place("table", False, False, table.embedding_dim, from_input=False)
            else:
                continue
        if placing.may_cut_table(path):
            _place_table(placing, path, table, found or Place("table"), tied)


def _explain_whole_tables(placing: PlanDraft) -> None:
    for path, table in placing.model.named_modules():
        why = not_to_cut(table) if isinstance(table, nn.Embedding) else ""
        for user in sorted(placing.users(path)) if why else ():
            whose = "" if user == path else f"shares the table '{path}': "
            placing.plan = placing.plan.role(user, placing.mode.name, "copied", whose + why)


def _place_head(placing: PlanDraft, head: str) -> None:
    layer = placing.model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    place = placing.flow.places.get(head, Place("linear"))
    start, tied = placing.mode.states(place.takes_cut), placing.is_tied(head)
    states: States | None = None
    if tied:
        states = tuple("F" if axis.stored else "T" for axis in placing.mode.axes)
    choice = placing.mode.choose(
        (Layer(layer.in_features, layer.out_features, not place.from_input),),
        (Boundary(0, start), Boundary(layer.out_features, states, sums=not tied, rows=False)),
        placing.job.num_tokens,
        rows_end=None,
    )
    if choice is None:
        raise placing.too_small(head, f"{layer.out_features} classes")
    (step,) = choice.steps
    x, y = placing.features_in(start, layer.in_features), placing.features_in(step.after, layer.out_features)
    placing.cut_weight(head, step, x, y)
    placing.note_role(head, f"{layer.out_features} classes; the loss takes them cut", step)
    assert isinstance(placing.job.loss, CrossEntropy)
    numbers = 4 if placing.job.loss.label_smoothing > 0 else 3
    gathers = tuple(g for g in takes(step, placing.mode.axes, x) if g.lies == "rows")
    placing.plan = placing.plan.note(LOSS, LossNote(head, y, gathers, numbers), by=placing.mode.name)
    parts = len(y.parts)
    why = f"{layer.out_features} classes" + (f" in {parts} parts: a gather for each token" if parts > 1 else "")
    placing.plan = placing.plan.role(LOSS, placing.mode.name, f"{'four' if numbers == 4 else 'three'} numbers", why)
    for axis in y.names:
        activation = ActivationCut(axis, -1, y.size, y.along(axis))
        placing.plan = placing.plan.cut_activation(OUTPUT, activation)
    placing.plan = placing.plan.move_rows(OUTPUT, step.rows_after)


def _place_table(placing: PlanDraft, path: str, table: nn.Embedding, place: Place, tied: bool) -> None:
    """Rows over the axes that share the table with a head, or over which the tokens are cut; features elsewhere."""
    by_rows: list[str] = []
    for axis in placing.mode.axes:
        if not axis.stored:
            continue
        long = table.num_embeddings >= table.embedding_dim
        if tied or (axis.stream == "C" and long) or (axis.stream == "T" and long and place.from_input):
            by_rows.append(axis.name)
    sizes = {axis.name: axis.size for axis in placing.mode.axes}
    if table.num_embeddings < prod(sizes[name] for name in by_rows):
        by_rows = []
    after = placing.mode.states(place.gives_cut)
    vocabulary = Features.balanced(table.num_embeddings, [(n, sizes[n]) for n in by_rows])
    width_cut = placing.features_in(after, table.embedding_dim)
    by_width = [name for name in width_cut.names if name not in by_rows]
    name = placing.names[path]["weight"]
    for each in by_rows:
        placing.cut(name, each, 0, vocabulary.along(each))
    for each in by_width:
        placing.cut(name, each, 1, width_cut.along(each))
    if not by_rows and not by_width:
        return
    step = _table_step(placing.mode, by_rows, by_width, after)
    spec_x = {axis: Shard(-1) for axis in by_rows}
    spec_dy: dict[str, Any] = {axis: Replicate() for axis in by_rows} | {axis: Shard(-1) for axis in by_width}
    placing.plan = placing.plan.use(path, x=spec_x | {axis: Replicate() for axis in by_width}, dy=spec_dy)
    gathers = tuple(g for g in takes(step, placing.mode.axes, vocabulary) if g.lies == "rows")
    summed = step._replace(roles=tuple("k" if axis.name in by_rows else "t" for axis in placing.mode.axes))
    sums = gives(summed, placing.mode.axes, width_cut)
    note = TableNote(vocabulary, width_cut, gathers, sums, step.rows_gathered, place.from_input)
    placing.plan = placing.plan.note(path, note, by=placing.mode.name)
    what = [f"{table.num_embeddings} rows over {' '.join(by_rows)}"] if by_rows else []
    what += [f"{table.embedding_dim} features over {' '.join(by_width)}"] if by_width else []
    placing.plan = placing.plan.role(path, placing.mode.name, "table", ", ".join(what))


def _table_step(mode: Mode, by_rows: Sequence[str], by_width: Sequence[str], after: States) -> RoleStep:
    """The tokens of rows that the table's cut joins are gathered; its output is cut as the stream is."""
    gathers = tuple(a.name for a in reversed(mode.axes) if a.name in by_rows and a.stream == "T")
    before: States = tuple("T" if axis.stream == "T" else "C" for axis in mode.axes)
    roles: tuple[RoleName, ...] = tuple("h" if a.name in (*by_rows, *by_width) else "t" for a in mode.axes)
    return RoleStep(before, roles, after, gathers, tuple(reversed(gathers)))
