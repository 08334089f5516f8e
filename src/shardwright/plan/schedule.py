"""Pipeline schedules as data: a list of actions for each stage. One executor runs any schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """An action of a schedule, on one microbatch and one chunk of the model.

    ``kind`` is ``F`` for the forward and ``B`` for the whole backward. If the backward is split, it is ``I`` for the
    input's gradient and ``W`` for the weights' gradients. Chunks are numbered in forward order over the whole model.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the list of actions of each stage for one step.

    ``actions[s]`` are those of stage ``s``, and ``stage_of[c]`` is the stage that holds chunk ``c`` of the model.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    stage_of: tuple[int, ...]
    num_microbatches: int

    def __hash__(self) -> int:
        # equality compares the actions, too; hashing thousands of them for each look into a cache would take long
        return hash((self.name, self.stage_of, self.num_microbatches))

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.stage_of)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Returns the numbers of the chunks that ``stage`` holds, in forward order."""
        return tuple(chunk for chunk, at in enumerate(self.stage_of) if at == stage)


def needs(action: Action, num_chunks: int) -> tuple[Action, ...]:
    """Returns the actions, on any stage, that must be done before ``action`` can begin.

    A forward needs the forward of the chunk before, a backward (B or I) its own forward and the input gradient of the
    next chunk, and W its own I. The next chunk may compute its input gradient in a B or in an I; the I is returned for
    both.
    """
    kind, microbatch, chunk = action
    if kind == "F":
        return (Action("F", microbatch, chunk - 1),) if chunk else ()
    if kind == "W":
        return (Action("I", microbatch, chunk),)
    after = (Action("I", microbatch, chunk + 1),) if chunk + 1 < num_chunks else ()
    return (Action("F", microbatch, chunk), *after)


def accumulate(num_microbatches: int) -> Schedule:
    """Returns the schedule of gradient accumulation on one stage: each microbatch's forward, then its backward.

    >>> [str(action) for action in accumulate(2).actions[0]]
    ['0F0', '0B0', '0F1', '0B1']
    """
    actions = tuple(Action(kind, m) for m in range(num_microbatches) for kind in ("F", "B"))
    return Schedule("accumulate", (actions,), (0,), num_microbatches)
