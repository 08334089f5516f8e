"""Attention on a grid: heads over the axes that cut features, samples, or tokens, over the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shardwright.analysis.known_modules import is_plain_attention
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.models.attention import Attention
from shardwright.operators.head_slices import head_rows, head_slices, kv_heads, query_heads
from shardwright.sharding.box import Ranges, concat
from shardwright.strategies.tensor_parallel.feature_flow import Place
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import EntryNote, HeadsNote
from shardwright.strategies.tensor_parallel.plan_draft import PlanDraft
from shardwright.strategies.tensor_parallel.roles import Boundary, Layer
from shardwright.strategies.tensor_parallel.sequence import tokens_note

_GATHERED = "keys and values of all tokens gathered"


def place_attentions(placing: PlanDraft) -> None:
    """Cuts every ``Attention`` that is as it was built and whose parameters are its own; ``show`` says why not."""
    for path, module in placing.model.named_modules():
        if not isinstance(module, Attention):
            continue
        if placing.mode.dim == 1:
            _see_tokens(placing, path)
        if path in placing.attentions:
            _place_attention(placing, path, module, placing.flow.places.get(path, Place("attention")))
            continue
        plain = is_plain_attention(module)
        if placing.mode.dim == 1:
            if not plain:
                raise _changed(path)
            _place_tokens(placing, path, module)
            continue
        why = "its parameters are used elsewhere too" if plain else "changed since it was built"
        why = placing.narrow.get(path, why)
        for layer in placing.names:
            if layer.startswith(f"{path}." if path else ""):
                placing.plan = placing.plan.role(layer, placing.mode.name, "copied", f"attention '{path}': {why}")


def _see_tokens(placing: PlanDraft, path: str) -> None:
    """The weights that an attention drops are queries by keys."""
    placing.plan = placing.plan.see_tokens(f"{path}.attention_dropout".lstrip("."), (2, 3))


def _changed(path: str) -> LayoutError:
    return LayoutError(
        f"attention '{path}' was changed since it was built, and sees some tokens of a sequence only",
        given="a layout that cuts sequences",
        allowed="attentions as they were built, for which keys and values of all tokens are gathered",
        fix="leave out /seq, or leave the attention as it was",
    )


def _place_tokens(placing: PlanDraft, path: str, attention: Attention) -> None:
    """An attention that computes all heads, of the tokens at hand."""
    kv = Features.balanced(attention.num_kv_heads * attention.head_dim, ())
    note = tokens_note(attention, path, kv, (), placing.mode.states(False), placing.job, placing.mode)
    over = " ".join(each.axis for each in note.gathers)
    placing.plan = placing.plan.note(path, note, by=placing.mode.name, rung=Rung.ATTEND)
    placing.plan = placing.plan.role(path, placing.mode.name, "tokens", f"all heads; {_GATHERED} over {over}")


def _place_attention(placing: PlanDraft, path: str, attention: Attention, place: Place) -> None:
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    hidden, out = (
        attention.qkv.in_features if attention.fused else attention.q.in_features,
        attention.o.out_features,
    )
    start, stop = placing.mode.states(place.takes_cut), placing.mode.states(place.gives_cut)
    layers = (Layer(hidden, q_width + 2 * kv_width, not place.from_input), Layer(q_width, out))

    def chosen(most_alone: int = 0) -> Any:
        joined = 2 * kv_width if placing.mode.dim == 1 else 0
        middle = Boundary(attention.num_heads, sums=False, most_alone=most_alone, joined=joined)
        return placing.mode.choose(layers, (Boundary(0, start), middle, Boundary(out, stop)), placing.job.num_tokens)

    turned = 2 if attention.rotary is not None else 1
    choice = chosen() or chosen(q_width // turned)  # heads whole, if they can be; over one axis they may be cut inside
    if choice is None and len(placing.mode.axes) == 1:
        head_slices(attention, placing.mode.axes[0].size)  # says how many ranks it can use
    if choice is None:
        raise placing.too_small(path, f"{attention.num_heads} heads")
    before, after = choice.steps
    axes = placing.mode.axes_in(before.after, "F")
    parts = prod(size for _, size in axes)
    heads, slices = query_heads(attention, parts), head_slices(attention, parts)
    q = tuple(head_rows(attention, heads[i], slices[i]) for i in range(parts))
    kv = tuple(head_rows(attention, kv_heads(attention, heads[i]), slices[i]) for i in range(parts))
    x, y = placing.features_in(start, hidden), placing.features_in(stop, out)
    cuts: Mapping[str, tuple[int, Ranges]] = {"q": (q_width, q), "k": (kv_width, kv), "v": (kv_width, kv)}
    if attention.fused:
        widths = (q_width, kv_width, kv_width)
        cuts = {"qkv": (sum(widths), concat(widths, (q, kv, kv)))}
    made = [Features(size, axes, ranges) for size, ranges in cuts.values()]
    if any(each.fewest < before.num_fetched(placing.mode.axes) for each in made if not each.overlaps):
        raise placing.too_small(path, f"{attention.num_heads} heads of {attention.head_dim} elements")
    prefix = f"{path}." if path else ""
    entry = None if attention.fused else EntryNote(before, x, placing.mode.axes)
    for own, (size, ranges) in cuts.items():
        features, pays = Features(size, axes, ranges), own in ("q", "qkv")
        placing.cut_weight(
            prefix + own, before, x, features, enters=attention.fused, first=pays, flows=not place.from_input
        )
        placing.note_role(prefix + own, f"rows of the heads that '{path}' holds", before)
    placing.cut_weight(f"{prefix}o", after, Features(q_width, axes, q), y)
    placing.note_role(f"{prefix}o", "in-features of the heads held", after)
    held = Features(attention.num_heads, axes, tuple(((h[0], h[-1] + 1),) for h in heads))
    placing.cut_activation(f"{prefix}attention_dropout", held, dim=1, step=before)
    inside = parts > attention.num_heads
    kv_held = Features(
        attention.num_kv_heads, axes, tuple(((k[0], k[-1] + 1),) for k in (kv_heads(attention, h) for h in heads))
    )
    note = HeadsNote(held, kv_held, heads, slices, inside, before.rows_after, entry)
    if placing.mode.dim == 1:
        keys, rows = Features(kv_width, axes, kv), before.rows_after
        note = replace(note, tokens=tokens_note(attention, path, keys, rows, before.after, placing.job, placing.mode))
    if entry is not None:
        placing.plan = placing.plan.wraps(path, Rung.ENTRY, placing.mode.name)
    placing.plan = placing.plan.note(path, note, by=placing.mode.name, rung=Rung.ATTEND)
    role, why = "inside a head" if inside else "heads", _why(attention.num_heads, parts, note)
    placing.plan = placing.plan.role(path, placing.mode.name, role, why)


def _why(num_heads: int, parts: int, note: HeadsNote) -> str:
    why = f"{num_heads} heads, " + (f"in {parts} parts" if parts > 1 else "all of them for fewer samples")
    why += ": each head over several ranks, scores summed" if parts > num_heads else ""
    if note.tokens is not None and note.tokens.gathers:
        why += f"; {_GATHERED} over {' '.join(each.axis for each in note.tokens.gathers)}"
    return why
