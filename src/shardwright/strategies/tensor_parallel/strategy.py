"""The strategy class of the tensor-parallel modes 1D, 2D, 2.5D and 3D; ``tensor_1d.py`` to ``tensor_3d.py`` use it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar, Literal

from torch import nn

from shardwright.analysis.objects.marked_inputs import marks_in, own_samples_dims
from shardwright.analysis.on_meta.hidden_outputs import refused_output
from shardwright.analysis.recorded.weight_readers import read_by_others
from shardwright.analysis.traced.structure import has_hooks, is_inside, is_known, owners
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError, PlanError
from shardwright.mesh import Coord
from shardwright.plan.alike_ranks import TrafficCuts
from shardwright.plan.event_stages import EventStages
from shardwright.plan.operator_work import operator_work
from shardwright.plan.option import StrategyOption
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.executor import Events
from shardwright.strategies.tensor_parallel.apply import apply
from shardwright.strategies.tensor_parallel.hints import with_hints
from shardwright.strategies.tensor_parallel.mode import OPTIONS, Mode
from shardwright.strategies.tensor_parallel.note import notes_of
from shardwright.strategies.tensor_parallel.on_shards import apply_on_shards, shard_of_drawn
from shardwright.strategies.tensor_parallel.place import place, why_apart
from shardwright.strategies.tensor_parallel.plan_draft import own_names, record_of_own_code, recorded_run
from shardwright.strategies.tensor_parallel.roles import GridAxis, State
from shardwright.strategies.tensor_parallel.shards_plan import (
    ENOUGH,
    GAIN,
    LEAST_SHARE,
    ShardsNote,
    place_on_shards,
    share_cut,
    work_cut,
)
from shardwright.strategies.tensor_parallel.shards_traffic import traffic_on_shards
from shardwright.strategies.tensor_parallel.traffic import traffic
from shardwright.strategies.tensor_parallel.traffic_cuts import traffic_cuts
from shardwright.strategy import check_own_writes

SOME = 1e-9
"""The least share of parameter bytes to ask for if any cut will do: every plan that cuts something reaches it."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """One tensor-parallel mode (1D, 2D, 2.5D, 3D): how its grid's axes shard activations between layers.

    Args:
        does: one line for the table of strategies.
        own_options: the options that only this mode has; all modes share ``OPTIONS``.
        stream: by axis, whether activations between layers are cut by rows (T) or features (F), or copied (C).
        rows_with: options under which activations are cut by rows over every axis.
        copied: the axes over which weights are copied; over the others they are cut.
    """

    name: str
    does: str
    own_options: Mapping[str, StrategyOption]
    stream: Mapping[str, State]
    source: str
    rows_with: Collection[str] = ()
    copied: Collection[str] = ()
    default: bool = False
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"

    @property
    def options(self) -> Mapping[str, StrategyOption]:
        """The layout options of this tensor-parallel mode (1D to 3D): first its own, then those of all modes."""
        return {**self.own_options, **OPTIONS}

    def mode(self, plan: Plan) -> Mode:
        """Returns the grid and settings that the layout's ``tp`` factor describes; an axis of one rank is left out."""
        factor = plan.layout.factor("tp")
        assert factor is not None, "chosen for a layout with tp"
        stream = self.stream
        if any(factor.option(name) is not None for name in self.rows_with):
            stream = dict.fromkeys(stream, "T")
        axes = tuple(
            GridAxis(axis, size, stream[axis], axis not in self.copied)
            for axis, size in zip(factor.mesh_axes, factor.sizes, strict=True)
            if size > 1
        )
        pin = next((option.value for option in factor.options if option.value in ("summa", "classic")), None)
        inner: Mapping[str, State] = {**stream, "row": "F", "col": "T"} if pin == "classic" else stream
        return Mode(
            self.name,
            axes,
            keep=factor.option("regather") is None and pin != "summa",
            overlap=factor.option("no-overlap") is None,
            pinned=tuple(inner[axis.name] for axis in axes) if pin is not None else None,
            dim=1 if plan.token_axes.intersection(stream) else 0,
        )

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan with every layer cut that the grid can cut.

        The plan may be to run the model's own forward on tensor shards instead: if pipeline stages were cut from a
        recorded forward and shards cut enough of it; if layers cannot be cut; or if the model has code of its own and a
        record of its forward shows how to cut clearly more of the parameters.

        Raises: LayoutError, PlanError: neither way cuts enough of the model, a layer mixes the samples or tokens that
            the layout cuts, or the model returns tensors inside of objects that torch's pytree does not know.
        """
        mode, run = self.mode(plan), None if is_known(job.model) else recorded_run(job)
        if run is not None and run.recording.hidden_in is not None:
            raise refused_output(run.recording.hidden_in, str(plan.layout.factor("tp")))
        placed = self._placed(job, plan, mode)
        check_own_writes(job.graph, _gathered(job.model, placed), str(plan.layout.factor("tp")))
        return with_hints(job.model, placed, [a.name for a in mode.axes if a.stream != "T"])

    def _placed(self, job: Job, plan: Plan, mode: Mode) -> Plan:
        # plans for known layers would gather copies of an input without samples, and samples along dim 0
        has_others = bool(mode.row_axes) and bool(marks_in(job.example) or own_samples_dims(job.example))
        if job.recorded or has_others:  # stages were cut from a record, so a plan on shards comes first
            on_shards = place_on_shards(job, plan, mode, SOME)
            if on_shards is not None:
                return on_shards
        if has_others:
            raise LayoutError(
                "the layout gathers samples inside the model, which takes an input that has none, or not in dim 0",
                given="an input marked by sw.whole, sw.packed or sw.samples_in, under "
                f"{plan.layout.factor('tp')}, which cuts tokens, or layers of {type(job.model).__name__} that are not "
                "recorded",
                allowed="a model whose own code runs on shards of its tensors, or tp over one axis",
                fix=f"write tp{prod(axis.size for axis in mode.axes)}, or leave out roles and options such as seq",
            )
        try:
            apart = self._called_apart(job, mode)
            known = place(job._replace(roles={**dict.fromkeys(apart, "copied"), **job.roles}), plan, mode, apart)
            for path in known.roles.keys() - job.roles.keys():
                if why := why_apart(path, apart):
                    known = known.role(path, mode.name, "copied", f"{why}: every rank computes it whole")
        except (LayoutError, PlanError):
            on_shards = place_on_shards(job, plan, mode, SOME)
            # a model may be mostly tables that stay whole, as of positions, so the share of work is enough too
            if on_shards is None or (share_cut(on_shards) < LEAST_SHARE and work_cut(on_shards) < ENOUGH):
                raise
            return on_shards
        if plan.layout.factor("pp") is not None and all(axis.stream == "T" for axis in mode.axes):
            return known  # on shards, too, only samples would be cut
        share = share_cut(known)
        least = max(LEAST_SHARE, min(2 * share, share + GAIN))  # a clear gain is asked for
        if READ_BY_OTHERS in apart.values():  # on shards, weights that other code reads may be cut too
            least = max(LEAST_SHARE, share)
        if share >= ENOUGH and any(isinstance(m, nn.MultiheadAttention) or has_hooks(m) for m in job.model.modules()):
            least = 2.0  # no gain is enough
        if all(map(is_known, job.model.modules())) and least > 1:
            return known
        on_shards = place_on_shards(job, plan, mode, least)
        if on_shards is None and least < 2 and (work := _known_work(known, job)) < ENOUGH:  # e.g. most bytes are tables
            on_shards = place_on_shards(job, plan, mode, LEAST_SHARE)
            if on_shards is not None and work_cut(on_shards) < min(ENOUGH, work + GAIN):
                on_shards = None
        return on_shards or known

    def _called_apart(self, job: Job, mode: Mode) -> dict[str, str]:
        """Returns the layers that ranks may not share because of how they are called or read, each with the reason.

        Under any layout these are:

        - layers that are called inside a transform such as ``torch.vmap``, which takes no autograd function of a
          collective;
        - layers that ``torch.func.functional_call`` calls with other tensors in place of their parameters;
        - layers whose weights other code reads, such as a penalty on weights in a forward, or members of an ensemble
          that are never called themselves.

        If an axis cuts samples, ranks would call the following layers differently, and wait for each other in their
        collectives:

        - layers whose calls depend on activations, such as experts; not those that a module calls before it selects by
          values;
        - layers that are called for one sample after another.
        """
        run = record_of_own_code(job)
        if run is None:
            return {}
        calls, reasons = run.recording.calls, dict[str, str]()
        for module, first in run.recording.selecting.items() if mode.row_axes else ():
            later = {call.module for call in calls[first:]} - {module}
            reasons |= dict.fromkeys(
                sorted(path for path in later if is_inside(path, module)), "activations decide whether it is called"
            )
        by_sample = {name.rpartition(".")[0] for name in run.parameters_by_sample} if mode.row_axes else set()
        reasons |= dict.fromkeys(sorted(by_sample), "it is called for one sample after another")
        read = read_by_others(job.model, run.recording)
        reasons |= {path: READ_BY_OTHERS for path, _, _, name in owners(job.model) if path and name in read}
        used, called = run.recording.parameters_used, {call.module for call in calls}
        hidden = {call.module for call in calls if call.is_hidden}
        for path, _, _, name in owners(job.model):
            if path and path in hidden:
                reasons[path] = "it is called inside a transform or saved-tensor hooks"
            elif path and path in called and name not in used:
                reasons[path] = "it is called with other tensors in place of its parameters"
        return reasons

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> AppliedStrategy:
        """Replaces the forwards of this rank's modules and loss with tensor-parallel ones.

        Returns the callbacks of the training step that finish their collectives, and the names of the weights whose
        gradients are final only then. If the plan is to run the model's own forward on tensor shards (``ShardsNote``),
        the modules and the loss are wrapped instead: the result then has the context in which pipeline stages run their
        calls, if the layout has stages, and a listener that tells which forwards are those of a step. Dropout then
        draws the numbers of this rank's shards, because ``job.rng`` is told which they are.
        """
        note = plan.notes.get("")
        if isinstance(note, ShardsNote):
            stages = plan.stages if isinstance(plan.stages, EventStages) else None
            frame = apply_on_shards(job.model, job.loss, axes, note, self.name, stages, plan.recomputed)
            if job.rng is not None and note.axis is not None:
                job.rng.shard_of = partial(shard_of_drawn, axes[note.axis].index)
            events = Events() if frame.output is None else Events(during=frame.output.during)
            return AppliedStrategy(frame=frame if stages is not None else None, events=events)
        return apply(job, axes, plan, self.mode(plan))

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns the collectives of one step of the rank at ``coord``: each microbatch's, then gradient sync."""
        note = plan.notes.get("")
        if isinstance(note, ShardsNote):
            return traffic_on_shards(plan, batch, coord, note, self.mode(plan))
        return traffic(plan, batch, coord, self.mode(plan))

    def traffic_cuts(self, plan: Plan) -> TrafficCuts:
        """Returns the cuts of features, and the gathers and cuts of rows, that :meth:`traffic` reads from the plan."""
        return traffic_cuts(plan)


READ_BY_OTHERS = "its weights are read by other code"
"""The reason for a layer to stay whole if code other than its own forward reads its weights."""


def _known_work(known: Plan, job: Job) -> float:
    """Returns the share of the FLOPs that the plan ``known`` divides, by the recorded forward; 1 without a record."""
    run = recorded_run(job)
    return 1.0 if run is None else work_cut(replace(known, work=operator_work(known, run.recording, run.axes)))


def _gathered(model: nn.Module, plan: Plan) -> set[str]:
    """Returns the names of the weights that a plan shards at rest, and that ranks gather for each use."""
    note = plan.notes.get("")
    if isinstance(note, ShardsNote):
        return {*note.stored}
    fetched = ((path, name) for path, layer_note in notes_of(plan) for name, axes in layer_note.fetched() if axes)
    return {own_names(model, path)[name] for path, name in fetched}
