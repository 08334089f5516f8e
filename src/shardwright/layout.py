"""Parses and prints the layout line, in which a user describes how a run is parallelized, in one canonical form.

    pp2/1f1b mb8 dp2/zero1 tp2x2/2d bf16
    |   |    |   |         |   |    +-- a word: mbN, mbN/own-statistics, bf16, fp16, recompute:..., compile
    |   |    |   |         |   +------- an option of its axis
    |   |    |   |         +----------- an axis and its size; a grid has two or three numbers

Items may be given in any order, and are printed in this one: pp, mb, dp, cp, tp, precision, recompute, compile. The
files of the strategies declare the axes with their sizes (:mod:`shardwright.axes`), and the options of each axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias, get_args

from shardwright.axes import MAX_SIZE, LayoutAxis, MisfitError, layout_axes
from shardwright.errors import LayoutError, fix_for, nearest
from shardwright.layout_guess import meant
from shardwright.mesh import Mesh

Precision = Literal["fp32", "bf16", "fp16"]
"""The dtype in which the operators compute."""

COMPILERS = ("inductor", "aot_eager")
"""The backends of ``torch.compile`` for blocks, the default first.

``aot_eager`` traces the code and runs it unchanged.
"""

OWN = "own-statistics"
_WORDS = f"mbN mbN/{OWN} bf16 fp16 recompute:full|selective|offload|PATTERN compile"
_SIZED = re.compile(r"([a-z]+)([0-9]+(?:x[0-9]+){0,2})((?:/.*)?)")
_OPTION = re.compile(r"file:\S+|[a-z0-9.-]+(?::[^/\s]+)?")
_OPTIONS = "name or name:value; names of a-z, 0-9, '.' and '-'; no spaces, and '/' only behind file:"
_TOP = {
    "microbatches": (str, int),
    "precision": (str,),
    "recompute": (str,),
    "compile": (str,),
}  # the keys of a layout given as a dictionary that are no axes, with the types of their values
_Canonical: TypeAlias = "tuple[tuple[int, ...], tuple[Option, ...]]"


class _ItemError(Exception):
    """Raised for an item of a layout line, with the problem, the allowed items, and the nearest valid item or ""."""


def _error(what: str, given: object, allowed: str, fix: str) -> LayoutError:
    shown = "a huge number"
    with suppress(ValueError):  # an integer may have more digits than Python prints
        shown = f"{given!r:.100}"
    return LayoutError(what, given=shown, allowed=allowed, fix=fix)


def _check_among(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        fix = fix_for(value if isinstance(value, str) else "", known)
        raise _error(f"no such {name}", value, ", ".join(known), fix)


def _is_value(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\S+", value) is not None


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_SIZE


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an axis in a layout line, written ``/name`` or ``/name:value`` behind the axis, such as ``/zero3``.

    The strategies of the axis define which options exist; this class checks only how they are written.

    Raises: LayoutError: the name or the value is malformed; only the option ``file`` may have a ``/`` in its value.

    >>> str(Option("interleaved", "v2")), str(Option("zero3"))
    ('interleaved:v2', 'zero3')
    """

    name: str
    value: str | None = None

    def __post_init__(self) -> None:
        typed = isinstance(self.name, str) and isinstance(self.value, str | None)
        if not typed or ":" in self.name or not _OPTION.fullmatch(str(self)):
            raise _error("an option is not well formed", self, _OPTIONS, "write zero3, or offload:disk")

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}:{self.value}"


