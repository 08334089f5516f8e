"""Whether ranks that share slices have made the same calls: a gather of another unit of the same size goes unnoticed.

Where units are dropped, each rank gathers what its own forward asks for. A model whose ranks go different ways through
their code would compute with other units' values, and nothing but this comparison would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.comm.axis import Axis
from shardwright.comm.values import digest, first_unlike, gather_json
from shardwright.errors import PlanError

_LEAST = torch.iinfo(torch.int64).min


def compare(made: Sequence[str], everyone: Axis, groups: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Starts to compare what each rank has ``made`` with the others of its group; returns what waits for the answer.

    All of ``everyone`` call it, so that all know of each group. Traffic: one all-reduce of two numbers for each group.
    Raises: PlanError, from what waits and on every rank: the first calls that differ.

    >>> from shardwright import Mesh, run_on_threads
    >>> def work(axes):
    ...     try:
    ...         compare([f"a gather of '{axes['dp'].index}'"], axes["dp"], [[0, 1]])()
    ...     except PlanError as error:
    ...         return str(error).splitlines()[1]
    >>> run_on_threads(Mesh(dp=2), work)[1]
    "  given:   call 1 of rank 0 is a gather of '0', of rank 1 a gather of '1'"
    """
    if everyone.device.type == "meta" or everyone.size == 1:
        return lambda: None  # a rehearsal has no others
    mine, number = list(made), digest("\n".join(made))
    place = next(place for place, ranks in enumerate(groups) if everyone.ranks[everyone.index] in ranks)
    pairs = torch.full((len(groups), 2), _LEAST, device=everyone.device)
    pairs[place, 0], pairs[place, 1] = number, -number
    pending = everyone.all_reduce_async(pairs, "max")

    def finish() -> None:
        if all(most == -least for most, least in pending.wait().tolist()):
            return
        every = dict(zip(everyone.ranks, gather_json(everyone, mine), strict=True))
        rank, other = next((g[0], rank) for g in groups for rank in g if every[rank] != every[g[0]])
        place, first, second = first_unlike(every[rank], every[other])
        raise PlanError(
            "ranks use the model's units in different orders, so each gathers what the others do not",
            given=f"call {place} of rank {rank} is {first}, of rank {other} {second}",
            allowed="under zero3, models that use the same units in the same order on every rank",
            fix="write zero2 in place of zero3, or use every unit in each forward; the step's gradients are wrong, "
            "and so is what its forward has written into buffers",
        )

    return finish
