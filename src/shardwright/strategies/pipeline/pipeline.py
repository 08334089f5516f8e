"""Pipeline parallel: the model is cut into stages, one after the other, and a schedule runs microbatches through them.

::

    pp4/1f1b mb4        stage 0 | F0 F1 F2 F3          B0    B1    B2    B3 |
                        stage 1 |    F0 F1 F2       B0 F3 B1    B2    B3    |
                        stage 2 |       F0 F1    B0 F2 B1 F3 B2    B3       |
                        stage 3 |          F0 B0 F1 B1 F2 B2 F3 B3          |

The model is cut so that the slowest stage is as fast as possible, embedding and head included, by predicted work or
measured seconds. Of equally fast cuts, the one whose largest stage holds the fewest bytes is taken; a forward that is
recorded, since its code cannot be traced, is cut by slightly other rules (``event_cut``). ``show`` prints each stage's
share of both, and ``auto:8GiB`` asks for a schedule within a memory limit.

Shapes: an activation is sent as it lies on the rank: a microbatch's samples, and of these the shard that tensor
    parallelism leaves on the rank. With ``scatter`` a rank sends a part of what its neighbours hold alike.
Traffic: for each value that one chunk sends to another stage, m messages forward and, if it gets a gradient, m
    backward, directly between the stage that computes it and the one that uses it. With ``scatter`` each of those that
    is sent in parts is one n-th of the value, and is followed by an all-gather over the n ranks that receive them. The
    gradients of weights that stages share are all-reduced over those stages.
Source: Narayanan et al. 2021, arXiv:2104.04473; each schedule names its own in ``pipeline/schedules``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn

from shardwright.analysis.chunks.call_graph import Edge
from shardwright.analysis.chunks.chunks_by_parameter import chunks_by_parameter
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.traced.batch_norms import batch_norms, keeps_state_between_calls
from shardwright.analysis.traced.structure import has_hooks
from shardwright.axes import LayoutAxis
from shardwright.comm.axis import Axis
from shardwright.devices import HOST
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.layout import Option
from shardwright.mesh import Coord
from shardwright.operators.split_backward import may_split, split_backward
from shardwright.plan.alike_ranks import TrafficCuts
from shardwright.plan.event_stages import EventStages
from shardwright.plan.option import StrategyOption
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import Job, Partial, Plan, StateLayout
from shardwright.plan.recompute import activation_offload_target, recomputed_blocks
from shardwright.plan.schedule import Action, Schedule
from shardwright.plan.stages import Stages
from shardwright.plan.traffic import BoundaryTensor, StepCalls, Traffic, repeated, sync_traffic
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.mixed_precision import cast_buffers
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.strategies.pipeline.cut_model import cut_model, runs_on_shards
from shardwright.strategies.pipeline.ghost_stage import GhostStage
from shardwright.strategies.pipeline.messages import StageMessage, coming, connected_stages, leaving
from shardwright.strategies.pipeline.p2p import P2P, ReceiveBuffers
from shardwright.strategies.pipeline.pipeline_stage import PipelineStage
from shardwright.strategies.pipeline.scatter import part_sizes
from shardwright.strategies.pipeline.schedule_checks import check_order, check_schedule
from shardwright.strategies.pipeline.schedules import SCHEDULES, build
from shardwright.strategies.pipeline.schedules.auto import search
from shardwright.strategies.pipeline.schedules.file import read_schedule
from shardwright.strategies.pipeline.simulate import memory_of, recomputed_shares, times_of
from shardwright.strategies.pipeline.stage import Stage
from shardwright.strategy import check_table

StagesT = TypeVar("StagesT", Stages, EventStages)


def _written(entry: Mapping[str, Any]) -> Sequence[str]:
    """Returns the option texts of a layout in dictionary form, ``1f1b`` for ``{"size": 4, "schedule": "1f1b"}``."""
    return [entry.get("options", ""), entry.get("schedule", "")]  # the path of file:PATH has slashes, so it is last


AXIS = LayoutAxis(
    "pp",
    order=0,
    kind="stages",
    mesh_axes=(("pp",),),
    sizes="one number: pp4",
    keyword="pipeline",
    keys={"schedule": (str,), "microbatches": (str, int)},
    written=_written,
    also={"pipe": "", "stages": "", "vpp": "interleaved:v{2}", "vp": "interleaved:v{2}"},
)
"""The layout axis ``pp``: its ranks are pipeline stages, each of which holds some layers of the model."""


@dataclass(frozen=True)
class Pipeline:
    """Cuts the model into stages by the costs of its calls, and runs a schedule over them.

    A stage is one contiguous part of the model, or several under interleaved and V-shaped schedules. The option ``cut``
    names the modules at which stages begin, in place of costs.
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "stages"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, StrategyOption]] = {
        **{
            name: StrategyOption(family.description, ("interleaved:v2",) if name == "interleaved" else None)
            for name, family in SCHEDULES.items()
        },
        "auto": StrategyOption(
            "the best schedule for the chunks' costs, within a memory limit: auto:8GiB", searched=()
        ),
        "cut": StrategyOption(
            "stages by hand, each beginning at a module of this name: cut:conv1,conv2,fc",
            ("cut:token,blocks.1", "cut:conv1,conv2"),
            of_one_model=True,
        ),
        "file": StrategyOption("a schedule of your own, as CSV or JSON: file:PATH", examples=()),
        "scatter": StrategyOption(
            "tensor-parallel ranks each send a part of what they all hold to the next stage, which gathers it: "
            "less between nodes, an all-gather inside of one"
        ),
    }
    source: ClassVar[str] = "Narayanan et al. 2021, arXiv:2104.04473"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan with a schedule, and with each parameter and buffer on the stages that use it.

        A parameter that no code uses is on the stage of its neighbour in the model, and such a buffer on all of them.

        Raises: LayoutError: the model cannot be cut into that many chunks or has hooks itself; an option of ``pp`` does
            not fit; several stages call a layer that updates state in every call, such as a BatchNorm, or share an
            embedding table with ``max_norm``. PlanError: no schedule fits the memory limit of ``auto``, or the
            example's inputs do not fit the forward.
        """
        if has_hooks(job.model):
            raise LayoutError(
                "the model itself has hooks, and under a pipeline no rank calls it as a whole",
                given=f"hooks on {type(job.model).__name__} under {plan.layout}",
                allowed="hooks on modules inside it: each runs on the stage that calls it",
                fix="take the hooks off, or put them on a module inside",
            )
        plan = replace(plan, scatters=plan.layout.chosen("pp").option("scatter") is not None)
        schedule, stages = _schedule_and_stages(job, plan)
        _check_module_state(job, plan, schedule, stages)
        chunks_of = chunks_by_parameter(stages.chunked)
        used = {name for chunk in range(stages.num_chunks) for name in stages.chunked.weights_of(chunk)}
        # A buffer that no chunk uses is on all stages, unless it belongs to a module that only other forwards call.
        spare = set[str]()
        if isinstance(stages, EventStages):
            named = ((path, job.model.get_submodule(path).named_buffers()) for path in stages.uncalled)
            spare = {f"{path}.{name}" for path, buffers in named for name, _ in buffers}
            spare -= stages.chunked.record.shared_buffers  # code between modules reads these, e.g. in a method
        chunks_of = {n: c for n, c in chunks_of.items() if n in plan.compute or n in used or n in spare}
        holders = {name: sorted({schedule.stage_of[at] for at in chunks}) for name, chunks in chunks_of.items()}
        compute, state, buffers = dict(plan.compute), dict(plan.state), dict(plan.buffers)
        for name, where in holders.items():
            if name in compute:
                compute[name] = compute[name].only("pp", where)
                at_rest = state[name]
                layouts = (at_rest.parameter, at_rest.gradient, at_rest.optimizer)
                state[name] = StateLayout(*(layout.only("pp", where) for layout in layouts))
        for name, buffer in job.model.named_buffers():
            buffers[name] = buffers.get(name, TensorLayout.whole(tuple(buffer.shape))).only(
                "pp", holders.get(name, range(schedule.num_stages))
            )
        shared = {name for name, where in holders.items() if len(where) > 1}
        for use in plan.uses:
            if use.parameter in shared:
                check_table(
                    use.module, job.model.get_submodule(use.module), str(plan.layout.chosen("pp")), ["max_norm"]
                )
        # Each stage computes one term of the gradient of a parameter that stages share: gradient sync sums over pp.
        uses = tuple(
            use._replace(dy={**use.dy, "pp": Partial()}) if use.parameter in shared else use for use in plan.uses
        )
        plan = replace(plan, compute=compute, state=state, buffers=buffers, uses=uses, schedule=schedule, stages=stages)
        for path, module in job.model.named_modules() if _splits(schedule) and not runs_on_shards(plan) else ():
            if may_split(module) and Rung.OPERATOR not in plan.wrapped.get(path, {}):
                plan = plan.wraps(path, Rung.SPLIT_BACKWARD, self.name)
        return replace(plan, param_groups=_by_chunk(plan.param_groups, chunks_of), loss_axes=plan.loss_axes | {"pp"})

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> AppliedStrategy:
        """Returns this rank's pipeline stage (``Stage`` or ``GhostStage``), of which the executor runs the chunks.

        Every rank calls it, because it also connects the stages that exchange messages. Under a schedule that runs
        weight gradients apart (W), it makes this rank's layers defer these.
        """
        schedule, stages = _placed(plan)
        for _, norm in batch_norms(job.model):
            norm.register_forward_hook(_in_one_piece)
        if _splits(schedule) and job.deferred is not None and not runs_on_shards(plan):
            split_backward(job.model, job.deferred)

        def repeat(path: str, times: int, total: int) -> None:
            if job.rng is not None:
                job.rng.repeat(path, times)
            if job.frame is not None:
                job.frame.repeat(path, times, total)

        axes["pp"].connect(sorted(connected_stages(schedule, stages.chunked.edges)))
        scatter = None if plan.scatter_axis is None else axes[plan.scatter_axis]
        buffers = ReceiveBuffers((job.stands_for or axes["pp"].device.type) in HOST)
        rest = (schedule.stage_of, P2P(axes["pp"], scatter, buffers), repeat, job.frame)
        if isinstance(stages, EventStages):
            work: PipelineStage[Any] = GhostStage(job.model, _computing(stages, plan), *rest, rng=job.rng)
        else:
            work = Stage(job.model, stages if scatter is None else _computing(stages, plan), *rest)
        return AppliedStrategy(work=work, receiving=buffers.tensors)

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns the p2p messages that the rank at ``coord`` sends and receives in a step, and its collectives.

        These all-gather what is sent in parts, and all-reduce the gradients of weights that stages share.
        """
        schedule, stages = _placed(plan)
        here = set(schedule.chunks_of(coord["pp"]))
        edges = [edge for edge in stages.chunked.edges if here & {edge.source, edge.target}]
        sizes = {(edge.source, edge.target): edge.values for edge in edges}
        traffic: list[Traffic] = []
        for (message, kind), times in _messages_at(schedule, edges, coord["pp"], batch).items():
            boundary = "between chunks {} and {}".format(*sorted((message.source, message.target)))
            for value in sizes[message.source, message.target]:
                for crossing in batch.crossing[message.microbatch].get(value, ()):
                    if message.kind == "F" or crossing.needs_gradient:
                        traffic += repeated(_message_traffic(plan, kind, crossing, coord, boundary), times)
        return (*traffic, *sync_traffic(plan, coord, "pp"))

    def traffic_cuts(self, plan: Plan) -> TrafficCuts:
        """Returns no cuts, but the axis along which ranks send parts of values, if ``scatter`` is on.

        The parts of the first ranks may be larger. Ranks of one stage otherwise send alike if tensor parallelism and
        the batch leave them alike.
        """
        return TrafficCuts(parted=() if plan.scatter_axis is None else (plan.scatter_axis,))


