"""Tags a local tensor with the sharding of its whole tensor: for each cut dim, the rank that holds each index.

::

    the output of a fused q, k, v layer, two heads of two features, on two ranks   labels 0 0 1 1 0 0 1 1 0 0 1 1
    the same with one key and one value head, which both ranks hold (*)            labels 0 0 1 1 * * * *
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Size, Tensor

ALL = 255
"""The label of an index whose elements every rank holds."""

_NAME = "_shardwright_shard"


class TensorShard:
    """The sharding of a whole tensor over the ranks of one axis, which are numbered by their index on that axis.

    Create it with :func:`shard_of`, which caches shards: two shards are equal only if they are the same object.

    Args:
        shape: the shape of the whole tensor.
        cuts: for each dim, the rank that holds each index, as bytes (``ALL`` for every rank), or None for a whole dim.

    >>> shard = shard_of((4, 6), (None, bytes([0, 0, 1, 1, ALL, ALL])))
    >>> shard.local_shape(0), shard.held(1, rank=1)
    ((4, 4), (2, 3, 4, 5))
    """

    __slots__ = ("cuts", "shape")

    def __init__(self, shape: tuple[int, ...], cuts: tuple[bytes | None, ...]) -> None:
        self.shape, self.cuts = Size(shape), cuts

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's local tensor."""
        return _local_shape(self, rank)

    def held(self, dim: int, rank: int) -> tuple[int, ...]:
        """Returns the indices of dim ``dim``, which must be a cut one, that a rank holds."""
        cut = self.cuts[dim]
        assert cut is not None, "the dim is cut"
        return held(cut, rank)


@lru_cache(maxsize=4096)
def _local_shape(shard: TensorShard, rank: int) -> tuple[int, ...]:
    return tuple(
        size if cut is None else num_held(cut, rank) for size, cut in zip(shard.shape, shard.cuts, strict=True)
    )


@lru_cache(maxsize=4096)
def _shard(shape: tuple[int, ...], cuts: tuple[bytes | None, ...]) -> TensorShard:
    return TensorShard(shape, cuts)


def shard_of(shape: Sequence[int], cuts: Sequence[bytes | None]) -> TensorShard | None:
    """Returns the :class:`TensorShard` of a tensor of ``shape``, or None if every dim is whole.

    ``cuts`` has an entry for each dim: None for a whole dim, else one byte for each index, which names the rank that
    holds it, or is ``ALL``. Equal arguments give the same object while it is cached (the last 4096 are).
    """
    return _shard(tuple(shape), tuple(cuts)) if any(cut is not None for cut in cuts) else None


def num_held(cut: bytes, rank: int) -> int:
    """Returns the number of indices of a dim that a rank holds.

    ``cut`` has one byte for each index: the rank that holds the index, or ``ALL``.
    """
    return cut.count(rank) + cut.count(ALL)


@lru_cache(maxsize=1024)
def held(cut: bytes, rank: int) -> tuple[int, ...]:
    """Returns the indices of a dim that a rank holds, in order.

    ``cut`` has one byte for each index: the rank that holds the index, or ``ALL``.
    """
    return tuple(index for index, label in enumerate(cut) if label in (rank, ALL))


@lru_cache(maxsize=64)
def is_in_blocks(cut: bytes, size: int) -> bool:
    """Returns whether each rank holds some of a dim's elements, next to each other and after those of the rank before.

    >>> is_in_blocks(bytes([0, 0, 1]), 2), is_in_blocks(bytes([0, 1, 0]), 2), is_in_blocks(bytes([0, 0, 0]), 2)
    (True, False, False)
    """
    return bytes(sorted(cut)) == cut and len(set(cut)) == size and ALL not in cut


def tag(tensor: Tensor, shard: TensorShard | None) -> None:
    """Marks a local tensor as a shard of a whole tensor, cut as ``shard`` says; None removes the mark."""
    if shard is not None:
        tensor.__dict__[_NAME] = shard
    else:
        tensor.__dict__.pop(_NAME, None)


def tagged(tensor: Tensor) -> TensorShard | None:
    """Returns the :class:`TensorShard` that :func:`tag` gave a local tensor, or None for a tensor that is whole.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> tag(x, shard_of((2, 6), (None, bytes([0, 0, 0, 1, 1, 1]))))
    >>> tagged(x).shape, tagged(torch.ones(1))
    (torch.Size([2, 6]), None)
    """
    shard: TensorShard | None = tensor.__dict__.get(_NAME)
    return shard
