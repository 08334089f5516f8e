"""Guesses what a mistyped layout line was meant to be, so that an error can propose a line that keeps what was asked.

tp2dp2, fsdp4          words that run together, words of other libraries     tp2 dp2, dp4/zero3
dp2 tp2 zero3          an option that stands alone                           dp2/zero3 tp2
tp=2,dp=2  2dp  dp 2   a size written otherwise                              tp2 dp2, dp2, dp2
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardwright.axes import MAX_SIZE, OPTIONS, layout_axes

_LINE_WORDS = {
    **dict.fromkeys(("mb", "mbs", "microbatch", "microbatches", "accum", "accumulation", "ga", "gas", "grad"), "mb"),
    **dict.fromkeys(("bf", "bfloat", "amp"), "bf16"),
    **dict.fromkeys(("half",), "fp16"),
    **dict.fromkeys(("recompute", "checkpoint", "checkpointing", "ac", "gc", "activation"), "recompute:full"),
    **dict.fromkeys(("compile", "compiled", "inductor"), "compile"),
    **dict.fromkeys(("single", "none", "fp", "float"), ""),
}
"""Words that name no axis, each with the item of a layout line that it means; "" if a line has no such item."""

_WORD = re.compile("([a-z][a-z_-]*)[=:_-]*([0-9]+(?:x[0-9]+)*)?")
_NUMBER = re.compile("([0-9]+(?:x[0-9]+)*)-?([a-z_]*)")
_ENDINGS = re.compile("[_-]?(size|parallel|parallelism|degree|world|num|steps)$")


class _Word(NamedTuple):
    """A word of a mistyped line, with the number written behind it; an option has no number."""

    name: str
    number: str = ""


def meant(items: Sequence[str], nearest_item: Callable[[str], str], own: str) -> list[str]:
    """Returns the items that those of a line were probably meant to be; what has no meaning here is left out.

    ``nearest_item`` returns an item as it stands if it can be read, the nearest that can, or "" for none. ``own`` is
    the name of the one option that ``mb`` has. An option that stands alone goes to the factor of its axis.

    >>> meant("tp2dp2 zero-3".split(), lambda item: "", "own-statistics")
    ['tp2', 'dp2/zero3']
    >>> meant("dp2/zero 3 tp2".split(), lambda item: item, "own-statistics")
    ['dp2/zero3', 'tp2']
    """
    by_axis: dict[str, str] = {}  # items by their axis; those of no axis, such as bf16, by themselves
    strays: list[tuple[str, str, str]] = []
    words = list(_joined(items, nearest_item))
    for place, word in enumerate(words):
        if isinstance(word, str):
            axis = "".join(re.findall("^[a-z]+(?=[0-9])", word))
            by_axis.setdefault(axis if axis in layout_axes() else word, word)
            continue
        axis, option, number = _meaning(word)
        if axis in layout_axes() and not option:
            by_axis.setdefault(axis, f"{axis}{number or 4}")
        elif axis in layout_axes():
            strays.append((axis, option, number))
        elif axis == "mb":
            digits = (number.partition("x")[0] or "4").lstrip("0")[:8] or "0"
            after = words[place + 1 : place + 2]
            suffix = f"/{own}" if any(isinstance(entry, _Word) and entry.name in own for entry in after) else ""
            by_axis.setdefault(axis, f"mb{min(max(int(digits), 1), MAX_SIZE)}{suffix}")
        elif axis:
            by_axis.setdefault(axis, axis)
    for axis, option, number in strays:
        item = by_axis.get(axis, f"{axis}{number or (2 if by_axis else 4)}")
        by_axis[axis] = item if f"/{option}" in item else f"{item}/{option}"
    return list(by_axis.values())


def _joined(items: Sequence[str], nearest_item: Callable[[str], str]) -> Iterator[str | _Word]:
    """Yields valid items as they are, and others as words; a number that stands alone belongs to the word before."""
    last: _Word | None = None
    whole: list[str] = []
    for item in items:  # joins a number to an option from which a space has split it, as in "dp2/zero 3"
        if item.isdigit() and whole and "/" in whole[-1] and _options(f"{whole[-1].rpartition('/')[2]}{item}"):
            whole[-1] += item
        else:
            whole.append(item)
    apart = [[item] if nearest_item(item) == item else re.split("[,;+&]", item) for item in whole]
    for item in (part for parts in apart for part in parts):
        for word in [item] if nearest_item(item) else _words(item.lower()):
            alone = isinstance(word, _Word) and not word.name
            if last is not None and not last.number and alone and not _options(last.name):
                last = last._replace(number=word.number)  # type: ignore[union-attr]
                continue
            if last is not None:
                yield last
            last = word if isinstance(word, _Word) else None
            if last is None:
                yield word
    if last is not None:
        yield last


def _words(text: str) -> Iterator[_Word]:
    known = {name for _, names in OPTIONS.values() for name in names} - {"file"}  # file is no option without a path
    longest_first = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    option = re.compile(rf"({longest_first or '$.'})(:[^/\s]+)?(?![a-z0-9])")
    place = 0
    while place < len(text):
        if match := option.match(text, place):
            yield _Word(match[0])
        elif match := _WORD.match(text, place):
            yield _Word(match[1].strip("_-"), match[2] or "")
        elif match := _NUMBER.match(text, place):
            yield _Word(match[2].strip("_"), match[1])
        place = match.end() if match else place + 1


def _options(name: str) -> list[str]:
    """Returns the axes that have an option of this name; none for ``file``, which needs a path."""
    return [axis for axis, names in OPTIONS.values() if name != "file" and name.partition(":")[0] in names]


def _edits(word: str, other: str) -> int:
    """Returns how many letters were left out, added, replaced or swapped with the next to make one word of the other.

    :func:`~shardwright.errors.nearest` compares by the share of equal letters instead. That is fast for thousands of
    names of modules, but cannot tell apart the words of a layout line, since many have only two or three letters.

    >>> _edits("pd", "dp"), _edits("pd", "pp"), _edits("zreo", "zero"), _edits("pipline", "pipe")
    (1, 1, 1, 3)
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        earlier, before, row = before, row, [i]
        for j, other_letter in enumerate(other, 1):
            swapped = i > 1 < j and word[i - 2] == other_letter and letter == other[j - 2]
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other_letter)))
            if swapped:
                row[-1] = min(row[-1], earlier[j - 2] + 1)
    return row[-1]


