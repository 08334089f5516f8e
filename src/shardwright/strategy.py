"""The ``Strategy`` protocol, which a file of ``strategies/`` implements, and checks that several strategies share.

A strategy, such as data parallel or ZeRO, is one immutable object with three methods. ``place`` adds the strategy's
sharding to the plan, without changing anything else; ``apply`` changes this rank's modules; ``traffic`` predicts the
collectives of a step, in code of its own, so that tests can compare it with what the backends record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Literal, Protocol

from torch import nn

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.traced.batch_norms import batch_norms, derived_batch_norms
from shardwright.analysis.traced.structure import BATCH_NORMS
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.mesh import Coord
from shardwright.plan.alike_ranks import TrafficCuts
from shardwright.plan.option import StrategyOption
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import AppliedStrategy


class Strategy(Protocol):
    """One way to divide work or state over ranks, such as data parallel or ZeRO: ``STRATEGY`` of a strategy's file.

    For each axis of a layout and each phase at most one strategy runs: one that is not the default, if the layout gives
    an option that no other strategy of that axis and phase declares, or else the default.

    A strategy may also have a method ``traffic_cuts(plan)``, which :func:`cuts_of_traffic` calls. Without it every
    rank's messages are computed one by one.
    """

    @property
    def name(self) -> str:
        """The strategy's name in the registry, under which its collectives are recorded."""
        ...

    @property
    def axis(self) -> str:
        """The layout axis over which the strategy divides work or state, such as ``dp``; strategies may share one."""
        ...

    @property
    def phase(self) -> Literal["operators", "stages", "state"]:
        """The phase in which the strategy refines the plan: operators (layers), then pipeline stages, then state."""
        ...

    @property
    def default(self) -> bool:
        """Whether a layout that names the axis without an option (``dp4``) uses this strategy."""
        ...

    @property
    def options(self) -> Mapping[str, StrategyOption]:
        """The layout options that the strategy declares, by name.

        An option that takes a value shows one in its description, such as ``auto:8GiB``, as an example to type.
        """
        ...

    @property
    def source(self) -> str:
        """The source of the method that the strategy implements, such as a paper."""
        ...

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns a plan with this strategy's sharding added to that of ``plan``.

        Raises: LayoutError: the strategy does not fit the model.
        """
        ...

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> AppliedStrategy | None:
        """Changes the forwards and the loss of this rank's model in place, after its parameters were sharded.

        Returns what the strategy adds to the training step, such as hooks on its events, or None if it adds nothing.
        """
        ...

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns the collectives and messages that the strategy causes in a step on the rank at ``coord``.

        They must equal those that the backend records when the step runs: kind, axis and bytes.
        """
        ...


def cuts_of_traffic(strategy: Strategy, plan: Plan) -> TrafficCuts | None:
    """Returns the sizes that a strategy's ``traffic`` reads beside those of the plan's parameters, buffers and inputs.

    None says that messages depend on more than sizes, such as on which rank of an axis is the first: of a picture cut
    in rows, the first rank has one neighbour. For a strategy without the method ``traffic_cuts`` the result is None
    too.
    """
    method: Callable[[Plan], TrafficCuts | None] = getattr(strategy, "traffic_cuts", lambda _: None)
    return method(plan)


def apply_in_turn(
    strategies: Sequence[Strategy], job: Job, axes: Mapping[str, Axis], plan: Plan
) -> tuple[Job, tuple[AppliedStrategy, ...]]:
    """Applies the strategies to this rank's modules in order; the collectives of each are recorded under its name.

    Returns the job, with the ``frame`` (code to run around the model's forward) of the last strategy that has one, and
    the results of the strategies' ``apply`` that are not None.
    """
    applied_strategies = []
    for strategy in strategies:
        strategy_axes = {name: axis.for_strategy(strategy.name) for name, axis in axes.items()}
        applied = strategy.apply(job, strategy_axes, plan)
        if applied is not None:
            applied_strategies.append(applied)
            job = job if applied.frame is None else job._replace(frame=applied.frame)
    return job, tuple(applied_strategies)


