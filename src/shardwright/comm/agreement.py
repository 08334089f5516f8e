"""Collectives that check whether all ranks have the same model, values or code, by an all-reduce of hashes.

A rank that builds another model, reads other code or makes calls in another order than its peers computes wrong
numbers, or waits for messages that never come. So ranks compare lines of text that describe what each rank has. A hash
(digest) of the lines is all-reduced, and only if the digests differ are the lines gathered, to name the first
difference::

    lines of each rank --digest--> all-reduce of two numbers --equal--> done
                                                             --differ--> gather_json of all lines --> Difference
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.comm.axis import Axis
from shardwright.comm.user_calls import call_of_user
from shardwright.errors import PlanError, aligned
from shardwright.tensor_bytes import bytes_of

_LEAST = torch.iinfo(torch.int64).min
_TOO_LONG = b"long"
_LENGTH_BITS, _CALL_BITS = 40, 22
_NAMES = "(the names of calls)"
_NUM_COLUMNS, _NUM_ROWS = 512, 64
"""The shape of the blocks by which ``tensor_digest`` sums its matrix: small enough for the processor's cache."""


def gather_json(axis: Axis, value: Any, room: int = 0) -> list[Any]:
    """All-gathers ``value`` as JSON text and returns every rank's value, in the order of the ranks on the axis.

    All ranks of the axis call it, with the same ``room``. This rank's own value is read from JSON too, so that a tuple
    comes back as a list. If all texts are shorter than ``room`` bytes, each rank sends one message of that size;
    ``room`` is 0, for no such message, or at least 4.

    The lengths carry a hash of the call of the library that user code has made, such as ``save``.

    Traffic: two all-gathers, of the texts' lengths and of the texts. With ``room``, one all-gather of ``room`` bytes
        from each rank, followed by the other two if any text is not shorter than that.
    Raises: PlanError, on every rank: ranks are in different calls of the library.

    >>> from shardwright import Mesh, run_on_threads
    >>> run_on_threads(Mesh(dp=2), lambda axes: gather_json(axes["dp"], {"rank": axes["dp"].index}))[0]
    [{'rank': 0}, {'rank': 1}]
    """
    text = json.dumps(value).encode()
    if room:
        padded = (text if len(text) < room else _TOO_LONG).ljust(room)
        texts = _gather_bytes(axis, padded, [room] * axis.size)
        if not any(rank_text.strip() == _TOO_LONG for rank_text in texts):
            return [json.loads(rank_text) for rank_text in texts]
    sizes = _gather_sizes(axis, text, call := call_of_user(sys._getframe()))
    if None in sizes:
        raise _different_calls(axis, call, sizes)
    return [json.loads(rank_text) for rank_text in _gather_bytes(axis, text, [size or 0 for size in sizes])]


def _gather_sizes(axis: Axis, text: bytes, call: str) -> list[int | None]:
    """All-gathers the length of ``text``; returns each rank's length, None for ranks in another call of the library."""
    tag = text_digest(call) % (1 << _CALL_BITS)
    numbers = axis.all_gather(torch.tensor([len(text) | tag << _LENGTH_BITS], device=axis.device)).tolist()
    return [number % (1 << _LENGTH_BITS) if number >> _LENGTH_BITS == tag else None for number in numbers]


def _different_calls(axis: Axis, call: str, sizes: Sequence[int | None]) -> PlanError:
    """Returns the error of ranks in different calls of the library, after they have exchanged the calls' names.

    A rank that made another kind of collective, such as a comparison of batches, sent no length. It does not take part
    in that exchange.
    """
    again = _gather_sizes(axis, name := call.encode(), _NAMES)
    if None in again:
        lines = [f"rank {axis.ranks[axis.index]}: {call}"]
        lines += [f"rank {rank}: another call" for rank, size in zip(axis.ranks, sizes, strict=True) if size is None]
    else:
        names = [text.decode() for text in _gather_bytes(axis, name, [size or 0 for size in again])]
        lines = [f"rank {rank}: {call_name}" for rank, call_name in zip(axis.ranks, names, strict=True)]
        call = names[0]
    return PlanError(
        "ranks make different calls",
        given=aligned(lines),
        allowed="the same calls in the same order on every rank",
        fix=f"{call}: call it on every rank, not under `if world.rank == 0`; what writes files writes them once",
    )


