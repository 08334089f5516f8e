"""The ``Plan``: the layout of every tensor and the treatment of every layer under one layout line.

Each strategy's ``place`` takes a plan and returns a refined one, on the meta device and equally on every rank, so every
LayoutError comes before the first message. Everything after it reads the plan: ``apply``, ``traffic``, gradient sync,
the ledger, checkpoints, ``verify`` and ``show``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.analysis.batch_norms import batch_norms, uses_batch
from shardwright.analysis.callers import AllowedCallers
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.structure import owners
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
    """A tensor's layout along one axis: sharded along ``dim``, each index of the axis holds one part."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """A tensor's layout along one axis: replicated, each index of the axis holds the whole tensor."""


@dataclass(frozen=True)
class Partial:
    """A tensor's layout along one axis: a partial sum, each index holds one term; the tensor is the sum of all."""


Spec = Mapping[str, Shard | Replicate | Partial]
"""The layout of a tensor by axis; an axis left out means ``Replicate``."""


class Use(NamedTuple):
    """One module's use of a parameter: the layout of the module's input, and of the gradient of its output.

    Gradient sync is derived from the uses: see :mod:`shardwright.plan.traffic`.
    """

    parameter: str
    module: str
    x: Spec
    dy: Spec

    def partial_axes(self) -> frozenset[str]:
        """Returns the axes along which this use gives each rank only a partial sum of the parameter's gradient.

        Every dim but the last is contracted in a weight's gradient; the last is the features'.
        """
        return frozenset(
            axis
            for spec in (self.x, self.dy)
            for axis, layout in spec.items()
            if isinstance(layout, Partial) or (isinstance(layout, Shard) and layout.dim != -1)
        )


class LayerRole(NamedTuple):
    """The role that a strategy gives one module (such as column-parallel), and why, as ``show`` prints it."""

    name: str
    strategy: str
    why: str


NUM_TOKENS = 4096
"""The assumed number of tokens in a microbatch when the caller gives none: it weighs activations against weights."""


def compute_dtype(dtype: torch.dtype, layout: Layout) -> torch.dtype:
    """Returns the dtype in which tensors of ``dtype`` compute under a layout; integers keep theirs."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrow.get(layout.precision, dtype) if dtype.is_floating_point else dtype


class ForwardFrame(Protocol):
    """A strategy's code around the model's whole forward, in a form that pipeline stages can call chunk by chunk.

    A stage never calls the model's own forward, so hooks on it would not run there.
    """

    def within(self, inputs: Any) -> AbstractContextManager[Any]:
        """Returns a context for one chunk's forward; yields the model's inputs as its modules expect them, cut."""
        ...

    def give(self, output: Any) -> Any:
        """Converts the output of the last module into the output that callers of the model expect."""
        ...

    def calls(self, used: Collection[str], read: Collection[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns a context for the calls of one chunk, which uses the weights ``used``; code between modules ``read``.

        Yields weights that are other tensors inside of it, by name.
        """
        ...

    def repeat(self, path: str, times: int, total: int) -> None:
        """Tells the frame that earlier chunks made ``times`` of the ``total`` calls of a module in this forward."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the state of this forward to what it is now."""
        ...


class Job(NamedTuple):
    """What a strategy works on: a plain model, its loss, and the options of ``parallelize`` that describe both.

    Args:
        model: the plain model; on the meta device while planning, this rank's part of it in ``apply``.
        loss: called as ``loss(output, targets)``; returns (sum, count).
        num_tokens: tokens of one microbatch of one model copy. A wrong number costs speed, never the result.
        num_samples: samples of the smallest microbatch, if samples are sequences; with too few, sequences are cut.
        roles: roles that the caller gave to single layers, by patterns of names.
        example: inputs of one microbatch of one model copy, on the meta device, for counting costs.
        graph: a recorded run of the plain model, for what can be read of its operators; None without an example.
        stages: modules at which pipeline stages begin, from devices on which the caller put parts of the model.
        seconds: measured forward times by module.
        offload_folder: folder for the files of offloaded state.
        recorded: whether stages are cut by a record of the forward, since the model's code cannot be followed.

    Set on each rank before ``apply``: ``batch_shard`` (this rank's rows), ``deferred`` (weight gradients to compute
    later), ``rng`` (the RNG tracker), ``frame`` (the frame of the strategy applied before).
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
    offload_folder: Path | None = None
    recorded: bool = False
    batch_shard: BatchShard | None = None
    deferred: DeferredGradients | None = None
    rng: RngTracker | None = None
    frame: ForwardFrame | None = None


class OperatorWork(NamedTuple):
    """A product, convolution or attention of the forward: the module that calls it, its floating-point operations, and
    the axes that divide them because they cut its weights, or what these make.
    """

    module: str
    flops: int
    axes: frozenset[str]


INPUT = "(input)"
"""The key in ``Plan.roles`` for the treatment of the model's input."""

