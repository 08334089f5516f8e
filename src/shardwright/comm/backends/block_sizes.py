"""The bookkeeping of the shared-memory blocks that carry a rank's messages: their sizes, reuse and total bytes.

Real runs use it, and so does the prediction of a rank's memory, which allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable

INLINE_BYTES = 4096
"""Messages up to this size are sent through the socket and use no block of shared memory."""

_LEAST_BLOCK_BYTES = 2**16
_PAGE_BYTES = 4096


class Blocks:
    """The bookkeeping of a rank's shared-memory blocks: their sizes, which are free, and how many readers each awaits.

    It chooses a block for each message, and allocates no memory itself.

    >>> blocks = Blocks()
    >>> first, second = blocks.take(100_000, readers=1), blocks.take(70_000, readers=1)
    >>> blocks.release(first)
    >>> blocks.take(90_000, readers=1) == first, blocks.sizes, blocks.num_bytes
    (True, [131072, 131072], 176128)

    A block is reused when all its readers have released it, and its memory is never given back. Which block is free
    depends on when its readers release it, so any block may come to carry the largest message for blocks of its size.
    With ``at_most``, :attr:`num_bytes` assumes that every block has carried the largest message of its size: an upper
    bound, which predictions use.
    """

    def __init__(self, *, at_most: bool = False) -> None:
        self.at_most = at_most
        self.sizes: list[int] = []
        self._used: list[int] = []
        self._free: dict[int, list[int]] = {}
        self._unread: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """The memory of all blocks in bytes: pages filled by messages so far, or with ``at_most`` an upper bound."""
        filled = self._used
        if self.at_most:
            by_size: dict[int, int] = {}
            for size, used in zip(self.sizes, filled, strict=True):
                by_size[size] = max(used, by_size.get(size, 0))
            filled = [by_size[size] for size in self.sizes]
        return sum(-(-used // _PAGE_BYTES) * _PAGE_BYTES for used in filled)

    def take(self, num_bytes: int, readers: int, listen: Callable[[], object] = lambda: None) -> int:
        """Reserves a block for a message of ``num_bytes`` bytes, and returns the block's index.

        It is a free block, or else a new one. Its size is the next power of two, at least 64 KiB. It is free again when
        ``readers`` ranks have released it. ``listen`` is called if no block is free, to let releases come in.
        """
        size = max(_LEAST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        if not self._free.get(size):
            listen()
        if self._free.get(size):
            place = self._free[size].pop()
        else:
            place = len(self.sizes)
            self.sizes.append(size)
            self._used.append(0)
        self._used[place] = max(self._used[place], num_bytes)
        self._unread[place] = readers
        return place

    def hold(self, place: int) -> None:
        """Adds one to the number of readers that must release block number ``place`` before it is reused."""
        self._unread[place] += 1

    def release(self, place: int) -> None:
        """Counts one reader of block number ``place`` as done; after the last one, the block can be reused."""
        self._unread[place] -= 1
        if not self._unread[place]:
            self._free.setdefault(self.sizes[place], []).append(place)