def _in_one_piece(module: nn.Module, args: Any, output: Tensor) -> None:
    """Makes the gradient of a batch norm's output contiguous where the batch has one sample; a forward hook.

    On the CPU torch's backward of a batch norm mistakes some gradients of one sample, which are strided views, for
    contiguous tensors. On one device such views do not arise. On a stage they do, because it receives gradients as
    contiguous tensors.
    """
    if output.requires_grad and output.shape[:1] == (1,):
        output.register_hook(_contiguous)


def _contiguous(gradient: Tensor) -> Tensor:  # in this package, so that ShardsMode allows it as a hook
    return gradient.contiguous()


def _computing(stages: StagesT, plan: Plan) -> StagesT:
    """Returns a copy of the stages whose model has the dtypes that the layout computes in."""
    model = copied(stages.model, {})
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(plan.compute_dtypes[name])
    cast_buffers(model, plan)
    return replace(stages, model=model)


def _messages_at(
    schedule: Schedule, edges: Sequence[Edge], stage: int, batch: StepCalls
) -> Counter[tuple[StageMessage, str]]:
    """Returns the messages that a stage sends and receives in a step, and how often.

    Those of equal microbatches count as the first one's.
    """
    actions: Counter[Action] = Counter()
    first = {id(crossing): number for number, crossing in reversed(list(enumerate(batch.crossing)))}
    for action in schedule.actions[stage]:
        actions[action._replace(microbatch=first[id(batch.crossing[action.microbatch])])] += 1
    messages: Counter[tuple[StageMessage, str]] = Counter()
    for action, times in actions.items():
        sent = [(message, "send") for message in leaving(action, edges)]
        for message, kind in [*sent, *((message, "receive") for message in coming(action, edges))]:
            if schedule.stage_of[message.source] != schedule.stage_of[message.target]:
                messages[message, kind] += times
    return messages


