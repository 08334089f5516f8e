"""Memory of large messages, used again once nobody looks at it.

Fresh memory is mapped page by page while it is filled: a message of 4 MiB took 219 us in fresh memory and 88 us in
memory that had been used before (16 MiB 1,112 and 879; 1 MiB 27 and 23, which is not worth the asking; one core of a
shared machine). A buffer is free when the chunk's backward has dropped it, but that cannot be told from the schedule:
autograd, a module that keeps its input or a person's view may still look at it. So its storage is asked how many do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

LEAST_BYTES = 2 * 2**20
"""Messages of fewer bytes are received into fresh memory."""


@dataclass
class _Buffer:
    memory: Tensor
    idle: int
    was_used: bool = True


@dataclass
class ReceiveBuffers:
    """The memory of one stage's messages; what a list of actions did not use is let go of when the next begins.

    On a GPU all of it is fresh: torch's allocator there hands out again what was freed, and knows of streams.

    >>> buffers, what = ReceiveBuffers(), ((2**20,), torch.float32, torch.device("cpu"))
    >>> first, second = buffers.take(*what), buffers.take(*what)
    >>> view, place = first[1:], first.data_ptr()
    >>> del first
    >>> place == buffers.take(*what).data_ptr()  # the view still looks at it
    False
    >>> del view
    >>> place == buffers.take(*what).data_ptr()
    True
    """

    _kept: dict[tuple[tuple[int, ...], torch.dtype], list[_Buffer]] = field(default_factory=dict)

    def begin(self) -> None:
        """A list of actions begins."""
        for key, buffers in list(self._kept.items()):
            self._kept[key] = [buffer for buffer in buffers if buffer.was_used]
            if not self._kept[key]:
                del self._kept[key]
        for buffer in (each for buffers in self._kept.values() for each in buffers):
            buffer.was_used = False

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to fill, that nobody looks at."""
        shape = tuple(shape)
        if device.type == "cuda" or prod(shape) * dtype.itemsize < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        buffers = self._kept.setdefault((shape, dtype), [])
        for buffer in buffers:
            if _num_references(buffer.memory) == buffer.idle:
                buffer.was_used = True
                return buffer.memory.detach()
        memory = torch.empty(shape, dtype=dtype, device=device)
        buffers.append(_Buffer(memory, _num_references(memory)))
        return memory.detach()


def _num_references(tensor: Tensor) -> int:
    """How many tensors, in any thread and in autograd, lie in this one's storage."""
    number: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return number
