"""Have the ranks that share shards made the same calls? An all-gather of another unit of equal size goes unnoticed.

In stage 3 each rank unshards the units that its own forward uses. If samples take ranks through different code, an
all-gather mixes the shards of different units, and only this comparison finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.comm.axis import Axis
from shardwright.comm.values import digest, first_unlike, gather_json
from shardwright.errors import PlanError

_LEAST = torch.iinfo(torch.int64).min


def compare_calls(calls: Sequence[str], world: Axis, groups: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Starts to compare each rank's ``calls`` with those of its group; returns a function that waits for the answer.

    ``groups`` are the ranks that share shards. All of ``world`` take part, so that an error is raised on every rank.
    Traffic: one all-reduce of two numbers for each group.
    Raises: PlanError, from the returned function and on every rank: the first calls that differ.

    >>> from shardwright import Mesh, run_on_threads
    >>> def work(axes):
    ...     try:
    ...         compare_calls([f"a gather of '{axes['dp'].index}'"], axes["dp"], [[0, 1]])()
    ...     except PlanError as error:
    ...         return str(error).splitlines()[1]
    >>> run_on_threads(Mesh(dp=2), work)[1]
    "  given:   call 1 of rank 0 is a gather of '0', of rank 1 a gather of '1'"
    """
    if world.device.type == "meta" or world.size == 1:
        return lambda: None  # a rehearsal on the meta device has no other ranks
    mine, number = list(calls), digest("\n".join(calls))
    place = next(place for place, ranks in enumerate(groups) if world.ranks[world.index] in ranks)
    pairs = torch.full((len(groups), 2), _LEAST, device=world.device)
    pairs[place, 0], pairs[place, 1] = number, -number  # one maximum gives the largest digest and the smallest
    pending = world.all_reduce_async(pairs, "max")

    def finish() -> None:
        if all(most == -least for most, least in pending.wait().tolist()):
            return
        every = dict(zip(world.ranks, gather_json(world, mine), strict=True))
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
