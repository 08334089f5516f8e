"""Copies tensors between an accelerator and pinned host memory on a separate stream, overlapping the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright import devices

T = TypeVar("T")
Made = TypeVar("Made")


def host_arrival(device: torch.device) -> Callable[[], None]:
    """Returns a function that blocks the host until all work queued so far on the current stream is done.

    For a device that is the host itself the function does nothing.
    """
    if device.type in devices.HOST:
        return lambda: None
    wait: Callable[[], None] = devices.module_of(device).current_stream().record_event().synchronize
    return wait


class CopyStream:
    """A stream of an accelerator on which copies overlap the computation, in the order in which they are started.

    The source of a copy is kept in memory at least until the copy is over. With ``most_under_way`` the current stream
    waits for the oldest copy as soon as more copies than that are under way, so that sources do not fill the device
    while the host queues work far ahead.
    """

    def __init__(self, device: torch.device, most_under_way: int | None = None) -> None:
        self._most = most_under_way
        self._module = devices.module_of(device)
        self._stream = self._module.Stream(device)
        self._under_way: deque[tuple[Any, Tensor]] = deque()  # sources stay alive until their copies are over

    def start(self, to: Tensor, source: Tensor) -> None:
        """Starts copying ``source`` into ``to``, after the work that is queued on the current stream.

        The host does not wait. ``source`` is kept alive until the copy is over.
        """
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._under_way.append((self._stream.record_event(), source))
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        while self._most is not None and len(self._under_way) > self._most:
            event, _ = self._under_way.popleft()
            self._module.current_stream().wait_event(event)  # freed sources are reused only after the copy

    def wait(self) -> None:
        """Makes the current stream wait for all copies started so far; the host does not wait."""
        self._module.current_stream().wait_stream(self._stream)

    def arrival(self) -> Callable[[], None]:
        """Returns a function that makes the current stream, not the host, wait for the copies started so far."""
        event = self._stream.record_event()
        return lambda: self._module.current_stream().wait_event(event)

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Starts copying a tensor to ``device`` and returns the copy, which must not be used before it has arrived.

        To wait for it, call the function that a later :meth:`arrival` returns. The copy's memory is allocated on the
        current stream, so that it may be freed there. A tensor that is on an accelerator already is copied too, on the
        current stream, because the code that made it may write into it for the next batch.
        """
        if tensor.device.type != "cpu":
            return tensor.to(device, copy=True)
        copy = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
        # pinned tensors are copied too, because the loader may write the next batch into them
        self.start(copy, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor))
        return copy


def made_ahead(given: Iterable[T], make: Callable[[T], Made], copies: CopyStream) -> Iterator[Made]:
    """Yields ``make(each)`` for each item of ``given``, calling ``make`` one item ahead of the item that is yielded.

    So the copies that ``make`` starts on ``copies`` overlap the use of the item before. The current stream waits for
    them when their item is yielded, and for all copies when the generator ends or is closed. One more item is read from
    ``given`` than is yielded. An error of ``given`` or ``make`` is raised after all items made before it were yielded.
    """
    ahead: list[tuple[Made, Callable[[], None]]] = []
    iterator, failure = iter(given), None
    try:
        while failure is None:
            try:
                made = make(next(iterator))
            except StopIteration:
                break
            except Exception as error:  # raised later, after all batches before it
                failure = error
            else:
                ahead.append((made, copies.arrival()))
            if len(ahead) > 1:
                made, wait = ahead.pop(0)
                wait()
                yield made
        for made, wait in ahead:
            wait()
            yield made
    finally:
        copies.wait()  # if the caller stops early, a copy may still write into a batch made ahead, which is freed now
    if failure is not None:
        raise failure
