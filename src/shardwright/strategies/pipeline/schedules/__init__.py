"""The pipeline schedules by name: pure functions of the numbers of stages, microbatches and chunks per stage.

Read ``gpipe``, ``one_f_one_b``, ``zero_bubble``, then ``interleaved``, ``zero_bubble_v`` and ``dualpipe_v``, which
build on ``common``; then ``greedy`` and ``auto``, which search for a schedule, and ``file``, which reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.errors import LayoutError, check_at_least, fix_for
from shardwright.plan.schedule import Action, Schedule
from shardwright.strategies.pipeline.schedules.dualpipe_v import dualpipe_v
from shardwright.strategies.pipeline.schedules.gpipe import gpipe, naive
from shardwright.strategies.pipeline.schedules.interleaved import interleaved
from shardwright.strategies.pipeline.schedules.one_f_one_b import one_f_one_b
from shardwright.strategies.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from shardwright.strategies.pipeline.schedules.zero_bubble_v import zb_v

__all__ = ["SCHEDULES", "Family", "build", "forward_only", "one_by_one"]


@dataclass(frozen=True)
class Family:
    """A named pipeline schedule: its builder, a description, and the numbers of chunks per stage that it allows.

    ``builder`` is called with the numbers of stages, microbatches and chunks per stage. ``default_chunks`` is used if
    no number of chunks is given. With ``most_chunks`` None there is no upper limit.
    """

    builder: Callable[[int, int, int], Schedule]
    description: str
    default_chunks: int = 1
    least_chunks: int = 1
    most_chunks: int | None = 1

    def takes(self, num_chunks_per_stage: int) -> bool:
        """Returns whether this schedule allows ``num_chunks_per_stage`` chunks on each stage."""
        most = num_chunks_per_stage if self.most_chunks is None else self.most_chunks
        return self.least_chunks <= num_chunks_per_stage <= most


def _fixed(builder: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    """Returns a builder with a third argument, the chunks per stage, which this family's builder does not take."""
    return lambda num_stages, num_microbatches, _: builder(num_stages, num_microbatches)


SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "naive": Family(_fixed(naive), "one microbatch at a time: one stage works, the others wait"),
        "gpipe": Family(_fixed(gpipe), "all forwards, then all backwards"),
        "1f1b": Family(_fixed(one_f_one_b), "one forward and one backward by turns: less memory than gpipe"),
        "interleaved": Family(
            interleaved, "1f1b over several chunks a stage, interleaved:v2: less bubble, more traffic", 2, 2, None
        ),
        "zb-h1": Family(_fixed(zb_h1), "1f1b with the backward split: a third of its bubble in its memory"),
        "zb-h2": Family(_fixed(zb_h2), "the backward split, no stage waits: twice the memory of 1f1b"),
        "zb-v": Family(_fixed(zb_v), "two chunks a stage in a V, no stage waits: the memory of 1f1b", 2, 2, 2),
        "dualpipe-v": Family(_fixed(dualpipe_v), "two chunks a stage in a V, forwards beside backwards", 2, 2, 2),
    }
)


def build(name: str, num_stages: int, num_microbatches: int, num_chunks_per_stage: int | None = None) -> Schedule:
    """Returns the pipeline schedule called ``name``, such as ``1f1b``.

    Without ``num_chunks_per_stage`` a stage has 1 chunk, or 2 in interleaved and V-shaped schedules.

    Raises: LayoutError: the name is unknown, there is no stage or no microbatch, or the schedule does not allow that
        number of chunks per stage.

    >>> [" ".join(map(str, actions)) for actions in build("1f1b", num_stages=2, num_microbatches=2).actions]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
    """
    if name not in SCHEDULES:
        raise LayoutError(
            "no such schedule",
            given=name,
            allowed=", ".join(SCHEDULES),
            fix=f"{fix_for(name, SCHEDULES)}, or file:PATH for a schedule of your own",
        )
    check_at_least("num_stages", num_stages, 1, fix="a pipeline has one stage or more: set pp=1")
    check_at_least("num_microbatches", num_microbatches, 1, fix=f"start at {4 * num_stages}, four for each stage")
    family = SCHEDULES[name]
    num_chunks = family.default_chunks if num_chunks_per_stage is None else num_chunks_per_stage
    if not family.takes(num_chunks):
        exact = family.most_chunks == family.least_chunks
        raise LayoutError(
            f"schedule '{name}' cannot have that many chunks on a stage",
            given=num_chunks,
            allowed=f"{family.least_chunks}" if exact else f"{family.least_chunks} or more",
            fix=f"leave the number out: {name} then takes {family.default_chunks}",
        )
    return family.builder(num_stages, num_microbatches, num_chunks)


def one_by_one(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Returns a schedule of forwards alone: each stage runs all of its chunks on one microbatch, then on the next.

    ``schedule`` gives the stage of each chunk, and the name.

    >>> [" ".join(map(str, actions)) for actions in one_by_one(build("zb-v", 2, 2), 1).actions]
    ['0F0 3F0', '1F0 2F0']
    """
    lists = tuple(
        tuple(Action("F", m, chunk) for m in range(num_microbatches) for chunk in schedule.chunks_of(stage))
        for stage in range(schedule.num_stages)
    )
    return Schedule(schedule.name, lists, schedule.stage_of, num_microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the schedule without its backward actions, as evaluation and inference run it.

    >>> [" ".join(map(str, actions)) for actions in forward_only(build("zb-v", 2, 2)).actions]
    ['0F0 0F1 3F0 3F1', '1F0 2F0 1F1 2F1']
    """
    lists = tuple(tuple(action for action in actions if action.kind == "F") for actions in schedule.actions)
    return Schedule(schedule.name, lists, schedule.stage_of, schedule.num_microbatches)