def _message_traffic(plan: Plan, kind: str, crossing: BoundaryTensor, coord: Coord, boundary: str) -> list[Traffic]:
    """Returns the traffic of one tensor that is sent or received; an all-gather follows the receipt of a part.

    ``boundary`` says between which chunks, in place of a layer.
    """
    axis = plan.scatter_axis
    if axis is None or not crossing.is_scattered:
        return [Traffic(kind, "pp", crossing.num_bytes, 2, layer=boundary)]
    sizes = part_sizes(crossing.num_bytes // crossing.element_bytes, plan.mesh[axis])
    traffic = [Traffic(kind, "pp", sizes[coord[axis]] * crossing.element_bytes, 2, layer=boundary)]
    gather = Traffic("all_gather", axis, crossing.num_bytes, plan.mesh[axis], layer=boundary)
    return traffic + [gather] * (kind == "receive")


def _placed(plan: Plan) -> tuple[Schedule, Stages | EventStages]:
    assert plan.schedule is not None, "set by place()"
    assert plan.stages is not None, "set by place()"
    return plan.schedule, plan.stages


def _splits(schedule: Schedule) -> bool:
    """Whether the schedule splits the backward: weight gradients have actions of their own."""
    return any(action.kind == "W" for actions in schedule.actions for action in actions)


def _schedule_and_stages(job: Job, plan: Plan) -> tuple[Schedule, Stages | EventStages]:
    """Returns the layout's schedule, and the model cut into that schedule's chunks.

    Raises LayoutError for options that do not fit, or a model that cannot be cut so.
    """
    factor = plan.layout.chosen("pp")
    named = factor.option("cut")
    if named is not None and not named.value:
        raise LayoutError(
            "'cut' needs names", given=str(factor), allowed="cut:conv1,conv2", fix="name a module each stage"
        )
    names = tuple(named.value.split(",")) if named is not None and named.value else ()
    most = max(LEAST_MOST_STAGES, CALLS_OF_ONE * sum(1 for _ in job.model.modules()))
    per_stage = max((_num_chunks(option) or 1 for option in factor.options if option.name in SCHEDULES), default=1)
    if factor.size * per_stage > most:  # checked before a schedule of a million chunks is built
        raise LayoutError(
            f"the model cannot be cut into {factor.size} stages" + f" of {per_stage} chunks each" * (per_stage > 1),
            given=f"{type(job.model).__name__}, of {most // CALLS_OF_ONE} modules at most",
            allowed=f"far less than {most} stages or chunks: as many as the model makes calls of modules",
            fix="ask for fewer stages" + " or chunks" * (per_stage > 1),
        )
    by_device = named is None and bool(job.stages)
    if by_device:
        names = job.stages
    # tensor parallelism replaces the forwards of these modules as a whole; on shards it replaces none
    closed = set() if runs_on_shards(plan) else {path for path in (*plan.roles, *plan.notes) if path}
    draws = job.graph.draws if job.graph is not None else None
    closed |= draws.selecting if draws is not None else set()  # wrapped whole, to follow the rows that they select

    def cut_into(num_chunks: int, stage_of: Sequence[int] = ()) -> Stages | EventStages:
        if by_device and num_chunks != len(names):
            raise LayoutError(
                "the model's parts are on several devices, and the layout has another number of stages",
                given=f"{factor}, {num_chunks} chunks; devices change at {', '.join(names)}",
                allowed=f"{len(names)} chunks, one for each, or stages that are named by hand",
                fix=f"write pp{len(names)}, or cut: and the names, or leave the model on one device",
            )
        job.model.train()  # a copy of the user's model; modules that only training calls need a stage too
        asked = {"names": names, "seconds": job.seconds, "closed": closed, "stage_of": stage_of}
        return cut_model(job, plan, num_chunks, asked)

    auto = factor.option("auto")
    others = [str(option) for option in factor.options if option.name in (*SCHEDULES, "file")]
    if auto is not None and others:
        raise LayoutError(
            "'auto' chooses the schedule itself",
            given=str(factor),
            allowed="auto, or one of " + ", ".join(SCHEDULES) + ", file:PATH",
            fix=f"write pp{factor.size}/{others[0]}, or pp{factor.size}/{auto}",
        )
    if auto is None:
        schedule = _named_schedule(plan)
        return schedule, cut_into(schedule.num_chunks, schedule.stage_of)
    stages = {factor.size: cut_into(factor.size)}
    if not names:
        with suppress(LayoutError):  # too few calls for two chunks on a stage
            stages[2 * factor.size] = cut_into(2 * factor.size)
    again = recomputed_blocks(job.model, plan.layout) if activation_offload_target(plan.layout) is None else ()
    times = [times_of(cut.costs, recomputed=recomputed_shares(cut, again)) for cut in stages.values()]
    memory = [memory_of(cut.costs) for cut in stages.values()]
    schedule, _ = search(factor.size, plan.layout.num_microbatches, times, memory, _limit_bytes(auto))
    return schedule, stages[schedule.num_chunks]


LEAST_MOST_STAGES, CALLS_OF_ONE = 1024, 16
"""Two limits on the number of chunks in all: a fixed one, and one for each module of the model. The larger one holds.

A layout with more chunks is refused before the model is cut.
"""


def _check_module_state(job: Job, plan: Plan, schedule: Schedule, stages: Stages | EventStages) -> None:
    """Checks that a layer that updates state in every call, such as a BatchNorm, updates it in one-device order.

    Raises: LayoutError: several stages call the layer, or chunks that take turns; forwards in another order.
    """
    own = plan.layout.own_statistics
    calls = [stages.chunked.calls_of(chunk) for chunk in range(schedule.num_chunks)]
    for path, module in job.model.named_modules():
        if not keeps_state_between_calls(module):
            continue
        chunks = [n for n, paths in enumerate(calls) if any(f"{path}.".startswith(f"{call}.") for call in paths)]
        if len({schedule.stage_of[chunk] for chunk in chunks}) > 1 or (own and len(chunks) > 1):
            raise LayoutError(
                f"'{path}' updates state with every call, and several stages or chunks call it",
                given=f"{type(module).__name__} in chunks {', '.join(map(str, chunks))} under {plan.layout}",
                allowed="a layer of its own for each call, or calls in one chunk",
                fix="give each call a layer of its own, or let one stage make them all: cut:first,second",
            )
        if own:
            check_order(schedule)


def _limit_bytes(option: Option) -> int | None:
    """Returns the most bytes of activations on a stage from an option such as ``auto:512MiB``; None for ``auto`` alone.

    Raises LayoutError for any other value.
    """
    if option.value is None:
        return None
    match = re.fullmatch(r"([0-9]+)(KiB|MiB|GiB)", option.value)
    if match is None:
        raise LayoutError(
            "'auto' takes the most memory for a stage's activations",
            given=str(option),
            allowed="auto:512MiB, auto:8GiB, or auto alone",
            fix="write auto:8GiB",
        )
    return int(match[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]]


def _named_schedule(plan: Plan) -> Schedule:
    """Returns the schedule that a layout names, by default 1f1b, or that of the file in its option ``file``.

    Raises LayoutError for several schedules, or one that does not fit the layout.
    """
    factor = plan.layout.chosen("pp")
    file = factor.option("file")
    named = [option for option in factor.options if option.name in SCHEDULES]
    if len(named) + (file is not None) > 1:
        names = [str(option) for option in factor.options if option.name in (*SCHEDULES, "file")]
        raise LayoutError(
            "a pipeline runs one schedule",
            given=" and ".join(names),
            allowed="one of " + ", ".join(SCHEDULES) + ", file:PATH",
            fix=f"write pp{factor.size}/{names[0]}",
        )
    if file is not None:
        if file.value is None:
            raise LayoutError("'file' needs a path", given=str(factor), allowed="file:PATH", fix="write file:PATH")
        schedule = read_schedule(file.value)
        if schedule.num_stages != factor.size:
            raise LayoutError(
                "the schedule is for another number of stages",
                given=f"{file.value}: {schedule.num_stages} stages, under pp{factor.size}",
                allowed=f"a file with {factor.size} lists",
                fix=f"write pp{schedule.num_stages}/{file}",
            )
        check_schedule(schedule, plan.layout.num_microbatches)
        return schedule
    option = named[0] if named else None
    chunks = None if option is None else _num_chunks(option)
    return build(option.name if option else "1f1b", factor.size, plan.layout.num_microbatches, chunks)


def _num_chunks(option: Option) -> int | None:
    """Returns the chunks of each stage that a schedule's option names, such as 2 of "interleaved:v2", or None.

    Raises LayoutError for any other value.
    """
    if option.value is None:
        return None
    if not (option.value.startswith("v") and option.value[1:].isdecimal()):
        raise LayoutError(
            f"'{option.name}' takes a number of chunks for each stage",
            given=str(option),
            allowed=f"{option.name}:v2, {option.name}:v3, ...",
            fix=f"write {option.name}:v2",
        )
    return int(option.value[1:])


def _by_chunk(groups: tuple[ParamGroup, ...], chunks_of: Mapping[str, Sequence[int]]) -> tuple[ParamGroup, ...]:
    """Splits param groups at the cuts, so that each group's parameters are first used in one chunk; sorts by chunk."""
    numbered_groups: list[tuple[int, ParamGroup]] = []
    for group in groups:
        chunks = sorted({chunks_of[name][0] for name in group.parameters})
        for chunk in chunks:
            parameters = tuple(name for name in group.parameters if chunks_of[name][0] == chunk)
            name = group.name if len(chunks) == 1 else f"{group.name} ({chunk})"
            numbered_groups.append((chunk, ParamGroup(name, parameters)))
    return tuple(group for _, group in sorted(numbered_groups, key=lambda pair: pair[0]))


STRATEGY = Pipeline()
