"""Tensor parallelism for embedding tables: cut by rows (the vocabulary), by features, or by both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from torch import Tensor, nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.mesh import Coord
from shardwright.operators.linear import weight_of
from shardwright.operators.vocabulary import cut_embedding
from shardwright.plan.batch_shard import RowMoves
from shardwright.plan.plan import Replicate, Shard
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import width
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse, not_to_cut
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.moves import AxisMove, input_moves, output_moves
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import RoleName, RoleStep, States
from shardwright.strategies.tensor_parallel.traffic import INDEX_BYTES, RankTraffic


@dataclass(frozen=True)
class EmbeddingNote(OperatorNote):
    """The cut of an embedding table: its rows (the vocabulary) over some axes, its features over others.

    ``gathers`` are the all-gathers of its tokens, and ``sums`` the reduce-scatters or all-reduces that add up the
    ranks' looked-up rows. ``rows`` are the gathers and cuts of rows up to the look-up. ``per_sample`` is False for a
    table that does not look up the model's own input, such as one of positions.
    """

    guarded: ClassVar[bool] = True

    vocabulary: Features
    features: Features
    gathers: tuple[AxisMove, ...]
    sums: tuple[AxisMove, ...]
    rows: RowMoves = ()
    per_sample: bool = True

    def width(self, coord: Coord) -> int:
        """Returns the number of features of each looked-up row on the rank at ``coord``, before rows are summed."""
        return width(self.features.held(coord, over=[move.axis for move in self.sums if move.kind == "features"]))

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the table look up the rows that this rank holds, and sum those of all ranks."""
        assert isinstance(module, nn.Embedding)
        start = self.vocabulary.held(rank.coord)[0][0]
        take_moves, give_moves = rank.moves(self.gathers), rank.moves(self.sums)

        def forward(input: Tensor) -> Tensor:
            size, padding = self.vocabulary.size, module.padding_idx
            return cut_embedding(input, weight_of(module), start, size, take_moves, give_moves, padding)

        rank.operator(module, "table of cut rows or features", forward)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of token numbers and the sums of looked-up rows, forward and backward."""
        numbers = here.rows_each((*call.x_shape, 1))
        for move in self.gathers:
            num_bytes = int(sum(here.shard.sizes(move.rows, move.axis)) * numbers) * INDEX_BYTES
            yield Traffic("all_gather", move.axis, num_bytes, here.plan.mesh[move.axis], call.num_forwards)
        num_rows = here.num_rows(self.rows, call.y_shape) if self.per_sample else prod(call.y_shape[:-1])
        yield from here.output_traffic(self.sums, (num_rows, self.width(here.coord)), call, path in here.trained)


def place_tables(draft: PlanDraft) -> None:
    """Plans in ``draft`` the cut of every embedding table; ``show`` prints why a table is not cut.

    A table that shares its weight with the output head is cut by rows, as the head is by classes.
    """
    for path in sorted(draft.tables()):
        table = draft.model.get_submodule(path)
        assert isinstance(table, nn.Embedding)
        tied = draft.head is not None and draft.head in draft.users(path)
        if draft.may_cut_table(path):
            _place_table(draft, path, table, draft.flow.uses.get(path, FeatureUse("table")), tied)


def explain_whole_tables(draft: PlanDraft) -> None:
    """Gives each table that cannot be cut, and the layers that share its weight, the role "copied" and the reason."""
    for path, table in draft.model.named_modules():
        why = not_to_cut(table) if isinstance(table, nn.Embedding) else ""
        for user in sorted(draft.users(path)) if why else ():
            whose = "" if user == path else f"shares the table '{path}': "
            draft.role(user, "copied", whose + why)


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
    for axis_name in by_rows:
        draft.cut(name, axis_name, 0, vocabulary.along(axis_name))
    for axis_name in by_width:
        draft.cut(name, axis_name, 1, width_cut.along(axis_name))
    if not by_rows and not by_width:
        return
    # Token numbers are gathered over axes that cut both tokens and the table's rows. The looked-up rows are cut like
    # other activations between layers.
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
