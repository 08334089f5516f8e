"""Translates the cut of a tensor's dim into cuts of the dim letters (as in einsum) that make up the dim, and back.

A letter is an axis of a recorded run (``analysis/dims/run_axes.py``): a dim that a view has merged has several. A cut,
as in ``sharding/tensor_shard.py``, has a label for each index: the rank that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.analysis.dims.dim_letters import Concat, Dim, DimLetters
from shardwright.analysis.dims.run_axes import spread
from shardwright.sharding.tensor_shard import ALL


class LetterCutError(Exception):
    """Raised if the cut of a dim is not that of one of the indices (letters, as in einsum) that make up the dim.

    A dim of heads times features, for example, may be cut by heads or by features, but not by both.
    """


def letters_of(dim: Dim, cut: bytes, letters: DimLetters) -> dict[int, bytes]:
    """Returns how the letters (indices, as in einsum) that make up a dim are cut: the rank that holds each index.

    ``cut`` has the rank that holds each index of the dim. A letter that is not cut has no entry.

    Raises: LetterCutError: the cut of the dim is not a cut of one of its letters.

    >>> letters = DimLetters()
    >>> heads, size = letters.new(2), letters.new(3)
    >>> letters_of((*heads, *size), bytes([0, 0, 0, 1, 1, 1]), letters)
    {0: b'\\x00\\x01'}
    """
    if len(dim) == 1 and isinstance(dim[0], Concat):
        return _letters_of_parts(dim[0], cut, letters)
    sizes = [letters.size((part,)) for part in dim]
    for number, (letter, size) in enumerate(zip(dim, sizes, strict=True)):
        inside, outside = prod(sizes[number + 1 :]), prod(sizes[:number])
        labels = cut[: size * inside : inside]
        if not isinstance(letter, Concat) and spread(labels, inside, outside) == cut:
            return {letter: labels}
    raise LetterCutError


def _letters_of_parts(dim: Concat, cut: bytes, letters: DimLetters) -> dict[int, bytes]:
    by_letter: dict[int, bytes] = {}
    at = 0
    for part in dim.parts:
        size = letters.size(part)
        piece, at = cut[at : at + size], at + size
        if piece.count(ALL) < size:
            for letter, labels in letters_of(part, piece, letters).items():
                if by_letter.setdefault(letter, labels) != labels:
                    raise LetterCutError
    return by_letter


def cut_of(dim: Dim, labels: Mapping[int, bytes], letters: DimLetters) -> bytes | None:
    """Returns the rank that holds each index of a dim, or None if the dim is whole.

    ``labels`` has the same for each of the letters (indices, as in einsum) that is cut, by the letter's number.

    Raises: LetterCutError: several letters that make up the dim as a product are cut.
    """
    if len(dim) == 1 and isinstance(dim[0], Concat):
        parts = [(cut_of(part, labels, letters), letters.size(part)) for part in dim[0].parts]
        if all(cut is None for cut, _ in parts):
            return None
        return b"".join(bytes((ALL,)) * size if cut is None else cut for cut, size in parts)
    cuts = [cut_of((part,), labels, letters) if isinstance(part, Concat) else labels.get(part) for part in dim]
    numbers = [number for number, cut in enumerate(cuts) if cut is not None]
    if not numbers:
        return None
    number, cut = numbers[0], cuts[numbers[0]]
    if len(numbers) > 1 or cut is None:
        raise LetterCutError
    return spread(cut, letters.size(dim[number + 1 :]), letters.size(dim[:number]))
