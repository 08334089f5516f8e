"""The ``Strategy`` protocol: what a file of ``strategies/`` must define, and checks that several strategies share.

A strategy is one frozen value with three methods. ``place`` refines the plan (pure, on the meta device), ``apply``
changes this rank's modules, ``traffic`` states the collectives of a step and shares no code with what records them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Literal, Protocol

from torch import nn

from shardwright.analysis.structure import BATCH_NORMS
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.mesh import Coord
from shardwright.plan.option import StrategyOption
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import Applied


class Strategy(Protocol):
    """One way to divide work or state, such as data parallel or ZeRO: ``STRATEGY`` of a file in ``strategies/``.

    For each axis of a layout and each phase, the strategy that declares one of the given options is chosen, or else the
    one with ``default``.
    """

    @property
    def name(self) -> str:
        """The strategy's name in the registry; the collectives that it makes are recorded under it."""
        ...

    @property
    def axis(self) -> str:
        """The mesh axis that it divides work over: its own (``AXIS`` of its file), or another strategy's."""
        ...

    @property
    def phase(self) -> Literal["operators", "stages", "state"]:
        """When it refines the plan: operators (layers) first, then pipeline stages, then training state."""
        ...

    @property
    def default(self) -> bool:
        """Whether a layout that names the axis (``dp4``) uses this strategy without an option."""
        ...

    @property
    def options(self) -> Mapping[str, StrategyOption]:
        """What each layout option does; one with a value shows it in its text: "stages by hand: cut:conv1,conv2"."""
        ...

    @property
    def source(self) -> str:
        """The paper that the strategy implements."""
        ...

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan with this strategy's sharding added. Raises LayoutError: it does not fit the model."""
        ...

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied | None:
        """Changes this rank's modules and loss, whose parameters are already sharded; returns event hooks."""
        ...

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns the collective calls of one step on the rank at ``coord``: they must equal what is recorded."""
        ...


def apply_in_turn(
    strategies: Sequence[Strategy], job: Job, axes: Mapping[str, Axis], plan: Plan
) -> tuple[Job, tuple[Applied, ...]]:
    """Applies the strategies to this rank's modules in order; returns the job and what they add to the run."""
    found = []
    for strategy in strategies:
        own = {name: axis.for_strategy(strategy.name) for name, axis in axes.items()}
        applied = strategy.apply(job, own, plan)
        if applied is not None:
            found.append(applied)
            job = job if applied.frame is None else job._replace(frame=applied.frame)
    return job, tuple(found)


def check_samples_apart(model: nn.Module, factor: str) -> None:
    """Raises LayoutError for layers that mix the samples of a batch, which ``factor`` cuts, in an unknown way.

    The statistics of torch's own BatchNorms are combined over ranks. Embedding tables that renormalise rows or scale
    gradients by the tokens they see are errors: they would see one rank's tokens only.

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
        check_table(name, module, factor)
        mixes = isinstance(module, nn.modules.batchnorm._NormBase)
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            mixes = module.track_running_stats  # it keeps a mean over the samples
        if mixes and (type(module) not in BATCH_NORMS or "forward" in vars(module)):
            raise LayoutError(
                f"'{name}' computes statistics over the batch, which '{factor}' cuts",
                given=f"{type(module).__name__} on {factor}",
                allowed=f"{', '.join(k.__name__ for k in BATCH_NORMS)}, and layers that treat each sample alone",
                fix="use one of these as it is, or GroupNorm, or LayerNorm",
            )


TABLE_OPTIONS: Mapping[str, str] = {
    "max_norm": "changes rows by the tokens that one rank sees",
    "scale_grad_by_freq": "counts the tokens that one rank sees",
}
"""Options of embedding tables that look at the tokens of the whole batch, and what they do on one rank instead."""


def check_table(path: str, table: nn.Module, factor: str, options: Collection[str] = tuple(TABLE_OPTIONS)) -> None:
    """Raises LayoutError for an embedding table with one of ``options``, given that ``factor`` cuts tokens or rows."""
    if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
        return
    for option in options:
        if getattr(table, option):
            kind, size = type(table).__name__, factor.lstrip("abcdefghijklmnopqrstuvwxyz").partition("/")[0]
            raise LayoutError(
                f"the table '{path}' would not be that of one device on '{factor}'",
                given=f"{kind} with {option}={getattr(table, option)}, which {TABLE_OPTIONS[option]}",
                allowed=f"{kind} without {option}; with it on tp alone, where every rank sees all tokens",
                fix=f"leave out {option}, or write tp{prod(map(int, size.split('x')))}",
            )
