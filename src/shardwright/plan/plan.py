"""The ``Plan``: the layout of every tensor of a model, and how every layer is treated, under one layout line.

Each strategy's ``place`` takes a plan and returns a refined one, on the meta device and equally on every rank, so every
LayoutError is raised before the first message. ``apply``, ``traffic``, gradient sync, the ledger, checkpoints,
``verify`` and ``show`` then read the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.traced.batch_norms import batch_norms, derived_batch_norms, uses_batch
from shardwright.analysis.traced.callers import AllowedCallers
from shardwright.analysis.traced.structure import owners
from shardwright.axes import mesh_axes
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError
from shardwright.forward_stack import SEVERAL, Rung
from shardwright.layout import Layout
from shardwright.mesh import Coord, Mesh
from shardwright.operators.split_backward import DeferredGradients
from shardwright.plan.batch_shard import BatchShard, RowMoves
from shardwright.plan.event_stages import EventStages
from shardwright.plan.param_groups import ParamGroup, split_into_param_groups
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.rng import DimSlice, RngTracker
from shardwright.sharding.box import Ranges
from shardwright.sharding.tensor_layout import TensorLayout

# ---- the layout of a tensor along one axis


@dataclass(frozen=True)
class Shard:
    """A tensor's layout along one axis: cut along ``dim`` (-1: the last), with one part on each index of the axis."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """A tensor's layout along one axis: replicated, with the whole tensor on each index of the axis."""


@dataclass(frozen=True)
class Partial:
    """A tensor's layout along one axis: each index of the axis holds one term of a sum, which is the tensor."""


Spec = Mapping[str, Shard | Replicate | Partial]
"""The layout of an activation by axis; an axis that is left out means ``Replicate``."""


class ParameterUse(NamedTuple):
    """One module's use of a parameter, with the layouts of the module's input ``x`` and output gradient ``dy``.

    Gradient sync is derived from the uses: see :mod:`shardwright.plan.traffic`.
    """

    parameter: str
    module: str
    x: Spec
    dy: Spec

    def partial_axes(self) -> frozenset[str]:
        """Returns the axes along which this use gives each rank only a partial sum of the parameter's gradient.

        A weight's gradient sums over all dims of the input and of the output gradient except the last, the features.
        So these are the axes that cut one of the summed dims, or along which one of the two is itself a partial sum.
        """
        return frozenset(
            axis
            for spec in (self.x, self.dy)
            for axis, layout in spec.items()
            if isinstance(layout, Partial) or (isinstance(layout, Shard) and layout.dim != -1)
        )


class LayerRole(NamedTuple):
    """The role, such as column-parallel, that a strategy gives a module, and the reason, which ``show`` prints."""

    name: str
    strategy: str
    why: str


NUM_TOKENS = 4096
"""The assumed number of tokens in a microbatch when the caller gives none: it weighs activations against weights."""


def compute_dtype(dtype: torch.dtype, layout: Layout) -> torch.dtype:
    """Returns the dtype in which tensors of ``dtype`` take part in computation.

    For floating-point tensors it is bfloat16 or float16 if the layout asks for ``bf16`` or ``fp16``; otherwise it is
    ``dtype``.
    """
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrow.get(layout.precision, dtype) if dtype.is_floating_point else dtype


