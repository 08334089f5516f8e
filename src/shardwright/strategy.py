"""What a strategy is: one file, one value, three functions; and the ``Plan`` that strategies refine in turn.

Data flows one way. ``place`` is pure and sees the whole plain model, so every ``LayoutError`` comes from here, on
every rank, before anything is sent. ``apply`` changes this rank's part of the model. ``traffic`` prices the plan
and shares no code with what records the calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import nn

from shardwright.boxes import Box, Lies, Ranges
from shardwright.comm import Axis, ring_factor
from shardwright.draws import SliceOfDim
from shardwright.errors import LayoutError, explain
from shardwright.layout import Layout
from shardwright.mesh import Coord, Mesh
from shardwright.models.structure import BATCH_NORMS, Visits, owners
from shardwright.pipeline import Action, End, Ends, Events, Rows, Samples
from shardwright.pipeline.executor import Unit
from shardwright.product.batch_norm import batch_norms, uses_batch

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


class Role(NamedTuple):
    """What is done at one module, by which strategy, and why: what ``show`` prints."""

    name: str
    strategy: str
    why: str


NUM_TOKENS = 4096
"""Tokens of one microbatch where nobody says how many: strategies weigh activations against weights by it."""


class Job(NamedTuple):
    """What a person hands over: a plain model, the loss that gives (sum, count), and how much is computed at once.

    ``num_tokens`` are those of one microbatch of one model copy, as far as they are known when it is laid out; a
    wrong number costs speed, never the result. ``samples`` says, on a rank, whose samples are in hand. ``roles`` are
    those that a person gives to single layers, by patterns of names.
    """

    model: nn.Module
    loss: nn.Module
    num_tokens: int = NUM_TOKENS
    samples: Samples | None = None
    roles: Mapping[str, str] = MappingProxyType({})


LOSS = "(loss)"
"""The name under which ``Plan.roles`` keeps what is done at the loss."""

OUTPUT = "(output)"
"""The name under which ``Plan.activations`` keeps how the model's output is cut."""


@dataclass(frozen=True)
class Activation:
    """An activation's dim that an axis cuts: ``ranges[i]`` of ``size`` elements at index i."""

    axis: str
    dim: int
    size: int
    ranges: Ranges


@dataclass(frozen=True)
class Rest:
    """Where a parameter, its gradient and its optimizer state lie between steps."""

    parameter: Lies
    gradient: Lies
    optimizer: Lies