def _meaning(word: _Word) -> tuple[str, str, str]:
    """Returns the axis or item that a word means, the option, and the size; the item is "" for no meaning."""
    name, number = word
    for text in (f"{name}{number}", name):
        for axis in _options(text):
            return axis, text, number if text == name else ""
    plain = _ENDINGS.sub("", _ENDINGS.sub("", name))
    aliases = {
        alias: (axis.name, options)
        for axis in layout_axes().values()
        for alias, options in {axis.name: "", axis.keyword: "", **axis.also}.items()
        if alias
    }
    if not name:
        return next(iter(axis.name for axis in layout_axes().values() if axis.kind == "copies"), ""), "", number
    if name in ("fp", "float") and sorted(number) == ["1", "6"]:
        return "fp16", "", ""
    options = {option_name: axis for axis, names in OPTIONS.values() for option_name in names if option_name != "file"}
    table = [*layout_axes(), *_LINE_WORDS, *options, *aliases]  # of equally near words the first counts: our own

    def distance(word: str) -> tuple[int, bool, bool]:
        return _edits(plain[:20], word), sorted(word) != sorted(plain), word[:1] != plain[:1]

    near = min(table, key=distance)
    # a short word with a number behind it is taken for a typing error, and one without a number for another word
    most = max(1, len(plain) // 3) if number else len(plain) // 3
    alike = [near] if set(plain) & set(near) and distance(near)[0] <= most else []
    for candidate in (name, plain, *re.split("[_-]", plain)[:1], *alike):
        if candidate in aliases:
            axis, option = aliases[candidate]
            used = "{" in option
            return axis, re.sub(r"\{(\w+)\}", number or r"\1", option), "" if used else number
        if candidate in options:
            return options[candidate], candidate, ""
        if candidate in _LINE_WORDS:
            return _LINE_WORDS[candidate], "", number
    return "", "", ""
