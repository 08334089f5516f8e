"""Attention on a grid: heads over the axes that cut features, samples over the others."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from shardwright.boxes import Ranges, concat
from shardwright.grid.features import Features
from shardwright.grid.flow import Place
from shardwright.grid.mode import EntryNote, HeadsNote
from shardwright.grid.placing import Placing
from shardwright.grid.roles import Boundary, Layer
from shardwright.models.attention import Attention
from shardwright.models.known import is_plain_attention
from shardwright.product.heads import head_rows, head_slices, kv_heads, query_heads


def place_attentions(placing: Placing) -> None:
    """Cuts every ``Attention`` that is as it was built and whose parameters are its own; ``show`` says why not."""
    for path, module in placing.model.named_modules():
        if not isinstance(module, Attention):
            continue
        if path in placing.attentions:
            _place_attention(placing, path, module, placing.flow.places.get(path, Place("attention")))
            continue
        why = "its parameters are used elsewhere too" if is_plain_attention(module) else "changed since it was built"
        why = placing.narrow.get(path, why)
        for layer in placing.names:
            if layer.startswith(f"{path}." if path else ""):
                placing.plan = placing.plan.role(layer, placing.mode.name, "copied", f"attention '{path}': {why}")


def _place_attention(placing: Placing, path: str, attention: Attention, place: Place) -> None:
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    hidden, out = (
        attention.qkv.in_features if attention.fused else attention.q.in_features,
        attention.o.out_features,
    )
    start, stop = placing.mode.states(place.takes_cut), placing.mode.states(place.gives_cut)
    layers = (Layer(hidden, q_width + 2 * kv_width, not place.from_input), Layer(q_width, out))

    def chosen(most_alone: int = 0) -> Any:
        middle = Boundary(attention.num_heads, sums=False, most_alone=most_alone)
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
    placing.plan = placing.plan.note(path, note)
    why = f"{attention.num_heads} heads, " + (f"in {parts} parts" if parts > 1 else "all of them for fewer samples")
    why += ": each head over several ranks, scores summed" if inside else ""
    placing.plan = placing.plan.role(path, placing.mode.name, "inside a head" if inside else "heads", why)
