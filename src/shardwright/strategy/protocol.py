"""What a strategy is: one file, one value, three functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from shardwright.comm import Axis
from shardwright.errors import LayoutError, explain
from shardwright.mesh import Coord
from shardwright.models.structure import BATCH_NORMS
from shardwright.pipeline import Events, Frame, Work
from shardwright.strategy.plan import Job, Plan
from shardwright.strategy.traffic import Batch, Traffic


class Offload(Protocol):
    """State that rests in host memory or on disk while nobody works on it: which, and how an optimizer updates it."""

    @property
    def place(self) -> str:
        """Where: ``host`` or ``disk``."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that rests there."""
        ...

    def attach(self, optimizer: torch.optim.Optimizer, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        """From now on the optimizer steps unit by unit, its state there; ``make`` gives one like it over other groups.

        Raises: PlanError, on every rank: there is no room.
        """
        ...

    def home(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        """Where a value of the optimizer's state rests that has an entry for each of the parameter's."""
        ...

    def put_away(self) -> None:
        """Nobody works on any of it now."""
        ...

    def begin(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """From now on a unit is updated as soon as its gradients are there, times ``factor``: until :meth:`end`."""
        ...

    def end(self) -> None:
        """Waits for what :meth:`begin` has started; the optimizer's own step leaves out what is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a strategy adds to a rank's run beside changed modules; each is optional.

    ``events`` are fired by the executor. ``parameters`` take the place of the model's for the optimizer, where a
    parameter rests in another form than it computes in; they carry the gradients too. ``work`` is this rank's part of
    the model, where it is not the whole. ``frame`` is what is done around the model's forward, for stages, which run
    the modules inside; without stages it is done by hooks. ``late`` are parameters whose gradients do not come from
    autograd: they are in place when ``after_backward`` has returned. ``summed`` says of a unit whether its gradients,
    where they rest elsewhere, are ready in this step for what else is to be summed.
    ``offload`` is where state rests, if that is not this rank's device. ``kept`` gives what stays on the device between
    steps and is no parameter: buffers that parameters become views of. ``saving`` is what it does with what
    autograd saves, and undoes: for those who have hooks of their own inside.
    """

    events: Events = field(default_factory=Events)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    work: Work | None = None
    frame: Frame | None = None
    late: frozenset[str] = frozenset()
    summed: Callable[[str], bool] = lambda unit: True
    offload: Offload | None = None
    kept: Callable[[], Iterable[Tensor]] = tuple
    saving: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None


class Strategy(Protocol):
    """One strategy: a file of ``strategies/`` that defines ``STRATEGY``.

    For each axis of a layout and each phase, the strategy that declares one of the options given is chosen, or
    else the one with ``default``. ``options`` maps each option to what it does; one that takes a value shows it
    there: "stages by hand: cut:conv1,conv2". Others refuse values.
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
                explain(
                    f"'{name}' computes statistics over the batch, which '{factor}' cuts",
                    given=f"{type(module).__name__} on {factor}",
                    allowed=f"{', '.join(k.__name__ for k in BATCH_NORMS)}, and layers that treat each sample alone",
                    fix="use one of these as it is, or GroupNorm, or LayerNorm",
                )
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
                explain(
                    f"the table '{path}' would not be that of one device on '{factor}'",
                    given=f"{kind} with {option}={getattr(table, option)}, which {TABLE_OPTIONS[option]}",
                    allowed=f"{kind} without {option}; with it on tp alone, where every rank sees all tokens",
                    fix=f"leave out {option}, or write tp{prod(map(int, size.split('x')))}",
                )
            )