def _gather_bytes(axis: Axis, text: bytes, sizes: Sequence[int]) -> list[bytes]:
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(axis.device)
    return [bytes(part.tolist()) for part in axis.all_gather(own, sizes=sizes).cpu().split(list(sizes))]


def first_problem(axis: Axis, problem: str) -> tuple[int, str] | None:
    """All-gathers each rank's error text, and returns the first rank with a text, and that text; None if all are empty.

    The returned rank is its number in the run. An error that one rank alone raises leaves its peers waiting. So each
    rank catches its own error and passes the text here, ``""`` if there was none, and then the callers on all ranks
    raise together. Traffic: as :func:`gather_json` without ``room``.

    >>> from shardwright import Mesh, run_on_threads
    >>> run_on_threads(Mesh(dp=2), lambda axes: first_problem(axes["dp"], "disk full" if axes["dp"].index else ""))
    [(1, 'disk full'), (1, 'disk full')]
    """
    problems = zip(axis.ranks, gather_json(axis, problem), strict=True)
    return next(((rank, text) for rank, text in problems if text), None)


def text_digest(text: str) -> int:
    """Returns a 56-bit hash of a text, as an integer; the hash and its negative fit the int64 of an all-reduce.

    >>> text_digest("split(0)") == text_digest("split(0)") != text_digest("split(1)")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def tensor_digest(tensor: Tensor) -> str:
    """Returns a 48-bit hash of a tensor's bytes in order, as hexadecimal text; the shape and dtype do not count.

    It is made for large tensors. The bytes form a matrix of int64 with 512 columns; the column sums and the bytes that
    fill no row are hashed, and the row sums are digested in the same way, until they fill no row. A change of one
    number, or a swap of two different ones, always changes a sum or the bytes that are hashed themselves.

    >>> a, b = torch.arange(2000.0), torch.arange(2000.0)
    >>> b[[0, 1999]] = b[[1999, 0]]
    >>> tensor_digest(a) == tensor_digest(torch.arange(2000.0)) != tensor_digest(b)
    True
    """
    digest = hashlib.blake2b(digest_size=6)
    flat = bytes_of(tensor)
    while True:
        num_whole = len(flat) - len(flat) % (8 * _NUM_COLUMNS)
        digest.update(bytes(flat[num_whole:].tolist()))
        if not num_whole:
            return digest.hexdigest()
        columns, rows = _sums(flat[:num_whole])
        digest.update(bytes(columns.tolist()))
        flat = rows


def _sums(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, as bytes, the sums of the columns and of the rows of the matrix of int64 that ``flat`` is."""
    columns = torch.zeros(_NUM_COLUMNS, dtype=torch.int64, device=flat.device)
    rows = []
    for part in flat.split(8 * _NUM_COLUMNS * _NUM_ROWS):
        aligned = part if part.storage_offset() % 8 == 0 else part.clone()
        matrix = aligned.view(torch.int64).view(-1, _NUM_COLUMNS)
        columns += matrix.sum(0)
        rows.append(matrix.sum(1))
    return columns.view(torch.uint8), torch.cat(rows).view(torch.uint8)


class Difference(NamedTuple):
    """The first line in which the texts of two ranks differ, with both ranks and both lines.

    ``line`` is its number, counted from 1. ``rank`` and ``other`` are the ranks' numbers in the run, and ``text`` and
    ``other_text`` their lines; a line that a rank does not have is given as "nothing".
    """

    line: int
    rank: int
    text: str
    other: int
    other_text: str

    def __str__(self) -> str:
        return f"rank {self.rank} has '{self.text:.200}', rank {self.other} '{self.other_text:.200}'"


