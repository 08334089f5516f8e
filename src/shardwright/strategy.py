"""What a strategy is: one file, one value, three functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import ClassVar, Literal, Protocol

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
    """One strategy: a file of ``strategies/`` that defines ``STRATEGY``.

    ``axis`` is the name of the axis that it lies along: its own, which its file defines as ``AXIS``, or one that the
    file of another strategy does.
    For each axis of a layout and each phase, the strategy that declares one of the options given is chosen, or
    else the one with ``default``. ``options`` maps each option to what it does; one that takes a value shows it
    in its text: "stages by hand: cut:conv1,conv2". Others refuse values.
    """

    name: ClassVar[str]
    axis: ClassVar[str]
    phase: ClassVar[Literal["operators", "stages", "state"]]
    default: ClassVar[bool]
    options: ClassVar[Mapping[str, StrategyOption]]
    source: ClassVar[str]

    def place(self, job: Job, plan: Plan) -> Plan:
        """Refines the plan, purely. Raises LayoutError for what cannot be laid out."""
        ...

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied | None:
        """Changes this rank's model and loss, whose parameters lie as the plan says for compute."""
        ...

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """The calls that one step makes on the rank at ``coord``."""
        ...


def apply_in_turn(
    strategies: Sequence[Strategy], job: Job, axes: Mapping[str, Axis], plan: Plan
) -> tuple[Job, tuple[Applied, ...]]:
    """What each strategy adds; each is told what those before it do around the model's forward."""
    found = []
    for strategy in strategies:
        own = {name: axis.for_strategy(strategy.name) for name, axis in axes.items()}
        applied = strategy.apply(job, own, plan)
        if applied is not None:
            found.append(applied)
            job = job if applied.frame is None else job._replace(frame=applied.frame)
    return job, tuple(found)


def check_samples_apart(model: nn.Module, factor: str) -> None:
    """Raises LayoutError for layers that mix the samples of a batch, which ``factor`` cuts, in ways not known here.

    torch's own BatchNorms are known: they share their statistics. A table that changes its rows, or the size of its
    gradients, by the tokens of the whole batch does not know those of other ranks.

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
"""What a table may do beside looking rows up, and why that goes wrong where ranks share it or its tokens."""


def check_table(path: str, table: nn.Module, factor: str, options: Collection[str] = tuple(TABLE_OPTIONS)) -> None:
    """Raises LayoutError for a table with one of these options, where ``factor`` cuts its tokens or shares its rows.

    >>> check_table("words", nn.Embedding(9, 3, max_norm=1.0), "dp2")
    Traceback (most recent call last):
    shardwright.errors.LayoutError: the table 'words' would not be that of one device on 'dp2'
      given:   Embedding with max_norm=1.0, which changes rows by the tokens that one rank sees
      allowed: Embedding without max_norm; with it on tp alone, where every rank sees all tokens
      fix:     leave out max_norm, or write tp2
    """
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
