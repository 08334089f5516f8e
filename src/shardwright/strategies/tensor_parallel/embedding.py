"""Tensor parallelism for embedding tables, the output head that may be tied to one, and the loss on cut classes."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn

from shardwright.models.losses import CrossEntropy
from shardwright.plan.plan import LOSS, OUTPUT, ActivationCut, Replicate, Shard
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse, not_to_cut
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import EmbeddingNote, LossNote, input_moves, output_moves
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Layer, LayerBoundary, RoleName, RoleStep, States


def place_head_and_tables(draft: PlanDraft) -> None:
    """Plans in ``draft`` the cut of the output head by classes and of every embedding table by rows or features.

    The loss then works on logits that are cut by classes. ``show`` prints why a table is not cut.

    Raises: LayoutError: the head has too few classes for the grid.
    """
    _explain_whole_tables(draft)
    if draft.head is not None:
        _place_head(draft, draft.head)
    for path in sorted(draft.tables()):
        table = draft.model.get_submodule(path)
        assert isinstance(table, nn.Embedding)
        tied = draft.head is not None and draft.head in draft.users(path)
        if draft.may_cut_table(path):
            _place_table(draft, path, table, draft.flow.uses.get(path, FeatureUse("table")), tied)


def _explain_whole_tables(draft: PlanDraft) -> None:
    for path, table in draft.model.named_modules():
        why = not_to_cut(table) if isinstance(table, nn.Embedding) else ""
        for user in sorted(draft.users(path)) if why else ():
            whose = "" if user == path else f"shares the table '{path}': "
            draft.role(user, "copied", whose + why)


def _place_head(draft: PlanDraft, head: str) -> None:
    layer = draft.model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    use = draft.flow.uses.get(head, FeatureUse("linear"))
    start, tied = draft.mode.states(use.takes_cut), draft.is_tied(head)
    # a tied weight is cut by rows, its vocabulary, over every axis that cuts weights
    states: States | None = tuple("F" if axis.stored else "T" for axis in draft.mode.axes) if tied else None
    choice = draft.mode.choose(
        (Layer(layer.in_features, layer.out_features, not use.from_input),),
        (LayerBoundary(0, start), LayerBoundary(layer.out_features, states, sums=not tied, rows=False)),
        draft.job.num_tokens,
        rows_end=None,
    )
    if choice is None:
        raise draft.too_small(head, f"{layer.out_features} classes")
    (step,) = choice.steps
    x, y = draft.features_in(start, layer.in_features), draft.features_in(step.after, layer.out_features)
    draft.cut_weight(head, step, x, y)
    draft.linear_role(head, f"{layer.out_features} classes; the loss takes them cut", step)
    assert isinstance(draft.job.loss, CrossEntropy)
    numbers = 4 if draft.job.loss.label_smoothing > 0 else 3
    gathers = tuple(g for g in input_moves(step, draft.mode.axes, x) if g.kind == "rows")
    draft.note(LOSS, LossNote(head, y, gathers, numbers))
    parts = len(y.parts)
    why = f"{layer.out_features} classes" + (f" in {parts} parts: a gather for each token" if parts > 1 else "")
    draft.role(LOSS, f"{'four' if numbers == 4 else 'three'} numbers", why)
    for axis in y.names:
        activation = ActivationCut(axis, -1, y.size, y.along(axis))
        draft.plan = draft.plan.cut_activation(OUTPUT, activation)
    draft.plan = draft.plan.move_rows(OUTPUT, step.rows_after)


def _place_table(draft: PlanDraft, path: str, table: nn.Embedding, use: FeatureUse, tied: bool) -> None:
    """Cuts a table's rows over axes of a tied head and axes that cut or copy tokens, its features over the others."""
    by_rows: list[str] = []
    for axis in draft.mode.axes:
        if not axis.stored:
            continue
        long = table.num_embeddings >= table.embedding_dim
        if tied or (axis.stream == "C" and long) or (axis.stream == "T" and long and use.from_input):
            by_rows.append(axis.name)
    sizes = {axis.name: axis.size for axis in draft.mode.axes}
    if table.num_embeddings < prod(sizes[name] for name in by_rows):
        by_rows = []
    after = draft.mode.states(use.gives_cut)
    vocabulary = Features.balanced(table.num_embeddings, [(n, sizes[n]) for n in by_rows])
    width_cut = draft.features_in(after, table.embedding_dim)
    by_width = [name for name in width_cut.names if name not in by_rows]
    name = draft.names[path]["weight"]
    for each in by_rows:
        draft.cut(name, each, 0, vocabulary.along(each))
    for each in by_width:
        draft.cut(name, each, 1, width_cut.along(each))
    if not by_rows and not by_width:
        return
    # tokens are gathered over the row-cutting axes that cut them; the output is cut as the stream is
    moved = tuple(a.name for a in reversed(draft.mode.row_axes) if a.name in by_rows)
    before: States = tuple("T" if axis.stream == "T" else "C" for axis in draft.mode.axes)
    roles: tuple[RoleName, ...] = tuple("h" if a.name in (*by_rows, *by_width) else "t" for a in draft.mode.axes)
    step = RoleStep(before, roles, after, moved, tuple(reversed(moved)))
    spec_x = {axis: Shard(-1) for axis in by_rows}
    spec_dy: dict[str, Any] = {axis: Replicate() for axis in by_rows} | {axis: Shard(-1) for axis in by_width}
    draft.plan = draft.plan.use(path, x=spec_x | {axis: Replicate() for axis in by_width}, dy=spec_dy)
    gathers = tuple(g for g in input_moves(step, draft.mode.axes, vocabulary) if g.kind == "rows")
    summed = step._replace(roles=tuple("k" if axis.name in by_rows else "t" for axis in draft.mode.axes))
    sums = output_moves(summed, draft.mode.axes, width_cut)
    note = EmbeddingNote(vocabulary, width_cut, gathers, sums, step.rows_gathered, use.from_input)
    draft.note(path, note)
    what = [f"{table.num_embeddings} rows over {' '.join(by_rows)}"] if by_rows else []
    what += [f"{table.embedding_dim} features over {' '.join(by_width)}"] if by_width else []
    draft.role(path, "table", ", ".join(what))
