"""Checks that all ranks make the same call on global tensors, before the call sends anything and would hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.comm.agreement import check_agreement, gather_json
from shardwright.comm.current_world import everyone_here, here
from shardwright.errors import LayoutError
from shardwright.global_tensor.geometry import GlobalLayout, local_shape


def check_alike(what: str, told: Sequence[object]) -> None:
    """Raises LayoutError unless every rank gave ``what`` as rank 0 did; ``told[rank]`` is what each gave."""
    others = [rank for rank, each in enumerate(told) if each != told[0]]
    if others:
        raise _disagreement(what, f"ranks {others} give another than rank 0")


def check_everywhere(what: str, said: Iterable[object]) -> None:
    """Raises LayoutError unless every rank gives the same items for ``what``.

    Traffic: one all-reduce of two numbers.
    """
    check_agreement(everyone_here(), [str(each) for each in said], lambda found: _disagreement(what, str(found)))


def check_source(x: DTensor, where: GlobalLayout) -> None:
    """Raises LayoutError for a DTensor that lies in a way which no sbp says: on every rank, wherever it does.

    Traffic: one short message to each rank.
    """
    for one in where.sbp:
        plain = type(one) in (Shard, Replicate) or (one.is_partial() and getattr(one, "reduce_op", "sum") == "sum")
        if not plain:
            raise LayoutError(
                "a DTensor lies in a way that is no sbp",
                given=repr(one),
                allowed="Shard(dim), Replicate() and Partial('sum')",
                fix="redistribute it to Replicate() first",
            )
    held, expected = list(x._local_tensor.shape), list(local_shape(tuple(x.shape), where, here().rank))
    is_wrong = here().rank in where.placement and held != expected
    for rank, (given, allowed) in enumerate(gather_json(everyone_here(), [held, expected] if is_wrong else [0, 0])):
        if given != allowed:
            raise LayoutError(
                "a DTensor is not cut as torch.chunk cuts",
                given=f"{given} of {list(x.shape)} on rank {rank}",
                allowed=f"{allowed} there",
                fix="redistribute it to Replicate() first",
            )


def _disagreement(what: str, given: str) -> LayoutError:
    return LayoutError(
        f"ranks disagree on {what}",
        given=given,
        allowed="the same on every rank, members or not",
        fix="compute it without looking at the rank",
    )