LOSS = "(loss)"
"""The key in ``Plan.roles`` for the treatment of the loss."""

OUTPUT = "(output)"
"""The key in ``Plan.activations`` for the sharding of the model's output."""


@dataclass(frozen=True)
class ActivationCut:
    """One sharded dim of an activation: index i of ``axis`` holds ``ranges[i]`` of ``size`` elements."""

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
    """The layout of every tensor and the treatment of every layer; immutable, so strategies return refined copies."""

    layout: Layout
    mesh: Mesh
    compute: Mapping[str, TensorLayout]
    """The layout in which operators see each parameter."""
    state: Mapping[str, StateLayout]
    """The layouts of each parameter, its gradient and its optimizer state between steps."""
    uses: tuple[Use, ...]
    inputs: Mapping[str, int]
    """The dim of the model's input that each axis cuts: 0 samples, 1 tokens, 2 picture rows."""
    param_groups: tuple[ParamGroup, ...]
    loss_axes: frozenset[str] = frozenset()
    """The axes over which the loss is summed."""
    schedule: Schedule | None = None
    stages: Stages | EventStages | None = None
    roles: Mapping[str, LayerRole] = field(default_factory=dict)
    activations: Mapping[str, tuple[ActivationCut, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    compute_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which each parameter computes."""
    stored_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which each parameter is stored: with mixed precision, that of its master weights."""
    fp32_sums: frozenset[str] = frozenset()
    """The parameters whose gradients are summed in their stored dtype, not in the narrower compute dtype."""
    unsharded_on_use: frozenset[str] = frozenset()
    """The parameters that are resharded after use (ZeRO-3). Of all others each rank keeps the unsharded tensor."""
    offloaded: Mapping[str, str] = field(default_factory=dict)
    """Where the state of offloaded parameters is stored: ``host`` or ``disk``."""
    row_moves: Mapping[str, RowMoves] = field(default_factory=dict)
    """How each module's rows differ from the rows of the model's input, for random layers."""
    token_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The token dims of a module's input, if sequences are cut and tokens are not in dim 1 alone."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """By module, what a strategy's ``place`` found out for its ``apply`` and ``traffic``."""
    noted_by: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    """The modules with batch statistics, which are combined over all axes that cut the samples."""
    buffers: Mapping[str, TensorLayout] = field(default_factory=dict)
    """The layouts of sharded buffers; every rank holds a copy of all others."""
    recomputed: tuple[str, ...] = ()
    """The modules under activation checkpointing."""
    offloaded_activations: tuple[str, ...] = ()
    """The modules under activation offload."""
    allowed_callers: Mapping[str, AllowedCallers] = field(default_factory=dict)
    """For modules with sharded inputs or outputs, the callers that were analysed; a call by other code is an error."""
    work: tuple[OperatorWork, ...] = ()
    """The operations of the forward, where its operators were recorded; see :func:`operator_work`."""
    wrapped: Mapping[str, Mapping[Rung, tuple[str, ...]]] = field(default_factory=dict)
    """By module and rung of its forward stack, the strategies (or "core") that will put a wrapper there."""

    @staticmethod
    def of(job: Job, layout: Layout) -> Plan:
        """Returns the plan before any strategy: every rank holds a copy of everything."""
        shapes = {name: tuple(p.shape) for name, p in job.model.named_parameters()}
        compute = {name: TensorLayout.whole(shape) for name, shape in shapes.items()}
        state = {name: StateLayout(whole, whole, whole) for name, whole in compute.items()}
        uses = tuple(Use(name, path, {}, {}) for path, _, _, name in owners(job.model))
        stored = {name: p.dtype for name, p in job.model.named_parameters()}
        dtypes = {name: compute_dtype(dtype, layout) for name, dtype in stored.items()}
        frozen = frozenset(name for name, p in job.model.named_parameters() if not p.requires_grad)
        statistics = tuple(path for path, module in batch_norms(job.model) if uses_batch(module))
        return Plan(
            layout, layout.mesh, compute, state, uses, {}, split_into_param_groups(job.model), frozen=frozen,
            compute_dtypes=dtypes, stored_dtypes=stored, statistics=statistics,
        )  # fmt: skip

    def cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> Plan:
        """Shards a parameter, in compute and in storage: index i of ``axis`` holds ``ranges[i]`` of ``dim``."""
        cut = self.compute[name].cut(axis, dim, ranges)
        state = {**self.state, name: StateLayout(cut, cut, cut)}
        return replace(self, compute={**self.compute, name: cut}, state=state)

    def cut_buffer(self, name: str, size: int, axis: str, ranges: Ranges) -> Plan:
        """Returns the plan with a buffer of ``size`` elements sharded: index i of ``axis`` holds ``ranges[i]``."""
        cut = self.buffers.get(name, TensorLayout.whole((size,))).cut(axis, 0, ranges)
        return replace(self, buffers={**self.buffers, name: cut})

    def cut_inputs(self, axis: str, dim: int) -> Plan:
        """Returns the plan with batch and activations sharded along ``dim``: gradients are partial over ``axis``."""
        uses = tuple(u._replace(x={**u.x, axis: Shard(dim)}, dy={**u.dy, axis: Shard(dim)}) for u in self.uses)
        return replace(self, uses=uses, inputs={**self.inputs, axis: dim}, loss_axes=self.loss_axes | {axis})

    def use(self, module: str, x: Spec | None = None, dy: Spec | None = None) -> Plan:
        """Returns the plan with the layouts of a module's input (``x``) and output gradient (``dy``) updated."""
        uses = tuple(
            u._replace(x={**u.x, **(x or {})}, dy={**u.dy, **(dy or {})}) if u.module == module else u
            for u in self.uses
        )
        return replace(self, uses=uses)

    def role(self, module: str, strategy: str, name: str, why: str) -> Plan:
        """Returns a plan that has the role which a strategy gives a module, and why, for ``show`` to print."""
        return replace(self, roles={**self.roles, module: LayerRole(name, strategy, why)})

    def cut_activation(self, module: str, activation: ActivationCut) -> Plan:
        """Returns a plan that notes how a module's input is sharded: dropout is keyed by places in the whole tensor."""
        return replace(self, activations={**self.activations, module: (*self.activations.get(module, ()), activation)})

    def batch_shard(self, coord: Coord) -> BatchShard:
        """Returns the part of each global batch that the rank at ``coord`` has: its samples, and its tokens of each."""
        return BatchShard(self.mesh, self.row_axes, coord, token_axes=self.token_axes)

    def move_rows(self, module: str, rows: RowMoves) -> Plan:
        """Returns a plan that notes, for dropout, a module whose samples or tokens are not this rank's batch shard."""
        return replace(self, row_moves={**self.row_moves, module: rows}) if rows else self

    def see_tokens(self, module: str, dims: tuple[int, ...]) -> Plan:
        """Returns a plan that notes which dims of a module's input are tokens; only the first may be cut."""
        return replace(self, token_dims={**self.token_dims, module: dims})

    def note(self, module: str, note: Any, *, by: str, rung: Rung = Rung.OPERATOR) -> Plan:
        """Stores a strategy's findings about a module, for ``apply`` and ``traffic``; claims a forward-stack rung.

        Raises: LayoutError: another strategy has a note on the module, or the rung.
        """
        plan = self.wraps(module, rung, by)
        other = plan.noted_by.get(module, by)
        if other != by:
            raise _taken(self.layout, module, "the note", other, by)
        return replace(plan, notes={**plan.notes, module: note}, noted_by={**plan.noted_by, module: by})

    def without_note(self, module: str) -> Plan:
        """Removes what :meth:`note` stored under ``module``, a name that is no module of the model."""
        notes, noted_by, wrapped = dict(self.notes), dict(self.noted_by), dict(self.wrapped)
        for kept in (notes, noted_by, wrapped):
            kept.pop(module, None)
        return replace(self, notes=notes, noted_by=noted_by, wrapped=wrapped)

    def wraps(self, module: str, rung: Rung, by: str) -> Plan:
        """Claims a rung (a fixed place for a wrapper of a module's forward) for a strategy, or for "core".

        Raises: LayoutError: another strategy has claimed the rung, and the rung takes one wrapper.

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
        """Records which callers of modules with sharded inputs or outputs were analysed; calls by others are errors."""
        return replace(self, allowed_callers={**self.allowed_callers, **allowed_callers})

    def parameter_bytes(self, name: str, coord: Coord) -> int:
        """Returns a parameter's bytes on a rank between steps: its stored shard, and its unsharded tensor if kept."""
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

    def slices(self, coord: Coord) -> dict[str, tuple[DimSlice, ...]]:
        """Returns, for each module with a sharded input, the slice of each dim that the rank at ``coord`` holds."""
        found: dict[str, tuple[DimSlice, ...]] = {}
        for module, activations in self.activations.items():
            by_dim: dict[int, DimSlice] = {}
            for a in activations:
                held = a.ranges[coord[a.axis]]
                if a.dim in by_dim:
                    held = tuple(
                        (max(low, start), min(high, stop))
                        for low, high in by_dim[a.dim].ranges
                        for start, stop in held
                        if max(low, start) < min(high, stop)
                    )
                by_dim[a.dim] = DimSlice(a.dim, a.size, held)
            found[module] = tuple(by_dim.values())
        return found


def _taken(layout: Layout, module: str, what: str, first: str, second: str) -> LayoutError:
    return LayoutError(
        f"two strategies want {what} of '{module or 'the model'}'",
        given=f"{first} and {second}, under {layout}",
        allowed="one strategy for it; a module has one note, and a rung one wrapper",
        fix="take out one of the two, or let it leave this module alone",
    )
