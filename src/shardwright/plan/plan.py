"""The ``Plan`` that strategies refine in turn: where everything lies and what is done where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from shardwright.analysis.batch_norms import batch_norms, uses_batch
from shardwright.analysis.callers import AllowedCallers
from shardwright.analysis.structure import owners
from shardwright.errors import LayoutError
from shardwright.forward_stack import SEVERAL, Rung
from shardwright.layout import Layout
from shardwright.mesh import Coord, Mesh
from shardwright.operators.deferred_gradients import DeferredGradients
from shardwright.plan.batch_shard import BatchShard, RowMoves
from shardwright.plan.param_groups import ParamGroup, split_into_param_groups
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.rng import DimSlice, RngTracker
from shardwright.sharding.box import Ranges
from shardwright.sharding.tensor_layout import TensorLayout

# ---- how a tensor lies along one axis


@dataclass(frozen=True)
class Shard:
    """Cut along ``dim``: each index holds a part."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Copied: each index holds the whole."""


@dataclass(frozen=True)
class Partial:
    """A term of a sum: the whole is the sum over the axis."""


Spec = Mapping[str, Shard | Replicate | Partial]
"""How a tensor lies, by axis; an axis left out is ``Replicate``."""


class Use(NamedTuple):
    """One use of a parameter: how the module's input lies, and how the gradient of its output does."""

    parameter: str
    module: str
    x: Spec
    dy: Spec

    def partial_axes(self) -> frozenset[str]:
        """The axes over which this use gives each rank only a term of the gradient: where the contraction is cut.

        Every dim but the last is contracted in a weight's gradient; the last is the features'.

        >>> sorted(Use("w", "m", {"dp": Shard(0), "tp": Shard(-1)}, {"tp": Replicate()}).partial_axes())
        ['dp']
        """
        return frozenset(
            axis
            for spec in (self.x, self.dy)
            for axis, lies in spec.items()
            if isinstance(lies, Partial) or (isinstance(lies, Shard) and lies.dim != -1)
        )


class LayerRole(NamedTuple):
    """What is done at one module, by which strategy, and why: what ``show`` prints."""

    name: str
    strategy: str
    why: str


NUM_TOKENS = 4096
"""Tokens of one microbatch where nobody says how many: strategies weigh activations against weights by it."""


COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What a layout's words for the precision compute in."""


def compute_dtype(dtype: torch.dtype, layout: Layout) -> torch.dtype:
    """What tensors of a model that has this dtype are in while a layout computes.

    >>> compute_dtype(torch.float32, Layout.parse("dp2 bf16")), compute_dtype(torch.float32, Layout.parse("dp2"))
    (torch.bfloat16, torch.float32)
    """
    return COMPUTE_DTYPES.get(layout.precision, dtype) if dtype.is_floating_point else dtype


class ForwardFrame(Protocol):
    """What a strategy does around a model's forward, for a pipeline, which runs the modules inside one by one."""

    def within(self, inputs: Any) -> AbstractContextManager[Any]:
        """A forward, or one chunk's part of it; gives a microbatch's inputs as the modules inside take them."""
        ...

    def give(self, output: Any) -> Any:
        """The model's output as its callers take it, from what the modules inside made."""
        ...

    def repeat(self, path: str, times: int, total: int) -> None:
        """Earlier chunks have called a module so often, of ``total`` calls in this forward."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the state of this forward to what it is now."""
        ...


class Job(NamedTuple):
    """What a person hands over: a plain model, the loss that gives (sum, count), and how much is computed at once.

    ``num_tokens`` are those of one microbatch of one model copy, as far as they are known when it is laid out; a wrong
    number costs speed, never the result. ``batch_shard`` says, on a rank, which rows of the microbatch each rank has.
    ``roles`` are those that a person gives to single layers, by patterns of names. ``example`` are the inputs of one
    microbatch of one model copy, on the meta device, where they are known: what a layer costs is counted on them.
    ``num_samples`` are those of the smallest microbatch where each is a sequence of tokens: too few to be cut, their
    sequences are. ``stages`` are the modules at which a person lets stages begin, by putting parts on devices;
    ``seconds`` are those that were measured of modules' forwards. ``deferred`` takes, on a rank, weight gradients that
    are wanted later; ``rng`` are its random numbers; ``frame`` is what a strategy before this one does around the
    model's forward. ``offload_folder`` is where files of state go that a layout keeps on disk.
    """

    model: nn.Module
    loss: nn.Module
    num_tokens: int = NUM_TOKENS
    batch_shard: BatchShard | None = None
    roles: Mapping[str, str] = MappingProxyType({})
    example: Any = None
    num_samples: int | None = None
    stages: tuple[str, ...] = ()
    seconds: Mapping[str, float] = MappingProxyType({})
    deferred: DeferredGradients | None = None
    rng: RngTracker | None = None
    frame: ForwardFrame | None = None
    offload_folder: Path | None = None


INPUT = "(input)"
"""The name under which ``Plan.roles`` keeps how the model's input is cut, where that needs to be said."""