class ForwardFrame(Protocol):
    """The code that strategies run around the model's whole forward, in a form that pipeline stages call by chunk.

    A stage never calls the model's own forward, so hooks on the model would not run there.
    """

    def within(self, inputs: Any) -> AbstractContextManager[Any]:
        """Returns a context for one forward, which yields the model's inputs as its modules take them (sharded)."""
        ...

    def give(self, output: Any) -> Any:
        """Converts the output of the last module to the output that callers of the model expect, and returns it."""
        ...

    def calls(self, used: Collection[str], read: Collection[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns a context for the module calls of one chunk; it yields replacements of weights, by name.

        Inside the context these are used in place of the model's own weights. ``used`` names the weights that the chunk
        uses, and ``read`` those that code between modules reads.
        """
        ...

    def repeat(self, path: str, times: int, total: int) -> None:
        """Counts a module's calls in this forward that earlier chunks have made: ``times`` of ``total``.

        ``path`` is the module's name.
        """
        ...

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores this object's present state in the forward, for recomputing a block."""
        ...


class Job(NamedTuple):
    """The input of a strategy: a plain model, its loss, and the options of ``parallelize`` that describe both.

    Args:
        model: the plain model; on the meta device while planning, and this rank's part of it in ``apply``.
        loss: called as ``loss(output, targets)``; returns (sum, count).
        num_tokens: the number of tokens in one microbatch of one model copy. A wrong number costs speed, never the
            result.
        num_samples: the number of samples in the smallest microbatch, if samples are sequences; with too few, sequences
            are cut instead of the batch.
        roles: the roles that the caller gave to single layers, by patterns of names.
        example: the inputs of one microbatch of one model copy, for counting costs: on the meta device, or on the CPU
            while planning a model whose code reads their values.
        graph: a recorded run of the plain model, from which its operators are known; None without an example.
        stages: the modules at which pipeline stages begin, if the caller put parts of the model on several devices.
        seconds: forward times by module, measured or predicted for a cluster.
        cluster: the cluster for which ``tpN/auto`` chooses; without one the mode that sends the fewest bytes is chosen.
        offload_folder: the folder for the files of offloaded state.
        recorded: whether stages are cut by a recorded forward, because the model's code cannot be traced.
        stands_for: in a rehearsal on the meta device, the type of the accelerator that it stands for, such as "cuda".

    The other fields are set on each rank before ``apply``: ``batch_shard`` (this rank's samples and tokens),
    ``deferred`` (weight gradients to compute later), ``rng`` (the RNG tracker), and ``frame`` (the
    :class:`ForwardFrame` of the strategy applied before).
    """

    model: nn.Module
    loss: nn.Module
    num_tokens: int = NUM_TOKENS
    num_samples: int | None = None
    roles: Mapping[str, str] = MappingProxyType({})
    example: Any = None
    graph: ModelGraph | None = None
    stages: tuple[str, ...] = ()
    seconds: Mapping[str, float] = MappingProxyType({})
    cluster: Cluster | None = None
    offload_folder: Path | None = None
    recorded: bool = False
    stands_for: str = ""
    batch_shard: BatchShard | None = None
    deferred: DeferredGradients | None = None
    rng: RngTracker | None = None
    frame: ForwardFrame | None = None


class OperatorWork(NamedTuple):
    """The FLOPs of one matrix product, convolution or attention of the forward, and the axes that divide them.

    ``module`` is the name of the module that calls the operator. An axis divides the FLOPs if it cuts a weight of the
    operator. An operator without a weight, such as attention, is divided by the axes that cut a dim of its operands or
    results together with a dim of some weight.
    """

    module: str
    flops: int
    axes: frozenset[str]


INPUT = "(input)"
"""The name that stands for the model's input in ``Plan.roles``."""

LOSS = "(loss)"
"""The name that stands for the loss in ``Plan.roles`` and ``Plan.notes``."""

OUTPUT = "(output)"
"""The name that stands for the model's output in ``Plan.activations``, ``Plan.row_moves`` and ``Plan.notes``."""


@dataclass(frozen=True)
class ActivationCut:
    """One sharded dim of an activation: index i of ``axis`` holds ``ranges[i]`` of the dim's ``size`` elements."""

    axis: str
    dim: int
    size: int
    ranges: Ranges


@dataclass(frozen=True)
class StateLayout:
    """The layouts in which a parameter, its gradient and its optimizer state are stored between steps."""

    parameter: TensorLayout
    gradient: TensorLayout
    optimizer: TensorLayout


@dataclass(frozen=True)
class Plan:
    """The layout of every tensor of a model, and how every layer is treated, as strategies have decided it.

    A plan is immutable; its methods return refined copies.
    """

    layout: Layout
    mesh: Mesh
    compute: Mapping[str, TensorLayout]
    """The layout of each parameter in computation: the shard that operators on each rank read."""
    state: Mapping[str, StateLayout]
    """The layouts of each parameter, its gradient and its optimizer state at rest, between steps."""
    uses: tuple[ParameterUse, ...]
    """All uses of parameters by modules, from which gradient sync is derived."""
    inputs: Mapping[str, int]
    """The dim of the model's input that each axis cuts: 0 samples, 1 tokens, 2 picture rows."""
    param_groups: tuple[ParamGroup, ...]
    """The blocks of parameters that are unsharded, reduced and updated together."""
    loss_axes: frozenset[str] = frozenset()
    """The axes over which the loss is summed."""
    schedule: Schedule | None = None
    """The pipeline schedule; None without a pipeline."""
    stages: Stages | EventStages | None = None
    """The model cut into the schedule's chunks; None without a pipeline."""
    scatters: bool = False
    """Whether ranks that hold the same value to send to another pipeline stage each send only a part of it."""
    roles: Mapping[str, LayerRole] = field(default_factory=dict)
    """The role of each module that a strategy gave one, by name; also of the model's input and of the loss."""
    activations: Mapping[str, tuple[ActivationCut, ...]] = field(default_factory=dict)
    """The sharded dims of each module's input, by the module's name, and those of the model's output."""
    frozen: frozenset[str] = frozenset()
    """The parameters that are not trained."""
    compute_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each parameter in computation."""
    stored_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each parameter in storage: with mixed precision, that of its master weights."""
    fp32_sums: frozenset[str] = frozenset()
    """The parameters whose gradients are summed in their stored dtype (fp32), not in the narrower compute dtype."""
    unsharded_on_use: frozenset[str] = frozenset()
    """The parameters that are unsharded before use and resharded after (ZeRO-3); all others stay unsharded."""
    offloaded: Mapping[str, str] = field(default_factory=dict)
    """The place where the state of each offloaded parameter is stored: ``host`` or ``disk``."""
    row_moves: Mapping[str, RowMoves] = field(default_factory=dict)
    """The gathers and cuts of rows (samples or tokens) between the model's input and each module, for dropout."""
    token_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The dims of tokens in a module's input, for modules whose tokens are not in dim 1 alone (attention weights)."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """A strategy's note on each module, which its ``place`` writes for its ``apply`` and ``traffic``."""
    noted_by: Mapping[str, str] = field(default_factory=dict)
    """The name of the strategy that wrote the note on each module."""
    statistics: tuple[str, ...] = ()
    """The modules with batch statistics (BatchNorm), which are combined over all axes that cut the samples."""
    buffers: Mapping[str, TensorLayout] = field(default_factory=dict)
    """The layouts of sharded buffers; every rank holds a copy of all others."""
    recomputed: tuple[str, ...] = ()
    """The modules under activation checkpointing, by name."""
    compiled: tuple[str, ...] = ()
    """The modules whose forward is compiled, by name; modules inside of them are compiled with them."""
    offloaded_activations: tuple[str, ...] = ()
    """The modules under activation offload, by name."""
    allowed_callers: Mapping[str, AllowedCallers] = field(default_factory=dict)
    """By module with sharded inputs or outputs, the callers that were analyzed; a call by other code is an error."""
    work: tuple[OperatorWork, ...] = ()
    """The FLOPs of each operator of the forward, if its operators were recorded; see :func:`operator_work`."""
    reads_values: bool = False
    """Whether the model's code reads values of its inputs, so that steps are rehearsed with those of the batch."""
    wrapped: Mapping[str, Mapping[Rung, tuple[str, ...]]] = field(default_factory=dict)
    """The strategies (or "core") that will put a wrapper on a module's forward, by module and rung."""

    @staticmethod
    def of(job: Job, layout: Layout) -> Plan:
        """Returns the plan before any strategy has refined it: every rank holds a copy of everything."""
        shapes = {name: tuple(p.shape) for name, p in job.model.named_parameters()}
        compute = {name: TensorLayout.whole(shape) for name, shape in shapes.items()}
        state = {name: StateLayout(whole, whole, whole) for name, whole in compute.items()}
        uses = tuple(ParameterUse(name, path, {}, {}) for path, _, _, name in owners(job.model))
        stored = {name: p.dtype for name, p in job.model.named_parameters()}
        dtypes = {name: compute_dtype(dtype, layout) for name, dtype in stored.items()}
        frozen = frozenset(name for name, p in job.model.named_parameters() if not p.requires_grad)
        norms = (*batch_norms(job.model), *derived_batch_norms(job.model))
        statistics = tuple(path for path, module in norms if uses_batch(module))
        return Plan(
            layout, layout.mesh, compute, state, uses, {}, split_into_param_groups(job.model), frozen=frozen,
            compute_dtypes=dtypes, stored_dtypes=stored, statistics=statistics,
        )  # fmt: skip

    @cached_property
    def partial_axes(self) -> Mapping[str, frozenset[str]]:
        """By parameter, the axes along which any of its uses gives each rank only a partial sum of the gradient."""
        axes_by_name: dict[str, set[str]] = {}
        for use in self.uses:
            axes_by_name.setdefault(use.parameter, set()).update(use.partial_axes())
        return {name: frozenset(axes) for name, axes in axes_by_name.items()}

    def cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> Plan:
        """Returns the plan with a parameter sharded along ``dim``: index i of ``axis`` holds ``ranges[i]`` of it.

        The cut holds for computation, and for the stored parameter, gradient and optimizer state.
        """
        cut = self.compute[name].cut(axis, dim, ranges)
        state = {**self.state, name: StateLayout(cut, cut, cut)}
        return replace(self, compute={**self.compute, name: cut}, state=state)

    def cut_buffer(self, name: str, size: int, axis: str, ranges: Ranges) -> Plan:
        """Returns the plan with a 1-D buffer of ``size`` elements sharded: index i of ``axis`` holds ``ranges[i]``."""
        cut = self.buffers.get(name, TensorLayout.whole((size,))).cut(axis, 0, ranges)
        return replace(self, buffers={**self.buffers, name: cut})

    def cut_inputs(self, axis: str, dim: int) -> Plan:
        """Returns the plan with the batch and all activations sharded along ``dim`` over ``axis``.

        ``dim`` is 0 for samples, 1 for tokens, 2 for picture rows. Gradients of parameters, and the loss, are then
        partial sums over ``axis``.
        """
        uses = tuple(u._replace(x={**u.x, axis: Shard(dim)}, dy={**u.dy, axis: Shard(dim)}) for u in self.uses)
        return replace(self, uses=uses, inputs={**self.inputs, axis: dim}, loss_axes=self.loss_axes | {axis})

    def use(self, module: str, x: Spec | None = None, dy: Spec | None = None) -> Plan:
        """Returns the plan with a module's new layouts: of its input ``x``, and of its output gradient ``dy``."""
        uses = [*self.uses]
        for place in (i for i, u in enumerate(uses) if u.module == module):
            own = uses[place]
            uses[place] = own._replace(x={**own.x, **(x or {})}, dy={**own.dy, **(dy or {})})
        return replace(self, uses=tuple(uses))

    def role(self, module: str, strategy: str, name: str, why: str) -> Plan:
        """Returns the plan with a note of how ``strategy`` parallelizes a module, such as "column" or "copied".

        ``name`` is that word, the module's role, and ``why`` is the reason, which ``show`` prints.
        """
        return replace(self, roles={**self.roles, module: LayerRole(name, strategy, why)})

    def cut_activation(self, module: str, activation: ActivationCut) -> Plan:
        """Returns the plan with the sharding of a module's input noted, for dropout.

        Dropout keys its random numbers by an element's place in the whole tensor, so that they do not depend on the
        layout.
        """
        return replace(self, activations={**self.activations, module: (*self.activations.get(module, ()), activation)})

    def batch_shard(self, coord: Coord) -> BatchShard:
        """Returns the :class:`BatchShard` of the rank at ``coord``: its samples and tokens of each global batch."""
        return BatchShard(self.mesh, self.row_axes, coord, token_axes=self.token_axes)

    def move_rows(self, module: str, rows: RowMoves) -> Plan:
        """Returns the plan with the gathers and cuts of rows (samples or tokens) before a module noted, for dropout.

        ``rows`` are the gathers and cuts since the model's input; if there are none, the plan itself is returned.
        Dropout keys its random numbers by sample and token.
        """
        return replace(self, row_moves={**self.row_moves, module: rows}) if rows else self

    def see_tokens(self, module: str, dims: tuple[int, ...]) -> Plan:
        """Returns the plan with ``dims`` noted as the token dims of a module's input; only the first may be cut."""
        return replace(self, token_dims={**self.token_dims, module: dims})

    def note(self, module: str, note: Any, *, by: str, rung: Rung = Rung.OPERATOR) -> Plan:
        """Returns the plan with ``note``, data on a module that strategy ``by`` reads in its ``apply`` and ``traffic``.

        It also reserves ``rung``, one of the fixed places for wrappers of a module's forward, for the strategy.

        Raises: LayoutError: another strategy has a note on the module, or has reserved a rung that takes one wrapper.
        """
        plan = self.wraps(module, rung, by)
        other = plan.noted_by.get(module, by)
        if other != by:
            raise _taken(self.layout, module, "the note", other, by)
        return replace(plan, notes={**plan.notes, module: note}, noted_by={**plan.noted_by, module: by})

    def without_note(self, module: str) -> Plan:
        """Returns the plan without the note under ``module``, and without any wrappers reserved there.

        It is for a temporary name under which a strategy planned a part of a module, and which names no real module.
        """
        notes, noted_by, wrapped = dict(self.notes), dict(self.noted_by), dict(self.wrapped)
        for kept in (notes, noted_by, wrapped):
            kept.pop(module, None)
        return replace(self, notes=notes, noted_by=noted_by, wrapped=wrapped)

    def wraps(self, module: str, rung: Rung, by: str) -> Plan:
        """Returns the plan with a place for a wrapper of a module's forward reserved for ``by``, a strategy or "core".

        ``rung`` is the place: its position in the fixed order of the wrappers of a forward.

        Raises: LayoutError: another strategy has reserved the place, and it is one that takes only one wrapper.

        >>> plan = Plan.of(Job(nn.Linear(2, 4), nn.Identity()), Layout.parse("tp2"))
        >>> plan.wraps("", Rung.OPERATOR, "tensor_1d").wraps("", Rung.OPERATOR, "toy")
        Traceback (most recent call last):
        shardwright.errors.LayoutError: two strategies want the rung OPERATOR of 'the model'
          given:   tensor_1d and toy, under tp2
          allowed: one strategy for it; a module has one note, and a rung one wrapper
          fix:     take out one of the two, or let it leave this module alone
        """
        before = self.wrapped.get(module, {})
        others = before.get(rung, ())
        if by in others:
            return self
        if others and rung not in SEVERAL:
            raise _taken(self.layout, module, f"the rung {rung.name}", others[0], by)
        return replace(self, wrapped={**self.wrapped, module: {**before, rung: (*others, by)}})

    def allow_callers(self, allowed_callers: Mapping[str, AllowedCallers]) -> Plan:
        """Returns the plan with, for each module with sharded inputs or outputs, the code that may call it.

        That code was analyzed. A call by other code raises an error when the model runs.
        """
        return replace(self, allowed_callers={**self.allowed_callers, **allowed_callers})

    def parameter_bytes(self, name: str, coord: Coord) -> int:
        """Returns the bytes of a parameter in device memory on the rank at ``coord`` between steps.

        These are its stored shard, unless that is offloaded, and, if the rank keeps one, its unsharded copy in the
        compute dtype, which contains a shard of the same dtype.
        """
        stored = self.state[name].parameter.num_elements(coord) * self.stored_dtypes[name].itemsize
        whole = self.compute[name].num_elements(coord) * self.compute_dtypes[name].itemsize
        if name in self.offloaded:
            return 0 if name in self.unsharded_on_use else whole
        if name in self.unsharded_on_use:
            return stored
        return max(stored, whole) if self.stored_dtypes[name] == self.compute_dtypes[name] else stored + whole

    @property
    def row_axes(self) -> frozenset[str]:
        """The axes that cut the samples of the batch."""
        return frozenset(axis for axis, dim in self.inputs.items() if dim == 0)

    @property
    def token_axes(self) -> frozenset[str]:
        """The axes that cut the tokens of every sample."""
        return frozenset(axis for axis, dim in self.inputs.items() if dim == 1)

    @property
    def scatter_axis(self) -> str | None:
        """The axis whose ranks each send a part of what they hold alike to the next pipeline stage, or None.

        Of the axes that divide operators it is the fastest-varying one that does not cut the batch: its ranks hold the
        same samples, and often the same values between layers.
        """
        axes = [a for a in self.mesh.axes if a in mesh_axes("operators") and a not in self.inputs and self.mesh[a] > 1]
        return axes[-1] if self.scatters and axes else None

    def slices(self, coord: Coord) -> dict[str, tuple[DimSlice, ...]]:
        """Returns, for each module with a sharded input, the slices of its dims that the rank at ``coord`` holds.

        The name :data:`OUTPUT` has those of the model's output. Dropout keys its random numbers by the slices.
        """
        return {module: held_slices(cuts, coord) for module, cuts in self.activations.items()}


def held_slices(cuts: Sequence[ActivationCut], coord: Coord) -> tuple[DimSlice, ...]:
    """Returns the slices of an activation's cut dims that the rank at ``coord`` holds, one for each of these dims."""
    by_dim: dict[int, DimSlice] = {}
    for cut in cuts:
        held = cut.ranges[coord[cut.axis]]
        if cut.dim in by_dim:
            held = tuple(
                (max(low, start), min(high, stop))
                for low, high in by_dim[cut.dim].ranges
                for start, stop in held
                if max(low, start) < min(high, stop)
            )
        by_dim[cut.dim] = DimSlice(cut.dim, cut.size, held)
    return tuple(by_dim.values())


def _taken(layout: Layout, module: str, what: str, first: str, second: str) -> LayoutError:
    return LayoutError(
        f"two strategies want {what} of '{module or 'the model'}'",
        given=f"{first} and {second}, under {layout}",
        allowed="one strategy for it; a module has one note, and a rung one wrapper",
        fix="take out one of the two, or let it leave this module alone",
    )