@dataclass(frozen=True)
class Plan:
    """Where everything lies and what is done where. Refined strategy by strategy, never mutated.

    >>> plan = Plan.of(Job(nn.Linear(2, 4), nn.Identity()), Layout.parse("tp2"))
    >>> sorted(plan.compute), plan.inputs
    (['bias', 'weight'], {})
    """

    layout: Layout
    mesh: Mesh
    compute: Mapping[str, Lies]
    rest: Mapping[str, Rest]
    uses: tuple[Use, ...]
    inputs: Mapping[str, int]
    units: tuple[Unit, ...]
    loss_axes: frozenset[str] = frozenset()
    schedules: tuple[tuple[Action, ...], ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    activations: Mapping[str, tuple[Activation, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    rows: Mapping[str, Rows] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    """The modules that compute statistics of the batch: over all axes that cut its samples."""
    buffers: Mapping[str, Lies] = field(default_factory=dict)
    """Where buffers lie that are cut; any other is whole on every rank."""

    @staticmethod
    def of(job: Job, layout: Layout) -> Plan:
        """The plan before any strategy: everything copied to every rank."""
        shapes = {name: tuple(p.shape) for name, p in job.model.named_parameters()}
        compute = {name: Lies.whole(shape) for name, shape in shapes.items()}
        rest = {name: Rest(lies, lies, lies) for name, lies in compute.items()}
        uses = tuple(Use(name, path, {}, {}) for path, _, _, name in owners(job.model))
        dtypes = {name: p.dtype for name, p in job.model.named_parameters()}
        frozen = frozenset(name for name, p in job.model.named_parameters() if not p.requires_grad)
        statistics = tuple(path for path, module in batch_norms(job.model) if uses_batch(module))
        return Plan(
            layout, layout.mesh, compute, rest, uses, {}, blocks(job.model), frozen=frozen, dtypes=dtypes,
            statistics=statistics,
        )  # fmt: skip

    def cut(self, name: str, axis: str, dim: int, ranges: Ranges) -> Plan:
        """Parameter ``name`` lies cut: index i of ``axis`` holds ``ranges[i]`` of ``dim``, at rest as in compute."""
        lies = self.compute[name].cut(axis, dim, ranges)
        return replace(self, compute={**self.compute, name: lies}, rest={**self.rest, name: Rest(lies, lies, lies)})

    def cut_buffer(self, name: str, size: int, axis: str, ranges: Ranges) -> Plan:
        """Buffer ``name``, of ``size`` elements, lies cut: index i of ``axis`` holds ``ranges[i]``."""
        lies = self.buffers.get(name, Lies.whole((size,))).cut(axis, 0, ranges)
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
        return replace(self, roles={**self.roles, module: Role(name, strategy, why)})

    def cut_activation(self, module: str, activation: Activation) -> Plan:
        """What ``module`` takes in is cut: random layers need to know their place in the whole."""
        return replace(self, activations={**self.activations, module: (*self.activations.get(module, ()), activation)})

    def move_rows(self, module: str, rows: Rows) -> Plan:
        """Notes that ``module`` sees other samples than this rank's own: random layers need to know which."""
        return replace(self, rows={**self.rows, module: rows}) if rows else self

    def note(self, module: str, note: Any) -> Plan:
        """Keeps what a strategy found out about ``module`` for its ``apply`` and ``traffic``."""
        return replace(self, notes={**self.notes, module: note})

    @property
    def row_axes(self) -> frozenset[str]:
        """The axes that cut the samples of the model's input."""
        return frozenset(axis for axis, dim in self.inputs.items() if dim == 0)

    def slices(self, coord: Coord) -> dict[str, tuple[SliceOfDim, ...]]:
        """The cut activations by module, as ``coord`` holds them; a dim that several axes cut is one slice."""
        found: dict[str, tuple[SliceOfDim, ...]] = {}
        for module, activations in self.activations.items():
            by_dim: dict[int, SliceOfDim] = {}
            for a in activations:
                held = a.ranges[coord[a.axis]]
                if a.dim in by_dim:
                    held = tuple(
                        (max(low, start), min(high, stop))
                        for low, high in by_dim[a.dim].ranges
                        for start, stop in held
                        if max(low, start) < min(high, stop)
                    )
                by_dim[a.dim] = SliceOfDim(a.dim, a.size, held)
            found[module] = tuple(by_dim.values())
        return found


# ---- gradient sync, derived


class Share(NamedTuple):
    """A box of a parameter whose gradient is the sum over ``ranks``, which differ along ``axes``."""

    box: Box
    axes: tuple[str, ...]
    ranks: tuple[int, ...]


def partial_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes over which some use of the parameter gives only a term of its gradient, slowest first."""
    partial = frozenset[str]().union(*(use.partial_axes() for use in plan.uses if use.parameter == name))
    return tuple(axis for axis in plan.mesh.axes if axis in partial and plan.mesh[axis] > 1)


def summed_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes over which the core sums a gradient: partial in compute, and not cut at rest.

    A strategy that cuts a gradient at rest along an axis, as ZeRO does, sums it there itself.
    """
    cut = set(plan.rest[name].gradient.axes) - set(plan.compute[name].axes)
    return tuple(axis for axis in partial_axes(plan, name) if axis not in cut)


def whole_uses(plan: Plan) -> tuple[tuple[Use, tuple[str, ...]], ...]:
    """The uses that give a whole gradient over axes where another use of the same parameter gives a term.

    There one index contributes the whole use and the others nothing, so that one sum serves both.
    """
    found = []
    for use in plan.uses:
        missing = set(partial_axes(plan, use.parameter)) - use.partial_axes()
        if missing:
            found.append((use, tuple(axis for axis in plan.mesh.axes if axis in missing)))
    return tuple(found)


def sync(plan: Plan, name: str, coord: Coord) -> tuple[Share, ...]:
    """What this rank sums with whom to make the gradient of one parameter whole.

    Partial exactly where the contraction is cut; where ranks hold overlapping parts of the parameter, each box is
    summed among those that hold it.
    """
    axes = summed_axes(plan, name)
    if not axes:
        return ()
    here = plan.mesh.rank(coord)
    shares = plan.compute[name].holders(plan.mesh, axes, coord)
    return tuple(Share(box, axes, ranks) for box, ranks in shares if here in ranks and len(ranks) > 1)


# ---- traffic


class Traffic(NamedTuple):
    """Calls a strategy says it makes in one step: kind, axis, payload bytes of each, members, how many."""

    kind: str
    axis: str
    num_bytes: int
    num_ranks: int
    times: int = 1

    @property
    def sent_bytes(self) -> float:
        """What one rank sends, ranks forming a ring."""
        return float(ring_factor(self.kind, self.num_ranks) * self.num_bytes * self.times)


class Batch(NamedTuple):
    """What one rank's step sees: the calls of every module, for each microbatch."""

    visits: tuple[Visits, ...]
    gradient_bytes: int
    samples: tuple[Samples, ...] = ()


Sharers = tuple[tuple[str, ...], tuple[int, ...], str]
"""Who sums what in one message: the axes along which they differ, their ranks, and the dtype."""


def sync_groups(plan: Plan, unit: Unit, coord: Coord) -> dict[Sharers, dict[str, list[Box]]]:
    """The unit's shares by who sums them: parameter -> boxes, the same on every member."""
    groups: dict[Sharers, dict[str, list[Box]]] = {}
    for name in unit.parameters:
        for share in sync(plan, name, coord):
            key = (share.axes, share.ranks, str(plan.dtypes[name]))
            groups.setdefault(key, {}).setdefault(name, []).append(share.box)
    return dict(sorted(groups.items()))


def is_shared_whole(plan: Plan, name: str, axes: Collection[str]) -> bool:
    """Whether ranks that differ only on ``axes`` hold the same part of a parameter, all of it shared.

    Asked of the plan and not of one rank's shares, so that all members give the same answer.
    """
    return not set(axes) & set(plan.compute[name].axes)


def sync_traffic(plan: Plan, batch: Batch, coord: Coord, axis: str) -> tuple[Traffic, ...]:
    """The all-reduces of gradients whose slowest axis is ``axis``.

    One for each unit and group of sharers; two where a unit has both parameters shared whole and shared in part.
    """
    found = []
    for unit in plan.units:
        for (axes, ranks, _), shares in sync_groups(plan, unit, coord).items():
            if axes[0] != axis:
                continue
            element_bytes = plan.dtypes[next(iter(shares))].itemsize
            whole = part = 0
            for name, boxes in shares.items():
                size = sum(box.size for box in boxes) if name not in plan.frozen else 0
                if is_shared_whole(plan, name, axes):
                    whole += size
                else:
                    part += size
            found += [
                Traffic("all_reduce", "+".join(axes), size * element_bytes, len(ranks))
                for size in (whole, part)
                if size
            ]
    return tuple(found)


def statistics_traffic(plan: Plan, batch: Batch, coord: Coord, axis: str) -> tuple[Traffic, ...]:
    """What the BatchNorms send over ``axis``, which cuts their samples.

    Forward, each member's count, means and sums of squares; backward, two sums for each channel held.
    """
    found = []
    for visits in batch.visits:
        for path in plan.statistics:
            cuts = {each.dim: each.ranges for each in plan.slices(coord).get(path, ())}
            for visit in visits.get(path, ()):
                held = sum(b - a for a, b in cuts.get(1, ((0, visit.x_shape[1]),)))
                num_bytes = max(visit.element_bytes, 4)  # statistics are no narrower than float32
                size = plan.mesh[axis]
                found.append(Traffic("all_gather", axis, size * (2 * held + 1) * num_bytes, size))
                if visit.needs_gradient:
                    found.append(Traffic("all_reduce", axis, 2 * held * num_bytes, size))
    return tuple(each for each in found if each.num_ranks > 1)


# ---- what cannot be cut


def check_samples_apart(model: nn.Module, factor: str) -> None:
    """Raises LayoutError for layers that mix the samples of a batch, which ``factor`` cuts, in ways not known here.

    torch's own BatchNorms are known: they share their statistics.

    >>> class Halved(nn.BatchNorm1d):
    ...     def forward(self, input): return super().forward(input) / 2
    >>> check_samples_apart(nn.Sequential(nn.BatchNorm1d(4), Halved(4)), "dp2")
    Traceback (most recent call last):
    shardwright.errors.LayoutError: '1' computes statistics over the batch, which 'dp2' cuts
      given:   Halved on dp2
      allowed: BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm, and layers that treat each sample alone
      fix:     use one of these as it is, or GroupNorm, or LayerNorm
    """
    for name, module in model.named_modules():
        mixes = isinstance(module, nn.modules.batchnorm._NormBase)
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            mixes = module.track_running_stats  # it keeps a mean over the samples
        if mixes and (type(module) not in BATCH_NORMS or "forward" in vars(module)):
            raise LayoutError(
                explain(
                    f"'{name}' computes statistics over the batch, which '{factor}' cuts",
                    given=f"{type(module).__name__} on {factor}",
                    allowed=f"{', '.join(k.__name__ for k in BATCH_NORMS)}, and layers that treat each sample alone",
                    fix="use one of these as it is, or GroupNorm, or LayerNorm",
                )
            )


# ---- the Protocol


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a strategy adds to a rank's run beside changed modules; each is optional.

    ``events`` are fired by the executor. ``parameters`` take the place of the model's for the optimizer, where a
    parameter rests in another form than it computes in; they carry the gradients too. ``first`` and ``last``
    are the ends of this rank's stage. ``late`` are parameters whose gradients do not come from autograd: they are in
    place when ``after_backward`` has returned.
    """

    events: Events = field(default_factory=Events)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    first: End | None = None
    last: Ends | None = None
    late: frozenset[str] = frozenset()


class Strategy(Protocol):
    """One strategy: a file of ``strategies/`` that defines ``STRATEGY``.

    For each axis of a layout and each phase, the strategy that declares one of the options given is chosen, or
    else the one with ``default``. ``options`` maps each option to what it does.
    """

    name: ClassVar[str]
    axis: ClassVar[str]
    phase: ClassVar[Literal["operators", "stages", "state"]]
    default: ClassVar[bool]
    options: ClassVar[Mapping[str, str]]
    source: ClassVar[str]

    def place(self, job: Job, plan: Plan) -> Plan:
        """Refines the plan, purely. Raises LayoutError for what cannot be laid out."""
        ...

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied | None:
        """Changes this rank's model and loss, whose parameters lie as the plan says for compute."""
        ...

    def traffic(self, plan: Plan, batch: Batch, coord: Coord) -> tuple[Traffic, ...]:
        """The calls that one step makes on the rank at ``coord``."""
        ...


# ---- units


def blocks(model: nn.Module, *, least_bytes: int = 2**20) -> tuple[Unit, ...]:
    """The model's parameters in units that travel together: whole blocks, at least ``least_bytes`` each.

    A block is an entry of a list or sequence of modules. Small neighbours are joined, in forward order. A tied
    parameter belongs to the first block that uses it, and the unit's modules name the other users too.

    >>> [unit.name for unit in blocks(nn.Sequential(nn.Linear(600, 600), nn.Linear(2, 2), nn.Linear(900, 900)))]
    ['0', '1..2']
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    home: dict[str, int] = {}  # by parameter, the unit it belongs to
    users: dict[int, list[str]] = {}
    modules: list[list[str]] = [[]]
    num_bytes = 0
    for path, module in _entries("", model):
        modules[-1].append(path)
        for parameter in module.parameters(path != ""):
            name = names[id(parameter)]
            if name not in home:
                home[name] = len(modules) - 1
                num_bytes += parameter.numel() * parameter.element_size()
            elif home[name] < len(modules) - 1:
                users.setdefault(home[name], []).append(path)
        if num_bytes >= least_bytes:
            modules.append([])
            num_bytes = 0
    last = len(modules) - 1
    if last > 0 and num_bytes < least_bytes:  # what is left is small: it goes with its neighbour
        tail = modules.pop()
        modules[-1] += tail
        home = {name: min(number, last - 1) for name, number in home.items()}
        users = {number: [u for u in paths if u not in modules[number]] for number, paths in users.items()}
    units = []
    for number, paths in enumerate(modules):
        if not paths:
            continue
        name = paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}"
        parameters = tuple(n for n, at in home.items() if at == number)
        units.append(Unit(name, (*paths, *dict.fromkeys(users.get(number, ()))), parameters))
    return tuple(unit for unit in units if unit.parameters)


def _entries(path: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The blocks in order: children of the root and of every list or sequence of modules below it."""
    if path and type(module) not in (nn.Sequential, nn.ModuleList):
        yield path, module
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield path, module  # what a container holds itself
    for name, child in module.named_children():
        yield from _entries(f"{path}.{name}".lstrip("."), child)
