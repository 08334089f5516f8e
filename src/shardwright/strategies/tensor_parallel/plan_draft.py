"""The plan while a tensor-parallel mode refines it: facts about the model, and methods that cut a layer's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from torch import nn

from shardwright.analysis.model_graph import RecordedRun
from shardwright.analysis.traced.known_modules import attention_layers, is_plain_attention
from shardwright.analysis.traced.structure import LayerChain, find_head, is_exactly, is_known, owners, registered_twice
from shardwright.errors import GridError
from shardwright.forward_stack import Rung
from shardwright.models.attention import Attention
from shardwright.models.losses import CrossEntropy
from shardwright.plan.layer_overrides import overrides_of
from shardwright.plan.plan import ActivationCut, Job, Plan
from shardwright.sharding.box import Ranges
from shardwright.strategies.tensor_parallel.feature_flow import Flow, follow, not_to_cut
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.roles import RoleStep, States


def shared_parameters(model: nn.Module) -> set[str]:
    """Returns the names of parameters that several modules use, and of those in modules that are registered twice."""
    uses = Counter(name for _, _, _, name in owners(model))
    twice = registered_twice(model)
    shared = {name for _, module, _, name in owners(model) if id(module) in twice}
    return shared | {name for name, count in uses.items() if count > 1}


def own_names(model: nn.Module, path: str) -> dict[str, str]:
    """Returns the parameters of the module at ``path``: for each name inside the module, the name in the model."""
    return {own: name for at, _, own, name in owners(model) if at == path}


def recorded_run(job: Job) -> RecordedRun | None:
    """Returns the record of the model's forward; None without an example, or for a forward that cannot be recorded."""
    try:
        return None if job.graph is None else job.graph.run
    except Exception:  # recording runs the user's forward on tensors without values, and that may raise anything
        return None


def record_of_own_code(job: Job) -> RecordedRun | None:
    """Returns :func:`recorded_run` of a model with code of its own; None if all layers are torch's or the library's."""
    return None if all(map(is_known, job.model.modules())) else recorded_run(job)


