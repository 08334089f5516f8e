"""The global random generators of Python and NumPy: whether a forward draws from them, and whether that matters."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

_LOCK = Lock()
"""A lock that is held while a forward is recorded: ranks as threads share the generators of Python and NumPy."""

_START = 2**32 - 1_003
"""The seed from which records begin: one that no model is likely to seed the generators with itself."""

_NUM_STARTS = 8
"""The number of generator states, beside two extreme ones, with which a forward is recorded.

The records show whether the drawn numbers matter. With few states, code that chooses one of two things might by chance
choose the same one each time.
"""

_NUM_WORDS = 624
"""The words of 32 bits in the state of the Mersenne Twister, which Python and NumPy have."""


@contextmanager
def other_generators(start: int = 0) -> Iterator[dict[str, Any]]:
    """Returns a context that finds uses of the global generators of Python and NumPy, and restores their state.

    The generators are ``random`` and, if NumPy is already imported, ``numpy.random``; generator objects, such as those
    of ``numpy.random.default_rng``, are not watched. Inside, the generators start from a state that depends on
    ``start`` alone, and that no forward is likely to set: a forward that seeds a generator to the state that it has
    would not be noticed. The context yields a dict, which at the end has the state of each generator that was used
    inside, by name. One thread at a time is inside such a context; others wait.
    """
    numpy = sys.modules.get("numpy")
    fresh = random.Random(_START - start).getstate()
    with _begun_with(fresh, None if numpy is None else numpy.random.RandomState(_START - start).get_state()) as states:
        yield states


@contextmanager
def extreme_generators(*, high: bool) -> Iterator[None]:
    """Returns a context in which the first 624 numbers of the generators are nearly the least, or the greatest.

    Code that does something rarely, for example if a number is below 0.01, does it with the least or the greatest.

    >>> for high in (False, True):
    ...     with extreme_generators(high=high):
    ...         print(round(random.random(), 3), random.getrandbits(4))
    0.0 0
    1.0 15
    """
    drawn = random.Random(_START)
    outputs = [drawn.getrandbits(12) for _ in range(_NUM_WORDS)]
    words = [_before_output(2**32 - 1 - output if high else output) for output in outputs]
    numpy = sys.modules.get("numpy")
    numpys = None if numpy is None else ("MT19937", numpy.array(words, dtype=numpy.uint32), 0, 0, 0.0)
    with _begun_with((3, (*words, 0), None), numpys):
        yield


def every_start() -> Iterator[AbstractContextManager[Any]]:
    """Yields contexts in which the generators begin with other states: two extreme ones, and :data:`_NUM_STARTS` more.

    A result that is equal in all contexts does not depend on the drawn numbers. The chance of an error is 1 in 500, for
    a result that depends on a single choice between two things.
    """
    yield from (extreme_generators(high=high) for high in (False, True))
    yield from (other_generators(2 + start) for start in range(_NUM_STARTS))


@contextmanager
def _begun_with(state: Any, numpys: Any) -> Iterator[dict[str, Any]]:
    """Returns a context in which the generators begin with these states; its end restores their earlier states."""
    numpy: Any = sys.modules.get("numpy")
    states: dict[str, Any] = {}
    with _LOCK:
        before, numpys_before = random.getstate(), None if numpys is None else numpy.random.get_state()
        random.setstate(state)
        if numpys is not None:
            numpy.random.set_state(numpys)
        try:
            yield states
        finally:
            now = random.getstate()
            if now != state:
                states["Python's random"] = now
            if numpys is not None:
                numpys_now = _comparable(numpy.random.get_state())
                if numpys_now != _comparable(numpys):
                    states["numpy.random"] = numpys_now
                numpy.random.set_state(numpys_before)
            random.setstate(before)


def _comparable(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


def _before_output(word: int) -> int:
    """Returns the state word from which a Mersenne Twister makes the output ``word``: the inverse of its tempering."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    solution = word
    for _ in range(4):  # seven bits become known in each turn
        solution = word ^ ((solution << 7) & 0x9D2C5680)
    word = solution
    for _ in range(2):  # eleven bits
        solution = word ^ (solution >> 11)
    return solution
