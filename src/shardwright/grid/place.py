"""Where everything lies under a tensor-parallel mode, and what each layer does: refines the plan, purely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from shardwright.boxes import Range, Ranges, concat
from shardwright.errors import LayoutError, explain
from shardwright.grid.convolution import place_convolutions
from shardwright.grid.features import Features, merged, nested
from shardwright.grid.flow import Flow, Place, follow
from shardwright.grid.mode import (
    EntryNote,
    GateNote,
    HeadsNote,
    LinearNote,
    LossNote,
    Mode,
    NormNote,
    TableNote,
    gives,
    takes,
)
from shardwright.grid.multihead import MultiheadNote, place_multiheads
from shardwright.grid.overrides import overrides_of
from shardwright.grid.roles import Boundary, Layer, States, Step, sent_elements
from shardwright.models import CrossEntropy
from shardwright.models.attention import Attention
from shardwright.models.convolution_chains import CONVOLUTIONS
from shardwright.models.structure import Chain, find_head, is_exactly, owners, registered_twice
from shardwright.product.heads import head_rows, head_slices, kv_heads, query_heads
from shardwright.strategy import (
    LOSS,
    OUTPUT,
    Activation,
    Job,
    Partial,
    Plan,
    Replicate,
    Shard,
    check_samples_apart,
)
from shardwright.units import format_bytes, format_count


def sent(plan: Plan) -> float:
    """The elements that one rank sends in a step for all linear layers, as far as roles decide it."""
    return sum(note.elements for note in plan.notes.values() if isinstance(note, LinearNote | MultiheadNote))


def place(job: Job, plan: Plan, mode: Mode) -> Plan:
    """Finds what the mode can cut and cuts it. Raises LayoutError when nothing can be, naming the sizes found."""
    for axis in mode.axes:
        if axis.stream == "T":
            check_samples_apart(job.model, str(plan.layout.factor("tp")))
            plan = plan.cut_inputs(axis.name, dim=0)
    if mode.axes:
        plan = _Placing(job, mode, plan).everything()
        if not plan.notes:
            raise _nothing_to_cut(job.model, mode)
    for path, module, _, _ in owners(job.model):
        if path not in plan.roles:
            plan = plan.role(path, mode.name, "copied", f"{type(module).__name__}: every rank computes it whole")
    return plan


def place_alone(job: Job, plan: Plan, mode: Mode) -> Plan:
    """One ``nn.Linear`` as the whole model: input and output lie as between layers, but what was copied comes cut."""
    layer = job.model
    assert isinstance(layer, nn.Linear)
    for axis in mode.axes:
        if axis.stream == "T":
            plan = plan.cut_inputs(axis.name, dim=0)
    stop: States = tuple("F" if state == "C" else state for state in mode.stream)
    placing = _Placing(job, mode, plan)
    choice = mode.choose(
        (Layer(layer.in_features, layer.out_features),),
        (Boundary(0, mode.stream), Boundary(layer.out_features, stop)),
        job.num_tokens,
    )
    if choice is None:
        raise placing._too_small("", f"{layer.in_features} features to {layer.out_features}")
    (step,) = choice.steps
    placing._cut_weight("", step, placing._in(mode.stream, layer.in_features), placing._in(stop, layer.out_features))
    return placing.plan


def shared_parameters(model: nn.Module) -> set[str]:
    """The parameters with more than one use, and those of modules that two parents hold."""
    uses = Counter(name for _, _, _, name in owners(model))
    twice = registered_twice(model)
    shared = {name for _, module, _, name in owners(model) if id(module) in twice}
    return shared | {name for name, count in uses.items() if count > 1}


def own_names(model: nn.Module, path: str) -> dict[str, str]:
    """The parameters of one module: its own name for each, and the global one."""
    return {own: name for at, _, own, name in owners(model) if at == path}


@dataclass
class _Placing:
    job: Job
    mode: Mode
    plan: Plan

    def __post_init__(self) -> None:
        self.model = self.job.model
        self.overrides = overrides_of(self.job)
        self.shared = shared_parameters(self.model) | self.overrides.whole_parameters(self.model)
        self.names: dict[str, dict[str, str]] = {}
        for path, _, own, name in owners(self.model):
            self.names.setdefault(path, {})[own] = name
        self.chains = {chain.row: chain for chain in self.overrides.all_chains(self.model) if self._is_free(chain)}
        self.stream = prod(size for _, size in self.mode.feature_axes)
        self.head = self._find_head()
        self.flow = self._follow()
        if self.head is not None and not self._tokens_known(self.head):
            self.head = None
            self.flow = self._follow()

    def _tokens_known(self, head: str) -> bool:
        """Whether the tables tied to the head look up the model's own input: their tokens can be gathered."""
        rows_cut = any(axis.stream == "T" and axis.stored for axis in self.mode.axes)
        places = [self.flow.places.get(path) for path in self._users(head) - {head}]
        return not rows_cut or all(found is not None and found.from_input for found in places)

    def _is_free(self, chain: Chain) -> bool:
        layers = (*chain.columns, chain.row)
        return not any(name in self.shared for layer in layers for name in self.names[layer].values())

    def _follow(self) -> Flow:
        kept = frozenset(
            path
            for path, module in self.model.named_modules()
            if is_exactly(module, nn.Linear) and path != self.head
            if any(name in self.shared for name in self.names.get(path, {}).values())
        )
        tables = {
            path
            for path, module in self.model.named_modules()
            if is_exactly(module, nn.Embedding) and not self._may_cut_table(path)
        }
        kept |= tables | set(self.overrides.copied)
        return follow(self.model, self.stream, list(self.chains.values()), kept, self.head)

    def everything(self) -> Plan:
        """The plan with every layer that the mode can cut."""
        self._attentions()
        place_multiheads(self, self.overrides)
        for row, chain in self.chains.items():
            self._chain(chain, self.flow.places.get(row, Place("chain")))
        for path, place in self.flow.places.items():
            if path in self.plan.roles:
                continue
            if place.kind == "linear" and path != self.head:
                self._single(path, place)
            elif place.kind == "norm" and place.takes_cut:
                self._norm(path, place)
            elif place.kind == "elementwise" and place.takes_cut:
                self._cut_activation(path, Features.balanced(place.size, self.mode.feature_axes))
            elif place.kind == "gate":
                self.plan = self.plan.note(path, GateNote(tuple(self._stream(size) for size in place.sizes)))
        self.plan = place_convolutions(self.job, self.mode, self.plan, self.shared, self.head)
        self._head_and_tables()
        if self.flow.output_size:
            self.plan = self.plan.note(OUTPUT, GateNote((self._stream(self.flow.output_size),)))
        return self.overrides.explained(self.plan, self.mode.name)

    def _stream(self, size: int) -> Features | None:
        """Features as they lie between layers; none where they are whole."""
        return Features.balanced(size, self.mode.feature_axes) if size else None

    # ---- linear layers

    def _cut_weight(
        self,
        path: str,
        step: Step,
        x: Features,
        y: Features,
        *,
        enters: bool = True,
        first: bool = True,
        flows: bool = True,
    ) -> None:
        """Cuts a Linear's parameters as its roles want, and says so of its uses.

        ``enters``: it brings its input itself; ``first``: of those that share an input, it is the one that pays;
        ``flows``: a gradient flows back into its input.
        """
        names, axes = self.names[path], self.mode.axes
        roles = dict(zip((axis.name for axis in axes), step.roles, strict=True))
        rows_cut = [axis for axis in axes if roles[axis.name] == "h"]
        for axis in axes:
            if roles[axis.name] == "h":
                for own, name in names.items():
                    if own in ("weight", "bias"):
                        self._cut(name, axis.name, 0, y.along(axis.name))
            if roles[axis.name] == "k":
                self._cut(names["weight"], axis.name, 1, x.along(axis.name))
        fetches: list[str] = []
        if not y.overlaps:
            held: dict[tuple[int, ...], Sequence[Range]] = {
                (): y.held(dict.fromkeys(y.names, 0), over=y.names) or ((0, y.size),)
            }
            if rows_cut:
                coords = self.plan.mesh.coords([axis.name for axis in rows_cut])
                others = [n for n in y.names if roles[n] != "h"]
                held = {tuple(at.values()): y.held({**dict.fromkeys(y.names, 0), **at}, over=others) for at in coords}
            for axis in axes:
                if roles[axis.name] == "t" and axis.stored:
                    ranges = nested(held, axis.size)
                    self._cut(names["weight"], axis.name, 0, ranges)
                    held = {
                        (*key, i): merged(_common(ranges[i], each))
                        for key, each in held.items()
                        for i in range(axis.size)
                    }
                    fetches.append(axis.name)
        x_spec: dict[str, Any] = {}
        dy_spec: dict[str, Any] = {}
        for axis in axes:
            role = roles[axis.name]
            x_spec[axis.name] = {"t": Shard(0), "h": Replicate(), "k": Shard(-1)}[role]
            dy_spec[axis.name] = {"t": Shard(0), "h": Shard(-1), "k": Replicate()}[role]
            if role == "h" and y.overlaps:
                dy_spec[axis.name] = Partial()
        self.plan = self.plan.use(path, x=x_spec, dy=dy_spec)
        elements = sent_elements(
            Layer(x.size, y.size, flows),
            step,
            axes,
            self.job.num_tokens,
            regather=not self.mode.keep,
            with_input=first,
        )
        note = LinearNote(step, x, y, axes, enters, tuple(reversed(fetches)), elements)
        self.plan = self.plan.note(path, note)

    def _cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> None:
        if axis not in self.plan.compute[name].axes:
            self.plan = self.plan.cut(name, axis, dim, ranges)

    def _cut_activation(self, path: str, features: Features, dim: int = -1, step: Step | None = None) -> None:
        for axis in features.names:
            activation = Activation(axis, dim, features.size, features.along(axis))
            self.plan = self.plan.cut_activation(path, activation)
        if step is not None:
            self.plan = self.plan.move_rows(path, step.rows_after)

    def _in(self, states: States, size: int) -> Features:
        return Features.balanced(size, self.mode.axes_in(states, "F"))

    def _role(self, path: str, what: str, step: Step) -> None:
        names = " ".join(f"{a.name}:{role}" for a, role in zip(self.mode.axes, step.roles, strict=True))
        note = self.plan.notes[path]
        assert isinstance(note, LinearNote)
        num_bytes = note.elements * self.plan.dtypes[self.names[path]["weight"]].itemsize
        sends = f"sends {format_bytes(num_bytes)} for {format_count(self.job.num_tokens)} tokens"
        self.plan = self.plan.role(path, self.mode.name, names, f"{what}; {sends}")

    def _chain(self, chain: Chain, place: Place) -> None:
        layers = (*chain.columns, chain.row)
        if any(layer in self.plan.roles for layer in layers):
            return
        row = self.model.get_submodule(chain.row)
        first = self.model.get_submodule(chain.columns[0])
        assert isinstance(row, nn.Linear)
        assert isinstance(first, nn.Linear)
        middle, start, stop = row.in_features, self.mode.states(place.takes_cut), self.mode.states(place.gives_cut)
        flows = not place.from_input
        inner = self.mode.still if chain.row in self.overrides.still else None
        choice = self.mode.choose(
            (Layer(first.in_features, middle * len(chain.columns), flows), Layer(middle, row.out_features)),
            (Boundary(0, start), Boundary(middle, inner), Boundary(row.out_features, stop)),
            self.job.num_tokens,
        )
        if choice is None:
            for layer in layers:
                self.plan = self.plan.role(layer, "", "copied", f"{middle} features cannot be cut over {self._sizes()}")
            if place.takes_cut or place.gives_cut:
                raise self._too_small(chain.row, f"{middle} features between '{chain.columns[0]}' and it")
            return
        before, after = choice.steps
        x, mid, y = self._in(start, first.in_features), self._in(before.after, middle), self._in(stop, row.out_features)
        if chain.entry is not None:
            self.plan = self.plan.note(chain.entry, EntryNote(before, x, self.mode.axes))
            self.plan = self.plan.role(chain.entry, self.mode.name, "entry", "its layers share one input")
        for column in chain.columns:
            enters = chain.entry is None
            pays = enters or column == chain.columns[0]
            self._cut_weight(column, before, x, mid, enters=enters, first=pays, flows=flows)
            self._role(column, f"{middle} features before '{chain.row}'", before)
        self._cut_weight(chain.row, after, mid, y)
        self._role(chain.row, f"{middle} features to {row.out_features}", after)
        for between in chain.between:
            self._cut_activation(between, mid, step=before)

    def _single(self, path: str, place: Place) -> None:
        layer = self.model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        start, stop = self.mode.states(place.takes_cut), self.mode.states(place.gives_cut)
        choice = self.mode.choose(
            (Layer(layer.in_features, layer.out_features, not place.from_input),),
            (Boundary(0, start), Boundary(layer.out_features, stop)),
            self.job.num_tokens,
        )
        if choice is None:
            raise self._too_small(path, f"{layer.in_features} features to {layer.out_features}")
        (step,) = choice.steps
        x, y = self._in(start, layer.in_features), self._in(stop, layer.out_features)
        self._cut_weight(path, step, x, y, flows=not place.from_input)
        self._role(path, f"{layer.in_features} features to {layer.out_features}", step)

    # ---- attention

    def _attentions(self) -> None:
        for path, module in self.model.named_modules():
            if not is_exactly(module, Attention):
                continue
            assert isinstance(module, Attention)
            layers = [f"{path}.{own}".lstrip(".") for own in (("qkv", "o") if module.fused else ("q", "k", "v", "o"))]
            if not any(name in self.shared for layer in layers for name in self.names[layer].values()):
                self._attention(path, module, self.flow.places.get(path, Place("attention")))

    def _attention(self, path: str, attention: Attention, place: Place) -> None:
        q_width = attention.num_heads * attention.head_dim
        kv_width = attention.num_kv_heads * attention.head_dim
        hidden, out = (
            attention.qkv.in_features if attention.fused else attention.q.in_features,
            attention.o.out_features,
        )
        start, stop = self.mode.states(place.takes_cut), self.mode.states(place.gives_cut)
        layers = (Layer(hidden, q_width + 2 * kv_width, not place.from_input), Layer(q_width, out))

        def chosen(most_alone: int = 0) -> Any:
            middle = Boundary(attention.num_heads, sums=False, most_alone=most_alone)
            return self.mode.choose(layers, (Boundary(0, start), middle, Boundary(out, stop)), self.job.num_tokens)

        choice = chosen() or chosen(q_width)  # heads whole, if they can be; over one axis they may be cut inside
        if choice is None and len(self.mode.axes) == 1:
            head_slices(attention, self.mode.axes[0].size)  # says how many ranks it can use
        if choice is None:
            raise self._too_small(path, f"{attention.num_heads} heads")
        before, after = choice.steps
        axes = self.mode.axes_in(before.after, "F")
        parts = prod(size for _, size in axes)
        heads, slices = query_heads(attention, parts), head_slices(attention, parts)
        q = tuple(head_rows(attention, heads[i], slices[i]) for i in range(parts))
        kv = tuple(head_rows(attention, kv_heads(attention, heads[i]), slices[i]) for i in range(parts))
        x, y = self._in(start, hidden), self._in(stop, out)
        cuts: Mapping[str, tuple[int, Ranges]] = {"q": (q_width, q), "k": (kv_width, kv), "v": (kv_width, kv)}
        if attention.fused:
            widths = (q_width, kv_width, kv_width)
            cuts = {"qkv": (sum(widths), concat(widths, (q, kv, kv)))}
        prefix = f"{path}." if path else ""
        entry = None if attention.fused else EntryNote(before, x, self.mode.axes)
        for own, (size, ranges) in cuts.items():
            features, pays = Features(size, axes, ranges), own in ("q", "qkv")
            self._cut_weight(
                prefix + own, before, x, features, enters=attention.fused, first=pays, flows=not place.from_input
            )
            self._role(prefix + own, f"rows of the heads that '{path}' holds", before)
        self._cut_weight(f"{prefix}o", after, Features(q_width, axes, q), y)
        self._role(f"{prefix}o", "in-features of the heads held", after)
        held = Features(attention.num_heads, axes, tuple(((h[0], h[-1] + 1),) for h in heads))
        self._cut_activation(f"{prefix}attention_dropout", held, dim=1, step=before)
        inside = parts > attention.num_heads
        kv_held = Features(
            attention.num_kv_heads, axes, tuple(((k[0], k[-1] + 1),) for k in (kv_heads(attention, h) for h in heads))
        )
        note = HeadsNote(held, kv_held, heads, slices, inside, before.rows_after, entry)
        self.plan = self.plan.note(path, note)
        why = f"{attention.num_heads} heads, " + (f"in {parts} parts" if parts > 1 else "all of them for fewer samples")
        why += ": each head over several ranks, scores summed" if inside else ""
        self.plan = self.plan.role(path, self.mode.name, "inside a head" if inside else "heads", why)

    # ---- norms, tables, the head

    def _norm(self, path: str, place: Place) -> None:
        features = Features.balanced(place.size, self.mode.feature_axes)
        for name in self.names.get(path, {}).values():
            for axis in features.names:
                self._cut(name, axis, 0, features.along(axis))
        spec = {axis: Shard(-1) for axis in features.names}
        centred = is_exactly(self.model.get_submodule(path), nn.LayerNorm)
        self.plan = self.plan.use(path, x=spec, dy=spec).note(path, NormNote(features, centred))
        self.plan = self.plan.role(path, self.mode.name, "norm", f"{place.size} features, statistics combined")

    def _find_head(self) -> str | None:
        head = find_head(self.model) if type(self.job.loss) is CrossEntropy else None
        if head is None or not self.mode.axes or self.overrides.speak_of(self._users(head)):
            return None
        layer = self.model.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        tied = self._is_tied(head)
        parts = prod(axis.size for axis in self.mode.axes if axis.stored)
        if any(head in (*chain.columns, row) for row, chain in self.chains.items()) and not self.mode.feature_axes:
            return None
        if layer.out_features < max(parts, 1 if tied or self.stream > 1 else layer.in_features):
            return None
        if self._users(head) - {head} - self._tables():
            return None
        self.chains = {row: c for row, c in self.chains.items() if head not in (*c.columns, row)}
        return head

    def _is_tied(self, path: str) -> bool:
        return any(name in self.shared for name in self.names.get(path, {}).values())

    def _users(self, path: str) -> set[str]:
        mine = set(self.names.get(path, {}).values())
        return {other for other, names in self.names.items() if mine & set(names.values())}

    def _tables(self) -> set[str]:
        return {path for path, module in self.model.named_modules() if is_exactly(module, nn.Embedding)}

    def _may_cut_table(self, path: str) -> bool:
        """Whether all who use the table's rows can live with a part of them."""
        if self.overrides.speak_of(self._users(path)):
            return False
        others = self._users(path) - {path}
        twice = id(self.model.get_submodule(path)) in registered_twice(self.model)
        return not twice and others <= {self.head} if self.head is not None else not others and not twice

    def _head_and_tables(self) -> None:
        if self.head is not None:
            self._place_head(self.head)
        for path in sorted(self._tables()):
            found = self.flow.places.get(path)
            table = self.model.get_submodule(path)
            assert isinstance(table, nn.Embedding)
            tied = self.head is not None and self.head in self._users(path)
            if found is None and not tied:
                if self._may_cut_table(path) and _is_plain(table):
                    found = Place("table", False, False, table.embedding_dim, from_input=False)
                else:
                    continue
            if self._may_cut_table(path):
                self._table(path, table, found or Place("table"), tied)

    def _place_head(self, head: str) -> None:
        layer = self.model.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        place = self.flow.places.get(head, Place("linear"))
        start, tied = self.mode.states(place.takes_cut), self._is_tied(head)
        states: States | None = None
        if tied:
            states = tuple("F" if axis.stored else "T" for axis in self.mode.axes)
        choice = self.mode.choose(
            (Layer(layer.in_features, layer.out_features, not place.from_input),),
            (Boundary(0, start), Boundary(layer.out_features, states, sums=not tied, rows=False)),
            self.job.num_tokens,
            rows_end=None,
        )
        if choice is None:
            raise self._too_small(head, f"{layer.out_features} classes")
        (step,) = choice.steps
        x, y = self._in(start, layer.in_features), self._in(step.after, layer.out_features)
        self._cut_weight(head, step, x, y)
        self._role(head, f"{layer.out_features} classes; the loss takes them cut", step)
        assert isinstance(self.job.loss, CrossEntropy)
        numbers = 4 if self.job.loss.label_smoothing > 0 else 3
        gathers = tuple(g for g in takes(step, self.mode.axes, x) if g.lies == "rows")
        self.plan = self.plan.note(LOSS, LossNote(head, y, gathers, numbers))
        parts = len(y.parts)
        why = f"{layer.out_features} classes" + (f" in {parts} parts: a gather for each token" if parts > 1 else "")
        self.plan = self.plan.role(LOSS, self.mode.name, f"{'four' if numbers == 4 else 'three'} numbers", why)
        for axis in y.names:
            activation = Activation(axis, -1, y.size, y.along(axis))
            self.plan = self.plan.cut_activation(OUTPUT, activation)
        self.plan = self.plan.move_rows(OUTPUT, step.rows_after)

    def _table(self, path: str, table: nn.Embedding, place: Place, tied: bool) -> None:
        """Rows over the axes that share the table with a head, or over which the tokens are cut; features elsewhere."""
        by_rows: list[str] = []
        for axis in self.mode.axes:
            if not axis.stored:
                continue
            long = table.num_embeddings >= table.embedding_dim
            if tied or (axis.stream == "C" and long) or (axis.stream == "T" and long and place.from_input):
                by_rows.append(axis.name)
        sizes = {axis.name: axis.size for axis in self.mode.axes}
        if table.num_embeddings < prod(sizes[name] for name in by_rows):
            by_rows = []
        after = self.mode.states(place.gives_cut)
        vocabulary = Features.balanced(table.num_embeddings, [(n, sizes[n]) for n in by_rows])
        width_cut = self._in(after, table.embedding_dim)
        by_width = [name for name in width_cut.names if name not in by_rows]
        name = self.names[path]["weight"]
        for each in by_rows:
            self._cut(name, each, 0, vocabulary.along(each))
        for each in by_width:
            self._cut(name, each, 1, width_cut.along(each))
        if not by_rows and not by_width:
            return
        step = _table_step(self.mode, by_rows, by_width, after)
        spec_x = {axis: Shard(-1) for axis in by_rows}
        spec_dy: dict[str, Any] = {axis: Replicate() for axis in by_rows} | {axis: Shard(-1) for axis in by_width}
        self.plan = self.plan.use(path, x=spec_x | {axis: Replicate() for axis in by_width}, dy=spec_dy)
        gathers = tuple(g for g in takes(step, self.mode.axes, vocabulary) if g.lies == "rows")
        summed = step._replace(roles=tuple("k" if axis.name in by_rows else "t" for axis in self.mode.axes))
        sums = gives(summed, self.mode.axes, width_cut)
        note = TableNote(vocabulary, width_cut, gathers, sums, step.rows_gathered, place.from_input)
        self.plan = self.plan.note(path, note)
        what = [f"{table.num_embeddings} rows over {' '.join(by_rows)}"] if by_rows else []
        what += [f"{table.embedding_dim} features over {' '.join(by_width)}"] if by_width else []
        self.plan = self.plan.role(path, self.mode.name, "table", ", ".join(what))

    # ---- refusals

    def _sizes(self) -> str:
        return " ".join(f"{axis.name}={axis.size}" for axis in self.mode.axes)

    def _too_small(self, path: str, what: str) -> LayoutError:
        total = prod(axis.size for axis in self.mode.axes)
        return LayoutError(
            explain(
                f"'{path}' cannot be cut in this mode",
                given=f"{what}, over {self._sizes()}",
                allowed="grids whose sides are no larger than the layer's dimensions",
                fix=f"write a smaller grid, or move ranks to 'dp': dp{total}",
            )
        )


