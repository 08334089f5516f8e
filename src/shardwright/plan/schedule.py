"""A schedule is data: for each stage, the list of actions that make one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work on one microbatch and one chunk of the model.

    ``F`` forward; ``B`` the whole backward; ``I`` the gradient of the input alone; ``W`` what is left of the backward,
    the gradients of the weights. Chunks are counted in forward order over the whole model.

    >>> str(Action("F", microbatch=3)), str(Action("I", microbatch=0, chunk=5))
    ('0F3', '5I0')
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every stage does in one step, in order, and where each chunk of the model lives.

    ``actions[s]`` is the list of stage ``s``; ``stage_of[c]`` the stage that holds chunk ``c``.

    >>> schedule = accumulate(1)
    >>> schedule.num_stages, schedule.num_chunks, schedule.chunks_of(0)
    (1, 1, (0,))
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    stage_of: tuple[int, ...]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """How many pieces the model is cut into."""
        return len(self.stage_of)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that ``stage`` holds, in forward order."""
        return tuple(chunk for chunk, at in enumerate(self.stage_of) if at == stage)


def needs(action: Action, num_chunks: int) -> tuple[Action, ...]:
    """What must be done before ``action`` can begin, on whatever stage; one of several forms suffices for each.

    A backward needs the input's gradient from the chunk after, which ``B`` gives as well as ``I``: the form with ``I``
    is named.

    >>> [str(a) for a in needs(Action("F", 2, chunk=1), 3)], [str(a) for a in needs(Action("B", 2, chunk=1), 3)]
    (['0F2'], ['1F2', '2I2'])
    """
    kind, microbatch, chunk = action
    if kind == "F":
        return (Action("F", microbatch, chunk - 1),) if chunk else ()
    if kind == "W":
        return (Action("I", microbatch, chunk),)
    after = (Action("I", microbatch, chunk + 1),) if chunk + 1 < num_chunks else ()
    return (Action("F", microbatch, chunk), *after)


def accumulate(num_microbatches: int) -> Schedule:
    """The schedule without a pipeline: each microbatch forward, then backward, gradients added up.

    >>> [str(action) for action in accumulate(2).actions[0]]
    ['0F0', '0B0', '0F1', '0B1']
    """
    actions = tuple(Action(kind, m) for m in range(num_microbatches) for kind in ("F", "B"))
    return Schedule("accumulate", (actions,), (0,), num_microbatches)