LOSS = "(loss)"
"""The name under which ``Plan.roles`` keeps what is done at the loss."""

OUTPUT = "(output)"
"""The name under which ``Plan.activations`` keeps how the model's output is cut."""


@dataclass(frozen=True)
class ActivationCut:
    """An activation's dim that an axis cuts: ``ranges[i]`` of ``size`` elements at index i."""

    axis: str
    dim: int
    size: int
    ranges: Ranges


@dataclass(frozen=True)
class StateLayout:
    """Where a parameter, its gradient and its optimizer state lie between steps."""

    parameter: TensorLayout
    gradient: TensorLayout
    optimizer: TensorLayout


@dataclass(frozen=True)
class Plan:
    """Where everything lies and what is done where. Refined strategy by strategy, never mutated.

    >>> plan = Plan.of(Job(nn.Linear(2, 4), nn.Identity()), Layout.parse("tp2"))
    >>> sorted(plan.compute), plan.inputs
    (['bias', 'weight'], {})
    """

    layout: Layout
    mesh: Mesh
    compute: Mapping[str, TensorLayout]
    state: Mapping[str, StateLayout]
    uses: tuple[Use, ...]
    inputs: Mapping[str, int]
    param_groups: tuple[ParamGroup, ...]
    loss_axes: frozenset[str] = frozenset()
    schedule: Schedule | None = None
    stages: Stages | None = None
    roles: Mapping[str, LayerRole] = field(default_factory=dict)
    activations: Mapping[str, tuple[ActivationCut, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    compute_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """What each parameter computes in."""
    stored_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """What each parameter rests in: wider than it computes in where the precision is mixed."""
    fp32_sums: frozenset[str] = frozenset()
    """The parameters whose gradients are summed as wide as they rest, and not as narrow as they are computed."""
    unsharded_on_use: frozenset[str] = frozenset()
    """The parameters that are whole only while something computes with them; of others a whole stays on each rank."""
    offloaded: Mapping[str, str] = field(default_factory=dict)
    """Of parameters whose state rests elsewhere than on the rank's device, where: on ``host`` or ``disk``."""
    row_moves: Mapping[str, RowMoves] = field(default_factory=dict)
    token_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The dims of a module's input with tokens, where sequences are cut and these are not dim 1 alone."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    noted_by: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    """The modules that compute statistics of the batch: over all axes that cut its samples."""
    buffers: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Where buffers lie that are cut; any other is whole on every rank."""
    recomputed: tuple[str, ...] = ()
    """The modules that the backward computes again, in place of keeping what they make."""
    offloaded_activations: tuple[str, ...] = ()
    """The modules whose calls keep what the backward needs in host memory or on disk."""
    allowed_callers: Mapping[str, AllowedCallers] = field(default_factory=dict)
    """Where the calls of modules come from that take or give a part: from elsewhere they would be wrong."""
    wrapped: Mapping[str, Mapping[Rung, tuple[str, ...]]] = field(default_factory=dict)
    """By module and rung of its forward stack, the strategies that will put something there, or "core"."""

    @staticmethod
    def of(job: Job, layout: Layout) -> Plan:
        """The plan before any strategy: everything copied to every rank."""
        shapes = {name: tuple(p.shape) for name, p in job.model.named_parameters()}
        compute = {name: TensorLayout.whole(shape) for name, shape in shapes.items()}
        rest = {name: StateLayout(lies, lies, lies) for name, lies in compute.items()}
        uses = tuple(Use(name, path, {}, {}) for path, _, _, name in owners(job.model))
        masters = {name: p.dtype for name, p in job.model.named_parameters()}
        dtypes = {name: compute_dtype(dtype, layout) for name, dtype in masters.items()}
        frozen = frozenset(name for name, p in job.model.named_parameters() if not p.requires_grad)
        statistics = tuple(path for path, module in batch_norms(job.model) if uses_batch(module))
        return Plan(
            layout, layout.mesh, compute, rest, uses, {}, split_into_param_groups(job.model), frozen=frozen,
            compute_dtypes=dtypes, stored_dtypes=masters, statistics=statistics,
        )  # fmt: skip

    def cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> Plan:
        """Parameter ``name`` lies cut: index i of ``axis`` holds ``ranges[i]`` of ``dim``, at rest as in compute."""
        lies = self.compute[name].cut(axis, dim, ranges)
        return replace(
            self, compute={**self.compute, name: lies}, state={**self.state, name: StateLayout(lies, lies, lies)}
        )

    def cut_buffer(self, name: str, size: int, axis: str, ranges: Ranges) -> Plan:
        """Buffer ``name``, of ``size`` elements, lies cut: index i of ``axis`` holds ``ranges[i]``."""
        lies = self.buffers.get(name, TensorLayout.whole((size,))).cut(axis, 0, ranges)
        return replace(self, buffers={**self.buffers, name: lies})

    def cut_inputs(self, axis: str, dim: int) -> Plan:
        """The batch is cut along ``dim``, and with it every activation: gradients become terms of a sum."""
        uses = tuple(u._replace(x={**u.x, axis: Shard(dim)}, dy={**u.dy, axis: Shard(dim)}) for u in self.uses)
        return replace(self, uses=uses, inputs={**self.inputs, axis: dim}, loss_axes=self.loss_axes | {axis})

    def use(self, module: str, x: Spec | None = None, dy: Spec | None = None) -> Plan:
        """Every parameter of ``module`` is used on an input that lies like this."""
        uses = tuple(
            u._replace(x={**u.x, **(x or {})}, dy={**u.dy, **(dy or {})}) if u.module == module else u
            for u in self.uses
        )
        return replace(self, uses=uses)

    def role(self, module: str, strategy: str, name: str, why: str) -> Plan:
        """Notes what is done at ``module`` and why."""
        return replace(self, roles={**self.roles, module: LayerRole(name, strategy, why)})

    def cut_activation(self, module: str, activation: ActivationCut) -> Plan:
        """What ``module`` takes in is cut: random layers need to know their place in the whole."""
        return replace(self, activations={**self.activations, module: (*self.activations.get(module, ()), activation)})

    def batch_shard(self, coord: Coord) -> BatchShard:
        """Returns what the rank at ``coord`` has of global batches: which samples, and which tokens of each.

        >>> plan = Plan.of(Job(nn.Linear(2, 2), nn.Identity()), Layout.parse("dp2")).cut_inputs("dp", dim=0)
        >>> plan.batch_shard({"dp": 1}).local_samples(5)
        range(3, 5)
        """
        return BatchShard(self.mesh, self.row_axes, coord, token_axes=self.token_axes)

    def move_rows(self, module: str, rows: RowMoves) -> Plan:
        """Notes that ``module`` sees other samples, or tokens, than this rank's own: random layers ask which."""
        return replace(self, row_moves={**self.row_moves, module: rows}) if rows else self

    def see_tokens(self, module: str, dims: tuple[int, ...]) -> Plan:
        """Notes in which dims ``module`` sees tokens: of all but the first of ``dims``, from a sequence's start on."""
        return replace(self, token_dims={**self.token_dims, module: dims})

    def note(self, module: str, note: Any, *, by: str, rung: Rung = Rung.OPERATOR) -> Plan:
        """Keeps what a strategy found out about ``module`` for its ``apply`` and ``traffic``, and what it will wrap.

        Raises: LayoutError: another strategy's note is there, or it has the rung.
        """
        plan = self.wraps(module, rung, by)
        other = plan.noted_by.get(module, by)
        if other != by:
            raise _taken(self.layout, module, "the note", other, by)
        return replace(plan, notes={**plan.notes, module: note}, noted_by={**plan.noted_by, module: by})

    def without_note(self, module: str) -> Plan:
        """Takes back what :meth:`note` has kept of a module: for a name that only stood for one."""
        notes, noted_by, wrapped = dict(self.notes), dict(self.noted_by), dict(self.wrapped)
        for kept in (notes, noted_by, wrapped):
            kept.pop(module, None)
        return replace(self, notes=notes, noted_by=noted_by, wrapped=wrapped)

    def wraps(self, module: str, rung: Rung, by: str) -> Plan:
        """Records that a strategy, or "core", will put something on a rung of the module's forward stack.

        Raises: LayoutError: another strategy has the rung, on which one alone may stand.

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

    def at_home(self, allowed_callers: Mapping[str, AllowedCallers]) -> Plan:
        """Notes from where modules are called that take or give a part."""
        return replace(self, allowed_callers={**self.allowed_callers, **allowed_callers})

    def parameter_bytes(self, name: str, coord: Coord) -> int:
        """What ``coord`` holds of a parameter between steps: what rests, and what it computes with where that stays.

        >>> Plan.of(Job(nn.Linear(2, 4), nn.Identity()), Layout.parse("bf16")).parameter_bytes("weight", {})
        48
        """
        resting = self.state[name].parameter.num_elements(coord) * self.stored_dtypes[name].itemsize
        whole = self.compute[name].num_elements(coord) * self.compute_dtypes[name].itemsize
        if name in self.offloaded:
            return 0 if name in self.unsharded_on_use else whole
        if name in self.unsharded_on_use:
            return resting
        return max(resting, whole) if self.stored_dtypes[name] == self.compute_dtypes[name] else resting + whole

    @property
    def row_axes(self) -> frozenset[str]:
        """The axes that cut the samples of the model's input."""
        return frozenset(axis for axis, dim in self.inputs.items() if dim == 0)

    @property
    def token_axes(self) -> frozenset[str]:
        """The axes that cut the sequences of the model's input, every rank holding some tokens of each sample."""
        return frozenset(axis for axis, dim in self.inputs.items() if dim == 1)

    def slices(self, coord: Coord) -> dict[str, tuple[DimSlice, ...]]:
        """The cut activations by module, as ``coord`` holds them; a dim that several axes cut is one slice."""
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
