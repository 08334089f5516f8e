"""``sbp``: how a tensor lies along each axis of its placement. The words are spellings of torch's own.

| here | torch | each member of the axis holds |
|---|---|---|
| ``split(dim)`` | ``Shard(dim)`` | a slice of ``dim``, as ``torch.chunk`` cuts: some may be empty |
| ``broadcast`` | ``Replicate()`` | all of it |
| ``partial_sum`` | ``Partial()`` | one term of a sum |
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex, TypeGuard

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import placement_types as types

from shardwright.errors import LayoutError
from shardwright.global_tensor.placement import Placement

Sbp = types.Placement
"""Torch's name for it is ``Placement``; a placement is something else here."""

broadcast = Replicate()
partial_sum = Partial()


def split(dim: int) -> Shard:
    """Cut along ``dim``; a negative one counts from the last. Raises LayoutError: no whole number.

    >>> text((split(0), broadcast))
    '(split(0), broadcast)'
    """
    if isinstance(dim, bool) or not isinstance(dim, SupportsIndex):
        raise LayoutError("not a dim", given=f"split({dim!r})", allowed="whole numbers", fix="write split(0)")
    return Shard(index(dim))


def is_split(one: object) -> TypeGuard[Shard]:
    """Whether it is a plain cut."""
    return type(one) is Shard


def text(sbp: Sequence[Sbp]) -> str:
    """Its spelling: without brackets for one axis."""
    words = [
        f"split({one.dim})" if isinstance(one, Shard) else "broadcast" if isinstance(one, Replicate) else "partial_sum"
        for one in sbp
    ]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


def checked(sbp: Sbp | Sequence[Sbp], where: Placement, num_dims: int) -> tuple[Sbp, ...]:
    """The sbp as a tuple, one for each axis of the placement, dims counted from the first.

    Raises: LayoutError: another number of them, a dim the tensor does not have, or something else.

    >>> from shardwright.global_tensor.placement import placement
    >>> checked(split(-1), placement("cpu", [0, 1]), 2)
    (Shard(dim=1),)
    """
    given = (sbp,) if isinstance(sbp, Sbp) or not isinstance(sbp, Sequence) else tuple(sbp)
    if len(given) != where.ndim:
        raise LayoutError(
            "one sbp is needed for each axis of the placement",
            given=f"{len(given)} for {where}, which has {where.ndim}: {sbp!r}",
            allowed=f"{where.ndim}",
            fix=f"write ({', '.join(['broadcast'] * where.ndim)},) and change what shall be cut",
        )
    return tuple(_checked(one, num_dims) for one in given)


def checked_gradient(
    sbp: Sbp | Sequence[Sbp], lies: Sequence[Sbp], where: Placement, num_dims: int
) -> tuple[Sbp, ...]:  # fmt: skip
    """How the gradient of each rank's own part lies: it has the part's shape, so it is cut where the tensor is.

    Raises: LayoutError: as :func:`checked`, or a gradient that is cut otherwise.

    >>> from shardwright.global_tensor.placement import placement
    >>> checked_gradient(partial_sum, (broadcast,), placement("cpu", [0, 1]), 2)
    (Partial(sum),)
    """
    found = checked(sbp, where, num_dims)
    if any(one != mine and (is_split(one) or is_split(mine)) for one, mine in zip(found, lies, strict=True)):
        whole = text([one if is_split(one) else broadcast for one in lies])
        raise LayoutError(
            "the gradient of a rank's own part has another shape than the part",
            given=f"{text(found)}, for a part of {text(lies)}",
            allowed=f"{whole}; partial_sum for broadcast",
            fix=f"leave it out, or write {whole}; x.to_global(grad_sbp=...) takes any",
        )
    return found


def _checked(one: object, num_dims: int) -> Sbp:
    if is_split(one):
        if not -num_dims <= one.dim < num_dims:
            raise LayoutError(
                "cannot cut a dim that the tensor does not have",
                given=f"split({one.dim}), a tensor of {num_dims} dims",
                allowed=f"dims from {-num_dims} to {num_dims - 1}" if num_dims else "broadcast, partial_sum",
                fix=f"write split({num_dims - 1})" if num_dims else "write broadcast",
            )
        return Shard(one.dim % num_dims)
    if type(one) is Replicate or (type(one) is Partial and one.reduce_op == "sum"):
        return one
    raise LayoutError(
        "no such sbp",
        given=repr(one),
        allowed="split(dim), broadcast, partial_sum; torch's Shard, Replicate, Partial()",
        fix="write sbp.broadcast",
    )
