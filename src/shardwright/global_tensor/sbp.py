"""``sbp`` (split, broadcast, partial sum): how a tensor is sharded along each axis of its placement.

The values are torch's own placement types under shorter names:

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
"""The sharding of a tensor along one axis: torch's ``Placement``, a word that here means a set of ranks."""

Sbps = Sbp | Sequence[Sbp]
"""One sbp for each axis of a placement; for a placement of one axis, the sbp alone."""

broadcast = Replicate()
partial_sum = Partial()


def split(dim: int) -> Shard:
    """Returns the sbp of a tensor cut along ``dim``; a negative ``dim`` counts from the last.

    Raises: LayoutError: ``dim`` is not an integer.

    >>> sbp_text((split(0), broadcast))
    '(split(0), broadcast)'
    """
    if isinstance(dim, bool) or not isinstance(dim, SupportsIndex):
        raise LayoutError("not a dim", given=f"split({dim!r})", allowed="whole numbers", fix="write split(0)")
    return Shard(index(dim))


def is_split(one: object) -> TypeGuard[Shard]:
    """Returns whether ``one`` is a split, that is, an instance of torch's ``Shard`` and not of a subclass."""
    return type(one) is Shard


def sbp_text(sbp: Sequence[Sbp]) -> str:
    """Returns an sbp as a user writes it, such as ``(split(0), broadcast)``; for a single axis without parentheses."""
    words = [
        f"split({one.dim})" if isinstance(one, Shard) else "broadcast" if isinstance(one, Replicate) else "partial_sum"
        for one in sbp
    ]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


def checked_sbp(sbp: Sbps, placement: Placement, num_dims: int) -> tuple[Sbp, ...]:
    """Returns an sbp as a tuple with one entry for each axis of the placement, in which no dim is negative.

    A negative dim in ``sbp`` counts from the last. ``num_dims`` is the number of dims of the tensor.

    Raises: LayoutError: a wrong number of entries, a dim that the tensor lacks, or an entry that is not split,
        broadcast or partial sum.

    >>> from shardwright.global_tensor import placement
    >>> checked_sbp(split(-1), placement("cpu", [0, 1]), 2)
    (Shard(dim=1),)
    """
    entries = (sbp,) if isinstance(sbp, Sbp) or not isinstance(sbp, Sequence) else tuple(sbp)
    if len(entries) != placement.ndim:
        raise LayoutError(
            "one sbp is needed for each axis of the placement",
            given=f"{len(entries)} for {placement}, which has {placement.ndim}: {sbp!r}",
            allowed=f"{placement.ndim}",
            fix=f"write ({', '.join(['broadcast'] * placement.ndim)},) and change the axes that cut the tensor",
        )
    return tuple(_checked(one, num_dims) for one in entries)


def checked_grad_sbp(sbp: Sbps, tensor_sbp: Sequence[Sbp], placement: Placement, num_dims: int) -> tuple[Sbp, ...]:
    """Returns the sbp of a local tensor's gradient as a tuple without negative dims, as :func:`checked_sbp` does.

    ``tensor_sbp`` is the sbp of the tensor. The gradient must be split along the same axes and dims, since it has the
    shape of the local tensor.

    Raises: LayoutError: as :func:`checked_sbp`, or a gradient that is split differently.
    """
    grad_sbp = checked_sbp(sbp, placement, num_dims)
    if any(one != mine and (is_split(one) or is_split(mine)) for one, mine in zip(grad_sbp, tensor_sbp, strict=True)):
        whole = sbp_text([one if is_split(one) else broadcast for one in tensor_sbp])
        raise LayoutError(
            "the gradient of a rank's own part has another shape than the part",
            given=f"{sbp_text(grad_sbp)}, for a part of {sbp_text(tensor_sbp)}",
            allowed=f"{whole}; partial_sum for broadcast",
            fix=f"leave it out, or write {whole}; x.to_global(grad_sbp=...) takes any",
        )
    return grad_sbp


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