def _common(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) < min(b, d)]


def _is_plain(table: nn.Embedding) -> bool:
    plain = table.padding_idx is None and table.max_norm is None and not table.sparse
    return bool(plain and not table.scale_grad_by_freq)


def _table_step(mode: Mode, by_rows: Sequence[str], by_width: Sequence[str], after: States) -> Step:
    """The tokens of rows that the table's cut joins are gathered; its output is cut as the stream is."""
    gathers = tuple(a.name for a in reversed(mode.axes) if a.name in by_rows and a.stream == "T")
    before: States = tuple("T" if axis.stream == "T" else "C" for axis in mode.axes)
    roles = tuple("h" if a.name in (*by_rows, *by_width) else "t" for a in mode.axes)
    return Step(before, roles, after, gathers, tuple(reversed(gathers)))  # type: ignore[arg-type]


def _nothing_to_cut(model: nn.Module, mode: Mode) -> LayoutError:
    total = prod(axis.size for axis in mode.axes)
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))]
    sizes = ", ".join(f"{type(m).__name__} '{path}' {tuple(m.weight.shape)}" for path, m in layers)
    over = " ".join(f"{axis.name}={axis.size}" for axis in mode.axes)
    return LayoutError(
        explain(
            f"no layer of the model can be cut over {over}",
            given=f"{type(model).__name__} with " + (sizes or "no Linear layers"),
            allowed="Linear -> elementwise -> Linear, Conv -> norm, pool or elementwise -> Conv, attention, or an "
            "embedding or head with many rows, each of at least as many features or channels as ranks cut them",
            fix=f"write dp{total}",
        )
    )
