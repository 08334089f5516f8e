"""The plan in the making: what a mode has found out about a model, and how a layer's weights are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from shardwright.analysis.known_modules import attention_layers, is_plain_attention
from shardwright.analysis.structure import LayerChain, find_head, is_exactly, owners, registered_twice
from shardwright.errors import GridError
from shardwright.formatting import format_bytes, format_count
from shardwright.models import CrossEntropy
from shardwright.models.attention import Attention
from shardwright.plan.layer_overrides import overrides_of
from shardwright.plan.plan import ActivationCut, Job, Partial, Plan, Replicate, Shard
from shardwright.sharding.box import Range, Ranges
from shardwright.strategies.tensor_parallel.feature_flow import Flow, follow, not_to_cut
from shardwright.strategies.tensor_parallel.features import Features, common, merged, nested
from shardwright.strategies.tensor_parallel.mode import LinearNote, Mode
from shardwright.strategies.tensor_parallel.roles import Layer, RoleStep, States, sent_elements


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
class PlanDraft:
    """A model on its way onto a grid: ``plan`` is replaced by a finer one, step by step.

    ``chains`` are the pairs of layers found, by their last layer; ``head`` the layer whose classes the loss takes cut;
    ``flow`` says where features stay cut between layers.
    """

    job: Job
    mode: Mode
    plan: Plan
    narrow: Mapping[str, str] = field(default_factory=dict)
    """Layers that turned out to be smaller than the grid, and why: they stay whole."""

    def __post_init__(self) -> None:
        self.model = self.job.model
        self.overrides = overrides_of(self.job)
        self.shared = shared_parameters(self.model) | self.overrides.whole_parameters(self.model)
        self.names: dict[str, dict[str, str]] = {}
        for path, _, own, name in owners(self.model):
            self.names.setdefault(path, {})[own] = name
        self.chains = {chain.row: chain for chain in self.overrides.all_chains(self.model) if self._is_free(chain)}
        self.attentions = frozenset(self._attentions())
        self.stream = prod(size for _, size in self.mode.feature_axes)
        self.head = self._find_head()
        self.flow = self._follow()
        if self.head is not None and not self._tokens_known(self.head):
            self.head = None
            self.flow = self._follow()

    def _tokens_known(self, head: str) -> bool:
        """Whether the tables tied to the head look up the model's own input: their tokens can be gathered."""
        rows_cut = any(axis.stream == "T" and axis.stored for axis in self.mode.axes)
        places = [self.flow.places.get(path) for path in self.users(head) - {head}]
        return not rows_cut or all(found is not None and found.from_input for found in places)

    def _attentions(self) -> Iterator[str]:
        """The attentions of ours that may be cut: as they were built, their layers their own."""
        for path, module in self.model.named_modules():
            if isinstance(module, Attention) and is_plain_attention(module) and path not in self.narrow:
                layers = [f"{path}.{own}".lstrip(".") for own in attention_layers(module)]
                if not any(name in self.shared for layer in layers for name in self.names[layer].values()):
                    yield path

    def _is_free(self, chain: LayerChain) -> bool:
        layers = (*chain.columns, chain.row)
        if chain.row in self.narrow:
            return False
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
            if is_exactly(module, nn.Embedding) and not self.may_cut_table(path)
        }
        kept |= {path for path, module in self.model.named_modules() if isinstance(module, Attention)} - self.attentions
        kept |= set(self.narrow) | tables | set(self.overrides.copied)
        return follow(self.model, self.stream, list(self.chains.values()), kept, self.head)

    def stream_of(self, size: int) -> Features | None:
        """Features as they lie between layers; none where they are whole."""
        return Features.balanced(size, self.mode.feature_axes) if size else None

    def cut_weight(
        self,
        path: str,
        step: RoleStep,
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
        for axis in axes:
            if roles[axis.name] == "h":
                for own, name in names.items():
                    if own in ("weight", "bias"):
                        self.cut(name, axis.name, 0, y.along(axis.name))
            if roles[axis.name] == "k":
                self.cut(names["weight"], axis.name, 1, x.along(axis.name))
        fetches = [] if y.overlaps else self._store_apart(names["weight"], y, roles)
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
        self.plan = self.plan.note(path, note, by=self.mode.name)

    def _store_apart(self, name: str, y: Features, roles: Mapping[str, str]) -> list[str]:
        """Cuts a weight's rows over the axes that only store it so; those are what it is fetched over, in order."""
        fetches: list[str] = []
        coords = self.plan.mesh.coords([axis for axis, role in roles.items() if role == "h"])
        others = [n for n in y.names if roles[n] != "h"]
        held: dict[tuple[int, ...], Sequence[Range]] = {
            tuple(at.values()): y.held({**dict.fromkeys(y.names, 0), **at}, over=others) for at in coords
        }
        for axis in self.mode.axes:
            if roles[axis.name] == "t" and axis.stored:
                ranges = nested(held, axis.size)
                self.cut(name, axis.name, 0, ranges)
                held = {
                    (*key, i): merged(common(ranges[i], each)) for key, each in held.items() for i in range(axis.size)
                }
                fetches.append(axis.name)
        return fetches

    def cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> None:
        """Cuts a parameter over an axis; one that shares it may have done so already."""
        if axis not in self.plan.compute[name].axes:
            self.plan = self.plan.cut(name, axis, dim, ranges)

    def cut_activation(self, path: str, features: Features, dim: int = -1, step: RoleStep | None = None) -> None:
        """Notes which features, and after ``step`` whose samples, a module sees: random layers ask."""
        for axis in features.names:
            activation = ActivationCut(axis, dim, features.size, features.along(axis))
            self.plan = self.plan.cut_activation(path, activation)
        if step is not None:
            self.plan = self.plan.move_rows(path, step.rows_after)

    def features_in(self, states: States, size: int) -> Features:
        """So many features as they lie in these states: balanced over the axes that cut features."""
        return Features.balanced(size, self.mode.axes_in(states, "F"))

    def note_role(self, path: str, what: str, step: RoleStep) -> None:
        """Tells ``show`` what a layer does on each axis, why, and what it sends."""
        names = " ".join(f"{a.name}:{role}" for a, role in zip(self.mode.axes, step.roles, strict=True))
        note = self.plan.notes[path]
        assert isinstance(note, LinearNote)
        num_bytes = note.elements * self.plan.compute_dtypes[self.names[path]["weight"]].itemsize
        sends = f"sends {format_bytes(num_bytes)} for {format_count(self.job.num_tokens)} tokens"
        self.plan = self.plan.role(path, self.mode.name, names, f"{what}; {sends}")

    def _find_head(self) -> str | None:
        head = find_head(self.model) if is_exactly(self.job.loss, CrossEntropy) else None
        if head is None or head in self.narrow or not self.mode.axes or self.overrides.speak_of(self.users(head)):
            return None
        layer = self.model.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        tied = self.is_tied(head)
        parts = prod(axis.size for axis in self.mode.axes if axis.stored)
        if any(head in (*chain.columns, row) for row, chain in self.chains.items()) and not self.mode.feature_axes:
            return None
        if layer.out_features < max(parts, 1 if tied or self.stream > 1 else layer.in_features):
            return None
        if self.users(head) - {head} - self.tables():
            return None
        self.chains = {row: c for row, c in self.chains.items() if head not in (*c.columns, row)}
        return head

    def is_tied(self, path: str) -> bool:
        """Whether another module uses a parameter of this one."""
        return any(name in self.shared for name in self.names.get(path, {}).values())

    def users(self, path: str) -> set[str]:
        """The modules that use a parameter of this one, itself among them."""
        mine = set(self.names.get(path, {}).values())
        return {other for other, names in self.names.items() if mine & set(names.values())}

    def tables(self) -> set[str]:
        """The embeddings of the model, but for those that do what a part of them could not."""
        return {
            path
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and is_exactly(module, nn.Embedding) and not not_to_cut(module)
        }

    def may_cut_table(self, path: str) -> bool:
        """Whether all who use the table's rows can live with a part of them."""
        if self.overrides.speak_of(self.users(path)):
            return False
        others = self.users(path) - {path}
        twice = id(self.model.get_submodule(path)) in registered_twice(self.model)
        return not twice and others <= {self.head} if self.head is not None else not others and not twice

    def sizes(self) -> str:
        """The grid in words."""
        return " ".join(f"{axis.name}={axis.size}" for axis in self.mode.axes)

    def too_small(self, path: str, what: str) -> GridError:
        """What to raise for a layer that is smaller than the grid."""
        total = prod(axis.size for axis in self.mode.axes)
        return GridError(
            f"'{path or 'the model'}' cannot be cut in this mode",
            given=f"{what}, over {self.sizes()}",
            allowed="grids whose sides are no larger than the layer's dimensions",
            fix=f"write a smaller grid, or dp{total}",
            path=path,
        )