class PendingDifference(NamedTuple):
    """A comparison of the ranks' lines of text whose all-reduce has been started."""

    differs: Callable[[], Tensor]
    """Waits for the all-reduce, and returns a bool tensor of shape (): whether the lines of any ranks differ.

    The tensor is on the axis's device, so that the host can read the results of several comparisons at once.
    """

    find: Callable[[], Difference]
    """All-gathers all lines and returns the first difference.

    All members must call it, and only if the tensor that ``differs`` returns is true.
    """


def first_difference_async(
    axis: Axis, lines: Sequence[str], groups: Sequence[Sequence[int]] = ()
) -> Callable[[], Difference | None]:
    """Starts to compare the ranks' ``lines`` of text by all-reduce; the returned function waits for the result.

    That function returns the first :class:`Difference`, or None if all lines are equal. All members of the axis call
    this function and the returned one. With ``groups``, lists of ranks (numbered as in the run) in which each rank of
    the axis occurs once, lines must be equal only within each group, and every member gets the first difference that is
    found in any group. On the meta device, which has no values, nothing is compared.

    Traffic: one all-reduce, of two numbers per group; where lines differ, all lines are gathered too.

    >>> from shardwright import Mesh, run_on_threads
    >>> def compare(axes):
    ...     return str(first_difference_async(axes["pp"], ["same", f"member {axes['pp'].index}"])())
    >>> run_on_threads(Mesh(pp=2), compare)[1]
    "rank 0 has 'member 0', rank 1 'member 1'"
    """
    comparison = compare_async(axis, lines, groups)
    return lambda: comparison.find() if comparison is not None and bool(comparison.differs()) else None


def compare_async(axis: Axis, lines: Sequence[str], groups: Sequence[Sequence[int]] = ()) -> PendingDifference | None:
    """Starts to compare the ranks' ``lines`` of text, and returns the comparison, for its result to be read later.

    The comparison is that of :func:`first_difference_async`, but the result stays on the device, so that the host can
    read the results of several at once. All members call it. Returns None on an axis of one rank and on the meta
    device, where nothing is compared.
    """
    if axis.size == 1 or axis.device.type == "meta":
        return None
    # a maximum over (digest, -digest) gives the largest and the smallest digest of a group in one all-reduce
    groups = groups or [axis.ranks]
    mine, number = list(lines), text_digest("\n".join(lines))
    place = next(place for place, ranks in enumerate(groups) if axis.ranks[axis.index] in ranks)
    pairs = torch.full((2 * len(groups),), _LEAST, device=axis.device)
    for at, digest in enumerate((number, -number), 2 * place):
        pairs[at].fill_(digest)  # an assignment would make the host wait for an accelerator
    pending = axis.all_reduce_async(pairs, "max")

    def find() -> Difference:
        texts = dict(zip(axis.ranks, gather_json(axis, mine), strict=True))
        rank, other = next((ranks[0], rank) for ranks in groups for rank in ranks if texts[rank] != texts[ranks[0]])
        pairs_of_lines = enumerate(zip_longest(texts[rank], texts[other], fillvalue="nothing"), 1)
        line, (text, other_text) = next((line, pair) for line, pair in pairs_of_lines if pair[0] != pair[1])
        return Difference(line, rank, text, other, other_text)

    return PendingDifference(lambda: pending.wait().view(-1, 2).sum(1).any(), find)


def check_agreement(axis: Axis, lines: Sequence[str], error: Callable[[Difference], Exception]) -> None:
    """Raises ``error(difference)`` on every rank of the axis unless all ranks pass the same lines of text.

    ``difference`` is the first :class:`Difference`. On the meta device nothing is compared.

    Traffic: one all-reduce of two numbers; where lines differ, all lines are gathered too.

    >>> from shardwright import Mesh, run_on_threads
    >>> run_on_threads(Mesh(pp=2), lambda axes: check_agreement(axes["pp"], ["chunk 0: y = relu(x)"], PermissionError))
    [None, None]
    """
    if (difference := first_difference_async(axis, lines)()) is not None:
        raise error(difference)
