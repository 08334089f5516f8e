"""``Pending``: a collective or message that was started and whose result is waited for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from shardwright.comm.wait_times import waits

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """A collective or message under way, whose result ``wait`` returns.

    Until then, the caller must not read or change the call's tensors. ``finish`` is the function that waits and returns
    the result; the first ``wait`` calls it.
    """

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._result: Result
        self._axis = waits.axis

    def wait(self) -> Result:
        """Waits until the result of the collective or message can be used, and returns it; later calls return it again.

        Over NCCL, the device's current stream waits, and not the host. The ``wait`` of a send does not wait for the
        receiver.

        Raises: CommunicationError: another rank has ended, is too late or makes a different call, where the backend
            can find that out.
        """
        if self._finish is not None:
            self._result = self._finish() if waits.seconds is None else waits.timed(self._axis, self._finish)
            self._finish = None
        return self._result


def done(result: Result) -> Pending[Result]:
    """Returns a :class:`Pending` whose ``wait`` returns ``result`` at once, for a call that need not send anything."""
    return Pending(lambda: result)
