"""Tensor parallelism for shardwright's ``Attention``: some axes cut the heads, the others the samples or tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.analysis.traced.known_modules import is_plain_attention
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung, record
from shardwright.mesh import Coord
from shardwright.models.attention import Attention
from shardwright.operators.attention import (
    attend_inside,
    attend_selected,
    head_rows,
    head_slices,
    kv_heads,
    query_heads,
)
from shardwright.plan.batch_shard import RowMoves
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import Ranges, concat
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.feature_flow import FeatureUse
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.linear import EntryNote, cut_weight, linear_role
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Layer, LayerBoundary, RoleChoice
from shardwright.strategies.tensor_parallel.sequence import TokensNote, tokens_note
from shardwright.strategies.tensor_parallel.traffic import RankTraffic

_GATHERED = "keys and values of all tokens gathered"


@dataclass(frozen=True)
class HeadsNote(OperatorNote):
    """The cut of an attention's heads over the grid of ranks.

    ``heads`` and ``kv`` are the cuts of query heads and of key and value heads. Rank i along the axes that cut them
    (counted row-major) has the query heads ``held[i]``, and of each head the elements ``slices[i]`` (start, stop), or
    the pairs of elements that a rotary embedding turns. These are all elements, except if ``inside`` is True: then
    several ranks divide a head. ``rows`` are the gathers and cuts of rows since the model's input. ``entry`` is the
    all-gather of the input of q, k and v, if they are separate layers; ``tokens`` that of keys and values, if sequences
    are cut.
    """

    inner: ClassVar[tuple[str, ...]] = ("qkv", "q", "k", "v", "o", "attention_dropout")

    heads: Features
    kv: Features
    held: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, int], ...]
    inside: bool
    rows: RowMoves
    entry: EntryNote | None = None
    tokens: TokensNote | None = None

    def held_kv(self, coord: Coord) -> list[int]:
        """Returns the numbers of the key and value heads on the rank at ``coord``."""
        return [head for a, b in self.kv.kept(coord) for head in range(a, b)]

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the attention compute this rank's heads, or its part of a head, whose scores are then all-reduced."""
        assert isinstance(module, Attention)
        if self.entry is not None:
            self.entry.apply(rank, path, module)
        number = self.heads.number(rank.coord)
        own, parts = self.held[number], self.slices[number]
        kv = self.held_kv(rank.coord)
        joint = len(self.heads.parts)
        group = module.num_heads // module.num_kv_heads
        kv_of_head = [kv.index(head // group) for head in own]
        module.num_heads, module.num_kv_heads = len(own), len(kv)
        if self.inside:
            if module.rotary is not None:
                module.rotary.pairs = tuple(range(*parts))
            module.head_dim = (parts[1] - parts[0]) * (2 if module.rotary is not None else 1)
            axis = rank.axes[self.heads.names[0]].subset([i for i in range(joint) if self.held[i] == own])
            module.attend = partial(attend_inside, module, axis)  # type: ignore[method-assign]
            record(module, Rung.ATTEND, "scores summed over the parts of a head", by=rank.mode.name)
        elif len(own) % len(kv) or kv_of_head != [i * len(kv) // len(own) for i in range(len(own))]:
            module.attend = partial(attend_selected, module, kv_of_head)  # type: ignore[method-assign]
            record(module, Rung.ATTEND, "keys and values chosen for the heads held", by=rank.mode.name)
        if self.tokens is not None:
            self.tokens.apply(rank, path, module)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of the input and of other tokens' keys and values, and the all-reduces of scores."""
        if self.entry is not None:
            yield from self.entry.traffic(here, path, call)
        if self.inside:
            yield self._scores(here, call)
        if self.tokens is not None:
            yield from self.tokens.traffic(here, path, call)

    def _scores(self, here: RankTraffic, call: ModuleCall) -> Traffic:
        """Returns the all-reduce of the scores of heads that several ranks divide."""
        members = sum(held == self.held[self.heads.number(here.coord)] for held in self.held)
        seen = queries = call.x_shape[1]
        if self.tokens is not None:  # causal queries see no gathered tokens behind them
            seen = here.shard.span(self.tokens.rows).stop if self.tokens.causal else here.shard.num_tokens
            queries = len(here.shard.tokens(self.rows))
        num_bytes = len(here.shard.samples(self.rows)) * queries * seen * call.element_bytes
        return Traffic("all_reduce", self.heads.names[0], num_bytes, members, call.num_forwards + 1)

    def num_sent(self) -> float:
        """Returns the elements sent for keys and values; the projections have their own entries in the plan."""
        return self.tokens.num_sent() if self.tokens is not None else 0.0


def place_attentions(draft: PlanDraft) -> None:
    """Plans in ``draft`` a cut by heads for every unmodified ``Attention`` whose parameters no other module uses.

    One axis of more ranks than heads cuts inside of heads. All other attentions stay whole, with a reason for ``show``;
    where sequences are cut, these gather the keys and values of all tokens.

    Raises: LayoutError: an attention is too small for the grid, or has been modified and would get cut sequences.
    """
    for path, module in draft.model.named_modules():
        if not isinstance(module, Attention):
            continue
        if draft.mode.dim == 1:  # dropout takes attention weights (samples, heads, queries, keys)
            draft.plan = draft.plan.see_tokens(f"{path}.attention_dropout".lstrip("."), (2, 3))
        if path in draft.attentions:
            _place_attention(draft, path, module, draft.flow.uses.get(path, FeatureUse("attention")))
            continue
        plain = is_plain_attention(module)
        if draft.mode.dim == 1:
            if not plain:
                raise LayoutError(
                    f"attention '{path}' was changed since it was built, and would get only a part of each sequence",
                    given="a layout that cuts sequences",
                    allowed="attentions as they were built, for which keys and values of all tokens are gathered",
                    fix="leave out /seq, or leave the attention as it was built",
                )
            _place_tokens(draft, path, module)
            continue
        why = "its parameters are used elsewhere too" if plain else "changed since it was built"
        why = draft.narrow.get(path, why)
        for layer in draft.names:
            if layer.startswith(f"{path}." if path else ""):
                draft.role(layer, "copied", f"attention '{path}': {why}")


def _place_tokens(draft: PlanDraft, path: str, attention: Attention) -> None:
    """Plans an attention that computes all heads for this rank's tokens, with keys and values all-gathered."""
    kv = Features.balanced(attention.num_kv_heads * attention.head_dim, ())
    note = tokens_note(attention, path, kv, (), draft.mode.states(False), draft.job, draft.mode)
    over = " ".join(move.axis for move in note.gathers)
    draft.note(path, note, rung=Rung.ATTEND)
    draft.role(path, "tokens", f"all heads; {_GATHERED} over {over}")


def _place_attention(draft: PlanDraft, path: str, attention: Attention, use: FeatureUse) -> None:
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    hidden = (attention.qkv if attention.fused else attention.q).in_features
    out = attention.o.out_features
    start, stop = draft.mode.states(use.takes_cut), draft.mode.states(use.gives_cut)
    layers = (Layer(hidden, q_width + 2 * kv_width, not use.from_input), Layer(q_width, out))
    choice = _chosen_roles(draft, path, attention, layers, LayerBoundary(0, start), LayerBoundary(out, stop))
    before, after = choice.steps
    axes = draft.mode.axes_in(before.after, "F")
    parts = prod(size for _, size in axes)
    heads, slices = query_heads(attention, parts), head_slices(attention, parts)
    q = tuple(head_rows(attention, heads[i], slices[i]) for i in range(parts))
    kv = tuple(head_rows(attention, kv_heads(attention, heads[i]), slices[i]) for i in range(parts))
    x, y = draft.features_in(start, hidden), draft.features_in(stop, out)
    cuts: Mapping[str, tuple[int, Ranges]] = {"q": (q_width, q), "k": (kv_width, kv), "v": (kv_width, kv)}
    if attention.fused:
        widths = (q_width, kv_width, kv_width)
        cuts = {"qkv": (sum(widths), concat(widths, (q, kv, kv)))}
    outputs = [Features(size, axes, ranges) for size, ranges in cuts.values()]
    if any(output.fewest < before.num_fetched(draft.mode.axes) for output in outputs if not output.overlaps):
        raise draft.too_small(path, f"{attention.num_heads} heads of {attention.head_dim} elements")
    prefix = f"{path}." if path else ""
    entry = None if attention.fused else EntryNote(before, x, draft.mode.axes)
    for name, (size, ranges) in cuts.items():
        features, pays = Features(size, axes, ranges), name in ("q", "qkv")
        projection = cut_weight(
            draft, prefix + name, before, x, features, enters=attention.fused, first=pays, flows=not use.from_input
        )
        linear_role(draft, prefix + name, f"rows of the heads that '{path}' holds", projection)
    projection = cut_weight(draft, f"{prefix}o", after, Features(q_width, axes, q), y)
    linear_role(draft, f"{prefix}o", "in-features of the heads held", projection)
    held = Features(attention.num_heads, axes, tuple(((h[0], h[-1] + 1),) for h in heads))
    draft.cut_activation(f"{prefix}attention_dropout", held, dim=1, step=before)
    inside = parts > attention.num_heads
    kv_held = Features(
        attention.num_kv_heads, axes, tuple(((k[0], k[-1] + 1),) for k in (kv_heads(attention, h) for h in heads))
    )
    note = HeadsNote(held, kv_held, heads, slices, inside, before.rows_after, entry)
    if draft.mode.dim == 1:
        keys, rows = Features(kv_width, axes, kv), before.rows_after
        note = replace(note, tokens=tokens_note(attention, path, keys, rows, before.after, draft.job, draft.mode))
    if entry is not None:
        draft.plan = draft.plan.wraps(path, Rung.ENTRY, draft.mode.name)
    draft.note(path, note, rung=Rung.ATTEND)
    role, why = "inside a head" if inside else "heads", _why(attention.num_heads, parts, note)
    draft.role(path, role, why)


def _chosen_roles(
    draft: PlanDraft, path: str, attention: Attention, layers: tuple[Layer, Layer], start: LayerBoundary,
    stop: LayerBoundary,
) -> RoleChoice:  # fmt: skip
    """Returns the roles of an attention's layers: whole heads if they fit the grid, else, over one axis, parts of them.

    Raises: LayoutError: there are too few heads, or too few elements in each.
    """
    mode, joined = draft.mode, 2 * attention.num_kv_heads * attention.head_dim if draft.mode.dim == 1 else 0

    def chosen(most_alone: int = 0) -> RoleChoice | None:
        middle = LayerBoundary(attention.num_heads, sums=False, most_alone=most_alone, joined=joined)
        return mode.choose(layers, (start, middle, stop), draft.job.num_tokens)

    turned = 2 if attention.rotary is not None else 1  # rotary turns pairs of elements, which stay together
    choice = chosen() or chosen(attention.num_heads * attention.head_dim // turned)
    if choice is None and len(mode.axes) == 1:
        head_slices(attention, mode.axes[0].size)  # raises, with the numbers of ranks that fit
    if choice is None:
        raise draft.too_small(path, f"{attention.num_heads} heads")
    return choice


def _why(num_heads: int, parts: int, note: HeadsNote) -> str:
    why = f"{num_heads} heads, " + (f"in {parts} parts" if parts > 1 else "all of them for fewer samples")
    why += ": each head over several ranks, scores summed" if parts > num_heads else ""
    if note.tokens is not None and note.tokens.gathers:
        why += f"; {_GATHERED} over {' '.join(move.axis for move in note.tokens.gathers)}"
    return why