@dataclass
class PlanDraft:
    """The plan of one model under one tensor-parallel mode, which each ``place_*`` function refines in turn.

    ``names`` gives each parameter's name in the model, by module path and by its name in the module; ``shared`` are the
    parameters that stay whole, because they have several users or the user asked for it. ``chains`` are the pairs of
    column- and row-parallel layers, by the row-parallel one; ``head`` is the layer whose output the loss takes cut by
    classes; ``flow`` says where features stay cut between layers, in ``parts`` parts.
    """

    job: Job
    mode: Mode
    plan: Plan
    narrow: Mapping[str, str] = field(default_factory=dict)
    """The layers that are too small for the grid and stay whole, with the reason that ``show`` prints."""

    def __post_init__(self) -> None:
        self.model = self.job.model
        self.overrides = overrides_of(self.job)
        self.shared = shared_parameters(self.model) | self.overrides.whole_parameters(self.model)
        self.names: dict[str, dict[str, str]] = {}
        for path, _, own, name in owners(self.model):
            self.names.setdefault(path, {})[own] = name
        self.rows_elsewhere = self._rows_elsewhere()
        self.chains = {chain.row: chain for chain in self.overrides.all_chains(self.model) if self._is_free(chain)}
        self.attentions = frozenset(self._attentions())
        self.parts = prod(size for _, size in self.mode.feature_axes)
        self.head = self._find_head()
        self.flow = self._follow()
        if self.head is not None and not self._can_gather_tokens(self.head):
            self.head = None
            self.flow = self._follow()

    def role(self, path: str, name: str, why: str) -> None:
        """Adds to the plan a layer's role (such as column-parallel or copied) and the reason, which ``show`` prints."""
        self.plan = self.plan.role(path, self.mode.name, name, why)

    def note(self, path: str, note: object, rung: Rung = Rung.OPERATOR) -> None:
        """Adds to the plan how a module is cut, from which ``apply`` makes its forward and ``traffic`` its collectives.

        ``rung`` is the place of the new forward among the wrappers of the module.
        """
        self.plan = self.plan.note(path, note, by=self.mode.name, rung=rung)

    def _can_gather_tokens(self, head: str) -> bool:
        """Returns whether tables tied to the head look up the model's own input, whose tokens can be all-gathered."""
        rows_cut = any(axis.stream == "T" and axis.stored for axis in self.mode.axes)
        uses = [self.flow.uses.get(path) for path in self.users(head) - {head}]
        return not rows_cut or all(use is not None and use.from_input for use in uses)

    def _rows_elsewhere(self) -> frozenset[str]:
        """Returns the layers that code calls with its samples elsewhere than in dim 0, if the mode cuts samples.

        What gathers or cuts rows takes them from dim 0, so these layers may gather their weights alone.
        """
        cuts_samples = bool(self.mode.row_axes) and self.mode.dim == 0
        run = record_of_own_code(self.job) if cuts_samples else None
        return frozenset() if run is None else frozenset(run.without_samples_first)

    def stays_still(self, chain: LayerChain) -> bool:
        """Returns whether samples must not be gathered or scattered between column- and row-parallel layers."""
        layers = {*chain.columns, chain.row}
        return chain.row in self.overrides.still or not self.rows_elsewhere.isdisjoint(layers)

    def _attentions(self) -> Iterator[str]:
        """Yields the paths of ``Attention`` modules that may be cut: unmodified, with parameters of their own."""
        for path, module in self.model.named_modules():
            if isinstance(module, Attention) and is_plain_attention(module) and path not in self.narrow:
                layers = [f"{path}.{own}".lstrip(".") for own in attention_layers(module)]
                if not any(map(self.is_tied, layers)):
                    yield path

    def _is_free(self, chain: LayerChain) -> bool:
        return chain.row not in self.narrow and not any(map(self.is_tied, (*chain.columns, chain.row)))

    def _follow(self) -> Flow:
        kept = {*self.narrow, *self.overrides.copied}
        for path, module in self.model.named_modules():
            tied = is_exactly(module, nn.Linear) and path != self.head and self.is_tied(path)
            whole_table = is_exactly(module, nn.Embedding) and not self.may_cut_table(path)
            if tied or whole_table or (isinstance(module, Attention) and path not in self.attentions):
                kept.add(path)
        return follow(self.model, self.parts, list(self.chains.values()), frozenset(kept), self.head)

    def stream_of(self, size: int) -> Features | None:
        """Returns the cut of ``size`` features between layers; None for 0, which stands for whole features."""
        return Features.balanced(size, self.mode.feature_axes) if size else None

    def cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> None:
        """Plans that index i of ``axis`` holds ``ranges[i]`` of dim ``dim`` of the parameter ``name``.

        It does nothing if the axis cuts the parameter already, as for another layer that shares it.
        """
        if axis not in self.plan.compute[name].axes:
            self.plan = self.plan.cut(name, axis, dim, ranges)

    def cut_activation(self, path: str, features: Features, dim: int = -1, step: RoleStep | None = None) -> None:
        """Records in the plan which slice of a module's input each rank holds.

        Dropout reads it to draw the number of each element by the element's place in the whole tensor.

        ``features`` is the cut of its dim ``dim``. With ``step`` its rows are those after that layer's output.
        """
        for axis in features.names:
            activation = ActivationCut(axis, dim, features.size, features.along(axis))
            self.plan = self.plan.cut_activation(path, activation)
        if step is not None:
            self.plan = self.plan.move_rows(path, step.rows_after)

    def features_in(self, states: States, size: int) -> Features:
        """Returns ``size`` features cut evenly over the axes on which ``states`` has F (features cut)."""
        return Features.balanced(size, self.mode.axes_in(states, "F"))

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
        if layer.out_features < max(parts, 1 if tied or self.parts > 1 else layer.in_features):
            return None
        if self.users(head) - {head} - self.tables():
            return None
        self.chains = {row: c for row, c in self.chains.items() if head not in (*c.columns, row)}
        return head

    def is_tied(self, path: str) -> bool:
        """Returns whether a parameter of the module at ``path`` has several users or is to stay whole by request."""
        return any(name in self.shared for name in self.names.get(path, {}).values())

    def users(self, path: str) -> set[str]:
        """Returns the paths of all modules that use a parameter of the module at ``path``, that one included.

        The set is empty if the module has no parameters of its own.
        """
        mine = set(self.names.get(path, {}).values())
        return {other for other, names in self.names.items() if mine & set(names.values())}

    def tables(self) -> set[str]:
        """Returns the paths of the model's unmodified ``nn.Embedding`` modules that no option forbids to cut."""
        return {
            path
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and is_exactly(module, nn.Embedding) and not not_to_cut(module)
        }

    def may_cut_table(self, path: str) -> bool:
        """Returns whether the embedding table at ``path`` may be cut.

        It may not if a module other than the output head uses it too, if it is registered twice, if the user gave a
        role, such as "copied", to a module that uses it, or if rows would be gathered from another dim than the first.
        """
        if self.overrides.speak_of(self.users(path)) or path in self.rows_elsewhere:
            return False
        others = self.users(path) - {path}
        twice = id(self.model.get_submodule(path)) in registered_twice(self.model)
        return not twice and others <= {self.head} if self.head is not None else not others and not twice

    def sizes(self) -> str:
        """Returns the sizes of the grid's axes as text: ``row=2 col=2``."""
        return " ".join(f"{axis.name}={axis.size}" for axis in self.mode.axes)

    def too_small(self, path: str, what: str) -> GridError:
        """Returns the error, for the caller to raise, that the layer at ``path`` is smaller than the grid of ranks.

        ``what`` gives the layer's sizes in words.
        """
        total = prod(axis.size for axis in self.mode.axes)
        return GridError(
            f"'{path or 'the model'}' cannot be cut in this mode",
            given=f"{what}, over {self.sizes()}",
            allowed="grids whose sides are no larger than the layer's dimensions",
            fix=f"write a smaller grid, or dp{total}",
            path=path,
        )