@dataclass(frozen=True, slots=True)
class Factor:
    """One axis of a layout with its sizes and options, such as ``dp2x4/zero3``, in canonical form.

    A tensor-parallel grid given only as a number of ranks gets its sides, as equal as possible: ``tp8/2d`` becomes
    ``tp2x4/2d``. Options are sorted: first those without a value (names with a digit before others), then those with a
    value, and ``file`` last.

    Raises: LayoutError: the axis is unknown, the sizes do not fit it or its grid, or an option is given twice.

    >>> str(Factor("tp", (8,), (Option("2.5d", "d2"),)))
    'tp2x2x2/2.5d'
    >>> factor = Factor("dp", (2, 4), (Option("zero3"),))
    >>> factor.size, factor.mesh_axes, factor.option("offload")
    (8, ('replica', 'dp'), None)
    """

    axis: str
    sizes: tuple[int, ...]
    options: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        try:
            sizes, options = _canonical(self.axis, tuple(self.sizes), tuple(self.options))
        except _ItemError as wrong:
            what, allowed, fix = wrong.args
            raise _error(what, self, allowed, fix or "write one of those allowed") from None
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "options", options)

    @property
    def size(self) -> int:
        """The number of ranks along the axis: the product of ``sizes``."""
        return prod(self.sizes)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes to which ``sizes`` belong, in the same order."""
        return layout_axes()[self.axis].mesh_axes[len(self.sizes) - 1]

    def option(self, name: str) -> Option | None:
        """Returns the option ``/name`` of this axis, or None if the layout does not give it."""
        return next((option for option in self.options if option.name == name), None)

    def __str__(self) -> str:
        return _item_text(self.axis, self.sizes, self.options)


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel layout of a run: sizes and options of each axis, microbatches, precision, recompute and compile.

    ``factors`` are sorted into the order pp, dp, cp, tp; ``parse(str(layout)) == layout``. ``recompute`` is the kind of
    activation checkpointing ("full", "selective", "offload" or a pattern of module names) or None, and ``compile`` is a
    backend of ``torch.compile`` or None. ``own_statistics`` lets BatchNorm take the statistics of each microbatch, not
    of the batch; with one microbatch it becomes False.

    Raises: LayoutError: an axis is given twice, or the line cannot express a value.

    >>> layout = Layout((Factor("tp", (4,)), Factor("dp", (2,), (Option("zero1"),))), precision="bf16")
    >>> str(layout), layout.num_ranks, str(layout.mesh)
    ('dp2/zero1 tp4 bf16', 8, 'dp=2 tp=4')
    >>> str(layout.factor("dp")), layout.factor("pp"), str(Layout())
    ('dp2/zero1', None, 'single')
    """

    factors: tuple[Factor, ...] = ()
    num_microbatches: int = 1
    precision: Precision = "fp32"
    recompute: str | None = None
    own_statistics: bool = False
    compile: str | None = None

    def __post_init__(self) -> None:
        order = tuple(sorted(self.factors, key=lambda factor: layout_axes()[factor.axis].order))
        if not isinstance(self.own_statistics, bool):
            raise _error("no such own_statistics", self.own_statistics, "True, False", "write False")
        object.__setattr__(self, "factors", order)
        once = {factor.axis: str(factor) for factor in reversed(order)}
        if len(once) < len(order):
            raise _error("an axis is given twice", str(self), "each once", " ".join(reversed(once.values())))
        if not _is_count(self.num_microbatches):
            raise _error("no such num_microbatches", self.num_microbatches, f"1 to {MAX_SIZE}", "write 8")
        object.__setattr__(self, "own_statistics", self.own_statistics and self.num_microbatches > 1)
        _check_among("precision", self.precision, get_args(Precision))
        if self.recompute is not None and not _is_value(self.recompute):
            raise _error("no such recompute", self.recompute, "full, selective, a pattern, None", "write full")
        if self.compile is not None:
            _check_among("compile", self.compile, COMPILERS)

    @classmethod
    def parse(cls, line: str) -> Layout:
        """Returns the layout that a line such as ``pp2 mb8 dp2/zero1`` describes; its items may be in any order.

        The line ``single`` is the layout of one rank. A line without ``mb`` has one microbatch.

        Raises: LayoutError: the line is not a valid layout; the error's text ends in the nearest line that is.

        >>> str(Layout.parse("bf16 tp8/2d  mb8 pp2/1f1b"))
        'pp2/1f1b mb8 tp2x4/2d bf16'
        >>> Layout.parse("tp2x2 dp4")
        Traceback (most recent call last):
        shardwright.errors.LayoutError: 'tp2x2': two or three numbers need a grid mode
          given:   'tp2x2 dp4'
          allowed: tp4 tp2x4/2d tp8/2d tp2x2x2/2.5d tp8/2.5d:d2 tp8/3d
          fix:     dp4 tp2x2/2d
        """
        items = line.split()
        layout, wrong = cls._read(items)
        if wrong is not None:
            raise _error(wrong[0], " ".join(items), wrong[1], str(nearest_line(items)))
        return layout

    @classmethod
    def _read(cls, items: Sequence[str]) -> tuple[Layout, tuple[str, str] | None]:
        """Reads the items and mends misspelled ones; returns the layout, and (message, allowed) of the first error.

        Items that cannot be mended are left out. Without an error, None is returned in its place.
        """
        values: dict[str, Any] = {}
        wrong = None if items else ("the line is empty", _items())
        for item in items if items != ["single"] else ():
            text = item
            for _ in range(5):  # fixing one error can uncover another
                try:
                    slot, value = _read_item(text)
                except _ItemError as problem:
                    what, allowed, text = problem.args
                    wrong = wrong or (f"{item[:56]!r}: {what}", allowed)
                    continue
                if slot in values:
                    wrong = wrong or (f"{item[:56]!r}: '{slot}' is given twice", "each item once")
                values.setdefault(slot, value)
                break
        number, own_statistics = values.pop("mb", (1, False))
        factors = tuple(values.pop(axis) for axis in layout_axes() if axis in values)
        return cls(factors, number, own_statistics=own_statistics, **values), wrong

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> Layout:
        """Returns the layout that a nested dictionary describes; it may also lie under one outer key ``parallel``.

        The keys ``data``, ``pipeline``, ``context`` and ``tensor`` each have a number of ranks, or a dictionary with
        ``size`` (4, or ``"2x4"`` as in a layout line) and ``options`` (``"sp"``, as in the line). That dictionary may
        also have: for data ``zero`` (the ZeRO stage; 0 is plain data parallel), for pipeline ``schedule`` and
        ``microbatches``, for tensor ``mode`` (1d, 2d, 2.5d, 3d) and ``depth``. The other keys are ``microbatches`` (8,
        or ``"8/own-statistics"``), ``precision``, ``recompute`` and ``compile`` (``"inductor"``). A value of ``None``
        counts as a missing key. An axis of size 1 is left out.

        Raises: LayoutError: an unknown key, a value of the wrong type, or an impossible layout.

        >>> tensor = {"size": 8, "mode": "2.5d", "depth": 2}
        >>> str(Layout.from_dict({"parallel": {"data": {"size": 4, "zero": 3}, "tensor": tensor}}))
        'dp4/zero3 tp2x2x2/2.5d'
        """
        if isinstance(mapping, Mapping) and "parallel" in mapping:
            mapping = _checked("the outer dictionary", mapping, {"parallel": (dict,)}).get("parallel", {})
        entries = {axis.keyword: axis for axis in layout_axes().values() if axis.keyword}
        top = _checked("the layout", mapping, {**dict.fromkeys(entries, (dict, int)), **_TOP})
        items = [item for name in entries if name in top for item in _items_of(entries[name], top[name])]
        items += [f"mb{top['microbatches']}"] if "microbatches" in top else []
        layout = cls.parse(" ".join(items) or "single")
        words = {word: top[word] for word in ("precision", "recompute", "compile") if word in top}
        return replace(layout, factors=tuple(factor for factor in layout.factors if factor.size > 1), **words)

    @property
    def mesh(self) -> Mesh:
        """The mesh (grid of ranks) of the layout; an axis that the layout gives the size 1 is kept."""
        return Mesh(**{a: n for f in self.factors for a, n in zip(f.mesh_axes, f.sizes, strict=True)})

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the layout needs."""
        return prod(factor.size for factor in self.factors)

    def factor(self, axis: str) -> Factor | None:
        """Returns the factor of ``axis`` (its sizes and options), or None if the layout does not name the axis."""
        return next((factor for factor in self.factors if factor.axis == axis), None)

    def chosen(self, axis: str) -> Factor:
        """Returns the factor of ``axis`` for a strategy that was chosen because the layout names this axis."""
        factor = self.factor(axis)
        assert factor is not None, f"chosen for a layout with {axis}"
        return factor

    def __str__(self) -> str:
        items = [str(factor) for factor in self.factors]
        items.insert(1 if self.factor("pp") else 0, f"mb{self.num_microbatches}" + f"/{OWN}" * self.own_statistics)
        items += [self.precision, f"recompute:{self.recompute}" if self.recompute else ""]
        items.append("" if self.compile is None else f"compile:{self.compile}".removesuffix(f":{COMPILERS[0]}"))
        return " ".join(item for item in items if item not in ("mb1", "fp32", "")) or "single"


def nearest_line(items: Sequence[str]) -> Layout:
    """Returns the layout that the items of a wrong line were probably meant to be, to propose it in an error.

    >>> str(nearest_line(["TP2", "fsdp2"])), str(nearest_line(["hello"]))
    ('dp2/zero3 tp2', 'single')
    """
    return Layout._read(meant(items, _nearest_item, OWN))[0]


def has_stages(layout: Layout) -> bool:
    """Returns whether a layout cuts the model into pipeline stages.

    >>> has_stages(Layout.parse("pp2 mb4 dp2")), has_stages(Layout.parse("dp2"))
    (True, False)
    """
    return any(layout_axes()[factor.axis].kind == "stages" for factor in layout.factors)


def _item_text(axis: str, sizes: Iterable[int], options: Iterable[Option]) -> str:
    return "/".join([axis + "x".join(map(str, sizes)), *map(str, options)])


def _canonical(axis: str, sizes: tuple[int, ...], options: tuple[Option, ...]) -> _Canonical:
    """Returns the canonical sizes and options of a factor; raises _ItemError with the nearest item that works."""
    if (declared := layout_axes().get(axis)) is None:
        alike = nearest(str(axis), layout_axes())
        raise _ItemError("no such axis", ", ".join(layout_axes()), f"{alike}4" if alike else "")
    first = {option.name: option for option in reversed(options)}  # of equal names, the first one given
    kept = tuple(option for option in options if first[option.name] is option)
    counts = [min(max(size, 1), MAX_SIZE) if isinstance(size, int) else 1 for size in sizes] or [1]
    most = len(declared.mesh_axes)
    fewer = [prod(counts[:-1]), counts[-1]] if most == 2 else [prod(counts)]  # the same ranks in fewer numbers
    for wrong, what, mended in (
        (prod(counts) > MAX_SIZE, f"'{axis}' has more than {MAX_SIZE} ranks", [MAX_SIZE]),
        (not sizes or not all(map(_is_count, sizes)), f"sizes are integers from 1 to {MAX_SIZE}", counts),
        (len(kept) < len(options), "an option is given twice", counts),
        (len(counts) > most, f"'{axis}' has too many numbers", fewer),
    ):
        if wrong:
            raise _ItemError(what, declared.sizes, _item_text(axis, mended, kept))
    try:
        sizes, settled = declared.settle(sizes, tuple((option.name, option.value) for option in kept))
    except MisfitError as misfit:
        shown = _item_text(axis, misfit.sizes, [Option(*pair) for pair in misfit.options])
        raise _ItemError(misfit.what, misfit.allowed or declared.sizes, shown) from None
    kept = tuple(Option(*pair) for pair in settled)
    # a name with a digit is nearly always the mode (zero3, 1f1b, 2d); file is last, to be read back
    keys = [(o.name == "file", o.value is not None, not re.search("[0-9]", o.name), o.name) for o in kept]
    return sizes, tuple(option for _, option in sorted(zip(keys, kept, strict=True)))


def _number(digits: str) -> int:
    """Returns the value of ``digits``, cut off above ``MAX_SIZE``, because Python refuses to parse very long ones."""
    return min(int(digits.lstrip("0")[:8] or "0"), MAX_SIZE + 1)


def _read_item(item: str) -> tuple[str, object]:
    """Returns the axis, or field of ``Layout``, that an item of the line sets, and its value."""
    if item in ("bf16", "fp16"):
        return "precision", item
    if match := re.fullmatch(f"mb([0-9]+)(/{OWN})?", item):
        if not _is_count(count := _number(match[1])):
            mended = f"mb{min(max(count, 1), MAX_SIZE)}{match[2] or ''}"
            raise _ItemError(f"microbatches are counted from 1 to {MAX_SIZE}", _items(), mended)
        return "mb", (count, match[2] is not None)
    if item.startswith("recompute:") and _is_value(item.removeprefix("recompute:")):
        return "recompute", item.removeprefix("recompute:")
    if item in ("compile", *(f"compile:{compiler}" for compiler in COMPILERS)):
        return "compile", item.partition(":")[2] or COMPILERS[0]
    if (match := _SIZED.fullmatch(item)) and match[1] in layout_axes():
        axis, numbers, rest = match.groups()
        texts = re.findall(r"/(file:.*|[^/]*)", rest)  # a path keeps its slashes
        parts = [text.partition(":") for text in texts]
        if not all(map(_OPTION.fullmatch, texts)):
            lower = [f"{name.lower()}{colon}{value}" for name, colon, value in parts]
            whole = all(_OPTION.fullmatch(text) for text in lower if text)  # if not, the item is searched for words
            fix = "/".join([axis + numbers, *filter(None, lower)]) if whole else ""
            raise _ItemError("an option is not well formed", _OPTIONS, fix)
        options = tuple(Option(name, value if colon else None) for name, colon, value in parts)
        return axis, Factor(axis, *_canonical(axis, tuple(map(_number, numbers.split("x"))), options))
    known = {"single": "it stands alone", "fp32": "it is what a line without bf16 or fp16 has"}
    raise _ItemError(known.get(item, "no such item"), _items(), "")


def _nearest_item(text: str) -> str:
    """Returns an item of a line as it stands if it can be read, the nearest that can, or "" if it is no item at all."""
    try:
        _read_item(text)
    except _ItemError as problem:
        return str(problem.args[2])
    return text


def _items() -> str:
    """Returns the items that a line may have, for error texts."""
    axes = " ".join(f"{axis}N" for axis in layout_axes())
    return f"single, or {axes} /options, {_WORDS}; N from 1"


def _checked(where: str, given: object, known: Mapping[str, Sequence[type]]) -> dict[str, Any]:
    """Returns the entries of ``given`` that are not None, after checks of keys and types; a bool is no integer."""
    if not isinstance(given, Mapping):
        raise _error(f"{where} is no dictionary", given, "keys " + ", ".join(known), 'write {"tensor": 4}')
    for key, value in given.items():
        _check_among(f"key in {where}", key, list(known))
        fits = {
            str: ("a text without spaces", _is_value(value)),
            dict: ("a dictionary", isinstance(value, Mapping)),
            int: (f"from 0 to {MAX_SIZE}", _is_count(value, 0)),
        }
        kinds = dict(fits[kind] for kind in known[key])
        if value is not None and not any(kinds.values()):
            raise _error(f"'{key}' in {where} cannot be this", value, " or ".join(kinds), f"change '{key}'")
    return {key: value for key, value in given.items() if value is not None}


def _items_of(axis: LayoutAxis, value: object) -> list[str]:
    """Returns the items of the line that the dictionary entry of an axis means."""
    keys = {"size": (str, int), "options": (str,), **axis.keys}
    entry = _checked(f"'{axis.keyword}'", value if isinstance(value, Mapping) else {"size": value}, keys)
    if "size" not in entry:
        raise _error(f"'{axis.keyword}' has no size", value, "a number of ranks", "add 'size'")
    words = [f"mb{entry['microbatches']}"] if "microbatches" in entry else []
    return ["/".join(filter(None, [f"{axis.name}{entry['size']}", *axis.written(entry)])), *words]