def check_samples_apart(model: nn.Module, factor: str, graph: ModelGraph | None = None) -> None:
    """Raises LayoutError if a layer mixes the samples of a batch, which ``factor`` cuts, in an unsupported way.

    torch's own BatchNorms are supported: their statistics are combined over ranks. So are subclasses of them, if a
    ``graph`` of the model shows that each call computes one batch norm. Errors are other subclasses of them, and those
    with a replaced ``forward``; InstanceNorms that track running statistics; and embedding tables that
    renormalize rows or scale gradients by the tokens in the batch, because a rank has only its own tokens. With a
    ``graph`` of the model, the code between layers, and in layers that are not registered as submodules, is checked
    too.

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
        averages = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        if averages:
            mixes = module.track_running_stats  # it keeps a mean over the samples
        if not mixes:
            continue
        counts_once = graph is not None and not averages and graph.normalises_once(name)
        is_known = type(module) in BATCH_NORMS or counts_once
        if not is_known or "forward" in vars(module):
            raise LayoutError(
                f"'{name}' computes statistics over the batch, which '{factor}' cuts",
                given=f"{type(module).__name__} on {factor}",
                allowed=f"{', '.join(k.__name__ for k in BATCH_NORMS)}, and layers that treat each sample alone",
                fix="use one of these as it is, or GroupNorm, or LayerNorm",
            )
    if graph is not None:
        norms = (*batch_norms(model), *derived_batch_norms(model))
        check_own_code(graph, factor, [path for path, _ in norms])


def check_own_code(graph: ModelGraph, factor: str, shared: Collection[str] = ()) -> None:
    """Raises LayoutError if the model's own code computes a sample's values from other samples of the batch.

    ``factor``, which cuts the batch, is named in the error. ``shared`` are paths of modules that may mix samples.
    """
    call = graph.mixing_call(shared)
    if call is not None:
        where = f"in '{call.module}'" if call.module else "in the model's own forward"
        raise LayoutError(
            f"the model computes a sample's values from other samples of the batch, which '{factor}' cuts",
            given=f"{call.name} over the samples {where}, whose result goes back into each sample",
            allowed="code that treats each sample alone, and BatchNorms of torch that are attributes, of all samples",
            fix="make a BatchNorm an attribute, not an item of a plain list, and call it on all samples at once; "
            "or use GroupNorm, LayerNorm or one rank",
        )


def check_own_writes(
    graph: ModelGraph | None, copies: Collection[str], factor: str, why: str = "gathers from shards", *,
    replaced_only: bool = False, converted: bool = False,
) -> None:  # fmt: skip
    """Raises LayoutError if the model's own code writes to a parameter of which a rank computes with a copy.

    ``copies`` are the names of these parameters. What is written to a copy would be lost. ``factor`` is the part of the
    layout that makes the copies, and ``why`` says from what. With ``replaced_only`` the copies stay from step to step,
    so that code may write to them, but not replace them by ``parameter.data = ...``. ``converted`` says that the copies
    have another dtype than the parameters: code that converts a parameter to its own dtype, such as
    ``module.to(torch.float32)``, changes nothing in the plain model, but would replace the copy. A forward that cannot
    be recorded is not checked.
    """
    if graph is None or not copies:
        return
    written = graph.written_parameters(replaced_only=replaced_only, converted=converted)
    for name in sorted(copies):
        if name in written:
            raise LayoutError(
                f"the forward writes to the parameter '{name}', which '{factor}' {why}",
                given=f"code of '{written[name] or 'the model'}' that changes it in place, which the copy alone has",
                allowed="such code where ranks compute with what they store: under dp, pp and tp over one axis",
                fix="compute the changed weight anew in each forward, as weight = self.weight * mask, or change it "
                "between steps, by run.load_state_dict({...}, strict=False)"
                + ("; or train in fp32, which plan looks for with --fix fp32" if converted else ""),
            )


TABLE_OPTIONS: Mapping[str, str] = {
    "max_norm": "changes rows by the tokens that one rank sees",
    "scale_grad_by_freq": "counts the tokens that one rank sees",
}
"""Options of embedding tables that depend on the tokens of the whole batch, and their effect on one rank."""


def check_table(path: str, table: nn.Module, factor: str, options: Collection[str] = tuple(TABLE_OPTIONS)) -> None:
    """Raises LayoutError if an embedding table uses one of ``options``, which need the tokens of the whole batch.

    By default these are ``max_norm`` and ``scale_grad_by_freq``. The module at ``path`` may be of any class: only
    ``nn.Embedding`` and ``nn.EmbeddingBag`` are checked. ``factor`` is the part of the layout that cuts the
    tokens or the table.
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
