"""Checks that all ranks call a global-tensor function with equal arguments, before the call sends anything.

Otherwise ranks that are called with different arguments would wait forever for each other's messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.comm.agreement import check_agreement, gather_json
from shardwright.comm.current_world import current_world, everyone_here
from shardwright.errors import LayoutError
from shardwright.global_tensor.geometry import GlobalLayout, local_shape


def check_everywhere(what: str, items: Iterable[object]) -> None:
    """Raises LayoutError on every rank unless all ranks pass equal ``items``; ``what`` names the items in the error.

    Items are compared by their text.

    Traffic: one all-reduce of two numbers; if ranks differ, the texts are gathered too.
    """
    check_agreement(
        everyone_here(), [str(value) for value in items], lambda difference: disagreement(what, str(difference))
    )


def check_source(x: DTensor, layout: GlobalLayout) -> None:
    """Raises LayoutError on every rank if the DTensor ``x``, whose layout is ``layout``, cannot become a global tensor.

    It cannot if one of its torch placements is not ``Shard``, ``Replicate`` or ``Partial`` of a sum, or if a rank's
    shard has another shape than the slice that ``torch.chunk`` gives.

    Traffic: two short all-gathers.
    """
    for one in layout.sbp:
        is_sbp = type(one) in (Shard, Replicate) or (one.is_partial() and getattr(one, "reduce_op", "sum") == "sum")
        if not is_sbp:
            raise LayoutError(
                "a DTensor has a placement that is no sbp",
                given=repr(one),
                allowed="Shard(dim), Replicate() and Partial('sum')",
                fix="redistribute it to Replicate() first",
            )
    held, expected = list(x._local_tensor.shape), list(local_shape(tuple(x.shape), layout, current_world().rank))
    is_wrong = current_world().rank in layout.placement and held != expected
    # every rank gathers, also if its own slice is right, because all ranks must raise or none
    for rank, (shape, allowed) in enumerate(gather_json(everyone_here(), [held, expected] if is_wrong else [0, 0])):
        if shape != allowed:
            raise LayoutError(
                "a DTensor is not cut as torch.chunk cuts",
                given=f"{shape} of {list(x.shape)} on rank {rank}",
                allowed=f"{allowed} there",
                fix="redistribute it to Replicate() first",
            )


def disagreement(what: str, given: str) -> LayoutError:
    """Returns the LayoutError for ranks that call a global-tensor function with different arguments.

    ``what`` names the arguments and ``given`` their values, for the error's text.
    """
    return LayoutError(
        f"ranks disagree on {what}",
        given=given,
        allowed="the same on every rank, members or not",
        fix="compute it without looking at the rank",
    )
